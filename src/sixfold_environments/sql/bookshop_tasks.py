"""Tasks of the SQL agent: questions about a bookshop, and changes to its rows.

Answers and changes are computed in Python from the rows, independently of the SQL in the worked
solutions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from sixfold.environment.tools.worked import worked_call
from sixfold.types import Task

from ..made_up_names import made_up_names
from .bookshop import Book, Bookshop, Change, make_bookshop


@dataclass(frozen=True)
class _Job:
    """One question or change, without its shop.

    Attributes:
        words: prompt of the task.
        queries: SQL statements of the worked solution.
        answer: the answer. None for a change.
        change: the change. None for a question.
    """

    words: str
    queries: tuple[str, ...]
    answer: int | str | None = None
    change: Change | None = None

    @property
    def kind(self) -> str:
        """Kind of the result that the job asks for: "change", "name" or "number"."""
        if self.answer is None:
            return "change"
        return "name" if isinstance(self.answer, str) else "number"


_Make = Callable[[Bookshop, Book, random.Random], _Job]
"""Function that makes a job. Arguments: the shop, the book that the job is about, the generator."""


def _price(shop: Bookshop, book: Book, rng: random.Random) -> _Job:
    query = f"select price from books where title = '{book.title}'"
    return _Job(f"what does {book.title} cost?", (query,), book.price)


def _stock(shop: Bookshop, book: Book, rng: random.Random) -> _Job:
    query = f"select stock from books where title = '{book.title}'"
    return _Job(f"how many copies of {book.title} are there?", (query,), book.stock)


def _author(shop: Bookshop, book: Book, rng: random.Random) -> _Job:
    author = shop.author_of(book)
    queries = (
        f"select author from books where title = '{book.title}'",
        f"select name from authors where id = {author.id}",
    )
    return _Job(f"who wrote {book.title}?", queries, author.name)


def _town(shop: Bookshop, book: Book, rng: random.Random) -> _Job:
    author = shop.author_of(book)
    queries = (
        f"select author from books where title = '{book.title}'",
        f"select town from authors where id = {author.id}",
    )
    return _Job(f"where does the author of {book.title} live?", queries, author.town)


def _dearer(shop: Bookshop, book: Book, rng: random.Random) -> _Job:
    queries = (
        f"select price from books where title = '{book.title}'",
        f"select count(*) from books where price > {book.price}",
    )
    answer = len([other for other in shop.books if other.price > book.price])
    return _Job(f"how many books cost more than {book.title}?", queries, answer)


def _cheapest(shop: Bookshop, book: Book, rng: random.Random) -> _Job:
    author = shop.author_of(book)
    queries = (
        f"select id from authors where name = '{author.name}'",
        f"select title from books where author = {author.id} order by price limit 1",
    )
    answer = min(shop.books_of(author), key=lambda book: book.price).title
    return _Job(f"what is the cheapest book of {author.name}?", queries, answer)


def _total(shop: Bookshop, book: Book, rng: random.Random) -> _Job:
    author = shop.author_of(book)
    queries = (
        f"select id from authors where name = '{author.name}'",
        f"select sum(price) from books where author = {author.id}",
    )
    answer = sum(book.price for book in shop.books_of(author))
    return _Job(f"what do all books of {author.name} cost?", queries, answer)


def _sell(shop: Bookshop, book: Book, rng: random.Random) -> _Job:
    price = rng.choice([value for value in range(10, 100) if value != book.price])
    query = f"update books set price = {price} where title = '{book.title}'"
    change = Change(updated=(book._replace(price=price),))
    return _Job(f"sell {book.title} for {price}.", (query,), change=change)


def _restock(shop: Bookshop, book: Book, rng: random.Random) -> _Job:
    count = rng.randrange(10, 100)
    query = f"update books set stock = stock + {count} where title = '{book.title}'"
    change = Change(updated=(book._replace(stock=book.stock + count),))
    return _Job(f"add {count} copies of {book.title}.", (query,), change=change)


def _remove(shop: Bookshop, book: Book, rng: random.Random) -> _Job:
    query = f"delete from books where title = '{book.title}'"
    return _Job(f"remove {book.title}.", (query,), change=Change(removed=(book.id,)))


def _remove_all(shop: Bookshop, book: Book, rng: random.Random) -> _Job:
    author = shop.author_of(book)
    queries = (
        f"select id from authors where name = '{author.name}'",
        f"delete from books where author = {author.id}",
    )
    change = Change(removed=tuple(book.id for book in shop.books_of(author)))
    return _Job(f"remove all books of {author.name}.", queries, change=change)


def _add(shop: Bookshop, book: Book, rng: random.Random) -> _Job:
    author, price = shop.author_of(book), rng.randrange(10, 100)
    (title,) = made_up_names(rng, 1, but=[book.title for book in shop.books])
    query = (
        "insert into books (title, author, price, stock)"
        f" values ('{title}', {author.id}, {price}, 1)"
    )
    change = Change(added=((title, author.id, price, 1),))
    return _Job(f"add {title} by {author.id} for {price}.", (query,), change=change)


JOBS: tuple[_Make, ...] = (
    *(_price, _stock, _dearer, _total),
    *(_author, _town, _cheapest, _author, _town, _cheapest),
    *(_sell, _restock, _remove, _remove_all, _add),
)
"""Functions that make jobs, each for an equal share of the tasks: questions for numbers, questions
for names, and changes. Questions for names are listed twice: a small model learns them late.
"""


def bookshop_tasks(count: int, *, seed: int) -> list[Task]:
    """Make tasks, each with its own shop. The same arguments give the same list."""
    tasks: dict[str, Task] = {}
    number = 0
    while len(tasks) < count:
        task = _task(f"{seed}/{number}", JOBS[number % len(JOBS)])
        tasks.setdefault(task.prompt_text, task)
        number += 1
    return list(tasks.values())


def _task(seed: str, make: _Make) -> Task:
    shop = make_bookshop(seed)
    rng = random.Random(f"bookshop_tasks/{seed}")
    job = make(shop, rng.choice(shop.books), rng)
    calls = [worked_call("sql", {"query": query}) for query in job.queries]
    return Task(
        id=f"sql_agent-{seed}",
        prompt=job.words,
        answer=job.answer,
        trace=(*calls, "done" if job.answer is None else str(job.answer)),
        columns={"shop": seed, "change": job.change and job.change.to_record()},
        source=f"sql_agent_{job.kind}",
    )
