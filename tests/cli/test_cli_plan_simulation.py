"""`sixfold plan TARGET --simulate`: topologies, samples per prompt, failures, an earlier run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sixfold.cli import main
from sixfold.files.folder import RunFolder
from sixfold.report.rollouts import write_rollouts
from sixfold.types import Group, Reward, Task, Trajectory

FLAGS = ("gsm8k", "--gpus", "2xH100", "--rollout.prompts_per_step", "4", "--simulate", "2")


def page(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *FLAGS, *words]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def cells(text: str, label: str) -> list[str]:
    """Columns of the last row with a label."""
    found: list[str] = re.findall(rf"^  {re.escape(label)} {{2,}}(.*)$", text, re.M)[-1].split()
    return found


def run_with(folder: Path, lengths: list[int], rewards: list[float]) -> Path:
    """A run with one dump of two groups of these samples."""
    run = RunFolder(folder)
    run.rollouts.mkdir(parents=True)
    run.recipe.write_text("", encoding="utf-8")
    groups = [
        Group(
            Task(task, "?"),
            [
                Trajectory.one_turn(
                    task, i, [1], [2] * n, [-0.5] * n, [3] * n, "stop", reward=Reward(reward)
                )
                for i, (n, reward) in enumerate(zip(lengths, rewards, strict=True))
            ],
        )
        for task in ("one", "two")
    ]
    write_rollouts(run.rollout_file(7), groups, [[0.0] * len(lengths)] * 2)
    return folder


def test_the_page_of_a_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--staleness", "1", "--seed", "5", "--mtbf", "0.05", "--restart", "2")
    text = page(capsys, *flags)
    assert page(capsys, *flags) == text
    assert "Simulation of 2 steps (seed 5)" in text
    assert "staleness of at most 1" in text
    assert cells(text, "staleness 0")[0] == "100%" and cells(text, "staleness 1")[1] == "100%"
    estimate = [float(x) for x in cells(text, "step")]
    simulated = [float(x) for x in cells(text, "step, seconds")]
    assert simulated[0] == pytest.approx(estimate[0], rel=0.15)
    for samples in (2, 4, 8, 16):
        assert len(cells(text, f"{samples} samples")) == 5
    assert "Failures: one per device every 0.05 h on average, restart in 2 s" in text
    assert len(cells(text, "closed form")) == 3


def test_one_device_has_one_simulated_topology(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "--gpus", "1xL4")
    assert len(cells(text, "step, seconds")) == 1 and "staleness 1" not in text


def test_lengths_and_rewards_of_an_earlier_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lengths, rewards = [40, 10, 20, 30], [1.0, 0.0, 0.0, 0.0]
    folder = run_with(tmp_path / "run", lengths, rewards)
    text = page(capsys, "--run", str(folder), "--rollout.samples_per_prompt", "4")
    assert "2 of the run: completions of 25 tokens (10 to 40), 25% with" in " ".join(text.split())
    assert "completions of 25 (at most 512)" in text
    assert float(cells(text, "longest / mean of a step")[0]) == 40 / 25
    assert cells(text, "equal rewards") == ["0.0%"] * 3
    assert cells(text, "4 samples")[-2:] == ["1.60", "0.0%"]
    assert "8 samples" not in text  # the run's groups have 4
    few = [*FLAGS, "--run", str(folder)]
    assert "groups of at most 4 samples, and the plan needs 8" in refused(capsys, *few)
    short = [*few, "--rollout.samples_per_prompt", "4", "--rollout.max_new_tokens", "32"]
    assert "completions of 40 tokens, and the plan allows 32" in refused(capsys, *short)


def test_mistakes_of_a_simulation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def error(*words: str) -> str:
        return refused(capsys, "gsm8k", "--gpus", "2xH100", *words)

    assert "expected an integer >= 1, got '0'" in error("--simulate", "0")
    assert "'-5' is not a positive number" in error("--simulate", "--mtbf=-5")
    assert "--mtbf belongs to a simulation: add --simulate" in error("--mtbf", "5")
    assert "add --mtbf HOURS" in error("--simulate", "--restart", "5")
    assert "samples_per_prompt" in error("--simulate", "--rollout.samples_per_prompt", "0")
    assert "no such folder" in error("--simulate", "--run", str(tmp_path / "none"))
    (tmp_path / "recipe.toml").write_text("", encoding="utf-8")
    assert "has no rollouts: train with log.rollouts_every = 1" in error(
        "--simulate", "--run", str(tmp_path)
    )
    assert "leave one out" in error("--simulate", "--run", str(tmp_path), "--length", "5")
