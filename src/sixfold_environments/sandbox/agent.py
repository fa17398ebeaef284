"""The first program in a cell: waits for a job, applies its limits, and becomes it.

`python agent.py CONTROL RESULT SCRATCH`: two descriptors and the scratch folder. CONTROL is a Unix
socket to the trusted side:

1. The agent sends "R", with descriptors of /proc and of the scratch folder as the cell sees them.
2. It receives 8 bytes of length, a JSON header, and the contents of the job's files.
3. It sends "S" and closes the socket, or sends "E" and a reason.

After "S" nothing that this process says is trusted, and it holds nothing that is secret. A Python
job runs in this interpreter, which saves its start. Any other program replaces it.

This file needs only the standard library: the cell does not contain Sixfold.
"""

from __future__ import annotations

import _sitebuiltins
import _socket
import builtins
import fcntl
import json
import os
import resource
import signal
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any, NoReturn

RESULT = 3
_CONTROL = 64  # out of the way of RESULT


def add_site() -> None:
    """Add what the module `site` adds, without its slow .pth files."""
    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    builtins.help = _sitebuiltins._Helper()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for folder in (f"python{version}/site-packages", "python3/dist-packages"):
        if os.path.isdir(f"{sys.prefix}/lib/{folder}"):
            sys.path.append(f"{sys.prefix}/lib/{folder}")


def receive(control: _socket.socket, count: int) -> bytes:
    """Receive exactly `count` bytes. Ends the process if the trusted side hangs up."""
    parts = []
    while count:
        part = control.recv(min(count, 1 << 20))
        if not part:
            os._exit(1)
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def report_ready(control: _socket.socket, scratch: str) -> None:
    """Send "R" with descriptors of /proc and the scratch folder: the launcher watches them."""
    folders = [os.open(path, os.O_RDONLY) for path in ("/proc", scratch) if os.path.isdir(path)]
    numbers = b"".join(folder.to_bytes(4, sys.byteorder) for folder in folders)
    control.sendmsg([b"R"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)])
    for folder in folders:
        os.close(folder)


def write_files(control: _socket.socket, files: list[tuple[str, int]]) -> None:
    """Receive the files of the job into the working directory."""
    for name, size in files:
        content = receive(control, size)
        if folder := os.path.dirname(name):
            os.makedirs(folder, exist_ok=True)
        with open(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o755), "wb") as file:
            file.write(content)


def apply_limits(limits: dict[str, tuple[int, int]]) -> None:
    """Set resource limits by the name of their constant. Never raises a hard limit."""
    for name, (soft, hard) in limits.items():
        number = getattr(resource, name)
        highest = resource.getrlimit(number)[1]
        if highest != resource.RLIM_INFINITY:
            soft, hard = min(soft, highest), min(hard, highest)
        resource.setrlimit(number, (soft, hard))


def run_file(argv: list[str]) -> None:
    """Run a Python file as `python FILE ARGUMENTS` would."""
    path = os.path.abspath(argv[0])
    sys.argv[:] = argv
    sys.path.insert(0, os.path.dirname(path))
    loader = SourceFileLoader("__main__", path)
    spec = spec_from_file_location("__main__", path, loader=loader)
    assert spec is not None
    sys.modules["__main__"] = main = module_from_spec(spec)
    main.__spec__ = None
    try:
        loader.exec_module(main)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001
        # The frames above the program are those of this file.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != path:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def become(argv: list[str], control: _socket.socket) -> NoReturn:
    """Replace this process by a program. The socket closes when that has worked."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
        signal.signal(number, signal.SIG_DFL)
    control.send(b"S")
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        control.send(b"E" + f"{argv[0]}: {os.strerror(error.errno or 0)}".encode())
        os._exit(1)


def main() -> None:
    """Serve one job."""
    scratch = sys.argv[3]
    number = fcntl.fcntl(int(sys.argv[1]), fcntl.F_DUPFD_CLOEXEC, _CONTROL)
    os.dup2(int(sys.argv[2]), RESULT)
    # Also closes descriptors of folders outside, which would be a way out.
    os.closerange(RESULT + 1, number)
    os.closerange(number + 1, 1 << 16)
    control = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, number)
    add_site()
    report_ready(control, scratch)
    header: dict[str, Any] = json.loads(
        receive(control, int.from_bytes(receive(control, 8), "big"))
    )
    try:
        write_files(control, header["files"])
        apply_limits(header["limits"])
    except OSError as error:
        control.send(b"E" + f"cannot prepare the job: {error}".encode())
        os._exit(1)
    if not header["python"]:
        become(header["argv"], control)
    control.send(b"S")
    control.close()
    run_file(header["argv"])


if __name__ == "__main__":
    main()
