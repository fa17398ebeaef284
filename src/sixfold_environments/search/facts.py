"""A made-up world of people and towns: one short document each.

Names are random, so no model knows an answer. People share first names and family names, so a
search for a person also finds others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ..made_up_names import FIRST_SYLLABLES, made_up_names
from .index import Document, SearchIndex

FIRST_NAMES = FIRST_SYLLABLES
FAMILY_NAMES = tuple(sorted(made_up_names(random.Random("family"), 125)))
ENDINGS = ("bridge", "bury", "dale", "field", "ford", "ham", "port", "ton")
"""A person has a first name and a family name. A town is a family name with an ending. Each of the
parts can be a token of a small vocabulary."""

PEOPLE, TOWNS = len(FIRST_NAMES) * len(FAMILY_NAMES), len(FAMILY_NAMES) * len(ENDINGS)
"""Numbers of people and towns in a world. Each has one document, with an id of four digits."""


@dataclass(frozen=True)
class Person:
    """A person.

    Attributes:
        name: first name and family name.
        town: name of the town where the person lives.
        id: id of the document.
    """

    name: str
    town: str
    id: str

    @property
    def document(self) -> Document:
        return Document(self.id, self.name, f"{self.name} lives in {self.town}.")


@dataclass(frozen=True)
class Town:
    """A town.

    Attributes:
        name: one word.
        mayor: a person.
        id: id of the document.
    """

    name: str
    mayor: Person
    id: str

    @property
    def document(self) -> Document:
        return Document(self.id, self.name, f"the mayor of {self.name} is {self.mayor.name}.")


@dataclass(frozen=True)
class World:
    """People and towns, in random order.

    Attributes:
        people: all people.
        towns: all towns. A mayor may live in another town.
    """

    people: tuple[Person, ...]
    towns: tuple[Town, ...]

    def town_of(self, person: Person) -> Town:
        return self._towns[person.town]

    @cached_property
    def _towns(self) -> dict[str, Town]:
        return {town.name: town for town in self.towns}

    @property
    def documents(self) -> list[Document]:
        """The corpus, ordered by id."""
        made = [*(person.document for person in self.people), *(t.document for t in self.towns)]
        return sorted(made, key=lambda document: document.id)


@lru_cache(maxsize=2)
def made_up_world(seed: int) -> World:
    """Make a world. The same seed gives the same world."""
    rng = random.Random(f"facts/{seed}")
    ids = list(map(str, rng.sample(range(1000, 10_000), PEOPLE + TOWNS)))
    names = [f"{first} {family}" for first in FIRST_NAMES for family in FAMILY_NAMES]
    towns = [family + ending for family in FAMILY_NAMES for ending in ENDINGS]
    rng.shuffle(names)
    rng.shuffle(towns)
    people = tuple(Person(name, rng.choice(towns), ids[i]) for i, name in enumerate(names))
    return World(
        people,
        tuple(Town(name, rng.choice(people), ids[PEOPLE + i]) for i, name in enumerate(towns)),
    )


@lru_cache(maxsize=2)
def made_up_index(seed: int) -> SearchIndex:
    return SearchIndex(made_up_world(seed).documents)
