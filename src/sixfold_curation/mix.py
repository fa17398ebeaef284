"""Stage `mix`: draw rows so that sources, or the values of a column, have given shares."""

from __future__ import annotations

import math
from array import array
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from pydantic import Field, field_validator

from sixfold.data.columns import MISSING, lookup
from sixfold.errors import UserError, nearest
from sixfold.seeds import ORDER_BYTES, seed_number

from .stage import Context, Decision, Health, Record, Rows, Stage

MOST_DEVIATION = 0.01
"""Largest deviation of a share without an alarm."""


class Mix(Stage):
    """Draw rows by weight.

    Args:
        weights: weight of each source, or of each value of the column `by`. They need not add up to
            1. A weight of 0 leaves the rows out.
        by: column with the domain of a row, such as "source", "length_stratum" or "meta.level".
        total: number of rows. 0: the largest number that has the shares, to one row.
        copies: how often a row may be used.
    """

    kind: ClassVar[str] = "mix"

    weights: Mapping[str, float]
    by: str = "source"
    total: int = Field(default=0, ge=0)
    copies: int = Field(default=1, ge=1)

    @field_validator("weights")
    @classmethod
    def _weights(cls, weights: Mapping[str, float]) -> Mapping[str, float]:
        wrong = [name for name, weight in weights.items() if not 0 <= weight < math.inf]
        if wrong:
            raise ValueError(f"the weight of {wrong[0]!r} is {weights[wrong[0]]}: give 0 or more")
        if not any(weights.values()):
            raise ValueError("give at least one weight above 0")
        return weights

    def decide(self, rows: Rows, context: Context) -> Generator[Decision, None, Health]:
        orders = self._orders(rows, context.seed)
        counts = {name: len(order) for name, order in orders.items()}
        wanted = allocate(self.weights, counts, self.total, self.copies)
        draws = {name: Draw.of(orders[name], count) for name, count in wanted.items()}
        tally = Tally(self.weights, counts)
        for record in rows:
            name = domain(record, self.by)
            used = draws[name].uses(order_of(record, context.seed))
            tally.add(name, record, used)
            yield from decisions(record, used, f"{wanted[name]} of {counts[name]} rows of {name!r}")
        return tally.health(sum(wanted.values()) < self.total)

    def _orders(self, rows: Rows, seed: int) -> dict[str, array[int]]:
        """Key of each row, by which rows are drawn: 8 bytes per row.

        Raises:
            UserError: a value has no weight, or a weight has no rows.
        """
        found: dict[str, array[int]] = {name: array("Q") for name in self.weights}
        for record in rows:
            name = domain(record, self.by)
            if name not in found:
                raise UserError(
                    f"{record.where}: {self.by!r} is {name!r}, which has no weight. Add it to the"
                    f" weights of the stage 'mix' (0 leaves such rows out)."
                    f"{nearest(name, [*self.weights])}"
                )
            found[name].append(order_of(record, seed))
        empty = [name for name, weight in self.weights.items() if weight and not found[name]]
        if empty:
            raise UserError(
                f"the stage 'mix' has a weight for {empty[0]!r}, but no row has this"
                f" {self.by!r}. Rows have"
                f" {', '.join(repr(n) for n, keys in found.items() if keys) or 'none'}"
            )
        return found


def domain(record: Record, by: str) -> str:
    """Value of a column of a row, as text.

    Raises:
        UserError: the row does not have the column.
    """
    value = record.source if by == "source" else lookup(record.fields, by)
    if value is MISSING or isinstance(value, list | dict):
        raise UserError(
            f"{record.where}: there is no text or number in the column {by!r}, by which the stage"
            f" 'mix' draws.{nearest(by, [*record.fields])}"
        )
    return str(value)


def allocate(
    weights: Mapping[str, float], counts: Mapping[str, int], total: int, copies: int
) -> dict[str, int]:
    """Rows of each domain. Shares are rounded by largest remainders, so that they add up.

    Args:
        weights: weight by domain.
        counts: rows that there are.
        total: rows to draw. 0: as many as the domain that is used up first allows.
        copies: how often a row may be used.

    Returns:
        Rows by domain: never more than `copies` times those that there are.
    """
    whole = math.fsum(weights.values())
    shares = {name: weight / whole for name, weight in weights.items()}
    room = {name: counts[name] * copies for name in weights}
    if total:
        return {name: min(n, room[name]) for name, n in _rounded(shares, total).items()}
    most = min(int((room[name] + 1) / share) for name, share in shares.items() if share)
    while True:
        found = _rounded(shares, most)
        if all(n <= room[name] for name, n in found.items()):
            return found
        most -= 1


def _rounded(shares: Mapping[str, float], total: int) -> dict[str, int]:
    exact = {name: share * total for name, share in shares.items()}
    found = {name: math.floor(value + 1e-9) for name, value in exact.items()}
    rest = sorted(exact, key=lambda name: found[name] - exact[name])
    for name in rest[: total - sum(found.values())]:
        found[name] += 1
    return found


@dataclass(frozen=True)
class Draw:
    """How often the rows of a domain are used: all of them `each` times, and some once more.

    Args:
        each: uses of every row.
        until: rows with a key up to this one are used once more. -1: none.
    """

    each: int
    until: int

    @classmethod
    def of(cls, orders: Sequence[int], count: int) -> Draw:
        """Draw `count` rows: those with the smallest keys once more than the others."""
        each, more = divmod(count, len(orders)) if len(orders) else (0, 0)
        if not more:
            return cls(each, -1)
        keys = np.asarray(orders, dtype=np.uint64)
        return cls(each, int(np.partition(keys, more - 1)[more - 1]))

    def uses(self, order: int) -> int:
        """Uses of the row with this key."""
        return self.each + (order <= self.until)


def order_of(record: Record, seed: int) -> int:
    """Key by which a row is drawn: a hash of seed and id."""
    return seed_number(f"{seed}:{record.id}", ORDER_BYTES)


def decisions(record: Record, uses: int, note: str) -> Iterator[Decision]:
    """The decision about a row, and one for each further copy of it, which has an id of its own."""
    yield Decision(record, uses > 0, "" if uses else "not_drawn", note)
    for number in range(2, uses + 1):
        identity = f"{record.id}/copy-{number}"
        fields = {**record.fields, "id": identity}
        yield Decision(replace(record, id=identity, fields=fields), True, "copy", note)


class Tally:
    """Counts rows and lengths of each domain.

    Args:
        weights: weight by domain.
        counts: rows before the draw.
    """

    def __init__(self, weights: Mapping[str, float], counts: Mapping[str, int]) -> None:
        whole = math.fsum(weights.values())
        self._asked = {name: weight / whole for name, weight in weights.items()}
        self._counts = counts
        self._drawn = dict.fromkeys(weights, 0)
        self._characters = {name: [0, 0] for name in weights}

    def add(self, name: str, record: Record, uses: int) -> None:
        """Count a row that is used this often."""
        self._drawn[name] += uses
        for at, text in enumerate((record.prompt, record.answer)):
            self._characters[name][at] += uses * len(text)

    def health(self, short: bool = False) -> Health:
        """State after the draw.

        Args:
            short: there were fewer rows than asked for.
        """
        total = sum(self._drawn.values())
        shares = {name: drawn / total if total else 0.0 for name, drawn in self._drawn.items()}
        gaps = {name: share - self._asked[name] for name, share in shares.items()}
        value, alarm = max(map(abs, gaps.values())), ""
        least = min(gaps, key=gaps.__getitem__)
        if value > MOST_DEVIATION or short:
            alarm = (
                f"the mix has {total:,} rows, and {least!r} has {shares[least]:.1%} of them:"
                f" {self._asked[least]:.1%} were asked for. Lower the total, allow copies, or add"
                " rows"
            )
        table = {
            name: {
                "rows": self._drawn[name],
                "of": self._counts[name],
                "share": round(shares[name], 6),
                "asked": round(self._asked[name], 6),
                "prompt characters": round(prompt / max(self._drawn[name], 1), 1),
                "answer characters": round(answer / max(self._drawn[name], 1), 1),
            }
            for name, (prompt, answer) in self._characters.items()
        }
        return Health("largest deviation from a share", value, alarm, {"domains": table})
