"""The accessibility tree of a page: roles, names, states, and what is left out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from browsing import BACKENDS, Pages, seen

from sixfold_environments.web.browser import Browser
from sixfold_environments.web.site import Site

Backend = Callable[[Site], Browser]

CASES = {
    # Text and headings.
    "<p>one  two<br>three</p><div>four <b>five</b> six</div>": [
        "one two",
        "three",
        "four five six",
    ],
    "<h2>Big <i>news</i></h2><p>text</p>": ['heading "Big news"', "text"],
    '<h1><a href="/x">Cup</a></h1>': ['heading "Cup"', '[1] link "Cup"'],
    "<table><tr><td>a</td><td>b</td></tr><tr><td>c</td></tr></table>": ["a b", "c"],
    '<p>[1] link "fake"</p>': ['\\[1] link "fake"'],
    "<p>\\back</p>": ["\\\\back"],
    "<p>a &lt;b&gt; &amp; &copy;</p>": ["a <b> & ©"],
    "<pre>two\nlines</pre>": ["two lines"],
    # Links and buttons.
    "<a>no link</a><a href=''>here</a>": ["no link", '[1] link "here"'],
    "<button>Go <b>now</b></button>": ['[1] button "Go now"'],
    "<input type=submit><input type=reset><input type=submit value='Send it'>": [
        '[1] button "Submit"',
        '[2] button "Reset"',
        '[3] button "Send it"',
    ],
    "<input type=image alt='Find' src=x>": ['[1] button "Find"'],
    "<div role=button>Act</div><span role='link'>Out</span>": [
        '[1] button "Act"',
        '[2] link "Out"',
    ],
    # Names.
    "<label for=a>Name</label><input id=a>": ['[1] textbox "Name"'],
    "<label>Count <input type=number value=2> pieces</label>": [
        '[1] spinbutton "Count pieces" value="2"'
    ],
    "<label for=a>One</label><label for=a>Two</label><input id=a>": ['[1] textbox "One Two"'],
    "<label for=a>Seen</label><input id=a aria-label='Said'>": ["Seen", '[1] textbox "Said"'],
    "<span id=x>Full</span><span id=y hidden>name</span><input aria-labelledby='x y'>": [
        "Full",
        '[1] textbox "Full name"',
    ],
    "<input placeholder=Hint><input title=Tip placeholder=Hint>": [
        '[1] textbox "Hint"',
        '[2] textbox "Tip"',
    ],
    "<a href=x><img alt='Home page'></a>": ['[1] link "Home page"'],
    "<a href=x aria-label='Cart, 2 items'>2</a>": ['[1] link "Cart, 2 items"'],
    "<a href=x title=Tip></a><a href=x></a>": ['[1] link "Tip"', "[2] link"],
    "<button>a<div>b</div>c</button>": ['[1] button "a b c"'],
    "<button>visible<span hidden> hidden</span></button>": ['[1] button "visible"'],
    "<label>Pay <select><option>cash<option>card</select> now</label>": [
        '[1] combobox "Pay now" value="cash" options="cash", "card"'
    ],
    "<label><input type=checkbox> after <input aria-label=x value=3> days</label>": [
        '[1] checkbox "after 3 days"',
        '[2] textbox "x" value="3"',
    ],
    'quote <button>say "hi" \\ there</button>': ["quote", '[1] button "say \\"hi\\" \\\\ there"'],
    # Images.
    "<img alt='A cup'><img alt=''><img><img alt=x role=presentation>": ['img "A cup"'],
    "<svg><title>t</title><text>drawn</text></svg>after": ["after"],
    # States.
    "<input type=checkbox checked aria-label=a><input type=radio aria-label=b>": [
        '[1] checkbox "a" checked',
        '[2] radio "b"',
    ],
    "<button disabled>x</button><input disabled aria-label=a><input readonly required value=v>": [
        '[1] button "x" disabled',
        '[2] textbox "a" disabled',
        '[3] textbox value="v" readonly required',
    ],
    "<fieldset disabled><legend><button>a</button></legend><button>b</button></fieldset>": [
        '[1] button "a"',
        '[2] button "b" disabled',
    ],
    "<select aria-label=s><option>a<option selected>b<option disabled>c</select>": [
        '[1] combobox "s" value="b" options="a", "b"'
    ],
    "<select aria-label=s><optgroup label=g disabled><option>a</optgroup><option>b</select>": [
        '[1] combobox "s" value="b" options="b"'
    ],
    "<select multiple aria-label=s><option selected>a<option selected>b<option>c</select>": [
        '[1] listbox "s" value="a", "b" options="a", "b", "c"'
    ],
    "<select aria-label=s><option label=Shown>x</option></select>": [
        '[1] combobox "s" value="Shown" options="Shown"'
    ],
    "<textarea aria-label=t>\nfirst\nsecond</textarea>": ['[1] textbox "t" value="first second"'],
    "<input type=password aria-label=p value=secret>": ['[1] textbox "p" value="••••••"'],
    "<input type=search aria-label=a><input type=range aria-label=b><input type=nonsense>": [
        '[1] searchbox "a"',
        '[2] slider "b" value="50"',
        "[3] textbox",
    ],
    "<details><summary>More</summary>inside</details>": ['[1] summary "More"'],
    "<details open><summary>More</summary>inside</details>": [
        '[1] summary "More" expanded',
        "inside",
    ],
    # Hidden.
    "<p hidden>a</p><p aria-hidden=true>b<a href=x>c</a></p><p>d</p>": ["d"],
    "<p style='display:none'>a</p><p style='DISPLAY : NONE ;'>b</p><p>c</p>": ["c"],
    "<p style='visibility:hidden'>a<b style='visibility:visible'>b</b></p>": ["b"],
    "<style>.x {display:none} p.y {display:block}</style><p class=x>a<p class='x y'>b": ["b"],
    "<style>#a {display:none !important} #a {display:block}</style><p id=a>a</p><p>b</p>": ["b"],
    "<style>p {display:none} #a {display:block}</style><p id=a>a</p><p>b</p>": ["a"],
    "<style>p {display:none}</style><p style='display:block'>a</p>": ["a"],
    "<style>@media print {p {display:none}} @media screen {b {display:none}}</style><p>a<b>b</b>": [
        "a"
    ],
    "<style>div > p:first-child, [data-x='1,2'] {visibility:hidden}</style>"
    "<div><p>a<p>b</div><i data-x='1,2'>c</i>": ["b"],
    "<style>[hidden] {display:block}</style><p hidden>a</p>": ["a"],
    "<style>/* p {display:none} */ b:::bad {display:none} i {display:none}</style>"
    "<p>a<b>b</b><i>c": ["a b".replace(" ", "")],
    "<script>1</script><template>t</template><noscript>n</noscript><p>a</p>": ["a"],
    "<dialog>a</dialog><dialog open>b</dialog><input type=hidden value=x><datalist><option>o": [
        "b"
    ],
    "<iframe>old</iframe><canvas>none</canvas><video>no</video>x": ["x"],
    "<div style='visibility:collapse'><button>a</button></div><button>b</button>": [
        '[1] button "b"'
    ],
    # Markup that browsers repair.
    "<p>a<p>b<ul><li>c<li>d</ul>": ["a", "b", "c", "d"],
    "<table><a href=x>moved</a><tr><td>cell</table>": ['[1] link "moved"', "cell"],
    "<b>a<i>b</b>c</i>": ["abc"],
    "<a href=1>a<a href=2>b": ['[1] link "a"', '[2] link "b"'],
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_observations_of_pages(backend: Backend) -> None:
    pages = {f"/{number}": body for number, body in enumerate(CASES)}
    wanted = {number: "\n".join(lines) for number, lines in enumerate(CASES.values())}

    async def observed() -> dict[int, str]:
        from browsing import ORIGIN, session

        one, browser = session(backend, Pages(dict(pages)))
        try:
            return {n: await one.open(f"{ORIGIN}/{n}") for n in range(len(pages))}
        finally:
            await browser.close()

    found = asyncio.run(observed())
    wrong = {
        body: (found[number], wanted[number])
        for number, body in enumerate(CASES)
        if found[number] != wanted[number]
    }
    assert not wrong


@pytest.mark.parametrize("backend", BACKENDS)
def test_title_status_and_linked_style_sheets(backend: Backend) -> None:
    sheet = (200, [("Content-Type", "text/css")], b".x {display: none}")
    page = "<title>Shop</title><link rel=stylesheet href=/a.css><p class=x>a</p><h1>Hi</h1>"
    app = Pages({"/": page, "/a.css": sheet})
    assert asyncio.run(seen(backend, app)) == ['page "Shop"\nheading "Hi"']
    missing = Pages({})
    assert asyncio.run(seen(backend, missing)) == ['status 404\nheading "none"']
