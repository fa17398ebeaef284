"""A bookshop in SQLite: authors and books with made-up names, and changes to its rows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ..made_up_names import made_up_names
from .database import Database, QueryLimits

AUTHORS, BOOKS = 8, 32
"""Number of rows of each table."""

SCHEMA = """
CREATE TABLE authors (id INTEGER PRIMARY KEY, name TEXT NOT NULL, town TEXT NOT NULL);
CREATE TABLE books (
    id INTEGER PRIMARY KEY,
    title TEXT NOT NULL,
    author INTEGER NOT NULL REFERENCES authors (id),
    price INTEGER NOT NULL,
    stock INTEGER NOT NULL
);
"""

LIMITS = QueryLimits(
    rows=20,
    characters=600,
    instructions=300_000,
    value_bytes=2000,
    pages=64,
    statement_characters=2000,
)
"""Limits of one statement. They are low because the database is small."""


class Author(NamedTuple):
    """A row of the table `authors`."""

    id: int
    name: str
    town: str


class Book(NamedTuple):
    """A row of the table `books`. `author` is the id of an author."""

    id: int
    title: str
    author: int
    price: int
    stock: int


@dataclass(frozen=True)
class Bookshop:
    """All rows of a shop. No two titles, names, towns, ids or prices are equal.

    Attributes:
        authors: rows of the table `authors`.
        books: rows of the table `books`.
    """

    authors: tuple[Author, ...]
    books: tuple[Book, ...]

    def books_of(self, author: Author) -> list[Book]:
        return [book for book in self.books if book.author == author.id]

    def author_of(self, book: Book) -> Author:
        return next(author for author in self.authors if author.id == book.author)

    def database(self, *, writable: bool) -> Database:
        """Make a database in memory with these rows.

        Args:
            writable: whether statements may change rows.
        """
        rows = "".join(
            f"INSERT INTO {table} VALUES {', '.join(str(tuple(row)) for row in rows)};\n"
            for table, rows in (("authors", self.authors), ("books", self.books))
        )
        return Database.in_memory(SCHEMA + rows, writable=writable, limits=LIMITS)


@dataclass(frozen=True)
class Change:
    """Change of the table `books` that a task requires. All other rows must stay the same.

    Attributes:
        updated: books with new values.
        removed: ids of deleted books.
        added: new books as (title, author, price, stock), with any id.
    """

    updated: tuple[Book, ...] = ()
    removed: tuple[int, ...] = ()
    added: tuple[tuple[str, int, int, int], ...] = ()

    def to_record(self) -> dict[str, Any]:
        return {
            "updated": [list(book) for book in self.updated],
            "removed": list(self.removed),
            "added": [list(book) for book in self.added],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Change:
        """Inverse of `to_record`."""
        return cls(
            tuple(Book(*row) for row in record["updated"]),
            tuple(record["removed"]),
            tuple((title, author, price, stock) for title, author, price, stock in record["added"]),
        )

    def holds(self, shop: Bookshop, database: Database) -> bool:
        """True if the database differs from the shop by exactly this change.

        Args:
            shop: rows before the change.
            database: database of `shop` after the policy's statements.
        """
        if database.table("authors") != [tuple(author) for author in sorted(shop.authors)]:
            return False
        expected = {book.id: book for book in shop.books if book.id not in self.removed}
        expected |= {book.id: book for book in self.updated}
        found = {row[0]: row for row in database.table("books")}
        kept = {number: found.pop(number, None) for number in expected}
        return kept == {number: tuple(book) for number, book in expected.items()} and Counter(
            row[1:] for row in found.values()
        ) == Counter(self.added)


@lru_cache(maxsize=256)
def make_bookshop(seed: str) -> Bookshop:
    """Make a shop with random rows. The same seed gives the same shop."""
    rng = random.Random(f"bookshop/{seed}")
    names = made_up_names(rng, 2 * AUTHORS + BOOKS)
    numbers = rng.sample(range(10, 100), AUTHORS)
    authors = tuple(
        Author(number, names[2 * i], names[2 * i + 1]) for i, number in enumerate(numbers)
    )
    titles, prices = names[2 * AUTHORS :], rng.sample(range(10, 100), BOOKS)
    books = tuple(
        Book(i + 1, title, _author(rng, numbers, i), price, rng.randrange(10, 100))
        for i, (title, price) in enumerate(zip(titles, prices, strict=True))
    )
    return Bookshop(authors, books)


def _author(rng: random.Random, numbers: Sequence[int], position: int) -> int:
    """Id of the author of the book at a position. Each author gets at least two books."""
    return numbers[position // 2] if position < 2 * len(numbers) else rng.choice(numbers)
