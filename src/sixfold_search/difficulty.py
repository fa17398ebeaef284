"""Method and budget of each task by its difficulty, chosen from earlier searches of other tasks.

Compute-optimal search (Snell et al. 2024, arXiv:2408.03314, section 3): the difficulty of a task is
the pass rate of the policy, and tasks fall into buckets of equal sizes. Each bucket gets one of the
ways to search that were tried on other tasks, so that most of those tasks are solved within a mean
number of tokens.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from sixfold.data.profile import Profile
from sixfold.errors import UserError
from sixfold.files.durable import disk_errors
from sixfold.run.fingerprint import rewards_fingerprint
from sixfold.steps import own_ends_of

from .methods import METHODS
from .settings import Settings
from .steps import Stepping

NAME = "by_difficulty"
"""Name of the choice among the methods of a comparison."""

STEPS_CODE = "code of --steps"
"""Key of search.json: name and hash of a user's function that ends steps."""

INPUTS, SEARCHES, RESULTS = "search.json", "searches.jsonl", "results.json"
"""Files of a search: its settings, one line per task, and figures."""


@dataclass(frozen=True)
class Way:
    """A method with all that it reads.

    Attributes:
        method: its name.
        settings: its settings.
        stepping: where steps end.
        aggregate: makes one value of the scores of steps.
        budget: most model tokens of one search. None: no limit.
    """

    method: str
    settings: Settings
    stepping: Stepping
    aggregate: str
    budget: int | None

    def __str__(self) -> str:
        if self.budget is not None:
            return f"{self.method}, budget {self.budget}"
        return f"{self.method}, n {self.settings.n}" if METHODS[self.method].reads else self.method


@dataclass(frozen=True)
class Buckets:
    """Intervals of pass rates, from hard to easy.

    Attributes:
        edges: where one ends and the next begins, increasing. A rate at an edge is in the next.
    """

    edges: tuple[float, ...]

    @classmethod
    def of(cls, rates: Iterable[float], count: int) -> Buckets:
        """At most so many buckets with about the same number of rates, and at least one in each."""
        known = sorted(rates)
        edges = {known[len(known) * at // count] for at in range(1, count)} - {known[0]}
        return cls(tuple(sorted(edges)))

    def find(self, rate: float) -> int:
        """Number of the bucket of a rate."""
        return bisect_right(self.edges, rate)

    @property
    def names(self) -> list[str]:
        """Names of all buckets."""
        ends = [f"{edge:.3g}" for edge in self.edges]
        pairs = zip(["0", *ends], [f"below {end}" for end in ends] + ["1"], strict=True)
        return [f"pass rate {low} to {high}" for low, high in pairs]


@dataclass(frozen=True)
class Choice:
    """A way for each bucket.

    Attributes:
        buckets: the buckets.
        ways: the way of each.
        solved: share of the earlier tasks of each bucket that its way has solved.
        tokens: their mean number of model tokens.
        tasks: keys of all earlier tasks, sorted.
    """

    buckets: Buckets
    ways: tuple[Way, ...]
    solved: tuple[float, ...]
    tokens: tuple[float, ...]
    tasks: tuple[str, ...]

    def way(self, rate: float) -> Way:
        """The way of a task with this pass rate."""
        return self.ways[self.buckets.find(rate)]


@dataclass(frozen=True)
class Trial:
    """What one way has found in an earlier search.

    Attributes:
        way: the way.
        solved: by key of the task, whether the chosen completion was right.
        tokens: by key of the task, its model tokens.
    """

    way: Way
    solved: Mapping[str, bool]
    tokens: Mapping[str, int]


@dataclass(frozen=True)
class Earlier:
    """A finished search.

    Attributes:
        folder: its --out.
        inputs: what was searched, as search.json has it.
        trials: one per method.
    """

    folder: Path
    inputs: Mapping[str, Any]
    trials: tuple[Trial, ...]

    @property
    def scores(self) -> bool:
        """True if one of its methods scores."""
        return any(METHODS[one.way.method].scores != "nothing" for one in self.trials)


def read_earlier(folder: Path) -> Earlier:
    """Read a finished search.

    Raises:
        UserError: if there is none in this folder, or it is of an earlier release.
    """
    if not (folder / RESULTS).is_file():
        raise UserError(f"--choose-from {folder}: no finished search. Name the --out of one")
    try:
        with disk_errors(f"cannot read {folder}"):
            inputs = json.loads((folder / INPUTS).read_bytes())
            rows = [json.loads(line) for line in (folder / SEARCHES).read_bytes().splitlines()]
        settings, stepping = Settings(**inputs["settings"]), Stepping(**inputs["stepping"])
        aggregate, budget = inputs["aggregate"], inputs["budget"]
        trials = tuple(
            Trial(
                Way(name, settings, stepping, aggregate, budget),
                {row["key"]: bool(row["found"][name]["solved"]) for row in rows},
                {row["key"]: tokens_of(row["found"][name]) for row in rows},
            )
            for name in inputs["methods"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"--choose-from {folder}: its files are no search of this release. Search again"
        ) from error
    return Earlier(folder, inputs, trials)


def tokens_of(found: Mapping[str, Any]) -> int:
    """Model tokens of a search, from its line."""
    return int(found["prefilled"] + found["sampled"] + found["scored"])


def rates_of(profile: Profile, keys: Mapping[str, str], path: Path) -> dict[str, float]:
    """Pass rate of each task, by its key.

    Args:
        profile: the pass rates.
        keys: id of each task by its key, for the message.
        path: the profile's file.

    Raises:
        UserError: if a task was not measured.
    """
    rates = {key: profile.rate(key) for key in keys}
    missing = [keys[key] for key, rate in rates.items() if rate is None]
    if missing:
        raise UserError(
            f"--profile {path}: it has no pass rate of {len(missing)} of {len(keys)} tasks, such as"
            f" {missing[0]}. Measure them with the stage stratify of sixfold data"
        )
    return {key: rate for key, rate in rates.items() if rate is not None}


def choose(
    earlier: Sequence[Earlier], profile: Profile, path: Path, count: int, limit: float | None
) -> Choice:
    """The ways that solve most of the earlier tasks within a mean number of tokens.

    Args:
        earlier: searches of the same tasks.
        profile: pass rates of these tasks.
        path: the profile's file.
        count: most buckets.
        limit: most mean tokens per task. None: no limit.

    Raises:
        UserError: if the searches have different tasks, one is not in the profile, or no choice
            keeps the limit.
    """
    keys = earlier[0].trials[0].solved.keys()
    for one in earlier[1:]:
        if one.trials[0].solved.keys() != keys:
            raise UserError(
                f"--choose-from {one.folder}: its tasks are not those of {earlier[0].folder}."
                " Compare ways to search on the same tasks"
            )
    rates = rates_of(profile, {key: key for key in keys}, path)
    buckets = Buckets.of(rates.values(), count)
    inside = [[k for k in keys if buckets.find(rates[k]) == at] for at in range(len(buckets.names))]
    trials = [trial for one in earlier for trial in one.trials]
    front: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    for some in inside:
        share = len(some) / len(keys)
        longer = [
            (
                tokens + share * _mean(trial.tokens, some),
                solved + share * _mean(trial.solved, some),
                (*taken, number),
            )
            for tokens, solved, taken in front
            for number, trial in enumerate(trials)
        ]
        front = _undominated(longer)
    within = [one for one in front if limit is None or one[0] <= limit]
    if not within:
        raise UserError(
            f"--budget {limit:g}: the cheapest choice by difficulty takes {front[0][0]:.0f} tokens"
            " per task. Raise it, or search the earlier tasks with smaller budgets"
        )
    taken = within[-1][2]
    chosen = [trials[number] for number in taken]
    return Choice(
        buckets,
        tuple(trial.way for trial in chosen),
        tuple(_mean(trial.solved, some) for trial, some in zip(chosen, inside, strict=True)),
        tuple(_mean(trial.tokens, some) for trial, some in zip(chosen, inside, strict=True)),
        tuple(sorted(keys)),
    )


def check_choice(
    choice: Choice,
    earlier: Sequence[Earlier],
    inputs: Mapping[str, Any],
    tasks: Mapping[str, str],
) -> None:
    """Check that a choice may be reported on tasks: it was made on others, by the same models.

    Args:
        choice: the choice.
        earlier: the searches from which it was made.
        inputs: what is searched now.
        tasks: id of each task by its key.

    Raises:
        UserError: naming what differs, or a task that both have.
    """
    if both := [tasks[key] for key in choice.tasks if key in tasks]:
        raise UserError(
            f"--choose-from {earlier[0].folder}: {len(both)} of its tasks are searched again, such"
            f" as {both[0]}. A choice is reported on other tasks than those it was made on: choose"
            " from a search with --train, or with other tasks"
        )
    for one in earlier:
        names = ["model", *(key for key in inputs if key.startswith("rollout."))]
        names += ["scorer weights"] if one.scores else []
        compared = [(name, _value(one.inputs, name), _value(inputs, name)) for name in names]
        code = rewards_fingerprint(own_ends_of(one.trials[0].way.stepping.name))
        compared.append((STEPS_CODE, one.inputs.get(STEPS_CODE, code), code))
        for name, before, now in compared:
            if before != now:
                raise UserError(
                    f"--choose-from {one.folder}: it was searched with {name} = {before!r}, now"
                    f" {now!r}. Choose from a search with the same"
                )


def _value(inputs: Mapping[str, Any], name: str) -> Any:
    """A setting of a search, or the hash of its scorer's weights, or the scorer's name."""
    if name == "scorer weights":
        return inputs["weights of --scorer"] or inputs["scorer"]
    return inputs.get(name)


def _mean(values: Mapping[str, float], keys: Sequence[str]) -> float:
    return fmean(values[key] for key in keys)


def _undominated(
    found: Sequence[tuple[float, float, tuple[int, ...]]],
) -> list[tuple[float, float, tuple[int, ...]]]:
    """Those of (tokens, solved, ways) than which no other solves as many with fewer tokens."""
    kept: list[tuple[float, float, tuple[int, ...]]] = []
    for one in sorted(found, key=lambda one: (one[0], -one[1])):
        if not kept or one[1] > kept[-1][1]:
            kept.append(one)
    return kept
