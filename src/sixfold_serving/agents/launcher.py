"""Program that starts agents, one after another, for its parent process (`processes/program.py`).

A request is JSON: {"command": words, "environment": variables, "folder": path}. When the agent has
ended, the answer is {"code": exit code, "output": end of its standard output, "errors": end of its
standard error}. The code is null if the agent could not be started, and -N if signal N ended it.
All processes that the agent has started are ended before the answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from typing import IO, Any

from sixfold.processes.program import Requests, adopt_orphans, end_descendants, has_children

LAST_BYTES = 1 << 16


def serve(requests: Requests) -> None:
    """Start agents until the parent closes its end of the pipe."""
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
            problem = f"{error.strerror}: {error.filename}"
            return {"code": None, "output": "", "errors": problem}
        code = agent.wait()
        while has_children():
            end_descendants()
        return {"code": code, "output": _end(written), "errors": _end(errors)}


def _end(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
    return file.read().decode(errors="replace").strip()
