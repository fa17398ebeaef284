"""What forms send, and which are not sent. Chromium is the oracle if it is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from browsing import BACKENDS, ORIGIN, Pages, session

from sixfold_environments.web.browser import ActionError, Browser
from sixfold_environments.web.session import Session
from sixfold_environments.web.site import Site

Backend = Callable[[Site], Browser]
Step = Callable[[Session], Any]


def sent(backend: Backend, page: str, *steps: Step) -> list[tuple[str, str, bytes]]:
    """Requests of the steps, without the request for the first page."""
    app = Pages({"/": page, "/to": "<h1>there</h1>"})

    async def requests() -> list[tuple[str, str, bytes]]:
        one, browser = session(backend, app)
        try:
            await one.open(f"{ORIGIN}/")
            for step in steps:
                await step(one)
            return app.asked[1:]
        finally:
            await browser.close()

    return asyncio.run(requests())


FIELDS = """<form action=/to>
<input name=a value='1 &+~*é'><input name=b type=hidden value=x><input value=nameless>
<input type=checkbox name=c checked><input type=checkbox name=d><input type=radio name=r value=1>
<input type=radio name=r value=2 checked><input name=e disabled value=no>
<select name=s><option>one<option value=2 selected>two</select>
<select name=m multiple><option selected>x<option selected>y<option>z</select>
<textarea name=t>l1\nl2</textarea>
<button name=go value=yes>Go</button><button name=other>Other</button>
<input type=submit name=sub value=S></form><input form=nowhere name=out>"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_fields_that_are_sent(backend: Backend) -> None:
    wanted = "/to?a=1+%26%2B%7E*%C3%A9&b=x&c=on&r=2&s=2&m=x&m=y&t=l1%0D%0Al2"
    # The buttons come after nine other elements with numbers.
    assert sent(backend, FIELDS, lambda s: s.click(11)) == [("GET", wanted + "&go=yes", b"")]
    assert sent(backend, FIELDS, lambda s: s.click(13)) == [("GET", wanted + "&sub=S", b"")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_methods_encodings_and_other_addresses(backend: Backend) -> None:
    post = "<form method=post action='/to?k=1'><input name=a value=2><button>x</button></form>"
    assert sent(backend, post, lambda s: s.click(2)) == [("POST", "/to?k=1", b"a=2")]
    get = "<form action='/to?k=1#f'><input name=a value=2><button>x</button></form>"
    assert sent(backend, get, lambda s: s.click(2)) == [("GET", "/to?a=2", b"")]
    button = "<form><input name=a><button formaction=/to formmethod=post name=b>x</button></form>"
    assert sent(backend, button, lambda s: s.click(2)) == [("POST", "/to", b"a=&b=")]
    outside = "<form id=f action=/to></form><input form=f name=a value=1><button form=f>x</button>"
    assert sent(backend, outside, lambda s: s.click(2)) == [("GET", "/to?a=1", b"")]
    base = "<base href='/deep/er/'><a href='../to'>x</a>"
    assert sent(backend, base, lambda s: s.click(1))[0][1] == "/deep/to"


def test_multipart() -> None:
    page = (
        "<form method=post action=/to enctype=multipart/form-data>"
        "<input name=a value='1\"'><button>x</button></form>"
    )
    ((_, _, body),) = sent(BACKENDS[0].values[0], page, lambda s: s.click(2))
    assert b'Content-Disposition: form-data; name="a"\r\n\r\n1"\r\n' in body


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_of_fields_after_actions(backend: Backend) -> None:
    page = """<form action=/to><input name=a maxlength=3><input type=checkbox name=c>
    <input type=radio name=r value=1 checked><input type=radio name=r value=2>
    <select name=s><option>one<option>two</select><select name=m multiple><option>x
    <option>y</select><button>Go</button></form>"""
    steps: list[Step] = [
        lambda s: s.type(1, "abcdef"),
        lambda s: s.click(2),
        lambda s: s.click(4),
        lambda s: s.select(5, "two"),
        lambda s: s.select(6, "x"),
        lambda s: s.select(6, "y"),
        lambda s: s.select(6, "x"),
        lambda s: s.click(7),
    ]
    for _ in range(2):  # the second visitor gets the page as it was, not as the first left it
        found = sent(backend, page, *steps)
        assert found == [("GET", "/to?a=abc&c=on&r=2&s=two&m=y", b"")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_enter_submits_as_browsers_do(backend: Backend) -> None:
    first = "<form action=/to><input name=a><button name=b value=1>x</button><button name=c></form>"
    assert sent(backend, first, lambda s: s.type(1, "q", True)) == [("GET", "/to?a=q&b=1", b"")]
    alone = "<form action=/to><input name=a><input type=checkbox name=b></form>"
    assert sent(backend, alone, lambda s: s.type(1, "q", True)) == [("GET", "/to?a=q", b"")]
    for page in (
        "<form action=/to><input name=a><input name=b></form>",
        "<form action=/to><input name=a><button disabled>x</button></form>",
        "<input name=a>",
        "<form action=/to><textarea name=a></textarea><button>x</button></form>",
    ):
        with pytest.raises(ActionError) as error:
            sent(backend, page, lambda s: s.type(1, "q", True))
        assert error.value.kind == "submit"


INVALID = {
    "<input name=a required>": "valueMissing",
    "<input name=a type=email value=x>": "typeMismatch",
    "<input name=a type=url value=x>": "typeMismatch",
    "<input name=a pattern='[a-z]+' value=A1>": "patternMismatch",
    "<input name=a type=number min=2 value=1>": "rangeUnderflow",
    "<input name=a type=number max=2 value=3>": "rangeOverflow",
    "<input name=a type=number min=0 step=2 value=3>": "stepMismatch",
    "<input name=a type=url value='http://['>": "typeMismatch",
    "<input name=a type=checkbox required>": "valueMissing",
    "<input name=a type=radio required>": "valueMissing",
    "<select name=a required><option value=''>choose<option>x</select>": "valueMissing",
    "<textarea name=a required></textarea>": "valueMissing",
}
VALID = (
    "<input name=a required value=x>",
    "<input name=a type=email>",
    "<input name=a type=number step=any value=1.5>",
    "<input name=a type=number min=0 step=0.01 value=1.7e308>",
    "<input name=a required disabled>",
    "<input name=a required readonly>",
    "<input name=a pattern='[' value=x>",
    "<select name=a required><option>x</select>",
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_validation_stops_a_form_and_says_why(backend: Backend) -> None:
    async def outcomes() -> tuple[dict[str, str], list[int]]:
        pages = {f"/{n}": _form(field) for n, field in enumerate([*INVALID, *VALID])}
        app, problems = Pages({**pages, "/to": "there"}), {}
        one, browser = session(backend, app)
        try:
            for number, field in enumerate(INVALID):
                await one.open(f"{ORIGIN}/{number}")
                with pytest.raises(ActionError) as error:
                    await one.click(2)
                assert error.value.kind == "invalid"
                problems[field] = str(error.value)
            assert not [asked for asked in app.asked if asked[1].startswith("/to")]
            for number in range(len(INVALID), len(pages)):
                await one.open(f"{ORIGIN}/{number}")
                await one.click(2)
            return problems, [asked[1].startswith("/to") for asked in app.asked].count(True)
        finally:
            await browser.close()

    problems, valid = asyncio.run(outcomes())
    assert {f: p.split()[1].rstrip(":") for f, p in problems.items()} == INVALID
    assert all(problem.startswith("[1] ") for problem in problems.values())
    assert valid == len(VALID)


def _form(field: str) -> str:
    return f"<form action=/to>{field}<button>x</button></form>"


@pytest.mark.parametrize("backend", BACKENDS)
def test_forms_without_validation_are_sent(backend: Backend) -> None:
    one = "<form action=/to novalidate><input name=a required><button>x</button></form>"
    other = "<form action=/to><input name=a required><button formnovalidate>x</button></form>"
    for page in (one, other):
        assert sent(backend, page, lambda s: s.click(2)) == [("GET", "/to?a=", b"")]
