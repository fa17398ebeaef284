"""A run asks every watcher: alarms, divergence, learning, shared weights, the tokenizer."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from sixfold.algorithm.composed import Composed, make_algorithm
from sixfold.algorithm.zoo import ZOO
from sixfold.errors import UserError
from sixfold.evaluation.divergence import Comparison, Divergence
from sixfold.recipe.schema import Recipe
from sixfold.recipe.toml import parse_recipe
from sixfold.report.alarms import Alarms
from sixfold.report.learning import Learning
from sixfold.run.assemble import assemble
from sixfold.run.start import train_run
from sixfold.run.trainable_roles import build_roles

from .processes import tiny_recipe


def recipe(folder: Path, **overrides: object) -> Recipe:
    settings = {"run__name": "r", "run__steps": 2, "eval__every": 1, **overrides}
    return parse_recipe('run.name = "r"', "test", tiny_recipe(folder, **settings))


@pytest.mark.slow
def test_lines_of_every_monitor_reach_the_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Alarms, "observe", lambda self, m: [f"alarm {m['tokens_total']:.0f}"])
    monkeypatch.setattr(
        Divergence, "observe", lambda self, step, values: Comparison(-0.5, True, f"diverged {step}")
    )
    monkeypatch.setattr(
        Learning, "observe", lambda self, m: ["stands"] if "rollout/tokens" in m else ["final"]
    )
    assert train_run(recipe(tmp_path, environment__preflight=0)) == 0
    notes = [json.loads(line) for line in (tmp_path / "r" / "notes.jsonl").read_text().splitlines()]
    said = {(note["step"], note["text"]) for note in notes}
    for metrics in map(json.loads, (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()):
        step, tokens = metrics["step"], metrics["tokens_total"]
        assert {(step, f"alarm {tokens:.0f}"), (step, f"diverged {step}"), (step, "stands")} <= said
    assert (2, "final") in said


@pytest.mark.slow
def test_a_reference_that_shares_a_weight_with_the_policy_is_refused(tmp_path: Path) -> None:
    assembly = assemble(recipe(tmp_path, algorithm__beta=0.1, reference__path=str(tmp_path)))
    teacher = copy.deepcopy(assembly.policy.model)
    teacher.lm_head.weight.data = assembly.policy.model.lm_head.weight.data
    try:
        with pytest.raises(RuntimeError, match="would be trained"):
            build_roles(assembly, None, teacher)
    finally:
        assembly.close()


@pytest.mark.slow
def test_weights_of_rewards_do_not_stick_to_the_callers_algorithm(tmp_path: Path) -> None:
    own = make_algorithm(ZOO["gdpo"], horizon=12)
    assembly = assemble(recipe(tmp_path, algorithm__name="gdpo", environment__weights="3"))
    try:
        algorithm = build_roles(assembly, own, None).algorithm
        assert isinstance(algorithm, Composed)
        assert assembly.environment.part_weights and not own.part_weights
        assert algorithm.part_weights == assembly.environment.part_weights
    finally:
        assembly.close()


@pytest.mark.slow
def test_a_resume_with_another_tokenizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train_run(recipe(tmp_path, run__steps=1)) == 0
    before = (tmp_path / "r" / "metrics.jsonl").read_bytes()
    monkeypatch.setattr("sixfold.model.loading.vocabulary_hash", lambda tokenizer: "another")
    with pytest.raises(UserError, match="tokenizer"):
        train_run(recipe(tmp_path, run__steps=2), resume=tmp_path / "r")
    assert (tmp_path / "r" / "metrics.jsonl").read_bytes() == before
