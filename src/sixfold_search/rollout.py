"""Search as the rollout of a stage of kind `sample`: its completions come from `sample.search`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from sixfold.checks.scorer import together
from sixfold.environment.base import Scorer
from sixfold.errors import UserError, nearest
from sixfold.recipe.reward_models import VERIFIER, listed_models
from sixfold.recipe.schema import SampleConfig
from sixfold.rollout.base import Choose
from sixfold.run.assemble import Assembly
from sixfold.steps import own_ends_of, steps_of
from sixfold.types import Group, Task

from .compare import check_rendered, room
from .methods import METHODS
from .scorers import named_scorer, scorer_folders, scorer_weights
from .searcher import Plan, Searcher
from .settings import Settings
from .steps import Stepping
from .task_search import Found
from .tree import Cost


class SearchRollout:
    """One search per task.

    The group of a task has the completion that the method chose. With `sample.keep = "all"`, it has
    all completions among which it chose.

    Args:
        world: the policy with its engine, and the verifier.

    Attributes:
        scorer_weights: hash of the weights of the scorer. "" if no model scores.

    Raises:
        UserError: if the scorer cannot be loaded.
    """

    def __init__(self, world: Assembly) -> None:
        config, environment = world.recipe.sample, world.recipe.environment
        search = config.search
        path = search.scorer
        if path not in ("", VERIFIER):
            path = scorer_folders(path)
        self._scorer, ends = named_scorer(path, environment, search.steps)
        self._world = world
        self._every = config.keep == "all"
        self._plan = Plan(
            (search.method,),
            Settings(n=config.samples),
            Stepping(search.steps or ends or Stepping.name),
            "min",
            search.budget or None,
            path,
            tasks=0,
            train=True,
        )
        METHODS[search.method].check_texts(self._plan.settings, world.renderer)
        self.scorer_weights = scorer_weights(path)
        self._spent: list[Found] = []

    @staticmethod
    def check(config: SampleConfig, several_turns: bool, max_tokens: int) -> None:
        """Refuse `sample.search` where it cannot work, before anything is loaded.

        Args:
            config: the recipe's [sample] section.
            several_turns: the episodes have several replies.
            max_tokens: most tokens of a completion.

        Raises:
            UserError: naming the setting.
        """
        search = config.search
        row = METHODS.get(search.method)
        if row is None:
            raise UserError(
                f"sample.search.method = {search.method!r}: unknown."
                f"{nearest(search.method, [*METHODS])} Methods: {', '.join(METHODS)}"
            )
        if several_turns:
            raise UserError(
                "sample.search completes one reply, and environment.episode and environment.agent"
                " play several. Remove one of them"
            )
        if row.scores != "nothing" and not search.scorer:
            raise UserError(
                f"sample.search.method = {search.method!r} needs sample.search.scorer, a reward"
                " model"
            )
        if row.scores == "nothing" and search.scorer:
            raise UserError(
                f"sample.search.scorer has no effect: the method {search.method} needs no scores"
            )
        if (count := len(listed_models(search.scorer))) > 2:
            raise UserError(
                f"sample.search.scorer names {count} models. One is a reward model; two are a"
                " policy and its reference"
            )
        if "expand" not in row.reads and search.steps and not search.scorer:
            raise UserError(f"sample.search.steps has no effect on {search.method}")
        if "n" not in row.reads and config.samples != SampleConfig().samples:
            raise UserError(
                f"sample.samples has no effect on {search.method}, which completes once. Leave it"
                " out"
            )
        try:
            row.check(Settings(n=config.samples), max_tokens)
        except UserError as error:
            raise UserError(
                f"sample.search ({search.method}, n = sample.samples): {error}"
            ) from error
        if own_ends_of(search.steps):
            steps_of(search.steps)

    @property
    def samples(self) -> int:
        return self._world.recipe.sample.samples if self._every else 1

    @property
    def version(self) -> int:
        return self._world.player.generator.version

    async def play(
        self,
        tasks: Sequence[Task],
        seed: int,
        scorer: Scorer | None = None,
        choose: Choose | None = None,
        on_sampled: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[Group, None]:
        """Search all tasks, and yield a group for each as `Rollout.play` does.

        Args:
            tasks: tasks with distinct ids.
            seed: seed of the sampling noise.
            scorer: grades the completions of the groups.
            choose: ignored: the method chooses.
            on_sampled: called once, when the last search has ended.

        Raises:
            UserError: if the budget has no room for a prompt, or the scorer would read another.
        """
        world, plan = self._world, self._plan
        check_rendered(tasks, world.renderer, self._scorer)
        longest = max(map(len, world.renderer.encode_all(tasks)), default=0)
        if plan.budget is not None and plan.budget <= longest:
            raise UserError(
                f"sample.search.budget = {plan.budget}: the longest prompt alone has {longest}"
                " tokens, which count. Raise it"
            )
        found: dict[str, Found] = {}

        async def work(some: Iterator[Task], alone: bool) -> None:
            for task in some:
                one = await searcher.search(plan.way(*plan.methods), task, alone, seed)
                if alone or not one.evicted:
                    found[task.id] = one

        with closing(Searcher(world, plan, self._scorer, "")) as searcher:
            count, left = min(room(world, plan), len(tasks)), iter(tasks)
            await together(work(left, count == 1) for _ in range(count))
            await work((task for task in tasks if task.id not in found), True)
        await world.player.generator.sleep()
        on_sampled()
        self._spent = [found[task.id] for task in tasks]
        for task, one in zip(tasks, self._spent, strict=True):
            kept = one.candidates if self._every else (one.best,)
            group = Group(task, [replace(t, sample=number) for number, t in enumerate(kept)])
            if scorer:
                await together(scorer.add(task, trajectory) for trajectory in group.trajectories)
                await scorer.finish(group)
            yield group

    def stats(self) -> dict[str, float]:
        """Model tokens of the last `play`."""
        costs: list[Cost] = [one.cost for one in self._spent]
        return {
            "search/prefilled_tokens": float(sum(cost.prefilled for cost in costs)),
            "search/sampled_tokens": float(sum(cost.sampled for cost in costs)),
            "search/scored_tokens": float(sum(cost.scored for cost in costs)),
            "search/refused": float(sum(one.refused for one in self._spent)),
        }
