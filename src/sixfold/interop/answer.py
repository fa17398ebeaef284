"""Settings that one choice of a method needs in another framework, and shared notes. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

from ..algorithm.method import Method

BETAS, WEIGHT_DECAY, CRITIC_LEARNING_RATE = (0.9, 0.95), 0.0, 1e-5
"""Sixfold's optimizer defaults. Learning rate 1e-6 and gradient norm 1 are the same in every
framework.
"""


class Sizes(NamedTuple):
    """Sizes of a step.

    Attributes:
        prompts: prompts per step.
        samples: samples per prompt.
        horizon: longest completion, in tokens.
    """

    prompts: int
    samples: int
    horizon: int


@dataclass(frozen=True)
class Answer:
    """Settings that one choice of a method needs in another framework.

    Attributes:
        settings: key -> value.
        differs: differences that remain.
        lacks: what no setting gives, with the nearest setting. Empty: nothing.
        also: further lines to paste.
    """

    settings: Mapping[str, object]
    differs: tuple[str, ...] = ()
    lacks: str = ""
    also: tuple[str, ...] = ()


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
        answers: gives the answers for a method and sizes.
    """

    title: str
    notes: tuple[str, ...]
    defaults: Mapping[str, Mapping[str, object]]
    entry: Callable[[Method], str]
    answers: Callable[[Method, Sizes], Iterator[Answer]]


def std_note(sizes: Sizes, eps: str, of: str = "K") -> str:
    """How a standard deviation over K - 1 differs from Sixfold's.

    Args:
        sizes: sizes of a step.
        eps: constant that the framework adds to the deviation.
        of: K for the deviation of a group, N for that of the whole step.
    """
    count = sizes.samples if of == "K" else sizes.prompts * sizes.samples
    return (
        f"their deviation divides by {of} - 1, ours by {of}: advantages are smaller by sqrt(({of} -"
        f" 1) / {of}) = {sqrt((count - 1) / count):.4f} at {of} = {count}; {eps} is added to it,"
        " 1e-6 here"
    )


AT_ONE = (
    "a clipped ratio stands where ours has none: with one update a step it is 1, so the gradient is"
    " the same and only the logged loss is another"
)

WHITEN = (
    "whitening divides by N - 1 there and by N here: smaller by sqrt((N - 1) / N), N the sampled"
    " tokens of the step"
)


def mean_of_all(sizes: Sizes) -> str:
    """How the mean of the group differs from the mean of the other samples."""
    k = sizes.samples
    return (
        "the mean of all K stands for the mean of the others: advantages are smaller by (K - 1) /"
        f" K = {(k - 1) / k:.4f} at K = {k}"
    )


def refill(row: Method) -> str:
    """What training without dynamic sampling loses."""
    return (
        f"dynamic sampling ({row.dynamic_sampling} rounds here). Groups whose rewards are all equal"
        " stay in: where they are a share q of the step, its gradient is about 1 - q of one from"
        " mixed groups only, and from as many fewer samples"
    )
