"""Search tasks by all methods of a comparison, grade what is found, and keep rows to train on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from sixfold.data.profile import task_key
from sixfold.errors import UserError
from sixfold.recipe.schema import SampleConfig
from sixfold.reward_model.step_scorer import ProcessScorer
from sixfold.rollout.engine_generator import EngineGenerator
from sixfold.rollout.generator import Generator
from sixfold.rollout.thread_settings import in_thread
from sixfold.run.assemble import Assembly
from sixfold.stages.dataset import check_tasks, sampled_row
from sixfold.stages.keepers import completion_of, select
from sixfold.step_scorer import StepScorer
from sixfold.types import Group, SamplingParams, Task

from .difficulty import NAME, Choice, Way
from .scorers import Oracle, OutcomeScorer
from .settings import Settings
from .shared_scorer import SharedScorer
from .steps import Stepping
from .task_search import Found, search

SOLUTIONS, PAIRS = "solutions.jsonl", "pairs.jsonl"


@dataclass(frozen=True)
class Plan:
    """What is compared.

    Attributes:
        methods: names of the methods.
        settings: their settings.
        stepping: where steps end.
        aggregate: makes one value of the scores of steps.
        budget: most model tokens of one search. None: no limit.
        scorer: path of a reward model, "verifier" for the recipe's own, or "".
        tasks: number of tasks. 0: all.
        train: search training tasks in place of held-out ones.
        choice: method and budget of each task by its difficulty, besides the methods. None: none.
    """

    methods: tuple[str, ...]
    settings: Settings
    stepping: Stepping
    aggregate: str
    budget: int | None
    scorer: str
    tasks: int
    train: bool
    choice: Choice | None = None

    def way(self, method: str) -> Way:
        """A method with the settings of the comparison."""
        return Way(method, self.settings, self.stepping, self.aggregate, self.budget)


class Searcher:
    """Searches tasks by all methods, and grades what it finds.

    Args:
        world: the model, the environment, and the engine.
        plan: what is compared.
        scorer: the reward model, or None.
        model: hash of the policy's weights.
    """

    def __init__(
        self, world: Assembly, plan: Plan, scorer: OutcomeScorer | ProcessScorer | None, model: str
    ) -> None:
        rollout = world.recipe.rollout
        self._world = world
        self._plan = plan
        self._scorer = scorer
        self._model = model
        self._renderer = world.renderer.copy()  # the verifier uses that of the world, in a thread
        self._grading = ThreadPoolExecutor(1, "search-grades")
        self._scoring = ThreadPoolExecutor(1, "search-scores")
        self._scorer_of: Callable[[], StepScorer | None] = lambda: None
        if plan.scorer == "verifier":
            oracle = Oracle(world.environment, world.renderer)
            self._scorer_of = partial(SharedScorer, oracle, self._grading)
        elif scorer:
            self._scorer_of = partial(SharedScorer, scorer, self._scoring)
        self._params = SamplingParams(
            rollout.max_new_tokens,
            rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            stop_token_ids=world.policy.stop_token_ids,
            seed=world.recipe.run.seed,
        )

    async def row(self, task: Task, rate: float | None, alone: bool) -> dict[str, Any] | None:
        """The line of a task, with its rows for training.

        Args:
            task: the task.
            rate: its pass rate. None: unknown.
            alone: no other task is searched at the same time.

        Returns:
            None if other tasks took the room that a search needed in the KV cache: search again
            alone.
        """
        plan = self._plan
        ways = {name: plan.way(name) for name in plan.methods}
        if plan.choice and rate is not None:
            ways[NAME] = plan.choice.way(rate)
        found = {}
        for name, way in ways.items():
            found[name] = await self.search(way, task, alone)
            if found[name].evicted and not alone:
                return None
        groups = [Group(task, list(one.candidates)) for one in found.values()]
        # The share of failed checks has its limit over all tasks (`_check_failures`).
        grade = partial(self._world.environment.score, error_budget=1.0)
        await in_thread(grade, groups, executor=self._grading)
        solutions, pairs = self._lessons(task, list(found.values()))
        return {
            "task": task.id,
            "key": task_key(task),
            "pass_rate": rate,
            "source": task.source,
            "answer": task.answer if isinstance(task.answer, str | int | float) else None,
            "found": {name: {"way": str(ways[name]), **_line(one)} for name, one in found.items()},
            SOLUTIONS: solutions,
            PAIRS: pairs,
        }

    def close(self) -> None:
        """Begin no scoring or grading, and wait until those that have begun have ended."""
        for thread in (self._scoring, self._grading):
            thread.shutdown(cancel_futures=True)

    async def search(self, way: Way, task: Task, alone: bool, seed: int | None = None) -> Found:
        """Search one task.

        Args:
            way: how.
            task: the task.
            alone: no other task is searched at the same time.
            seed: seed of the noise. None: the recipe's.
        """
        world = self._world
        params = self._params if seed is None else replace(self._params, seed=seed)
        if alone:
            await _forget(world.player.generator)
        return await search(
            world.player.generator,
            self._renderer,
            task,
            method=way.method,
            params=params,
            settings=way.settings,
            stepping=way.stepping,
            scorer=self._scorer_of(),
            by_step=isinstance(self._scorer, ProcessScorer),
            aggregate=way.aggregate,
            stops=world.player.stops,
            budget=way.budget,
        )

    def _lessons(
        self, task: Task, found: Sequence[Found]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Rows for SFT: what the methods chose, if it is right. And a pair of candidates."""
        world, renderer, seed = self._world, self._renderer, self._world.recipe.run.seed
        try:
            check_tasks([task])
        except UserError:
            return [], []  # its prompt has no form in a file
        read = partial(completion_of, decode=renderer.decode, stops=world.player.stops)

        def rows(solved: bool, chosen: bool) -> list[dict[str, Any]]:
            candidates = [
                t
                for one in found
                for t in one.candidates
                if t.reward and t.reward.solved is solved and (one.chose(t) or not chosen)
            ]
            group = Group(task, [replace(t, sample=at) for at, t in enumerate(candidates)])
            kept = select([group], SampleConfig(keep="all"), read, renderer.has_special).kept
            return [sampled_row(one, model=self._model, seed=seed) for one in kept]

        pairs = rows(True, False)[:1]
        for pair, wrong in zip(pairs, rows(False, False)[:1], strict=False):
            pair |= {"chosen": pair.pop("completion"), "rejected": wrong["completion"]}
        return rows(True, True), [pair for pair in pairs if "rejected" in pair]


async def _forget(generator: Generator) -> None:
    """Empty the prefix cache, so that nothing is evicted later than in a search of its own."""
    if isinstance(generator, EngineGenerator):
        await generator.call(lambda engine: engine.prefixes.clear())


def _line(found: Found) -> dict[str, Any]:
    """What a method found on one task, as JSON."""
    solved = [bool(t.reward and t.reward.solved) for t in found.candidates]
    return {
        "completion": found.text,
        "finish": found.best.finish_reason,
        "value": found.value,
        "solved": any(s for t, s in zip(found.candidates, solved, strict=True) if found.chose(t)),
        "covered": any(solved),
        "unchecked": sum(t.total_reward is None for t in found.candidates),
        "refused": found.refused,
        **asdict(found.cost),
        "candidates": [
            {"completion": t.text, "finish": t.finish_reason, "solved": s}
            for t, s in zip(found.candidates, solved, strict=True)
        ],
    }
