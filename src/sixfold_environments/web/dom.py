"""Elements of a page, with the live state of its forms.

Both backends produce these nodes: the HTML backend by parsing, Chromium by a script that reads the
page. Names, roles and the observation are computed from them alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

SPACES = re.compile(r"[\t\n\f\r ]+")
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\u2028\u2029]")


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def collapse_spaces(text: str) -> str:
    """Text on one line: runs of white space become one space, control characters are removed."""
    return SPACES.sub(" ", _CONTROLS.sub("", text))


@dataclass(eq=False)
class Text:
    """A text node."""

    text: str


@dataclass(eq=False)
class Element:
    """An element.

    Attributes:
        tag: name in lower case.
        children: child nodes in order.
        parent: None for the root.
        value: live value of an input or a textarea.
        checked: live state of a checkbox or radio button.
        selected: live state of an option.
        display: False if the style is `display: none`.
        visible: False if the style is `visibility: hidden`. Descendants may be visible.
    """

    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list[Element | Text] = field(default_factory=list)
    parent: Element | None = None
    value: str = ""
    checked: bool = False
    selected: bool = False
    display: bool = True
    visible: bool = True
    key: int = -1

    def get(self, name: str) -> str:
        """An attribute, or "" if it is missing."""
        return self.attributes.get(name, "")

    def has(self, name: str) -> bool:
        """True if the attribute is present, even if it is empty."""
        return name in self.attributes

    @property
    def kind(self) -> str:
        """The type of an input or button, in lower case. "text" or "submit" if it is missing."""
        default = "submit" if self.tag == "button" else "text"
        given = self.get("type").strip().lower()
        known = BUTTON_TYPES if self.tag == "button" else INPUT_TYPES
        return given if given in known else default

    def elements(self) -> Iterator[Element]:
        """This element and its descendants, in document order."""
        stack = [self]
        while stack:
            element = stack.pop()
            yield element
            stack.extend(c for c in reversed(element.children) if isinstance(c, Element))

    def ancestors(self) -> Iterator[Element]:
        """Ancestors, nearest first."""
        above = self.parent
        while above is not None:
            yield above
            above = above.parent

    def copy(self) -> Element:
        """A copy of this element and its descendants, without the parent."""
        whole = replace(self, attributes=dict(self.attributes), children=[], parent=None)
        stack = [(self, whole)]
        while stack:
            source, made = stack.pop()
            for child in source.children:
                if isinstance(child, Text):
                    made.children.append(Text(child.text))
                    continue
                below = Element(
                    child.tag,
                    dict(child.attributes),
                    [],
                    made,
                    child.value,
                    child.checked,
                    child.selected,
                    child.display,
                    child.visible,
                    child.key,
                )
                made.children.append(below)
                if child.children:
                    stack.append((child, below))
        return whole

    def text(self) -> str:
        """All text of the descendants, as in `textContent`."""
        parts: list[str] = []
        stack: list[Element | Text] = [self]
        while stack:
            node = stack.pop()
            if isinstance(node, Text):
                parts.append(node.text)
            else:
                stack.extend(reversed(node.children))
        return "".join(parts)


BUTTON_TYPES = frozenset({"submit", "reset", "button"})

INPUT_TYPES = words(
    "hidden text search tel url email password date month week time datetime-local number range"
    " color checkbox radio file submit image reset button"
)

TYPED = words("text search tel url email password date month week time datetime-local number")
"""Input types that take typed text."""


@dataclass(eq=False)
class Document:
    """A page as the browser holds it.

    Attributes:
        root: the `html` element.
        status: HTTP status of the response.
        number: number of the page in the episode. It changes with every navigation.
        posted: True if the page answers a POST request, so it must not be requested again.
    """

    url: str
    root: Element
    status: int = 200
    number: int = 0
    posted: bool = False

    def by_id(self) -> dict[str, Element]:
        """Elements by id. If an id is repeated, the first element counts."""
        found: dict[str, Element] = {}
        for element in self.root.elements():
            if identity := element.get("id"):
                found.setdefault(identity, element)
        return found

    @property
    def title(self) -> str:
        """Text of the first title element."""
        for element in self.root.elements():
            if element.tag == "title" and not any(e.tag == "svg" for e in element.ancestors()):
                return collapse_spaces(element.text()).strip()
        return ""

    def base(self) -> str:
        """`href` of the first base element, or "". It is relative to the page's address."""
        for element in self.root.elements():
            if element.tag == "base" and element.has("href"):
                return element.get("href").strip()
        return ""
