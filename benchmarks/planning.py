"""Are the times that `sixfold plan` predicts for a measured machine right?

    python benchmarks/planning.py                               # measures the machine first
    python benchmarks/planning.py --hardware hardware.toml      # with a file of plan --measure
    python benchmarks/planning.py --cases demo,uniform --steps 4
    OMP_NUM_THREADS=1 python benchmarks/planning.py --cases placed --steps 12

It runs the recipe `demo`, the three profiles of `grpo_step.py` and the four of `engine.py`, all
with Sixfold only, and prints measured and predicted seconds of each phase. Lengths of prompts and
completions, and the tokens that were trained on, are inputs of a prediction; seconds are not.
Nothing is fitted to these runs: the costs come from other models
(`sixfold_planning/measure_cases.py`).

The case `placed` runs the model of `demo`, untrained, with a sampler in a process of its own, at
bounds of staleness 0 and 1, with checks of each of `--checks` seconds, which are an input too. A
step is the time from the end of one to the end of the next. Further flags, such as
`--rollout.prompts_per_step 4`, are those of its runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import engine_job
import grpo_step
from machine_limit import THREADS
from side_process import run_side
from tiny_qwen import make_model

import engine
from sixfold.report.predicted import compare, step_figures
from sixfold_planning.architectures import Architecture
from sixfold_planning.constants import CONSTANTS
from sixfold_planning.decode_time import Lengths, Sampler
from sixfold_planning.hardware import Accelerator, Cluster
from sixfold_planning.hardware_file import hardware_text, read_hardware
from sixfold_planning.measured_rates import MeasuredRates
from sixfold_planning.page.inputs import read_inputs
from sixfold_planning.placed import placed_step
from sixfold_planning.planner import learning_seconds
from sixfold_planning.prediction import HARDWARE, read
from sixfold_planning.samplers import sampling_seconds
from sixfold_planning.workload import Workload

HERE = Path(__file__).resolve().parent
ENGINE = tuple(f"engine {name}" for name in engine_job.PROFILES)
PLACED = "placed"
CASES = ("demo", *grpo_step.PROFILES, *ENGINE, PLACED)
WARM_UP = 3
"""Steps of a run ahead until its pipeline is full."""
LIMIT = 0.25
GRPO_PACKED = 2048
"""`MICROBATCH_TOKENS` of grpo_step_sixfold.py."""

SHORT = ("--rollout.max_new_tokens", "1")
"""Settings with which any model's sizes can be read: the default length may exceed its context."""


@dataclass(frozen=True)
class Row:
    """One phase: median seconds, measured and predicted."""

    case: str
    phase: str
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def sixfold(*words: str, environment: Mapping[str, str] = MappingProxyType({})) -> None:
    """Run a sixfold command in a process of its own."""
    command = [sys.executable, "-m", "sixfold", *words]
    variables = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-4000:]}")


def predicted(
    arch: Architecture, device: Accelerator, work: Workload, trained: float
) -> tuple[float, float]:
    """Seconds of sampling and of training.

    Args:
        arch: the model.
        device: the measured machine.
        work: work of a step.
        trained: share of the tokens that the trainer computes: groups with equal rewards are left
            out.
    """
    rollout = sampling_seconds(arch, Sampler(device, 1, 1, 4.0), work, "colocated", CONSTANTS)
    groups = max(1, round(work.prompts * trained))
    _, train = learning_seconds(arch, device, replace(work, prompts=groups), 1, CONSTANTS)
    return rollout, train if trained else 0.0


def step_rows(case: str, steps: list[tuple[float, float, float, float]]) -> list[Row]:
    """Rows of a case from measured and predicted sampling and training of its steps."""
    rollout, train, rolled, trained = (statistics.median(c) for c in zip(*steps, strict=True))
    return [
        Row(case, "rollout", rollout, rolled),
        Row(case, "trainer", train, trained),
        Row(case, "both", rollout + train, rolled + trained),
    ]


def demo_rows(device: Accelerator, steps: int, folder: Path) -> list[Row]:
    """Steps of the recipe `demo`, after its supervised training."""
    # Evaluation and checkpoints are not part of a step.
    flags = ("--run.steps", str(steps + 1), "--eval.tasks", "16", "--data.heldout", "16")
    sixfold("train", "demo", "--run.dir", str(folder), "--run.name", "demo", *flags)
    lines = (folder / "demo" / "metrics.jsonl").read_text().splitlines()
    inputs = read_inputs("demo", (), mean_tokens=None)
    found = []
    for metrics in [m for m in map(json.loads, lines) if "time/trainer_s" in m][1:]:
        sequences = inputs.work.sequences
        work = replace(
            inputs.work,
            prompt_tokens=metrics["rollout/prompt_tokens"] / sequences,
            mean_tokens=metrics["rollout/length_mean"],
            longest_tokens=max(metrics["rollout/length_max"], metrics["rollout/length_mean"]),
        )
        share = metrics.get("train/tokens", 0) / (sequences * work.trained)
        both = predicted(inputs.arch, device, work, min(1.0, share))
        found.append((metrics["time/rollout_s"], metrics["time/trainer_s"], *both))
    return step_rows("demo", found)


def placed_rows(device: Accelerator, options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Steps of runs with a sampler in a process: each bound of staleness with each check."""
    (cache := folder / "sixfold" / HARDWARE).parent.mkdir()
    cache.write_text(hardware_text(Cluster(device, 1)))
    flags = {
        "run.dir": folder,
        "run.steps": options.steps + WARM_UP,
        "run.threads": device.measured and device.measured.threads,
        "placement.kind": "processes",
        "placement.threads": device.measured and device.measured.threads,
        "rollout.prompts_per_step": 16,
        "environment.rewards": f"['{HERE / 'slow_checks.py'}:slow_coin']",
        **{"sft.steps": 0, "eval.every": 0, "data.heldout": 0, "log.rollouts_every": 0},
        **{"checkpoint.every": 1000, "run.target_reward": 0},
        **{key[2:]: value for key, value in zip(*[iter(options.flags)] * 2, strict=True)},
    }
    for check in map(float, options.checks.split(",")):
        for bound in (0, 1):
            case = f"bound {bound}, checks of {check:g} s"
            name = f"{bound}-{check:g}"
            words = flags | {"run.name": name, "rollout.staleness": bound}
            given = [word for key, value in words.items() for word in (f"--{key}", str(value))]
            slow = {"SLOW_CHECK_S": str(check), "XDG_CACHE_HOME": str(folder)}
            sixfold("train", "demo", *given, environment=slow)
            yield placed_row(case, folder / name, check)


def placed_row(case: str, run: Path, check: float) -> Row:
    """The step of a run, measured and as `sixfold plan` predicts it for the measured lengths."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    prediction = read(run)
    if isinstance(prediction, str):
        raise SystemExit(prediction)
    found = compare(prediction, [step_figures(line) for line in lines[WARM_UP:]])
    plan = placed_step(
        prediction.arch,
        prediction.cluster,
        prediction.measured_work(found.lengths),
        prediction.placed,
        check_s=check,
        trained_share=found.trained_share,
    )
    measured = [line["time/total_s"] for line in lines[WARM_UP:]]  # with the log's time
    return Row(case, "step", statistics.median(measured), plan.step.seconds)


def grpo_rows(name: str, device: Accelerator, steps: int, folder: Path) -> list[Row]:
    """Steps of a profile of grpo_step.py, beta 0."""
    job = grpo_step.make_job(name, steps, folder)
    lines = grpo_step.run("sixfold", sys.executable, job, folder / "job.json")
    arch = read_inputs(job.model, SHORT, mean_tokens=None).arch
    found = []
    timed = [line for line in lines if line["event"] == "step"][grpo_step.WARMUP_STEPS :]
    for line in timed:
        lengths = line["completion_tokens"]
        work = Workload(
            prompts=job.prompts_per_step,
            samples=job.samples_per_prompt,
            prompt_tokens=grpo_step.PROFILES[name].prompt_tokens,
            mean_tokens=statistics.mean(lengths),
            longest_tokens=max(lengths),
            packed=GRPO_PACKED,
            recompute="none",
            adapters=False,
            shared_prompt=True,
            reference=False,
            critic=False,
            shared_weights=True,
        )
        roles = line["roles"]
        found.append((roles["rollout_s"], roles["trainer_s"], *predicted(arch, device, work, 1.0)))
    return step_rows(name, found)


def engine_seconds(
    arch: Architecture, rates: MeasuredRates, name: str, work: list[engine_job.Conversation]
) -> float:
    """Predicted seconds of a profile of engine.py: what is not cached is computed once."""
    shared = engine_job.PROFILES[name].shared
    sequences = sum(len(c.lengths[0]) for c in work)
    seconds = rates.prompt_seconds(arch, shared) if shared else 0.0
    known = [shared] * len(work)
    said = [0] * len(work)
    for turn in range(len(work[0].turns)):
        prompts = [said[i] + len(c.turns[turn]) for i, c in enumerate(work)]
        for prompt, cached in zip(prompts, known, strict=True):
            seconds += rates.prompt_seconds(arch, prompt - cached)
        lengths = []
        for conversation, prompt in zip(work, prompts, strict=True):
            samples = conversation.lengths[turn]
            read = Lengths(shared, 1, 1, sequences, rates.shared_read).read
            read += Lengths(prompt - shared, 1, 1, len(samples), rates.shared_read).read
            lengths += [(n, read) for n in samples]
        seconds += decode_seconds(arch, rates, lengths)
        said = [prompt + c.lengths[turn][0] for c, prompt in zip(work, prompts, strict=True)]
        known = [length - 1 for length in said]
    return seconds


def decode_seconds(
    arch: Architecture, rates: MeasuredRates, lengths: list[tuple[int, float]]
) -> float:
    """Seconds to decode sequences of these (sampled tokens, tokens of the prompt to read).

    The prefill gives the first token.
    """

    def steps() -> Iterator[float]:
        for step in range(1, max(n for n, _ in lengths)):
            contexts = [prompt + step for n, prompt in lengths if n > step]
            yield rates.decode_seconds(arch, len(contexts), statistics.mean(contexts))

    return sum(steps())


def engine_rows(case: str, device: Accelerator, prompts: int, folder: Path) -> list[Row]:
    """One profile of engine.py."""
    name = case.removeprefix("engine ")
    work = engine_job.make_work(engine_job.PROFILES[name], prompts, engine_job.SHAPE.vocabulary)
    engine_job.save_work(work, folder / "work.json")
    make_model(engine_job.SHAPE, folder / "model", engine_job.MIXING)
    settings = engine.PROGRAMS["sixfold"].settings
    paths = str(folder / "model"), str(folder / "work.json")
    job = engine_job.Job("sixfold", name, *paths, repeats=3, threads=THREADS, settings=settings)
    (folder / "job.json").write_text(json.dumps(job.__dict__))
    command = [sys.executable, str(HERE / "engine_sixfold.py"), str(folder / "job.json")]
    lines = run_side(command, case, THREADS)
    runs = [line["seconds"] for line in lines if line["event"] == "run"]
    arch = read_inputs(job.model, SHORT, mean_tokens=None).arch
    assert device.measured is not None
    seconds = engine_seconds(arch, device.measured, name, work)
    return [Row(case, "rollout", statistics.median(runs), seconds)]


def rows_of(case: str, device: Accelerator, options: argparse.Namespace) -> Iterable[Row]:
    """Measure and predict one case."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if case == "demo":
            yield from demo_rows(device, options.steps, folder)
        elif case == PLACED:
            yield from placed_rows(device, options, folder)
        elif case in grpo_step.PROFILES:
            yield from grpo_rows(case, device, options.steps, folder)
        else:
            yield from engine_rows(case, device, options.prompts, folder)


def measured_machine(file: str, folder: Path) -> Accelerator:
    """The machine of a hardware file, or this one, measured now."""
    path = Path(file or folder / "hardware.toml")
    if not file:
        sixfold("plan", "--measure", "--out", str(path))
    device = read_hardware(path).device
    if device.measured is None:
        raise SystemExit(f"{path} has no table [measured]: write it with sixfold plan --measure")
    return device


def main() -> None:
    """Run the cases and print a line for each phase."""
    parser = argparse.ArgumentParser(description="Predicted beside measured seconds.")
    parser.add_argument("--hardware", default="", help="file of sixfold plan --measure")
    parser.add_argument("--cases", default=",".join(CASES), help="cases, by comma")
    parser.add_argument("--steps", type=int, default=6, help="timed steps (default 6)")
    parser.add_argument("--prompts", type=int, default=64, help="prompts of the engine's profiles")
    parser.add_argument("--checks", default="0,0.5,2", help="seconds of checks of `placed`")
    options, flags = parser.parse_known_args()
    options.flags = flags
    cases = options.cases.split(",")
    pairs = len(flags) % 2 == 0 and all("." in name for name in flags[::2])
    if flags and not (pairs and PLACED in cases):
        parser.error(f"unknown {' '.join(flags)}: settings of a run are for the case {PLACED}")
    if unknown := sorted(set(cases) - set(CASES)):
        parser.error(f"unknown {', '.join(unknown)}: choose from {', '.join(CASES)}")
    with tempfile.TemporaryDirectory() as folder:
        device = measured_machine(options.hardware, Path(folder))
    print(f"{'case':<26}{'phase':<10}{'measured s':>11}{'predicted s':>12}{'ratio':>7}")
    found: list[Row] = []
    for case in cases:
        for row in rows_of(case, device, options):
            found.append(row)
            mark = "" if abs(row.ratio - 1) <= LIMIT else f"  off by more than {LIMIT:.0%}"
            print(
                f"{row.case:<26}{row.phase:<10}{row.measured:>11.3f}{row.predicted:>12.3f}"
                f"{row.ratio:>7.2f}{mark}",
                flush=True,
            )
    good = sum(abs(row.ratio - 1) <= LIMIT for row in found)
    print(f"{good} of {len(found)} phases are within {LIMIT:.0%}")


if __name__ == "__main__":
    main()
