"""Training runs with an agent: dumps, evaluation, resume and replay."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.agents.playing import Here, talk
from tests.agents.test_agent_player import content
from tests.rollout.episodes import End, Observation, scripted, user
from tests.run.processes import metrics, tiny_recipe

from sixfold.commands import train
from sixfold.errors import UserError
from sixfold.files.folder import RunFolder
from sixfold.recipe.toml import parse_recipe
from sixfold.report.rollouts import read_rollouts
from sixfold.rollout.base import groups_in_order
from sixfold.rollout.driver import Driver
from sixfold.run.assemble import assemble
from sixfold.run.start import train_run
from sixfold.types import SamplingParams, Trajectory
from sixfold_serving.agents.player import AgentPlayer

PROGRAM = Path(__file__).parent / "program.py"
FUNCTION = '''
import urllib.request, json

def agent(task, base_url):
    """Two turns, and a sub-agent; the reward functions score the last reply."""
    ask(base_url, [{"role": "user", "content": "1+"}])
    messages = [{"role": "user", "content": task.prompt}]
    for _ in range(2):
        messages += [ask(base_url, messages), {"role": "user", "content": "1+1="}]


def ask(base_url, messages):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    request = urllib.request.Request(
        base_url + "/chat/completions", body, {"content-type": "application/json"}
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
'''


def recipe(folder: Path, command: str, **more: object) -> list[str]:
    settings = {
        "environment__agent__command": command,
        "rollout__prompts_per_step": 2,
        "rollout__samples_per_prompt": 2,
        "rollout__max_turns": 3,
        "data__heldout": 2,
        "eval__every": 2,
        "run__steps": 2,
        # Widths at which rows have the same bits in any company: agents decide which rows meet.
        "model__scratch__hidden_size": 64,
        "model__scratch__head_dim": 32,
        "model__scratch__intermediate_size": 64,
        **more,
    }
    return tiny_recipe(folder, **settings)


def played(folder: Path, step: int) -> list[Trajectory]:
    return [Trajectory.from_record(r) for r in read_rollouts(RunFolder(folder).rollout_file(step))]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_program_with_the_openai_client_is_trained(tmp_path: Path) -> None:
    """Its posted rewards, weight versions that grow with the steps, and held-out evaluation."""
    few = {"rollout__prompts_per_step": 1, "data__heldout": 1, "sft__steps": 0}
    flags = recipe(tmp_path, f"python '{PROGRAM}'", **few)
    assert train_run(parse_recipe('run.name = "here"', "test", flags)) == 0
    lines = metrics(tmp_path / "here")
    assert len(lines) == 2 and "heldout/accuracy" in lines[-1]
    assert all(line["rollout/turns_mean"] == 2 for line in lines)
    for step in (1, 2):
        for trajectory in played(tmp_path / "here", step):
            assert len(trajectory.turns) == 2 and trajectory.environment == "agent"
            assert {v for v, m in zip(trajectory.version, trajectory.mask, strict=True) if m} == {
                step - 1
            }
            assert trajectory.reward is not None and "ones" in trajectory.reward.parts


@pytest.mark.nightly
def test_episodes_through_the_endpoint_equal_those_of_the_player(tmp_path: Path) -> None:
    """Tokens, log-probs and versions from the real engine are equal bit for bit. Its sizes are
    those for which CPU kernels give a row the same bits beside any other rows (tests/conftest.py).
    """
    sizes = {"rollout__max_turns": 3, "rollout__max_episode_tokens": 100, "sft__steps": 0}
    sizes |= {"model__scratch__context": 160, "model__scratch__layers": 2}
    sizes |= {"model__scratch__hidden_size": 64, "model__scratch__intermediate_size": 64}
    sizes |= {"model__scratch__heads": 4, "model__scratch__kv_heads": 2}
    sizes |= {"model__scratch__head_dim": 16}
    flags = recipe(tmp_path, "tests.agents.playing:talk", **sizes)
    assembly = assemble(parse_recipe('run.name = "x"', "test", flags))
    tasks, params = assembly.tasks.train[:3], SamplingParams(12, stop_token_ids=(1,), seed=5)
    observations = [Observation(messages=(user(text),)) for text in ("1+1=", "2+2=")]
    player = replace(assembly.player, make=scripted(*observations, End(0.0)))
    agent = AgentPlayer(player, Here(talk("1+1=", "2+2="), "agent"), 1000)
    try:
        expected, found = (
            assembly.loop.run(groups_in_order(Driver(plays, params, 2).play(tasks, 0), tasks))
            for plays in (player, agent)
        )
    finally:
        assembly.loop.run(agent.close())
        assembly.close()
    assert [[content(t) for t in group.trajectories] for group in found] == [
        [content(t) for t in group.trajectories] for group in expected
    ]
    assert all(len(t.turns) == 3 for group in found for t in group.trajectories)


def test_an_agent_is_trained_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group of the task stream is trained once, with the versions of its tokens, and each
    episode has its conversations. Weights change while episodes run.
    """
    (tmp_path / "talks.py").write_text(FUNCTION)
    ahead = {"rollout__staleness": 1, "run__steps": 3, "sft__steps": 0}
    flags = recipe(tmp_path, f"{tmp_path / 'talks.py'}:agent", **ahead)
    made = parse_recipe('run.name = "ahead"', "test", flags)
    assert train_run(made, reward=lambda completion, task: len(completion) / 12) == 0
    played_groups = [played(tmp_path / "ahead", step) for step in (1, 2, 3)]
    tasks = [t.task_id for step in played_groups for t in step if t.sample == 0]
    assert len(tasks) == len(set(tasks)) == 6
    lines = metrics(tmp_path / "ahead")
    assert max(line["async/age_max"] for line in lines) <= 2 and "heldout/accuracy" in lines[1]
    # Tokens count in the step in which they were sampled, whenever they are trained.
    trained = sum(sum(t.mask) for step in played_groups for t in step)
    assert sum(line["rollout/tokens"] for line in lines) >= trained > 0
    for number, step in enumerate(played_groups):
        # The main conversation of two turns, and that of the sub-agent.
        assert sorted(len(t.turns) for t in step) == [1] * 4 + [2] * 4
        for t in step:
            sampled = [v for v, m in zip(t.version, t.mask, strict=True) if m]
            assert sampled == sorted(sampled) and number - 2 <= sampled[0] <= sampled[-1] <= number
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"runs an agent.*cannot be replayed"):
        train.run(["--replay-schedule", "ahead"])


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_with_an_agent_resumes_and_replays_exactly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sixfold.cli import main

    file = tmp_path / "my_agent.py"
    file.write_text(FUNCTION)
    flags = recipe(tmp_path, f"{file}:agent", run__steps=3, checkpoint__every=1)
    assert train_run(parse_recipe('run.name = "whole"', "test", flags)) == 0
    flags = recipe(tmp_path, f"{file}:agent", run__steps=2, checkpoint__every=1)
    assert train_run(parse_recipe('run.name = "part"', "test", flags)) == 0
    resumed = parse_recipe(
        'run.name = "part"', "test", recipe(tmp_path, f"{file}:agent", run__steps=3)
    )
    assert train_run(resumed, resume=tmp_path / "part") == 0
    whole, part = (
        [(t.tokens, t.logp, t.total_reward) for t in played(tmp_path / name, 3)]
        for name in ("whole", "part")
    )
    assert whole == part
    assert len(whole) == 2 * 2 * 2  # each episode has two trajectories
    shutil.rmtree(tmp_path / "part")
    assert main(["replay", str(tmp_path / "whole"), "--step", "3"]) == 0
