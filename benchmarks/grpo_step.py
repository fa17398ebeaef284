"""One GRPO step, Sixfold beside TRL: the same job, the same machine, one run. Prints seconds a
step, the ratio, the share of the limit.

    python benchmarks/grpo_step.py [--profiles uniform,long-tail,long-prompt] [--beta 0,0.04]
    [--steps 3] [--sides trl,sixfold]
                                   [--trl-python PYTHON] [--json FILE]

This harness makes one model and one list of prompts per profile, writes a job file, and runs each
side on it in a process of its own: `grpo_step_trl.py` under the python of `.venv-trl` (made here
when missing) and `grpo_step_sixfold.py` under this one. Sides take turns, ROUNDS times each, so
that a slow minute of the machine falls on both.

**Job file** (what a side gets, as its one argument): the fields of `Job`, as JSON; `prompts` names
a JSONL file with one `{"id": ..., "prompt": ...}` a line, of which step s uses lines [s *
prompts_per_step, (s + 1) * prompts_per_step). A prompt is text whose every word is one token. The
reward of a completion is `reward(text)`, text without special tokens. Settings that are not in the
job are
the same by agreement: AdamW (0.9, 0.95), no weight decay, gradient norm 1, clip 0.2 on both sides,
loss averaged over each sequence and then over sequences, advantages over the group's standard
deviation, one optimizer step a batch, temperature 1, float32.

**Output** (what a side prints; other lines are ignored), one JSON object a line, `event` first:

    {"event": "start", "side": "trl", "versions": {"trl": "1.16.0", "torch": "2.13.0"},
    "parameters": 3300096} {"event": "step", "side": "trl", "step": 0, "seconds": 3.9,
    "completion_tokens": [128, 128, ...]}

One `step` line for each of the job's `steps`: wall time from the end of the last step (of start-up,
for the first) to the end of this one, and the length of each of its trajectories, the
end-of-sequence token counted.

**FLOPs needed** by a step (`step_flops`): what the mathematics asks for, whatever either side does.
A pass over the step's tokens is counted in `tiny_qwen.py`; a step is one pass to generate, three to
train (forward, and backward at twice that), one more for the reference when beta > 0.
Two counts are printed: `per trajectory` runs the prompt once for each of its K completions (the
usual convention), `per prompt` once for all of them (all that is needed, since they share it). The
limit is the best float32 matmul rate seen during the run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from machine_limit import THREADS, matmul_gflops
from peer_environment import trl_python
from side_process import run_side
from tiny_qwen import EOS, Shape, forward_flops, make_model

HERE = Path(__file__).resolve().parent
ROUNDS = 2
WARMUP_STEPS = 1
PROMPTS_PER_STEP = 8
SAMPLES_PER_PROMPT = 8


@dataclass(frozen=True)
class Profile:
    """Shape of the prompts and completions of a job. Lengths in tokens."""

    prompt_tokens: int
    max_new_tokens: int
    vocabulary: int
    # whether the end-of-sequence token ends a completion, or every completion has max_new_tokens
    stops: bool


PROFILES = {
    "uniform": Profile(prompt_tokens=64, max_new_tokens=128, vocabulary=1360, stops=False),
    "long-tail": Profile(prompt_tokens=64, max_new_tokens=512, vocabulary=64, stops=True),
    "long-prompt": Profile(prompt_tokens=512, max_new_tokens=64, vocabulary=1360, stops=False),
}


@dataclass(frozen=True)
class Job:
    """Job of one side; the job file is this as JSON. See the module docstring."""

    profile: str
    model: str
    prompts: str
    prompts_per_step: int
    samples_per_prompt: int
    max_new_tokens: int
    stop_token_ids: list[int]  # empty: every completion runs to max_new_tokens
    beta: float
    steps: int  # warm-up included
    threads: int = THREADS
    learning_rate: float = (
        1e-6  # so small that the policy, and with it the lengths, stay what they are
    )
    seed: int = 0

    @classmethod
    def load(cls, path: str) -> Job:
        """The job in the file at `path`."""
        return cls(**json.loads(Path(path).read_text()))

    def read_prompts(self) -> list[dict[str, str]]:
        """The rows `{"id", "prompt"}` of the prompt file, in step order."""
        return [json.loads(line) for line in Path(self.prompts).read_text().splitlines()]


def reward(text: str) -> float:
    """A checker that costs nothing and tells almost any two completions apart, so that no group has
    equal rewards. In [0, 1).
    """
    return zlib.crc32(text.encode()) / 2**32


def step_flops(
    shape: Shape,
    prompt_tokens: int,
    completion_tokens: Iterable[int],
    prompt_passes: int,
    reference: bool,
) -> int:
    """FLOPs that a step needs, by the module docstring's count.

    completion_tokens: length of each trajectory's completion, its last token included, which is
    predicted but never fed forward.
    prompt_passes: how many times a prompt is run in one pass: the number of prompts, or of
    trajectories.
    """
    one_pass = prompt_passes * forward_flops(shape, 0, prompt_tokens, predictions=1)
    one_pass += sum(
        forward_flops(shape, prompt_tokens, prompt_tokens + n - 1, predictions=n - 1)
        for n in completion_tokens
    )
    return one_pass * (5 if reference else 4)


def make_prompts(profile: Profile, count: int, path: Path) -> None:
    """Write `count` random prompts of exactly `profile.prompt_tokens` tokens."""
    rng = random.Random(0)
    words = [f"w{i}" for i in range(2, profile.vocabulary)]
    rows = [
        {"id": f"task-{i}", "prompt": " ".join(rng.choices(words, k=profile.prompt_tokens))}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_job(name: str, timed_steps: int, folder: Path) -> Job:
    """The files of a profile's job under `folder`, and the job itself (beta 0)."""
    profile, steps = PROFILES[name], WARMUP_STEPS + timed_steps
    make_model(Shape(profile.vocabulary), folder / "model")
    make_prompts(profile, steps * PROMPTS_PER_STEP, folder / "prompts.jsonl")
    return Job(
        profile=name,
        model=str(folder / "model"),
        prompts=str(folder / "prompts.jsonl"),
        prompts_per_step=PROMPTS_PER_STEP,
        samples_per_prompt=SAMPLES_PER_PROMPT,
        max_new_tokens=profile.max_new_tokens,
        stop_token_ids=[EOS] if profile.stops else [],
        beta=0.0,
        steps=steps,
    )


def run(side: str, python: str, job: Job, path: Path) -> list[dict[str, Any]]:
    """Run one side on the job in its own process; its output lines."""
    path.write_text(json.dumps(asdict(job)))
    return run_side(
        [python, str(HERE / f"grpo_step_{side}.py"), str(path)],
        f"{side} on {job.profile}, beta {job.beta}",
        job.threads,
    )


def measure(
    job: Job, pythons: dict[str, str], folder: Path
) -> tuple[dict[str, list[dict[str, Any]]], float]:
    """The timed steps of each side, rounds pooled, and the best matmul rate (GFLOP/s) seen between
    the rounds.
    """
    steps: dict[str, list[dict[str, Any]]] = {side: [] for side in pythons}
    rate = matmul_gflops()
    for _ in range(ROUNDS):
        for side, python in pythons.items():
            lines = run(side, python, job, folder / "job.json")
            done = [line for line in lines if line["event"] == "step"]
            if len(done) != job.steps:
                raise SystemExit(
                    f"{side} reported {len(done)} steps of {job.steps} on {job.profile}, beta"
                    f" {job.beta}"
                )
            steps[side] += done[WARMUP_STEPS:]
            rate = max(rate, matmul_gflops())
    return steps, rate


def summarize(side: str, job: Job, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """One side's row: seconds a step (median, min), tokens, and GFLOP needed by both counts (means
    over the steps).
    """
    profile = PROFILES[job.profile]
    shape, trajectories = Shape(profile.vocabulary), job.prompts_per_step * job.samples_per_prompt

    def gflop(prompt_passes: int) -> float:
        needed = [
            step_flops(
                shape, profile.prompt_tokens, s["completion_tokens"], prompt_passes, job.beta > 0
            )
            for s in steps
        ]
        return statistics.mean(needed) / 1e9

    seconds = [s["seconds"] for s in steps]
    return {
        "profile": job.profile,
        "beta": job.beta,
        "side": side,
        "seconds_median": statistics.median(seconds),
        "seconds_mean": statistics.mean(seconds),
        "seconds_min": min(seconds),
        "completion_tokens_mean": statistics.mean(n for s in steps for n in s["completion_tokens"]),
        "gflop_per_trajectory": gflop(trajectories),
        "gflop_per_prompt": gflop(job.prompts_per_step),
    }


def print_table(rows: list[dict[str, Any]], rate: float) -> None:
    """One line a side; the ratio (TRL's median over Sixfold's) stands on Sixfold's line."""
    trl = {
        (row["profile"], row["beta"]): row["seconds_median"] for row in rows if row["side"] == "trl"
    }
    print(
        f"\nlimit: {rate:.0f} GFLOP/s, float32 matmul, {THREADS} threads; share = FLOPs needed /"
        " (limit * mean seconds)\n"
    )
    columns = f"{'s/step':>8}{'min':>8}{'tokens':>8}{'ratio':>8}"
    columns += f"{'share, per trajectory':>24}{'per prompt':>12}"
    print(f"{'profile':<12}{'beta':>6}  {'side':<9}{columns}")
    for row in rows:
        key = (row["profile"], row["beta"])
        ratio = (
            f"{trl[key] / row['seconds_median']:.2f}x"
            if key in trl and row["side"] != "trl"
            else ""
        )
        shares = [
            row[f"gflop_{count}"] / row["seconds_mean"] / rate
            for count in ("per_trajectory", "per_prompt")
        ]
        print(
            f"{key[0]:<12}{key[1]:>6g} "
            f" {row['side']:<9}{row['seconds_median']:>8.2f}{row['seconds_min']:>8.2f}"
            f"{row['completion_tokens_mean']:>8.1f}{ratio:>8}{shares[0]:>24.1%}{shares[1]:>12.1%}"
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; names are checked here."""
    show_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        description="One GRPO step, Sixfold beside TRL.", formatter_class=show_defaults
    )
    parser.add_argument("--profiles", default=",".join(PROFILES), help="profiles to run, by comma")
    parser.add_argument("--beta", default="0,0.04", help="KL weights to run, by comma")
    parser.add_argument(
        "--steps",
        type=int,
        default=3,
        help=f"timed steps in each of {ROUNDS} rounds, after {WARMUP_STEPS} of warm-up",
    )
    parser.add_argument("--sides", default="trl,sixfold", help="who runs, by comma, in this order")
    parser.add_argument(
        "--trl-python",
        default="",
        help="python of an environment that has TRL (default: .venv-trl, made when missing)",
    )
    parser.add_argument("--json", default="", help="write the rows and every step to this file")
    options = parser.parse_args(arguments)
    options.profiles, options.sides = options.profiles.split(","), options.sides.split(",")
    options.beta = [float(beta) for beta in options.beta.split(",")]
    for name, known in ((options.profiles, list(PROFILES)), (options.sides, ["trl", "sixfold"])):
        if unknown := set(name) - set(known):
            parser.error(f"unknown {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: at least 1")
    return options


def main() -> None:
    """Run every profile at every beta and print the table."""
    options = parse()
    pythons = {
        side: (options.trl_python or trl_python()) if side == "trl" else sys.executable
        for side in options.sides
    }
    rows: list[dict[str, Any]] = []
    record: list[dict[str, Any]] = []
    rate = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name in options.profiles:
            work = Path(folder) / name
            work.mkdir()
            job = make_job(name, options.steps, work)
            for beta in options.beta:
                print(f"{name}, beta {beta:g} ...", file=sys.stderr)
                steps, seen = measure(replace(job, beta=beta), pythons, work)
                rate = max(rate, seen)
                rows += [summarize(side, replace(job, beta=beta), steps[side]) for side in pythons]
                record += [
                    {"profile": name, "beta": beta, **line}
                    for side in pythons
                    for line in steps[side]
                ]
    print_table(rows, rate)
    if options.json:
        Path(options.json).write_text(
            json.dumps(
                {"limit_gflops": rate, "threads": THREADS, "rows": rows, "steps": record}, indent=1
            )
        )


if __name__ == "__main__":
    main()
