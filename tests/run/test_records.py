"""Files of a run besides its metrics: their table, and the result of the pre-flight."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from sixfold.cli import main
from sixfold.recipe.toml import parse_recipe
from sixfold.run.start import train_run

from .processes import tiny_recipe


def train(folder: Path, *, resume: Path | None = None, **overrides: object) -> Path:
    recipe = parse_recipe(
        'run.name = "r"',
        "test",
        tiny_recipe(folder, run__name="r", data__heldout=2, eval__every=3, **overrides),
    )
    assert train_run(recipe, resume=resume) == 0
    return folder / "r"


@pytest.mark.slow
def test_the_table_of_a_resumed_run_equals_its_lines(tmp_path: Path) -> None:
    """The checkpoint is of step 4, the lines and the table reach step 5; held-out keys come with
    step 3.
    """
    run = train(tmp_path, run__steps=5, log__to=["csv"], checkpoint__every=4)
    (newest,) = (run / "checkpoints").glob("step-000005")
    for file in sorted(newest.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    newest.rmdir()
    train(tmp_path, resume=run, run__steps=6, log__to=["csv"], checkpoint__every=4)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    with (run / "metrics.csv").open(newline="") as file:
        rows = [
            {key: float(cell) for key, cell in row.items() if cell} for row in csv.DictReader(file)
        ]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows == [
        {key: value for key, value in record.items() if not isinstance(value, list)}
        for record in records
    ]
    assert (
        "heldout/accuracy" in rows[2]
        and "heldout/accuracy" not in rows[0]
        and "reward/part/arithmetic" in rows[0]
    )


@pytest.mark.slow
def test_there_is_no_table_unless_asked_for_and_none_that_is_not_kept_up(tmp_path: Path) -> None:
    run = train(tmp_path, run__steps=1)
    assert not (run / "metrics.csv").exists()
    train(tmp_path, resume=run, run__steps=2, log__to=["csv"])
    assert len((run / "metrics.csv").read_text().splitlines()) == 3
    train(tmp_path, resume=run, run__steps=3)
    assert not (run / "metrics.csv").exists()


@pytest.mark.slow
def test_reward_that_any_answer_earns_gives_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "free.py").write_text("def free(completion, task):\n    return 1.0\n")
    (tmp_path / "r.toml").write_text('run.name = "r"\n')
    settings = tiny_recipe(
        tmp_path,
        run__name="r",
        run__steps=1,
        data__heldout=2,
        environment__rewards=f"{tmp_path}/free.py:free",
        environment__preflight=4,
    )
    assert main(["train", str(tmp_path / "r.toml"), *settings]) == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert (
        "pre-flight: the reward can be earned without solving the task: random text earns 1 and the"
        " constant answer '' earns 1 per task" in said
    )
    found = json.loads((tmp_path / "r" / "summary.json").read_text())["preflight"]
    assert (found["solved"], found["random_answer"], found["constant_answer"]) == (
        1.0,
        1.0,
        1.0,
    ) and "earned without solving" in found["warning"]


@pytest.mark.slow
def test_an_honest_reward_is_not_called_out_and_a_resume_keeps_what_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hard = {"data__arithmetic__digits": 3, "data__limit": 60}
    run = train(tmp_path, run__steps=1, environment__preflight=4, **hard)
    train(tmp_path, resume=run, run__steps=2, environment__preflight=4, **hard)
    assert "earned without solving" not in "".join(capsys.readouterr())
    found = json.loads((run / "summary.json").read_text())["preflight"]
    assert sum(found["verdicts"].values()) == 4
    assert set(found["verdicts"]) <= {"passed", "wrong_answer"}
    assert found["rollouts"] == 4 and (
        found["random_answer"],
        found["constant_answer"],
        found["warning"],
    ) == (0.0, 0.0, "")


@pytest.mark.slow
def test_checks_that_fail_on_nonsense_do_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def strict(completion: str, task: object) -> float:
        if not re.fullmatch(r"[0-9+\-*/=()<>#;:,.? a-z\n|]*", completion) or len(completion) < 2:
            raise ValueError("not an answer")
        return 0.5

    recipe = parse_recipe(
        'run.name = "r"',
        "test",
        tiny_recipe(
            tmp_path, run__name="r", run__steps=1, data__heldout=0, environment__preflight=4
        ),
    )
    recipe = recipe.model_copy(
        update={"environment": recipe.environment.model_copy(update={"error_budget": 0.2})}
    )
    assert train_run(recipe, reward=strict) == 0
    assert "rewards of random and constant answers are unknown" in " ".join(
        "".join(capsys.readouterr()).split()
    )


@pytest.mark.nightly
@pytest.mark.slow
def test_time_goes_to_a_reference_only_where_there_is_one(tmp_path: Path) -> None:
    """Making tensors of trajectories took 19 % of a step, under the name of a reference that did
    not exist.
    """
    keys = {}
    for name, more in (
        ("none", {}),
        ("kept", {"algorithm__beta": 0.1}),
        ("critic", {"algorithm__name": "ppo", "algorithm__beta": 0}),
    ):
        run = train(tmp_path / name, run__steps=1, **more)
        (line,) = (run / "metrics.jsonl").read_text().splitlines()
        keys[name] = set(json.loads(line))
        assert "time/batch_s" in keys[name] and json.loads(line)["train/tok_s"] > 0
    scored = {
        name: sorted(found & {"time/reference_s", "time/scoring_s"}) for name, found in keys.items()
    }
    assert scored == {"none": [], "kept": ["time/reference_s"], "critic": ["time/scoring_s"]}


@pytest.mark.slow
def test_warnings_are_kept_for_the_report(tmp_path: Path) -> None:
    """A reward that pays for everything: too easy, and free."""
    (tmp_path / "free.py").write_text("def free(completion, task):\n    return 10.0\n")
    run = train(
        tmp_path,
        run__steps=1,
        environment__rewards=f'["{tmp_path}/free.py:free"]',
        environment__preflight=4,
    )
    notes = [json.loads(line) for line in (run / "notes.jsonl").read_text().splitlines()]
    said = " ".join(note["text"] for note in notes if note["warning"] and note["step"] == 0)
    assert (
        "too easy" in said
        and "free >= 1" in said
        and "set eval.solved_at" in said
        and "earned without solving" in said
    )
    assert "earned without solving" in (run / "report.html").read_text().split('id="curves"')[0]
    assert json.loads((run / "summary.json").read_text())["heldout_after"] == 1.0, (
        "a share, however large the reward"
    )
