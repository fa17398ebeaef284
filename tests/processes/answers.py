"""A program for `test_child.py`. The first word of a request says what it does."""

import os
import signal
import subprocess
import sys
import time

from sixfold.processes.program import Requests


def echo(requests: Requests, text: bytes) -> None:
    requests.answer(text)


def paths(requests: Requests, text: bytes) -> None:
    requests.answer("\n".join(sys.path).encode())


def several(requests: Requests, text: bytes) -> None:
    for word in text.split():
        requests.note()
        requests.answer(word)


def write(requests: Requests, text: bytes) -> None:
    """Writes straight to the pipe, between two answers."""
    requests.answer(b"before")
    os.write(requests._replies, text)
    requests.answer(b"after")


def fork(requests: Requests, text: bytes) -> None:
    if not os.fork():
        requests.note()
        requests.answer(b"of the copy")
        os._exit(0)
    os.wait()
    requests.answer(text)


def leave(requests: Requests, code: bytes) -> None:
    print("first line\nlast line", file=sys.stderr, flush=True)
    os._exit(int(code))


def die(requests: Requests, number: bytes) -> None:
    os.kill(os.getpid(), int(number))


def close(requests: Requests, text: bytes) -> None:
    os.close(requests._replies)
    time.sleep(60)


def fail(requests: Requests, text: bytes) -> None:
    raise ValueError(text.decode())


def report(requests: Requests, text: bytes) -> None:
    try:
        raise ValueError(text.decode())
    except ValueError:
        requests.fail()


def silence(requests: Requests, text: bytes) -> None:
    time.sleep(60)


def beats(requests: Requests, text: bytes) -> None:
    for _ in range(6):
        time.sleep(0.1)
        requests.note()
    requests.answer()


def deaf(requests: Requests, text: bytes) -> None:
    """Ignores signals, starts two more processes, one in another session, and never returns."""
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)
    others = [subprocess.Popen(["sleep", "60"], start_new_session=new) for new in (False, True)]
    requests.answer(" ".join(str(pid) for pid in (os.getpid(), *(p.pid for p in others))).encode())
    while text == b"busy":
        time.sleep(60)


def serve(requests: Requests) -> None:
    for body in requests:
        what, _, rest = body.partition(b" ")
        globals()[what.decode()](requests, rest)
