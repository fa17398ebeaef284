"""The shop: a WSGI application with a cart per visitor and a list of orders."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from .catalogue import Product, by_price, catalogue
from .pages import (
    MOST_OF_ONE,
    cart_page,
    checkout_page,
    home_page,
    order_page,
    problem_page,
    product_page,
    results_page,
)

MOST_BODY = 100_000
"""Maximum number of bytes of a request's body."""

_STATUS = {200: "200 OK", 303: "303 See Other", 404: "404 Not Found", 405: "405 Not Allowed"}
_STATUS |= {422: "422 Unprocessable Content"}


@dataclass(frozen=True)
class Line:
    """Pieces of one product in one colour."""

    product: int
    colour: str
    count: int


@dataclass(frozen=True)
class Order:
    """An order.

    Attributes:
        lines: lines of the cart, in the order in which they were added.
    """

    lines: tuple[Line, ...]
    name: str
    gift: bool


@dataclass
class Answer:
    """A response of the shop.

    Attributes:
        page: HTML of the page, or "" for a redirect.
        location: target of a redirect, or "".
    """

    status: int
    page: str = ""
    location: str = ""


@dataclass
class Visitor:
    """State of one visitor.

    Attributes:
        orders: numbers of the visitor's orders, starting at 1.
    """

    cart: list[Line] = field(default_factory=list)
    orders: list[int] = field(default_factory=list)

    @property
    def pieces(self) -> int:
        return sum(line.count for line in self.cart)


Fields = dict[str, str]


class Shop:
    """A shop with its own catalogue, carts and orders.

    Args:
        cart: initial cart of every visitor.
    """

    def __init__(self, seed: int, cart: Iterable[Line] = ()) -> None:
        self.products: dict[int, Product] = {p.number: p for p in catalogue(seed)}
        self.visitors: dict[str, Visitor] = {}
        self.orders: list[Order] = []
        self._seed = seed
        self._cart = tuple(cart)

    @property
    def carts(self) -> list[Line]:
        return [line for visitor in self.visitors.values() for line in visitor.cart]

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """The WSGI application."""
        visitor, cookie = self._visitor(environ.get("HTTP_COOKIE", ""))
        given = self._answer(environ, visitor)
        body = given.page.encode()
        headers = [
            ("Content-Type", "text/html; charset=utf-8"),
            ("Content-Length", str(len(body))),
            *([("Location", given.location)] if given.location else []),
            *([("Set-Cookie", f"visitor={cookie}; Path=/; HttpOnly")] if cookie else []),
        ]
        start_response(_STATUS[given.status], headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _visitor(self, cookies: str) -> tuple[Visitor, str]:
        """The visitor of a request, and the cookie of a new visitor or ""."""
        try:
            named = SimpleCookie(cookies).get("visitor")
        except CookieError:
            named = None
        if named is not None and named.value in self.visitors:
            return self.visitors[named.value], ""
        text = f"{self._seed}/{len(self.visitors)}"
        identity = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.visitors[identity] = Visitor(list(self._cart))
        return self.visitors[identity], identity

    def _answer(self, environ: dict[str, Any], visitor: Visitor) -> Answer:
        method, path = environ["REQUEST_METHOD"], environ.get("PATH_INFO") or "/"
        pages = {"/": self._home, "/search": self._search, "/cart": self._shown_cart}
        pages |= {"/checkout": self._checkout}
        changes = {"/cart/add": self._add, "/cart/change": self._change}
        changes |= {"/cart/remove": self._remove, "/order": self._order}
        if path in changes:
            if method != "POST":
                return Answer(405, problem_page("Not allowed"))
            return changes[path](visitor, _posted_fields(environ))
        if method not in ("GET", "HEAD"):
            return Answer(405, problem_page("Not allowed"))
        asked = _fields(environ.get("QUERY_STRING", ""))
        if path in pages:
            return pages[path](visitor, asked)
        kind, _, number = path[1:].partition("/")
        if kind == "product" and (product := self._product(number)):
            return Answer(200, product_page(product, visitor.pieces))
        if kind == "order" and _whole(number) in visitor.orders:
            name = self.orders[_whole(number) - 1].name
            return Answer(200, order_page(_whole(number), name))
        return Answer(404, problem_page("Not found"))

    def _home(self, visitor: Visitor, asked: Fields) -> Answer:
        return Answer(200, home_page(visitor.pieces))

    def _search(self, visitor: Visitor, asked: Fields) -> Answer:
        """Find products whose name has every word of the search, also as a plural. The cheapest is
        first.
        """
        words = " ".join(asked.get("q", "").lower().split())
        found = by_price(
            product
            for product in self.products.values()
            if all(
                {word, word.removesuffix("s")} & {product.make, product.kind}
                for word in words.split()
            )
        )
        return Answer(200, results_page(words, found, visitor.pieces))

    def _shown_cart(self, visitor: Visitor, asked: Fields, problem: str = "") -> Answer:
        lines = [(self.products[line.product], line.colour, line.count) for line in visitor.cart]
        return Answer(422 if problem else 200, cart_page(lines, problem))

    def _checkout(self, visitor: Visitor, asked: Fields) -> Answer:
        if not visitor.cart:
            return Answer(303, location="/cart")
        return Answer(200, checkout_page(self._total(visitor)))

    def _add(self, visitor: Visitor, sent: Fields) -> Answer:
        product = self._product(sent.get("product", ""))
        if product is None:
            return Answer(404, problem_page("Not found"))
        colour, count = sent.get("colour", ""), _whole(sent.get("count", ""))
        at = next(
            (
                at
                for at, line in enumerate(visitor.cart)
                if (line.product, line.colour) == (product.number, colour)
            ),
            len(visitor.cart),
        )
        total = count + (visitor.cart[at].count if at < len(visitor.cart) else 0)
        if colour not in product.colours or count < 1 or total > MOST_OF_ONE:
            problem = f"choose a colour and 1 to {MOST_OF_ONE} pieces"
            return Answer(422, product_page(product, visitor.pieces, problem))
        visitor.cart[at : at + 1] = [Line(product.number, colour, total)]
        return Answer(303, location="/cart")

    def _change(self, visitor: Visitor, sent: Fields) -> Answer:
        at, count = _whole(sent.get("line", "")), _whole(sent.get("count", ""))
        if not (0 <= at < len(visitor.cart) and 1 <= count <= MOST_OF_ONE):
            return self._shown_cart(visitor, {}, f"choose 1 to {MOST_OF_ONE} pieces")
        line = visitor.cart[at]
        visitor.cart[at] = Line(line.product, line.colour, count)
        return Answer(303, location="/cart")

    def _remove(self, visitor: Visitor, sent: Fields) -> Answer:
        at = _whole(sent.get("line", ""))
        if 0 <= at < len(visitor.cart):
            del visitor.cart[at]
        return Answer(303, location="/cart")

    def _order(self, visitor: Visitor, sent: Fields) -> Answer:
        name, gift = " ".join(sent.get("name", "").split()), sent.get("gift") == "yes"
        if not visitor.cart:
            return Answer(303, location="/cart")
        if not 1 <= len(name) <= 40:
            page = checkout_page(self._total(visitor), name[:40], gift, "a name is needed")
            return Answer(422, page)
        self.orders.append(Order(tuple(visitor.cart), name, gift))
        visitor.orders.append(len(self.orders))
        visitor.cart.clear()
        return Answer(303, location=f"/order/{len(self.orders)}")

    def _product(self, number: str) -> Product | None:
        return self.products.get(_whole(number))

    def _total(self, visitor: Visitor) -> int:
        return sum(self.products[line.product].price * line.count for line in visitor.cart)


def _whole(text: str) -> int:
    """A small whole number, or -1."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else -1


def _fields(text: str) -> Fields:
    """Fields of a query or a form. The last value of a name counts."""
    try:
        parsed = parse_qs(text, keep_blank_values=True, max_num_fields=50)
    except ValueError:
        return {}
    return {name: values[-1] for name, values in parsed.items()}


def _posted_fields(environ: dict[str, Any]) -> Fields:
    size = _whole(str(environ.get("CONTENT_LENGTH") or "0"))
    body = environ["wsgi.input"].read(size) if 0 <= size <= MOST_BODY else b""
    return _fields(body.decode("utf-8", "replace"))
