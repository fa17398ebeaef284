"""Honest programs: their environment, and the report of their end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sixfold_environments.sandbox.job import Ended, Job, Limits
from sixfold_environments.sandbox.sandbox import Sandbox


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(slots=2) as sandbox:
        yield sandbox


def python(sandbox: Sandbox, program: str, *arguments: str, **more: object) -> Ended:
    job = Job(("main.py", *arguments), {"main.py": program.encode()}, **more)  # type: ignore[arg-type]
    return asyncio.run(sandbox.run_python(job))


def test_a_program_has_input_output_arguments_and_a_result_pipe(sandbox: Sandbox) -> None:
    ended = python(
        sandbox,
        "import os, sys\nprint(input() + sys.argv[1])\nprint('e', file=sys.stderr)\n"
        "os.write(3, b'r')\nexit()\n",
        "b",
        stdin=b"a\n",
    )
    assert (ended.stdout, ended.stderr, ended.result) == (b"ab\n", b"e\n", b"r")
    assert (ended.verdict, ended.exit_code, ended.isolation) == ("passed", 0, "namespaces")


def test_the_waiting_interpreter_runs_a_file_as_python_does(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    """Same output and same exit code as `python main.py`."""
    programs = {
        "names": "import __main__\nprint(__name__, __file__[-7:], __main__.__dict__ is globals())",
        "beside": "import other\nprint(other.x)",
        "exit code": "import sys\nsys.exit(3)",
        "exit text": "import sys\nsys.exit('no')",
        "no newline": "import sys\nsys.stdout.write('x')",
        "unicode": "print('é€')",
        "at exit": "import atexit\natexit.register(print, 'late')\nprint('early')",
        "fork": "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint(bool(pid))",
        "thread": "import threading, time\n"
        "def f(): time.sleep(0.05); print(y)\ny = 1\nthreading.Thread(target=f).start()",
        "pool": "from multiprocessing import Pool\ndef f(x): return 2 * x\n"
        "if __name__ == '__main__':\n    with Pool(2) as p: print(p.map(f, [1, 2]))",
        "recursion": "import sys, threading\nsys.setrecursionlimit(99999)\n"
        "threading.stack_size(64 << 20)\ndef f(n): return n and 1 + f(n - 1)\n"
        "t = threading.Thread(target=lambda: print(f(50000)))\nt.start()\nt.join()",
        "temporary": "import tempfile\nwith tempfile.TemporaryFile() as f: print(f.write(b'12'))",
    }
    (tmp_path / "other.py").write_text("x = 5")

    async def all_of_them() -> list[Ended]:
        return await asyncio.gather(
            *(
                sandbox.run_python(
                    Job(("main.py",), {"main.py": program.encode(), "other.py": b"x = 5"})
                )
                for program in programs.values()
            )
        )

    for (name, program), ended in zip(programs.items(), asyncio.run(all_of_them()), strict=True):
        (tmp_path / "main.py").write_text(program)
        code, output = _ordinary(tmp_path)
        assert (ended.exit_code, ended.stdout) == (code, output), (name, ended.stderr)


def _ordinary(folder: Path) -> tuple[int, bytes]:
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "main.py"], cwd=folder, capture_output=True, check=False
    )
    return done.returncode, done.stdout


def test_a_traceback_shows_only_the_program(sandbox: Sandbox) -> None:
    ended = python(sandbox, "def f():\n    1 / 0\nf()\n")
    assert (ended.verdict, ended.exit_code) == ("runtime_error", 1)
    lines = ended.stderr.decode().splitlines()
    assert [line.split(",")[1] for line in lines if "File" in line] == [" line 3", " line 2"]


def test_other_programs_run_in_the_scratch_folder(sandbox: Sandbox) -> None:
    job = Job(("sh", "a/run.sh", "x"), {"a/run.sh": b"cat - a/data; echo $1; exit 7",
                                        "a/data": b"d\n"}, b"i\n")  # fmt: skip
    ended = asyncio.run(sandbox.run(job))
    assert (ended.stdout, ended.exit_code, ended.verdict) == (b"i\nd\nx\n", 7, "runtime_error")
    own = Job(("./tool",), {"tool": b"#!/bin/sh\necho it runs\n"})
    assert asyncio.run(sandbox.run(own)).stdout == b"it runs\n"


def test_a_signal_is_an_exit_code_above_128(sandbox: Sandbox) -> None:
    ended = python(sandbox, "import ctypes\nctypes.string_at(0)")
    assert (ended.verdict, ended.exit_code) == ("runtime_error", 128 + 11)


def test_a_missing_program_is_a_failure_of_the_machine(sandbox: Sandbox) -> None:
    ended = asyncio.run(sandbox.run(Job(("no-such-program",))))
    assert ended.verdict == "infrastructure_error"
    assert "no-such-program" in ended.detail


def test_large_input_and_output_pass_whole(sandbox: Sandbox) -> None:
    text = os.urandom(3 << 20)
    ended = asyncio.run(sandbox.run(Job(("cat", "-", "data"), {"data": text[::-1]}, text)))
    assert ended.stdout == text + text[::-1]


def test_output_is_cut_at_the_limit(sandbox: Sandbox) -> None:
    ended = python(sandbox, "print('x' * 5000)", limits=Limits(output_bytes=1000))
    assert (ended.verdict, ended.exit_code, ended.stdout) == ("output_limit", None, b"x" * 1000)


def test_cpu_time_counts_as_a_time_out(sandbox: Sandbox) -> None:
    ended = python(sandbox, "while True: pass", limits=Limits(wall_s=9.0, cpu_s=1.0))
    assert ended.verdict == "timeout"
    assert "CPU" in ended.detail


def test_memory_that_is_not_in_use_is_free(sandbox: Sandbox) -> None:
    """Programs may reserve address space; pages of a fork count once."""
    program = (
        "import os\nx = bytearray(100 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\n"
        "for _ in range(4):\n    if not os.fork():\n        import time; time.sleep(0.2); break\n"
    )
    ended = python(sandbox, program, limits=Limits(memory_mb=256))
    assert (ended.verdict, ended.detail) == ("passed", "")


def test_a_scratch_folder_of_another_size(sandbox: Sandbox) -> None:
    program = "open('a', 'wb').write(bytes(40 << 20))"
    assert python(sandbox, program, limits=Limits(scratch_mb=64)).verdict == "passed"
    assert python(sandbox, program).verdict == "runtime_error"


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "a\0b"])
def test_files_stay_in_the_scratch_folder(name: str) -> None:
    with pytest.raises(ValueError, match="scratch folder"):
        Job(("x",), {name: b""})


def test_cancellation_kills_the_job_and_frees_its_slot() -> None:
    async def cancelled(sandbox: Sandbox) -> float:
        job = Job(("main.py",), {"main.py": b"import time\ntime.sleep(60)"}, limits=Limits(60.0))
        tasks = [asyncio.create_task(sandbox.run_python(job)) for _ in range(5)]
        await asyncio.sleep(0.3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        began = time.monotonic()
        ended = await sandbox.run_python(Job(("main.py",), {"main.py": b"print(1)"}))
        assert ended.stdout == b"1\n"
        return time.monotonic() - began

    with Sandbox(slots=1) as sandbox:
        assert asyncio.run(cancelled(sandbox)) < 10


def test_jobs_overlap_up_to_the_number_of_slots() -> None:
    program = b"import time\nprint(time.monotonic())\ntime.sleep(0.4)\nprint(time.monotonic())\n"

    async def eight(sandbox: Sandbox) -> list[list[float]]:
        job = Job(("main.py",), {"main.py": program}, limits=Limits(wall_s=30.0))
        ended = await asyncio.gather(*(sandbox.run_python(job) for _ in range(8)))
        return [[float(word) for word in end.stdout.split()] for end in ended]

    with Sandbox(slots=4) as sandbox:
        times = asyncio.run(eight(sandbox))
    together = [sum(start <= at <= end for start, end in times) for at, _ in times]
    assert 2 <= max(together) <= 4
