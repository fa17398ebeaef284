"""Effect of each optimisation of the embedded engine and of the trainer, one at a time.

    python benchmarks/switches.py [--only NAMES] [--repeats 2] [--small] [--json FILE]

A switch is some work and two or more ways to do it: `without` the optimisation, and with it in one
or several forms. All else is the default, and the random model that of `engine.py` (`tiny_qwen.py`,
float32, 2 threads). Every side of a switch is a process of its own. First each does the work
once: the same tokens must come out of all (or the same loss and gradient, of the trainer), or the
benchmark ends; the counts that explain the times come from there. Then the sides take turns, ROUNDS
times.

The ratio is the seconds without over the seconds with: above 1 the switch is faster. Some are there
for something else than speed, which the counts show: a shorter wait, less memory.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine_job import MIXING, SHAPE, Profile
from machine_limit import THREADS
from side_process import run_side
from switches_job import SMALL, EngineWork, Job, TrainerWork
from tiny_qwen import make_model

HERE = Path(__file__).resolve().parent
ROUNDS = 2
LOGP_TOLERANCE = 2e-5
EQUAL = 0.98
"""Share of tokens that must be equal where log-probs are to rounding only: what a token that fell
the other way leaves of a few hundred samples.
"""
GRADIENT_TOLERANCE = 1e-4
Lines = list[dict[str, Any]]
Launch = Callable[[Job, dict[str, str]], Lines]


@dataclass(frozen=True)
class Side:
    """One way to do the work. settings: see the side's file. same: how its tokens compare with
    those of the side without: `bits`, the very same; `rounding`, at least EQUAL of them, and
    log-probs to LOGP_TOLERANCE up to the first other one; `other`, not at all.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    same: str = "bits"


@dataclass(frozen=True)
class Switch:
    """An optimisation. about: the work in words. common: settings of all sides. explain: counters
    that say why, and what they are called.
    """

    about: str
    work: EngineWork | TrainerWork
    without: Side
    sides: dict[str, Side]
    explain: dict[str, str]
    common: dict[str, Any] = field(default_factory=dict)

    def small(self) -> Switch:
        """At a size that says nothing about speed."""
        common = self.common | (
            {"prefill_tokens": self.common["prefill_tokens"] // 8}
            if "prefill_tokens" in self.common
            else {}
        )
        return replace(self, about="a small size", work=self.work.small(), common=common)

    @property
    def kind(self) -> str:
        """engine or trainer."""
        return "engine" if isinstance(self.work, EngineWork) else "trainer"

    def every(self) -> dict[str, Side]:
        """All sides by name."""
        return {"without": self.without, **self.sides}


UNIFORM = Profile(prompt=64, completion=128)
LONG_TAIL = Profile(prompt=64, completion=512, mean=64)
TRAINED = Profile(prompt=128, completion=512, mean=96)
PREFILLED = {"prefill_tokens": "prompt tokens computed", "reused_tokens": "reused"}
GUESSED = {"acceptance_rate": "guesses that stood", "tokens_per_pass": "tokens a pass"}
PREEMPTED = {
    "most_running": "running at most",
    "preemptions": "preemptions",
    "recomputed_tokens": "recomputed",
    "brought_back_bytes": "bytes back",
}
POSITIONS = {"positions": "positions", "padding": "of them padding", "peak_mb": "peak MB"}

SWITCHES = {
    "prefix-cache": Switch(
        "64 prompts of 516 tokens, 500 shared; 4 samples, 32 tokens; 64 at once",
        EngineWork(Profile(prompt=16, completion=32, shared=500, samples=4), 64, running=64),
        Side({"prefix_cache": "none"}),
        {"radix": Side(), "hash": Side({"prefix_cache": "hash"})},
        PREFILLED,
    ),
    "shared-prompt": Switch(
        "32 prompts of 256 tokens, 8 samples, 32 tokens; with: one request a prompt",
        EngineWork(Profile(prompt=256, completion=32), 32),
        Side({"apart": True}),
        {"on": Side()},
        {**PREFILLED, "peak_blocks": "blocks at most"},
        {"prefix_cache": "none"},
    ),
    "continuous": Switch(
        "64 prompts, 8 samples, mean 64 tokens, cap 512; 64 at once",
        EngineWork(LONG_TAIL, 64, running=64),
        Side({"continuous": False}),
        {"on": Side()},
        {"padding_waste": "padding", "steps": "steps"},
    ),
    "paging": Switch(
        "64 prompts, 8 samples, mean 64 tokens, cap 512; room for 52 of the longest; without: a"
        " slab for each sequence",
        EngineWork(LONG_TAIL, 64, room=0.1),
        Side({"block_size": 0}),
        {"on": Side({"preemption": "recompute"})},
        {
            "empty_slots": "slots held empty",
            "most_running": "running at most",
            "cache_tokens": "cache tokens",
            "recomputed_tokens": "recomputed",
        },
    ),
    "preemption": Switch(
        "64 prompts, 8 samples, mean 64 tokens, cap 512; room for 15 of the longest",
        EngineWork(LONG_TAIL, 64, room=0.03),
        Side(),
        {"recompute": Side({"preemption": "recompute"}), "swap": Side({"preemption": "swap"})},
        PREEMPTED,
    ),
    "chunked-prefill": Switch(
        "48 prompts of 768 tokens, 1 sample, mean 64 tokens, cap 128; 8 at once, 256 prompt tokens"
        " a step",
        EngineWork(Profile(prompt=768, completion=128, samples=1, mean=64), 48, running=8),
        Side(),
        {"on": Side({"chunked_prefill": True})},
        {"waited_tokens": "longest wait, in prompt tokens", "pause_ms": "in ms"},
        {"prefill_tokens": 256},
    ),
    "ngrams-greedy": Switch(
        "8 prompts of 64 tokens, 1 sample, 384 tokens, greedy; 4 guesses",
        EngineWork(Profile(prompt=64, completion=384, samples=1), 8, temperature=0.0),
        Side(),
        {"on": Side({"k": 4})},
        GUESSED,
    ),
    "ngrams-sampled": Switch(
        "64 prompts of 64 tokens, 1 sample, 128 tokens, temperature 1; 4 guesses",
        EngineWork(Profile(prompt=64, completion=128, samples=1), 64),
        Side(),
        {"on": Side({"k": 4})},
        GUESSED,
    ),
    "int8-kv": Switch(
        "32 prompts of 64 tokens, 8 samples, 128 tokens",
        EngineWork(UNIFORM, 32),
        Side(),
        {"on": Side({"kv_dtype": "int8"}, same="other")},
        {"kv_bytes": "bytes of the cache", "equal": "tokens equal"},
    ),
    "kernels": Switch(
        "32 prompts of 64 tokens, 8 samples, 128 tokens; without: PyTorch's operations alone",
        EngineWork(UNIFORM, 32),
        Side(environment={"SIXFOLD_KERNELS": "torch"}),
        {"C": Side(environment={"SIXFOLD_KERNELS": ""}, same="rounding")},
        {"kernels": "compiled", "equal": "tokens equal"},
    ),
    "packing": Switch(
        "16 prompts of 128 tokens, 8 completions, mean 96 tokens, cap 512; without: padded to the"
        " longest of the micro-batch",
        TrainerWork(TRAINED, 16, 4096),
        Side({"padded": True}),
        {"on": Side()},
        POSITIONS,
        {"share_prefix": False},
    ),
    "shared-prompt-trained": Switch(
        "16 prompts of 128 tokens, 8 completions, mean 96 tokens, cap 512",
        TrainerWork(TRAINED, 16, 4096),
        Side({"share_prefix": False}),
        {"on": Side()},
        {"positions": "positions", "microbatches": "micro-batches", "peak_mb": "peak MB"},
    ),
    "chunked-logprobs": Switch(
        "4 prompts of 16 tokens, 8 completions of 128, vocabulary 32,768, one micro-batch; with:"
        " 256 positions at a time",
        TrainerWork(Profile(prompt=16, completion=128), 4, 8192, vocabulary=32768),
        Side({"chunk": 10**6}),
        {"on": Side({"chunk": 256})},
        {"logits": "logits at one time", "peak_mb": "peak MB"},
    ),
    "checkpointing": Switch(
        "16 prompts of 128 tokens, 8 completions, mean 96 tokens, cap 512, micro-batches of 16,384",
        TrainerWork(TRAINED, 16, 16384),
        Side(),
        {kind: Side({"activation_checkpointing": kind}) for kind in ("selective", "full")},
        {"peak_mb": "peak MB"},
    ),
}


def launch(job: Job, environment: dict[str, str]) -> Lines:
    """A side in a process of its own; its lines."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        job.save(path)
        command = [sys.executable, str(HERE / f"switches_{job.kind}.py"), str(path)]
        return run_side(command, f"{job.switch}, {job.side}", job.threads, environment)


def checked(lines: Lines) -> dict[str, Any]:
    """A side's line about its first run."""
    return next(line for line in lines if line["event"] == "check")


def equal_tokens(first: dict[str, Any], other: dict[str, Any]) -> tuple[float, float]:
    """Of two checks of the engine: the share of equal tokens, and the largest difference of
    log-probs up to each sample's first unequal one.
    """
    same = total = 0
    apart = 0.0
    for tokens, others, logps, theirs in zip(
        first["tokens"], other["tokens"], first["logps"], other["logps"], strict=True
    ):
        equal = [a == b for a, b in zip(tokens, others, strict=True)]
        same, total = same + sum(equal), total + len(equal)
        until = equal.index(False) if False in equal else len(equal)
        apart = max(
            [apart, *(abs(a - b) for a, b in zip(logps[:until], theirs[:until], strict=True))]
        )
    return same / total, apart


def check(name: str, switch: Switch, lines: dict[str, Lines]) -> dict[str, float]:
    """Hold every side's first run against that of the side without; one that differs ends the
    benchmark. -> share of equal tokens, by side.
    """
    first, equal = checked(lines["without"]), {}
    for side, way in switch.every().items():
        found = checked(lines[side])
        if switch.kind == "trainer":
            wrong = [
                key
                for key in ("loss", "norm")
                if abs(found[key] / first[key] - 1) > GRADIENT_TOLERANCE
            ]
            if wrong:
                raise SystemExit(
                    f"{name}: {side} and without differ:"
                    f" {', '.join(f'{key} {found[key]} and {first[key]}' for key in wrong)}"
                )
            continue
        share, apart = equal_tokens(first, found)
        equal[side] = share
        least, most = {
            "bits": (1.0, 0.0),
            "rounding": (EQUAL, LOGP_TOLERANCE),
            "other": (0.0, math.inf),
        }[way.same]
        if share < least or apart > most:
            raise SystemExit(
                f"{name}: {side} and without differ: {share:.2%} of the tokens are equal, log-probs"
                f" differ by {apart:.1e}"
            )
    return equal


def measure(
    name: str, switch: Switch, model: str, repeats: int, rounds: int, start: Launch
) -> dict[str, Lines]:
    """All lines of each side: first the checks of all, then the timed runs, in turns."""
    lines: dict[str, Lines] = {side: [] for side in switch.every()}
    for turn in range(rounds + 1):
        for side, way in switch.every().items():
            print(
                f"{name}, {side}, {f'{turn} of {rounds}' if turn else 'check'} ...", file=sys.stderr
            )
            job = Job(
                name,
                side,
                switch.kind,
                model,
                switch.work,
                switch.common | way.settings,
                repeats if turn else 0,
                THREADS,
            )
            lines[side] += start(job, way.environment)
        check(name, switch, lines)
    return lines


def summarize(name: str, switch: Switch, lines: dict[str, Lines]) -> list[dict[str, Any]]:
    """A row for each side with the optimisation, beside the one without."""
    equal = check(name, switch, lines)
    figures = {}
    for side, found in lines.items():
        seconds = [line["seconds"] for line in found if line["event"] == "run"]
        counters = dict(checked(found)["counters"])
        counters["pause_ms"] = 1e3 * statistics.median(
            [line["pause"] for line in found if line["event"] == "run"]
        )
        counters["peak_mb"] = max(line["peak_mb"] for line in found if line["event"] == "end")
        counters["equal"] = equal.get(side, 1.0)
        figures[side] = {
            "seconds": seconds,
            "median": statistics.median(seconds),
            "counters": counters,
        }
    off = figures.pop("without")
    return [
        {
            "switch": name,
            "side": side,
            "kind": switch.kind,
            "work": switch.about,
            "explain": switch.explain,
            "with": on,
            "without": off,
            "ratio": off["median"] / on["median"],
        }
        for side, on in figures.items()
    ]


def number(value: float, name: str) -> str:
    """A counter as it stands in the table."""
    if name in ("padding_waste", "empty_slots", "padding", "acceptance_rate", "equal"):
        return f"{value:.1%}"
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.2f}"


HEAD = "| switch | with | without | ratio | why: with / without | work |\n|---|---|---|---|---|---|"


def table_line(row: dict[str, Any]) -> str:
    """A switch, or a form of it, in a table under HEAD (Markdown)."""
    speeds = []
    for figures in (row["with"], row["without"]):
        tokens = figures["counters"]["tokens"]
        speeds.append(
            f"{tokens / figures['median']:,.0f} tokens/s"
            if row["kind"] == "engine"
            else f"{figures['median']:.2f} s a step"
        )
    pairs = (
        (words, *(number(row[side]["counters"][key], key) for side in ("with", "without")))
        for key, words in row["explain"].items()
    )
    why = "; ".join(f"{words} {on} / {off}" for words, on, off in pairs)
    name = row["switch"] if row["side"] == "on" else f"{row['switch']}: {row['side']}"
    return f"| {name} | {speeds[0]} | {speeds[1]} | {row['ratio']:.2f} | {why} | {row['work']} |"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; names are checked here."""
    parser = argparse.ArgumentParser(
        description="Each optimisation of engine and trainer by itself.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--only", default=",".join(SWITCHES), help="switches to measure, by comma")
    parser.add_argument(
        "--repeats",
        type=int,
        default=2,
        help=f"timed runs in each of {ROUNDS} rounds, after one that is checked",
    )
    parser.add_argument(
        "--small",
        action="store_true",
        help="a size that takes seconds and says nothing about speed; one round",
    )
    parser.add_argument("--json", default="", help="write the rows to this file")
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(SWITCHES):
        parser.error(f"unknown {', '.join(sorted(unknown))}: choose from {', '.join(SWITCHES)}")
    if options.repeats < 1:
        parser.error("--repeats: at least 1")
    return options


def model_of(switch: Switch, small: bool, folder: Path) -> str:
    """The folder of the model that a switch runs, made when missing."""
    shape = SMALL if small else SHAPE
    if isinstance(switch.work, TrainerWork):
        shape = replace(shape, vocabulary=switch.work.vocabulary)
    path = folder / str(shape.vocabulary)
    if not path.exists():
        make_model(shape, path, MIXING)
    return str(path)


def main(arguments: list[str] | None = None, start: Launch = launch) -> None:
    """Measure the switches; each is printed, and written, as soon as it is done: all of them take
    long. start: runs a side.
    """
    options = parse(arguments)
    rows: list[dict[str, Any]] = []
    rounds = 1 if options.small else ROUNDS
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            switch = SWITCHES[name].small() if options.small else SWITCHES[name]
            lines = measure(
                name,
                switch,
                model_of(switch, options.small, Path(folder)),
                options.repeats,
                rounds,
                start,
            )
            new = summarize(name, switch, lines)
            rows += new
            print("\n".join(map(table_line, new)), flush=True)
            if options.json:
                Path(options.json).write_text(
                    json.dumps(
                        {
                            "threads": THREADS,
                            "rounds": rounds,
                            "cores": os.cpu_count(),
                            "rows": rows,
                        },
                        indent=1,
                    )
                )


if __name__ == "__main__":
    main()
