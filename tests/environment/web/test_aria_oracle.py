"""Roles and names against Chromium's own accessibility tree."""

from __future__ import annotations

import asyncio
import json
import re

from browsing import ORIGIN, Pages, needs_chromium, session
from test_tree import CASES

from sixfold_environments.web.chromium import _HOST, ChromiumBrowser

ROLES = "link button textbox searchbox spinbutton slider checkbox radio combobox listbox heading"
_OURS = re.compile(rf"^(?:\[\d+\] )?({ROLES.replace(' ', '|')})(?: (\"(?:[^\"\\]|\\.)*\"))?(?= |$)")
_THEIRS = re.compile(
    rf"^\s*- '?({ROLES.replace(' ', '|')})(?: (\"(?:[^\"\\]|\\.)*\"))?(?=[ :'\[]|$)"
)


MORE = """<button aria-label=' '>blank label</button><a href=x><span>a</span><span>b</span></a>
<a href=x>a<br>b</a><button><img alt=pic>b</button><button title=t></button><input type=image src=x>
<input type=checkbox title=tick><h2 aria-label=said>seen</h2>
<div role=checkbox aria-checked=true>box
</div><a href=x><svg aria-label=Icon></svg></a><button><span aria-hidden=true>x</span> y</button>
<input type=email placeholder=p><input type=submit value=''><input type=reset title=again>
<button>  much   space </button><a href=x><div>block</div><p>and</p>more</a><button>a<wbr>b</button>
<label>outer <span>inner</span> <input></label><a href=x><p>Head</p><p>text</p></a>
<button><input type=hidden value=v>c</button><a href=x title=tip>content</a>
<label>Size <select><option>S<option>M</select></label><button><b hidden>no</b>yes</button>
<ul><li><a href=x>one</a><li><button>two</button></ul><table><tr><th><a href=x>cell</a></table>
<textarea aria-label=area></textarea><input type=tel title=phone><input aria-label=x title=y>"""


def named(lines: list[str], form: re.Pattern[str]) -> list[tuple[str, str]]:
    """(role, name) of each line with a role."""
    found = filter(None, map(form.match, lines))
    return [(role, json.loads(name or '""')) for role, name in (m.groups() for m in found)]


@needs_chromium
def test_roles_and_names_are_those_of_chromium() -> None:
    alone = [case for case in CASES if "id=" in case or "<style" in case or "<b>a<i>" in case]
    together = "\n".join(f"<div>{case}</div>" for case in CASES if case not in alone)
    pages = {f"/{at}": page for at, page in enumerate([together, MORE, *alone])}

    async def both() -> list[tuple[str, str]]:
        one, browser = session(ChromiumBrowser, Pages(dict(pages)), characters=100_000)
        assert isinstance(browser, ChromiumBrowser)
        try:
            found = []
            for path in pages:
                ours = await one.open(f"{ORIGIN}{path}")
                theirs = await _HOST.run(lambda: browser._page.locator("body").aria_snapshot())
                found.append((ours, theirs))
            return found
        finally:
            await browser.close()

    compared = 0
    for ours, theirs in asyncio.run(both()):
        mine, oracle = named(ours.split("\n"), _OURS), named(theirs.split("\n"), _THEIRS)
        different = [pair for pair in zip(mine, oracle, strict=False) if pair[0] != pair[1]]
        assert mine == oracle, different[:4]
        compared += len(mine)
    assert compared > 60
