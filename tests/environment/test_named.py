"""A file or module of the user that raises anything while it is loaded is refused in one line.

`sys.exit(0)` and `pytest.skip` are no `Exception`: without care, the command ends with code 0.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sixfold.checks.environment import Environment
from sixfold.cli import main
from sixfold.data.sources import load_tasks
from sixfold.environment.episodes import load_episode
from sixfold.environment.named import MOVED
from sixfold.environment.rewards import RewardFunction, load_reward
from sixfold.environment.sampled import Sampled
from sixfold.environment.tools.load import load_tools
from sixfold.errors import UserError
from sixfold.plugins import module_spec
from sixfold.recipe.schema import DataConfig
from sixfold.types import Group, Task, Trajectory
from sixfold_environments.web.settings import WebSettings
from sixfold_environments.web.user_site import Web
from sixfold_serving.agents.function import AGENTS
from sixfold_serving.agents.function_runner import FunctionRunner

ENDS = {
    "exit 0": "import sys\nsys.exit(0)\n",
    "exit text": "raise SystemExit('usage: x')\n",
    "own": "class Stop(BaseException): ...\nraise Stop('no board')\n",
    "cancelled": "import asyncio\nraise asyncio.CancelledError\n",
    "generator": "raise GeneratorExit\n",
    "group": "raise BaseExceptionGroup('two', [KeyError('a'), SystemExit(0)])\n",
}


def loaded_web(spec: str) -> Any:
    return Web.with_settings(WebSettings(site=spec, goals=(spec,)))


LOADERS: dict[str, Callable[[str], Any]] = {
    "reward": load_reward,
    "environment": load_episode,
    "tool": lambda spec: load_tools([spec], {}),
    "agent": AGENTS.load,
    "site": loaded_web,
    "trl": lambda spec: load_episode(f"trl:{spec}"),
    "openenv": lambda spec: load_episode(f"openenv:{spec}"),
    "gymnasium": lambda spec: load_episode(f"gymnasium:{spec}"),
    "verifiers": lambda spec: load_episode(f"verifiers:{spec}"),
    "gymnasium data": lambda spec: load_tasks(
        DataConfig(source=f"gymnasium:{spec}"), seed=0, rewards=()
    ),
}


@pytest.mark.parametrize("ending", ENDS)
@pytest.mark.parametrize("kind", LOADERS)
def test_whatever_a_file_raises_names_the_file(kind: str, ending: str, tmp_path: Path) -> None:
    pytest.importorskip("gymnasium") if kind.startswith("gymnasium") else None
    pytest.importorskip("verifiers") if kind == "verifiers" else None
    file = tmp_path / "my_part.py"
    file.write_text(ENDS[ending])
    with pytest.raises(UserError, match=r"my_part\.py") as caught:
        LOADERS[kind](f"{file}:thing")
    assert "sys.exit" in str(caught.value) if ending.startswith("exit") else True


@pytest.mark.parametrize("kind", ["reward", "environment", "tool", "agent", "trl", "openenv"])
def test_whatever_a_module_raises_names_the_module(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"ending_{kind}.py").write_text(ENDS["exit 0"])
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=rf"ending_{kind}.*sys\.exit\(0\).*__main__"):
        LOADERS[kind](f"ending_{kind}:thing")


def test_ctrl_c_during_an_import_stays_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_reward(f"{tmp_path / 'slow.py'}:f")


def test_making_an_environment_may_raise_anything(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(
        "import sys\nclass Game:\n    def __init__(self): sys.exit(0)\n"
        "    def reset(self, **row): ...\n    def act(self) -> str:\n        '''Act.'''\n"
    )
    with pytest.raises(UserError, match=r"made\.py:Game cannot be made.*sys\.exit\(0\)"):
        load_episode(f"trl:{tmp_path / 'made.py'}:Game")


def test_an_agent_in_its_process_and_named_rewards_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "my_part.py"
    file.write_text(ENDS["exit 0"])
    with pytest.raises(UserError, match=r"agent file .*my_part\.py.*sys\.exit\(0\)"):
        FunctionRunner(f"{file}:play")
    made = Trajectory.one_turn("t", 0, [1], [2], [0.0], [0], "stop", text="a")
    with (
        Environment([f"{file}:f"], timeout_s=60.0) as environment,
        pytest.raises(UserError, match=r"reward file .*my_part\.py.*sys\.exit\(0\)"),
    ):
        environment.score([Group(Task("t", "?"), [made])])


@pytest.mark.parametrize("verb", ["train", "audit"])
@pytest.mark.parametrize("setting", ["environment.episode", "environment.tools.functions"])
def test_a_command_ends_with_code_2_and_the_name_of_the_file(
    verb: str, setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my_part.py"
    file.write_text(ENDS["exit 0"])
    named = f'"{file}:thing"' if setting.endswith("episode") else f'["{file}:thing"]'
    recipe = tmp_path / "recipe.toml"
    lines = ['run.name = "r"', f'run.dir = "{tmp_path}"', f"{setting} = {named}"]
    if setting.endswith("functions"):
        lines.append('environment.episode = "tools"')
    lines += ["model.scratch.hidden_size = 16", "model.scratch.layers = 1"]
    recipe.write_text("\n".join(lines))
    assert main([verb, str(recipe)]) == 2
    said = capsys.readouterr().err
    assert "my_part.py" in said and "sys.exit(0)" in said


def test_a_reward_in_this_process_that_exits_is_a_failed_check() -> None:
    def leaves(completion: str, task: Task) -> float:
        raise SystemExit(0)

    made = Trajectory.one_turn("t", 0, [1], [2], [0.0], [0], "stop", text="a")
    with Environment([leaves], error_budget=1.0) as environment:
        environment.score([Group(Task("t", "?"), [made])])
    assert made.reward is not None and made.reward.error == "leaves: SystemExit: 0"
    with pytest.raises(SystemExit):  # outside of a check it is the caller's
        RewardFunction("leaves", leaves).scores(["a"], Task("t", "?"), Sampled([], [[]], [], ""))


def test_a_module_that_has_moved_is_named_with_its_new_place(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Write sixfold_environments\.maths\.answers:math_grade"):
        load_reward("sixfold.environment.maths.answers:math_grade")
    (tmp_path / "mine.py").write_text("from sixfold.interop.environments.spec import parsed")
    with pytest.raises(UserError, match=r"Import sixfold_environments\.adapters\S*"):
        load_reward(f"{tmp_path}/mine.py:f")
    for old, new in MOVED.items():
        left = module_spec(old)  # an update leaves folders of bytecode behind, which have no file
        assert module_spec(new) is not None and (left is None or left.origin is None)
