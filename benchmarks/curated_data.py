"""Does training on curated data need fewer samples than training on the raw mix?

    python benchmarks/curated_data.py [--seeds 0,1,2,3,4] [--out FILE.json]

A small model learns sums by SFT, once for all seeds. Its checkpoint then goes on with GRPO on two
sets of tasks: the raw mix, and what the stages `duplicates` (here: by prompt) and `stratify` leave
of it. Of the raw mix, 48 % teaches nothing or twice: sums with a wrong answer (never solved),
single numbers to copy (always solved), and repeated rows. Both runs have the same seeds, settings
and held-out sums. The rollouts of the stage are counted as well.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import sixfold
from sixfold.data.profile import read_profile
from sixfold.environment.arithmetic import arithmetic_tasks
from sixfold.evaluation.statistics import mean_interval
from sixfold.types import Task
from sixfold_curation.stage import Context, Record, decided
from sixfold_curation.stratify import Stratify

PROPER, IMPOSSIBLE, TRIVIAL, REPEATED = 260, 120, 80, 40
"""Rows of the raw mix. 240 of its 500 rows teach nothing, or twice."""
TARGET = 0.65
"""Held-out accuracy that a run must reach."""
STEPS, PROMPTS, SAMPLES = 60, 32, 8

MODEL = {
    "model.scratch.hidden_size": 96,
    "model.scratch.layers": 2,
    "model.scratch.intermediate_size": 256,
    "model.scratch.context": 64,
}
SHARED: dict[str, Any] = {
    "run.threads": 1,
    "rollout.max_new_tokens": 40,
    "environment.rewards": ["arithmetic"],
    "environment.preflight": 0,
    "data.heldout": 0,
}
RECIPE = """
[model]
path = "{model}"

[data]
source = "rows.jsonl"
heldout = 0

[environment]
rewards = ["arithmetic"]

[rollout]
max_new_tokens = 40

[run]
threads = 1
"""


def write_rows(path: Path, tasks: list[Task]) -> None:
    """Write tasks as a data file, with their worked solutions."""
    rows = [{"id": t.id, "question": t.prompt, "answer": t.answer, "trace": t.trace} for t in tasks]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def raw_mix(seed: int) -> tuple[list[Task], list[Task]]:
    """The raw mix, and held-out sums of the kind that is worth learning."""
    proper = arithmetic_tasks(PROPER + IMPOSSIBLE + 192, terms=2, digits=2, seed=seed)
    small = arithmetic_tasks(TRIVIAL, terms=1, digits=2, seed=seed)
    draw, heldout = random.Random(seed), proper[PROPER + IMPOSSIBLE :]
    parts = {
        "proper": proper[:PROPER],
        "wrong": [
            Task(t.id, t.prompt, int(t.answer) + draw.randrange(200, 400))
            for t in proper[PROPER : PROPER + IMPOSSIBLE]
        ],
        "trivial": small,
        "proper again": draw.choices(proper[:PROPER], k=REPEATED),
    }
    rows = [(kind, task) for kind, tasks in parts.items() for task in tasks]
    draw.shuffle(rows)
    made = [
        Task(str(n), t.prompt, t.answer, t.trace, source=kind) for n, (kind, t) in enumerate(rows)
    ]
    return made, heldout


def train(
    name: str, folder: Path, settings: dict[str, Any], train_file: Path, heldout: Path
) -> Path:
    """Train, and return the folder of the run."""
    files = {"data.source": str(train_file), "data.heldout_split": str(heldout)}
    place = {"run.name": name, "run.dir": str(folder)}
    return sixfold.train(settings={**SHARED, **files, **place, **settings}, overwrite=True)


def base_model(folder: Path) -> Path:
    """The checkpoint from which all runs start: it solves a part of the sums."""
    tasks = arithmetic_tasks(2000, terms=2, digits=2, seed=1000)
    small = arithmetic_tasks(100, terms=1, digits=2, seed=1000)
    many = [Task(f"{n}/{t.id}", t.prompt, t.answer, t.trace) for n in range(5) for t in small]
    write_rows(folder / "sft.jsonl", [*many, *tasks])
    write_rows(folder / "sft-heldout.jsonl", arithmetic_tasks(256, terms=2, digits=2, seed=1001))
    settings = {
        **MODEL,
        "run.steps": 0,
        "sft.steps": 700,
        "sft.examples_per_step": 32,
        "sft.learning_rate": 2e-3,
        "sft.stop_at_accuracy": 0.5,
        "data.trace_field": "trace",
    }
    run = train("base", folder, settings, folder / "sft.jsonl", folder / "sft-heldout.jsonl")
    return next(iter(sorted((run / "checkpoints").iterdir(), reverse=True))) / "model"


def curate(tasks: list[Task], model: Path, folder: Path, seed: int) -> tuple[list[Task], int]:
    """Tasks that curation keeps, and the samples that it takes."""
    once = list({(t.prompt, t.answer): t for t in tasks}.values())
    recipe = folder / "curation.toml"
    recipe.write_text(RECIPE.format(model=model))
    rows = [
        Record(
            n, t.id, "raw", f"row {n}", str(t.prompt), str(t.answer),
            {"id": t.id, "source": "raw", "prompt": t.prompt, "answer": t.answer},
        )
        for n, t in enumerate(once)
    ]  # fmt: skip
    profiles = folder / f"profiles-{seed}"
    stage = Stratify(samples=8, hard_until=0.1, easy_from=0.9, profiles=str(profiles))
    decisions, health = decided(stage, rows, Context(seed=seed, recipe=str(recipe)))
    found = Counter((t.source, d.reason) for t, d in zip(once, decisions, strict=True))
    for (kind, reason), count in sorted(found.items()):
        print(f"  {kind}: {count} {reason or 'kept'}")
    print(f"  {health.figures['rollouts']} rollouts", flush=True)
    measured = read_profile(next(profiles.iterdir())).tasks.values()
    kept = [task for task, one in zip(once, decisions, strict=True) if one.kept]
    return kept, sum(task.rollouts for task in measured)


def accuracies(run: Path) -> list[tuple[int, float]]:
    """Samples and held-out accuracy at each evaluation."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        (line["step"] * PROMPTS * SAMPLES, line["heldout/accuracy"])
        for line in lines
        if "heldout/accuracy" in line
    ]


def samples_to_target(points: list[tuple[int, float]]) -> float:
    """Samples until the target, between two evaluations by a straight line.

    A run that does not reach it counts with all its samples.
    """
    before = None
    for samples, accuracy in points:
        if accuracy >= TARGET:
            if before is None or accuracy == before[1]:
                return samples
            share = (TARGET - before[1]) / (accuracy - before[1])
            return before[0] + share * (samples - before[0])
        before = samples, accuracy
    return STEPS * PROMPTS * SAMPLES


def compare(seed: int, model: Path, folder: Path) -> dict[str, Any]:
    """One pair of runs."""
    tasks, heldout = raw_mix(seed)
    kept, cost = curate(tasks, model, folder, seed)
    files = folder / f"heldout-{seed}.jsonl"
    write_rows(files, heldout)
    row: dict[str, Any] = {"seed": seed, "raw tasks": len(tasks), "curated tasks": len(kept)}
    for name, some in (("raw", tasks), ("curated", kept)):
        source = folder / f"{name}-{seed}.jsonl"
        write_rows(source, some)
        settings = {
            "model.path": str(model),
            "run.steps": STEPS,
            "run.seed": seed,
            "rollout.prompts_per_step": PROMPTS,
            "rollout.samples_per_prompt": SAMPLES,
            "algorithm.name": "grpo",
            "trainer.learning_rate": 1.5e-4,
            "trainer.max_tokens_per_microbatch": 4096,
            "eval.every": 10,
        }
        run = train(f"{name}-{seed}", folder, settings, source, files)
        row[f"{name} curve"] = accuracies(run)
        row[name] = samples_to_target(row[f"{name} curve"])
    return row | {"profile": cost}


def main() -> None:
    """Run the pairs and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="seeds, by comma")
    parser.add_argument("--out", type=Path, help="file for the figures as JSON")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = base_model(folder)
        for seed in map(int, given.seeds.split(",")):
            rows.append(compare(seed, model, folder))
            print(rows[-1], flush=True)
    for label, cost in (("training alone", 0), ("with the rollouts of stratify", 1)):
        ratios = [(r["curated"] + cost * r["profile"]) / r["raw"] for r in rows]
        mean, low, high = mean_interval(ratios)
        print(f"{label}: {mean:.2f} of the samples of the raw mix [{low:.2f}, {high:.2f}]")
    last = [r["curated curve"][-1][1] - r["raw curve"][-1][1] for r in rows]
    mean, low, high = mean_interval(last)
    print(f"accuracy at the end: {mean:+.3f} with curated data [{low:+.3f}, {high:+.3f}]")
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(f"CPU seconds: {used.ru_utime + used.ru_stime:.0f}")
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
