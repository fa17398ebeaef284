"""Hostile programs, a few of each class. A program prints ESCAPED if its attack succeeded."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from sixfold.processes.program import descendants
from sixfold_environments.sandbox.job import Ended, Job, Limits
from sixfold_environments.sandbox.sandbox import Sandbox

SECOND = Limits(wall_s=1.0, memory_mb=256, output_bytes=1 << 20)
# On a busy machine a program takes long to reach a limit other than that of time.
PATIENT = replace(SECOND, wall_s=20.0)

# A machine that is far too busy also runs the launcher late.
LATE_S = 1.0 if os.getloadavg()[0] < 4 * (os.cpu_count() or 1) else 20.0

TRIED = "import os, sys\ntry:\n    {}\n    print('ESCAPED')\nexcept OSError:\n    pass\n"
CALLED = (
    "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "if libc.{} >= 0:\n    print('ESCAPED')\n"
)

TIME = {
    "busy": "while True: pass",
    "asleep": "import time; time.sleep(99)",
    "stopped": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "deaf": "import signal\nfor n in (2, 15, 24): signal.signal(n, signal.SIG_IGN)\nwhile True: 1",
    "says it is done": "import time; print('ESCAPED'[:0], flush=True); time.sleep(99)",
    "child holds the output": "import os, time\nif os.fork(): os.close(1)\ntime.sleep(99)",
    "threads": "import threading\nfor _ in range(9):\n"
    "    threading.Thread(target=lambda: [1 for _ in iter(int, 1)]).start()",
}
MEMORY = {
    "list": "x = [bytes(2**20) + b'x' for _ in range(2**20)]",
    "one allocation": "x = b'x' * 2**36",
    "children": "import os, time\nfor _ in range(6):\n"
    "    if not os.fork():\n        x = b'x' * (70 << 20)\n        time.sleep(9)\ntime.sleep(9)",
}
FULL = (
    "import fcntl, mmap, os, socket, time\n"
    "def fill(end):\n"
    "    os.set_blocking(end, False)\n"
    "    try:\n        while True: os.write(end, bytes(65536))\n"
    "    except BlockingIOError: pass\n"
    "kept = []\n"
)
KERNEL_MEMORY = {
    "sockets that wait for accept": "a = socket.socket(socket.AF_UNIX)\na.bind('\\0x')\n"
    "a.listen(4096)\nfor _ in range(900):\n    s = socket.socket(socket.AF_UNIX)\n"
    "    s.connect('\\0x'); fill(s.fileno()); s.close()\n",
    "pairs of sockets": "for _ in range(11):\n    if not os.fork(): break\n"
    "for _ in range(50):\n    p = socket.socketpair(); kept.append(p)\n"
    "    for s in p: fill(s.fileno())\n",
    "datagrams of closed sockets": "for i in range(100):\n"
    "    r = socket.socket(socket.AF_UNIX, 2); r.bind(f'\\0{i}'); kept.append(r)\n"
    "    for _ in range(11):\n        s = socket.socket(socket.AF_UNIX, 2)\n"
    "        s.setblocking(False)\n        try: s.sendto(bytes(200000), f'\\0{i}')\n"
    "        except OSError: pass\n        s.close()\n",
    "internet sockets": "a = socket.create_server(('127.0.0.1', 0), backlog=200)\n"
    "for _ in range(100):\n    s = socket.create_connection(a.getsockname()); kept.append(s)\n"
    "    end = time.time() + 0.05\n"
    "    while time.time() < end: fill(s.fileno()); time.sleep(0.002)\n",
    "pipes": "for _ in range(39):\n    if not os.fork(): break\n"
    "for _ in range(60):\n    r, w = os.pipe(); fill(w)\n",
    "named pipes": "for _ in range(39):\n    if not os.fork(): break\n"
    "for i in range(60):\n    name = f'{os.getpid()}-{i}'; os.mkfifo(name)\n"
    "    w = os.open(name, os.O_RDWR); fill(w)\n",
    # 51 processes, each with the 1.5 MiB of tables of 768 MiB: a process may reserve 1 GiB.
    "page tables": "for _ in range(50):\n    if not os.fork(): break\n"
    "for _ in range(3):\n    m = mmap.mmap(-1, 1 << 28, flags=mmap.MAP_PRIVATE | 0x4000)\n"
    "    kept.append(m)\n    for at in range(0, 1 << 28, 1 << 21): m[at]\n",
}
"""Memory that the kernel holds for a job, and that belongs to none of its processes."""

COMMON = {
    "asyncio": "import asyncio\nasync def main():\n"
    "    p = await asyncio.create_subprocess_exec('echo', 'fine', stdout=-1)\n"
    "    print((await p.communicate())[0].decode().strip())\nasyncio.run(main())",
    "pool": "from multiprocessing import Pool\nwith Pool(4) as pool:\n"
    "    print('fine' if pool.map(abs, [-1, 2]) == [1, 2] else '')",
    "loopback": "import socket\na = socket.create_server(('127.0.0.1', 0))\n"
    "b = socket.create_connection(a.getsockname()); c, _ = a.accept()\nb.sendall(b'fine')\n"
    "print(c.recv(9).decode())",
    "files": "f = [open('/dev/null') for _ in range(90)]\nprint('fine')",
}

OUTPUT = {
    "stdout": "import sys\nwhile True: sys.stdout.write('x' * 2**16)",
    "stderr": "import os\nwhile True: os.write(2, b'x' * 2**16)",
    "result": "import os\nwhile True: os.write(3, b'x' * 2**16)",
    "at the end": "print('x' * 2**21)",
}
FILES = {
    "many files": "for i in range(9999): open(str(i), 'w').close()",
    "many folders": "import os\nfor i in range(9999): os.mkdir(f'/tmp/{i}')",
}
REFUSED = {
    "many processes": "import os, time\nn = 0\ntry:\n    for n in range(300):\n"
    "        if not os.fork(): time.sleep(9)\nexcept OSError: pass\nprint('ESCAPED' * (n > 64))",
    "zombies": "import os\nn = 0\ntry:\n    for n in range(300):\n"
    "        if not os.fork(): os._exit(0)\nexcept OSError: pass\nprint('ESCAPED' * (n > 64))",
    "descriptors": TRIED.format("[os.open('/dev/null', 0) for _ in range(5000)]"),
    "scratch space": TRIED.format("[os.write(os.open(str(i), 65), bytes(2**24)) for i in (1,2,3)]"),
    "shared memory files": TRIED.format("open('/dev/shm/x', 'wb').write(bytes(2**26))"),
    "sparse file": TRIED.format("open('x', 'w').truncate(1 << 40)"),
    "larger pipe": TRIED.format("__import__('fcntl').fcntl(os.pipe()[1], 1031, 1 << 20)"),
    "pages of a pipe": "import ctypes, os\nr, w = os.pipe()\n"
    "if ctypes.CDLL(None).syscall(278, w, 0, 0, 0) >= 0: print('ESCAPED')",
    "send buffer": TRIED.format("__import__('socket').socketpair()[0].setsockopt(1, 7, 1 << 20)"),
    "receive buffer": TRIED.format(
        "__import__('socket').socketpair()[0].setsockopt(1, 8, 1 << 20)"
    ),
    "other protocol": TRIED.format("__import__('socket').socket(2, 1, 262)"),
    "memfd": TRIED.format("os.memfd_create('x')"),
    "shared pages": TRIED.format("__import__('mmap').mmap(-1, 1 << 20)"),
    "system v memory": CALLED.format("shmget(0, 1 << 20, 0o1600)"),
    "core dump": "import resource\nif max(resource.getrlimit(resource.RLIMIT_CORE)) > 1:\n"
    "    print('ESCAPED')",
    "nice": TRIED.format("os.nice(-5)"),
    "root": TRIED.format("os.setuid(0)"),
    "user namespace": CALLED.format("unshare(0x10000000)"),
    "mount namespace": CALLED.format("unshare(0x20000)"),
    "namespaces by clone": CALLED.format("syscall(56, 0x10000011, 0, 0, 0, 0)"),
    "mount": CALLED.format("mount(b'x', b'/tmp', b'tmpfs', 0, None)"),
    "chroot": TRIED.format("os.chroot('/tmp')"),
    "trace init": CALLED.format("ptrace(16, 1, 0, 0)"),
    "read init": CALLED.format("syscall(310, 1, 0, 0, 0, 0, 0)"),
    "key ring": CALLED.format("syscall(250, 0, -3, 1)"),
    "io_uring": CALLED.format("syscall(425, 8, ctypes.create_string_buffer(200))"),
    "bpf": CALLED.format("syscall(321, 0, ctypes.create_string_buffer(200), 72)"),
    "userfaultfd": CALLED.format("syscall(323, 1)"),
    "personality": CALLED.format("personality(0x40000)"),
    "vsock": TRIED.format("__import__('socket').socket(40, 1)"),
    "netlink": TRIED.format("__import__('socket').socket(16, 3, 0)"),
    "packet": TRIED.format("__import__('socket').socket(17, 3, 0)"),
    "outside": TRIED.format("__import__('socket').create_connection(('192.0.2.1', 80), 0.5)"),
    "kernel settings": TRIED.format("open('/proc/sys/kernel/hostname', 'w').write('x')"),
    "core pattern": TRIED.format("open('/proc/sys/kernel/core_pattern', 'w').write('|/tmp/x')"),
    "terminal": TRIED.format("os.open('/dev/tty', os.O_RDWR)"),
    "disks": "import os\nfor f in os.listdir('/dev'):\n"
    "    if f not in ('null', 'full', 'random', 'urandom', 'fd', 'shm', 'stdin', 'stdout',"
    " 'stderr'): print('ESCAPED', f)",
    "write the interpreter": TRIED.format("open(os.__file__, 'a')"),
    "write the root": TRIED.format("os.mkdir('/x')"),
    "root of init": TRIED.format("os.listdir('/proc/1/root/home')"),
    "descriptors of init": "import os\nfor f in os.listdir('/proc/1/fd'):\n"
    "    if os.path.isdir('/proc/1/fd/' + f): print('ESCAPED')",
    "own descriptors": "import os\nfor f in os.listdir('/proc/self/fd'):\n"
    "    if int(f) > 4 or os.path.isdir('/proc/self/fd/' + f) and int(f) != 4: print('ESCAPED', f)",
    "password file": TRIED.format("open('/etc/passwd')"),
    "processes": "import os\n"
    "if sum(f.isdigit() for f in os.listdir('/proc')) > 3: print('ESCAPED')",
    "environment": "import os\nif 'SIXFOLD_TEST_SECRET' in str(dict(os.environ)) + ''.join(\n"
    "    open(f'/proc/{p}/environ').read() for p in os.listdir('/proc') if p.isdigit()\n"
    "): print('ESCAPED')",
}
HARMLESS = {
    "kill all": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "kill init": "import os, signal\nos.kill(1, signal.SIGKILL)",
    "close all": "import os\nos.closerange(0, 999)",
    "daemon": "import os, time\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n"
    "        while True: time.sleep(0.01)",
}
ATTACKS = [
    *((f"{name}: {verdict}", program, verdict) for verdict, group in (
        ("timeout", TIME), ("out_of_memory", MEMORY), ("output_limit", OUTPUT),
        ("runtime_error", FILES), ("passed", REFUSED), ("passed", HARMLESS),
    ) for name, program in group.items()),
]  # fmt: skip


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(slots=4) as sandbox:
        yield sandbox


async def python(sandbox: Sandbox, program: str, limits: Limits = PATIENT) -> Ended:
    return await sandbox.run_python(Job(("main.py",), {"main.py": program.encode()}, b"", limits))


@pytest.mark.slow
def test_no_attack_succeeds_and_nothing_is_left(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four at a time, twice in a row."""
    monkeypatch.setenv("SIXFOLD_TEST_SECRET", "1")
    asyncio.run(python(sandbox, ""))
    mounts = Path("/proc/self/mountinfo").read_text()

    async def all_twice() -> list[Ended]:
        return await asyncio.gather(
            *(
                python(sandbox, program, SECOND if verdict == "timeout" else PATIENT)
                for _, program, verdict in 2 * ATTACKS
            )
        )

    ended = asyncio.run(all_twice())
    wrong = {
        name: (end.verdict, end.detail, end.stdout[-200:], end.stderr[-300:])
        for (name, _, verdict), end in zip(2 * ATTACKS, ended, strict=True)
        if (end.verdict != verdict and name not in MAY_ALSO)
        or b"ESCAPED" in end.stdout
        or (verdict == "timeout" and end.seconds > SECOND.wall_s + LATE_S)
    }
    assert wrong == {}
    assert {end.isolation for end in ended} == {"namespaces"}
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert asyncio.run(python(sandbox, "print(2)")).stdout == b"2\n"


MAY_ALSO = {"kill all: passed", "close all: passed"}
"""Attacks that end themselves: any failure is accepted."""


@pytest.mark.parametrize("name", KERNEL_MEMORY)
def test_memory_that_the_kernel_holds_for_a_job_counts(sandbox: Sandbox, name: str) -> None:
    program = FULL + KERNEL_MEMORY[name] + "\nprint('ESCAPED', flush=True)\ntime.sleep(60)\n"
    ended = asyncio.run(python(sandbox, program, replace(PATIENT, memory_mb=64, files=8192)))
    assert (ended.verdict, ended.detail) == ("out_of_memory", "used more than 64 MiB"), ended


def test_sockets_and_pipes_of_common_programs_fit_into_the_limit(sandbox: Sandbox) -> None:
    for name, program in COMMON.items():
        ended = asyncio.run(python(sandbox, program, replace(PATIENT, memory_mb=64)))
        assert (ended.verdict, ended.stdout) == ("passed", b"fine\n"), (name, ended)


def test_processes_of_a_job_end_with_it(sandbox: Sandbox) -> None:
    asyncio.run(python(sandbox, ""))
    time.sleep(0.3)  # the idle cells start
    before = len(descendants())
    asyncio.run(python(sandbox, HARMLESS["daemon"]))
    asyncio.run(python(sandbox, REFUSED["many processes"]))
    deadline = time.monotonic() + 5
    while len(descendants()) != before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(descendants()) == before


def test_host_ports_and_sockets_are_out_of_reach(sandbox: Sandbox, tmp_path: Path) -> None:
    with ExitStack() as stack:
        addresses: list[tuple[int, object]] = []
        for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            listener = stack.enter_context(socket.create_server((host, 0), family=family))
            addresses.append((int(family), listener.getsockname()))
        for name in (f"\0sixfold-test-{os.getpid()}", str(tmp_path / "s")):
            local = stack.enter_context(socket.socket(socket.AF_UNIX))
            local.bind(name)
            local.listen()
            addresses.append((int(socket.AF_UNIX), name))
        ended = asyncio.run(
            python(
                sandbox,
                f"import socket\nfor family, address in {addresses!r}:\n    try:\n"
                "        socket.socket(family).connect(address)\n        print(address)\n"
                "    except OSError: pass\n",
            )
        )
    assert (ended.verdict, ended.stdout) == ("passed", b"")


def test_files_of_the_host_are_not_visible(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    paths = [str(secret), str(Path.home()), __file__, os.getcwd(), "/proc/1/cwd/etc/passwd"]
    program = f"import os\nfor path in {paths!r}:\n    if os.path.exists(path): print(path)\n"
    assert asyncio.run(python(sandbox, program)).stdout == b""
    write = f"try: open({str(tmp_path / 'new')!r}, 'w')\nexcept OSError: pass\nopen('/tmp/n', 'w')"
    assert asyncio.run(python(sandbox, write)).verdict == "passed"
    assert os.listdir(tmp_path) == ["secret"]
    assert not os.path.exists("/tmp/n")


def test_two_jobs_share_nothing(sandbox: Sandbox) -> None:
    """Both run at the same time and try every resource that they could share."""
    program = (
        "import os, socket, time\n"
        "open('/tmp/here', 'w'); open('/dev/shm/there', 'w')\n"
        "a = socket.socket(); a.bind(('127.0.0.1', 45678)); a.listen()\n"
        "b = socket.socket(socket.AF_UNIX); b.bind('\\0here'); b.listen()\n"
        "time.sleep(0.5)\n"
        "print(sorted(os.listdir('/tmp')), sum(f.isdigit() for f in os.listdir('/proc')))\n"
    )

    async def both() -> list[Ended]:
        return await asyncio.gather(*(python(sandbox, program) for _ in range(2)))

    ended = asyncio.run(both())
    assert {end.stdout for end in ended} == {b"['here', 'there', 'work'] 2\n"}
