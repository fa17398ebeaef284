"""The algorithms on the shared task, over seeds: what each is claimed to do, measured.

    python benchmarks/algorithms/run.py                               # everything, about 25 minutes
    on 2 cores python benchmarks/algorithms/run.py --seeds 0 --steps 2 --out /tmp/try.json
    python benchmarks/algorithms/report.py                            # README.md and plots/ from
    results.json

Every run is a process of its own on one thread. The SFT base of a seed (and OPD's teacher) is made
once and kept in --cache: all arms of a seed start from the same weights. A run ends when it has
drawn as many samples as its arm's steps would: what dynamic sampling throws away counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: the model is too small for more

from arms import ARMS, Arm

from sixfold.algorithm.zoo import ZOO
from sixfold.commands.shared_task import ROLLOUT, SharedTask, make_base, make_teacher, shared_recipe
from sixfold.environment.arithmetic import arithmetic_reward
from sixfold.types import Group

HERE = Path(__file__).parent
DIGITS = {"length": 4, "right_length": 5, "clipped": 5}
"""Significant digits of the columns of results.json. Others: 6."""


def measure(arm: Arm, seed: int, base: Path, steps: int) -> dict[str, Any]:
    """One run: held-out accuracy by samples drawn, and what each step's samples were like."""
    teacher = str(base.with_name(f"teacher-{seed}")) if ZOO[arm.algorithm].needs_teacher else ""
    recipe = shared_recipe(
        arm.algorithm, seed=seed, steps=steps, base=str(base), teacher=teacher, **arm.row
    )
    if arm.learning_rate:
        recipe = recipe.model_copy(
            update={
                "trainer": recipe.trainer.model_copy(update={"learning_rate": arm.learning_rate})
            }
        )
    began, task = time.perf_counter(), SharedTask(recipe, arm.reward)
    per_step = ROLLOUT.prompts_per_step * ROLLOUT.samples_per_prompt
    made: list[dict[str, float | None]] = []
    drawn, heldout = 0.0, [(0, task.accuracy().mean)]
    for groups, metrics in task.steps():
        drawn += per_step * (1 + float(metrics.get("dynamic/extra_frac", 0.0)))  # type: ignore[arg-type]
        made.append(
            {
                "drawn": round(drawn),
                **describe(groups),
                "clipped": metrics.get("train/clip_active_frac"),
            }
        )  # type: ignore[dict-item]
        done = drawn >= per_step * steps - 0.5
        if done or len(made) % arm.eval_every == 0:
            heldout.append((round(drawn), task.accuracy().mean))
        if done:
            break
    task.close()
    columns = {key: [rounded(step[key], DIGITS.get(key, 6)) for step in made] for key in made[0]}
    return {
        "study": arm.study,
        "arm": arm.name,
        "seed": seed,
        "heldout": heldout,
        **columns,
        "seconds": round(time.perf_counter() - began, 1),
    }


def describe(groups: Sequence[Group]) -> dict[str, float | None]:
    """Of a step's samples: exact accuracy, entropy (minus the mean log-prob of the sampled tokens),
    mean length of wrong and of right answers.
    """
    lengths: dict[bool, list[int]] = {True: [], False: []}
    logp: list[float] = []
    for group in groups:
        for t in group.trajectories:
            lengths[arithmetic_reward(t.text, group.task) > 0].append(t.sampled_length)
            logp += [x for x, sampled in zip(t.logp, t.mask, strict=True) if sampled]
    wrong, right = lengths[False], lengths[True]
    return {
        "accuracy": len(right) / (len(right) + len(wrong)),
        "entropy": -fmean(logp),
        "wrong_length": fmean(wrong) if wrong else None,
        "right_length": fmean(right) if right else None,
        "length": fmean(wrong + right),
    }


def prepare(seed: int, cache: Path) -> None:
    """The seed's SFT base and its teacher, made if they are not there."""
    base, teacher = cache / f"base-{seed}", cache / f"teacher-{seed}"
    if not (base / "config.json").exists():
        make_base(base, seed)
    if not (teacher / "config.json").exists():
        make_teacher(teacher, base, seed)


def one(job: tuple[int, int, int, Path]) -> dict[str, Any]:
    """A process's work: the arm of that number with a seed, for so many steps (0: its own), from
    the base in the cache.
    """
    index, seed, steps, cache = job
    return measure(ARMS[index], seed, cache / f"base-{seed}", steps or ARMS[index].steps)


def main() -> None:
    """Run what is asked for and write the results."""
    parser = argparse.ArgumentParser(description="The algorithms on the shared task, over seeds.")
    parser.add_argument(
        "--seeds", default="0,1,2,3,4", help="seeds, by comma (default %(default)s)"
    )
    parser.add_argument(
        "--studies",
        default=",".join(dict.fromkeys(arm.study for arm in ARMS)),
        help="studies, by comma (default %(default)s); others keep their results",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=0,
        help="steps of every arm, to try it out (default: each arm's own)",
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="processes at a time (default %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=HERE / "results.json",
        help="where the results go (default %(default)s)",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path("runs/algorithm-bases"),
        help="folder of the SFT bases (default %(default)s)",
    )
    asked = parser.parse_args()
    studies, seeds = asked.studies.split(","), [int(seed) for seed in asked.seeds.split(",")]
    jobs = [
        (index, seed, asked.steps, asked.cache)
        for index, arm in enumerate(ARMS)
        if arm.study in studies
        for seed in seeds
    ]
    runs = (
        [run for run in json.loads(asked.out.read_text())["runs"] if run["study"] not in studies]
        if asked.out.exists()
        else []
    )
    # Forked after the imports, which cost more than many a run, and ended after each: no run can
    # see what another has left behind.
    with multiprocessing.get_context("fork").Pool(asked.jobs, maxtasksperchild=1) as pool:
        pool.starmap(prepare, [(seed, asked.cache) for seed in seeds], chunksize=1)
        for run in pool.imap(one, jobs, chunksize=1):
            first, last = run["heldout"][0][1], run["heldout"][-1][1]
            print(
                f"{run['study']:9} {run['arm']:12} seed {run['seed']}: {first:.1%} -> {last:.1%},"
                f" {run['seconds']} s",
                flush=True,
            )
            runs.append(run)
            text = json.dumps({**about(), "runs": runs}, separators=(",", ":"))
            asked.out.write_text(text + "\n")


def rounded(value: float | None, digits: int) -> float | None:
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def about() -> dict[str, Any]:
    """When, with what, and by which command."""
    versions = {name: version(name) for name in ("sixfold", "torch", "transformers")} | {
        "python": sys.version.split()[0]
    }
    command = " ".join(["python benchmarks/algorithms/run.py", *sys.argv[1:]])
    return {"date": datetime.now(UTC).date().isoformat(), "command": command, "versions": versions}


if __name__ == "__main__":
    main()
