"""What each shipped CPU recipe teaches: solved held-out tasks before and after RL, task by task and seed by seed.

    python benchmarks/recipes.py [--recipes demo,reasoning_gym] [--seeds 0,1,2] [--json FILE]

Each run is a whole `sixfold train RECIPE` in a process of its own, start-up counted, one after another.
A recipe passes with a seed if the share of solved held-out tasks rises by at least 20 points on each
of its tasks, within 10 minutes. gsm8k needs a GPU and a model of the hub, so it is not among them;
`tests/recipes/test_shipped.py` runs its form.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECIPES = ("demo", "reasoning_gym")
POINTS = 0.20
SECONDS = 600.0


def sixfold(*arguments: str) -> None:
    """Run a command of Sixfold; end this one if it fails."""
    done = subprocess.run([str(Path(sys.executable).with_name("sixfold")), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"sixfold {' '.join(arguments)} failed:\n{done.stderr[-4000:]}")


def solved_by_task(file: Path) -> dict[str, float]:
    """Share of solved completions of each dataset, from a file of completions that `sixfold eval` has written."""
    shares: dict[str, list[bool]] = defaultdict(list)
    for line in file.read_text().splitlines():
        row = json.loads(line)
        shares[dataset_of(row)].append(bool(row["solved"]))
    return {name: sum(values) / len(values) for name, values in sorted(shares.items())}


def dataset_of(row: Mapping[str, Any]) -> str:
    """The generator that made a task: ids are DATASET-SEED-NUMBER, or names of sums."""
    return str(row["task_id"]).split("-", maxsplit=1)[0]


def run(recipe: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train with one seed, and evaluate the model after SFT and after RL on the same held-out tasks."""
    name = f"{recipe}-{seed}"
    common = ["--run.dir", str(folder), "--run.name", name, "--run.seed", str(seed)]
    began = time.perf_counter()
    sixfold("train", recipe, *common, "--checkpoint.keep", "99")
    seconds = time.perf_counter() - began
    checkpoints = sorted((folder / name / "checkpoints").glob("step-*"))
    out = folder / f"{name}-eval"
    ends = [str(checkpoints[0]), str(checkpoints[-1])]
    sixfold("eval", recipe, "--checkpoint", *ends, "--out", str(out), "--run.seed", str(seed))
    before, after = (solved_by_task(out / f"completions-{number}.jsonl") for number in (1, 2))
    summary = json.loads((folder / name / "summary.json").read_text())
    gains = {task: after[task] - before[task] for task in before}
    return {
        "recipe": recipe,
        "seed": seed,
        "before": before,
        "after": after,
        "steps": summary["steps"],
        "seconds": round(seconds, 1),
        "passes": min(gains.values()) >= POINTS and seconds <= SECONDS,
    }


def main() -> int:
    """Run everything and print a line for each task; exit code 1 if a run does not pass."""
    parser = argparse.ArgumentParser(description="What the shipped CPU recipes teach.")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="recipes, by comma")
    parser.add_argument("--seeds", default="0,1,2", help="seeds, by comma (default 0,1,2)")
    parser.add_argument("--json", type=Path, help="write the results here too")
    asked = parser.parse_args()
    results = []
    print(f"{'recipe':16} {'seed':>4} {'task':16} {'after SFT':>10} {'after RL':>10} {'steps':>6} {'seconds':>8}  passes")
    with tempfile.TemporaryDirectory() as folder:
        for recipe in asked.recipes.split(","):
            for seed in map(int, asked.seeds.split(",")):
                r = run(recipe, seed, Path(folder))
                results.append(r)
                for task in r["before"]:
                    before, after = r["before"][task], r["after"][task]
                    row = f"{recipe:16} {seed:>4} {task:16} {before:>10.1%} {after:>10.1%}"
                    print(f"{row} {r['steps']:>6} {r['seconds']:>8.0f}  {r['passes']}", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(r["passes"] for r in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
