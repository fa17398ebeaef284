"""Trainer without generation, compared with TRL: tokens per second and peak memory of one update.

    python benchmarks/trainer.py                                 # the cases, and how both grow
    python benchmarks/trainer.py --vocabularies 1360 --tables cases
    python benchmarks/trainer.py --rows 2 --json FILE

Both sides load the same model and get the same prompts, completions, log-probs and rewards, made
here. Both sides have one optimizer step per batch: GRPO, clip 0.2, no reference, loss averaged over
each completion and then over completions, AdamW (0.9, 0.95) with gradient norm 1, float32. The
harness compares their gradient norms, so it finds a side that computes something else.

TRL's side runs `trl.GRPOTrainer`, with generation replaced by the given completions. Its
micro-batches have `rows` trajectories. Sixfold's micro-batches have as many tokens, with a shared
prompt counted once. Sides take turns, ROUNDS times each.

Tokens per second count every trajectory with its prompt, on both sides. Memory is the peak of a
step minus the level before it, so it does not contain weights and optimizer state. It is measured
twice: as the RSS of the process, and as the allocations that PyTorch's profiler records.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grpo_step import step_flops
from machine_limit import THREADS, matmul_gflops
from peer_environment import trl_python
from side_process import run_side
from tiny_qwen import Shape, make_model
from trainer_job import Job, draw_texts, plain_logp

HERE = Path(__file__).resolve().parent
ROUNDS = 2
SAMPLES = 8
SIDES = ("trl", "trl-completions", "sixfold")
"""trl-completions runs TRL's head on completions alone, as TRL does where it has Triton."""
LORA_RANK = 16


@dataclass(frozen=True)
class Case:
    """Sizes and settings of one comparison. Lengths are in tokens."""

    vocabulary: int
    prompts: int
    prompt: int = 64
    completion: int = 128
    checkpointing: str = "none"
    lora_rank: int = 0
    rows: int = SAMPLES

    @property
    def name(self) -> str:
        """Title of the case in the table."""
        train = f"LoRA {self.lora_rank}" if self.lora_rank else "full"
        return (
            f"V {self.vocabulary:>7,}  {self.prompts} x {SAMPLES} x ({self.prompt} +"
            f" {self.completion})  {train}, checkpointing {self.checkpointing}"
        )

    @property
    def needed_flops(self) -> int:
        """FLOPs of forward and backward pass, with each prompt computed once and nothing twice.

        With adapters, the gradients of frozen weights are not counted.
        """
        lengths = [self.completion] * (self.prompts * SAMPLES)
        step = step_flops(Shape(self.vocabulary), self.prompt, lengths, self.prompts, False)
        forward = step // 4  # a step generates too
        return forward * (2 if self.lora_rank else 3)


def prompts_for(vocabulary: int) -> int:
    """Prompts per batch. A large vocabulary gets fewer, so that a step still takes seconds."""
    return 8 if vocabulary < 32_768 else 2


def table_cases(options: argparse.Namespace) -> list[Case]:
    """The cases of the first table."""
    return [
        Case(
            vocabulary,
            prompts_for(vocabulary),
            prompt,
            completion,
            checkpointing,
            rank,
            options.rows,
        )
        for vocabulary in options.vocabularies
        for prompt, completion in options.lengths
        for rank in options.lora
        for checkpointing in options.checkpointing
    ]


def growth_cases(rows: int) -> dict[str, list[Case]]:
    """Cases that differ in one size only."""
    base = Case(8192, 4, rows=rows)
    return {
        "batch": [replace(base, prompts=n) for n in (2, 4, 8)],
        "completion": [replace(base, completion=n) for n in (64, 128, 256, 512)],
        "prompt": [replace(base, prompt=n) for n in (64, 256, 512)],
        "vocabulary": [
            replace(base, prompts=2, vocabulary=n) for n in (1360, 8192, 32_768, 151_936)
        ],
    }


def make_job(case: Case, steps: int, folder: Path) -> Job:
    """Write the files of a case to `folder`, and return its job."""
    model = folder / f"model-{case.vocabulary}"
    if not model.exists():
        make_model(Shape(case.vocabulary), model)
    prompts, texts, rewards = draw_texts(
        case.vocabulary, case.prompts, SAMPLES, case.prompt, [case.completion]
    )
    return Job(
        model=str(model),
        prompts=prompts,
        completions=texts,
        logp=plain_logp(str(model), prompts, texts),
        rewards=rewards,
        rows=case.rows,
        steps=steps + 1,
        checkpointing=case.checkpointing,
        lora_rank=case.lora_rank,
    )


def run_once(side: str, python: str, job: Path, name: str) -> list[dict[str, Any]]:
    """Output lines of one side."""
    script, *mode = side.split("-")
    return run_side(
        [python, str(HERE / f"trainer_{script}.py"), str(job), *mode], f"{side} on {name}", THREADS
    )


def measure(
    case: Case, steps: int, pythons: dict[str, str], folder: Path
) -> tuple[list[dict[str, Any]], float]:
    """Measure a case. Returns one row per side, and the best measured matmul rate in GFLOP/s."""
    job, path = make_job(case, steps, folder), folder / "job.json"
    path.write_text(json.dumps(asdict(job)))
    lines: dict[str, list[dict[str, Any]]] = {side: [] for side in pythons}
    rate = matmul_gflops()
    for _ in range(ROUNDS):
        for side, python in pythons.items():
            lines[side] += run_once(side, python, path, case.name)
            rate = max(rate, matmul_gflops())
    check_same_work(case, lines)
    return [summarize(case, side, job.tokens, found) for side, found in lines.items()], rate


def check_same_work(case: Case, lines: dict[str, list[dict[str, Any]]]) -> None:
    """End the benchmark if the norms of the sides' first gradients differ.

    With adapters, each side starts from other random numbers, so norms may differ by half.
    """
    norms = {
        side: next(line["grad_norm"] for line in found if line["event"] == "step")
        for side, found in lines.items()
    }
    least, most = min(norms.values()), max(norms.values())
    if most > least * (1.5 if case.lora_rank else 1.001):
        raise SystemExit(f"{case.name}: the sides' gradient norms differ: {norms}")


def summarize(case: Case, side: str, tokens: int, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Row of one side in the table. The first step of each process is warm-up."""
    timed, warm = [], True
    for line in lines:
        if line["event"] == "start":
            warm = True
        elif line["event"] == "step":
            timed += [] if warm else [line]
            warm = False
    seconds = [line["seconds"] for line in timed]
    return asdict(case) | {
        "side": side,
        "tokens": tokens,
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "tokens_per_s": tokens / statistics.median(seconds),
        "rss_mb": statistics.median(line["rss_mb"] for line in timed),
        "tracked_mb": statistics.median(x["peak_mb"] for x in lines if x["event"] == "tracked"),
        "trainable": next(x["trainable"] for x in lines if x["event"] == "start"),
        "steps": timed,
    }


def print_case(case: Case, rows: Sequence[dict[str, Any]], rate: float) -> None:
    """Print one line per side.

    Ratios are Sixfold's value over that side's. A high ratio is good for speed, a low one for
    memory.
    """
    print(f"\n{case.name}")
    own = next((row for row in rows if row["side"] == "sixfold"), None)
    print(
        f"  {'':<16}{'s/step':>8}{'fastest':>9}{'tokens/s':>10}{'share':>8}{'RSS MB':>9}"
        f"{'tensors MB':>12}   Sixfold: speed, RSS, tensors"
    )
    for row in rows:
        share = case.needed_flops / row["seconds"] / rate / 1e9
        ratios = ""
        if own is not None and own is not row:
            ratios = (
                f"   {own['tokens_per_s'] / row['tokens_per_s']:.2f} x,"
                f" {own['rss_mb'] / row['rss_mb']:.2f} x,"
                f" {own['tracked_mb'] / row['tracked_mb']:.2f} x"
            )
        print(
            f"  {row['side']:<16}{row['seconds']:>8.2f}{row['fastest']:>9.2f}"
            f"{row['tokens_per_s']:>10,.0f}{share:>8.1%}{row['rss_mb']:>9,.0f}"
            f"{row['tracked_mb']:>12,.0f}{ratios}",
            flush=True,
        )


def print_growth(size: str, rows: Iterable[dict[str, Any]]) -> None:
    """Print seconds and memory of each side, as multiples of its first row."""
    key = {"batch": "prompts"}.get(size, size)
    found = list(rows)
    print(f"\ngrowth with {size}: seconds and tensors MB, each as a multiple of the first row")
    for side in dict.fromkeys(row["side"] for row in found):
        mine = [row for row in found if row["side"] == side]
        steps = [
            f"{row[key]:,}: {row['seconds'] / mine[0]['seconds']:.2f},"
            f" {row['tracked_mb'] / mine[0]['tracked_mb']:.2f}"
            for row in mine
        ]
        print(f"  {side:<16}" + "   ".join(steps), flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line and check the names in it."""
    parser = argparse.ArgumentParser(
        description="Speed and memory of the trainer without generation, compared with TRL.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--tables", default="cases,growth", help="comma-separated tables to make")
    parser.add_argument(
        "--vocabularies", default="1360,151936", help="comma-separated vocabularies of the cases"
    )
    parser.add_argument(
        "--lengths", default="64+128,512+64", help="comma-separated lengths, prompt + completion"
    )
    parser.add_argument(
        "--checkpointing", default="none,full", help="comma-separated modes of the cases"
    )
    parser.add_argument(
        "--lora", default=f"0,{LORA_RANK}", help="comma-separated adapter ranks; 0: full training"
    )
    parser.add_argument("--rows", type=int, default=SAMPLES, help="trajectories per micro-batch")
    parser.add_argument("--steps", type=int, default=3, help="timed steps per round")
    parser.add_argument("--sides", default=",".join(SIDES), help="comma-separated sides, in order")
    parser.add_argument(
        "--trl-python", default="", help="Python with TRL (empty: the script makes .venv-trl)"
    )
    parser.add_argument("--json", default="", help="write all rows to this file")
    options = parser.parse_args(arguments)
    for name in ("tables", "checkpointing", "sides"):
        setattr(options, name, getattr(options, name).split(","))
    for name in ("vocabularies", "lora"):
        setattr(options, name, [int(value) for value in getattr(options, name).split(",")])
    options.lengths = [tuple(map(int, pair.split("+"))) for pair in options.lengths.split(",")]
    known = {"tables": {"cases", "growth"}, "checkpointing": {"none", "full"}, "sides": set(SIDES)}
    for name, names in known.items():
        if unknown := set(getattr(options, name)) - names:
            parser.error(f"unknown {', '.join(sorted(unknown))}: choose from {sorted(names)}")
    return options


def main() -> None:
    """Measure every case and print the tables."""
    options = parse()
    pythons = {
        side: sys.executable if side == "sixfold" else options.trl_python or trl_python()
        for side in options.sides
    }
    record: list[dict[str, Any]] = []
    rates = [0.0]
    with tempfile.TemporaryDirectory() as folder:

        def rows_of(case: Case) -> list[dict[str, Any]]:
            rows, rate = measure(case, options.steps, pythons, Path(folder))
            rates.append(max(rate, rates[-1]))
            print_case(case, rows, rates[-1])
            record.extend(rows)
            return rows

        if "cases" in options.tables:
            for case in table_cases(options):
                rows_of(case)
        if "growth" in options.tables:
            for size, cases in growth_cases(options.rows).items():
                print_growth(size, [row for case in cases for row in rows_of(case)])
    print(
        f"\nlimit: {rates[-1]:.0f} GFLOP/s, float32 matmul, {THREADS} threads; share = FLOPs"
        " needed / (limit x seconds), prompts computed once"
    )
    if options.json:
        found = {"limit_gflops": rates[-1], "threads": THREADS, "rows": record}
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
