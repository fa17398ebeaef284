"""Pretraining, SFT on other rows, and rejection sampling, as stages of one run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sixfold.errors import UserError
from sixfold.model.loading import load_policy
from sixfold.model.weights_hash import weights_hash
from sixfold.recipe.schema import ModelConfig
from sixfold.recipe.stages import StagedRecipe
from sixfold.recipe.toml import parse_staged
from sixfold.stages.driver import train_stages
from tests.run.processes import start
from tests.stages.staged_runs import flags, result

TEXT = """\
run.name = "p"

[[stages]]
kind = "pretrain"
pretrain.steps = 3
pretrain.examples_per_step = 4
pretrain.warmup_steps = 0

[[stages]]
kind = "sft"
name = "worked"
sft.steps = 60
sft.learning_rate = 2e-2

[[stages]]
kind = "sample"
sample.samples = 4
sample.tasks = 12
sample.keep = "best"

[[stages]]
kind = "sft"
name = "kept"
data.source = "stage:sample"
sft.steps = 3
"""


def staged(place: Path, text: str = TEXT, **overrides: Any) -> StagedRecipe:
    return parse_staged(text, "p.toml", flags(place, **overrides))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kinds")


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    assert train_stages(staged(place)) == 0
    return Path(shutil.copytree(place / "p", place / "whole"))


@pytest.fixture
def run(whole: Path, place: Path) -> Iterator[Path]:
    shutil.rmtree(place / "p", ignore_errors=True)
    yield Path(shutil.copytree(whole, place / "p"))
    shutil.rmtree(place / "p", ignore_errors=True)


def summary(run: Path, stage: str) -> dict[str, Any]:
    return json.loads((run / "stages" / stage / "summary.json").read_bytes())  # type: ignore[no-any-return]


def rows(run: Path) -> list[dict[str, Any]]:
    lines = (run / "stages" / "sample" / "dataset.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.nightly
@pytest.mark.slow
def test_pretraining_reports_bits_per_byte(whole: Path) -> None:
    metrics = result_of(whole, "pretrain")
    line = next(line for line in metrics if "heldout/loss" in line)
    # One byte per token, except the special ones, which have none.
    assert 1 < line["heldout/bits_per_byte"] / (line["heldout/loss"] / 0.6931471805599453) < 2


def result_of(run: Path, stage: str) -> list[dict[str, Any]]:
    lines = (run / "stages" / stage / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_kept_completions_are_the_training_tasks_of_the_next_stage(whole: Path) -> None:
    found = rows(whole)
    assert 0 < len(found) <= 12 and len({row["provenance"]["task"] for row in found}) == len(found)
    assert summary(whole, "sample")["counts"]["kept"] == len(found)
    worked = whole / "stages" / "worked" / "checkpoints" / "step-000060" / "model"
    sampler = load_policy(ModelConfig(path=str(worked)), seed=0, device="cpu")
    assert {row["provenance"]["model"] for row in found} == {weights_hash(sampler.weights())}
    # Evaluated on the held-out tasks of the recipe, which are no rows of the dataset.
    assert summary(whole, "kept")["heldout_tasks"] == 8


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["blocks.renamed:1", "blocks.written:3", "artifact.publish:5"])
def test_a_kill_while_sampling_loses_at_most_a_block(
    run: Path, whole: Path, place: Path, fault: str
) -> None:
    shutil.rmtree(run)
    process = start(flags(place), place / "errors", fault=fault, text=TEXT)
    process.join()
    assert process.exitcode == 137, (place / "errors").read_text()
    assert train_stages(staged(place), resume=run) == 0
    assert rows(run) == rows(whole)
    assert result(run) == result(whole)
    assert summary(run, "sample")["tokens_sampled"] == summary(whole, "sample")["tokens_sampled"]


@pytest.mark.slow
def test_a_dataset_that_is_written_is_published_and_not_sampled_again(
    run: Path, whole: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill between the two."""
    (run / "stages" / "sample" / "artifact.json").unlink()
    assert summary(run, "sample")["tokens_sampled"] > len(rows(run))
    monkeypatch.setattr(
        "sixfold.stages.sample.SampleRun._sample", lambda *a: pytest.fail("sampled again")
    )
    assert train_stages(staged(place), resume=run) == 0
    assert result(run) == result(whole)


@pytest.mark.slow
def test_blocks_sampled_under_other_settings_are_refused(run: Path, place: Path) -> None:
    folder = run / "stages" / "sample"
    (folder / "artifact.json").unlink()
    shutil.rmtree(run / "stages" / "kept")
    (folder / "sampled_from.json").write_text(json.dumps({"rollout.temperature": 0.5}))
    with pytest.raises(UserError, match=r"sampled under another rollout\.temperature \(0\.5, now"):
        train_stages(staged(place), resume=run)


@pytest.mark.slow
def test_a_stage_that_keeps_too_little_says_why(run: Path, place: Path) -> None:
    harder = staged(place, TEXT.replace('keep = "best"', 'keep = "best"\nsample.min_rows = 99'))
    with pytest.raises(UserError, match=r"sample\.min_rows = 99, but \d+ completions are kept"):
        train_stages(harder, first="sample")


CHATS = [
    {"messages": [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": "#2"}]}
    for n in range(12)
]
"""Conversations for a model that knows digits and signs."""

ON_CHATS = """\
run.name = "p"

[[stages]]
kind = "sft"
data.source = "SOURCE"
data.heldout = 3
sft.steps = 2
"""


@pytest.mark.slow
def test_conversations_are_trained_and_measured_without_tasks(tmp_path: Path) -> None:
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    only = [f for f in flags(tmp_path)]
    for name in ("--data.heldout", "--data.arithmetic.digits"):
        at = only.index(name)
        del only[at : at + 2]
    text = ON_CHATS.replace("SOURCE", str(source))
    assert train_stages(parse_staged(text, "p.toml", only)) == 0
    (line,) = [x for x in result_of(tmp_path / "p", "sft") if "heldout/loss" in x]
    assert line["heldout/loss"] > 0 and "heldout/accuracy" not in line
    assert "heldout_tasks" not in summary(tmp_path / "p", "sft")
    # Other rows under the same name are noticed.
    (tmp_path / "p" / "stages" / "sft" / "artifact.json").unlink()
    source.write_text(source.read_text().replace("#2", "#3"))
    with pytest.raises(UserError, match="was trained on other examples"):
        train_stages(parse_staged(text, "p.toml", only), resume=tmp_path / "p")


@pytest.mark.slow
def test_conversations_that_open_with_a_held_out_task_are_not_trained(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The rows are all sums of two digits, and 8 sums of the recipe are held out."""
    sums = [f"{a}+{b}=" for a in range(10) for b in range(10)]
    source = tmp_path / "pairs.jsonl"
    source.write_text(
        "".join(json.dumps({"prompt": text, "completion": "#1"}) + "\n" for text in sums)
    )
    text = ON_CHATS.replace("SOURCE", str(source)).replace("data.heldout = 3\n", "")
    for name, changes in (("p", {}), ("q", {"sft__form": "prompt_completion"})):
        assert train_stages(staged(tmp_path, text.replace('"p"', f'"{name}"'), **changes)) == 0
        # The stage sets aside 8 rows of its own, one of which is one of the held-out sums.
        assert "7 conversations left out: their prompts are held out" in capfd.readouterr().err
        assert summary(tmp_path / name, "sft")["heldout_tasks"] == 8


@pytest.mark.slow
def test_a_student_learns_from_the_answers_of_a_teacher(whole: Path, place: Path) -> None:
    teacher = whole / "stages/worked/checkpoints/step-000060/model"
    text = f"""
run.name = "distilled"

[[stages]]
kind = "distill"
teacher = "{teacher}"
sample.samples = 4
sample.tasks = 12
sample.keep = "best"
sft.steps = 4
sft.learning_rate = 1e-2
"""
    asked = [*flags(place), "--stages.distill.model.scratch.layers", "2"]
    assert train_stages(parse_staged(text, "p.toml", asked)) == 0
    run = place / "distilled"
    sampler = load_policy(ModelConfig(path=str(teacher)), seed=0, device="cpu")
    assert summary(run, "distill-answers")["model"] == weights_hash(sampler.weights())
    losses = [line["heldout/loss"] for line in result_of(run, "distill") if "heldout/loss" in line]
    assert losses == sorted(losses, reverse=True) and len(losses) == 2
    student = next((run / "stages/distill").glob("checkpoints/*/model/config.json"))
    assert json.loads(student.read_bytes())["num_hidden_layers"] == 2
