"""Agents that are programs: their environment variables, their failures, and their processes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.agents.playing import renderer, whole_replies, with_agent

from sixfold.checks.environment import Environment
from sixfold.errors import UserError
from sixfold.types import Group, Task
from sixfold_serving.agents.command import CommandRunner

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
    of = renderer("qwen2.5-instruct")
    with Environment([lambda text, task: 1.0], error_budget=1.0) as environment:
        (found,) = with_agent(
            runner, [TASK], of, script=whole_replies(of), environment=environment, **options
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


NOISE = r"""
class Late:
    def __del__(self):
        raise OSError("at the very end")
late = Late()
def parse(text):
    raise ValueError(f"no call in {text!r}")
try:
    parse("a")
except ValueError:
    import atexit, traceback
    traceback.print_exc()
    for n in range(300):
        atexit.register(print, "[non-fatal] Tracing: request failed", n, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("script", "said", "place"),
    [
        ("raise SystemExit(1)", "ValueError: no call in 'a'", "in parse"),
        (
            "try:\n    parse('b')\nexcept ValueError as error:\n"
            "    raise RuntimeError('the step failed\\n  twice') from error",
            "RuntimeError: the step failed twice",
            "in <module>",
        ),
        (
            "raise ExceptionGroup('many', [KeyError('first'), ValueError('in the group')])",
            "many (2 sub-exceptions)",
            "in <module>",
        ),
    ],
)
def test_the_error_has_the_last_traceback_of_a_program(
    tmp_path: Path, script: str, said: str, place: str
) -> None:
    """Output after it, and exceptions that Python ignores at its end, are noise."""
    found, _ = group(NOISE + script, tmp_path)
    assert found.trajectories[0].reward is not None
    error = str(found.trajectories[0].reward.error)
    assert said in error and place in error and "exit code 1" in error
    assert "non-fatal" not in error and "very end" not in error


def test_a_traceback_on_standard_output_is_found(tmp_path: Path) -> None:
    script = """
import traceback
print("warning: deprecated", file=sys.stderr)
try:
    {}["tool"]
except KeyError:
    traceback.print_exc(file=sys.stdout)
    sys.exit(3)
"""
    found, _ = group(script, tmp_path)
    assert found.trajectories[0].reward is not None
    assert "exit code 3: KeyError: 'tool'" in str(found.trajectories[0].reward.error)


FAILS = "raise ValueError('the reply has no code')"


@pytest.mark.parametrize(
    ("script", "outcome", "reward"),
    [
        (FAILS, "length", 0.0),
        ("post('/reward', {'reward': 0.25})\n" + FAILS, "length", 0.25),
        ("post('/reward', {'reward': 0.25})", "length", 0.25),
        ("os.kill(os.getpid(), 9)", "error", None),
    ],
)
def test_a_program_that_fails_on_a_cut_reply_is_no_failure_of_the_run(
    tmp_path: Path, script: str, outcome: str, reward: float | None
) -> None:
    """The token limit cuts the reply before its end token, as with `rollout.max_new_tokens`."""
    found, _ = group(script, tmp_path, tokens=2)
    (played,) = found.trajectories
    assert played.turns[-1].finish_reason == "length" and played.outcome == outcome
    assert played.reward is not None and played.reward.value == reward
    failures = [event["failure"] for event in played.events if "failure" in event]
    assert ("no code" in "".join(failures)) == (FAILS in script)


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
