"""Levels of isolation: their detection, refused levels, and the limits of the weak level."""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sixfold.checks.limits import allow, allowed
from sixfold.cli import main
from sixfold.errors import UserError
from sixfold.processes.program import descendants
from sixfold.recipe.schema import EnvironmentConfig
from sixfold.recipe.schema.environment import SandboxConfig
from sixfold.run.recipe_environment import isolation_note
from sixfold_environments.sandbox import isolation, selfcheck
from sixfold_environments.sandbox.command import bundled_bwrap
from sixfold_environments.sandbox.isolation import detect_isolation
from sixfold_environments.sandbox.job import Ended, Job, Limits
from sixfold_environments.sandbox.sandbox import Sandbox
from sixfold_environments.sandbox.seccomp import AUDIT_ARCH, DENIED, seccomp_filter

REFUSING_BWRAP = """#!/bin/sh
echo "bwrap: No permissions to create a new namespace" >&2
exit 1
"""


@pytest.fixture
def without_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(isolation.shutil, "which", lambda name: None)
    monkeypatch.setattr(isolation, "bundled_bwrap", lambda: "")
    detect_isolation.cache_clear()
    yield
    detect_isolation.cache_clear()


@pytest.fixture
def without_namespaces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake = Path(tempfile.mkdtemp(dir="/tmp")) / "a" / "b" / "bwrap"
    fake.parent.mkdir(parents=True)
    fake.write_text(REFUSING_BWRAP)
    for path in (fake, *list(fake.parents)[:3]):
        path.chmod(0o755)
    monkeypatch.setattr(isolation.shutil, "which", lambda name: str(fake))
    monkeypatch.setattr(isolation, "bundled_bwrap", lambda: "")
    detect_isolation.cache_clear()
    yield
    detect_isolation.cache_clear()
    fake.unlink()
    os.removedirs(fake.parent)


def rewarded_by(level: str, *rewards: str) -> EnvironmentConfig:
    sandbox = SandboxConfig(isolation=level)  # type: ignore[arg-type]
    return EnvironmentConfig(rewards=rewards, sandbox=sandbox)


def test_a_run_that_executes_programs_says_how_they_are_isolated() -> None:
    assert "namespaces" in isolation_note(rewarded_by("namespaces", "code"))
    assert isolation_note(rewarded_by("namespaces", "math")) == ""


def test_a_machine_without_bubblewrap_refuses_to_start(without_bubblewrap: None) -> None:
    for refused in (lambda: isolation_note(rewarded_by("namespaces", "code")), Sandbox):
        with pytest.raises(UserError) as error:
            refused()
        for word in ("environment.sandbox.isolation", "bubblewrap", "sixfold[sandbox]", "'limits'"):
            assert word in str(error.value)
    # A run without programs starts.
    assert isolation_note(rewarded_by("namespaces", "math")) == ""


def test_a_machine_without_user_namespaces_refuses_to_start(without_namespaces: None) -> None:
    with pytest.raises(UserError) as error:
        Sandbox("namespaces")
    for word in ("environment.sandbox.isolation", "user namespaces", "sysctl"):
        assert word in str(error.value)
    assert "No permissions" in detect_isolation().missing[0].detail


def test_weak_isolation_needs_the_setting_and_shows_a_banner(
    without_namespaces: None,
) -> None:
    note = isolation_note(rewarded_by("limits", "code"))
    assert "WEAK ISOLATION" in note
    assert "user namespaces" in note


def test_the_setting_reaches_sandboxes_of_rewards(without_bubblewrap: None) -> None:
    before = allowed()
    try:
        allow("limits")
        with Sandbox() as sandbox:
            assert sandbox.isolation == "limits"
    finally:
        allow(before)


def test_the_kernel_can_refuse_namespaces() -> None:
    """In a user namespace that allows no further ones, the real bubblewrap fails."""
    program = (
        "from sixfold_environments.sandbox.isolation import detect_isolation\n"
        "found = detect_isolation()\nprint(found.level, found.missing[0].feature)\n"
    )
    outer = ["--unshare-user", "--uid", "1000", "--disable-userns", "--bind", "/", "/"]
    done = subprocess.run(
        [
            bundled_bwrap(),
            *outer,
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--",
            sys.executable,
            "-c",
            program,
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    assert done.stdout == "limits user namespaces\n", done.stderr


class TestResourceLimitsOnly:
    """The weak level keeps time, output and memory limits, and leaves nothing."""

    @pytest.fixture
    def others(self) -> set[int]:
        """Processes of sandboxes that other tests of this process share."""
        return {pid for pid in descendants() if _is_sandbox(pid)}

    @pytest.fixture
    def sandbox(self, without_bubblewrap: None, others: set[int]) -> Iterator[Sandbox]:
        with Sandbox("limits", slots=2) as sandbox:
            yield sandbox

    def test_limits_hold_and_nothing_is_left(self, sandbox: Sandbox, others: set[int]) -> None:
        programs = {
            "passed": "import os\nprint(os.getcwd())\nopen('x', 'w')",
            "timeout": "while True: pass",
            "output_limit": "while True: print('x' * 9999)",
            "out_of_memory": "x = [bytes(2**20) for _ in range(2**20)]",
            "runtime_error": "import os, time\nif not os.fork():\n    os.setsid()\n"
            "    if not os.fork(): time.sleep(99)\n    os._exit(0)\nos.wait()\n1 / 0",
        }

        def limits(verdict: str) -> Limits:
            # A busy machine may take seconds to fill memory.
            wall_s = 1.0 if verdict == "timeout" else 20.0
            return Limits(wall_s=wall_s, memory_mb=256, output_bytes=1 << 20)

        async def all_of_them() -> list[Ended]:
            return await asyncio.gather(
                *(
                    sandbox.run_python(Job(("m.py",), {"m.py": text.encode()}, limits=limits(name)))
                    for name, text in programs.items()
                )
            )

        ended = asyncio.run(all_of_them())
        assert [end.verdict for end in ended] == list(programs)
        assert {end.isolation for end in ended} == {"limits"}
        sandbox.close()
        assert not os.path.exists(ended[0].stdout.decode().strip())
        assert {pid for pid in descendants() if _is_sandbox(pid)} <= others


def _is_sandbox(pid: int) -> bool:
    try:
        return b"agent.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.slow
def test_selfcheck_finds_every_layer_in_force(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selfcheck, "_SPEED_JOBS", 4)
    assert main(["sandbox", "selfcheck"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "namespaces" in lines[0]
    assert [line for line in lines[2:] if not line.startswith("ok")] == []


@pytest.mark.nightly
@pytest.mark.slow
def test_selfcheck_fails_on_a_weak_machine(
    without_bubblewrap: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selfcheck, "_SPEED_JOBS", 4)
    assert main(["sandbox", "selfcheck"]) == 1
    printed = capsys.readouterr().out
    assert "sixfold[sandbox]" in printed
    assert "FAIL  network" in printed


@pytest.mark.parametrize("machine", list(AUDIT_ARCH))
def test_the_filter_against_a_slow_reader(machine: str) -> None:
    """Run the BPF program in Python for every call number, and for calls with arguments."""
    column = list(AUDIT_ARCH).index(machine)
    refused = {numbers[column] for numbers in DENIED.values()}
    clone, socket_call, mmap = ((56, 220)[column], (41, 198)[column], (9, 222)[column])
    program = seccomp_filter(machine)
    for number in range(500):
        if number in refused:
            assert run_bpf(program, machine, number) == 0x50001
    allowed = 0x7FFF0000
    assert run_bpf(program, machine, (0, 63)[column]) == allowed  # read
    assert run_bpf(program, machine, 435) == 0x50000 + 38
    assert run_bpf(program, machine, clone, 0x3D0F00) == allowed  # a thread
    assert run_bpf(program, machine, clone, 0x10000011) == 0x50001
    assert run_bpf(program, machine, socket_call, socket.AF_INET) == allowed
    assert run_bpf(program, machine, socket_call, 40) == 0x50000 + 97
    assert run_bpf(program, machine, socket_call, socket.AF_INET, 1, 262) == 0x50001  # MPTCP
    assert run_bpf(program, machine, socket_call, socket.AF_INET, 1, 6) == allowed
    fcntl_call, setsockopt = (72, 25)[column], (54, 208)[column]
    assert run_bpf(program, machine, fcntl_call, 3, 1031, 1 << 20) == 0x50001  # F_SETPIPE_SZ
    assert run_bpf(program, machine, fcntl_call, 3, 3) == allowed
    for option, answer in ((7, 0x50001), (8, 0x50001), (33, 0x50001), (2, allowed)):
        assert run_bpf(program, machine, setsockopt, 3, 1, option) == answer
    assert run_bpf(program, machine, mmap, 0, 0, 0, 0x22) == allowed
    assert run_bpf(program, machine, mmap, 0, 0, 0, 0x21) == 0x50001
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[machine]
    assert run_bpf(program, other, 0) == 0x80000000
    if machine == "x86_64":
        assert run_bpf(program, machine, 0x40000000) == 0x80000000


def run_bpf(program: bytes, machine: str, number: int, *arguments: int) -> int:
    data = struct.pack("=IIQ6Q", number, AUDIT_ARCH[machine], 0, *[*arguments, *[0] * 6][:6])
    code = list(struct.iter_unpack("=HBBI", program))
    at = register = 0
    while True:
        kind, true, false, value = code[at]
        at += 1
        if kind == 0x20:
            register = struct.unpack_from("=I", data, value)[0]
        elif kind == 0x54:
            register &= value
        elif kind == 0x06:
            return value
        else:
            holds = register == value if kind == 0x15 else register >= value
            at += true if holds else false


def test_numbers_of_calls_against_the_kernel_headers() -> None:
    """Runs only if the kernel headers of this machine are installed."""
    header = Path(f"/usr/include/{platform.machine()}-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("no kernel headers")
    words = [line.split() for line in header.read_text().splitlines()]
    known = {w[1][5:]: int(w[2]) for w in words if len(w) == 3 and w[1].startswith("__NR_")}
    column = list(AUDIT_ARCH).index(platform.machine())
    ours = {name: numbers[column] for name, numbers in DENIED.items() if name in known}
    assert ours == {name: known[name] for name in ours}
    assert len(ours) > 60
