"""Which elements style sheets hide: `display: none` and `visibility: hidden`.

Only these two properties are computed, with the cascade of CSS: importance, specificity, order.
Media queries other than `all` and `screen` do not apply.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .dom import Element, words

_COMMENT = re.compile(r"/\*.*?(?:\*/|\Z)", re.DOTALL)
_MEDIA = re.compile(r"@media\s+(?:only\s+)?(?:all|screen)\s*$", re.IGNORECASE)
_STRINGS = re.compile(r"\"[^\"]*\"|'[^']*'|\[[^\]]*\]")
_IDS = re.compile(r"#[\w-]+")
_CLASSES = re.compile(r"\.[\w-]+|\[\]|(?<!:):(?!not\b|is\b|where\b)[\w-]+")
_TYPES = re.compile(r"(?:^|[\s>+~(,])[a-zA-Z][\w-]*|::[\w-]+")

NOT_SHOWN = words(
    "head script style template noscript title meta link base datalist area param rp source track"
    " noembed noframes"
)
"""Elements that browsers do not display."""


@dataclass(frozen=True)
class _Rule:
    """A declaration for the elements that a selector matches."""

    selector: str
    name: str
    value: str
    important: bool


def apply_styles(
    source: Any, root: Element, elements: Mapping[int, Element], sheets: Sequence[str]
) -> None:
    """Set `display` and `visible` of all elements.

    Args:
        source: Lexbor node of the root, which matches selectors.
        elements: elements by the id of their Lexbor nodes.
        sheets: texts of linked style sheets.
    """
    own = [e.text() for e in root.elements() if e.tag == "style"]
    rules = [rule for sheet in (*sheets, *own) for rule in _rules(sheet)]
    given: dict[int, dict[str, tuple[tuple[object, ...], str]]] = {}

    def give(key: int, name: str, value: str, weight: tuple[object, ...]) -> None:
        before = given.setdefault(key, {}).get(name)
        if before is None or weight >= before[0]:  # type: ignore[operator]
            given[key][name] = (weight, value)

    for rule in rules:
        for selector in _split(rule.selector, ","):
            for key in _matching(source, selector):
                give(key, rule.name, rule.value, (rule.important, 0, _specificity(selector)))
    for key, element in elements.items():
        if element.has("style"):
            for name, value, important in _declarations(element.get("style")):
                give(key, name, value, (important, 1, (0, 0, 0)))
    for element in root.elements():
        _show(element, {k: v for k, (_, v) in given.get(element.key, {}).items()})


def _show(element: Element, style: Mapping[str, str]) -> None:
    """Set `display` and `visible` of an element. Those of its parent must be set already."""
    display = style.get("display")
    if display is None or display in ("initial", "revert", "unset", "inherit"):
        element.display = not _hidden_by_browser(element)
    else:
        element.display = display != "none"
    inherited = element.parent is None or element.parent.visible
    visibility = style.get("visibility", "inherit")
    if visibility in ("visible", "initial"):
        element.visible = True
    elif visibility in ("hidden", "collapse"):
        element.visible = False
    else:
        element.visible = inherited


def _hidden_by_browser(element: Element) -> bool:
    """True if the browser's own style sheet hides an element."""
    closed = element.tag == "dialog" and not element.has("open")
    return (
        element.tag in NOT_SHOWN
        or element.has("hidden")
        or closed
        or (element.tag == "input" and element.kind == "hidden")
    )


def _matching(source: Any, selector: str) -> list[int]:
    """Keys of the elements that a selector matches. Empty for a selector that is not valid."""
    try:
        return [node.mem_id for node in source.css(selector)]
    except Exception:  # noqa: BLE001  boundary: browsers also skip rules that are not valid
        return []


def _rules(sheet: str) -> Iterator[_Rule]:
    """The declarations of `display` and `visibility` in a style sheet, in order."""
    text = _COMMENT.sub("", sheet)
    if "display" not in text and "visibility" not in text:
        return
    at = 0
    while (opening := text.find("{", at)) >= 0:
        head = text[at:opening].rpartition(";")[2].strip()
        closing = _closing(text, opening)
        body, at = text[opening + 1 : closing], closing + 1
        if head.startswith("@"):
            if _MEDIA.match(head):
                yield from _rules(body)
            continue
        for name, value, important in _declarations(body):
            yield _Rule(head, name, value, important)


def _closing(text: str, opening: int) -> int:
    """Index of the bracket that closes the one at `opening`, or the end of the text."""
    depth = 0
    for at in range(opening, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at
    return len(text)


def _declarations(body: str) -> Iterator[tuple[str, str, bool]]:
    """(name, value, important) of the declarations of `display` and `visibility`."""
    for declaration in _split(body, ";"):
        name, _, value = declaration.partition(":")
        parts = value.lower().replace("!", " !").replace("! important", "!important").split()
        if name.strip().lower() in ("display", "visibility") and parts:
            yield name.strip().lower(), parts[0], "!important" in parts


def _split(text: str, separator: str) -> list[str]:
    """Parts between separators that are not inside brackets."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "([") - (letter in ")]")
        if letter == separator and depth <= 0:
            parts.append(text[start:at])
            start = at + 1
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def _specificity(selector: str) -> tuple[int, int, int]:
    """Specificity of a selector: ids, classes, types. https://www.w3.org/TR/selectors-4/"""
    plain = _STRINGS.sub("[]", selector)
    return len(_IDS.findall(plain)), len(_CLASSES.findall(plain)), len(_TYPES.findall(plain))
