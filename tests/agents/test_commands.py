"""Agents that are programs: their environment variables, their failures, and their processes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.agents.playing import renderer, with_agent

from sixfold.agents.command import CommandRunner
from sixfold.environment.scorer import Environment
from sixfold.errors import UserError
from sixfold.types import Group, Task

TASK = Task("a", "1+1=?", answer=2, columns={"level": 3})
ASK = """
import json, os, subprocess, sys, time, urllib.request
def post(path, body):
    url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + path
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
task = json.loads(os.environ["SIXFOLD_TASK"])
say = [{"role": "user", "content": task["prompt"]}]
reply = post("/v1/chat/completions", {"model": "m", "messages": say})
"""


def group(script: str, folder: Path, **options: Any) -> tuple[Group, Environment]:
    """The group of one task whose episode a script plays."""
    file = folder / "agent.py"
    file.write_text(ASK + script)
    runner = CommandRunner(f"python '{file}'", options.pop("answers", True))
    with Environment([lambda text, task: 1.0], error_budget=1.0) as environment:
        (found,) = with_agent(
            runner, [TASK], renderer("qwen2.5-instruct"), environment=environment, **options
        )
    return found, environment


def test_a_program_gets_the_task_and_may_post_a_reward(tmp_path: Path) -> None:
    script = f"""
json.dump([task, sys.executable, os.environ["NO_PROXY"]], open({str(tmp_path / "seen")!r}, "w"))
post("/reward", {{"reward": 0.5}})
"""
    found, _ = group(script, tmp_path, samples=2)
    assert [t.total_reward for t in found.trajectories] == [0.5, 0.5]
    task, python, direct = json.loads((tmp_path / "seen").read_text())
    assert "127.0.0.1" in direct.split(",")
    assert (task["id"], task["prompt"], task["answer"]) == ("a", "1+1=?", 2)
    assert task["columns"] == {"level": 3}
    assert Path(python).parent == Path(sys.executable).parent
    group(script, tmp_path, answers=False)
    task, *_ = json.loads((tmp_path / "seen").read_text())
    assert not {"answer", "columns"} & set(task)


def test_the_error_has_the_exit_code_and_the_last_output_of_a_program(tmp_path: Path) -> None:
    found, _ = group("raise SystemExit('the shop is shut')", tmp_path)
    (failed,) = found.trajectories
    assert failed.outcome == "error" and len(failed.turns) == 1
    assert failed.reward is not None and failed.reward.value is None
    assert "exit code 1" in str(failed.reward.error) and "the shop is shut" in str(
        failed.reward.error
    )


def test_the_error_names_the_signal_that_killed_a_program(tmp_path: Path) -> None:
    found, _ = group("os.kill(os.getpid(), 9)", tmp_path)
    (failed,) = found.trajectories
    assert failed.reward is not None and "SIGKILL" in str(failed.reward.error)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs subreapers")
def test_the_children_of_a_program_end_with_it(tmp_path: Path) -> None:
    """Also children in their own session: at the time limit, and if the program ends by itself."""
    pids = tmp_path / "pids"
    script = f"""
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                         start_new_session=True)
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
"""
    found, _ = group(script + "time.sleep(60)", tmp_path, timeout_s=3.0)
    (failed,) = found.trajectories
    assert failed.outcome == "timeout" and len(failed.turns) == 1
    assert "environment.agent.timeout_s" in str(failed.reward and failed.reward.error)
    assert not [pid for pid in pids.read_text().split() if alive(pid)]
    found, _ = group(script, tmp_path)
    assert found.trajectories[0].total_reward == 1.0
    assert not [pid for pid in pids.read_text().split() if alive(pid)]


def alive(pid: str) -> bool:
    """True if a process still runs after two seconds."""
    until = time.monotonic() + 2
    try:
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            if time.monotonic() > until:
                return True
            time.sleep(0.02)
    except (FileNotFoundError, ProcessLookupError):  # it ends while its file is read
        pass
    return False


@pytest.mark.parametrize("command", ["no-such-program x", "python 'open", "  "])
def test_a_command_that_cannot_run_is_refused(command: str) -> None:
    with pytest.raises(UserError, match=r"environment\.agent\.command"):
        CommandRunner(command)
