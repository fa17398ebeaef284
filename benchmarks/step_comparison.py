"""Harness of `sft_step.py` and `dpo_step.py`: Sixfold compared with a trainer of TRL.

A side is a program in a process of its own. It gets a job file (`sft_job.py`) and prints one line
per step. Sides take turns. The first step of each process is warm-up, and the last runs under the
profiler.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from machine_limit import THREADS
from peer_environment import trl_python
from sft_job import TEMPLATE, Job, write_rows
from side_process import run_side
from tiny_qwen import Shape, make_model

HERE = Path(__file__).resolve().parent
CURVE_STEPS, CURVE_TOLERANCE = 20, 1e-4
SMALL_SHAPE = Shape(
    vocabulary=96, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64
)
"""Model of `--quick`."""

Lines = list[dict[str, Any]]
"""Output lines of a side."""


class Case(Protocol):
    """Sizes of one comparison: a frozen dataclass, of which `str` gives a line for the user.

    Attributes:
        vocabulary: size of the vocabulary.
        rows: rows of data per step.
        micro_rows: rows in one pass of TRL; the fastest that we found.
        micro_tokens: tokens in one pass of Sixfold.
        longest: most tokens of a sequence.
        lora_rank: rank of the adapters. 0: all weights train.
    """

    vocabulary: int
    rows: int
    micro_rows: int
    micro_tokens: int
    lora_rank: int

    @property
    def longest(self) -> int: ...

    def draw(self, count: int, rng: random.Random) -> list[dict[str, Any]]:
        """Random rows."""
        ...


@dataclass(frozen=True)
class Benchmark:
    """What is compared, and how.

    Attributes:
        name: prefix of the programs of the sides, NAME_trl.py and NAME_sixfold.py.
        sides: name of a side -> mode, the program's second argument. The names of Sixfold's sides
            begin with "sixfold".
        curve_sides: sides that train on the same rows in each step.
        cases: by name.
        curve: the case of the curve.
        small: the case of `--quick`.
        rate: learning rate of the cases.
        check: gets the name of a case and the lines of one process of each side. Ends the program
            if they have not done the same work.
        rounds: processes of each side per case.
        steps: timed steps of a process.
    """

    name: str
    sides: Mapping[str, str]
    curve_sides: Sequence[str]
    cases: Mapping[str, Any]
    curve: Any
    small: Any
    rate: float
    check: Callable[[str, Mapping[str, Lines]], None]
    rounds: int
    steps: int


def chat_model(vocabulary: int, folder: Path) -> str:
    """Write a model with a chat template into `folder`, if it is not there. Returns its path."""
    from tokenizers.models import WordLevel
    from transformers import AutoTokenizer

    model = folder / f"model-{vocabulary}"
    if not model.exists():
        small = vocabulary == SMALL_SHAPE.vocabulary
        make_model(SMALL_SHAPE if small else Shape(vocabulary), model)
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = TEMPLATE
        # TRL renders words of its own to find the end of a turn.
        known = tokenizer.get_vocab()
        tokenizer.backend_tokenizer.model = WordLevel(known, unk_token="<pad>")
        tokenizer.save_pretrained(model)
    return str(model)


def make_job(case: Case, timed: int, folder: Path, *, rate: float, schedule: str) -> Job:
    """Write the model and the rows of a case to `folder`, and return its job.

    Args:
        case: the sizes.
        timed: steps before the last one, warm-up included.
        folder: where the files are written.
        rate: learning rate.
        schedule: its schedule.
    """
    from sixfold.controller.stream import TaskStream

    steps = timed + 1
    rows = case.draw(case.rows * steps, random.Random(0))
    stream = TaskStream(rows, case.rows, seed=0)  # the order of a stage with this seed
    ordered = [row for step in range(1, steps + 1) for row in stream(step)]
    return Job(
        model=chat_model(case.vocabulary, folder),
        rows=write_rows(rows, folder / "rows.jsonl"),
        ordered=write_rows(ordered, folder / "ordered.jsonl"),
        rows_per_step=case.rows,
        steps=timed,
        micro_rows=case.micro_rows,
        micro_tokens=case.micro_tokens,
        longest=case.longest,
        learning_rate=rate,
        schedule=schedule,
        lora_rank=case.lora_rank,
    )


def losses(lines: Lines) -> Lines:
    """The lines `loss` of a side."""
    return [line for line in lines if line["event"] == "loss"]


def mean_loss(lines: Lines) -> tuple[float, int]:
    """Mean loss over all trained tokens of a process, and their number."""
    found = losses(lines)
    trained = sum(line["trained"] for line in found)
    return sum(line["loss"] * line["trained"] for line in found) / trained, trained


def loss_difference(sides: Mapping[str, Lines]) -> float:
    """Largest difference of a step's loss between the sides."""
    steps = zip(
        *([line["loss"] for line in losses(lines)] for lines in sides.values()), strict=True
    )
    return max(max(step) - min(step) for step in steps)


def summarize(name: str, side: str, processes: list[Lines]) -> dict[str, Any]:
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

    Ratios are the value of Sixfold's side over that of TRL's. A high ratio is good for speed, a low
    one for memory.
    """
    own = [row for row in rows if row["side"].startswith("sixfold")]
    print(f"\n{name}: V {case.vocabulary:,}, {case}; mean loss {rows[0]['loss']:.4f} on all sides")
    print(
        f"  {'':<16}{'s/step':>8}{'tokens/s':>10}{'RSS MB':>9}{'tensors MB':>12}"
        + "".join(f"   {row['side']}: speed, RSS, tensors" for row in own)
    )
    for row in rows:
        ratios = [
            f"   {one['tokens_per_s'] / row['tokens_per_s']:.2f} x,"
            f" {one['rss_mb'] / row['rss_mb']:.2f} x, {one['tracked_mb'] / row['tracked_mb']:.2f} x"
            for one in own
        ]
        print(
            f"  {row['side']:<16}{row['seconds']:>8.2f}{row['tokens_per_s']:>10,.0f}"
            f"{row['rss_mb']:>9,.0f}{row['tracked_mb']:>12,.0f}"
            + ("" if row in own else "".join(ratios)),
            flush=True,
        )


class Comparison:
    """A run of a benchmark.

    Args:
        benchmark: what is compared.
        pythons: side -> interpreter of its program.
        folder: where job files and models are written.
    """

    def __init__(self, benchmark: Benchmark, pythons: Mapping[str, str], folder: Path) -> None:
        self._benchmark = benchmark
        self._pythons = pythons
        self._folder = folder

    def curve(self) -> list[dict[str, Any]]:
        """Print the losses of the sides step by step, and check that they are equal."""
        job = make_job(
            self._benchmark.curve, CURVE_STEPS - 1, self._folder, rate=1e-3, schedule="linear"
        )
        path = job.save(self._folder / "job.json")
        sides = [side for side in self._pythons if side in self._benchmark.curve_sides]
        found = {side: losses(self._run(side, path, "the curve")) for side in sides}
        print(f"\nloss over {CURVE_STEPS} steps, learning rate 1e-3 decaying to 0")
        print(f"{'step':>6}" + "".join(f"{side:>16}" for side in sides))
        for step, lines in enumerate(zip(*found.values(), strict=True), start=1):
            print(f"{step:>6}" + "".join(f"{line['loss']:>16.6f}" for line in lines))
        worst = loss_difference(found)
        print(f"largest difference: {worst:.1e}", flush=True)
        if worst > CURVE_TOLERANCE:
            raise SystemExit(f"the losses differ by {worst:.1e}, more than {CURVE_TOLERANCE:g}")
        return [
            {"side": side, "losses": [line["loss"] for line in lines]}
            for side, lines in found.items()
        ]

    def measure(self, name: str, case: Case, timed: int, rounds: int) -> list[dict[str, Any]]:
        """Measure a case. Returns one row per side."""
        rate = self._benchmark.rate
        job = make_job(case, timed + 1, self._folder, rate=rate, schedule="constant")
        path = job.save(self._folder / "job.json")
        lines: dict[str, list[Lines]] = {side: [] for side in self._pythons}
        for _ in range(rounds):
            for side in self._pythons:
                lines[side].append(self._run(side, path, name))
        self._benchmark.check(name, {side: found[0] for side, found in lines.items()})
        return [summarize(name, side, found) for side, found in lines.items()]

    def _run(self, side: str, job: Path, name: str) -> Lines:
        """Output lines of one process."""
        program = "sixfold" if side.startswith("sixfold") else "trl"
        script = HERE / f"{self._benchmark.name}_{program}.py"
        command = [self._pythons[side], str(script), str(job), self._benchmark.sides[side]]
        return run_side(command, f"{side} on {name}", THREADS)


def parse(benchmark: Benchmark, arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line and check the names in it."""
    sides, cases = list(benchmark.sides), ["curve", *benchmark.cases]
    parser = argparse.ArgumentParser(
        description=f"{benchmark.name}.py: Sixfold compared with TRL.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--cases", default=",".join(cases), help="comma-separated cases, in order")
    parser.add_argument(
        "--steps", type=int, default=benchmark.steps, help="timed steps of a process"
    )
    parser.add_argument(
        "--rounds", type=int, default=benchmark.rounds, help="processes of each side per case"
    )
    parser.add_argument("--sides", default=",".join(sides), help="comma-separated sides, in order")
    parser.add_argument("--micro-rows", type=int, default=0, help="TRL's; 0: those of the case")
    parser.add_argument("--quick", action="store_true", help="Sixfold alone, on a small model")
    parser.add_argument(
        "--trl-python", default="", help="Python with TRL (empty: the script makes .venv-trl)"
    )
    parser.add_argument("--json", default="", help="write all rows to this file")
    options = parser.parse_args(arguments)
    options.cases, options.sides = options.cases.split(","), options.sides.split(",")
    for names, known in ((options.cases, cases), (options.sides, sides)):
        if unknown := set(names) - set(known):
            parser.error(f"unknown {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    for name in ("steps", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: at least 1")
    return options


def run(benchmark: Benchmark, arguments: list[str] | None) -> None:
    """Compare the curves, measure every case and print the tables."""
    options = parse(benchmark, arguments)
    cases = dict(benchmark.cases)
    if options.quick:
        options.sides = [side for side in benchmark.sides if side.startswith("sixfold")]
        options.cases, cases = ["small"], {"small": benchmark.small}
    pythons = {
        side: sys.executable if side.startswith("sixfold") else options.trl_python or trl_python()
        for side in options.sides
    }
    record: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        comparison = Comparison(benchmark, pythons, Path(made))
        for name in options.cases:
            if name == "curve":
                record += comparison.curve()
                continue
            case = cases[name]
            if options.micro_rows:
                case = replace(case, micro_rows=options.micro_rows)
            rows = comparison.measure(name, case, options.steps, options.rounds)
            print_case(name, case, rows)
            record += [asdict(case) | row for row in rows]
    if options.json:
        Path(options.json).write_text(json.dumps({"threads": THREADS, "rows": record}, indent=1))
