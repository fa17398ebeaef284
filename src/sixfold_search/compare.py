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
import math
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sixfold.checks.scorer import together
from sixfold.data.profile import Profile, task_key
from sixfold.data.task_set import drawn_tasks
from sixfold.engine.engine import Engine
from sixfold.errors import UserError
from sixfold.files.blocks import done_blocks, read_rows, write_block
from sixfold.files.durable import disk_errors, write_json_atomic, write_text_atomic
from sixfold.model.weights_hash import weights_hash
from sixfold.recipe.resume_policy import settings_of
from sixfold.renderer.renderer import Renderer
from sixfold.reward_model.step_scorer import ProcessScorer
from sixfold.run.assemble import Assembly
from sixfold.run.fingerprint import rewards_fingerprint, tasks_fingerprint
from sixfold.steps import own_ends_of
from sixfold.types import Task

from .difficulty import INPUTS, RESULTS, SEARCHES, STEPS_CODE, Earlier, check_choice, rates_of
from .methods import METHODS
from .scorers import OutcomeScorer, scorer_weights
from .searcher import PAIRS, SOLUTIONS, Plan, Searcher

_BLOCKS = "tasks"


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
    at_once: int | None = None,
) -> list[dict[str, Any]]:
    """Search every task by every method, and write the files.

    Args:
        world: the policy with its engine, the tasks, and the verifier.
        plan: what is compared.
        out: folder for the results. With the tasks of an interrupted run, it goes on.
        scorer: the reward model. None: there is none, or the verifier scores.
        difficulties: pass rates of the tasks. None: unknown.
        at_once: tasks that are searched at the same time. With the own engine this changes no
            result. None: as many as its KV cache has room for; one with an engine elsewhere.

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
    check_rendered(tasks, world.renderer, scorer)
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
    searcher = Searcher(world, plan, scorer, inputs["model"])
    crowded: list[int] = []

    async def work(numbers: Iterator[int], alone: bool) -> None:
        for number in numbers:
            task = tasks[number]
            row = await searcher.row(task, rates.get(task_key(task)), alone)
            if row is None:
                crowded.append(number)
                continue
            found = row["found"].values()
            done[number] = {
                "failed": sum(one["unchecked"] for one in found),
                "completions": sum(len(one["candidates"]) for one in found),
            }
            _check_failures(done.values(), len(tasks), recipe.environment.error_budget)
            write_block(blocks, number, [row], done[number])
            if len(done) * 10 // len(tasks) > (len(done) - 1) * 10 // len(tasks):
                print(f"{len(done)} of {len(tasks)} tasks", flush=True)

    left = [number for number in range(len(tasks)) if number not in done]
    count = min(at_once or room(world, plan), len(left))
    numbers = iter(left)
    with closing(searcher):
        world.loop.run(together(work(numbers, count == 1) for _ in range(count)))
        if crowded:
            print(
                f"{len(crowded)} tasks are searched again, one at a time: the KV cache had no room"
                f" for the prefixes of {count} tasks. Raise engine.kv_tokens or lower"
                " --tasks-at-once",
                flush=True,
            )
            world.loop.run(work(iter(sorted(crowded)), True))
    rows = list(read_rows(blocks, len(tasks)))
    for name in (SOLUTIONS, PAIRS):
        made = [one for row in rows for one in row.pop(name)]
        _write_lines(out / name, made)
    _write_lines(out / SEARCHES, rows)
    return rows


def room(world: Assembly, plan: Plan) -> int:
    """Number of tasks whose chains fit into the KV cache side by side, at least 1.

    1 for an engine elsewhere: nothing tells what its cache has dropped.
    """
    engine, longest = world.engine, world.longest
    if not isinstance(engine, Engine):
        return 1
    tokens = engine.scheduler.blocks.count * engine.scheduler.blocks.block_size
    ways = [plan.way(name) for name in plan.methods]
    ways += plan.choice.ways if plan.choice else []
    chains = [way.settings.n if "n" in METHODS[way.method].reads else 1 for way in ways]
    needs = [
        min(count * longest, way.budget or math.inf)
        for way, count in zip(ways, chains, strict=True)
    ]
    return max(1, int(tokens // max(needs)))


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
    config = world.recipe.environment
    return {
        **{f"data.{k}": v for k, v in tasks_fingerprint(tasks, world.renderer.encode).items()},
        "code of environment.rewards": rewards_fingerprint(config.rewards, config.reward_model),
        STEPS_CODE: rewards_fingerprint(own_ends_of(plan.stepping.name)),
        "weights of --scorer": scorer_weights(plan.scorer),
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


def check_rendered(
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


def _write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write_text_atomic(path, "".join(lines))
