"""Do rewards of steps help RL? Held-out accuracy with and without them, after equal samples.

    cat recipes/prm_search.toml benchmarks/step_judge.toml > steps.toml
    sixfold train steps.toml --run.threads 1
    for seed in 0 1 2 3 4; do
        sixfold train benchmarks/process_rl.toml --run.threads 1 --run.seed $seed \\
            --run.name process-$seed
    done
    python benchmarks/process_rl.py runs/process-?

All seeds share one SFT model and one judge. Prints a row per run, and the mean of the paired
differences from outcomes alone with its 95 % interval (t over the runs).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sixfold.evaluation.statistics import mean_interval
from sixfold.report.numbers import percent, points

STAGES = {
    "outcome": "outcomes alone",
    "gain": "and rises of the score",
    "min": "and the lowest score",
}


def held_out(run: Path) -> list[float]:
    """Share of held-out tasks solved before RL, then after each of `STAGES`."""
    found = [json.loads((run / "stages" / stage / "summary.json").read_text()) for stage in STAGES]
    return [found[0]["heldout_after_sft"], *(summary["heldout_after"] for summary in found)]


def main(runs: Sequence[Path]) -> None:
    rows = [held_out(run) for run in runs]
    print(f"| run | before | {' | '.join(STAGES.values())} |")
    print("|---|" + "---|" * (1 + len(STAGES)))
    for run, row in zip(runs, rows, strict=True):
        print(f"| {run.name} | {' | '.join(map(percent, row))} |")
    for at, stage in enumerate(STAGES.values(), start=1):
        if at > 1 and len(rows) > 1:
            mean, low, high = mean_interval([row[at] - row[1] for row in rows])
            print(f"{stage}: {points(mean)} ({points(low)} to {points(high)})")


if __name__ == "__main__":
    main([Path(run) for run in sys.argv[1:]])
