"""The program of a process that starts agents, one after another (`processes/program.py`).

A request is JSON: {"command": words, "environment": variables, "folder": path}. Its answer, when
the agent has ended, is {"code": exit code, "output": the end of what it wrote}. A code below 0 is
the number of the signal that ended it. Whatever the agent has started then ends too.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from typing import IO, Any

from ..processes.program import Requests, adopt_orphans, end_descendants, has_children

LAST_BYTES = 4096


def serve(requests: Requests) -> None:
    """Start agents until the parent closes its end."""
    adopt_orphans()
    for body in requests:
        requests.answer(json.dumps(_run(json.loads(body))).encode())


def _run(job: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as written, tempfile.TemporaryFile() as errors:
        try:
            agent = subprocess.Popen(
                job["command"],
                env=job["environment"],
                cwd=job["folder"],
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=errors,
            )
        except OSError as error:
            return {"code": None, "output": f"{error.strerror}: {error.filename}"}
        code = agent.wait()
        while has_children():
            end_descendants()
        return {"code": code, "output": _end(errors) or _end(written)}


def _end(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
    return file.read().decode(errors="replace").strip()
