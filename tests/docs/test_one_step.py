"""docs/one-step.md quotes what docs/one_step.py prints, all of it and in order."""

from __future__ import annotations

import importlib.util
import math
import re
from itertools import zip_longest
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def quoted() -> list[str]:
    """The lines of the page's text blocks."""
    blocks = re.findall(
        r"^```text\n(.*?)^```",
        (DOCS / "one-step.md").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    return [line for block in blocks for line in block.splitlines()]


def words(line: str) -> list[str]:
    """The line without its numbers, however wide they were printed."""
    return NUMBER.sub(" # ", line).split()


def test_the_page_quotes_what_the_script_prints(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("one_step", DOCS / "one_step.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    for said, printed in zip_longest(quoted(), capsys.readouterr().out.splitlines(), fillvalue=""):
        assert words(said) == words(printed), (
            f"docs/one-step.md says {said!r}, the script prints {printed!r}"
        )
        for a, b in zip(NUMBER.findall(said), NUMBER.findall(printed), strict=True):
            assert math.isclose(float(a), float(b), abs_tol=3e-4), f"{a} for {b} in {printed!r}"
