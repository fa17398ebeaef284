"""Try every layer of the sandbox with a small program that tests it from inside."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass

from .job import Ended, Job, Limits
from .sandbox import Sandbox

_SPEED_JOBS = 60
_FIVE_SECONDS = Limits(wall_s=5.0)


@dataclass(frozen=True)
class Finding:
    """Result of one probe.

    Attributes:
        layer: what was tried.
        holds: whether the sandbox held.
    """

    layer: str
    holds: bool
    text: str


@dataclass(frozen=True)
class _Probe:
    """A program that tries something, and how the sandbox must end it.

    Attributes:
        layer: what it tries.
        program: Python source. It prints nothing if the layer holds, else what it could do.
        expected: verdict if the layer holds.
        text: what the layer does.
    """

    layer: str
    program: str
    expected: str
    text: str
    limits: Limits = _FIVE_SECONDS


_HOST = """
import os
for path in {paths!r}:
    if os.path.exists(path):
        print("can see", path)
"""
_PROCESSES = """
import os
found = [name for name in os.listdir("/proc") if name.isdigit()]
if len(found) > 3:
    print("can see", len(found), "processes")
"""
_NETWORK = """
import socket
for family, address in {addresses!r}:
    with socket.socket(family) as end:
        end.settimeout(1)
        try:
            end.connect(address)
            print("can reach", address)
        except OSError:
            pass
"""
_PRIVILEGES = """
import os
status = open("/proc/self/status").read().split()
for name, good in (("CapEff:", "0" * 16), ("NoNewPrivs:", "1")):
    if status[status.index(name) + 1] != good:
        print(name, status[status.index(name) + 1])
try:
    os.setuid(0)
    print("became root")
except OSError:
    pass
"""
_SECCOMP = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
calls = {"unshare": (0x10000000,), "mount": (b"x", b"/tmp", b"tmpfs", 0, None),
         "ptrace": (16, 1, 0, 0), "memfd_create": (b"x", 0)}
for name, arguments in calls.items():
    ctypes.set_errno(0)
    getattr(libc, name)(*arguments)
    if ctypes.get_errno() != errno.EPERM:
        print(name, "is not refused")
"""
_MEMORY = "found = [b'x' * 2**20 for _ in range(2**20)]"
_FORKS = """
import os, time
made = 0
try:
    while made < 32:
        if os.fork() == 0:
            time.sleep(9)
            os._exit(0)
        made += 1
    print("made", made, "processes")
except OSError:
    pass
"""
_SPACE = """
try:
    with open("big", "wb") as file:
        for _ in range(64):
            file.write(bytes(2**20))
    print("wrote 64 MiB")
except OSError:
    pass
"""
_OUTPUT = "import sys\nwhile True: sys.stdout.write('x' * 2**20)"
_READ_ONLY = """
for path in ("/usr/x", "/opt/x", "/x", "/dev/x"):
    try:
        open(path, "w")
        print("can write", path)
    except OSError:
        pass
"""
_DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", sys.argv[1]])
    os._exit(0)
time.sleep(0.3)
"""


async def selfcheck() -> list[Finding]:
    """Run all probes at the strongest level of this machine."""
    with ExitStack() as stack, Sandbox("limits") as sandbox:
        probes = _probes(stack)
        findings = [await _try_probe(sandbox, probe) for probe in probes]
        findings.append(await _nothing_left(sandbox))
        findings.append(await _speed(sandbox))
    return findings


def _probes(stack: ExitStack) -> list[_Probe]:
    """All probes. Listeners and a file on the host are closed with `stack`."""
    addresses: list[tuple[int, object]] = []
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            listener = socket.create_server((host, 0), family=family)
        except OSError:  # a machine without IPv6
            continue
        addresses.append((family.value, stack.enter_context(listener).getsockname()))
    local = stack.enter_context(socket.socket(socket.AF_UNIX))
    name = f"\0sixfold-{secrets.token_hex(8)}"
    local.bind(name)
    local.listen()
    addresses.append((socket.AF_UNIX.value, name))
    canary = stack.enter_context(tempfile.NamedTemporaryFile(prefix="sixfold-canary-"))  # noqa: SIM115
    os.chmod(canary.name, 0o644)
    paths = [canary.name, "/etc/passwd", "/home", "/root", "/var", "/run"]
    second = Limits(wall_s=1.0)
    return [
        _Probe("network", _NETWORK.format(addresses=addresses), "passed", "host ports refused"),
        _Probe("host files", _HOST.format(paths=paths), "passed", "not visible"),
        _Probe("read-only", _READ_ONLY, "passed", "only the scratch folder can be written"),
        _Probe("processes", _PROCESSES, "passed", "those of the host are not visible"),
        _Probe("privileges", _PRIVILEGES, "passed", "no capabilities, no way to get them"),
        _Probe("seccomp", _SECCOMP, "passed", "mount, ptrace, unshare, memfd refused"),
        _Probe("memory", _MEMORY, "out_of_memory", "256 MiB", Limits(memory_mb=256)),
        _Probe("fork", _FORKS, "passed", "8 processes", Limits(wall_s=5.0, processes=8)),
        _Probe("scratch size", _SPACE, "passed", f"{Limits().scratch_mb} MiB"),
        _Probe("output", _OUTPUT, "output_limit", "1 MiB", Limits(output_bytes=2**20)),
        _Probe("wall time", "while True: pass", "timeout", "1 s", second),
    ]


async def _try_probe(sandbox: Sandbox, probe: _Probe) -> Finding:
    ended = await _python(sandbox, probe.program, probe.limits)
    said = (ended.stdout.decode(errors="replace").split("\n")[0])[:60]
    if ended.verdict == probe.expected and (not said or probe.expected != "passed"):
        return Finding(probe.layer, True, probe.text)
    return Finding(probe.layer, False, said or f"{ended.verdict} {ended.detail}")


async def _nothing_left(sandbox: Sandbox) -> Finding:
    """A daemon that a job has started ends with the job."""
    mark = f"{secrets.randbelow(10**9)}"
    ended = await _python(sandbox, _DAEMON, Limits(wall_s=5.0), mark)
    alive = [pid for pid in os.listdir("/proc") if pid.isdigit() and _command_has(pid, mark)]
    holds = ended.verdict == "passed" and not alive
    return Finding("left behind", holds, "no process" if holds else f"processes {alive}")


def _command_has(pid: str, word: str) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return word.encode() in file.read().split(b"\0")
    except OSError:
        return False


async def _speed(sandbox: Sandbox) -> Finding:
    """Small jobs per second."""
    began = time.perf_counter()
    done = await asyncio.gather(
        *(_python(sandbox, "print(1)", Limits(wall_s=30.0)) for _ in range(_SPEED_JOBS))
    )
    speed = _SPEED_JOBS / (time.perf_counter() - began)
    holds = all(ended.verdict == "passed" for ended in done)
    return Finding("throughput", holds, f"{speed:.0f} verdicts/s")


async def _python(sandbox: Sandbox, program: str, limits: Limits, *arguments: str) -> Ended:
    job = Job(("probe.py", *arguments), {"probe.py": program.encode()}, limits=limits)
    return await sandbox.run_python(job)
