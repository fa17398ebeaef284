"""Settings that one choice of a method needs in another framework, and shared notes. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

from sixfold.algorithm.method import Method

BETAS, WEIGHT_DECAY, CRITIC_LEARNING_RATE = (0.9, 0.95), 0.0, 1e-5
"""Sixfold's optimizer defaults. Learning rate 1e-6 and gradient norm 1 are the same in every
framework.
"""


class Sizes(NamedTuple):
    """Sizes of a step.

    Attributes:
        horizon: longest completion, in tokens.
    """

    prompts: int
    samples: int
    horizon: int


@dataclass(frozen=True)
class Answer:
    """Settings that one choice of a method needs in another framework.

    Attributes:
        differs: differences that remain.
        lacks: what no setting gives, with the nearest setting. Empty: nothing.
        also: further lines to paste.
    """

    settings: Mapping[str, object]
    differs: tuple[str, ...] = ()
    lacks: str = ""
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """Settings of another framework, read for a recipe.

    Attributes:
        entry: command or class that they belong to.
        settings: sizes and other values by the recipe's keys, besides those of the table.
        choices: settings that decide the method, with the framework's other names and forms made
            equal.
        numbers: numbers of the method, by its fields.
    """

    entry: str
    settings: Mapping[str, object]
    choices: Mapping[str, object]
    numbers: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def minibatches(whole: float, part: float) -> tuple[int, tuple[str, ...]]:
    """Optimizer steps per pass, and a note if the parts do not fill the whole."""
    count = max(1, round(whole / part)) if part else 1
    exact = count * part == whole
    note = f"batches of {part:g} do not divide a step of {whole:g}: {count} updates are used"
    return count, () if exact else (note,)


LOGGERS = ("tensorboard", "trackio", "wandb")


def loggers(given: object) -> dict[str, object]:
    """The recipe's loggers among those of a framework."""
    names = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    kept = [name for name in names if name in LOGGERS]
    return {"log.to": kept} if kept else {}


def only(lacks: str, **settings: object) -> Answer:
    """Answer for a choice that no setting gives. `settings` are the nearest ones."""
    return Answer(settings, lacks=lacks)


@dataclass(frozen=True)
class Framework:
    """A framework.

    Attributes:
        title: name and version.
        notes: notes that hold for every method.
        defaults: key -> default value, by entry.
        entry: gives the command or class for a method.
    """

    title: str
    notes: tuple[str, ...]
    defaults: Mapping[str, Mapping[str, object]]
    entry: Callable[[Method], str]
    answers: Callable[[Method, Sizes], Iterator[Answer]]


def std_note(sizes: Sizes, eps: str, of: str = "K") -> str:
    """Effect of a standard deviation over K - 1, in one sentence.

    Args:
        eps: constant that the framework adds to the deviation.
        of: K for the deviation of a group, N for that of the whole step.
    """
    count = sizes.samples if of == "K" else sizes.prompts * sizes.samples
    return (
        f"the framework's standard deviation divides by {of} - 1, Sixfold's by {of}: advantages"
        f" are smaller by sqrt(({of} - 1) / {of}) = {sqrt((count - 1) / count):.4f} at {of} ="
        f" {count}; {eps} is added to it, 1e-6 in Sixfold"
    )


AT_ONE = (
    "the framework's loss has a clipped ratio, Sixfold's has none: with one update per step the"
    " ratio is 1, so the gradient is the same and only the logged loss differs"
)

WHITEN = (
    "whitening divides by N - 1, in Sixfold by N: advantages are smaller by sqrt((N - 1) / N),"
    " where N is the number of sampled tokens in the step"
)


def mean_of_all(sizes: Sizes) -> str:
    """Effect of the mean of the group as baseline, in one sentence."""
    k = sizes.samples
    return (
        "the baseline is the mean of all K samples, in Sixfold the mean of the other samples:"
        f" advantages are smaller by (K - 1) / K = {(k - 1) / k:.4f} at K = {k}"
    )


def refill(row: Method) -> str:
    """Effect of training without dynamic sampling."""
    return (
        f"dynamic sampling ({row.dynamic_sampling} rounds in Sixfold). Groups whose rewards are"
        " all equal are kept. If their share of the step is q, the gradient is about 1 - q times"
        " that of mixed groups only, from a share 1 - q of the samples"
    )
