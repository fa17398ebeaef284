"""Catalogue of the shop: products drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

KINDS = ("cup", "bowl", "lamp", "hat", "bag", "pen", "rug", "vase")
MAKES = ("tin", "clay", "glass", "wool", "oak", "silk")
COLOURS = ("red", "green", "blue", "black", "white")

KINDS_SOLD, MAKES_SOLD, COLOURS_SOLD = 4, 3, 3
"""Number of kinds per shop, products per kind, and colours per product."""

HIGHEST_PRICE = 99


@dataclass(frozen=True)
class Product:
    """A product.

    Attributes:
        number: number in the shop, starting at 1.
    """

    number: int
    kind: str
    make: str
    price: int
    colours: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.make} {self.kind}"


def by_price(products: Iterable[Product]) -> list[Product]:
    """The products from the cheapest to the dearest, as a search shows them."""
    return sorted(products, key=lambda product: (product.price, product.number))


def catalogue(seed: int) -> tuple[Product, ...]:
    """Draw the products of a shop. Prices within a kind differ."""
    rng = random.Random(f"shop/{seed}")
    products: list[Product] = []
    for kind in rng.sample(KINDS, KINDS_SOLD):
        prices = rng.sample(range(1, HIGHEST_PRICE + 1), MAKES_SOLD)
        for make, price in zip(rng.sample(MAKES, MAKES_SOLD), prices, strict=True):
            colours = tuple(rng.sample(COLOURS, COLOURS_SOLD))
            products.append(Product(len(products) + 1, kind, make, price, colours))
    return tuple(products)
