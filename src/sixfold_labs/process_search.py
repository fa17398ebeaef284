"""The lab `process-reward` by the search that `sixfold search` runs. Imports torch.

A policy without a model writes one token per step. Whether a step is right, and the noise of its
reward, are drawn when it is first written.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from sixfold.renderer.renderer import Renderer
from sixfold.rollout.generator import Sampled, SampleKey, wait_for
from sixfold.step_scorer import StepScorer
from sixfold.types import SamplingParams, Task
from sixfold_search.aggregate import AGGREGATES
from sixfold_search.beam import beam
from sixfold_search.sampling import best_of_n
from sixfold_search.settings import Settings
from sixfold_search.steps import Stepping
from sixfold_search.tree import Tree

from .process_steps import OUTCOME_NOISE, PROCESS_NOISE, STEPS, continuations, noisy

PROMPT = [0]


class Texts(Renderer):
    """Writes each token as a number in a line of its own."""

    def __init__(self) -> None:
        """Without a tokenizer."""

    def decode(self, completion: Sequence[int], ends: Any = None) -> str:
        return "".join(f"{token}\n" for token in completion)

    def plain(self, text: str, special: bool = False) -> list[int]:
        return [int(line) for line in text.split()]


class Policy:
    """Generator of chains of steps, without a model.

    Args:
        draw: draws steps and the noise of their rewards.
        p_good: probability that a step is right.

    Attributes:
        right: whether each step is right, by its token.
    """

    def __init__(self, draw: random.Random, p_good: float) -> None:
        self.right: list[bool] = [True]
        self.rewards: list[bool] = [True]
        self._draw, self._p_good = draw, p_good

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        key: SampleKey,
        *,
        stops: Sequence[str] = (),
        priority: int = 0,
    ) -> Sampled:
        left = STEPS - (len(tokens) - len(PROMPT))
        made = [self._step() for _ in range(1 if stops else left)]
        text = "" if len(made) < left else None  # a stop string ended it: the end of a step
        return Sampled(made, [0.0] * len(made), [0] * len(made), "stop", 0, 0.0, text=text)

    def _step(self) -> int:
        self.right.append(self._draw.random() < self._p_good)
        self.rewards.append(noisy(self._draw, self.right[-1], PROCESS_NOISE))
        return len(self.right) - 1


class Rewards(StepScorer):
    """Rewards of the steps of a policy, or one of the whole chain.

    Args:
        draw: draws the noise of rewards of whole chains. None: rewards of steps.
    """

    tokens = 0

    def __init__(self, policy: Policy, draw: random.Random | None) -> None:
        self._policy, self._draw = policy, draw

    def score(
        self, task: Task, completions: Sequence[str], ends: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        found = []
        for text in completions:
            steps = [int(line) for line in text.split()]
            if self._draw is None:
                found.append([float(self._policy.rewards[step]) for step in steps])
            else:
                solved = all(self._policy.right[step] for step in steps)
                found.append([float(noisy(self._draw, solved, OUTCOME_NOISE))])
        return found


def searched(
    p_good: float, n: int, beams: int, trials: int, seed: int
) -> tuple[list[float], list[int]]:
    """Accuracy of the four methods, and steps that each samples per task.

    The arguments are those of the lab.
    """
    correct, steps = [0] * 4, [0] * 4

    async def run() -> None:
        draw = random.Random(seed)
        for _ in range(trials):
            for at, (right, sampled) in enumerate(await _trial(draw, p_good, n, beams)):
                correct[at] += right
                steps[at] += sampled

    wait_for(run())
    return [count / trials for count in correct], [count // trials for count in steps]


async def _trial(draw: random.Random, p_good: float, n: int, beams: int) -> list[tuple[bool, int]]:
    """Whether each method is right on one task, and the steps that it samples."""
    found = []
    width = continuations(n, beams)
    for method, settings, whole in (
        (best_of_n, Settings(n=1), True),
        (best_of_n, Settings(n=n), True),
        (best_of_n, Settings(n=n), False),
        (beam, Settings(n=beams * width, expand=width), False),
    ):
        policy, texts = Policy(draw, p_good), Texts()
        generator: Any = policy  # a search only generates
        tree = Tree(
            generator,
            texts,
            Task("lab", ""),
            SamplingParams(max_tokens=STEPS + 1),
            step=Stepping().span,
            steps=Stepping().steps(texts),
            aggregate=AGGREGATES["mean"],
            scorer=Rewards(policy, draw if whole else None),
            by_step=not whole,
            stops=(),
            budget=None,
            prompt=PROMPT,
        )
        outcome = await method(tree, settings)
        right = all(policy.right[step] for step in outcome.best.tokens)
        found.append((right, tree.cost.sampled))
    return found
