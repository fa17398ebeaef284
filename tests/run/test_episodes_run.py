"""Runs with environments of several turns: from the command line, from Python, and with
trajectories that travel as JSON.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

import sixfold
from sixfold.cli import main
from sixfold.environment.episode import Action, End, Observation
from sixfold.errors import UserError
from sixfold.files.folder import RunFolder
from sixfold.recipe.toml import parse_recipe
from sixfold.report.rollouts import read_rollouts
from sixfold.rollout.driver import Driver
from sixfold.run.assemble import assemble
from sixfold.run.start import train_run
from sixfold.types import Group, Task, Trajectory

from .processes import metrics, tiny_recipe

CALCULATOR = {
    "environment__episode": "calculator",
    "data__source": "calculator",
    "data__calculator__numbers": 2,
    "data__calculator__digits": 2,
    "data__limit": 1000,
    "rollout__max_turns": 3,
    "rollout__max_new_tokens": 8,
    "environment__preflight": 8,
    "eval__every": 1,
}


def weights(run: RunFolder, step: int) -> str:
    (file,) = (run.path / "checkpoints" / f"step-{step:06d}" / "model").glob("*.safetensors")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def untimed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics that do not depend on timing. Peaks do: they depend on which episodes overlap."""
    return [
        {
            k: v
            for k, v in line.items()
            if not k.startswith(("time/", "busy/", "sampler/"))
            and not k.endswith("_s")
            and "peak" not in k
        }
        for line in lines
    ]


def through_json(group: Group) -> Group:
    records = json.loads(json.dumps([t.to_record() for t in group.trajectories]))
    return Group(group.task, [Trajectory.from_record(record) for record in records])


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_of_episodes_and_the_same_run_with_trajectories_sent_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SFT plays worked solutions; pre-flight, evaluations and training play episodes. If
    trajectories travel between processes, nothing changes.
    """
    recipe = tiny_recipe(tmp_path, run__steps=2, sft__steps=40, **CALCULATOR)
    assert train_run(parse_recipe('run.name = "here"', "test", recipe)) == 0
    here = RunFolder(tmp_path / "here")
    lines = metrics(tmp_path / "here")
    assert len(lines) == 2 and all(1 <= m["rollout/turns_mean"] <= 3 for m in lines)
    assert all("heldout/accuracy" in m and m["rollout/episode_s"] >= 0 for m in lines)
    played = [Trajectory.from_record(r) for r in read_rollouts(here.rollout_file(2))]
    assert any(len(t.turns) > 1 and "o" in t.provenance for t in played)
    assert {t.environment for t in played} == {"calculator"}
    assert all(t.reward and t.reward.solved is not None for t in played)

    play = Driver.play

    async def sent(self: Driver, *args: Any, **options: Any) -> AsyncGenerator[Group, None]:
        async for group in play(self, *args, **options):
            yield through_json(group)

    monkeypatch.setattr(Driver, "play", sent)
    assert train_run(parse_recipe('run.name = "there"', "test", recipe)) == 0
    assert untimed(metrics(tmp_path / "there")) == untimed(lines)
    assert weights(RunFolder(tmp_path / "there"), 2) == weights(here, 2)


class Echo:
    """Two turns. The reward of the first is its length, the final reward is 1."""

    def __init__(self, task: Task) -> None:
        self.first = True

    async def start(self) -> Observation:
        return Observation(text="1+1=")

    async def step(self, action: Action) -> Observation | End:
        if not self.first:
            return End(reward=1.0)
        self.first = False
        again = ({"role": "user", "content": "2+2="},)
        return Observation(messages=again, reward=0.1 * len(action.text))  # type: ignore[arg-type]


@pytest.mark.nightly
@pytest.mark.slow
def test_python_gives_an_environment(tmp_path: Path) -> None:
    settings = dict(
        pair.split("=", 1)
        for pair in (
            "run.name=r", f"run.dir={tmp_path}", "run.steps=1", "run.threads=1", "sft.steps=0",
            "model.scratch.hidden_size=16", "model.scratch.layers=1", "model.scratch.heads=2",
            "model.scratch.kv_heads=1", "model.scratch.head_dim=8", "model.scratch.context=96",
            "rollout.max_new_tokens=8", "rollout.prompts_per_step=2", "environment.preflight=0",
            "rollout.samples_per_prompt=4", "data.heldout=8", "eval.every=0",
        )
    )  # fmt: skip
    folder = sixfold.train(environment=Echo, settings=settings)
    dump = RunFolder(folder).rollout_file(1)
    played = [Trajectory.from_record(record) for record in read_rollouts(dump)]
    assert {len(t.turns) for t in played} == {2} and {t.outcome for t in played} <= {
        "ended",
        "length",
    }
    assert {t.environment for t in played} == {f"{__name__}:Echo"}
    assert [t.total_reward for t in played] == pytest.approx(
        [1.0 + t.turns[0].reward for t in played]
    )
    (line,) = metrics(folder)
    assert line["reward/mean"] == pytest.approx(
        sum(t.total_reward or 0.0 for t in played) / len(played)
    )
    with pytest.raises(UserError, match="environment"):
        sixfold.train(environment=Task, settings=settings)


def test_the_kv_cache_has_room_for_the_longest_episode(tmp_path: Path) -> None:
    """An episode may take all tokens that its settings allow, and no more than the context."""
    long = {**CALCULATOR, "sft__steps": 0}
    for tokens, context, longest in ((40, 64, 40), (0, 64, 24), (1000, 64, None)):
        recipe = parse_recipe(
            'run.name = "r"',
            "test",
            tiny_recipe(tmp_path, rollout__max_episode_tokens=tokens, **long),
        )
        assembly = assemble(recipe)
        try:
            prompt = max(len(assembly.renderer.encode(t)) for t in assembly.tasks.train)
            expected = context if longest is None else min(context, prompt + longest)
            assert assembly.longest in (expected, min(context, expected + 1))
            groups = assembly.sample(assembly.rollout(), assembly.tasks.train[:4], seed=0)
            assert all(len(t.tokens) <= assembly.longest for g in groups for t in g.trajectories)
        finally:
            assembly.close()
    with pytest.raises(UserError, match=r"rollout\.max_episode_tokens"):
        parse_recipe(
            'run.name = "r"', "test", tiny_recipe(tmp_path, rollout__max_episode_tokens=3, **long)
        )


class Unfit:
    """Fails in `start`, or answers with more than fits.

    Attributes:
        fails: `start` raises.
    """

    fails = True

    def __init__(self, task: Task) -> None:
        self.task = task

    async def start(self) -> Observation:
        if self.fails:
            raise ValueError("no such world")
        return Observation(text="1+1=")

    async def step(self, action: Action) -> Observation | End:
        return Observation(messages=({"role": "user", "content": "1" * 200},))


@pytest.mark.parametrize("preflight", [0, 4])
def test_an_environment_that_always_fails_ends_the_run_with_its_error(
    tmp_path: Path, preflight: int
) -> None:
    recipe = tiny_recipe(tmp_path, environment__preflight=preflight, sft__steps=0)
    with pytest.raises(UserError, match=r"environment.*Unfit.*no such world"):
        sixfold.train(parse_recipe('run.name = "r"', "test", recipe), environment=Unfit)


def test_the_preflight_warns_of_observations_that_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unfit, "fails", False)
    recipe = tiny_recipe(tmp_path, environment__preflight=0, sft__steps=0, run__steps=1)
    folder = sixfold.train(parse_recipe('run.name = "r"', "test", recipe), environment=Unfit)
    notes = (folder / "notes.jsonl").read_text()
    assert "rollout.max_episode_tokens" in notes


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_with_branches_is_resumed_and_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The resumed step has the same branches, and its recorded rewards are found again."""
    settings = {
        **CALCULATOR,
        "sft__steps": 0,
        "eval__every": 0,
        "checkpoint__every": 1,
        "environment__preflight": 0,
        "rollout__samples_per_prompt": 4,
        "rollout__branches": 4,
        "environment__episode": f"{__name__}:Twice",
    }
    recipe = parse_recipe('run.name = "r"', "test", tiny_recipe(tmp_path, run__steps=2, **settings))
    run = RunFolder(tmp_path / "r")

    def played() -> list[tuple[Any, ...]]:
        records = read_rollouts(run.rollout_file(2))
        return [(r["task_id"], r["sample"], r["tokens"], r.get("branch")) for r in records]

    assert train_run(recipe) == 0
    whole = played()
    assert {branch and branch[0] for *_, branch in whole} == {None, 0}
    assert all(m["rollout/branched_frac"] == 0.75 for m in metrics(run.path))
    shutil.rmtree(run.checkpoints / "step-000002")
    assert train_run(recipe, resume=run.path) == 0
    assert played() == whole
    assert main(["replay", str(run.path), "--step", "2", "--rewards", "recomputed"]) == 0
    assert "agrees with its record" in capsys.readouterr().out


class Twice(Echo):
    """Two turns for any first reply. The final reward counts digits of the second reply."""

    async def step(self, action: Action) -> Observation | End:
        if not self.first:
            return End(reward=float(sum(c.isdigit() for c in action.text)))
        return await super().step(action)
