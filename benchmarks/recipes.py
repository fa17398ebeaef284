"""Results of each shipped recipe: solved held-out tasks before and after RL, per task and seed.

    python benchmarks/recipes.py [--recipes NAME,NAME] [--seeds 0,1,2] [--json FILE]
    python benchmarks/recipes.py --draw FILE...    # the curves of such files, as docs/curves/*.svg

Each run is a whole `sixfold train RECIPE` in its own process, start-up included, one after another.
A recipe passes with a seed if the share of solved held-out tasks rises by at least 20 points on
each of its tasks, within 10 minutes. Recipes of agents must also end at 90 % or more. gsm8k needs a
GPU and a model of the hub, so a copy is trained that is scaled down to a CPU: `scaled_gsm8k.py`.
Its base model is made before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import scaled_gsm8k

from sixfold.recipe.toml import load_recipe
from sixfold.report.numbers import percent
from sixfold.report.page import render_page
from sixfold.report.svg import Line, line_chart

AGENTS = ("sql_agent", "search_agent", "web_shop")
RECIPES = (
    "demo",
    "reasoning_gym",
    "code_functions",
    *AGENTS,
    "gsm8k",
)
CURVES = Path(__file__).parents[1] / "docs" / "curves"
POINTS, AGENT_SHARE = 0.20, 0.90
SECONDS = 600.0


def sixfold(*arguments: str) -> None:
    """Run a command of Sixfold; end this one if it fails."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("sixfold")), *arguments], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"sixfold {' '.join(arguments)} failed:\n{done.stderr[-4000:]}")


def solved_by_task(file: Path) -> dict[str, float]:
    """Share of solved completions of each dataset, from a file of completions that `sixfold eval`
    has written.
    """
    shares: dict[str, list[bool]] = defaultdict(list)
    for line in file.read_text().splitlines():
        row = json.loads(line)
        shares[dataset_of(row)].append(bool(row["solved"]))
    return {name: sum(values) / len(values) for name, values in sorted(shares.items())}


def dataset_of(row: Mapping[str, Any]) -> str:
    """The generator that made a task: ids are DATASET-SEED-NUMBER, or names of sums."""
    return str(row["task_id"]).split("-", maxsplit=1)[0]


def scaled_down(recipe: str, folder: Path) -> list[str]:
    """Flags that let a recipe run on a CPU: none, but for gsm8k, whose model and dataset are made
    here once.
    """
    if recipe != "gsm8k":
        return []
    base = folder / "gsm8k-base"
    if not base.exists():
        dataset = scaled_gsm8k.make_dataset(base)
        made = scaled_gsm8k.write_sft_recipe(base, dataset, load_recipe(recipe).data.system_prompt)
        sixfold("sft", str(made), "--run.dir", str(base))
    return [
        "--model.path",
        str(base / "model"),
        "--data.source",
        str(base / "word-problems"),
        *scaled_gsm8k.SMALL,
    ]


def curve(run_folder: Path) -> list[tuple[int, float]]:
    """(RL step, share of solved held-out tasks) of every evaluation of a run, the first at
    step 0.
    """
    summary = json.loads((run_folder / "summary.json").read_text())
    records = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    during = {r["step"]: r["heldout/accuracy"] for r in records if "heldout/accuracy" in r}
    ends = {0: summary["heldout_after_sft"], summary["steps"]: summary["heldout_after"]}
    return sorted((during | ends).items())


def run(recipe: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train with one seed, and evaluate the model before and after RL on the same held-out
    tasks.
    """
    name = f"{recipe}-{seed}"
    flags = [*scaled_down(recipe, folder), "--run.seed", str(seed)]
    began = time.perf_counter()
    sixfold(
        "train",
        recipe,
        "--run.dir",
        str(folder),
        "--run.name",
        name,
        "--checkpoint.keep",
        "99",
        *flags,
    )
    seconds = time.perf_counter() - began
    checkpoints = sorted((folder / name / "checkpoints").glob("step-*"))
    out = folder / f"{name}-eval"
    ends = [str(checkpoints[0]), str(checkpoints[-1])]
    sixfold("eval", recipe, "--checkpoint", *ends, "--out", str(out), *flags)
    before, after = (solved_by_task(out / f"completions-{number}.jsonl") for number in (1, 2))
    summary = json.loads((folder / name / "summary.json").read_text())
    gain = min(after[task] - before[task] for task in before)
    enough = gain >= POINTS and (recipe not in AGENTS or min(after.values()) >= AGENT_SHARE)
    return {
        "recipe": recipe,
        "seed": seed,
        "before": before,
        "after": after,
        "curve": curve(folder / name),
        "steps": summary["steps"],
        "seconds": round(seconds, 1),
        "passes": enough and seconds <= SECONDS,
    }


def draw(files: Sequence[Path]) -> None:
    """Write docs/curves/RECIPE.svg: share of solved held-out tasks by RL step, one line
    per seed.
    """
    runs = defaultdict(list)
    for file in files:
        for result in json.loads(file.read_text()):
            runs[result["recipe"]].append(result)
    CURVES.mkdir(exist_ok=True)
    for recipe, results in runs.items():
        lines = [
            Line(f"seed {r['seed']}", r["curve"], colour=number, dots=True)
            for number, r in enumerate(results)
        ]
        write_picture(recipe, str(line_chart(lines, percent, (0.0, 1.0))))


def write_picture(name: str, picture: str) -> None:
    """Write a chart of a report as docs/curves/NAME.svg, which needs no page around it."""
    opened = picture.index(">")
    style = f"<style>{render_page('style.css')}</style>"
    (CURVES / f"{name}.svg").write_text(
        f'{picture[:opened]} xmlns="http://www.w3.org/2000/svg">{style}{picture[opened + 1 :]}\n'
    )


def main() -> int:
    """Run everything and print a line for each task; exit code 1 if a run does not pass."""
    parser = argparse.ArgumentParser(description="What the shipped CPU recipes teach.")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="recipes, by comma")
    parser.add_argument("--seeds", default="0,1,2", help="seeds, by comma (default 0,1,2)")
    parser.add_argument("--json", type=Path, help="write the results and curves here too")
    parser.add_argument(
        "--draw",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="run nothing: draw the curves of these JSON files",
    )
    asked = parser.parse_args()
    if asked.draw:
        draw(asked.draw)
        return 0
    results = []
    print(
        f"{'recipe':16} {'seed':>4} {'task':16} {'after SFT':>10} {'after RL':>10} {'steps':>6}"
        f" {'seconds':>8}  passes"
    )
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
