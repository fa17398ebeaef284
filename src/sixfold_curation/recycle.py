"""Stage `recycle`: solutions that a model has found, mixed with general data, for SFT."""

from __future__ import annotations

from array import array
from collections.abc import Generator, Mapping
from typing import Any, ClassVar

from pydantic import Field

from sixfold.data.columns import MISSING, lookup
from sixfold.errors import UserError
from sixfold.stages.diversity import Diversity

from .mix import Draw, Tally, allocate, decisions, order_of
from .stage import Context, Decision, Health, Record, Rows, Stage

SOLUTIONS, GENERAL = "solutions", "general"


class Recycle(Stage):
    """Keep solutions of full reward, mix general rows in, and measure how alike solutions are.

    Solutions are the rows of a `sample` stage of a run (`stages/NAME/dataset.jsonl`). R1 mixes
    600,000 of them with 200,000 rows of general data (arXiv:2501.12948).

    Args:
        general: sources with general data. All other sources have solutions.
        share: share of general rows in the result.
        least_reward: reward from which a solution is kept.
        column: column with the solution: text, or the replies of an episode.
        ngram: length of the n-grams whose entropy is measured, in words.
    """

    kind: ClassVar[str] = "recycle"

    general: tuple[str, ...] = ()
    share: float = Field(default=0.25, ge=0, lt=1)
    least_reward: float = 1.0
    column: str = "completion"
    ngram: int = Field(default=4, ge=1)

    def decide(self, rows: Rows, context: Context) -> Generator[Decision, None, Health]:
        orders = {SOLUTIONS: array("Q"), GENERAL: array("Q")}
        for record in rows:
            if self._good(record):
                orders[self._domain(record)].append(order_of(record, context.seed))
        counts = {name: len(found) for name, found in orders.items()}
        draws, weights = self._draws(orders), {SOLUTIONS: 1 - self.share, GENERAL: self.share}
        tally, diversity = Tally(weights, counts), Diversity(self.ngram)
        for record in rows:
            name = self._domain(record)
            if not self._good(record):
                yield Decision(record, False, "unsolved", f"reward {record.fields['reward']}")
                continue
            uses = draws[name].uses(order_of(record, context.seed))
            tally.add(name, record, uses)
            if uses and name == SOLUTIONS:
                diversity.add(self._solution(record))
            yield from decisions(record, uses, f"{name}: {counts[name]} rows")
        return self._health(diversity, tally.health(), counts)

    def _draws(self, orders: Mapping[str, array[int]]) -> dict[str, Draw]:
        """All solutions, and general rows by share; fewer solutions if there is too little.

        Raises:
            UserError: a share of general rows is asked for, and there are none, or the reverse.
        """
        weights = {SOLUTIONS: 1 - self.share, GENERAL: self.share}
        for name, weight in weights.items():
            if weight and not orders[name]:
                what = "no row of another source is solved" if name == SOLUTIONS else (
                    f"no row comes from general = {list(self.general)}"
                )  # fmt: skip
                raise UserError(f"the stage 'recycle' mixes {weight:.0%} {name} rows, but {what}")
        counts = {name: len(found) for name, found in orders.items()}
        wanted = allocate(weights, counts, 0, 1)
        return {name: Draw.of(orders[name], wanted[name]) for name in orders}

    def _domain(self, record: Record) -> str:
        return GENERAL if record.source in self.general else SOLUTIONS

    def _good(self, record: Record) -> bool:
        """Whether a row is general, or a solution of enough reward. Without a reward it is."""
        reward = record.fields.get("reward")
        if self._domain(record) == GENERAL or reward in (None, ""):
            return True
        try:  # every value of a .csv file is text
            return float(reward) >= self.least_reward
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{record.where}: the reward {str(reward)[:60]!r} is no number. Leave the column"
                " out (columns), or list the source in general"
            ) from error

    def _solution(self, record: Record) -> str:
        value = lookup(record.fields, self.column)
        if value is MISSING or not isinstance(value, str | list):
            raise UserError(
                f"{record.where}: no solution in the column {self.column!r}: name another column"
                " (column), or list the source in general"
            )
        return value if isinstance(value, str) else "\n".join(map(str, value))

    def _health(self, diversity: Diversity, mixed: Health, counts: Mapping[str, int]) -> Health:
        figures: dict[str, Any] = {**mixed.figures}
        if not counts[SOLUTIONS]:
            return Health("share of the 5 commonest templates", 0.0, mixed.alarm, figures)
        found = diversity.metrics()
        figures["n-gram entropy, bits"] = found["sample/ngram_entropy"]
        alarm = " ".join(one for one in (diversity.alarm(), mixed.alarm) if one)
        name = "share of the 5 commonest templates"
        return Health(name, found["sample/top5_templates"], alarm, figures)
