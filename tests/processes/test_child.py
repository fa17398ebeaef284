"""The contract of `Child`, on a program that can misbehave in every way."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sixfold.processes import child as child_module
from sixfold.processes.child import Child, ChildEnded, ChildSilent, Message, RequestFailed
from sixfold.processes.program import ANSWER, HEADER, MARK, NOTE

FILE = str(Path(__file__).with_name("answers.py"))
TIMEOUT_S = 20.0
Start = Callable[..., Child]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Child] = []

    def run(target: str = FILE, **settings: object) -> Child:
        started.append(Child(target, **settings))  # type: ignore[arg-type]
        return started[-1]

    yield run
    for child in started:
        child.close(grace_s=0.0)


def ask(child: Child, request: str | bytes) -> bytes:
    child.send(request if isinstance(request, bytes) else request.encode(), TIMEOUT_S)
    return child.receive(TIMEOUT_S)


def messages(child: Child) -> Iterator[Message]:
    """Until the last answer has come."""
    while child.owed:
        select.select([child.replies], [], [], TIMEOUT_S)
        yield from child.arrived()


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def end_soon(pids: list[int], within_s: float = 5.0) -> bool:
    until = time.monotonic() + within_s
    while any(running(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(running(pid) for pid in pids)


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("settings", [{"target": "answers"}, {"python": sys.executable}])
def test_each_request_gets_its_own_answer(
    start: Start, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By module with our import path, and by file under an interpreter with its own."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    child = start(**settings)
    assert [ask(child, f"echo {n}") for n in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
    assert ask(child, "echo ") == b"" and child.owed == 0
    for n in range(3):
        child.send(f"echo {n}".encode())
    assert child.owed == 3 and child.receive(TIMEOUT_S) == b"2"
    child.close()
    child.close()
    assert child.process.returncode == 0


def test_a_request_may_have_several_answers_and_notes_before_each(start: Start) -> None:
    child = start()
    child.post(b"several a b c", answers=3)
    assert list(messages(child)) == [
        Message(is_answer, text)
        for word in (b"a", b"b", b"c")
        for is_answer, text in ((False, b""), (True, word))
    ]


@pytest.mark.slow
def test_messages_that_have_been_taken_are_not_waited_for(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a signal, an event loop may call its reader twice."""
    child = start()
    child.send(b"echo", TIMEOUT_S)
    assert len([*messages(child)]) == 1

    def read(descriptor: int, size: int) -> bytes:
        raise AssertionError("it waits")

    monkeypatch.setattr(child_module.os, "read", read)
    assert [*child.arrived()] == []


def test_messages_of_many_megabytes(start: Start) -> None:
    text = os.urandom(6 << 20)
    assert ask(start(), b"echo " + text) == text


def forged(number: int, pid: int, kind: bytes = ANSWER, length: int = 1) -> bytes:
    return HEADER.pack(MARK, kind, pid, number, length) + b"x"


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize(
    "junk",
    [
        pytest.param(lambda pid: b"a library printed this to the pipe\n", id="text"),
        pytest.param(lambda pid: forged(2, pid), id="earlier"),
        pytest.param(lambda pid: forged(4, pid), id="later"),
        pytest.param(lambda pid: forged(3, pid, NOTE, 1 << 30), id="long"),
        pytest.param(lambda pid: forged(3, pid, b"?"), id="kind"),
    ],
)
def test_malformed_reply_ends_the_process_after_earlier_replies(
    start: Start, junk: Callable[[int], bytes]
) -> None:
    child = start(reply_limit=1 << 24)
    ask(child, "echo x")
    child.post(b"write " + junk(child.pid), answers=2)
    seen: list[bytes] = []
    with pytest.raises(ChildEnded, match="sent"):
        for message in messages(child):
            seen.append(message.body)
    assert seen == [b"before"]


@pytest.mark.slow
def test_unrequested_answer_is_refused(start: Start) -> None:
    child = start(keeps_output=True)
    ask(child, "echo x")
    child.send(b"write " + forged(3, child.pid))
    seen: list[bytes] = []
    with pytest.raises(ChildEnded, match="another request"):
        while True:
            for message in child.arrived():
                seen.append(message.body)
    assert seen == [b"before"]
    child = start(keeps_output=True)
    assert ask(child, "several a b") == b"a"
    with pytest.raises(RequestFailed, match="more answers than the request asks for"):
        ask(child, "echo x")


def test_messages_of_other_processes_are_ignored(start: Start) -> None:
    child = start()
    ask(child, "echo x")
    assert ask(child, "fork mine") == b"mine" and ask(child, "echo next") == b"next"
    child.post(b"write " + forged(4, child.pid + 1), answers=2)
    assert [m.body for m in messages(child)] == [b"before", b"after"]


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize(
    ("request_", "how"),
    [
        ("leave 3", "^ended with exit code 3$"),
        (f"die {signal.SIGSEGV}", "^was killed by SIGSEGV$"),
        (f"die {signal.SIGKILL}", "^was killed by SIGKILL; the machine may be out of memory$"),
        (f"die {signal.SIGRTMIN + 3}", f"^was killed by signal {signal.SIGRTMIN + 3}$"),
    ],
)
def test_end_of_the_process_is_reported_with_its_cause(
    start: Start, request_: str, how: str
) -> None:
    child = start()
    child.send(b"echo before")
    child.send(request_.encode())
    with pytest.raises(ChildEnded, match=how):
        child.receive(TIMEOUT_S)
    child.send(b"x" * (1 << 20))  # to nobody
    with pytest.raises(ChildEnded, match=how):
        child.receive(TIMEOUT_S)


@pytest.mark.slow
def test_a_closed_pipe_is_a_death(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "STOP_TIMEOUT_S", 0.2)
    with pytest.raises(ChildEnded, match="closed its pipe"):
        ask(start(), "close")


def test_last_output_is_kept(start: Start) -> None:
    child = start(keeps_output=True)
    with pytest.raises(ChildEnded):
        ask(child, "leave 1")
    assert child.last_words() == "  first line\n  last line"


@pytest.mark.slow
def test_an_exception_is_the_answer(start: Start) -> None:
    child = start(keeps_output=True)
    with pytest.raises(RequestFailed, match="ValueError: it is survived"):
        ask(child, "report it is survived")
    assert ask(child, "echo x") == b"x"
    with pytest.raises(RequestFailed, match="ValueError: it ends the program"):
        ask(child, "fail it ends the program")
    with pytest.raises(ChildEnded, match="exit code 1"):
        ask(child, "echo x")
    with pytest.raises(RequestFailed, match="No module named 'no_such_program'"):
        ask(start("no_such_program", keeps_output=True), "echo x")


@pytest.mark.slow
def test_every_wait_has_a_limit_that_notes_extend(start: Start) -> None:
    child = start()
    assert ask(child, "echo x") == b"x"  # it has started
    child.send(b"beats")
    assert child.receive(0.4) == b""  # after 0.6 s
    child.send(b"silence")
    with pytest.raises(ChildSilent, match=r"0\.1 s"):
        child.receive(0.1)
    with pytest.raises(ChildSilent, match=r"0\.1 s"):
        child.send(b"x" * (1 << 20), 0.1)  # more than the pipe holds


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot find orphans")
@pytest.mark.parametrize("way", ["close", "terminate", "die", "kill"])
def test_child_processes_end_with_the_worker(
    start: Start, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = start()
    pids = [int(pid) for pid in ask(child, "deaf" if way == "die" else "deaf busy").split()]
    assert pids[0] == child.pid and all(running(pid) for pid in pids)
    if way == "kill":
        os.kill(child.pid, signal.SIGKILL)
    elif way == "die":
        child.send(f"die {signal.SIGKILL}".encode())
    elif way == "terminate":
        child.close(grace_s=0.0)
        assert not any(running(pid) for pid in pids)
    else:
        monkeypatch.setattr(child.process, "terminate", None)
        child.close(grace_s=5.0)  # the supervisor sees by itself that the pipe is closed
        assert not any(running(pid) for pid in pids)
    assert end_soon(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems name it differently")
@pytest.mark.parametrize("way", ["close", "kill"])
def test_no_shared_memory_is_left(start: Start, tmp_path: Path, way: str) -> None:
    """Python's tracker deletes it, if it lives longer than the process that has made it."""
    program = tmp_path / "holds.py"
    program.write_text(
        "from multiprocessing.shared_memory import SharedMemory\n"
        "def serve(requests):\n"
        "    for body in requests:\n"
        "        memory = SharedMemory(create=True, size=4096)\n"
        "        requests.answer(memory.name.encode())\n"
        "    import time; time.sleep(60)\n"
    )
    child = start(str(program))
    place = Path("/dev/shm") / ask(child, "x").decode()
    assert place.exists()
    if way == "kill":
        os.kill(child.pid, signal.SIGKILL)
    child.close(grace_s=0.0)
    assert not place.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux sends a signal")
def test_it_ends_with_a_killed_supervisor(start: Start) -> None:
    child = start()
    pid, *others = [int(pid) for pid in ask(child, "deaf busy").split()]
    child.process.kill()
    assert end_soon([pid])
    for other in others:  # nobody is left who knows of them
        os.kill(other, signal.SIGKILL)


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot find orphans")
@pytest.mark.parametrize("copy", [False, True], ids=["alone", "a-copy-holds-the-pipe"])
@pytest.mark.parametrize("busy", ["", "busy"])
def test_it_ends_with_a_killed_parent(busy: str, copy: bool) -> None:
    fork = "if not os.fork(): os.close(1); os.close(2); time.sleep(60)"
    code = (
        "import os, time\nfrom sixfold.processes.child import Child\n"
        f"child = Child({FILE!r})\nchild.send(b'deaf {busy}')\n"
        "print(child.process.pid, child.receive().decode(), os.getpid(), flush=True)\n"
        f"{fork if copy else ''}\nos.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=60, start_new_session=True
    )
    *pids, parent = (int(pid) for pid in done.stdout.split())
    try:
        assert done.returncode == -signal.SIGKILL and len(pids) == 4 and end_soon(pids)
    finally:
        if copy:
            os.killpg(parent, signal.SIGKILL)


@pytest.mark.slow
def test_a_supervisor_that_hangs_is_killed_with_its_program(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "STOP_TIMEOUT_S", 0.2)
    child = start()
    ask(child, "echo x")
    os.kill(child.process.pid, signal.SIGSTOP)
    child.close(grace_s=0.0)
    assert end_soon([child.pid, child.process.pid])


def test_worker_files_shadow_no_module(start: Start) -> None:
    folder = Path(child_module.__file__).parent
    assert str(folder) not in ask(start(python=sys.executable), "paths").decode().split("\n")
