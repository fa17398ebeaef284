"""Tasks of the shop: prompts, goal states and worked solutions.

Only the state of the shop's server counts: its orders and carts must be exactly those of the goal.
The text of pages and replies does not count.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sixfold.environment.tools.worked import worked_call
from sixfold.errors import UserError
from sixfold.types import Task

from .catalogue import Product, by_price, catalogue
from .shop import Line, Order, Shop

NAMES = ("ann", "bob", "eva", "ian", "joe", "kim", "leo", "max")

COUNTS = range(1, 6)
"""Numbers of pieces that a task may ask for."""

SHARES = {"buy": 4, "put": 2, "remove": 2, "change": 2}
"""Relative frequency of each kind of task."""

DONE = "done"
"""Last reply of a worked solution. Any reply without a call ends the episode."""

_DRAWS = 1000
"""Drawing stops after this many draws in a row without a new task."""

Call = tuple[str, dict[str, Any]]
"""Name of a tool and its arguments."""


@dataclass(frozen=True)
class _Drawn:
    """Content of one task.

    Attributes:
        wanted: goal state, as for `goal_met`.
        calls: actions that solve the task.
    """

    words: str
    wanted: dict[str, Any]
    calls: list[Call]
    cart: tuple[Line, ...] = ()


def goal_met(shop: Shop, wanted: Mapping[str, Any]) -> bool:
    """True if the state of the server is the goal state.

    Args:
        shop: the shop after the episode.
        wanted: goal state: `lines` as (product, colour, count), for an order also `name` and
            `gift`.
    """
    lines = tuple(Line(*line) for line in wanted["lines"])
    if "name" in wanted:
        order = Order(lines, wanted["name"], wanted["gift"])
        return shop.orders == [order] and not shop.carts
    return not shop.orders and shop.carts == list(lines)


def shop_of(task: Task) -> Shop:
    """Make the shop of a task, in its initial state.

    Raises:
        ValueError: if the task does not belong to the shop.
    """
    given = task.columns.get("shop")
    if not isinstance(given, Mapping) or not {"seed", "cart", "wanted"} <= set(given):
        raise ValueError(
            f"task {task.id} has no shop: environment.episode = 'web_shop' plays the tasks of"
            " data.source = 'web_shop'"
        )
    return Shop(given["seed"], [Line(*line) for line in given["cart"]])


def shop_tasks(count: int, *, seed: int) -> list[Task]:
    """Make different tasks with worked solutions. Arguments and errors as for `shop_calls`."""
    return [
        replace(task, trace=(*(worked_call(*call) for call in calls), DONE))
        for task, calls in shop_calls(count, seed=seed)
    ]


def shop_calls(count: int, *, seed: int) -> list[tuple[Task, list[Call]]]:
    """Make different tasks, each with the actions that solve it.

    The same arguments give the same list.

    Args:
        count: number of tasks. Each has its own shop.

    Raises:
        UserError: if fewer than `count` tasks exist.
    """
    rng = random.Random(f"web_shop/{seed}")
    sorts, shares = list(SHARES), list(SHARES.values())
    found: dict[str, tuple[Task, list[Call]]] = {}
    misses = 0
    while len(found) < count and misses < _DRAWS:
        shop_seed = rng.randrange(2**32)
        sort = rng.choices(sorts, shares)[0]
        made = _SORTS[sort](rng, catalogue(shop_seed))
        columns = {"seed": shop_seed, "cart": _plain(made.cart), "wanted": made.wanted}
        task = Task(
            id=f"web_shop-{made.words}",
            prompt=made.words,
            columns={"shop": columns},
            source=f"web_shop_{sort}",
        )
        misses = misses + 1 if task.id in found else 0
        found.setdefault(task.id, (task, made.calls))
    if len(found) < count:
        raise UserError(f"data.limit = {count}: web_shop has about {len(found)} tasks. Lower it")
    return list(found.values())


def _plain(lines: Iterable[Line]) -> list[list[Any]]:
    return [[line.product, line.colour, line.count] for line in lines]


def _put(rng: random.Random, products: tuple[Product, ...]) -> _Drawn:
    line, words, calls = _draw_product(rng, products)
    return _Drawn(f"put {words} into the cart", {"lines": _plain([line])}, calls)


def _buy(rng: random.Random, products: tuple[Product, ...]) -> _Drawn:
    """A task to order pieces of a product for a person."""
    line, words, calls = _draw_product(rng, products)
    name, gift = rng.choice(NAMES), rng.random() < 0.5
    calls.append(("click", {"element": 5}))
    if gift:
        calls.append(("click", {"element": 2}))
    calls.append(("type", {"element": 1, "text": name, "submit": True}))
    wanted = {"lines": _plain([line]), "name": name, "gift": gift}
    return _Drawn(f"buy {words} for {name}{' as a gift' if gift else ''}", wanted, calls)


def _draw_product(
    rng: random.Random, products: tuple[Product, ...]
) -> tuple[Line, str, list[Call]]:
    """Draw a product to put into the cart. Returns its line, its description and the actions."""
    product, count, cheapest = rng.choice(products), rng.choice(COUNTS), rng.random() < 0.5
    if cheapest:
        product = by_price(other for other in products if other.kind == product.kind)[0]
    colour = rng.choice(product.colours)
    searched = product.kind if cheapest else product.name  # the product is the first result
    calls: list[Call] = [
        ("type", {"element": 2, "text": searched, "submit": True}),
        ("click", {"element": 2}),
        ("select", {"element": 2, "option": colour}),
    ]
    if count > 1:
        calls.append(("type", {"element": 3, "text": str(count)}))
    calls.append(("click", {"element": 4}))
    plural = "s" if count > 1 else ""
    name = f"the cheapest {colour} {product.kind}" if cheapest else f"{colour} {product.name}"
    words = f"{count} of {name}{plural}" if cheapest else f"{count} {name}{plural}"
    return Line(product.number, colour, count), words, calls


def _draw_cart(rng: random.Random, products: tuple[Product, ...]) -> tuple[list[Line], int]:
    """Draw a cart of two products, and the index of the line that the task changes."""
    lines = [
        Line(product.number, rng.choice(product.colours), rng.choice(COUNTS))
        for product in rng.sample(products, 2)
    ]
    return lines, rng.randrange(2)


def _remove(rng: random.Random, products: tuple[Product, ...]) -> _Drawn:
    lines, at = _draw_cart(rng, products)
    name = products[lines[at].product - 1].name
    left = lines[:at] + lines[at + 1 :]
    calls: list[Call] = [("click", {"element": 1}), ("click", {"element": 4 + 3 * at})]
    words = f"remove line {at + 1} from the cart: {lines[at].colour} {name}"
    return _Drawn(words, {"lines": _plain(left)}, calls, tuple(lines))


def _change(rng: random.Random, products: tuple[Product, ...]) -> _Drawn:
    lines, at = _draw_cart(rng, products)
    line = lines[at]
    name = products[line.product - 1].name
    count = rng.choice([count for count in COUNTS if count != line.count])
    wanted = [*lines]
    wanted[at] = Line(line.product, line.colour, count)
    typed = {"element": 2 + 3 * at, "text": str(count), "submit": True}
    calls: list[Call] = [("click", {"element": 1}), ("type", typed)]
    words = f"change line {at + 1} of the cart to {count}: {line.colour} {name}"
    return _Drawn(words, {"lines": _plain(wanted)}, calls, tuple(lines))


_SORTS = {"buy": _buy, "put": _put, "remove": _remove, "change": _change}
