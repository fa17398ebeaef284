"""Search with an implicit process reward model at equal budgets of model tokens, seed by seed.

    python benchmarks/prm_search.py [--seeds 0,1,2] [--budgets 500,1000] [--tasks 200]
        [--methods majority,best_of_n,beam] [--folder DIR]

Each seed trains the recipe `prm_search` and searches held-out tasks at every budget, then with 16
completions and no budget. Both run in processes of their own with one thread, one after another.
Times are CPU seconds. With a folder, what is finished there is not done again, and runs stay.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

METHODS = "greedy,majority,weighted,best_of_n,beam"
COMPLETIONS = 16
POLICY, JUDGE = "sft", "implicit"
"""Stages of the recipe: what searches, and what is scored against it."""


def sixfold(*words: str) -> float:
    """Run a command; the CPU seconds that it took, with its child processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "sixfold", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"sixfold {' '.join(words)} failed:\n{done.stderr[-4000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def train(seed: int, folder: Path) -> Path:
    """Train the recipe with a seed. Returns its run."""
    run = folder / f"seed-{seed}"
    if not (run / "stages" / JUDGE / "artifact.json").is_file():
        options = {"run.dir": folder, "run.name": run.name, "run.seed": seed, "run.threads": 1}
        words = [f"--{name}={value}" for name, value in options.items()]
        print(f"seed {seed}: trained in {sixfold('train', 'prm_search', *words):.0f} CPU s")
    policy, judge = (
        json.loads((run / "stages" / stage / "summary.json").read_text())["heldout_after"]
        for stage in (POLICY, JUDGE)
    )
    print(
        f"seed {seed}: the policy solves {policy:.1%} of held-out sums greedily, and the model that"
        f" judges {judge:.1%}",
        flush=True,
    )
    return run


def search(run: Path, seed: int, budget: int | None, tasks: int, methods: str) -> None:
    """Search with the models of a run, and print a line per method."""
    limit = str(budget or f"n{COMPLETIONS}")
    out = run.with_name(f"{run.name}-found-{limit}")
    if not (out / "results.json").is_file():
        given = ["--budget", limit] if budget else ["--n", str(COMPLETIONS)]
        policy, judge = (str(run / "stages" / stage) for stage in (POLICY, JUDGE))
        words = [policy, "--scorer", f"{judge},{policy}", "--environment.prm.beta", "0.1"]
        words += ["--steps", "token:;", "--out", str(out), *given]
        words += ["--tasks", str(tasks), "--run.seed", str(seed), "--methods", *methods.split(",")]
        print(f"searched in {sixfold('search', 'prm_search:sft', *words):.0f} CPU s")
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    for name, found in results["methods"].items():
        low, high = found["solved_interval"]
        spent = sum(found[f"tokens_{key}"] for key in ("prefilled", "sampled", "scored"))
        print(
            f"{seed:>4}  {limit:>6}  {name:<12}  {found['solved']:>6.1%} ({low:.1%} to {high:.1%})"
            f"  {found['covered']:>6.1%}  {spent:>6.0f}  {found['candidates']:>6.1f}",
            flush=True,
        )


def main() -> None:
    """Train and search every seed."""
    parser = argparse.ArgumentParser(description="Search with a learned process reward model.")
    parser.add_argument("--seeds", default="0,1,2", help="seeds, by comma (default 0,1,2)")
    parser.add_argument("--budgets", default="500,1000", help="budgets, by comma")
    parser.add_argument("--tasks", type=int, default=200, help="held-out tasks (default 200)")
    parser.add_argument("--methods", default=METHODS, help=f"by comma (default {METHODS})")
    parser.add_argument("--folder", type=Path, help="keep the runs here (default: temporary)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        print(
            "seed  budget  method        right (95 %)               any right  tokens  completions"
        )
        for seed in map(int, given.seeds.split(",")):
            run = train(seed, folder)
            for budget in (*map(int, filter(None, given.budgets.split(","))), None):
                search(run, seed, budget, given.tasks, given.methods)


if __name__ == "__main__":
    main()
