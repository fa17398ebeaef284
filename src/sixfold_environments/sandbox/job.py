"""What a sandbox runs, and how it ended."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from sixfold.types import Verdict


@dataclass(frozen=True)
class Limits:
    """Limits of one job.

    Attributes:
        wall_s: seconds from the start of the program to its end.
        memory_mb: memory of all processes together, in MiB. Files in the scratch folder are extra.
        processes: maximum number of processes and threads.
        output_bytes: maximum bytes of standard output, standard error and result together.
        scratch_mb: size of the scratch folder, in MiB. Also the largest file.
        files: maximum number of files and folders in the scratch folder.
        cpu_s: CPU seconds of each process. 0: one more than `wall_s`.
    """

    wall_s: float = 3.0
    memory_mb: int = 512
    processes: int = 64
    output_bytes: int = 16 * 2**20
    scratch_mb: int = 32
    files: int = 4096
    cpu_s: float = 0.0

    @property
    def cpu_seconds(self) -> int:
        """CPU seconds of each process, in whole seconds."""
        return math.ceil(self.cpu_s or self.wall_s + 1)


@dataclass(frozen=True)
class Job:
    """One program, with its input.

    Its environment is empty but for PATH, HOME, TMPDIR, LANG, TZ and PYTHONHASHSEED=0. The working
    directory is a private scratch folder in memory. There is no network.

    Attributes:
        argv: the program and its arguments. For `Sandbox.run_python` the first entry is the Python
            file, relative to the scratch folder.
        files: name -> content of files in the scratch folder. All are executable. Names may contain
            folders.
    """

    argv: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    stdin: bytes = b""
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if not self.argv or any("\0" in word for word in self.argv):
            raise ValueError("argv must name a program and contain no null character")
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise ValueError(f"file name {name!r} is not inside the scratch folder")


@dataclass(frozen=True)
class Ended:
    """How a job ended. Nothing here judges an answer.

    Attributes:
        verdict: "passed" if the program ended by itself with exit code 0.
        exit_code: exit code; 128 + number of the signal that killed the program; None if the
            sandbox ended it.
        stdout: standard output, possibly cut at a limit.
        stderr: standard error, possibly cut at a limit.
        seconds: wall time of the program.
        result: what was written to descriptor 3, a pipe to the trusted side.
    """

    verdict: Verdict
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    seconds: float
    isolation: str
    detail: str = ""
    result: bytes = b""
