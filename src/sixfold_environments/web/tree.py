"""The observation of a page: its accessibility tree as lines of text.

    heading "Checkout"
    2 x green tin cup
    [1] textbox "Name" required
    [2] checkbox "Gift"
    [3] button "Place order"

Every element that an action can target has a number. A line of text that would look like an
element starts with a backslash.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from .dom import Document, Element, Text, collapse_spaces
from .forms import is_disabled, option_label, options_of
from .names import BLOCKS, CONTROLS, OPAQUE, Names, is_left_out, role_of, shown_children

NAME_CHARACTERS = 200
"""Maximum number of characters of a name or value."""

TEXT_CHARACTERS = 1000
"""Maximum number of characters of a line of text."""

OPTIONS = 50
"""Maximum number of options of a field that are shown."""

_TEXT_ROLES = frozenset({"textbox", "searchbox", "spinbutton", "slider", "color"})


@dataclass(frozen=True)
class Tree:
    """What the policy sees of a page.

    Attributes:
        controls: elements that actions can target. The first one has the number 1.
    """

    lines: tuple[str, ...]
    controls: tuple[Element, ...]


def tree_of(document: Document) -> Tree:
    walk = _Walk(Names(document))
    if document.status >= 400:
        walk.lines.append(f"status {document.status}")
    walk.visit(document.root)
    walk.flush()
    lines = walk.lines
    if (title := document.title) and title != walk.first_heading:
        lines.insert(0, f"page {quote_name(title)}")
    return Tree(tuple(lines), tuple(walk.controls))


def quote_name(text: str) -> str:
    """A name in quotation marks, on one line and not too long."""
    return json.dumps(_cut(collapse_spaces(text).strip(), NAME_CHARACTERS), ensure_ascii=False)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


@dataclass
class _Walk:
    """A walk over a page in document order.

    Attributes:
        text: parts of the unfinished line of text.
        first_heading: name of the first heading.
        silent: elements inside labels of visible fields. Their text appears as the field's name.
    """

    names: Names
    lines: list[str] = field(default_factory=list)
    controls: list[Element] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    first_heading: str = ""
    silent: set[Element] = field(init=False)

    def __post_init__(self) -> None:
        self.silent = set()
        for labelled, labels in self.names.labels.items():
            if self.names.labels_only(labelled) and labelled.visible and not _is_hidden(labelled):
                self.silent.update(e for label in labels for e in label.elements())

    def flush(self) -> None:
        text = _cut(collapse_spaces("".join(self.text)).strip(), TEXT_CHARACTERS)
        self.text.clear()
        if text:
            self.lines.append(f"\\{text}" if text[0] in "[\\" else text)

    def visit(self, top: Element) -> None:
        stack: list[Element | Text | str] = [top]
        while stack:
            node = stack.pop()
            if isinstance(node, str):
                self._break(node)
            elif isinstance(node, Text):
                self.text.append(node.text)
            elif not is_left_out(node):
                self._break(node.tag)
                stack.append(node.tag)
                stack.extend(reversed(self._below(node)))

    def _break(self, tag: str) -> None:
        """End the line of text at the edge of a block element."""
        if tag in ("td", "th"):
            self.text.append(" ")
        elif tag in BLOCKS:
            self.flush()

    def _below(self, element: Element) -> list[Element | Text]:
        """Add an element. Returns the children that remain to be added."""
        role = role_of(element) if element.visible else ""
        if role in CONTROLS:
            self._control(element, role)
            return []
        if role == "heading":
            return self._heading(element)
        if role == "img" or element.tag in OPAQUE:
            self._image(element)
            return []
        if element.tag in ("option", "optgroup"):
            return []
        children = shown_children(element)
        if element.tag in ("select", "textarea"):
            return []
        if not element.visible or element in self.silent:
            return [child for child in children if isinstance(child, Element)]
        return children

    def _heading(self, element: Element) -> list[Element | Text]:
        name = self.names.name(element)
        self.flush()
        if name:
            self.first_heading = self.first_heading or name
            self.lines.append(f"heading {quote_name(name)}")
        inside = (e for e in element.elements() if e is not element and role_of(e) in CONTROLS)
        return [e for e in inside if not _is_hidden(e)]

    def _image(self, element: Element) -> None:
        name = self.names.name(element) or element.get("aria-label").strip()
        if name:
            self.flush()
            self.lines.append(f"img {quote_name(name)}")

    def _control(self, element: Element, role: str) -> None:
        self.flush()
        self.controls.append(element)
        words = [f"[{len(self.controls)}]", role]
        if name := self.names.name(element):
            words.append(quote_name(name))
        self.lines.append(" ".join((*words, *_states(element, role))))


def _is_hidden(element: Element) -> bool:
    """True if an element is left out, or inside one that is, or inside closed details."""
    below = element
    if is_left_out(element):
        return True
    for above in element.ancestors():
        if is_left_out(above) or not any(child is below for child in shown_children(above)):
            return True
        below = above
    return False


def _states(element: Element, role: str) -> list[str]:
    """State of a control: its value and options, and flags such as `checked`."""
    states = []
    if element.tag == "select":
        options = [o for o in options_of(element) if o.display]
        chosen = [option_label(o) for o in options if o.selected]
        if chosen:
            states.append(f"value={', '.join(map(quote_name, chosen))}")
        shown = [quote_name(option_label(o)) for o in options[:OPTIONS] if not is_disabled(o)]
        more = ["…"] if len(options) > OPTIONS else []
        states.append(f"options={', '.join((*shown, *more))}")
    elif role in _TEXT_ROLES and element.tag in ("input", "textarea") and element.value:
        secret = element.tag == "input" and element.kind == "password"
        states.append(f"value={quote_name('•' * len(element.value) if secret else element.value)}")
    if element.checked or element.get("aria-checked") == "true":
        states.append("checked")
    if element.get("aria-selected") == "true":
        states.append("selected")
    if _is_expanded(element):
        states.append("expanded")
    if is_disabled(element):
        states.append("disabled")
    if element.has("readonly") and role in _TEXT_ROLES:
        states.append("readonly")
    if element.has("required") or element.get("aria-required") == "true":
        states.append("required")
    return states


def _is_expanded(element: Element) -> bool:
    """True for a summary whose details are shown, and for `aria-expanded`."""
    opened = element.tag == "summary" and element.parent is not None and element.parent.has("open")
    return opened or element.get("aria-expanded") == "true"
