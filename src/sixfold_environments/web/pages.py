"""HTML of the shop's pages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .catalogue import Product

MOST_OF_ONE = 9
"""Maximum number of pieces of one product in a cart."""

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title>
</head>
<body>
<header><nav aria-label="Shop">{links}</nav></header>
<main><h1>{title}</h1>
{body}
</main>
</body>
</html>
"""

_SEARCH = """<form action="/search" role="search">
<label for="q">Search</label> <input type="search" id="q" name="q" maxlength="40">
<button>Go</button>
</form>"""


def _page(title: str, body: str, links: str) -> str:
    return _PAGE.format(title=escape(title), body=body, links=links)


def _cart_link(pieces: int) -> str:
    return f'<a href="/cart">Cart ({pieces})</a>'


def _problem(text: str) -> str:
    return f'<p role="alert">{escape(text)}</p>' if text else ""


def home_page(pieces: int) -> str:
    """The page with the search form. `pieces` is the number of pieces in the cart."""
    return _page("Shop", _SEARCH, _cart_link(pieces))


def results_page(words: str, found: Sequence[Product], pieces: int) -> str:
    """Products that a search found, with their prices."""
    items = "\n".join(
        f'<li><a href="/product/{p.number}">{escape(p.name)} {p.price}</a></li>' for p in found
    )
    body = f"<ul>\n{items}\n</ul>" if found else f"<p>nothing found</p>\n{_SEARCH}"
    return _page(words or "all", body, _cart_link(pieces))


def product_page(product: Product, pieces: int, problem: str = "") -> str:
    """A product with its options."""
    colours = "".join(f"<option>{escape(colour)}</option>" for colour in product.colours)
    body = f"""<p>{product.price}</p>{_problem(problem)}
<form action="/cart/add" method="post">
<input type="hidden" name="product" value="{product.number}">
<label for="colour">Colour</label> <select id="colour" name="colour">{colours}</select>
<label>Count <input type="number" name="count" value="1" min="1" max="{MOST_OF_ONE}"></label>
<button>Add</button>
</form>"""
    return _page(product.name, body, _cart_link(pieces))


def cart_page(lines: Sequence[tuple[Product, str, int]], problem: str = "") -> str:
    """The cart, with a form per line and a link to the checkout.

    Args:
        lines: (product, colour, count).
        problem: why the last change was refused, or "".
    """
    rows = "\n".join(_row(number, *line) for number, line in enumerate(lines))
    total = sum(product.price * count for product, _, count in lines)
    rest = f'<p>total {total}</p>\n<a href="/checkout">Checkout</a>' if lines else "<p>empty</p>"
    return _page("Cart", f"{_problem(problem)}{rows}\n{rest}", '<a href="/">Shop</a>')


def _row(number: int, product: Product, colour: str, count: int) -> str:
    return f"""<form action="/cart/change" method="post">
<input type="hidden" name="line" value="{number}">
<label>{escape(colour)} {escape(product.name)}
<input type="number" name="count" value="{count}" min="1" max="{MOST_OF_ONE}"></label>
<button>Update</button> <button formaction="/cart/remove" formnovalidate>Remove</button>
</form>"""


def checkout_page(total: int, name: str = "", gift: bool = False, problem: str = "") -> str:
    """The form that places the order, filled with the values of the last attempt."""
    checked = " checked" if gift else ""
    body = f"""<p>total {total}</p>{_problem(problem)}
<form action="/order" method="post">
<p><label for="name">Name</label>
<input id="name" name="name" value="{escape(name)}" required maxlength="40"></p>
<p><input type="checkbox" id="gift" name="gift" value="yes"{checked}>
<label for="gift">Gift</label></p>
<button>Order</button>
</form>"""
    return _page("Checkout", body, "")


def order_page(number: int, name: str) -> str:
    """Confirmation of an order."""
    return _page(f"Order {number}", f"<p>thank you, {escape(name)}</p>", '<a href="/">Shop</a>')


def problem_page(title: str) -> str:
    """Page for an unknown address or a method that is not allowed."""
    return _page(title, "", '<a href="/">Shop</a>')
