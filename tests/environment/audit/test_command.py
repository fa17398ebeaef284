"""`sixfold audit`: its output and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sixfold.cli import main

REWARDS = """
def any_answer(completion, task):
    return float(completion.strip().isdigit())
"""


def test_a_sound_recipe_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "demo", "--tasks", "4", "--environment.rewards", "arithmetic"]) == 0
    out = capsys.readouterr().out
    assert "reference answer: solves 100.0% of 4 tasks" in out
    assert "You can train on this environment" in out


@pytest.mark.nightly
def test_a_faulty_reward_exits_with_1_and_json_has_every_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    reward = f"{tmp_path}/rewards.py:any_answer"
    code = main(["audit", "demo", "--tasks", "4", "--json", "--environment.rewards", reward])
    captured = capsys.readouterr()
    findings = {record["check"]: record for record in map(json.loads, captured.out.splitlines())}
    assert code == 1
    assert findings["distractor"]["level"] == "failure"
    assert "Do not train" in captured.err


def test_the_time_of_a_step_comes_from_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "demo"
    run.mkdir()
    lines = [json.dumps({"step": step, "time/step_s": 1e-6 * step}) for step in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    main(["audit", "demo", "--tasks", "2", "--json", "--run.dir", str(tmp_path)])
    records = map(json.loads, capsys.readouterr().out.splitlines())
    (finding,) = [record for record in records if record["check"] == "throughput"]
    assert finding["level"] == "warning" and "environment.workers" in finding["remedy"]
