"""Compare methods of search on the tasks of a recipe, at equal budgets of model tokens.

OUT/search.json       what is searched, and with what; a second run goes on only with the same
OUT/tasks/            one block per task, while the search runs
OUT/searches.jsonl    one line per task: what each method found, and all its candidates
OUT/solutions.jsonl   chosen completions that are right, as rows for SFT
OUT/pairs.jsonl       right and wrong completions of a prompt, as rows for preferences
OUT/results.json      figures
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sixfold.data.profile import Profile, task_key
from sixfold.data.task_set import drawn_tasks
from sixfold.errors import UserError
from sixfold.files.blocks import done_blocks, read_rows, write_block
from sixfold.files.durable import disk_errors, write_json_atomic, write_text_atomic
from sixfold.model.weights_hash import weights_hash
from sixfold.recipe.adapter_folder import folder_hash
from sixfold.recipe.resume_policy import settings_of
from sixfold.recipe.schema import SampleConfig
from sixfold.renderer.renderer import Renderer
from sixfold.reward_model.step_scorer import ProcessScorer
from sixfold.rollout.engine_generator import EngineGenerator
from sixfold.rollout.generator import Generator
from sixfold.run.assemble import Assembly
from sixfold.run.fingerprint import rewards_fingerprint, tasks_fingerprint
from sixfold.stages.dataset import check_tasks, sampled_row
from sixfold.stages.keepers import completion_of, select
from sixfold.steps import own_ends_of
from sixfold.types import Group, SamplingParams, Task

from .difficulty import (
    INPUTS,
    NAME,
    RESULTS,
    SEARCHES,
    STEPS_CODE,
    Choice,
    Earlier,
    Way,
    check_choice,
    rates_of,
)
from .methods import METHODS
from .scorers import Oracle, OutcomeScorer
from .settings import Settings
from .steps import Stepping
from .task_search import Found, search

SOLUTIONS, PAIRS, _BLOCKS = "solutions.jsonl", "pairs.jsonl", "tasks"


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


@dataclass(frozen=True)
class Difficulties:
    """Pass rates of tasks, and the searches from which a choice by them was made.

    Attributes:
        profile: the pass rates.
        path: its file.
        earlier: the searches. Empty without a choice.
    """

    profile: Profile
    path: Path
    earlier: Sequence[Earlier]


def compare_methods(
    world: Assembly,
    plan: Plan,
    out: Path,
    scorer: OutcomeScorer | ProcessScorer | None,
    difficulties: Difficulties | None = None,
) -> list[dict[str, Any]]:
    """Search every task by every method, and write the files.

    Args:
        world: the policy with its engine, the tasks, and the verifier.
        plan: what is compared.
        out: folder for the results. With the tasks of an interrupted run, it goes on.
        scorer: the reward model. None: there is none, or the verifier scores.
        difficulties: pass rates of the tasks. None: unknown.

    Returns:
        One row of `searches.jsonl` per task.

    Raises:
        UserError: if there are no tasks, the budget is too small, or the folder holds something
            else.
    """
    recipe = world.recipe
    tasks = _tasks(world, recipe.run.seed, plan)
    for name in plan.methods:
        METHODS[name].check_texts(plan.settings, world.renderer)
    _check_rendered(tasks, world.renderer, scorer)
    inputs = {
        "model": weights_hash(world.whole_policy.weights()),
        **json.loads(json.dumps(asdict(plan))),
        **{key: value for key, value in settings_of(recipe).items() if _decides(key)},
        **_data(world, tasks, plan),
    }
    rates = _rates(tasks, plan, inputs, difficulties) if difficulties else {}
    _begin(out, inputs)
    blocks, done = out / _BLOCKS, done_blocks(out / _BLOCKS)
    if done:
        print(f"continuing: {len(done)} of {len(tasks)} tasks are done", flush=True)
    searcher = _Searcher(world, plan, scorer, inputs["model"])
    for number, task in enumerate(tasks):
        if number not in done:
            row = searcher.row(task, rates.get(task_key(task)))
            found = row["found"].values()
            done[number] = {
                "failed": sum(one["unchecked"] for one in found),
                "completions": sum(len(one["candidates"]) for one in found),
            }
            _check_failures(done.values(), len(tasks), recipe.environment.error_budget)
            write_block(blocks, number, [row], done[number])
        if (number + 1) * 10 // len(tasks) > number * 10 // len(tasks):
            print(f"{number + 1} of {len(tasks)} tasks", flush=True)
    rows = list(read_rows(blocks, len(tasks)))
    for name in (SOLUTIONS, PAIRS):
        made = [one for row in rows for one in row.pop(name)]
        _write_lines(out / name, made)
    _write_lines(out / SEARCHES, rows)
    return rows


def end(out: Path, results: dict[str, Any]) -> None:
    """Write the figures. A further run refuses the folder."""
    write_json_atomic(out / RESULTS, results)
    shutil.rmtree(out / _BLOCKS)


def check_out(out: Path) -> None:
    """Check the output folder before anything is loaded.

    Raises:
        UserError: if it is a file, holds something else, or a finished search.
    """
    with disk_errors(f"cannot read {out}"):
        if (out / RESULTS).exists():
            raise UserError(f"--out {out}: its search has ended. Name another folder, or remove it")
        other = not out.is_dir() or any(out.iterdir())
        if out.exists() and other and not (out / INPUTS).is_file():
            raise UserError(
                f"--out {out}: it exists and holds no search. Name another folder, or remove it"
            )


def _begin(out: Path, inputs: dict[str, Any]) -> None:
    """Record what is searched, or refuse the tasks of another search.

    Raises:
        UserError: naming what has changed.
    """
    path = out / INPUTS
    if not path.is_file():
        with disk_errors(f"cannot write {out}"):
            out.mkdir(parents=True, exist_ok=True)
        write_json_atomic(path, inputs)
        return
    saved = json.loads(path.read_bytes())
    for key, value in inputs.items():
        if saved.get(key) != value:
            raise UserError(
                f"--out {out} was searched with {key} = {saved.get(key)!r}, now {value!r}. Leave it"
                " as it was, or name another folder"
            )


def _data(world: Assembly, tasks: Sequence[Task], plan: Plan) -> dict[str, Any]:
    """Fingerprints of what the settings only name: tasks, rewards, and the scorer's weights."""
    config, scorers = world.recipe.environment, map(Path, filter(None, plan.scorer.split(",")))
    return {
        **{f"data.{k}": v for k, v in tasks_fingerprint(tasks, world.renderer.encode).items()},
        "code of environment.rewards": rewards_fingerprint(config.rewards, config.reward_model),
        STEPS_CODE: rewards_fingerprint(own_ends_of(plan.stepping.name)),
        "weights of --scorer": " ".join(folder_hash(one) for one in scorers if one.is_dir()),
    }


def _rates(
    tasks: Sequence[Task], plan: Plan, inputs: Mapping[str, Any], known: Difficulties
) -> dict[str, float]:
    """Pass rate of each task by its key.

    Raises:
        UserError: if they are of another model, one is missing, or the choice may not be reported
            on these tasks.
    """
    ids = {task_key(task): task.id for task in tasks}
    if known.profile.key.weights != inputs["model"]:
        raise UserError(
            f"--profile {known.path}: these are pass rates of another model. Measure those of the"
            " model that is searched with"
        )
    if plan.choice:
        check_choice(plan.choice, known.earlier, inputs, ids)
    return rates_of(known.profile, ids, known.path)


def _check_failures(done: Collection[dict[str, int]], tasks: int, budget: float) -> None:
    """Check the share of completions of all tasks whose checks failed.

    Tasks that are still to be searched count as having as many completions, without a failure.

    Raises:
        UserError: if it is larger than the error budget.
    """
    failed = sum(counts["failed"] for counts in done)
    expected = sum(counts["completions"] for counts in done) * tasks / len(done)
    if failed > budget * expected:
        raise UserError(
            f"the checks of {failed} completions of {len(done)} tasks failed, more than"
            f" environment.error_budget = {budget:g} allows. Correct the rewards, or raise the"
            " budget with another --out"
        )


def _check_rendered(
    tasks: Sequence[Task], renderer: Renderer, scorer: OutcomeScorer | ProcessScorer | None
) -> None:
    """Check that the scorer reads rendered prompts as the policy does.

    Raises:
        UserError: if it has another tokenizer, or reads questions without a chat template.
    """
    for task in tasks:
        if scorer and task.form == "rendered":
            templated = isinstance(scorer, ProcessScorer) and not scorer.reads_tokens
            if templated or scorer.renderer.encode(task) != renderer.encode(task):
                raise UserError(
                    f"--scorer: task {task.id} has a prompt that is rendered for the policy, and"
                    " this reward model reads other tokens. Search tasks with messages, or take a"
                    " reward model of the same tokenizer without marks"
                )


def _decides(key: str) -> bool:
    """True for settings that decide what is searched and how it is judged."""
    section = key.partition(".")[0]
    own = ("model", "data", "environment", "rollout", "engine")
    return section in own or key in ("run.seed", "run.precision")


def _tasks(world: Assembly, seed: int, plan: Plan) -> list[Task]:
    """The tasks to search, drawn by the seed.

    Raises:
        UserError: if there are none, or too few, or the budget is too small for one.
    """
    every = world.tasks.train if plan.train else world.tasks.heldout
    if not every:
        raise UserError(
            "no held-out tasks: set data.heldout or data.heldout_split, or search training tasks"
            " with --train"
        )
    if plan.tasks > len(every):
        kind = "training" if plan.train else "held-out"
        raise UserError(f"--tasks {plan.tasks}: there are {len(every)} {kind} tasks")
    tasks = drawn_tasks(every, plan.tasks, seed)
    longest = max(map(len, world.renderer.encode_all(tasks)))
    if plan.budget is not None and plan.budget <= longest:
        raise UserError(
            f"--budget {plan.budget}: the longest prompt alone has {longest} tokens, which count."
            " Raise it"
        )
    return tasks


class _Searcher:
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
        self._params = SamplingParams(
            rollout.max_new_tokens,
            rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            stop_token_ids=world.policy.stop_token_ids,
            seed=world.recipe.run.seed,
        )

    def row(self, task: Task, rate: float | None) -> dict[str, Any]:
        """The line of a task, with its rows for training.

        Args:
            task: the task.
            rate: its pass rate. None: unknown.
        """
        world, plan = self._world, self._plan
        ways = {name: plan.way(name) for name in plan.methods}
        if plan.choice and rate is not None:
            ways[NAME] = plan.choice.way(rate)
        found = {name: world.loop.run(self._search(way, task)) for name, way in ways.items()}
        groups = [Group(task, list(one.candidates)) for one in found.values()]
        world.environment.score(groups, error_budget=1.0)  # `_check_failures`: over all tasks
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

    async def _search(self, way: Way, task: Task) -> Found:
        world, plan = self._world, self._plan
        await _forget(world.player.generator)
        oracle = plan.scorer == "verifier"
        return await search(
            world.player.generator,
            world.renderer,
            task,
            method=way.method,
            params=self._params,
            settings=way.settings,
            stepping=way.stepping,
            scorer=Oracle(world.environment, world.renderer) if oracle else self._scorer,
            by_step=not (oracle or isinstance(self._scorer, OutcomeScorer)),
            aggregate=way.aggregate,
            stops=world.player.stops,
            budget=way.budget,
        )

    def _lessons(
        self, task: Task, found: Sequence[Found]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Rows for SFT: what the methods chose, if it is right. And a pair of candidates."""
        world, seed = self._world, self._world.recipe.run.seed
        try:
            check_tasks([task])
        except UserError:
            return [], []  # its prompt has no form in a file
        read = partial(completion_of, decode=world.renderer.decode, stops=world.player.stops)

        def rows(solved: bool, chosen: bool) -> list[dict[str, Any]]:
            candidates = [
                t
                for one in found
                for t in one.candidates
                if t.reward and t.reward.solved is solved and (one.chose(t) or not chosen)
            ]
            group = Group(task, [replace(t, sample=at) for at, t in enumerate(candidates)])
            kept = select([group], SampleConfig(keep="all"), read, world.renderer.has_special).kept
            return [sampled_row(one, model=self._model, seed=seed) for one in kept]

        pairs = rows(True, False)[:1]
        for pair, wrong in zip(pairs, rows(False, False)[:1], strict=False):
            pair |= {"chosen": pair.pop("completion"), "rejected": wrong["completion"]}
        return rows(True, True), [pair for pair in pairs if "rejected" in pair]


async def _forget(generator: Generator) -> None:
    """Empty the prefix cache, so that no method pays less because of another."""
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


def _write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write_text_atomic(path, "".join(lines))
