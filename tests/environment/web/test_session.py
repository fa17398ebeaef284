"""Actions by number: what the policy sees after each, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from browsing import BACKENDS, ORIGIN, Pages, seen, session

from sixfold_environments.web.browser import ActionError, Browser
from sixfold_environments.web.html_browser import HtmlBrowser
from sixfold_environments.web.html_parser import MOST_NODES
from sixfold_environments.web.session import Session
from sixfold_environments.web.site import Site

Backend = Callable[[Site], Browser]
Step = Callable[[Session], Any]

CONTROLS = """<h1>Page</h1><a href=/to>Go</a><input aria-label=a value=old>
<button disabled>off</button>
<input aria-label=fixed readonly><select aria-label=s><option>one<option disabled>two</select>
<input type=number aria-label=n><input type=checkbox aria-label=c><a href=#here>here</a>
<a href='mailto:x@y'>mail</a><input type=file aria-label=f>
<button type=button>idle</button>"""
SITE = Pages({"/": CONTROLS, "/to": "<p>there</p><a href=/next>on</a>", "/next": "<p>last</p>"})


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_new_page_is_shown_whole_and_otherwise_only_what_changed(backend: Backend) -> None:
    found = asyncio.run(
        seen(
            backend,
            SITE,
            lambda s: s.type(2, "new"),
            lambda s: s.click(7),
            lambda s: s.click(8),
            lambda s: s.click(9),
            lambda s: s.click(11),
            lambda s: s.select(5, "one"),
            lambda s: s.click(1),
            lambda s: s.click(1),
            lambda s: s.back(),
            lambda s: s.back(),
        )
    )
    first = found.pop(0)
    assert found == [
        '[2] textbox "a" value="new"',
        '[7] checkbox "c" checked',
        *["nothing changed"] * 4,
        'there\n[1] link "on"',
        "last",
        'there\n[1] link "on"',
        first,  # asked for again: the field has its first value
    ]


REFUSED: list[tuple[Step, str]] = [
    (lambda s: s.click(0), "element"),
    (lambda s: s.click(-1), "element"),
    (lambda s: s.click(12), "element"),
    (lambda s: s.click(10**30), "element"),
    (lambda s: s.click(3), "disabled"),
    (lambda s: s.type(1, "x"), "role"),
    (lambda s: s.type(7, "x"), "role"),
    (lambda s: s.type(10, "x"), "role"),
    (lambda s: s.type(4, "x"), "readonly"),
    (lambda s: s.type(6, "many"), "text"),
    (lambda s: s.type(6, "nan"), "text"),
    (lambda s: s.type(2, "a\x00b"), "text"),
    (lambda s: s.type(2, "a\x1b[31m"), "text"),
    (lambda s: s.type(2, "\ud800"), "text"),
    (lambda s: s.type(2, "x" * 10_001), "text"),
    (lambda s: s.select(2, "x"), "role"),
    (lambda s: s.select(5, "three"), "option"),
    (lambda s: s.select(5, "two"), "option"),
    (lambda s: s.back(), "history"),
    (lambda s: s.more(), "page"),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_refused_actions_name_their_reason_and_change_nothing(backend: Backend) -> None:
    async def kinds() -> list[str]:
        one, browser = session(backend, SITE)
        try:
            first = await one.open(f"{ORIGIN}/")
            found = []
            for step, _ in REFUSED:
                with pytest.raises(ActionError) as error:
                    await step(one)
                found.append(error.value.kind)
                assert len(str(error.value)) < 300
            assert await one.open(f"{ORIGIN}/") == first
            return found
        finally:
            await browser.close()

    assert asyncio.run(kinds()) == [kind for _, kind in REFUSED]


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_text_is_typed_and_shown_short(backend: Backend) -> None:
    text = "line\n" + "ü" * 9_000
    _, shown = asyncio.run(seen(backend, SITE, lambda s: s.type(2, text)))
    assert shown.startswith('[2] textbox "a" value="lineüü') and len(shown) < 300


def test_a_long_page_is_shown_in_parts() -> None:
    page = "".join(f"<p>line {n} {'x' * 20}</p><a href=/{n}>link {n}</a>" for n in range(40))
    app = Pages({"/": page, "/39": "<p>end</p>"})

    async def parts() -> list[str]:
        one, _ = session(HtmlBrowser, app, characters=1000)
        found = [await one.open(f"{ORIGIN}/")]
        while "more" in found[-1]:
            found.append(await one.more())
        found.append(await one.click(40))
        return found

    *shown, last = asyncio.run(parts())
    lines = [line for part in shown for line in part.split("\n") if not line.startswith("(")]
    assert len(lines) == 80 and lines[-1] == '[40] link "link 39"' and last == "end"
    assert all(len(part) < 1100 for part in shown) and shown[0].endswith("more lines: more)")
    cut = asyncio.run(seen(HtmlBrowser, Pages({"/": f"<p>{'y' * 5000}</p>"})))
    assert len(cut[0]) == 1000


def test_a_deep_page_and_a_large_one_are_read() -> None:
    deep = "<div>" * 5000 + "<a href=/>bottom</a>" + "<b>" * 3000 + "x"
    button = asyncio.run(seen(HtmlBrowser, Pages({"/": f"<button>{deep}"})))
    assert button == ['[1] button "bottomx"']
    nested = asyncio.run(seen(HtmlBrowser, Pages({"/": deep})))
    assert nested == ["[1] link\nbottomx"]  # deeper elements become siblings
    one, _ = session(HtmlBrowser, Pages({"/": "<p>a" * 50_000}), characters=1_000_000)
    lines = asyncio.run(one.open(f"{ORIGIN}/")).split("\n")
    assert set(lines) == {"a"} and 0.99 * MOST_NODES < 2 * len(lines) < MOST_NODES


@pytest.mark.parametrize("backend", BACKENDS)
def test_cookies_links_and_details(backend: Backend) -> None:
    def first(environ: dict[str, Any]) -> Any:
        body = environ.get("HTTP_COOKIE", "none").encode()
        headers = [("Content-Type", "text/html"), ("Set-Cookie", "a=1; Path=/; HttpOnly")]
        return 200, [*headers, ("Set-Cookie", "b=2; Path=/deep")], b"<a href=/>x</a>" + body

    app = Pages({"/": first, "/deep": first})

    async def cookies() -> tuple[list[str], dict[str, str]]:
        one, browser = session(backend, app)
        try:
            found = [await one.open(f"{ORIGIN}/"), await one.click(1)]
            found.append(await one.open(f"{ORIGIN}/deep"))
            return found, await browser.cookies()
        finally:
            await browser.close()

    found, held = asyncio.run(cookies())
    assert [text.split("\n")[-1] for text in found[:2]] == ["none", "a=1"]
    assert set(found[2].split("\n")[-1].split("; ")) == {"a=1", "b=2"}
    assert held == {"a": "1", "b": "2"}
    page = "<details><summary>More</summary><p>inside</p></details>"
    shown = asyncio.run(seen(backend, Pages({"/": page}), lambda s: s.click(1)))
    assert shown == ['[1] summary "More"', '[1] summary "More" expanded\ninside']
