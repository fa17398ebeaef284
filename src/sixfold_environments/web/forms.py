"""Forms: state of their fields, validation, and the data that a submission sends.

Follows https://html.spec.whatwg.org/multipage/form-control-infrastructure.html
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote_plus, urlsplit

from .dom import TYPED, Document, Element, collapse_spaces

FIELDS = frozenset({"input", "select", "textarea", "button"})

SUBMITS = frozenset({"submit", "image"})

_EMAIL = re.compile(
    r"[a-zA-Z0-9.!#$%&'*+/=?^_`{|}~-]+@[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    r"(?:\.[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)*"
)
_NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_BOUNDARY = "sixfold-form-boundary"


def initial_state(root: Element) -> None:
    """Set all fields of a page to their initial state."""
    reset_fields(e for e in root.elements() if e.tag in FIELDS)


def reset_fields(fields: Iterator[Element]) -> None:
    """Set some fields to their initial state, which the HTML defines."""
    for field in fields:
        if field.tag == "textarea":
            field.value = field.text().replace("\r\n", "\n").replace("\r", "\n")
        elif field.tag == "select":
            _reset_select(field)
        elif field.tag == "input":
            field.value = sanitise(field, field.get("value"))
            field.checked = False
            if field.has("checked"):
                check(field)


def sanitise(field: Element, text: str) -> str:
    """Value that a field stores for a text (HTML's value sanitization)."""
    if field.tag != "input":
        return text
    kind = field.kind
    if kind in ("text", "search", "tel", "password", "email", "url"):
        text = text.replace("\n", "").replace("\r", "")
    if kind in ("email", "url"):
        text = text.strip()
    if kind == "number" and not is_number(text):
        return ""
    if kind == "range":
        return text if is_number(text) else "50"
    return text


def is_number(text: str) -> bool:
    """True for a floating-point number of HTML."""
    return bool(_NUMBER.fullmatch(text)) and math.isfinite(float(text))


def check(field: Element) -> None:
    """Check a checkbox or radio button. Other radio buttons of its group are unchecked."""
    if field.kind == "radio":
        for other in radio_group(field):
            other.checked = False
    field.checked = True


def radio_group(field: Element) -> list[Element]:
    """Radio buttons of the same form with the same name, with the field itself."""
    root, owner = top(field), form_of(field)
    name = field.get("name")
    if not name:
        return [field]
    return [
        e
        for e in root.elements()
        if e.tag == "input" and e.kind == "radio" and e.get("name") == name and form_of(e) is owner
    ]


def top(element: Element) -> Element:
    while element.parent is not None:
        element = element.parent
    return element


def form_of(field: Element) -> Element | None:
    if field.has("form"):
        wanted = field.get("form")
        named = (e for e in top(field).elements() if e.get("id") == wanted)
        found = next(named, None) if wanted else None
        return found if found is not None and found.tag == "form" else None
    return next((e for e in field.ancestors() if e.tag == "form"), None)


def fields_of(form: Element) -> list[Element]:
    """Fields of a form, in document order. Fields with a `form` attribute may be outside it."""
    return [e for e in top(form).elements() if e.tag in FIELDS and form_of(e) is form]


def is_disabled(element: Element) -> bool:
    """True if an element is disabled, by itself or by an enclosing group."""
    if element.get("aria-disabled").strip().lower() == "true":
        return True
    if element.tag in (*FIELDS, "option", "optgroup") and element.has("disabled"):
        return True
    if element.tag == "option":
        above = element.parent
        return above is not None and above.tag == "optgroup" and above.has("disabled")
    return element.tag in FIELDS and _in_disabled_group(element)


def _in_disabled_group(field: Element) -> bool:
    below = field
    for above in field.ancestors():
        if above.tag == "fieldset" and above.has("disabled"):
            legends = [c for c in above.children if isinstance(c, Element) and c.tag == "legend"]
            if not (legends and below is legends[0]):
                return True
        below = above
    return False


def options_of(select: Element) -> list[Element]:
    """Options of a select element, in order."""
    return [e for e in select.elements() if e.tag == "option"]


def option_label(option: Element) -> str:
    """Text of an option."""
    return collapse_spaces(option.get("label") or option.text()).strip()


def option_value(option: Element) -> str:
    return option.get("value") if option.has("value") else collapse_spaces(option.text()).strip()


def is_listbox(select: Element) -> bool:
    """True if several options of a select element are shown at once."""
    size = select.get("size").strip()
    return select.has("multiple") or (size.isdecimal() and int(size) > 1)


def _reset_select(select: Element) -> None:
    options = options_of(select)
    for option in options:
        option.selected = option.has("selected")
    chosen = [option for option in options if option.selected]
    if select.has("multiple"):
        return
    for option in chosen[:-1]:
        option.selected = False
    if not chosen and not is_listbox(select):
        first = next((option for option in options if not is_disabled(option)), None)
        if first is not None:
            first.selected = True


def choose(select: Element, option: Element) -> None:
    """Select an option. With `multiple`, deselect it if it is selected."""
    if select.has("multiple"):
        option.selected = not option.selected
        return
    for other in options_of(select):
        other.selected = other is option


def problem_of(field: Element) -> str:
    """Name of the `ValidityState` flag that is set for a field, or "" if its value is valid."""
    if field.tag == "button" or is_disabled(field):
        return ""
    if field.tag == "input" and field.kind in ("hidden", "reset", "button", *SUBMITS):
        return ""
    if any(e.tag == "datalist" for e in field.ancestors()):
        return ""
    if field.has("readonly") and field.tag != "select":
        return ""
    if _is_missing(field):
        return "valueMissing"
    return _text_problem(field) if field.value and field.tag != "select" else ""


def _is_missing(field: Element) -> bool:
    if field.tag == "input" and field.kind == "radio":
        group = radio_group(field)
        return any(e.has("required") for e in group) and not any(e.checked for e in group)
    if not field.has("required"):
        return False
    if field.tag == "select":
        chosen = [option for option in options_of(field) if option.selected]
        return not chosen or (len(chosen) == 1 and _is_placeholder(field, chosen[0]))
    if field.tag == "input" and field.kind == "checkbox":
        return not field.checked
    if field.tag == "input" and field.kind in ("range", "color"):
        return False
    return not field.value


def _is_placeholder(select: Element, option: Element) -> bool:
    first = options_of(select)[0] is option and option.parent is select
    return first and not option_value(option) and not is_listbox(select)


def _text_problem(field: Element) -> str:
    kind, value = (field.kind if field.tag == "input" else "textarea"), field.value
    if kind == "email":
        every = value.split(",") if field.has("multiple") else [value]
        if not all(_EMAIL.fullmatch(one.strip()) for one in every):
            return "typeMismatch"
    if kind == "url" and not _has_scheme(value):
        return "typeMismatch"
    if kind in ("text", "search", "url", "tel", "email", "password") and field.get("pattern"):
        try:
            if not re.fullmatch(field.get("pattern"), value):
                return "patternMismatch"
        except re.error:  # browsers ignore a pattern that is not a valid regular expression
            pass
    least = field.get("minlength").strip()
    edited = value != (field.text() if kind == "textarea" else field.get("value"))
    if least.isdecimal() and edited and len(value) < int(least):
        return "tooShort"
    return _range_problem(field) if kind in ("number", "range") else ""


def _has_scheme(address: str) -> bool:
    try:
        return bool(urlsplit(address).scheme)
    except ValueError:  # such as http://[
        return False


def _range_problem(field: Element) -> str:
    value = float(field.value)
    default = {"min": "0", "max": "100"} if field.kind == "range" else {}
    least, most = (field.get(n).strip() or default.get(n, "") for n in ("min", "max"))
    if is_number(least) and value < float(least):
        return "rangeUnderflow"
    if is_number(most) and value > float(most):
        return "rangeOverflow"
    step = field.get("step").strip().lower()
    if step == "any":
        return ""
    size = float(step) if is_number(step) and float(step) > 0 else 1.0
    start = next((float(t) for t in (least, field.get("value")) if is_number(t)), 0.0)
    steps = (value - start) / size
    if not math.isfinite(steps):  # too large for a remainder: browsers accept it
        return ""
    return "stepMismatch" if abs(steps - round(steps)) > 1e-9 * max(1.0, abs(steps)) else ""


def invalid_field(form: Element) -> tuple[Element, str] | None:
    """The first invalid field of a form and its problem. None if all fields are valid."""
    for field in fields_of(form):
        if problem := problem_of(field):
            return field, problem
    return None


def skips_validation(form: Element, submitter: Element | None) -> bool:
    """True if the form is submitted without validation."""
    return form.has("novalidate") or (submitter is not None and submitter.has("formnovalidate"))


def default_button(form: Element) -> Element | None:
    """The first submit button, which Enter in a field presses. None if there is none."""
    return next((e for e in fields_of(form) if is_submit(e)), None)


def is_submit(field: Element) -> bool:
    return field.tag in ("button", "input") and field.kind in SUBMITS


def enter_submits(form: Element) -> bool:
    """True if Enter submits a form without a button: it has at most one field for text."""
    return sum(e.tag == "input" and e.kind in TYPED for e in fields_of(form)) <= 1


@dataclass(frozen=True)
class Submission:
    """A request that submits a form.

    Attributes:
        method: "GET" or "POST".
        address: target, relative to the page.
        kind: content type of the body, or "".
    """

    method: str
    address: str
    kind: str = ""
    body: bytes = b""


def submission(document: Document, form: Element, submitter: Element | None) -> Submission | None:
    """Build the request that submits a form. None for `method=dialog`.

    Args:
        submitter: button that was pressed, or None.
    """

    def given(name: str) -> str:
        if submitter is not None and submitter.has(f"form{name}"):
            return submitter.get(f"form{name}")
        return form.get(name)

    method = given("method").strip().lower()
    if method == "dialog":
        return None
    address = given("action").strip() or document.url
    entries = list(_entries(form, submitter))
    if method != "post":
        return Submission("GET", f"{re.split('[?#]', address)[0]}?{urlencode(entries)}")
    if given("enctype").strip().lower() == "multipart/form-data":
        kind = f"multipart/form-data; boundary={_BOUNDARY}"
        return Submission("POST", address, kind, _multipart(entries))
    kind = "application/x-www-form-urlencoded"
    return Submission("POST", address, kind, urlencode(entries).encode())


def _entries(form: Element, submitter: Element | None) -> Iterator[tuple[str, str]]:
    """(name, value) of each entry that a submission sends."""
    for field in fields_of(form):
        name = field.get("name")
        if is_disabled(field):
            continue
        if field.tag == "input" and field.kind == "image":
            if field is submitter:
                prefix = f"{name}." if name else ""
                yield from ((f"{prefix}x", "0"), (f"{prefix}y", "0"))
        elif not name:
            continue
        elif field.tag == "button" or field.kind in ("submit", "reset", "button"):
            if field is submitter:
                yield name, field.get("value")
        elif field.tag == "select":
            for option in options_of(field):
                if option.selected and not is_disabled(option):
                    yield name, option_value(option)
        elif field.tag == "input" and field.kind in ("checkbox", "radio"):
            if field.checked:
                yield name, field.get("value") if field.has("value") else "on"
        else:
            yield name, "" if field.kind == "file" else field.value


def _lines(text: str) -> str:
    return re.sub(r"\r\n|\r|\n", "\r\n", text)


def urlencode(entries: list[tuple[str, str]]) -> str:
    """Entries in the form `a=1&b=2`."""
    return "&".join(f"{_quote(name)}={_quote(value)}" for name, value in entries)


def _quote(text: str) -> str:
    return quote_plus(_lines(text), safe="*", errors="replace").replace("~", "%7E")


def _multipart(entries: list[tuple[str, str]]) -> bytes:
    parts = []
    for name, value in entries:
        quoted = _lines(name).replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
        head = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{quoted}"\r\n\r\n'
        parts.append(f"{head}{_lines(value)}\r\n")
    return "".join((*parts, f"--{_BOUNDARY}--\r\n")).encode(errors="replace")
