"""The shop: its pages, its rules, its tasks, and the goal on the state of its server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from browsing import BACKENDS, ORIGIN, session

from sixfold.errors import UserError
from sixfold.types import Task
from sixfold_environments.web.browser import Browser
from sixfold_environments.web.catalogue import catalogue
from sixfold_environments.web.html_browser import HtmlBrowser
from sixfold_environments.web.shop import Line, Order, Shop
from sixfold_environments.web.site import Limits, Request, Site
from sixfold_environments.web.tasks import SHARES, goal_met, shop_calls, shop_of, shop_tasks
from sixfold_environments.web.wsgi import wsgi_answer

Backend = Callable[[Site], Browser]


async def played(backend: Backend, task: Task, calls: list[Any]) -> tuple[bool, list[str]]:
    """Whether the goal is met after the actions, and all observations."""
    shop = shop_of(task)
    one, browser = session(backend, shop)
    try:
        found = [await one.open(f"{ORIGIN}/")]
        for name, arguments in calls:
            found.append(await getattr(one, name)(**arguments))
        return goal_met(shop, task.columns["shop"]["wanted"]), found
    finally:
        await browser.close()


@pytest.mark.nightly
def test_worked_actions_reach_the_goal() -> None:
    tasks = shop_calls(200, seed=3)
    outcomes = asyncio.run(_all(tasks))
    assert all(met for met, _ in outcomes)
    assert {task.prompt_text.split()[0] for task, _ in tasks} == set(SHARES)


async def _all(tasks: list[Any]) -> list[tuple[bool, list[str]]]:
    return [await played(HtmlBrowser, *one) for one in tasks]


@pytest.mark.parametrize("leave_out", range(7))
def test_the_goal_needs_every_action(leave_out: int) -> None:
    task, calls = next(
        (task, calls)
        for task, calls in shop_calls(300, seed=0)
        if "gift" in task.prompt_text and len(calls) == 8
    )
    # Without the search or a link, later actions name elements of another page: type into a field.
    kept = [call for at, call in enumerate(calls) if at != leave_out + 1]

    async def met() -> bool:
        try:
            return (await played(HtmlBrowser, task, kept))[0]
        except ValueError:
            return False

    assert not asyncio.run(met())


def test_the_goal_is_exact() -> None:
    wanted = {"lines": [[1, "red", 2]], "name": "ann", "gift": False}
    line = Line(1, "red", 2)
    for orders, met in [
        ([Order((line,), "ann", False)], True),
        ([Order((line,), "ann", True)], False),
        ([Order((line,), "bob", False)], False),
        ([Order((Line(1, "red", 1),), "ann", False)], False),
        ([Order((line, Line(2, "red", 1)), "ann", False)], False),
        ([Order((line,), "ann", False)] * 2, False),
        ([], False),
    ]:
        shop = Shop(0)
        shop.orders = orders
        assert goal_met(shop, wanted) is met
    shop = Shop(0, [line])
    asyncio.run(_home(shop))
    assert goal_met(shop, {"lines": [[1, "red", 2]]})
    assert not goal_met(shop, {"lines": []})
    shop.orders = [Order((line,), "ann", False)]
    assert not goal_met(shop, {"lines": [[1, "red", 2]]})


async def _home(shop: Shop) -> None:
    one, _ = session(HtmlBrowser, shop)
    await one.open(f"{ORIGIN}/")


def test_tasks_are_different_and_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = shop_tasks(2000, seed=0)
    assert tasks == shop_tasks(2000, seed=0) and tasks[:9] != shop_tasks(9, seed=1)
    assert len({task.prompt_text for task in tasks}) == 2000
    assert len({str(catalogue(task.columns["shop"]["seed"])) for task in tasks}) == 2000
    assert all(len(task.trace or ()) <= 10 for task in tasks)
    monkeypatch.setattr("sixfold_environments.web.tasks.SHARES", {"remove": 1})
    assert len(shop_tasks(200, seed=0)) == 200
    with pytest.raises(UserError, match=r"data\.limit"):  # 480 exist
        shop_tasks(481, seed=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_browsers_see_the_same(backend: Backend) -> None:
    task, calls = next(one for one in shop_calls(50, seed=0) if len(one[1]) == 8)
    met, seen = asyncio.run(played(backend, task, calls))
    assert met and seen == asyncio.run(played(HtmlBrowser, task, calls))[1]
    assert seen[0] == '[1] link "Cart (0)"\nheading "Shop"\n[2] searchbox "Search"\n[3] button "Go"'
    assert seen[-1].startswith('[1] link "Shop"\nheading "Order 1"\nthank you, ')


class Visits:
    """Requests to a shop as one visitor."""

    def __init__(self, shop: Shop) -> None:
        self._ask = wsgi_answer(shop)
        self._cookie = ""

    def __call__(self, method: str, path: str, body: str = "") -> tuple[int, str]:
        headers = {"cookie": self._cookie} if self._cookie else {}
        given = self._ask(Request(method, f"{ORIGIN}{path}", headers, body.encode()), Limits())
        if cookie := given.header("set-cookie"):
            self._cookie = cookie.partition(";")[0]
        return given.status, given.header("location") or given.body.decode()


def test_the_server_checks_what_browsers_would_not_send() -> None:
    shop = Shop(0)
    product = shop.products[1]
    visit, colour = Visits(shop), product.colours[0]
    assert visit("GET", "/")[0] == 200
    for body in (
        "",
        f"product=1&colour={colour}&count=0",
        f"product=1&colour={colour}&count=-1",
        f"product=1&colour={colour}&count=10",
        f"product=1&colour={colour}&count=1.5",
        f"product=1&colour={colour}&count={'9' * 30}",
        f"product=1&colour={colour}&count=\u0661",
        "product=1&colour=pink&count=1",
        "product=99&colour=red&count=1",
        "%00=%ff&" * 100,
    ):
        assert visit("POST", "/cart/add", body)[0] in (404, 422)
    assert shop.carts == []
    assert visit("POST", "/order", "name=ann") == (303, "/cart")
    assert visit("POST", "/cart/add", f"product=1&colour={colour}&count=4") == (303, "/cart")
    assert visit("POST", "/cart/add", f"product=1&colour={colour}&count=4") == (303, "/cart")
    assert shop.carts == [Line(1, colour, 8)]
    assert visit("POST", "/cart/add", f"product=1&colour={colour}&count=4")[0] == 422
    for body in ("line=0&count=0", "line=7&count=1", "line=-1&count=1", "line=x&count=1"):
        assert visit("POST", "/cart/change", body)[0] == 422
    assert visit("POST", "/cart/change", "line=0&count=3") == (303, "/cart")
    for name in ("", "+++", "x" * 41):
        assert visit("POST", "/order", f"name={name}")[0] == 422
    assert visit("GET", "/order")[0] == visit("POST", "/")[0] == visit("GET", "/cart/add")[0] == 405
    assert (
        visit("GET", "/order/1")[0] == visit("GET", "/product/0")[0] == visit("GET", "/x")[0] == 404
    )
    assert visit("POST", "/order", "name=<b>ann</b>&gift=yes") == (303, "/order/1")
    assert "&lt;b&gt;ann" in visit("GET", "/order/1")[1]
    assert shop.orders == [Order((Line(1, colour, 3),), "<b>ann</b>", True)] and not shop.carts
    assert Visits(shop)("GET", "/order/1")[0] == 404  # another visitor


def test_visitors_have_carts_of_their_own() -> None:
    shop = Shop(0)
    one, other, colour = Visits(shop), Visits(shop), shop.products[1].colours[0]
    for visit in (one, other):
        visit("GET", "/")
    one("POST", "/cart/add", f"product=1&colour={colour}&count=1")
    assert "Cart (1)" in one("GET", "/")[1] and "Cart (0)" in other("GET", "/")[1]
    assert "Cart (0)" in Visits(shop)("GET", "/")[1]


def test_search() -> None:
    shop = Shop(0)
    product = shop.products[1]
    for words in (product.kind, f"{product.kind}s", product.name, product.name.upper()):
        page = Visits(shop)("GET", f"/search?q={words.replace(' ', '+')}")[1]
        assert f"{product.name} {product.price}" in page
    assert "nothing found" in Visits(shop)("GET", "/search?q=%3Cscript%3E")[1]
    assert "<script>" not in Visits(shop)("GET", "/search?q=%3Cscript%3E")[1]
