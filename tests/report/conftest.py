"""A synthetic run folder: 40 steps of a made-up job, with every file a report reads."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from sixfold.files.folder import RunFolder
from sixfold.report.loggers import JsonlLogger
from sixfold.report.metric import Value
from sixfold.report.rollouts import write_rollouts
from sixfold.report.samples import Sample, write_samples
from sixfold.types import LOG_RATIO_EDGES, Group, Reward, Task, Trajectory


def metrics_of(step: int, rng: random.Random) -> dict[str, Value]:
    """The metrics of one step of a run that learns."""
    learned = 1 / (1 + math.exp(-(step - 16) / 6))
    reward = 0.3 + 0.65 * learned
    metrics: dict[str, Value] = {
        "step": step, "tokens_total": step * 2400, "time/total_s": 2.0 + 0.1 * rng.random(),
        "time/rollout_s": 1.1 + 0.1 * rng.random(),
        "time/environment_s": 0.02, "time/reference_s": 0.1, "time/algorithm_s": 0.004,
        "time/trainer_s": 0.6, "time/sync_s": 0.001,
        "time/log_s": 0.03, "reward/mean": reward + rng.gauss(0, 0.05), "reward/std": 0.4,
        "reward/ema": reward, "reward/error_frac": 0.0,
        "reward/part/correct": reward, "reward/part/format": min(1.0, reward + 0.1),
        "group/degenerate_frac": 0.2 + 0.5 * learned,
        "rollout/tokens": 2400, "rollout/prompt_tokens": 640,
        "rollout/tok_s": 1900 + rng.gauss(0, 60),
        "rollout/length_mean": 37 + 4 * learned,
        "rollout/length_max": 64, "rollout/truncated_frac": 0.05 * (1 - learned),
        "rollout/reused_frac": 0.875,
        "train/loss": 0.02 * rng.gauss(0, 1), "train/pg_loss": 0.015 * rng.gauss(0, 1),
        "train/kl": 0.08 * learned,
        "train/entropy": 0.5 - 0.35 * learned, "train/grad_norm": 0.6 + 0.3 * rng.random(),
        "train/learning_rate": 1e-4,
        "train/tokens": 3040, "train/microbatches": 3, "train/skipped": 0, "train/skipped_total": 0,
        "train/tok_s": 5000.0,
        "train/ratio_mean": 1.0, "train/log_ratio_mean": 0.0,
        "train/clipped_frac": 0.03 * rng.random(), "train/clip_active_frac": 0.01,
        "train/ratio_hist": [
            round(2000 * math.exp(-abs(i - 5) * 1.2)) for i in range(len(LOG_RATIO_EDGES) + 1)
        ],
        "mismatch/max_abs_logp": 3e-6 * (1 + rng.random()), "mismatch/mean_abs_logp": 2e-7,
        "mismatch/kl_k3": 1e-13,
        "mismatch/prob_error": 1e-6, "sync/version": step, "sync/staleness": 0,
    }  # fmt: skip
    if step % 5 == 1 or step == 40:
        accuracy = 0.31 + 0.64 * learned
        metrics |= {
            "time/eval_s": 0.8,
            "heldout/accuracy": accuracy,
            "heldout/low": accuracy - 0.04,
            "heldout/high": accuracy + 0.03,
        }
    return metrics


def trajectory_of(
    task: Task, sample: int, text: str, reward: Reward, rng: random.Random
) -> Trajectory:
    """Character tokens; the log-probs are made up."""
    prompt, answer = [ord(c) for c in task.prompt_text], [ord(c) for c in text]
    logp = [-(abs(rng.gauss(0, 0.8)) ** 3) for _ in answer]
    return Trajectory.one_turn(
        task.id, sample, prompt, answer, logp, [3] * len(answer), "stop",
        text=text, seconds=0.4, reward=reward,
    )  # fmt: skip


def groups_of(step: int, rng: random.Random) -> tuple[list[Group], list[list[float]]]:
    """Four groups of eight: sums with traces, some right."""
    groups, advantages = [], []
    for number in range(4):
        a, b = rng.randrange(100, 999), rng.randrange(100, 999)
        task = Task(
            id=f"sum-{step}-{number}", prompt=f"{a}+{b}=", answer=str(a + b), source="arithmetic"
        )
        rewards = [float(rng.random() < step / 45) for _ in range(8)]
        mean = sum(rewards) / 8
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 8)
        spoken = f"({a % 10}+{b % 10}={a % 10 + b % 10};{a // 10}+{b // 10})"
        texts = [
            f"{spoken}\n#{a + b + (0 if right else rng.randrange(1, 9))};" for right in rewards
        ]
        samples = [
            trajectory_of(task, k, text, Reward(r, {"correct": r}), rng)
            for k, (text, r) in enumerate(zip(texts, rewards, strict=True))
        ]
        groups.append(Group(task, samples))
        advantages.append([(r - mean) / std if std else 0.0 for r in rewards])
    return groups, advantages


def make_run(folder: Path, steps: int = 40) -> Path:
    """Write the folder of a finished run of `steps` steps."""
    rng = random.Random(0)
    (folder / "rollouts").mkdir(parents=True)
    (folder / "recipe.toml").write_text(
        f'[run]\nname = "{folder.name}"\nsteps = {steps}\n\n[algorithm]\nname = "grpo"\n'
    )
    logger = JsonlLogger(folder / "metrics.jsonl")
    for step in range(1, steps + 1):
        logger.log(step, metrics_of(step, rng))
        if step % 10 == 0 or step == 1:
            write_rollouts(RunFolder(folder).rollout_file(step), *groups_of(step, rng), decode=chr)
    logger.close()
    warm_up = JsonlLogger(folder / "sft.jsonl")
    for step in range(1, 9):
        warm_up.log(step, {"train/loss": 3.0 / step})
    warm_up.close()
    (folder / "environment.json").write_text(
        json.dumps({"sixfold": "0.1.0", "torch": "2.13.0", "python": "3.11", "cpu": {"cores": 2}})
    )
    ends = {"heldout_after_sft": (0.32, 0.29, 0.36), "heldout_after": (0.951, 0.93, 0.967)}
    figures: dict[str, object] = {}
    for key, (value, low, high) in ends.items():
        figures |= {key: value, f"{key}_interval": [low, high]}
    (folder / "summary.json").write_text(json.dumps(figures | {"seconds": 97.2}))
    questions = [(f"{a}+{b}=", str(a + b)) for a, b in ((123, 456), (901, 77), (640, 359))]
    write_samples(
        RunFolder(folder).samples,
        [
            Sample(question, answer, f"(3+6=8)\n#{int(answer) + 7}", 0.0)
            for question, answer in questions
        ],
        [Sample(question, answer, f"(3+6=9)\n#{answer}", 1.0) for question, answer in questions],
    )
    return folder


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A finished run of 40 steps."""
    return make_run(tmp_path / "synthetic")


@pytest.fixture
def build_run(tmp_path: Path) -> Callable[[str, int], Path]:
    """(name, steps) to the folder of such a run."""
    return lambda name, steps: make_run(tmp_path / name, steps)
