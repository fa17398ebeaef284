"""Tests of a task, as users write them in a data row."""

from __future__ import annotations

from typing import Any

import pytest

from sixfold_environments.code.task_tests import TestsError, read_tests

CALL = {"args": [1], "expected": 2}
LINE = {"input": "1\n", "expected": "2\n"}


@pytest.mark.parametrize(
    ("tests", "key", "hint"),
    [
        ({"type": "function", "fn_nmae": "f", "cases": [CALL]}, "fn_nmae", "fn_name"),
        ({"type": "stdin", "cases": [LINE], "time_limit": 3}, "time_limit", "time_limit_s"),
        ({"type": "stdin", "cases": [{"stdin": "1\n", "expected": "2\n"}]}, "stdin", ""),
        (
            {"type": "function", "fn_name": "f", "hidden": [{"arg": [1], "expected": 2}]},
            "arg",
            "args",
        ),
    ],
)
def test_a_key_that_nothing_reads_is_refused(tests: Any, key: str, hint: str) -> None:
    with pytest.raises(TestsError) as error:
        read_tests(tests)
    assert repr(key) in str(error.value)
    assert (f"Did you mean '{hint}'?" in str(error.value)) == bool(hint)
