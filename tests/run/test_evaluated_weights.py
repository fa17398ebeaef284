"""Every evaluation measures the policy's own weights, says which, and agrees with `sixfold eval` of
the checkpoint; training does not notice.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sixfold.cli import main
from sixfold.evaluation.evaluate import Evaluation
from sixfold.files.folder import RunFolder
from sixfold.recipe.toml import parse_recipe
from sixfold.report.rollouts import read_rollouts
from sixfold.run.assemble import assemble
from sixfold.run.sft import SftStage
from sixfold.types import Group, Task, Trajectory

from .processes import metrics, tiny_recipe

STEPS = 5
KINDS: dict[str, dict[str, object]] = {
    "shared": {},
    "stale": {"sync__kind": "copy", "sync__every": 3},
    "int8": {"sync__kind": "int8", "algorithm__correction": "truncated"},
    "stale fp8": {"sync__kind": "fp8", "sync__every": 2, "algorithm__correction": "truncated"},
}


def flags(folder: Path, **overrides: object) -> list[str]:
    """Five steps that move the weights far, graded by a function of every character."""
    folder.mkdir(exist_ok=True)
    rewards = folder / "rewards.py"
    rewards.write_text(
        "def odd(completion, task):\n    return float(sum(map(ord, completion)) % 97 / 96)\n"
    )
    settings = {
        "run__name": "run", "run__steps": STEPS, "run__dir": str(folder),
        "environment__rewards": f'["{rewards}:odd"]', "sft__steps": 3,
        "trainer__learning_rate": 2e-2, "data__heldout": 24, "eval__every": 2,
        "checkpoint__every": 1, "checkpoint__keep": 9,
        "rollout__temperature": 1.3,
        "eval__temperature": 1, "eval__samples": 2,
    }  # fmt: skip
    return tiny_recipe(folder, **{**settings, **overrides})


def train(folder: Path, **overrides: object) -> Path:
    arguments = flags(folder, **overrides)
    (folder / "r.toml").write_text('run.name = "run"\n')
    assert main(["train", str(folder / "r.toml"), *arguments]) == 0
    return folder / "run"


def evaluated(run: Path, *checkpoints: str, out: str) -> list[dict[str, Any]]:
    paths = [str(run / "checkpoints" / name) for name in checkpoints] or [str(run)]
    assert (
        main(
            [
                "eval",
                str(run / "recipe.toml"),
                "--checkpoint",
                *paths,
                "--out",
                str(run.parent / out),
            ]
        )
        == 0
    )
    found: list[dict[str, Any]] = json.loads((run.parent / out / "results.json").read_text())[
        "checkpoints"
    ]
    return found


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_figure_is_that_of_the_checkpoint(tmp_path: Path, kind: str) -> None:
    run = train(tmp_path, **KINDS[kind])
    first, second, fourth, last = evaluated(
        run, *(f"step-{n:06d}" for n in (0, 2, 4, 5)), out="all"
    )
    summary = json.loads((run / "summary.json").read_text())
    logged = {m["step"]: m for m in metrics(run) if "heldout/accuracy" in m}
    assert list(logged) == [2, 4]
    for name, found in (("heldout_after_sft", first), ("heldout_after", last)):
        assert (
            summary[name] == found["accuracy"]
            and summary[f"{name}_interval"] == found["accuracy_interval"]
        )
        assert (
            summary[f"{name}_score"] == found["score"][0]
            and summary[f"{name}_version"] == found["version"]
        )
    for step, found in ((2, second), (4, fourth)):
        m = logged[step]
        assert (m["heldout/accuracy"], m["heldout/score"], m["heldout/version"]) == (
            found["accuracy"],
            found["score"][0],
            found["version"],
        )
    assert (
        [f["version"] for f in (first, second, fourth, last)]
        == [f["step"] for f in (first, second, fourth, last)]
        == [0, 2, 4, 5]
    )
    assert len({f["score"][0] for f in (first, second, fourth, last)}) == 4, (
        "the weights are so far apart that a wrong version shows"
    )
    assert summary["heldout_after_checkpoint"] == "checkpoints/step-000005"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stale", "stale fp8"])
def test_training_does_not_notice_evaluations(tmp_path: Path, kind: str) -> None:
    """The same tokens of the same versions, and the same weights at the end, with an evaluation
    after each step and without any.
    """
    seen, unseen = (
        train(tmp_path / name, eval__every=every, **KINDS[kind])
        for name, every in (("seen", 1), ("unseen", 0))
    )
    for step in range(1, STEPS + 1):
        a, b = (read_rollouts(RunFolder(run).rollout_file(step)) for run in (seen, unseen))
        assert [(r["tokens"], r["logp"], r["version"]) for r in a] == [
            (r["tokens"], r["logp"], r["version"]) for r in b
        ]
    for m, n in zip(metrics(seen), metrics(unseen), strict=True):
        assert (m["sync/version"], m["sync/staleness"], m["train/loss"]) == (
            n["sync/version"],
            n["sync/staleness"],
            n["train/loss"],
        )
    files = [
        run / "checkpoints" / "step-000005" / name
        for run in (seen, unseen)
        for name in ("model/model.safetensors", "trainer.safetensors")
    ]
    a, b = ({**load_file(files[i]), **load_file(files[i + 1])} for i in (0, 2))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.slow
def test_solutions_are_learned_at_temperature_1(tmp_path: Path) -> None:
    """They were not sampled: the temperature of rollouts is no part of their likelihood."""

    def trained(temperature: float) -> dict[str, torch.Tensor]:
        assembly = assemble(
            parse_recipe(
                'run.name = "x"', "x.toml", flags(tmp_path, rollout__temperature=temperature)
            )
        )
        try:
            SftStage(assembly, lambda metrics: None).run()
            return {
                name: p.detach().clone() for name, p in assembly.policy.model.named_parameters()
            }
        finally:
            assembly.close()

    cold, plain = trained(0.5), trained(1.0)
    assert all(torch.equal(cold[name], plain[name]) for name in plain)


def test_evaluation_over_two_versions_is_refused() -> None:
    def sampled(version: int) -> Trajectory:
        return Trajectory.one_turn("t", 0, [1], [2], [0.0], [version], "stop")

    assert Evaluation([Group(Task("t", ""), [sampled(3)])]).version == 3
    with pytest.raises(RuntimeError, match=r"one version .* \[3, 4\]"):
        _ = Evaluation([Group(Task("t", ""), [sampled(3), sampled(4)])]).version


@pytest.mark.nightly
@pytest.mark.slow
def test_the_command_leaves_completions_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path, run__steps=2)
    capsys.readouterr()
    recipe = [
        str(run / "recipe.toml"),
        "--checkpoint",
        *(str(run / "checkpoints" / f"step-{n:06d}") for n in (0, 2)),
    ]
    assert (
        main(
            [
                "eval",
                *recipe,
                "--against",
                str(run / "checkpoints" / "step-000001"),
                "--eval.solved_at",
                "0.5",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    folder = tmp_path / "evaluations" / "run-001"
    results = json.loads((folder / "results.json").read_text())
    assert (
        [c["step"] for c in results["checkpoints"]] == [0, 2, 1]
        and "pass@2" in said
        and str(folder) in said.replace("\n", "")
    )
    assert [c["checkpoint"] for c in results["comparisons"]] == [
        c["checkpoint"] for c in results["checkpoints"][:2]
    ]
    assert (
        all(0 < c["p_value"] <= 1 for c in results["comparisons"])
        and results["solved"] == "odd >= 0.5"
    )
    for found in results["checkpoints"]:
        lines = [
            json.loads(line) for line in (folder / found["completions"]).read_text().splitlines()
        ]
        assert len(lines) == 48 and {line["sample"] for line in lines} == {0, 1}
        assert all(
            line["score"] == sum(map(ord, line["completion"])) % 97 / 96
            and line["solved"] == (line["score"] >= 0.5)
            for line in lines
        )
        assert found["accuracy"] == pytest.approx(sum(line["solved"] for line in lines) / 48)
        assert found["score"][0] == pytest.approx(sum(line["score"] for line in lines) / 48)
    assert main(["eval", *recipe]) == 0
    assert (tmp_path / "evaluations" / "run-002" / "results.json").is_file(), (
        "nothing is overwritten"
    )
    assert main(["eval", *recipe, "--out", str(folder)]) == 2
    assert "--out" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.slow
def test_another_metric_than_the_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path, run__steps=1)
    two = tmp_path / "two.py"
    two.write_text(
        "def long(completion, task):\n    return float(len(completion))\ndef none(completion,"
        " task):\n    return 0.0\n"
    )
    more = [
        "--environment.rewards",
        f'["{two}:none", "{two}:long"]',
        "--environment.weights",
        "[1.0, 0.0]",
    ]
    assert (
        main(
            [
                "eval",
                str(run / "recipe.toml"),
                "--checkpoint",
                str(run),
                *more,
                "--eval.metric",
                "long",
                "--out",
                str(tmp_path / "o"),
            ]
        )
        == 0
    )
    (found,) = json.loads((tmp_path / "o" / "results.json").read_text())["checkpoints"]
    assert (
        found["score"][0] == pytest.approx(found["parts"]["long"])
        and found["score"][0] > 1
        and found["reward"][0] == 0.0
    )
    assert 0 < found["accuracy"] <= 1, "a share, however large the score"
    assert (
        main(
            [
                "eval",
                str(run / "recipe.toml"),
                "--checkpoint",
                str(run),
                *more,
                "--eval.metric",
                "lon",
            ]
        )
        == 2
    )
    assert "eval.metric" in capsys.readouterr().err
