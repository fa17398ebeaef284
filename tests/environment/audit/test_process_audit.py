"""The audit finds the tricks that a process reward pays for: planted ones, and through the verb."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.reward_model.comparisons import policy, saved

from sixfold.cli import main
from sixfold.errors import UserError
from sixfold.model.loading import Policy
from sixfold.model.scalar_head import scalar_head
from sixfold.model.scratch import character_tokenizer
from sixfold.recipe.schema import EnvironmentConfig
from sixfold.reward_model.step_model import step_model_of
from sixfold.steps import steps_of
from sixfold.types import Task
from sixfold_environments.audit import process
from sixfold_environments.audit.finding import Finding

TASKS = [Task("a", "?", trace="1+2=3;3+4=7;#7"), Task("b", "?", trace="2+2=4;4+1=5;#5")]
Score = Callable[[str], float]


def audited(
    monkeypatch: pytest.MonkeyPatch, score: Score, credit: str, tasks: Sequence[Task] = TASKS
) -> Finding:
    """The finding about a model whose score of a step is a function of its text."""

    def scores(
        task: Task, texts: Sequence[str], ends: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        if any(" " in text for text in texts):
            raise UserError("the tokenizer has no space")
        return [
            [score(text[a:b]) for a, b in zip([0, *at], at, strict=False)]
            for text, at in zip(texts, ends, strict=True)
        ]

    made = SimpleNamespace(ends="token:;", steps=steps_of("token:;"), score=scores)
    monkeypatch.setattr(process, "load_process_scorer", lambda *given: made)
    config = EnvironmentConfig.model_validate({"prm": {"credit": credit}})
    return process.check_process_reward("prm:X", config, tasks)


def test_a_sum_of_scores_pays_for_steps_and_a_gain_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = audited(monkeypatch, lambda step: 0.5, "score")
    assert found.level == "failure" and "1.50 for 2 worked solutions" in found.result
    lines = dict(line.split(": ", 1) for line in found.details)
    for trick, gain in (
        ("8 empty steps", 4.0),
        ("8 steps of filler", 4.0),
        ("the first step 8 times", 3.5),
        ("each step twice", 1.0),
        ("each step divided", 1.0),
    ):
        assert lines[trick] == f"+{gain:.2f} on average, more on 2 of 2 tasks"
        assert trick in found.result
    assert lines["padding"] == "cannot be scored"  # a refused text is no text that earns nothing
    gain = audited(monkeypatch, lambda step: 0.5, "gain")
    assert gain.level == "ok" and not gain.remedy


def test_a_trick_that_pays_less_than_the_solution_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    praised = audited(monkeypatch, lambda step: 0.1 if step.startswith("OK") else 1.0, "min")
    assert praised.level == "ok"  # the minimum does not rise
    halves = audited(monkeypatch, lambda step: 0.2 if step.startswith(";") else 1.0, "score")
    lines = dict(line.split(": ", 1) for line in halves.details)
    assert lines["8 empty steps"].startswith("+1.60") and lines["each step twice"].startswith("+2")
    few = audited(monkeypatch, lambda step: 0.01 if step == ";" else 0.0, "score")
    assert few.level == "failure"  # nothing is paid for solutions, and 0.08 for empty steps
    some = audited(monkeypatch, lambda step: 0.02 if step == ";" else float("#" in step), "score")
    assert some.level == "warning" and "8 empty steps" in some.result
    without = audited(monkeypatch, lambda step: 0.5, "score", [Task("a", "?", trace="#7")])
    assert without.level == "skipped"


@pytest.mark.slow
def test_the_verb_audits_process_rewards_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Policy(policy().model, character_tokenizer("0123456789+=;#OK "), 256, (1,), "")
    model = step_model_of(own, own.model, "token:;")
    torch.nn.init.zeros_(scalar_head(model).weight)  # all scores are 1/2
    folder = saved(model, own, tmp_path / "prm")
    given = ["--tasks", "2", "--json", "--environment.rewards", f"prm:{folder}"]
    assert main(["audit", "demo", *given]) == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["check"] for record in found] == ["process reward"]
    lines = dict(line.split(": ", 1) for line in found[0]["details"])
    assert lines["8 empty steps"] == "+4.00 on average, more on 2 of 2 tasks"
    assert lines["padding"] == "+0.00 on average, more on 0 of 2 tasks"
