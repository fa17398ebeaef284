"""HTML text to elements.

The parser is Lexbor (package selectolax). It follows the HTML standard, so it repairs bad markup
as browsers do, and it parses a page of the shop in well under a millisecond. html5lib is as correct
but slow; lxml parses HTML 4 and repairs markup in other ways than browsers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sixfold.errors import UserError

from .dom import Element, Text
from .forms import initial_state
from .style import apply_styles

_NOSCRIPT = re.compile(
    r"(?P<kept><!--.*?-->|<(?P<tag>script|style|textarea|title)\b.*?</(?P=tag)\b)"
    r"|<noscript\b[^>]*>.*?</noscript\s*>",
    re.DOTALL | re.IGNORECASE,
)

MOST_NODES = 20_000
"""Maximum number of nodes of a page. Both backends drop further nodes."""

MOST_DEPTH = 200
"""Maximum depth of nested elements. In both backends, deeper elements become siblings."""


_LONGEST_KEPT = 20_000
"""Maximum number of characters of a page that is kept. Episodes of a task load the same pages."""


def parse_page(html: str, sheets: Sequence[str] = ()) -> Element:
    """Parse a page. The result has the initial state of its forms and the visibility.

    Args:
        sheets: texts of its linked style sheets.

    Raises:
        UserError: if selectolax is not installed.
    """
    if sheets or len(html) > _LONGEST_KEPT:
        return _parse(html, sheets)
    return _parse_cached(html).copy()


@lru_cache(512)
def _parse_cached(html: str) -> Element:
    return _parse(html)


def _parse(html: str, sheets: Sequence[str] = ()) -> Element:
    """Parse a page. Arguments and errors as for `parse_page`."""
    document = _parser()(_without_noscript(html))
    root, elements = _convert(document.root)
    initial_state(root)
    apply_styles(document.root, root, elements, sheets)
    return root


def _without_noscript(html: str) -> str:
    """Remove the `noscript` elements of a page.

    Chromium parses their content as text. Lexbor parses it as elements, and may move them.
    """
    if "<noscript" not in html.lower():
        return html
    return _NOSCRIPT.sub(lambda m: m.group() if m.group("kept") else "", html)


@lru_cache(1)
def _parser() -> Any:
    try:
        from selectolax.lexbor import LexborHTMLParser
    except ImportError as error:
        raise UserError(
            "web environments need the package selectolax: pip install 'sixfold[web]'"
        ) from error
    return LexborHTMLParser


def _convert(source: Any) -> tuple[Element, dict[int, Element]]:
    """Convert a Lexbor tree. Returns the root, and the elements by the id of their node."""
    root, count = Element("html"), 0
    found: dict[int, Element] = {}
    stack: list[tuple[Any, Element | None, int]] = [(source, None, 0)]
    while stack and count < MOST_NODES:
        node, parent, depth = stack.pop()
        if node is None:
            continue
        count += 1
        if parent is not None:
            stack.append((node.next, parent, depth))
        tag = node.tag
        if tag == "-text":
            if parent is not None:
                parent.children.append(Text(node.text_content or ""))
        elif tag and tag[0] not in "-!":
            attributes = {name: value or "" for name, value in node.attributes.items()}
            made = Element(tag, attributes, parent=parent, key=node.mem_id)
            found[node.mem_id] = made
            if parent is None:
                root = made
            else:
                parent.children.append(made)
            below = made if depth < MOST_DEPTH or parent is None else parent
            stack.append((node.child, below, depth + 1))
    return root, found
