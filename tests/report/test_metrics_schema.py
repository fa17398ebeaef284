"""The schema is the page, the logger's gate, and the trainer's bins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sixfold.report import schema
from sixfold.report.rewards import reward_metrics
from sixfold.report.schema import adopt, check
from sixfold.types import Group, Reward, Task, Trajectory

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_docs_page_is_what_the_module_prints() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    printed = subprocess.run(
        [sys.executable, "-m", "sixfold.report.schema"],
        capture_output=True,
        encoding="utf-8",
        check=True,
    ).stdout
    assert page == printed, "run: python -m sixfold.report.schema > docs/metrics.md"
    for metric in schema.METRICS:
        assert f"| `{metric.key}` | {metric.unit} |" in page


def test_every_table_row_has_four_cells() -> None:
    rows = [line for line in schema.render_markdown().splitlines() if line.startswith("| `")]
    assert len(rows) == len(schema.METRICS)
    for row in rows:
        assert row.replace(r"\|", "").count("|") == 5, row


def test_keys_are_unique_and_families_need_a_name() -> None:
    keys = [metric.key for metric in schema.METRICS]
    assert len(set(keys)) == len(keys)
    part = schema.find("reward/part/format")
    assert part is not None and part.key == "reward/part/*"
    assert schema.find("reward/part/") is None
    assert schema.find("reward/parts/format") is None


@pytest.mark.parametrize("value", [True, "0.5", {"a": 1}, [1, 2], b"1"])
def test_a_value_that_is_no_number_is_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError, match="train/loss"):
        schema.check({"train/loss": value})  # type: ignore[dict-item]


def test_a_list_is_for_the_metrics_that_are_lists() -> None:
    schema.check({"train/ratio_hist": [0, 1.5, None]})
    with pytest.raises(ValueError, match="must be a list of Python ints or floats"):
        schema.check({"train/ratio_hist": [1, "2"]})  # type: ignore[dict-item]


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'train/los'.*Did you mean 'train/loss'\?"):
        schema.check({"train/los": 1.0})


def test_role_seconds_add_up_to_the_step() -> None:
    seconds = schema.role_seconds(
        {"time/total_s": 2.0, "time/rollout_s": 1.2, "time/trainer_s": 0.5, "train/loss": 9.0}
    )
    assert seconds == pytest.approx({"rollout": 1.2, "trainer": 0.5, "other": 0.3})


@pytest.mark.slow
def test_package_needs_no_torch() -> None:
    code = (
        "import sys; import sixfold.report.html, sixfold.report.loggers,"
        " sixfold.report.progress;sys.exit(any(name in sys.modules for name in ('torch',"
        " 'tensorboard', 'trackio', 'wandb', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_length_of_solved_completions() -> None:
    """Nearest rank: of 60 solved answers of lengths 1 to 60 the 59th; what was not solved, however
    long, says nothing.
    """

    def answer(length: int, solved: bool | None) -> Trajectory:
        reward = Reward(None, error="broken") if solved is None else Reward(0.9, solved=solved)
        zeros = [0] * length
        return Trajectory.one_turn("t", 0, [0], zeros, zeros, zeros, "stop", reward=reward)

    solved = [answer(n, True) for n in range(1, 61)]
    group = Group(Task("t", ""), [*solved, answer(500, False), answer(600, None)])
    metrics = reward_metrics([group])
    assert metrics["rollout/solved_length_p98"] == 59
    assert metrics["reward/solved_frac"] == 60 / 61, "a failed check is not counted"
    assert "rollout/solved_length_p98" not in reward_metrics(
        [Group(Task("t", ""), [answer(5, False)])]
    )


def test_an_algorithms_own_keys_are_adopted_under_a_prefix() -> None:
    metrics: dict[str, object] = {
        "train/loss": 1.0,
        "my_share": np.float32(0.5),
        "deep/er": torch.tensor(2),
        "odd": "x",
        "many": torch.zeros(2),
    }
    lines = adopt(metrics)
    assert metrics == {"train/loss": 1.0, "custom/my_share": 0.5, "custom/deep/er": 2.0}
    check(metrics)  # type: ignore[arg-type]
    assert len(lines) == 2 and "'odd'" in lines[0] and "'many'" in lines[1]


def test_metrics_that_depend_on_time_are_listed_as_such() -> None:
    for metric in schema.METRICS:
        timed = metric.key.startswith("time/") or metric.key.endswith("_s")
        assert not timed or metric.depends_on_time, metric.key
    for key in (
        "rollout/queue_peak",
        "rollout/kv_peak_frac",
        "time/check_p50_s/mine",
        "train/tok_s",
    ):
        assert schema.depends_on_time(key), key
    for key in ("reward/mean", "loss/policy", "train/grad_norm", "rollout/tokens", "unheard/of"):
        assert not schema.depends_on_time(key), key
    preface = " ".join(schema.render_markdown().partition("## Step")[0].split())
    listed, _, oversampled = preface.partition("every key in s or tokens/s, and ")[2].partition(
        " With `rollout.oversample`, also "
    )
    assert oversampled.split() == ["`tokens_total`", "and", "`rollout/tokens`."]
    assert [m.key for m in schema.METRICS if m.timed] == [
        word.strip("`.,") for word in listed.split() if word != "and"
    ]
