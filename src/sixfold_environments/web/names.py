"""Roles and accessible names of elements.

Names follow https://www.w3.org/TR/accname-1.2/ and https://www.w3.org/TR/html-aam-1.0/. Text that
style sheets insert (`::before`) is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .dom import TYPED, Document, Element, Text, collapse_spaces, words
from .forms import is_listbox, option_label, options_of

BLOCKS = words(
    "address article aside blockquote body br caption center dd details dialog dir div dl dt"
    " fieldset figcaption figure footer form h1 h2 h3 h4 h5 h6 header hgroup hr html legend li main"
    " menu nav ol optgroup option p pre search section summary table tbody td tfoot th thead tr ul"
)
"""Elements that begin a new line, or a cell of a table."""

OPAQUE = words("audio canvas embed iframe math object picture svg video")
"""Elements whose content is not text of the page."""

_ROLES = {
    "button": "button",
    "textarea": "textbox",
    "summary": "summary",
    **{f"h{level}": "heading" for level in range(1, 7)},
}

_INPUT_ROLES = {
    **dict.fromkeys(TYPED, "textbox"),
    **dict.fromkeys(("submit", "image", "reset", "button"), "button"),
    "search": "searchbox",
    "number": "spinbutton",
    "checkbox": "checkbox",
    "radio": "radio",
    "range": "slider",
    "color": "color",
    "file": "file",
}

CONTROLS = words(
    "button checkbox color combobox file link listbox menuitem menuitemcheckbox menuitemradio"
    " option radio searchbox slider spinbutton summary switch tab textbox treeitem"
)
"""Roles of elements that an action can target."""

_GIVEN_ROLES = CONTROLS | {"heading", "img"}
"""Roles that are read from the attribute `role`. Others are ignored."""

_FROM_CONTENT = words(
    "button checkbox heading link menuitem menuitemcheckbox menuitemradio option radio summary"
    " switch tab treeitem"
)
"""Roles whose name may be their text."""

_DEFAULT_NAMES = {"submit": "Submit", "reset": "Reset", "image": "Submit"}

_LABELLED = frozenset({"input", "select", "textarea", "button"})


def role_of(element: Element) -> str:
    """Role of an element: that of a control, "heading", "img", or "" for anything else."""
    given = element.get("role").split()
    if given and given[0].lower() in _GIVEN_ROLES:
        return given[0].lower()
    tag = element.tag
    if tag in ("a", "area"):
        return "link" if element.has("href") else ""
    if tag == "input":
        return _INPUT_ROLES.get(element.kind, "")
    if tag == "select":
        return "listbox" if is_listbox(element) else "combobox"
    if tag == "img":
        return "" if given and given[0].lower() in ("none", "presentation") else "img"
    if tag == "summary" and not _is_handle(element):
        return ""
    return _ROLES.get(tag, "")


def _is_handle(summary: Element) -> bool:
    parent = summary.parent
    if parent is None or parent.tag != "details":
        return False
    first = (c for c in parent.children if isinstance(c, Element) and c.tag == "summary")
    return next(first, None) is summary


def is_left_out(element: Element) -> bool:
    """True if neither an element nor its descendants are part of the accessibility tree."""
    return not element.display or element.get("aria-hidden").strip().lower() == "true"


def shown_children(element: Element) -> list[Element | Text]:
    """Visible children. A closed details element shows only its summary."""
    if element.tag != "details" or element.has("open"):
        return element.children
    return [c for c in element.children if isinstance(c, Element) and _is_handle(c)]


@dataclass
class Names:
    """Accessible names of the elements of one page.

    Attributes:
        ids: elements by their id.
        labels: labels of each field, in document order.
    """

    document: Document
    ids: dict[str, Element] = field(init=False)
    labels: dict[Element, list[Element]] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = self.document.by_id()
        self.labels = {}
        for element in self.document.root.elements():
            if element.tag == "label":
                labelled = self._field_of_label(element)
                if labelled is not None:
                    self.labels.setdefault(labelled, []).append(element)

    def _field_of_label(self, label: Element) -> Element | None:
        """The field that a label belongs to."""
        if label.has("for"):
            found = self.ids.get(label.get("for"))
            return found if found is not None and _takes_label(found) else None
        return next((e for e in label.elements() if _takes_label(e)), None)

    def name(self, element: Element) -> str:
        """Accessible name of an element, on one line."""
        return collapse_spaces(self._name(element, frozenset(), False)).strip()

    def labels_only(self, element: Element) -> bool:
        """True if the name of a field comes from its labels alone."""
        own = self.labels.get(element, ())
        return bool(own) and not any(
            element.get(name).strip() for name in ("aria-labelledby", "aria-label")
        )

    def _name(self, element: Element, seen: frozenset[Element], referenced: bool) -> str:
        """Name of an element, for itself or as the target of `aria-labelledby`.

        Args:
            seen: elements whose names are being computed.
            referenced: the element is a target of `aria-labelledby`, which is then not followed.
        """
        if element in seen:
            return ""
        seen |= {element}
        if not referenced and (named := self._by_reference(element, seen)):
            return named
        if given := element.get("aria-label").strip():
            return given
        if (native := self._native(element, seen)) is not None:
            return native
        reads = referenced or role_of(element) in _FROM_CONTENT
        if reads and (text := collapse_spaces(self.content(element, seen)).strip()):
            return text
        if title := element.get("title").strip():
            return title
        return element.get("placeholder").strip() if element.tag in _LABELLED else ""

    def _by_reference(self, element: Element, seen: frozenset[Element]) -> str:
        found = [self.ids.get(name) for name in element.get("aria-labelledby").split()]
        texts = [self._name(e, seen - {e}, True) for e in found if e is not None]
        return " ".join(text.strip() for text in texts if text.strip())

    def _native(self, element: Element, seen: frozenset[Element]) -> str | None:
        """Name from HTML: labels, `alt` or the value of a button. None if it has none."""
        if labels := self.labels.get(element):
            texts = [collapse_spaces(self.content(label, seen)).strip() for label in labels]
            if joined := " ".join(filter(None, texts)):
                return joined
        if element.tag == "img" and element.has("alt"):
            return element.get("alt")
        if element.tag != "input":
            return None
        if element.kind == "image":
            return element.get("alt") or element.get("value") or element.get("title") or "Submit"
        if element.kind in ("submit", "reset", "button"):
            if element.get("value").strip():
                return element.get("value")
            return _DEFAULT_NAMES.get(element.kind)
        return None

    def content(self, element: Element, seen: frozenset[Element]) -> str:
        """Text of an element's content, as part of a name.

        Args:
            seen: elements whose names are being computed. A field does not name itself.
        """
        parts: list[str] = []
        for child in shown_children(element):
            if isinstance(child, Text):
                parts.append(child.text if element.visible else "")
            elif not (is_left_out(child) or child in seen):
                text = self._within(child, seen)
                parts.append(f" {text} " if child.tag in BLOCKS else text)
        return "".join(parts)

    def _within(self, element: Element, seen: frozenset[Element]) -> str:
        role = role_of(element)
        if role in ("textbox", "searchbox", "spinbutton", "slider"):
            return element.value
        if role in ("combobox", "listbox") and element.tag == "select":
            return " ".join(option_label(o) for o in options_of(element) if o.selected)
        if given := element.get("aria-label").strip():
            return given
        if role == "img":
            return element.get("alt") or element.get("title")
        if element.tag in OPAQUE:
            return ""
        if element.tag == "input":
            return self._native(element, seen) or ""
        return self.content(element, seen | {element}) or element.get("title")


def _takes_label(element: Element) -> bool:
    return element.tag in _LABELLED and not (element.tag == "input" and element.kind == "hidden")
