"""Whole runs of preference stages: references, adapters, kills, online rounds, mistakes."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from sixfold.checkpoint.listing import list_checkpoints
from sixfold.errors import UserError
from sixfold.recipe.memory import memory_of
from sixfold.recipe.schema import PreferenceConfig, SftConfig
from sixfold.recipe.toml import parse_staged
from sixfold.stages.driver import train_stages
from sixfold.stages.plans import stage_plans
from tests.run.processes import metrics
from tests.stages.staged_runs import flags

PAIRS = 12


def write_pairs(folder: Path) -> Path:
    """Sums with a right and a wrong answer, as rows of a file."""
    rng, path = random.Random(0), folder / "pairs.jsonl"
    rows = []
    for number in rng.sample(range(100), PAIRS):
        a, b = divmod(number, 10)
        wrong = a + b + rng.choice((1, 2, 10))
        # Three terms: no held-out task of the recipe has this prompt.
        rows.append({"prompt": f"{a}+{b}+0=", "chosen": str(a + b), "rejected": str(wrong)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(folder: Path, *lines: str, resume: bool = False, **overrides: Any) -> Path:
    """Train a run of one stage, and return the folder of the stage."""
    text = "\n".join(
        [
            'run.name = "p"',
            "[[stages]]",
            'kind = "preference"',
            f'data.source = "{write_pairs(folder)}"',
            "preference.examples_per_step = 4",
            *lines,
        ]
    )
    settings = {"checkpoint__every": 1, "checkpoint__keep": 9, "data__heldout": 4}
    staged = parse_staged(text, "p.toml", flags(folder, **settings | overrides))
    assert train_stages(staged, resume=folder / "p" if resume else None) == 0
    return folder / "p" / "stages" / "preference"


def hash_of(stage: Path) -> str:
    return str(json.loads((stage / "artifact.json").read_bytes())["sha256"])


def cut(stage: Path, kept: int) -> None:
    """Leave a stage as a kill after its step `kept` leaves it."""
    for path in list_checkpoints(stage / "checkpoints"):
        if int(path.name.removeprefix("step-")) > kept:
            shutil.rmtree(path)
    for name in ("artifact.json", "summary.json"):
        (stage / name).unlink()


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "loss"),
    [("frozen", "dpo"), ("cached", "dpo"), ("frozen", "beta_dpo"), ("cached", "bco")],
)
def test_a_stage_resumes_with_the_same_bits(tmp_path: Path, reference: str, loss: str) -> None:
    """Beta-DPO and BCO keep an average over the steps."""
    lines = (
        "preference.epochs = 2",
        f'preference.reference = "{reference}"',
        f'preference.losses = ["{loss}"]',
    )
    stage = train(tmp_path, *lines)
    whole, made = metrics(stage), hash_of(stage)
    assert [line["step"] for line in whole] == [1, 2, 3, 4]  # 8 of 12 pairs are trained
    cut(stage, 2)
    train(tmp_path, *lines, resume=True)
    assert metrics(stage) == whole and hash_of(stage) == made
    first, last = whole[0], whole[-1]
    if loss == "bco":
        return
    assert first["preference/margin"] == pytest.approx(0.0, abs=1e-6)
    assert last["preference/margin"] > 0 and last["train/loss"] < first["train/loss"]
    assert last["preference/heldout_accuracy_low"] <= last["preference/heldout_accuracy"]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_cached_reference_is_the_frozen_one(tmp_path: Path) -> None:
    found = {}
    for reference in ("frozen", "cached"):
        (tmp_path / reference).mkdir()
        shared = [f'preference.cache = "{tmp_path / "logp"}"'] if reference == "cached" else []
        lines = ("preference.steps = 3", f'preference.reference = "{reference}"', *shared)
        found[reference] = metrics(train(tmp_path / reference, *lines))
    for a, b in zip(found["frozen"], found["cached"], strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], abs=1e-5)
        assert b["preference/chosen_shift"] == pytest.approx(a["preference/chosen_shift"], abs=1e-4)
    (file,) = (tmp_path / "logp").iterdir()
    before = file.read_bytes()
    (tmp_path / "again").mkdir()
    train(
        tmp_path / "again",
        "preference.steps = 3",
        'preference.reference = "cached"',
        f'preference.cache = "{tmp_path / "logp"}"',
        "preference.beta = 0.5",
    )
    assert file.read_bytes() == before and len(list((tmp_path / "logp").iterdir())) == 1


@pytest.mark.mostly_nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("loss", ["kto", "bco", "simpo", "beta_dpo"])
def test_losses_of_other_kinds_train_and_are_evaluated(tmp_path: Path, loss: str) -> None:
    logged = metrics(train(tmp_path, "preference.steps = 2", f'preference.losses = ["{loss}"]'))
    key = "liked_reward" if loss in ("kto", "bco") else "margin"
    assert all(f"preference/{key}" in line for line in logged)
    assert logged[-1]["preference/heldout_loss"] > 0


@pytest.mark.slow
def test_rankings_are_labelled_for_losses_of_single_completions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": f"{n}+0+0=", "completions": [str(n), "7", "8"], "scores": [3, 2, 0]}
        for n in range(6)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f'data.source = "{tmp_path / "rows.jsonl"}"'
    stage = '[[stages]]\nkind = "preference"\npreference.steps = 1\npreference.losses = ["kto"]'
    staged = parse_staged(
        f'run.name = "p"\n{stage}\n{source}', "p.toml", flags(tmp_path, data__heldout=2)
    )
    assert train_stages(staged) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "counts as liked if its grade is above the mean of its comparison" in said
    (line,) = metrics(next((tmp_path / "p" / "stages").iterdir()))
    assert line["preference/liked_frac"] == pytest.approx(2 / 3)


@pytest.mark.slow
def test_an_adapter_learns_and_is_saved(tmp_path: Path) -> None:
    base = train(tmp_path, "preference.steps = 1")
    model = base / json.loads((base / "artifact.json").read_bytes())["path"] / "model"
    (tmp_path / "adapted").mkdir()
    stage = train(
        tmp_path / "adapted",
        "preference.steps = 3",
        "preference.learning_rate = 0.05",
        f'model.path = "{model}"',
        "model.lora.rank = 2",
    )
    logged = metrics(stage)
    assert logged[0]["preference/margin"] == pytest.approx(0.0, abs=1e-6)
    assert logged[-1]["preference/margin"] != pytest.approx(0.0, abs=1e-4)
    assert json.loads((stage / "artifact.json").read_bytes())["made"] == "adapter"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("lora", ["", "model.lora.rank = 2"])
def test_online_rounds_train_on_what_the_newest_policy_samples(tmp_path: Path, lora: str) -> None:
    text = f"""\
run.name = "p"
[[stages]]
kind = "sft"
sft.steps = 4
[[stages]]
kind = "online"
rounds = 2
environment.rewards = ["tests/stages/graded.py:shorter"]
sample.tasks = 8
sample.samples = 32
preference.steps = 1
preference.examples_per_step = 4
{lora}
"""
    text = text.replace("tests/stages", str(Path(__file__).parent))
    staged = parse_staged(text, "p.toml", flags(tmp_path))
    kinds = [(stage.kind, stage.name) for stage in staged.stages]
    assert kinds[1:] == [
        ("sample", "online-1-samples"),
        ("preference", "online-1"),
        ("sample", "online-2-samples"),
        ("preference", "online"),
    ]
    assert dict(staged.stages[3].inputs)["model.path"] == "online-1"
    assert train_stages(staged) == 0
    rows = {
        number: [
            json.loads(line)
            for line in (tmp_path / f"p/stages/online-{number}-samples/dataset.jsonl").open()
        ]
        for number in (1, 2)
    }
    models = {number: {row["provenance"]["model"] for row in rows[number]} for number in rows}
    assert len(models[1]) == len(models[2]) == 1 and models[1] != models[2]
    tasks = {number: {row["provenance"]["task"] for row in rows[number]} for number in rows}
    assert tasks[1] != tasks[2]
    logged = metrics(tmp_path / "p/stages/online")
    assert logged[0]["train/loss"] > 0
    assert [line["preference/on_policy_frac"] for line in logged] == [1.0]
    table = json.loads((tmp_path / "p/stages.json").read_bytes())
    assert [row["on_policy"] for row in table] == [None, None, 1.0, None, 1.0]


MISTAKES = [
    (('preference.losses = ["dpoo"]',), "no loss 'dpoo'. Did you mean 'dpo'"),
    (('preference.losses = ["kto", "dpo"]',), "'kto' takes single completions"),
    (("preference.weights = [1.0, 2.0]",), "preference.weights has 2 numbers"),
    (("preference.target_margin = 1.0",), "preference.target_margin has no effect on the loss dpo"),
    (('preference.cache = "x"',), "preference.cache needs preference.reference = 'cached'"),
    (
        ('preference.losses = ["simpo"]', 'preference.reference = "cached"'),
        "'cached' has no effect: simpo needs no reference",
    ),
    (
        ('preference.losses = ["kto"]', 'preference.reference = "cached"'),
        "'cached' does not work with the loss kto",
    ),
    (('reference.placement = "fused"',), "Set reference.placement = 'inline'"),
    (("reference.reset_every = 5",), "each round of kind online begins with a new reference"),
    (
        ('reference.path = "a/b"', 'preference.losses = ["simpo"]'),
        "reference.path has no effect: simpo needs no reference",
    ),
    (
        ("reference.offload = true", 'preference.reference = "cached"'),
        "reference.offload has no effect: preference.reference = 'cached' keeps no model",
    ),
    (("sft.steps = 3",), "sft.steps belongs to stages of kind sft"),
    (("run.steps = 3",), "run.steps counts the steps of RL. Set preference.steps"),
    (('data.source = "arithmetic"',), "have no completions to compare. Use a stage of kind online"),
]


@pytest.mark.parametrize(("lines", "says"), MISTAKES)
def test_mistakes_are_refused_in_one_line(
    tmp_path: Path, lines: tuple[str, ...], says: str
) -> None:
    text = 'run.name = "p"\n[[stages]]\nkind = "preference"\npreference.epochs = 1\n'
    own = [f'data.source = "{write_pairs(tmp_path)}"']
    own = [line for line in own if line.split(" = ")[0] not in {x.split(" = ")[0] for x in lines}]
    with pytest.raises(UserError) as caught:
        train_stages(
            parse_staged(
                text + "\n".join([*own, *lines]), "p.toml", flags(tmp_path, data__heldout=4)
            )
        )
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "p" / "stages" / "preference" / "metrics.jsonl").exists()


def test_a_stage_may_name_its_reference(tmp_path: Path) -> None:
    """As the commands check a recipe: without an algorithm that has a reference."""
    text = (
        '[[stages]]\nkind = "sft"\nsft.steps = 1\n[[stages]]\nkind = "preference"\n'
        f'data.source = "{write_pairs(tmp_path)}"\npreference.epochs = 1\n'
        'reference.path = "stage:sft"'
    )
    plans = stage_plans(parse_staged(text, "p.toml", flags(tmp_path)), "p.toml")
    held = {part.name for part in memory_of(plans["preference"]).parts}  # type: ignore[union-attr]
    assert any("reference" in name for name in held)


@pytest.mark.parametrize("key", ["sample.draw = 3", 'sample.keep = "best"'])
def test_rounds_draw_and_keep_what_they_need(tmp_path: Path, key: str) -> None:
    text = f'[[stages]]\nkind = "online"\npreference.epochs = 1\n{key}'
    with pytest.raises(UserError, match="is set by the rounds of kind online"):
        parse_staged(text, "p.toml", flags(tmp_path))


def test_the_length_of_a_stage_is_asked_for(tmp_path: Path) -> None:
    text = f'[[stages]]\nkind = "preference"\ndata.source = "{write_pairs(tmp_path)}"'
    with pytest.raises(UserError, match=r"preference\.steps is 0.*or preference\.epochs = 2"):
        parse_staged(text, "p.toml", flags(tmp_path))


@pytest.mark.parametrize("rounds", ["0", "-1", "1.5", "true", '"two"'])
def test_rounds_are_counted(tmp_path: Path, rounds: str) -> None:
    text = f'[[stages]]\nkind = "online"\nrounds = {rounds}\npreference.epochs = 1'
    with pytest.raises(UserError, match=r"rounds = .*: expected a whole number from 1"):
        parse_staged(text, "p.toml", flags(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", ["run.patience = 2", "run.target_accuracy = 0.5", "checkpoint.keep_best = 1"]
)
def test_without_tasks_no_accuracy_can_be_aimed_for(tmp_path: Path, setting: str) -> None:
    text = f"""\
run.name = "p"
data.source = "{write_pairs(tmp_path)}"
data.heldout = 4

[[stages]]
kind = "preference"
preference.steps = 2
preference.examples_per_step = 4
{setting}
"""
    given = flags(tmp_path)
    for name in ("--data.source", "--data.heldout", "--data.arithmetic.digits"):
        if name in given:
            del given[given.index(name) : given.index(name) + 2]
    with pytest.raises(UserError, match=f"{setting.partition(' =')[0]} = .* there are none"):
        train_stages(parse_staged(text, "p.toml", given))


def test_the_learning_rate_is_a_tenth_of_that_of_sft() -> None:
    assert (PreferenceConfig().learning_rate, SftConfig().learning_rate) == (1e-4, 1e-3)
    assert PreferenceConfig().weight_decay == 0
