"""Monte Carlo labels of steps: how often continuations of a solution's prefix are solved.

Math-Shepherd (arXiv:2312.08935) samples N continuations after every step. OmegaPRM
(arXiv:2406.06592) finds the first wrong step of a wrong solution by bisection, with about log2 of
the number of steps as many. The engine shares the prefix among its continuations. The outcome of
the solution itself is a label that costs nothing: one continuation of each of its prefixes
(outcome-supervised value models, arXiv:2311.09724).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..controller.collector import Collector
from ..environment.base import EnvironmentRole, Scorer, Tally
from ..errors import UserError
from ..event_loop import EventLoop
from ..recipe.schema import SampleConfig
from ..renderer.renderer import Renderer
from ..rollout.base import Rollout
from ..steps import steps_of, tokenized_ends
from ..types import Group, Task, Trajectory
from .keepers import Keeper

_TOGETHER = 32
"""Prefixes that are continued at a time."""


@dataclass(frozen=True)
class StepLabels:
    """Labels of the steps of a solution. None: no check of its continuations succeeded.

    Attributes:
        steps: texts of the steps, which add up to the solution.
        labels: label of each.
    """

    steps: list[str]
    labels: list[float | None]

    def columns(self) -> dict[str, object]:
        """Columns of a row, as `data.step_labels` reads them."""
        return {"completions": self.steps, "labels": self.labels, "separator": ""}


@dataclass(frozen=True)
class _Solution:
    """A solution, what its prompt has opened, the ends of its steps, and whether it is solved."""

    keeper: Keeper
    text: str
    opened: str
    ends: list[int]
    solved: bool | None


class StepLabeller:
    """Labels the steps of sampled solutions.

    Args:
        rollout: samples `sample.label_steps` continuations. Unused for labels by outcome.
        environment: scores whole solutions.
        loop: event loop of the run.
        renderer: with the tokenizer of the policy.
        config: the recipe's [sample] section.

    Attributes:
        tokens: tokens sampled for the labels of the last call.
    """

    def __init__(
        self,
        rollout: Rollout,
        environment: EnvironmentRole,
        loop: EventLoop,
        renderer: Renderer,
        config: SampleConfig,
    ) -> None:
        self.tokens = 0
        self._renderer, self._config = renderer, config
        self._steps = steps_of(
            config.label_ends,
            partial(
                tokenized_ends,
                encode=renderer.plain,
                decode=partial(renderer.shown, special=False),
            ),
        )
        self._whole = _WholeSolutions(environment)
        self._collector = Collector(rollout=rollout, environment=self._whole, loop=loop)

    def label(
        self,
        kept: Sequence[Keeper],
        groups: Sequence[Group],
        seed: int,
        on_phase: Callable[[str], None],
    ) -> list[StepLabels]:
        """Labels of the steps of each kept solution. The last step's says if it is solved.

        Args:
            kept: the solutions.
            groups: the scored groups that they are from.
            seed: seed of the sampling noise.
            on_phase: as for `Collector.collect`.

        Raises:
            UserError: a prefix cannot be continued.
        """
        self.tokens = 0
        known = {
            (group.task.id, t.sample): (t.opened, t.reward.solved if t.reward else None)
            for group in groups
            for t in group.trajectories
        }
        solutions = []
        for keeper in kept:
            text = keeper.completion
            assert isinstance(text, str)  # `SampleWork.load` has refused episodes
            opened, solved = known[keeper.task.id, keeper.sample]
            solutions.append(_Solution(keeper, text, opened, self._steps.ends(text), solved))
        if self._config.labels == "outcome":
            made = [[_outcome(s)] * len(s.ends) for s in solutions]
        elif self._config.labels == "bisect":
            made = self._first_errors(solutions, seed, on_phase)
        else:
            made = self._all_rates(solutions, seed, on_phase)
        return [
            StepLabels([s.text[a:b] for a, b in zip([0, *s.ends], s.ends, strict=False)], labels)
            for s, labels in zip(solutions, made, strict=True)
        ]

    def _all_rates(
        self, solutions: Sequence[_Solution], seed: int, on_phase: Callable[[str], None]
    ) -> list[list[float | None]]:
        """The share of solved continuations after every step, or whether there is any."""
        asked = [(s, number) for s in solutions for number in range(len(s.ends) - 1)]
        rates = iter(self._rates(asked, seed, on_phase))
        hard = self._config.labels == "hard"
        found = []
        for s in solutions:
            labels = [next(rates) for _ in s.ends[:-1]]
            if hard:
                labels = [None if rate is None else float(rate > 0) for rate in labels]
            found.append([*labels, _outcome(s)])
        return found

    def _first_errors(
        self, solutions: Sequence[_Solution], seed: int, on_phase: Callable[[str], None]
    ) -> list[list[float | None]]:
        """1 before the first step without a solved continuation, 0 at it, None after it."""
        right = [0] * len(solutions)  # steps that are known to be right
        wrong = [len(s.ends) for s in solutions]  # number, from 1, of a step that is wrong
        known = [s.solved is not None for s in solutions]
        while active := [
            n
            for n, s in enumerate(solutions)
            if known[n] and not s.solved and wrong[n] - right[n] > 1
        ]:
            middle = {n: (right[n] + wrong[n]) // 2 for n in active}
            asked = [(solutions[n], middle[n] - 1) for n in active]
            for n, rate in zip(active, self._rates(asked, seed, on_phase), strict=True):
                if rate is None:
                    known[n] = False
                elif rate > 0:
                    right[n] = middle[n]
                else:
                    wrong[n] = middle[n]
        found: list[list[float | None]] = []
        for n, s in enumerate(solutions):
            count = len(s.ends)
            if not known[n]:
                found.append([None] * count)
            elif s.solved:
                found.append([1.0] * count)
            else:
                before: list[float | None] = [1.0] * (wrong[n] - 1)
                found.append([*before, 0.0, *[None] * count][:count])
        return found

    def _rates(
        self,
        asked: Sequence[tuple[_Solution, int]],
        seed: int,
        on_phase: Callable[[str], None],
    ) -> list[float | None]:
        """Share of solved continuations after a step of each solution. None: no check succeeded."""
        if not asked:
            return []
        tasks = [self._prefix(solution, number) for solution, number in asked]
        self._whole.expect(
            {
                task.id: (replace(s.keeper.task, id=task.id), s.opened + s.text[: s.ends[number]])
                for task, (s, number) in zip(tasks, asked, strict=True)
            }
        )
        rates: dict[str, float] = {}
        for at in range(0, len(tasks), _TOGETHER):
            for group in self._collector.collect(tasks[at : at + _TOGETHER], seed, on_phase):
                self.tokens += sum(t.sampled_length for t in group.trajectories)
                known = [t.reward.solved for t in group.trajectories if t.reward]
                checked = [float(one) for one in known if one is not None]
                if checked:
                    rates[group.task.id] = sum(checked) / len(checked)
        return [rates.get(task.id) for task in tasks]

    def _prefix(self, solution: _Solution, number: int) -> Task:
        """The task whose prompt ends with a step of the solution.

        Raises:
            UserError: the tokenizer does not give its text back.
        """
        task, renderer = solution.keeper.task, self._renderer
        prompt = renderer.shown(renderer.encode(task)) + solution.text[: solution.ends[number]]
        identity = f"{task.id}/sample-{solution.keeper.sample}/step-{number}"
        made = replace(task, id=identity, prompt=prompt, tools=(), form="rendered")
        if renderer.shown(renderer.encode(made)) != prompt:
            raise UserError(
                f"task {task.id}: sample.label_steps cannot continue a solution, because the"
                " tokenizer does not give the text of its prompt back. Set it to 0"
            )
        return made


def _outcome(solution: _Solution) -> float | None:
    """1 if a solution is solved, 0 if not, None if its check failed."""
    return None if solution.solved is None else float(solution.solved)


class _WholeSolutions:
    """Scores continuations as the solutions that they complete. Fulfils `EnvironmentRole`."""

    def __init__(self, environment: EnvironmentRole) -> None:
        self._environment = environment
        self._begun: Mapping[str, tuple[Task, str]] = {}

    def expect(self, begun: Mapping[str, tuple[Task, str]]) -> None:
        """Set the task and the start of the solution, by the id of the task that is sampled."""
        self._begun = begun

    def scorer(self, expected: int) -> Scorer:
        return _WholeScorer(self._environment.scorer(expected), self._begun)

    def close(self) -> None:
        """Does nothing: the environment belongs to the run."""


class _WholeScorer:
    """A scorer that reads solutions from their start. Fulfils `Scorer`."""

    def __init__(self, scorer: Scorer, begun: Mapping[str, tuple[Task, str]]) -> None:
        self._scorer = scorer
        self._begun = begun

    async def add(self, task: Task, trajectory: Trajectory) -> None:
        whole, start = self._begun[task.id]
        trajectory.graded = start + trajectory.text
        await self._scorer.add(whole, trajectory)

    async def finish(self, group: Group) -> None:
        whole, start = self._begun[group.task.id]
        for trajectory in group.trajectories:
            trajectory.graded = start + trajectory.text
        await self._scorer.finish(replace(group, task=whole))

    def fail(self, trajectory: Trajectory, line: str) -> None:
        self._scorer.fail(trajectory, line)

    def tally(self) -> Tally:
        return self._scorer.tally()

    def count(self, others: Sequence[Tally]) -> None:
        self._scorer.count(others)
