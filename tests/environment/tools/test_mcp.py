"""Tools of MCP servers: real child processes that answer, hang, die, or write invalid output."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

from test_tool_episode import TASK, calls, contents, kinds, play

from sixfold.environment.tools.episode import ToolEpisode
from sixfold.environment.tools.observation import ToolsFailed
from sixfold.environment.tools.setup import ToolSetup
from sixfold.errors import UserError
from sixfold_environments import mcp
from sixfold_environments.mcp import McpServer

SERVER = Path(__file__).parent / "mcp_server.py"


def command(how: str) -> str:
    return f"{sys.executable} {SERVER} {how}"


@pytest.fixture(scope="module")
def server() -> Iterator[McpServer]:
    made = McpServer(command("good"))
    yield made
    made.close()
    assert not made._thread.is_alive()
    deadline = time.monotonic() + 10
    while children() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not children(), "the server ended with the run"


def children() -> list[str]:
    """Behaviours of the servers that run as child processes of this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if str(SERVER) in words and int(parent) == os.getpid():
            found.append(words[-2])
    return found


def episode(server: McpServer, **more: Any) -> ToolEpisode:
    made = ToolEpisode(TASK)
    made.setup = ToolSetup(**{"tools": tuple(server.tools()), "timeout_s": 30.0, **more})
    return made


def test_the_tools_of_a_server_are_described_and_called(server: McpServer) -> None:
    first, second = play(
        episode(server), calls(("add", {"a": 2, "b": 3}), ("count", {"name": "x"}))
    )
    shown = {one["function"]["name"]: one["function"] for one in first.tools}
    assert shown["add"]["description"] == "Add two numbers."
    assert shown["add"]["parameters"]["required"] == ["a", "b"]
    assert contents(second)[0] == "5" and contents(second)[1].startswith("x ")


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (("add", "{"), "bad_json"),
        (("add", "[]"), "bad_json"),
        (("add", '{"a": NaN, "b": 1}'), "bad_json"),
        (("add", {"a": 1}), "missing_argument"),
        (("add", {"a": 1, "b": "x"}), "wrong_argument"),
        (("count", '{"name": "\\ud800"}'), "bad_json"),
        (("fail", {}), "exception"),
        (("wait", {}), "timeout"),
    ],
)
def test_errors_of_a_server_are_structured(
    server: McpServer, call: tuple[str, Any], kind: str
) -> None:
    limit = 1.0 if kind == "timeout" else 30.0
    _, seen = play(episode(server, timeout_s=limit), calls(call))
    assert kinds(seen) == [kind]


def test_a_server_that_dies_is_restarted_once_and_named_in_errors() -> None:
    made = McpServer(command("good"))
    try:
        played = episode(made)
        _, died, again = play(played, calls(("die", {})), calls(("add", {"a": 1, "b": 1})))
        assert kinds(died) == ["exception"] and "mcp_server.py" in contents(died)[0]
        assert contents(again) == ["2"]
        with pytest.raises(ToolsFailed, match=r"mcp_server\.py"):
            play(played, calls(("die", {})))
        with pytest.raises(ToolsFailed, match=r"mcp_server\.py"):
            play(episode(made), calls(("add", {"a": 1, "b": 1})))
    finally:
        made.close()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (command("ends"), "no licence found"),
        (command("hangs"), "no answer within"),
        (command("junk"), "no message: 'hello, I am no server'"),
        ("/no/such/program", "No such file"),
        ("http://127.0.0.1:9/mcp", "onnect"),
    ],
)
def test_a_server_that_does_not_start_is_refused_and_named(
    spec: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"no answer within": 1.0, "no message: 'hello, I am no server'": 5.0}
    slow = words in limits
    monkeypatch.setattr(mcp, "START_S", limits.get(words, 30.0))
    start = time.monotonic()
    with pytest.raises(UserError, match=r"environment\.tools\.mcp") as refused:
        McpServer(spec)
    assert spec in str(refused.value) and words in str(refused.value)
    assert not slow or "no answer within" in str(refused.value)
    assert time.monotonic() - start < 30
    assert set(children()) <= {"good"}, "only the server of the other tests is left"


def test_lines_that_are_no_messages_do_not_disturb_a_server_or_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = McpServer(command("chatty"))
    try:
        _, seen = play(episode(made), calls(("add", {"a": 2, "b": 3})))
        assert contents(seen) == ["5"]
    finally:
        made.close()
    assert "no message" in made._connection.unreadable  # type: ignore[union-attr]
    assert caplog.text == ""


KILLED = """
import os, signal, sys
from sixfold_environments.mcp import McpServer
made = McpServer(sys.argv[1])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("ending", ["closed", "killed"])
def test_what_a_server_starts_in_a_session_of_its_own_ends_with_the_run(
    ending: str, tmp_path: Path
) -> None:
    noted = tmp_path / "pid"
    if ending == "closed":
        McpServer(f"{command('starts')} {noted}").close()
    else:
        words = [sys.executable, "-c", KILLED, f"{command('starts')} {noted}"]
        assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
    pid, deadline = int(noted.read_text()), time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_server_that_stops_gives_timeouts_and_ends_with_the_run() -> None:
    made = McpServer(command("good"))
    try:
        played = episode(made, timeout_s=1.0)
        _, first, second = play(played, calls(("stop", {})), calls(("add", {"a": 1, "b": 1})))
        assert kinds(first) == kinds(second) == ["timeout"]
        assert (first.tool_errors, second.tool_errors) == (1, 1)
    finally:
        made.close()
    assert set(children()) <= {"good"} and len(children()) <= 1, "the stopped server was killed"


@pytest.mark.mostly_nightly(1)
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("wrong_type", "integr"),
        ("missing_reference", "'#/$defs/Number' does not exist"),
        ("wrong_pattern", "pattern"),
    ],
)
def test_an_invalid_schema_is_refused_with_the_server_and_the_tool(how: str, words: str) -> None:
    with pytest.raises(UserError, match=r"environment\.tools\.mcp") as refused:
        McpServer(command(how))
    told = str(refused.value)
    assert command(how) in told and "'add'" in told and words in told
    assert "\n" not in told
    assert set(children()) <= {"good"}, "the refused server has ended"


@pytest.mark.slow
def test_a_server_at_a_url_is_called() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, SERVER, "http", str(port)], stderr=subprocess.DEVNULL
    )
    try:
        made = connected(f"http://127.0.0.1:{port}/mcp")
        try:
            _, seen = play(episode(made), calls(("add", {"a": 2, "b": 3})))
            assert contents(seen) == ["5"]
            process.kill()
            process.wait()
            with pytest.raises(ToolsFailed, match=str(port)):
                play(episode(made), calls(("add", {"a": 2, "b": 3})))
        finally:
            made.close()
    finally:
        process.kill()
        process.wait()


def connected(url: str) -> McpServer:
    for _ in range(100):
        try:
            return McpServer(url)
        except UserError:
            time.sleep(0.3)
    raise AssertionError("the server did not start")
