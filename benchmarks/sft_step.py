"""SFT compared with TRL's SFTTrainer: the loss curve, seconds per step, and peak memory.

    python benchmarks/sft_step.py                             # the curve and every case
    python benchmarks/sft_step.py --cases short --steps 2     # a quick look at one of them
    python benchmarks/sft_step.py --quick                     # Sixfold's side alone, small

Both sides load the same model and the same conversations, tokenize them by the model's chat
template, and train on the replies of the assistant alone. Both average the loss over all trained
tokens of a step. Rows, their order, AdamW, its schedule and float32 are the same (`sft_job.py`).

**Curve**: 20 steps with a decaying learning rate. The harness ends with an error if a loss of the
two sides differs by more than 1e-4.

**Cases**: the learning rate is so small that no weight changes. Each side trains on every row once,
so the harness can compare the mean loss over all of them, and finds a side that computes something
else. That holds for packed rows too, which TRL trains in another order. Sides take turns, ROUNDS
times each. The first step of each process is warm-up, and the last runs under the profiler.

| side | what it is |
|---|---|
| trl | `trl.SFTTrainer` 1.16 on padded rows, its default |
| trl-flat | the same with `padding_free`: the rows of a micro-batch are one row |
| trl-packed | the same with `packing` (`bfd`): rows of the whole dataset, in rows of equal length |
| sixfold | `sixfold train` on a recipe with one stage of kind sft |

TRL recommends FlashAttention for the last two. On a CPU, PyTorch's attention computes the whole
square of a flat row and masks what belongs to other conversations. The result is the same.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from machine_limit import THREADS
from peer_environment import trl_python
from sft_job import TEMPLATE, Job, draw_conversation, draw_lengths, write_rows
from side_process import run_side
from tiny_qwen import Shape, make_model

HERE = Path(__file__).resolve().parent
ROUNDS = 2
SIDES = ("trl", "trl-flat", "trl-packed", "sixfold")
MODES = {"trl": "padded", "trl-flat": "flat", "trl-packed": "packed"}
CURVE_STEPS, CURVE_TOLERANCE, MEAN_TOLERANCE = 20, 1e-4, 2e-5
STILL = 1e-12
"""Learning rate with which no float32 weight of the model changes."""


@dataclass(frozen=True)
class Case:
    """Sizes of one comparison. Lengths are in tokens of a conversation.

    Attributes:
        vocabulary: size of the vocabulary.
        shortest: shortest conversation.
        longest: longest conversation.
        rows: conversations per step.
        micro_rows: conversations in one pass of TRL; the fastest that we found.
        micro_tokens: tokens in one pass of Sixfold.
    """

    vocabulary: int
    shortest: int
    longest: int
    rows: int
    micro_rows: int
    micro_tokens: int


CASES = {
    "short": Case(1360, 16, 64, 64, 16, 2048),
    "mix": Case(1360, 16, 512, 32, 8, 2048),
    # The same memory for a full micro-batch on both sides.
    "vocabulary": Case(151_936, 16, 512, 8, 4, 2048),
}
CURVE = Case(1360, 16, 128, 16, 8, 1024)
SMALL = Case(96, 16, 48, 4, 2, 128)
"""What `--quick` runs."""
SMALL_SHAPE = Shape(
    vocabulary=96, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64
)


def make_job(case: Case, timed: int, folder: Path, *, rate: float, schedule: str) -> Job:
    """Write the model and the conversations of a case to `folder`, and return its job.

    Args:
        case: the sizes.
        timed: steps before the last one, warm-up included.
        folder: where the files are written.
        rate: learning rate.
        schedule: its schedule.
    """
    from tokenizers.models import WordLevel
    from transformers import AutoTokenizer

    from sixfold.controller.stream import TaskStream

    model = folder / f"model-{case.vocabulary}"
    if not model.exists():
        make_model(SMALL_SHAPE if case is SMALL else Shape(case.vocabulary), model)
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = TEMPLATE
        # TRL renders words of its own to find the end of a turn.
        known = tokenizer.get_vocab()
        tokenizer.backend_tokenizer.model = WordLevel(known, unk_token="<pad>")
        tokenizer.save_pretrained(model)
    rng, steps = random.Random(0), timed + 1
    lengths = draw_lengths(case.shortest, case.longest, case.rows * steps, rng)
    rows = [draw_conversation(length, case.vocabulary, rng) for length in lengths]
    stream = TaskStream(rows, case.rows, seed=0)  # the order of a stage with this seed
    ordered = [row for step in range(1, steps + 1) for row in stream(step)]
    return Job(
        model=str(model),
        rows=write_rows(rows, folder / "rows.jsonl"),
        ordered=write_rows(ordered, folder / "ordered.jsonl"),
        rows_per_step=case.rows,
        steps=timed,
        micro_rows=case.micro_rows,
        micro_tokens=case.micro_tokens,
        longest=case.longest,
        learning_rate=rate,
        schedule=schedule,
    )


def run_once(side: str, python: str, job: Path, name: str) -> list[dict[str, Any]]:
    """Output lines of one side."""
    script = "sixfold" if side == "sixfold" else "trl"
    mode = [MODES[side]] if side in MODES else []
    command = [python, str(HERE / f"sft_step_{script}.py"), str(job), *mode]
    return run_side(command, f"{side} on {name}", THREADS)


def losses(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines `loss` of a side."""
    return [line for line in lines if line["event"] == "loss"]


def mean_loss(lines: list[dict[str, Any]]) -> tuple[float, int]:
    """Mean loss over all trained tokens of a process, and their number."""
    found = losses(lines)
    trained = sum(line["trained"] for line in found)
    return sum(line["loss"] * line["trained"] for line in found) / trained, trained


def check_same_work(name: str, first: dict[str, list[dict[str, Any]]]) -> None:
    """End the benchmark if a side trains on other tokens or has another mean loss.

    Args:
        name: name of the case.
        first: output lines of one process of each side.
    """
    means = {side: mean_loss(lines) for side, lines in first.items()}
    values, counts = zip(*means.values(), strict=True)
    if len(set(counts)) > 1 or max(values) - min(values) > MEAN_TOLERANCE:
        raise SystemExit(f"{name}: mean loss and trained tokens of the sides differ: {means}")


def run_curve(pythons: dict[str, str], folder: Path) -> list[dict[str, Any]]:
    """Print the losses of both sides step by step, and check that they are equal."""
    job = make_job(CURVE, CURVE_STEPS - 1, folder, rate=1e-3, schedule="linear")
    path = job.save(folder / "job.json")
    sides = [side for side in pythons if side != "trl-packed"]  # it trains in another order
    curves = {
        side: [line["loss"] for line in losses(run_once(side, pythons[side], path, "the curve"))]
        for side in sides
    }
    print(f"\nloss over {CURVE_STEPS} steps, learning rate 1e-3 decaying to 0")
    print(f"{'step':>6}" + "".join(f"{side:>14}" for side in sides))
    for step, values in enumerate(zip(*curves.values(), strict=True), start=1):
        print(f"{step:>6}" + "".join(f"{value:>14.6f}" for value in values))
    worst = max(max(v) - min(v) for v in zip(*curves.values(), strict=True))
    print(f"largest difference: {worst:.1e}")
    if worst > CURVE_TOLERANCE:
        raise SystemExit(f"the losses differ by {worst:.1e}, more than {CURVE_TOLERANCE:g}")
    return [{"side": side, "losses": curve} for side, curve in curves.items()]


def measure(
    name: str, case: Case, timed: int, pythons: dict[str, str], folder: Path
) -> list[dict[str, Any]]:
    """Measure a case. Returns one row per side."""
    job = make_job(case, timed + 1, folder, rate=STILL, schedule="constant")
    path = job.save(folder / "job.json")
    lines: dict[str, list[list[dict[str, Any]]]] = {side: [] for side in pythons}
    for _ in range(ROUNDS):
        for side, python in pythons.items():
            lines[side].append(run_once(side, python, path, name))
    check_same_work(name, {side: found[0] for side, found in lines.items()})
    return [summarize(name, side, found) for side, found in lines.items()]


def summarize(name: str, side: str, processes: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Row of one side in the table."""
    steps, tokens, tracked = [], [], []
    for lines in processes:
        measured = [line for line in lines if line["event"] == "step"][1:]
        steps += measured
        tokens += [line["tokens"] for line in losses(lines)[1 : 1 + len(measured)]]
        tracked += [line["peak_mb"] for line in lines if line["event"] == "tracked"]
    seconds = [line["seconds"] for line in steps]
    return {
        "case": name,
        "side": side,
        "seconds": statistics.median(seconds),
        "tokens_per_s": sum(tokens) / sum(seconds),
        "rss_mb": max(line["rss_mb"] for line in steps),
        "tracked_mb": max(tracked),
        "loss": mean_loss(processes[0])[0],
        "tokens": sum(line["tokens"] for line in losses(processes[0])),
        "steps": steps,
    }


def print_case(name: str, case: Case, rows: list[dict[str, Any]]) -> None:
    """Print one line per side.

    Ratios are Sixfold's value over that side's. A high ratio is good for speed, a low one for
    memory.
    """
    print(
        f"\n{name}: V {case.vocabulary:,}, {case.rows} conversations of {case.shortest} to"
        f" {case.longest} tokens per step; mean loss {rows[0]['loss']:.4f} on all sides"
    )
    print(
        f"  {'':<12}{'s/step':>8}{'tokens/s':>10}{'RSS MB':>9}{'tensors MB':>12}"
        "   Sixfold: speed, RSS, tensors"
    )
    own = next((row for row in rows if row["side"] == "sixfold"), None)
    for row in rows:
        ratios = ""
        if own is not None and own is not row:
            ratios = (
                f"   {own['tokens_per_s'] / row['tokens_per_s']:.2f} x,"
                f" {own['rss_mb'] / row['rss_mb']:.2f} x,"
                f" {own['tracked_mb'] / row['tracked_mb']:.2f} x"
            )
        print(
            f"  {row['side']:<12}{row['seconds']:>8.2f}{row['tokens_per_s']:>10,.0f}"
            f"{row['rss_mb']:>9,.0f}{row['tracked_mb']:>12,.0f}{ratios}",
            flush=True,
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line and check the names in it."""
    parser = argparse.ArgumentParser(
        description="SFT compared with TRL's SFTTrainer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--cases", default=",".join(("curve", *CASES)), help="comma-separated cases, in order"
    )
    parser.add_argument("--steps", type=int, default=5, help="timed steps per round")
    parser.add_argument("--sides", default=",".join(SIDES), help="comma-separated sides, in order")
    parser.add_argument("--micro-rows", type=int, default=0, help="TRL's; 0: those of the case")
    parser.add_argument("--quick", action="store_true", help="Sixfold alone, on a small model")
    parser.add_argument(
        "--trl-python", default="", help="Python with TRL (empty: the script makes .venv-trl)"
    )
    parser.add_argument("--json", default="", help="write all rows to this file")
    options = parser.parse_args(arguments)
    options.cases, options.sides = options.cases.split(","), options.sides.split(",")
    for names, known in ((options.cases, ("curve", *CASES)), (options.sides, SIDES)):
        if unknown := set(names) - set(known):
            parser.error(f"unknown {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: at least 1")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Compare the curves, measure every case and print the tables."""
    options = parse(arguments)
    cases = dict(CASES)
    if options.quick:
        options.sides, options.cases, cases = ["sixfold"], ["small"], {"small": SMALL}
    pythons = {
        side: sys.executable if side == "sixfold" else options.trl_python or trl_python()
        for side in options.sides
    }
    record: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name in options.cases:
            if name == "curve":
                record += run_curve(pythons, folder)
                continue
            case = cases[name]
            if options.micro_rows:
                case = replace(case, micro_rows=options.micro_rows)
            rows = measure(name, case, options.steps, pythons, folder)
            print_case(name, case, rows)
            record += [asdict(case) | row for row in rows]
    if options.json:
        Path(options.json).write_text(json.dumps({"threads": THREADS, "rows": record}, indent=1))


if __name__ == "__main__":
    main()
