"""Training with tools: a recorded run and its replay give the same trajectories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import sixfold
from sixfold.environment.tools.worked import worked_call
from sixfold.errors import UserError
from sixfold.report.rollouts import read_rollouts
from sixfold.types import Task

from .processes import TINY

CALL = worked_call("draw", {"of": "a"})
TOOL = '''
from pathlib import Path

def draw(of: str) -> str:
    """Draw the next number: another one at each call."""
    count = Path(__file__).with_name("count")
    number = int(count.read_text()) + 1
    count.write_text(str(number))
    return str(number % 10)
'''

UNFIT = """
class Odd: ...
def untyped(x): ...
def anything(x: Odd): ...
def spread(*more: int): ...

from sixfold_environments.web.episode import WebShop
class OwnShop(WebShop): ...
"""


def run(folder: Path, name: str, **more: Any) -> Path:
    tasks = [Task(f"{n}", f"{n}", answer=3, trace=(CALL, "3")) for n in range(8)]
    characters = "".join(chr(n) for n in range(32, 127))
    return sixfold.train(
        tasks=tasks,
        settings={
            **{key: value for key, value in TINY.items() if not key.startswith("data.")},
            "run.dir": str(folder),
            "run.name": name,
            "run.steps": 2,
            "model.scratch.alphabet": characters,
            "model.scratch.words": [CALL],
            "model.scratch.context": 200,
            "environment.episode": "tools",
            "environment.tools.functions": [f"{folder}/tool.py:draw"],
            "rollout.max_turns": 4,
            "sft.steps": 40,
            "trainer.learning_rate": 1e-4,
            **more,
        },
    )


@pytest.mark.nightly
@pytest.mark.slow
def test_a_replay_has_the_trajectories_of_the_recorded_run(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(TOOL)
    count = tmp_path / "count"
    count.write_text("0")
    first = run(tmp_path, "first", **{"environment.tools.record": str(tmp_path / "calls")})
    ran = count.read_text()
    assert int(ran) == 1, "equal calls have one result"
    second = run(tmp_path, "second", **{"environment.tools.replay": str(tmp_path / "calls")})
    assert count.read_text() == ran, "nothing was run"
    one, other = trajectories(first), trajectories(second)
    assert one == other
    called = [record for record in one if any(e.get("tool") == "draw" for e in record["events"])]
    assert called, "the policy calls the tool"


def trajectories(folder: Path) -> list[Any]:
    """What was sampled, observed and rewarded, without times."""
    kept = ("task_id", "sample", "tokens", "provenance", "logp", "outcome", "text", "events")
    files = sorted((folder / "rollouts").glob("step-*"))
    assert len(files) == 2
    records = [record for file in files for record in read_rollouts(file)]
    return [
        {**{key: record[key] for key in kept}, "reward": record["reward"]["value"]}
        for record in records
    ]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"environment.tools.functions": []}, r"environment\.tools\.functions"),
        ({"environment.episode": "calculator"}, r"environment\.tools.*'tools'"),
        ({"environment.episode": ""}, r"environment\.tools.*'tools'"),
        ({"environment.tools.functions": ["calculator", "calculator"]}, r"'calculator'"),
        ({"environment.tools.functions": ["TOOL:untyped"]}, r"'untyped'.*'x'.*x: TYPE"),
        ({"environment.tools.functions": ["TOOL:anything"]}, r"'anything'.*'x'"),
        ({"environment.tools.functions": ["TOOL:spread"]}, r"'spread'.*'more'"),
        ({"environment.tools.functions": ["TOOL:missing"]}, r"missing"),
        ({"environment.tools.timeout_s": 10}, r"environment\.timeout_s"),
        ({"environment.tools.replay": "nowhere"}, r"environment\.tools\.replay"),
        ({"environment.tools.record": "a", "environment.tools.replay": "b"}, r"exclude"),
        ({"model.scratch.words": []}, r"model\.chat_template.*model\.scratch\.words"),
        (
            {"environment.episode": "TOOL:OwnShop", "rollout.branches": 2},
            r"rollout\.branches = 2.*'OwnShop'.*rollout\.branches = 1",
        ),
    ],
)
def test_settings_of_tools_that_cannot_work_are_refused(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / "tool.py").write_text(TOOL + UNFIT)
    given = json.loads(json.dumps(settings).replace("TOOL", f"{tmp_path}/tool.py"))
    with pytest.raises(UserError, match=words):
        run(tmp_path, "refused", **given)
