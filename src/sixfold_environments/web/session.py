"""One browsing session: actions by element number, and what the policy sees after each.

A new page is shown in full. After an action that stays on the page, only changed lines are shown.
Actions and checks are the same for both backends.
"""

from __future__ import annotations

import re

from .browser import ActionError, Browser
from .dom import TYPED, Document, Element
from .forms import (
    default_button,
    enter_submits,
    form_of,
    invalid_field,
    is_disabled,
    is_number,
    is_submit,
    option_label,
    option_value,
    options_of,
    skips_validation,
)
from .names import role_of
from .tree import Tree, quote_name, tree_of

TYPED_CHARACTERS = 10_000
"""Maximum number of characters of a typed text."""

_UNTYPED = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters except line breaks, and halves of surrogate pairs."""

UNCHANGED = "nothing changed"


class Session:
    """Numbers the elements of a page, checks actions and renders observations.

    Args:
        characters: maximum number of characters of a page that are shown at once.
    """

    def __init__(self, browser: Browser, characters: int) -> None:
        self._browser = browser
        self._characters = characters
        self._document = Document("about:blank", Element("html"))
        self._tree = Tree((), ())
        self._shown = 0
        self._left: list[str] = []

    async def open(self, url: str) -> str:
        await self._browser.open(url)
        return await self._render_page()

    async def click(self, element: int) -> str:
        target = self._control(element)
        before = self._document.number
        await self._browser.click(target)
        seen = await self._render_page()
        target = self._same(element, target)
        if self._document.number == before and is_submit(target):
            self._check_form(form_of(target), target)
        return seen

    async def type(self, element: int, text: str, submit: bool = False) -> str:
        """Replace the text of a field. With `submit`, press Enter afterwards."""
        field = self._control(element)
        await self._browser.fill(field, _check_text(field, text))
        if not submit:
            return await self._render_page()
        seen, before = await self._render_page(), self._document.number
        field = self._same(element, field)
        await self._enter(field)
        entered = await self._render_page()
        if self._document.number == before:
            form = form_of(self._same(element, field))
            self._check_form(form, None if form is None else default_button(form))
            return seen
        return entered

    async def select(self, element: int, option: str) -> str:
        field = self._control(element)
        if field.tag != "select":
            raise ActionError("role", f"[{element}] is a {role_of(field)}: it has no options")
        await self._browser.choose(field, _option(field, option))
        return await self._render_page()

    async def back(self) -> str:
        """Go to the page before this one."""
        if not self._left:
            raise ActionError("history", "there is no page before this one")
        url = self._left.pop()
        await self._browser.open(url)
        return await self._render_page(returning=True)

    async def more(self) -> str:
        """The next part of a page that was too long to be shown at once."""
        if self._shown >= len(self._tree.lines):
            raise ActionError("page", "the whole page has been shown")
        return self._part()

    def _control(self, number: int) -> Element:
        """The element with a number, if it can be used."""
        controls = self._tree.controls
        if not 1 <= number <= len(controls):
            known = f"1 to {len(controls)}" if controls else "none on this page"
            raise ActionError("element", f"no element {number}: elements are {known}")
        if is_disabled(controls[number - 1]):
            raise ActionError("disabled", f"[{number}] is disabled")
        return controls[number - 1]

    def _same(self, number: int, element: Element) -> Element:
        """The element with a number on the current page. `element` if there is no such number."""
        controls = self._tree.controls
        return controls[number - 1] if number <= len(controls) else element

    async def _enter(self, field: Element) -> None:
        form = form_of(field)
        if form is None or field.tag != "input":
            raise ActionError("submit", "the text is typed, but the field submits no form")
        button = default_button(form)
        if button is not None and not is_disabled(button):
            await self._browser.click(button)
        elif button is None and enter_submits(form):
            await self._browser.submit(form)
        else:
            raise ActionError("submit", "the text is typed, but Enter does not submit this form")

    def _check_form(self, form: Element | None, submitter: Element | None) -> None:
        """Raise ActionError if an invalid field kept a form from being sent."""
        if form is None or skips_validation(form, submitter):
            return
        found = invalid_field(form)
        if found is None:
            return
        field, problem = found
        controls = self._tree.controls
        place = f"[{controls.index(field) + 1}]" if field in controls else "a hidden field"
        raise ActionError("invalid", f"{place} {problem}: the form was not sent")

    async def _render_page(self, returning: bool = False) -> str:
        """Read the page and render what is new.

        Args:
            returning: True after `back`. The page before is then not added to the history.
        """
        old, before = self._document, self._tree.lines
        self._document = await self._browser.document()
        self._tree = tree_of(self._document)
        lines = self._tree.lines
        if self._document.number != old.number:
            if not (returning or old.posted or old.number == 0):
                self._left.append(old.url)
            self._shown = 0
            return self._part()
        known = set(before)
        changed = [line for line in lines if line not in known]
        if not changed and len(lines) == len(before):
            return UNCHANGED
        if len(lines) < len(before) or not changed:
            self._shown = 0
            return self._part()
        return self._cut(changed)

    def _part(self) -> str:
        """The next lines of the page, up to the limit of characters."""
        rest = self._tree.lines[self._shown :]
        if not rest:
            return "the page is empty"
        taken, size = 0, 0
        while taken < len(rest) and (not taken or size + len(rest[taken]) <= self._characters):
            size += len(rest[taken]) + 1
            taken += 1
        self._shown += taken
        left = len(rest) - taken
        note = [f"({left} more lines: more)"] if left else []
        return "\n".join([*rest[:taken], *note])

    def _cut(self, lines: list[str]) -> str:
        text = "\n".join(lines)
        if len(text) <= self._characters:
            return text
        return f"{text[: self._characters]}\n(changed lines were cut)"


def _check_text(field: Element, text: str) -> str:
    """Check a text and convert it to the form that a field accepts."""
    role = role_of(field)
    typed = field.tag == "textarea" or (field.tag == "input" and field.kind in (*TYPED, "range"))
    if not typed:
        raise ActionError("role", f"a {role} takes no text")
    if field.has("readonly"):
        raise ActionError("readonly", "the field cannot be changed")
    if len(text) > TYPED_CHARACTERS:
        raise ActionError("text", f"the text has more than {TYPED_CHARACTERS} characters")
    if _UNTYPED.search(text):
        raise ActionError("text", "the text has control characters")
    if field.tag == "input":
        text = text.replace("\n", "")
        if field.kind in ("number", "range") and text and not is_number(text):
            raise ActionError("text", f"the field takes numbers, not {quote_name(text)}")
    most = field.get("maxlength").strip()
    limited = field.tag == "textarea" or field.kind not in ("number", "range")
    if most.isdecimal() and limited:
        text = text.encode("utf-16-le")[: 2 * int(most)].decode("utf-16-le", "ignore")
    return text


def _option(field: Element, wanted: str) -> Element:
    """Find the option with a text or value."""
    options = [o for o in options_of(field) if o.display]
    plain = wanted.strip()
    found = [o for o in options if option_label(o) == plain] or [
        o for o in options if option_value(o) == plain
    ]
    if not found:
        raise ActionError("option", f"no option {quote_name(wanted)}")
    usable = [o for o in found if not is_disabled(o)]
    if not usable:
        raise ActionError("option", f"the option {quote_name(wanted)} is disabled")
    return usable[0]
