"""The demo's promise, seed by seed: held-out accuracy after SFT and after RL, and the time it took.

    python benchmarks/demo_seeds.py [--seeds 0,1,2]

Each seed is a whole `sixfold train demo` in a process of its own, start-up and imports counted, one
after another.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def run_seed(seed: int, folder: Path) -> dict[str, object]:
    """Run the demo; its summary, with the wall time of the whole process as `process_seconds`."""
    name = f"demo-{seed}"
    command = [
        str(Path(sys.executable).with_name("sixfold")),
        "train",
        "demo",
        "--run.dir",
        str(folder),
        "--run.name",
        name,
        "--run.seed",
        str(seed),
    ]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the demo failed with seed {seed}:\n{done.stderr[-4000:]}")
    return json.loads((folder / name / "summary.json").read_text()) | {
        "process_seconds": time.perf_counter() - began
    }


def main() -> None:
    """Run the seeds and print a line for each."""
    parser = argparse.ArgumentParser(description="The demo, seed by seed.")
    parser.add_argument("--seeds", default="0,1,2", help="seeds, by comma (default 0,1,2)")
    seeds = [int(seed) for seed in parser.parse_args().seeds.split(",")]
    print(f"{'seed':>4}  {'after SFT':>22}  {'after RL':>22}  {'RL steps':>8}  {'seconds':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            s = run_seed(seed, Path(folder))
            shares = []
            for key in ("heldout_after_sft", "heldout_after"):
                low, high = s[f"{key}_interval"]  # type: ignore[misc]
                shares.append(f"{s[key]:.1%} ({low:.1%} to {high:.1%})")
            print(
                f"{seed:>4}  {shares[0]:>22}  {shares[1]:>22}  {s['steps']:>8} "
                f" {s['process_seconds']:>8.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
