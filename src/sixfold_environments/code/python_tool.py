"""The tool `python`: runs a program of the policy in the sandbox and returns its output."""

from __future__ import annotations

from typing import Any

from sixfold.environment.tools.observation import ToolsFailed
from sixfold.environment.tools.tool import tool

from ..sandbox.job import Job, Limits
from .shared import shared_sandbox

SHOWN_CHARACTERS = 2000
"""Maximum number of characters of each output stream that the policy sees."""

LIMITS = Limits(output_bytes=1 << 20)


@tool
async def python(code: str) -> dict[str, Any]:
    """Run a Python program and return what it prints.

    Each call starts a new interpreter without network and with an empty folder: nothing is kept
    between calls. Print the values that you need.

    Args:
        code: source of the program.
    """
    source = code.encode("utf-8", errors="replace")
    ended = await shared_sandbox().run_python(Job(("main.py",), {"main.py": source}, limits=LIMITS))
    if ended.verdict == "infrastructure_error":
        raise ToolsFailed(f"the sandbox failed: {ended.detail}")
    result: dict[str, Any] = {"verdict": ended.verdict, "stdout": _decode_output(ended.stdout)}
    if ended.verdict != "passed":
        result |= {"detail": ended.detail, "stderr": _decode_output(ended.stderr, end=True)}
    return result


def _decode_output(raw: bytes, *, end: bool = False) -> str:
    """Decode an output and cut it. With `end`, keep the end, where a traceback names the error."""
    text = raw.decode("utf-8", errors="replace")
    left_out = len(text) - SHOWN_CHARACTERS
    if left_out <= 0:
        return text
    note = f"({left_out} characters are left out)"
    kept = text[-SHOWN_CHARACTERS:] if end else text[:SHOWN_CHARACTERS]
    return f"{note}\n{kept}" if end else f"{kept}\n{note}"
