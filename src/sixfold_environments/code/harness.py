"""Program that runs the candidate inside the sandbox: on calls, or on standard inputs.

It runs in the sandbox, together with `wire`, and imports only the standard library. It is not
trusted: the candidate runs in the same process and can change everything here. It gets inputs and
no expected output, so a forged reply is only another claim about the output.

Its standard input is one JSON object:

- {"nonce": text, "mode": "calls", "prefix": text, "code": text, "objects": flag,
  "calls": [[name, args, kwargs], ...]}. The prefix is code of the task that runs first.
- {"nonce": text, "mode": "inputs", "prefix": text, "code": text or null, "argv": [...],
  "inputs": [text, ...], "output_bytes": n}. Without code, the program `argv` runs once per input.

It writes lines to descriptor 3, each with the nonce before a JSON object:

- {"case": i, "value": JSON of `wire`} or {"case": i, "text": output}
- {"case": i, "failure": verdict, "detail": text}
- {"failure": verdict, "detail": text}: no case can run
- {"end": true}

In mode "inputs" the standard output of the candidate goes to a file.
"""

from __future__ import annotations

import atexit
import builtins
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import types
from contextlib import suppress
from typing import Any

from .wire import Encoder, NotPlain, decode

RESULT = 3
LONGEST_DETAIL = 300
_dumps = json.JSONEncoder(ensure_ascii=True, check_circular=False).encode
_write, _getpid, _exit = os.write, os.getpid, os._exit


class Replies:
    """Writes replies to the descriptor that is not standard output.

    Args:
        nonce: put before each line, so that stray output is not taken for a reply.
    """

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce.encode()
        self._process = _getpid()
        os.set_inheritable(RESULT, False)

    def send(self, **fields: Any) -> None:
        """Send one reply. A forked copy of this process ends instead."""
        if _getpid() != self._process:
            _exit(1)
        data = self._nonce + _dumps(fields).encode() + b"\n"
        while data:
            data = data[_write(RESULT, data) :]

    def fail(self, error: BaseException, **fields: Any) -> None:
        """Report that the candidate raised."""
        out_of_memory = isinstance(error, MemoryError)
        verdict = "out_of_memory" if out_of_memory else "runtime_error"
        self.send(**fields, failure=verdict, detail=_described(error))


def _described(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {str(error)[:LONGEST_DETAIL]}"
    except BaseException:  # noqa: BLE001  the candidate may raise anything
        text = "an exception without a text"
    return text[:LONGEST_DETAIL]


def _compiled(code: str, replies: Replies) -> Any:
    """The compiled candidate, or None if it does not compile."""
    try:
        return compile(code, "solution.py", "exec", dont_inherit=True)
    except MemoryError as error:
        replies.fail(error)
    except (SyntaxError, ValueError, RecursionError) as error:
        replies.send(failure="compile_error", detail=_described(error))
    return None


def _calls(request: dict[str, Any], replies: Replies) -> None:
    program = _compiled(request["code"], replies)
    if program is None:
        return
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    kept: list[Any] = []

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    try:
        exec(request["prefix"], module.__dict__)
        given = dict(module.__dict__)
        exec(program, module.__dict__)
    except BaseException as error:  # noqa: BLE001  the candidate may raise anything
        replies.fail(error)
        return
    own = {key: value for key, value in module.__dict__.items() if value is not given.get(key)}
    for case, (name, args, kwargs) in enumerate(request["calls"]):
        try:
            function = _function(own, name)
            positional, named = decode(args, kept.__getitem__), decode(kwargs, kept.__getitem__)
            value = function(*positional, **named)
            encoded = Encoder(keep if request["objects"] else None).encode(value)
        except NotPlain as error:
            replies.send(case=case, failure="protocol_error", detail=f"returned {error}")
        except BaseException as error:  # noqa: BLE001  the candidate may raise anything
            replies.fail(error, case=case)
        else:
            if _crowded():
                replies.send(case=case, failure="runtime_error", detail="left too many processes")
            else:
                replies.send(case=case, value=encoded)
    replies.send(end=True)


def _crowded() -> bool:
    """True if the candidate has left so many running processes that no other can start."""
    for _ in range(2):
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        try:
            child = os.fork()
        except OSError:
            _reap()
            continue
        if not child:
            _exit(0)
        os.waitpid(child, 0)
        return False
    return True


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _function(names: dict[str, Any], name: str) -> Any:
    """A function of the program, or a method of a class on a new object.

    Args:
        names: what the program itself has defined. The prefix may have functions of that name.
        name: `add`: a function, or else a method of the class `Solution`. `Solution.add`: a method
            of that class, or else a function.
    """
    owner, _, method = name.rpartition(".")
    if not owner and method in names:
        return names[method]
    if (owner or "Solution") in names:
        return getattr(names[owner or "Solution"](), method)
    if method in names:
        return names[method]
    raise NameError(f"the program does not define {name}")


def _inputs(request: dict[str, Any], replies: Replies) -> None:
    """Run the candidate once per input, each time in a new process."""
    program = None
    if request["code"] is not None:
        program = _compiled(request["code"], replies)
        if program is None:
            return
        exec(request["prefix"], {})  # its imports are then there in every child
    elif request["argv"][0].startswith("./"):
        os.chmod(request["argv"][0], 0o700)
    left = request["output_bytes"]
    for case, text in enumerate(request["inputs"]):
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as written:
            given.write(text.encode("utf-8", "surrogateescape"))
            given.seek(0)
            child = os.fork()
            if not child:
                _child(program, request, given.fileno(), written.fileno(), left)
            status = os.waitpid(child, 0)[1]
            with suppress(OSError):
                os.killpg(child, signal.SIGKILL)
            left -= os.fstat(written.fileno()).st_size
            if left <= 0:
                replies.send(case=case, failure="output_limit", detail="too much output")
                return
            written.seek(0)
            output = written.read().decode("utf-8", "surrogateescape")
        code = os.waitstatus_to_exitcode(status)
        if code:
            replies.send(case=case, failure="runtime_error", detail=f"exit status {code}")
        else:
            replies.send(case=case, text=output)
    replies.send(end=True)


def _child(program: Any, request: dict[str, Any], given: int, written: int, room: int) -> None:
    """Become the candidate: a script named __main__ with standard input and output."""
    code = 1
    try:
        os.setsid()
        os.dup2(given, 0)
        os.dup2(written, 1)
        os.closerange(3, 256)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        if program is None:
            os.execv(request["argv"][0], request["argv"])
        sys.stdin = os.fdopen(0, encoding="utf-8", errors="surrogateescape")
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="surrogateescape")
        sys.argv = ["solution.py"]
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        module.__file__ = os.path.abspath("solution.py")
        exec(request["prefix"], module.__dict__)
        code = _script(program, module.__dict__)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:  # noqa: BLE001  the candidate may raise anything
        os.write(2, _described(error).encode("utf-8", "replace") + b"\n")
        code = code or 1
    finally:
        os._exit(code & 255)


def _script(program: Any, names: dict[str, Any]) -> int:
    """Run a script. Returns its exit status."""
    try:
        exec(program, names)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        return 1
    except BaseException as error:  # noqa: BLE001  the candidate may raise anything
        os.write(2, _described(error).encode("utf-8", "replace") + b"\n")
        return 1
    return 0


def main() -> None:
    os.unlink(__file__)  # the candidate finds only its own files
    # An interpreter without `site` lacks these two.
    for name in ("exit", "quit"):
        vars(builtins).setdefault(name, sys.exit)
    request = json.loads(sys.stdin.buffer.read())
    replies = Replies(request["nonce"])
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    if request["mode"] == "calls":
        _calls(request, replies)
    else:
        _inputs(request, replies)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
