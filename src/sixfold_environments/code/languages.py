"""Languages of candidates: Python, C++ and JavaScript."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from ..sandbox.job import Job, Limits
from .javascript import HARNESS
from .program import join_modules

BUILD_LIMITS = Limits(wall_s=15.0, memory_mb=2048)
"""Limits of a compiler. A large header takes g++ several seconds."""

SEARCHED = "/usr/local/bin:/usr/bin:/bin"
"""Folders with programs that the sandbox can see."""

_BUILD = b"""
import os, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=2)
if done.returncode:
    sys.exit(1)
if os.path.exists("solution"):
    with open("solution", "rb") as binary:
        sys.stdout.buffer.write(binary.read())
"""


@dataclass(frozen=True)
class Language:
    """How programs of a language run in the sandbox.

    Attributes:
        source: file name of the source.
        tool: program that must be installed, or "".
        package: system package with the tool, for messages.
        compiler: command that checks `source` or compiles it to `solution`. Empty if none.
        interpreter: command that runs the harness of function tests. Empty for Python.
        argv: command that runs the candidate on standard input. Empty if the harness runs it.
        memory_mb: smallest memory limit with which the runtime works.
    """

    name: str
    source: str
    tool: str = ""
    package: str = ""
    compiler: tuple[str, ...] = ()
    interpreter: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    memory_mb: int = 0

    @property
    def missing(self) -> str:
        """What this machine lacks and the remedy, or "" if the language works."""
        if not self.tool or shutil.which(self.tool, path=SEARCHED):
            return ""
        return (
            f"tests in {self.name} need {self.tool}, which is not in {SEARCHED}. Install it (for"
            f" example: apt install {self.package}), or leave out tasks in {self.name}"
        )

    def harness(self, mode: str) -> tuple[str, bytes]:
        """File name and source of the program that runs the candidate.

        Args:
            mode: "calls" or "inputs", see `harness`.
        """
        if mode == "calls" and self.interpreter:
            return "harness.js", HARNESS.encode()
        return "harness.py", join_modules("wire", "harness")

    def files(self, code: str, binary: bytes | None) -> Mapping[str, bytes]:
        """Files of the candidate besides the harness."""
        if binary:
            return {"solution": binary}
        return {self.source: code.encode("utf-8", "replace")} if self.compiler else {}

    def build_job(self, code: str) -> Job:
        """Job that compiles a program and writes the binary to standard output."""
        return Job(
            argv=("build.py", *self.compiler),
            files={"build.py": _BUILD, self.source: code.encode("utf-8", "replace")},
            limits=BUILD_LIMITS,
        )


LANGUAGES = {
    language.name: language
    for language in (
        Language("python", "solution.py"),
        Language(
            "cpp",
            "solution.cpp",
            tool="g++",
            package="g++",
            compiler=("g++", "-O2", "-std=c++17", "-pipe", "-o", "solution", "solution.cpp"),
            argv=("./solution",),
        ),
        Language(
            "javascript",
            "solution.js",
            tool="node",
            package="nodejs",
            compiler=("node", "--check", "solution.js"),
            interpreter=("node",),
            argv=("/usr/bin/env", "node", "solution.js"),
            memory_mb=2048,
        ),
    )
}
"""Language by name, see `fences.TAGS`."""
