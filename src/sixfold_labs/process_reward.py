"""Search with outcome and process rewards on chains of reasoning steps."""

from __future__ import annotations

import random
from collections.abc import Sequence

from sixfold.pages.lab import Bars, Breaking, Control, Lab, Outcome, Table, Value

from .controls import LIBRARY, seed_control, source_control
from .process_steps import OUTCOME_NOISE, PROCESS_NOISE, STEPS, continuations, noisy

METHODS = ("one sample", "best of N, outcome reward", "best of N, step rewards", "beam over steps")

Chain = list[bool]
"""Correctness of every step of one chain. The answer is correct if all steps are."""


def best(chains: Sequence[Chain], scores: Sequence[float]) -> Chain:
    """The first chain with the highest score."""
    return chains[max(range(len(chains)), key=scores.__getitem__)]


def step_score(draw: random.Random, chain: Chain) -> float:
    """Mean of the noisy step rewards of a chain."""
    return sum(noisy(draw, good, PROCESS_NOISE) for good in chain) / len(chain)


def beam_search(draw: random.Random, p_good: float, n: int, beam: int) -> Chain:
    """Keep the `beam` partial chains with the best mean step reward, then return the best."""
    width = continuations(n, beam)
    kept: list[tuple[Chain, int]] = [([], 0)] * beam
    for _ in range(STEPS):
        grown: list[tuple[Chain, int]] = []
        for chain, score in kept:
            for _ in range(width):
                good = draw.random() < p_good
                grown.append(([*chain, good], score + noisy(draw, good, PROCESS_NOISE)))
        # All partial chains have equal length: their sums order as their means.
        kept = sorted(grown, key=lambda item: -item[1])[:beam]
    return kept[0][0]


def trial(draw: random.Random, p_good: float, n: int, beam: int) -> list[bool]:
    """Whether the answer of each method is correct, on one task."""
    chains = [[draw.random() < p_good for _ in range(STEPS)] for _ in range(n)]
    outcome = best(chains, [noisy(draw, all(chain), OUTCOME_NOISE) for chain in chains])
    process = best(chains, [step_score(draw, chain) for chain in chains])
    searched = beam_search(draw, p_good, n, beam)
    return [all(chains[0]), all(outcome), all(process), all(searched)]


def sampled_steps(n: int, beam: int) -> list[int]:
    """Steps that each method samples per task."""
    return [STEPS, n * STEPS, n * STEPS, beam * continuations(n, beam) * STEPS]


def compared(
    p_good: float, n: int, beam: int, trials: int, seed: int
) -> tuple[list[float], list[int]]:
    """Accuracy of each method, and steps that it samples per task. Arguments: those of the lab."""
    draw = random.Random(seed)
    correct = [0] * len(METHODS)
    for _ in range(trials):
        for index, right in enumerate(trial(draw, p_good, n, beam)):
            correct[index] += right
    return [count / trials for count in correct], sampled_steps(n, beam)


def process_reward(
    *, p_good: float, n: int, beam: int, trials: int, seed: int, source: str
) -> Outcome:
    """Compare four ways to choose an answer."""
    if source == LIBRARY:
        from .process_search import searched

        accuracy, budget = searched(p_good, n, beam, trials, seed)
    else:
        accuracy, budget = compared(p_good, n, beam, trials, seed)
    width = continuations(n, beam)
    rows: list[list[Value]] = [
        [method, share, steps]
        for method, share, steps in zip(METHODS, accuracy, budget, strict=True)
    ]
    choice = "no choice" if width == 1 else f"{width} continuations to choose from"
    return Outcome(
        values={
            "accuracy_one_sample": accuracy[0],
            "accuracy_best_of_n_outcome": accuracy[1],
            "accuracy_best_of_n_process": accuracy[2],
            "accuracy_beam": accuracy[3],
            "continuations_per_beam": width,
            "exact_accuracy_one_sample": p_good**STEPS,
        },
        tables=(Table("Accuracy", ("method", "accuracy", "sampled steps"), rows),),
        figures=(Bars("Accuracy", "share of correct answers", METHODS, accuracy),),
        lines=(f"Every beam has {choice} per step.",),
    )


def _beam_loses(outcome: Outcome) -> bool:
    return outcome.number("accuracy_beam") < outcome.number("accuracy_best_of_n_process")


PROCESS_REWARD = Lab(
    name="process-reward",
    title="Step rewards and beam search against best-of-N at a stated budget",
    about=(
        "A chain has six steps; each is correct with probability p_good, and the answer is correct"
        " if all are. The outcome reward is the correctness, flipped with probability 0.10. A step"
        " reward is the correctness of the step, flipped with probability 0.15; a chain is ranked"
        " by its mean. Beam search continues every beam ceil(N / (6 * beam)) times per step and"
        " keeps the best. If that is 1, nothing is pruned before the end and beam search loses to"
        " best-of-N. Lightman et al. (2023), Let's Verify Step by Step."
    ),
    controls=(
        Control("p_good", 0.75, "probability of a correct step", low=0.5, high=0.95, step=0.05),
        Control(
            "n", 16, "sampled chains per task (N)", low=2, high=64, sweep=(2, 4, 8, 16, 32, 64)
        ),
        Control("beam", 4, "partial chains that are kept", low=1, high=8),
        Control("trials", 500, "number of tasks", low=100, high=2000, sweep=()),
        seed_control("the samples", sweep=()),
        source_control("this lab's search", "best of N and beams of sixfold search"),
    ),
    run=process_reward,
    breaking=Breaking(
        breaks={"p_good": 0.75, "n": 16, "beam": 4},
        safe={"p_good": 0.75, "n": 48, "beam": 2},
        why="With N = 16 and 4 beams every beam has one continuation, so the search cannot choose.",
        failed=_beam_loses,
    ),
    most_outcomes=125,
)

LABS = (PROCESS_REWARD,)
