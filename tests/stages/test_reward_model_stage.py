"""A stage that trains a reward model, and stages that are rewarded by it."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from sixfold.checkpoint.model_source import model_folder
from sixfold.errors import UserError
from sixfold.recipe.toml import parse_staged
from sixfold.reward_model.model import load_reward_model
from sixfold.reward_model.scorer import Scorer
from sixfold.stages.driver import train_stages
from sixfold.stages.plans import stage_plans
from sixfold.types import Task
from tests.stages.staged_runs import flags, result

TEXT = """\
run.name = "p"

[[stages]]
kind = "reward_model"
name = "rm"
data.source = "PAIRS"
data.heldout = 16
reward_model.steps = 30
reward_model.learning_rate = 5e-3
reward_model.warmup_steps = 0
reward_model.centring = 0.01
reward_model.examples_per_step = 16

[[stages]]
kind = "rl"
name = "rl"
run.steps = 2
data.heldout = 8
environment.rewards = ["stage:rm"]
"""


def rows() -> list[dict[str, str]]:
    """Sums whose better reply is the even number, whatever the prompt."""
    draw = random.Random(0)
    return [
        {
            "prompt": f"{draw.randrange(10)}+{draw.randrange(10)}=",
            "chosen": str(2 * draw.randrange(5)),
            "rejected": str(2 * draw.randrange(5) + 1),
        }
        for _ in range(96)
    ]


def recipe(place: Path, text: str = TEXT, **columns: Any) -> Any:
    """The recipe, on rows with these columns in addition or instead."""
    pairs = place / "pairs.jsonl"
    pairs.write_text("\n".join(json.dumps(row | columns) for row in rows()))
    given = flags(place, checkpoint__every=10)
    at = given.index("--data.heldout")  # the stage has its own
    return parse_staged(text.replace("PAIRS", str(pairs)), "p.toml", given[:at] + given[at + 2 :])


@pytest.mark.slow
def test_a_reward_model_is_learned_resumed_and_used(tmp_path: Path) -> None:
    assert train_stages(recipe(tmp_path)) == 0
    run = tmp_path / "p"
    whole = result(run)
    artifacts = {
        name: json.loads((run / "stages" / name / "artifact.json").read_bytes())
        for name in ("rm", "rl")
    }
    assert artifacts["rm"]["made"] == "reward_model"
    assert artifacts["rl"]["inputs"]["rm"] == artifacts["rm"]["sha256"]
    last = whole["rm"]["metrics"][-1]
    assert last["reward_model/heldout_accuracy"] == 1.0 and last["heldout/loss"] < 0.2
    assert sum(last["reward_model/heldout_delta_hist"]) == 16

    # Its rewards of the held-out completions have mean 0 and deviation 1; those of others are near.
    folder = model_folder(str(run), reward_model=True)
    scorer = Scorer(load_reward_model(folder, "cpu"), 4096)
    task = Task("sum", "3+4=")
    replies = [str(n) for n in range(10)]
    ids = scorer.encoded(task, replies, [True] * 10)
    rewards = scorer.rewards(*ids).tolist()
    assert min(rewards[0::2]) > 0.5 and max(rewards[1::2]) < -0.5
    assert all(0.5 < abs(reward) < 1.7 for reward in rewards)

    # A stage without an artifact goes on from its checkpoint, and everything comes out the same.
    stage = run / "stages" / "rm"
    for name in ("artifact.json", "summary.json"):
        (stage / name).unlink()
    shutil.rmtree(stage / "checkpoints" / "step-000030")
    rl = run / "stages" / "rl"
    (rl / "artifact.json").unlink()
    (rl / "summary.json").unlink()
    shutil.rmtree(rl / "checkpoints" / "step-000002")
    assert train_stages(recipe(tmp_path), resume=run) == 0
    assert result(run) == whole


@pytest.mark.slow
def test_each_member_of_an_ensemble_has_an_order_of_its_own(tmp_path: Path) -> None:
    one = TEXT.partition('[[stages]]\nkind = "rl"')[0].replace("steps = 30", "epochs = 1")
    member = one.partition("[[stages]]")[2].replace('"rm"', '"other"')
    text = f"{one}[[stages]]{member}reward_model.member = 1\n"
    assert train_stages(recipe(tmp_path, text)) == 0
    first, other = (result(tmp_path / "p")[name]["metrics"] for name in ("rm", "other"))
    assert len(first) == len(other) == 4
    assert first[0]["reward_model/delta"] == other[0]["reward_model/delta"] == 0.0
    assert first[1]["reward_model/delta"] != other[1]["reward_model/delta"]


ADAPTED = """\
run.name = "p"

[[stages]]
kind = "sft"
sft.steps = 2
data.heldout = 8

[[stages]]
kind = "reward_model"
name = "rm"
data.source = "PAIRS"
data.heldout = 16
model.lora.rank = 4
model.lora.alpha = 16.0
reward_model.lm_weight = 0.1
reward_model.steps = 20
reward_model.learning_rate = 2e-2
reward_model.warmup_steps = 0
reward_model.examples_per_step = 16

[[stages]]
kind = "rl"
name = "rl"
run.steps = 1
data.heldout = 8
environment.rewards = ["stage:rm"]
environment.reward_model.placement = "worker"
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_an_adapter_learns_rewards_and_resumes_with_the_same_bits(tmp_path: Path) -> None:
    assert train_stages(recipe(tmp_path, ADAPTED)) == 0
    run = tmp_path / "p"
    whole = result(run)
    last = whole["rm"]["metrics"][-1]
    assert last["reward_model/heldout_accuracy"] > 0.8 and last["reward_model/lm_loss"] > 0
    assert load_reward_model(model_folder(str(run), reward_model=True), "cpu").head == "last"
    assert whole["rl"]["metrics"][-1]["reward/part/reward_model"] != 0
    for name, last_step in (("rm", "step-000020"), ("rl", "step-000001")):
        stage = run / "stages" / name
        (stage / "artifact.json").unlink()
        (stage / "summary.json").unlink()
        shutil.rmtree(stage / "checkpoints" / last_step)
    assert train_stages(recipe(tmp_path, ADAPTED), resume=run) == 0
    assert result(run) == whole
    nf4 = ADAPTED.replace(
        "rank = 4", 'rank = 4\nmodel.lora.base = "nf4"\nrun.precision = "bfloat16"'
    )
    with pytest.raises(UserError, match=r"model\.lora\.base = 'nf4': a reward model is saved with"):
        train_stages(recipe(tmp_path, nf4, run__name="q"))


def test_a_reward_model_stands_only_where_one_is_needed(tmp_path: Path) -> None:
    for old, new, error in (
        ('environment.rewards = ["stage:rm"]', 'model = "stage:rm"', "makes a rew"),
        ('kind = "reward_model"', 'kind = "sft"', "reward_model.steps belongs to stages of kind"),
        ("reward_model.steps = 30", "", r"reward_model\.steps is 0, .* or reward_model\.epochs"),
        ("stage:rm", "stage:mr", "no earlier stage has this name"),
    ):
        with pytest.raises(UserError, match=error):
            recipe(tmp_path, TEXT.replace(old, new))
    staged = recipe(tmp_path)
    assert stage_plans(staged, "p.toml").keys() == {"rm", "rl"}
    # The stage after it goes on with the newest model, which is not the reward model.
    assert staged.stages[1].recipe.model.path == ""
    several = TEXT.replace('["stage:rm"]', '["stage:rm,stage:rm,/others", "arithmetic"]')
    bound = recipe(tmp_path, several).stages[1].bound({"rm": "/made/rm"})
    assert bound.environment.rewards == (
        "reward_model:/made/rm,/made/rm,/others",
        "arithmetic",
    )


@pytest.mark.slow
def test_labelled_completions_have_no_pairs_to_compare(tmp_path: Path) -> None:
    labelled = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in rows()
        for side in ("chosen", "rejected")
    ]
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, labelled)))
    text = TEXT.partition('[[stages]]\nkind = "rl"')[0].replace(
        "PAIRS", str(tmp_path / "labels.jsonl")
    )
    with pytest.raises(UserError, match=r"single completions with a label\. Use loss = 'bce'"):
        train_stages(recipe(tmp_path, text))
    bce = text.replace("reward_model.centring = 0.01", 'reward_model.loss = "bce"')
    assert train_stages(recipe(tmp_path, bce), overwrite=True) == 0
    last = result(tmp_path / "p")["rm"]["metrics"][-1]
    assert last["reward_model/heldout_accuracy"] == 1.0


@pytest.mark.slow
def test_margins_are_in_the_loss(tmp_path: Path) -> None:
    """The head starts at 0, so the first loss is -log sigma(-margin). A row without a margin is
    refused.
    """
    text = TEXT.partition('[[stages]]\nkind = "rl"')[0].replace("steps = 30", "steps = 1")
    for setting, margin in (("", 0.0), ("reward_model.margin = true\n", 3.0)):
        assert train_stages(recipe(tmp_path, text + setting, margin=3.0), overwrite=True) == 0
        (first,) = result(tmp_path / "p")["rm"]["metrics"]
        assert first["train/loss"] == pytest.approx(math.log1p(math.exp(margin)))
    with pytest.raises(UserError, match=r"pairs\.jsonl:1: 'margin' says by how much"):
        train_stages(recipe(tmp_path, f"{text}reward_model.margin = true\n"), overwrite=True)


@pytest.mark.slow
def test_rewards_without_their_length_are_what_is_measured(tmp_path: Path) -> None:
    """The better replies are all longer by the same. Without what the length explains, the mean
    difference is 0, so some pair is in the wrong order.
    """
    text = TEXT.partition('[[stages]]\nkind = "rl"')[0]
    found = {}
    for debias in (False, True):
        asked = f"{text}reward_model.length_debias = {str(debias).lower()}\n"
        given = recipe(tmp_path, asked, chosen="7" * 6, rejected="7" * 3)
        assert train_stages(given, overwrite=True) == 0
        found[debias] = result(tmp_path / "p")["rm"]["metrics"][-1]
    correlation = "reward_model/heldout_length_correlation"
    assert found[True][correlation] == found[False][correlation] > 0.9
    assert found[False]["reward_model/heldout_accuracy"] == 1.0
    assert found[True]["reward_model/heldout_accuracy"] < 1.0


@pytest.mark.nightly
@pytest.mark.slow
def test_online_rounds_prefer_what_a_reward_model_prefers(tmp_path: Path) -> None:
    """The sampled completions have its rewards, by which the round compares them."""
    text = TEXT.partition('[[stages]]\nkind = "rl"')[0].replace(
        "[[stages]]",
        """data.heldout = 8

[[stages]]
kind = "sft"
sft.steps = 30
sft.learning_rate = 1e-2

[[stages]]""",
    )
    text += """
[[stages]]
kind = "online"
rounds = 1
model = "stage:sft"
environment.rewards = ["stage:rm"]
sample.tasks = 8
sample.samples = 4
preference.epochs = 1
preference.examples_per_step = 4
data.heldout = 0
"""
    assert train_stages(recipe(tmp_path, text)) == 0
    folder = tmp_path / "p" / "stages"
    scorer = Scorer(
        load_reward_model(model_folder(str(folder / "rm"), reward_model=True), "cpu"), 4096
    )
    sampled = [json.loads(line) for line in (folder / "online-1-samples/dataset.jsonl").open()]
    assert len({row["reward"] for row in sampled}) > 2
    for row in sampled:
        ids = scorer.encoded(Task("a", row["prompt"]), [row["completion"]], [True])
        assert row["reward"] == pytest.approx(float(scorer.rewards(*ids)[0]), abs=1e-4)
