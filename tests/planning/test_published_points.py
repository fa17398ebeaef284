"""`sixfold plan --points`: predictions beside 112 published measurements."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from sixfold.cli import main
from sixfold.errors import UserError
from sixfold_planning.constants import CONSTANTS
from sixfold_planning.page.points import Outcome, errors, outcomes, read_points, summary
from sixfold_planning.published import INPUTS, NotPredictable, Point, predict

FILE = Path(__file__).parents[1] / "data" / "published_points.csv"

UNPREDICTABLE = {
    "P158": "model",  # "(unspecified)"
    "P168": "model",  # a model whose sizes are not public, on an unnamed GPU
    "P219": "text",
    "P222": "text",
    "P223": "text",
    "P226": "rule",  # publishes a setting
    "P233": "text",
}
"""Row -> a word of the reason."""


@cache
def points() -> tuple[Point, ...]:
    return tuple(read_points(FILE))


@cache
def found() -> tuple[Outcome, ...]:
    return tuple(outcomes(points(), CONSTANTS))


def test_every_row_is_predicted_or_has_a_reason() -> None:
    assert len(points()) == 112
    by_row = {o.point.text("id"): o for o in found() if o.leads or o.predicted is None}
    assert set(by_row) == {point.text("id") for point in points()}
    reasons = {
        point.text("id"): [o.reason for o in found() if o.point is point]
        for point in points()
        if not any(o.predicted is not None for o in found() if o.point is point)
    }
    assert set(reasons) == set(UNPREDICTABLE)
    for row, word in UNPREDICTABLE.items():
        assert all(word in reason for reason in reasons[row]), reasons[row]
    assert all(o.reason for o in found() if o.predicted is None)


def test_the_errors_are_within_the_goal() -> None:
    groups = {group.name.strip(): group for group in summary(found())}
    leads = groups["one value per row"]
    assert leads.count == 112 - len(UNPREDICTABLE)
    assert leads.median <= 0.15
    assert leads.p90 <= 0.40
    complete = groups["all inputs published"]
    assert complete.count >= 60
    assert complete.median <= 0.10 and complete.p90 <= 0.25
    assert groups["memory"].median <= 0.15


def test_predictions_do_not_read_published_values() -> None:
    for point in points():
        if not point.published:
            continue
        changed = replace(point, published={key: 1.0 for key in point.published})
        assert _values(point) == _values(changed), point.text("id")


def test_predictions_do_not_read_the_row_s_name_or_place() -> None:
    for point in points():
        texts = point.texts | {"id": "P999", "source_loc": "", "status": ""}
        assert _values(point) == _values(replace(point, texts=texts)), point.text("id")


def _values(point: Point) -> dict[str, float] | str:
    try:
        return predict(point, CONSTANTS).values
    except NotPredictable as problem:
        return str(problem)


@pytest.mark.parametrize("column", INPUTS)
def test_a_row_without_a_column_is_predicted_or_has_a_reason(column: str) -> None:
    for point in [p for p in points() if column in p.inputs][::4]:
        inputs = {name: value for name, value in point.inputs.items() if name != column}
        values = _values(replace(point, inputs=inputs))
        assert values and (
            isinstance(values, str) or all(x >= 0 and math.isfinite(x) for x in values.values())
        )


@pytest.mark.parametrize(
    ("row", "column", "quantity", "slower"),
    [
        ("P007", "prompts_or_gbs", "step_s", True),
        ("P007", "avg_len", "step_s", True),
        ("P007", "n_gpus", "step_s", False),
        ("P106", "samples_per_prompt", "step_s", True),
        ("P104", "active_b", "step_s", True),
        ("P170", "active_b", "tokens_s_gpu", False),
        ("P125", "params_b", "sync_s", True),
    ],
)
def test_a_larger_input_moves_the_prediction(
    row: str, column: str, quantity: str, slower: bool
) -> None:
    point = next(p for p in points() if p.text("id") == row)
    before = predict(point, CONSTANTS).values[quantity]
    inputs = point.inputs | {column: 1.2 * point.inputs.get(column, 235.0)}
    if column == "active_b":
        inputs["params_b"] = inputs["active_b"]
    after = predict(replace(point, inputs=inputs), CONSTANTS).values[quantity]
    assert (after > before) is slower and after != before


def test_assumed_inputs_are_named() -> None:
    assumed = {o.point.text("id"): o.assumed for o in found() if o.leads}
    assert assumed["P007"] == ()
    assert assumed["P106"] == ("avg_len",)
    assert set(assumed["P133"]) == {"prompts_or_gbs", "samples_per_prompt", "avg_len"}


def test_the_summary_s_statistics() -> None:
    point = points()[0]
    ten = [Outcome(point, "step_s", 100.0, 100.0 + x) for x in range(1, 11)]
    group = errors("ten", [*ten, Outcome(point, "step_s", 1.0, None)])
    assert (group.count, group.median, group.p90) == (10, pytest.approx(0.055), pytest.approx(0.09))
    assert errors("none", []).count == 0 and math.isnan(errors("none", []).median)


def test_the_command_prints_every_row_and_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--points", str(FILE)]) == 0
    text = capsys.readouterr().out
    assert all(f"\n{point.text('id')} " in text for point in points())
    assert "predicted" in text and "published" in text and "one value per row" in text
    assert "112 rows, 7 of them not predictable" in text


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--points", str(FILE), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert len({value["id"] for value in record["values"]}) == 112
    first = record["values"][0]
    assert first["error"] == pytest.approx(first["predicted"] / first["published"] - 1)


def test_one_new_row_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(
        "id,framework,model,workload,gpu,n_gpus,max_len,tokens_s_gpu\n"
        "X1,torchtitan FSDP+compile,Llama-3.1-8B,pretrain,H100,8,8192,7000\n"
        "X2,torchtitan FSDP+compile,Llama-3.1-8B,pretrain,H1000000,8,8192,7000\n"
        "X3,torchtitan FSDP+compile,Llama-3.1-8B,pretrain,H100,8-16,8192,7000\n"
    )
    known, unknown, wordy = outcomes(read_points(path), CONSTANTS)
    assert wordy.predicted is None and "n_gpus = '8-16'" in wordy.reason
    assert known.predicted is not None and 3000 < known.predicted < 15000
    assert unknown.predicted is None and "H1000000" in unknown.reason


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("id,framework,model,workload\nX,a,b,c\n", "'gpu'"),
        ("id,framework,model,workload,gpu,n_gpus\nX,a,b,pretrain,H100,-8\n", "line 2: n_gpus"),
        ("id,framework,model,workload,gpu,max_len\nX,a,b,pretrain,H100,inf\n", "max_len = 'inf'"),
        ("id,framework,model,workload,gpu,step_s\nX,a,b,RL step,H100,0\n", "step_s = '0'"),
        ("id,framework,model,workload,gpu\n", "no rows"),
        ("", "'id'"),
    ],
)
def test_a_wrong_file_is_an_error_on_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, named: str
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    assert main(["plan", "--points", str(path)]) == 2
    error = capsys.readouterr().err
    assert named in error and str(path) in error and error.count("\n") == 1


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_points(tmp_path / "none.csv")


def test_the_command_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 2
    assert "--points" in capsys.readouterr().err
