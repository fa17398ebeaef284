"""`sixfold replay` recomputes a recorded step and shows what has changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from sixfold.algorithm.composed import make_algorithm
from sixfold.algorithm.zoo import ZOO
from sixfold.cli import main
from sixfold.errors import UserError
from sixfold.files.folder import RunFolder
from sixfold.recipe.toml import parse_recipe
from sixfold.report.recorded_step import replayable, steps_text
from sixfold.report.replay import Line
from sixfold.report.rollouts import read_rollouts
from sixfold.run.replay import Replayed, replay
from sixfold.run.start import train_run
from sixfold.types import Task
from tests.run.processes import tiny_recipe

RECIPE = 'run.name = "r"\nenvironment.rewards = [{}]'
REWARD = """
def reward(completion, task):
    return float(len(completion) % 3)
"""
EPISODE = """
from sixfold.environment.episode import End, Observation


class Twice:
    \"\"\"Two replies. Each is rewarded for its length, and the second also at the end.\"\"\"

    def __init__(self, task):
        self.first = True

    async def start(self):
        return Observation(text="1+1=")

    async def step(self, action):
        if not self.first:
            return End(reward=float(len(action.text) % 2))
        self.first = False
        again = ({"role": "user", "content": "2+2="},)
        return Observation(messages=again, reward=0.1 * len(action.text), stops=("4",))
"""


def train(folder: Path, rewards: str = "", **overrides: Any) -> Path:
    settings = {"run__name": "r", "run__steps": 3, "sft__steps": 0, "data__heldout": 0}
    given = tiny_recipe(folder, **{**settings, "checkpoint__every": 1, **overrides})
    recipe = parse_recipe(RECIPE.format(rewards or '"arithmetic"'), "test", given)
    assert train_run(recipe) == 0
    return folder / "r"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five steps with a reward in a file, and checkpoints of steps 0, 2, 4 and 5."""
    folder = tmp_path_factory.mktemp("replay")
    (folder / "own.py").write_text(REWARD)
    rewards = f'"{folder / "own.py"}:reward"'
    return train(
        folder, rewards, sft__steps=2, run__steps=5, checkpoint__every=2, checkpoint__keep=9
    )


@pytest.fixture
def changed(run: Path) -> Iterator[dict[str, Path]]:
    """Files of the run that a test may change; they are restored afterwards."""
    files = {
        "dump": RunFolder(run).rollout_file(3),
        "metrics": run / "metrics.jsonl",
        "reward": run.parent / "own.py",
    }
    before = {name: path.read_bytes() for name, path in files.items()}
    yield files
    for name, path in files.items():
        path.write_bytes(before[name])


def verdicts(result: Replayed) -> dict[str, str]:
    return {line.what.partition(" (")[0]: line.verdict for line in result.lines}


def assert_equal(result: Replayed) -> None:
    """All numbers agree bit for bit, and the important ones are listed."""
    assert result.agrees and not result.samples
    found = verdicts(result)
    assert set(found.values()) == {"equal"}
    assert {"reward", "|advantage|", "train/loss", "train/grad_norm"} <= found.keys()


def rewrite(path: Path, records: list[dict[str, Any]]) -> None:
    lines = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    path.write_bytes(zstandard.ZstdCompressor().compress(lines))


def state_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(p): (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else b"")
        for p in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize(
    "older",
    [
        {"rollout__staleness": 2},
        {"replay__share": 0.5, "algorithm__correction": "decoupled"},
    ],
)
def test_steps_with_samples_of_older_weights_agree(tmp_path: Path, older: dict[str, Any]) -> None:
    (tmp_path / "own.py").write_text(REWARD)
    rewards = f'"{tmp_path / "own.py"}:reward"'
    folder = train(tmp_path, rewards, trainer__learning_rate=0.01, checkpoint__keep=9, **older)
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[2])["sync/staleness"] >= 1
    assert_equal(replay(folder, 3))


@pytest.mark.nightly
def test_every_recorded_step_equals_its_replay_and_nothing_is_written(run: Path) -> None:
    """Steps 1, 3 and 5 follow a checkpoint. For steps 2 and 4, another step is replayed first."""
    with RunFolder(run):  # another process trains
        before = state_of(run)
        for step, checkpoint in ((3, "step-000002"), (4, "step-000002")):
            result = replay(run, step)
            assert result.checkpoint == checkpoint
            assert_equal(result)
    assert state_of(run) == before


KINDS: dict[str, dict[str, Any]] = {
    "episodes": {"environment__episode": "EPISODE", "rollout__max_turns": 2},
    "ppo": {"algorithm__name": "ppo"},
    "remax": {"algorithm__name": "remax"},
    "dapo": {"algorithm__name": "dapo"},
    "reference": {"algorithm__beta": 0.1, "reference__reset_every": 2, "checkpoint__every": 3},
    "truncated": {"rollout__top_p": 0.9, "rollout__stop": '["3"]'},
}


@pytest.mark.mostly_nightly(3)
@pytest.mark.parametrize("kind", KINDS)
def test_replay_of_every_kind_of_run(tmp_path: Path, kind: str) -> None:
    (tmp_path / "twice.py").write_text(EPISODE)
    settings = {
        key: f"{tmp_path / 'twice.py'}:Twice" if value == "EPISODE" else value
        for key, value in KINDS[kind].items()
    }
    folder = train(tmp_path, **settings)
    assert_equal(replay(folder, 3))


def test_a_reward_that_changed_shows_the_samples_whose_reward_differs(
    changed: dict[str, Path], run: Path
) -> None:
    records = read_rollouts(changed["dump"])
    changed["reward"].write_text(REWARD.replace("% 3)", "% 3) + (completion[:1] == '1')"))
    wanted = {(r["task_id"], str(r["sample"])) for r in records if r["text"][:1] == "1"}
    assert 0 < len(wanted) < len(records)
    result = replay(run, 3)
    assert {(s.task_id, s.sample) for s in result.samples} == wanted
    for sample in result.samples:
        assert sample.what == "reward"
        assert (sample.recomputed or 0.0) - (sample.recorded or 0.0) == 1.0
    found = verdicts(result)
    assert found.pop("reward") == "DIFFERS" and not result.agrees
    # Each stage starts from the record, so that only the reward differs.
    assert set(found.values()) == {"equal"}
    follows = verdicts(replay(run, 3, new_rewards=True))
    assert follows["|advantage|"] == follows["train/grad_norm"] == "DIFFERS"


def test_a_changed_record_is_located(changed: dict[str, Path], run: Path) -> None:
    records = read_rollouts(changed["dump"])
    records[2]["advantage"] += 0.5
    rewrite(changed["dump"], records)
    lines = [json.loads(line) for line in changed["metrics"].read_text().splitlines()]
    lines[2]["train/grad_norm"] *= 1.01
    changed["metrics"].write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = replay(run, 3)
    assert [(s.task_id, s.sample, s.what) for s in result.samples] == [
        (records[2]["task_id"], str(records[2]["sample"]), "advantage")
    ]
    wrong = [what for what, verdict in verdicts(result).items() if verdict == "DIFFERS"]
    assert wrong == ["|advantage|", "train/grad_norm"]
    on_the_way = replay(run, 4)
    assert on_the_way.agrees
    assert on_the_way.earlier == "train/grad_norm of step 3"


def test_replay_exit_codes_and_output(
    changed: dict[str, Path], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = changed["metrics"].read_text().splitlines()
    changed["metrics"].write_text("\n".join(lines[:2]) + "\n")  # the line of step 3 is lost
    assert main(["replay", str(run), "--step", "3"]) == 0
    assert "not recorded" in capsys.readouterr().out
    changed["reward"].write_text(REWARD.replace("3", "2"))
    assert main(["replay", str(run), "--step", "3"]) == 1
    assert "DIFFERS" in capsys.readouterr().out
    changed["dump"].write_bytes(b"broken")
    assert main(["replay", str(run), "--step", "3"]) == 2
    assert str(changed["dump"]) in capsys.readouterr().err
    assert main(["replay", str(run), "--step", "7"]) == 2
    said = capsys.readouterr().err
    assert "log.rollouts_every" in said and "1 to 5" in said


def test_a_step_without_its_checkpoint_says_which_steps_can_be_replayed(tmp_path: Path) -> None:
    folder = train(tmp_path, run__steps=4, checkpoint__keep=1, checkpoint__every=3)
    with pytest.raises(UserError, match=r"checkpoint\.keep.*replayed: none"):
        replay(folder, 2)
    RunFolder(folder).rollout_file(3).unlink()
    with pytest.raises(UserError, match=r"log\.rollouts_every"):
        replay(folder, 3)


def own_reward(completion: str, task: Task) -> float:
    return 1.0


def test_a_reward_given_from_python_is_refused(tmp_path: Path) -> None:
    given = tiny_recipe(tmp_path, run__steps=1, sft__steps=0, data__heldout=0)
    assert train_run(parse_recipe('run.name = "r"', "test", given), reward=own_reward) == 0
    with pytest.raises(UserError, match=r"own_reward.*environment\.rewards"):
        replay(tmp_path / "r", 1)


def test_an_algorithm_given_from_python_is_refused(tmp_path: Path) -> None:
    """This includes an algorithm made of Sixfold's parts, because its row is not on disk."""
    given = tiny_recipe(tmp_path, run__steps=1, sft__steps=0, data__heldout=0)
    recipe = parse_recipe('run.name = "r"', "test", given)
    assert train_run(recipe, algorithm=make_algorithm(ZOO["reinforce"], 1)) == 0
    with pytest.raises(UserError, match=r"algorithm Composed.*algorithm\.name"):
        replay(tmp_path / "r", 1)


def test_steps_that_can_be_replayed() -> None:
    assert replayable({1, 2, 4, 5, 6}, [0, 4]) == [1, 2, 5, 6]
    assert steps_text([1, 2, 5]) == "1 to 2, 5"


def test_lines_of_non_finite_numbers() -> None:
    from sixfold.report.replay import compare_metrics

    lines = compare_metrics(
        {"a": None, "b": 1.0, "c": 1.0},
        {"a": float("nan"), "b": None, "c": 1.000001},
        ["a", "b", "c"],
    )
    assert [line.verdict for line in lines] == ["equal", "DIFFERS", "rounding"]
    assert lines[1] == Line("b", 1.0, None, None, "DIFFERS")
