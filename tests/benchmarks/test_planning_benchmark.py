"""`benchmarks/planning.py`: the step that it measures, and the flags of its runs."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
from tests.report.test_predicted import PREDICTION, logged

from sixfold_planning.prediction import FILE


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    return importlib.import_module("planning")


def test_a_measured_step_has_the_time_of_its_log_once(harness: ModuleType, tmp_path: Path) -> None:
    """The total of a step contains it already."""
    line = logged() | {"time/total_s": 9.0, "time/log_s": 2.0}
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(line)}\n" * (harness.WARM_UP + 3))
    (tmp_path / FILE).write_text(json.dumps(PREDICTION.record()))
    assert harness.placed_row("case", tmp_path, 0.0).measured == 9.0


@pytest.mark.parametrize(
    "flags",
    [
        ("--cases", "demo", "--rollout.max_new_tokens", "8"),
        ("--cases", "placed", "--hardwares", "X"),
        ("--hardwares", "X"),
        ("--rollout.max_new_tokens", "8", "--run.threads"),
    ],
)
def test_flags_without_a_use_are_refused(
    harness: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
) -> None:
    def measured_machine(*_: object) -> None:
        raise AssertionError("the flags were taken")

    monkeypatch.setattr("sys.argv", ["planning.py", *flags])
    monkeypatch.setattr(harness, "measured_machine", measured_machine)
    with pytest.raises(SystemExit):
        harness.main()
    assert "settings of a run are for the case placed" in capsys.readouterr().err
