"""Use of a GPU by the engine: decode against memory bandwidth, prefill against matmul rate, and
each kernel against its roofline.

    python benchmarks/gpu/run.py [--shapes 0.5B,1.5B,7B] [--batches 1,16,64] [--context 1024] \\
        [--json FILE]
    # a test of the script
    python benchmarks/gpu/run.py --device cpu --shapes tiny --batches 4 --context 64 --steps 4

Random weights, made on the device. Bandwidth and matmul rate are measured in the same run, in the
run's dtype: bfloat16 on a GPU, float32 on a CPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tiny_qwen.py

import torch
from engine_speed import MODES, decode_row, prefill_row
from kernel_speed import kernel_rows
from shapes import SHAPES, make_model
from timing import Clock, measure_limits
from training_speed import attention_rows

DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
PREFILL_PROMPTS = 8


def measure_shape(
    name: str, options: argparse.Namespace, clock: Clock, limits: Any
) -> dict[str, list[dict[str, Any]]]:
    """All rows of one model."""
    model = make_model(name, clock.device, DTYPES[clock.device.type])
    found: dict[str, list[dict[str, Any]]] = {
        "decode": [],
        "prefill": [],
        "kernels": [],
        "training attention": [],
    }
    for mode in options.modes:
        for batch in options.batches:
            found["decode"].append(
                decode_row(name, model, mode, batch, options.context, options.steps, clock, limits)
            )
        found["prefill"].append(
            prefill_row(name, model, mode, PREFILL_PROMPTS, options.context, clock, limits)
        )
    found["kernels"] += kernel_rows(
        name, model, max(options.batches), options.context, clock, limits
    )
    del model
    dtypes = (torch.bfloat16, torch.float32) if clock.on_gpu else (torch.float32,)
    found["training attention"] += attention_rows(name, options.context, clock, limits, dtypes)
    return found


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a table; a key that ends in _share is a percentage."""

    def cell(key: str, value: Any) -> str:
        if key.endswith("_share"):
            return f"{value:.1%}"
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    keys = list(rows[0])
    lines = [f"| {' | '.join(keys)} |", "|---" * len(keys) + "|"]
    return "\n".join(lines + [f"| {' | '.join(cell(k, row[k]) for k in keys)} |" for row in rows])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; names are checked here."""
    parser = argparse.ArgumentParser(
        description="The engine on a GPU.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=sorted(DTYPES), help="where to run")
    parser.add_argument(
        "--shapes", default="0.5B,1.5B,7B", help=f"models, by comma, of {', '.join(SHAPES)}"
    )
    parser.add_argument(
        "--modes",
        default="",
        help=(
            f"ways of running a step, by comma, of {', '.join(MODES)}; all that the device has if"
            " none is given"
        ),
    )
    parser.add_argument("--batches", default="1,16,64", help="sequences decoded together, by comma")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=32, help="decode steps that are timed")
    parser.add_argument("--json", default="", help="write the rows to this file")
    options = parser.parse_args(arguments)
    there = [
        mode
        for mode, settings in MODES.items()
        if options.device == "cuda" or not settings["cuda_graphs"]
    ]
    options.shapes, options.modes = (
        options.shapes.split(","),
        (options.modes.split(",") if options.modes else there),
    )
    options.batches = [int(batch) for batch in options.batches.split(",")]
    for names, known in ((options.shapes, SHAPES), (options.modes, MODES)):
        if unknown := set(names) - set(known):
            parser.error(f"unknown {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    if missing := set(options.modes) - set(there):
        parser.error(f"{', '.join(missing)}: not on {options.device}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu --shapes tiny shows whether the benchmark runs")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parse(arguments)
    clock = Clock(torch.device(options.device))
    limits = measure_limits(clock, DTYPES[options.device])
    device = torch.cuda.get_device_name() if clock.on_gpu else platform.processor() or "CPU"
    print(
        f"{device}, torch {torch.__version__}: {limits.bandwidth / 1e9:.0f} GB/s,"
        f" {limits.matmul / 1e12:.2f} TFLOP/s in {DTYPES[options.device]}"
    )
    rows: dict[str, list[dict[str, Any]]] = {
        "decode": [],
        "prefill": [],
        "kernels": [],
        "training attention": [],
    }
    for name in options.shapes:
        for part, found in measure_shape(name, options, clock, limits).items():
            rows[part] += found
    for part, found in rows.items():
        print(f"\n{part}\n\n{markdown(found)}")
    if options.json:
        about = {"device": device, "bandwidth": limits.bandwidth, "matmul": limits.matmul}
        Path(options.json).write_text(json.dumps(about | rows, indent=1))


if __name__ == "__main__":
    main()
