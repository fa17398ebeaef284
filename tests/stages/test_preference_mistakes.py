"""What users get wrong in recipes with comparisons: one line says what, where, and what is right.

Nothing is loaded, sampled or trained before it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sixfold.data.comparison_forms import recognise
from sixfold.data.files import Row
from sixfold.errors import UserError
from sixfold.recipe.plan import make_plan
from sixfold.recipe.schema import ComparisonsConfig
from sixfold.recipe.toml import parse_recipe, parse_staged
from sixfold.stages.plans import stage_plans

PAIRS = '[[stages]]\nkind = "preference"\ndata.source = "p.jsonl"\npreference.epochs = 1\n'
MODEL = (
    '[[stages]]\nkind = "reward_model"\nname = "rm"\ndata.source = "p.jsonl"\n'
    "reward_model.epochs = 1\n"
)
RL = '[[stages]]\nkind = "rl"\nrun.steps = 1\n'
SAMPLE = '[[stages]]\nkind = "sample"\nname = "s"\n'
FROM_SAMPLE = PAIRS.replace("p.jsonl", "stage:s")
ONLINE = '[[stages]]\nkind = "online"\nrounds = 2\npreference.epochs = 1\n'

MISTAKES = {
    # Names of other trainers.
    "loss_type": (PAIRS + 'preference.loss_type = "dpo"', "Did you mean 'preference.losses'"),
    "loss_type of a reward model": (
        MODEL + 'reward_model.loss_type = "bce"',
        "Did you mean 'reward_model.loss'",
    ),
    "loss": (PAIRS + 'preference.loss = "dpo"', "Did you mean 'preference.losses'"),
    "loss_weights": (PAIRS + "preference.loss_weights = [1]", "'preference.weights'"),
    "batch_size": (PAIRS + "preference.batch_size = 8", "'preference.examples_per_step'"),
    "lr": (MODEL + "reward_model.lr = 1e-5", "Did you mean 'reward_model.learning_rate'"),
    "max_steps": (PAIRS + "preference.max_steps = 8", "Did you mean 'preference.steps'"),
    "num_train_epochs": (MODEL + "reward_model.num_train_epochs = 1", "'reward_model.epochs'"),
    "max_length": (PAIRS + "preference.max_length = 9", "Did you mean 'comparisons.max_tokens'"),
    "gamma": (PAIRS + "preference.gamma = 0.5", "Did you mean 'preference.target_margin'"),
    "precomputed": (PAIRS + "preference.precompute_ref_log_probs = true", "'preference.reference'"),
    "a loss as algorithm": (
        'algorithm.name = "dpo"',
        "use a stage of kind preference with preference.losses = .'dpo'.",
    ),
    "a loss as kind": (
        PAIRS.replace("preference", "dpo", 1),
        "unknown kind 'dpo'. Write kind = 'preference' and preference.losses = .'dpo'.",
    ),
    # Losses.
    "a loss in capitals": (PAIRS + 'preference.losses = ["SimPO"]', "Did you mean 'simpo'"),
    "a loss as text": (PAIRS + 'preference.losses = "dpo"', "expected a list"),
    "no loss": (PAIRS + "preference.losses = []", "expected a list of at least 1"),
    "a loss twice": (PAIRS + 'preference.losses = ["dpo", "dpo"]', "names 'dpo' twice"),
    "no weight": (
        PAIRS + 'preference.losses = ["dpo", "sft"]\npreference.weights = [0, 0]',
        "use weights >= 0, not all 0",
    ),
    "beta as text": (PAIRS + 'preference.beta = "0.1"', "preference.beta: expected"),
    "beta of 0": (PAIRS + "preference.beta = 0", "preference.beta: expected .* > 0"),
    "every second label wrong": (
        PAIRS + 'preference.losses = ["cdpo"]\npreference.label_smoothing = 0.5',
        "preference.label_smoothing: expected .* < 0.5",
    ),
    "a setting of another loss": (
        PAIRS + "preference.label_smoothing = 0.1",
        "has no effect on the loss dpo. Remove it, or use one of cdpo",
    ),
    # Settings of other stages.
    "a section without its stage": (
        "[preference]\nepochs = 1",
        r"\[preference\] has no effect .* Add \[\[stages\]\] with kind = 'preference'",
    ),
    "a section beside other stages": (
        "[reward_model]\nepochs = 1\n" + RL,
        r"\[reward_model\] has no effect without a stage that reads it",
    ),
    "a rate of RL": (PAIRS + "trainer.schedule = 'cosine'", "Set preference.schedule"),
    "beta of RL": (
        PAIRS + "algorithm.beta = 0.1",
        "algorithm.beta has no effect on a stage of kind",
    ),
    "beta of RL in rounds": (ONLINE + "algorithm.beta = 0.1", "algorithm.beta has no effect"),
    "a reference of a reward model": (
        MODEL + 'reference.path = "x"',
        "reference.path has no effect on a stage of kind reward_model",
    ),
    "rounds of another kind": (PAIRS + "rounds = 3", "rounds belongs to stages of kind online"),
    "steps and epochs": (PAIRS + "preference.steps = 3", "both say how long"),
    # Data.
    "no data": (PAIRS.replace('data.source = "p.jsonl"\n', ""), "no completions to compare"),
    "a form": (PAIRS + 'comparisons.form = "pairs"', "Did you mean 'pair'"),
    "a form of samples": (
        SAMPLE + 'sample.keep = "all"\n' + FROM_SAMPLE + 'comparisons.form = "pair"',
        "rows of a sample stage have the form 'scored'",
    ),
    "only solved samples": (SAMPLE + FROM_SAMPLE, "'solved' leaves nothing .* sample.keep = 'all'"),
    "only the best samples": (
        SAMPLE + 'sample.keep = "best"\n' + FROM_SAMPLE,
        "'best' leaves nothing .* sample.keep = 'all'",
    ),
    "a column of samples": (
        SAMPLE + 'sample.keep = "all"\n' + FROM_SAMPLE + 'comparisons.completion_field = "x"',
        "comparisons.completion_field = 'x' has no effect",
    ),
    "one sample": (ONLINE + "sample.samples = 1", "sample.samples = 1 leaves nothing to compare"),
    "pairs of a model": (
        MODEL + FROM_SAMPLE.replace("stage:s", "stage:rm"),
        "that stage makes a reward_model, and this setting takes a dataset",
    ),
    # Reward models.
    "an adapter of a quantised base": (
        MODEL
        + "model.lora = {rank = 2, base = 'nf4'}\nrun.precision = 'bfloat16'\nmodel.path = 'x'",
        "Use 'bfloat16' in this stage",
    ),
    "a margin of labels": (
        MODEL + 'reward_model.loss = "bce"\nreward_model.margin = true',
        "reward_model.margin has no effect with reward_model.loss = 'bce'",
    ),
    "centring of labels": (
        MODEL + 'reward_model.loss = "bce"\nreward_model.centring = 0.01',
        "reward_model.centring has no effect with reward_model.loss = 'bce'",
    ),
    "a reward model as policy": (MODEL + RL + 'model = "stage:rm"', "this setting takes a model"),
    "a policy as reward": (
        '[[stages]]\nkind = "sft"\nsft.steps = 1\n' + RL + 'environment.rewards = ["stage:sft"]',
        "this setting takes a reward_model",
    ),
    "a reward of a later stage": (
        RL + 'environment.rewards = ["stage:rm"]\n' + MODEL,
        "no earlier stage has this name",
    ),
    "a reward without stage:": (
        MODEL + RL + 'environment.rewards = ["rm"]',
        "'rm' is an earlier stage. Write 'stage:rm'",
    ),
    "a stage as a folder": (
        MODEL + RL + 'environment.rewards = ["reward_model:rm"]',
        "'rm' is an earlier stage. Write 'stage:rm'",
    ),
    "an ensemble of one": (
        MODEL + RL + 'environment.rewards = ["stage:rm, stage:rm"]',
        "names stage:rm twice",
    ),
    "the deviation of one": (
        MODEL + RL + 'environment.rewards = ["stage:rm"]\nenvironment.reward_model.std_factor = 1',
        "std_factor = 1.0 has no effect without several reward models",
    ),
    "the deviation of none": (
        RL + 'environment.rewards = ["arithmetic"]\nenvironment.reward_model.std_factor = 1',
        "std_factor = 1.0 has no effect without several reward models",
    ),
    "no reward model": (RL + 'environment.rewards = ["reward_model:"]', "names no reward model"),
    "no such folder": (
        RL + 'environment.rewards = ["reward_model:/no/such"]',
        "no reward model at '/no/such': no such folder",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_before_anything_is_loaded(name: str) -> None:
    text, says = MISTAKES[name]
    with pytest.raises(UserError, match=says) as caught:
        staged = parse_staged(f'run.name = "p"\n{text}', "p.toml")
        stage_plans(staged, "p.toml")
        make_plan(staged.base)
    assert "\n" not in str(caught.value)


def test_columns_of_the_recipe_do_not_hold_for_samples() -> None:
    """The stage that reads the recipe's file has them, and the one that reads samples does not."""
    base = "[comparisons]\nchosen_field = 'good'\ncompletion_field = 'text'\npairs = 'extremes'\n"
    mine = PAIRS.replace('"preference"\n', '"preference"\nname = "first"\n')
    staged = parse_staged(f'{base}{mine}{SAMPLE}sample.keep = "all"\n{FROM_SAMPLE}', "p.toml")
    first, _, last = (stage.recipe.comparisons for stage in staged.stages)
    assert (first.chosen_field, first.completion_field, first.pairs) == ("good", "text", "extremes")
    assert last == ComparisonsConfig(pairs="extremes")
    row = Row("r", {"prompt": "p", "completion": "c", "reward": 1.0, "provenance": {}}, 1)
    assert recognise(row, last).form == "scored"


def test_what_looks_like_a_mistake_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rewards may differ among solved samples, and so may grades of a user's function, and
    those of a verifier below its full reward. A folder or a function may have the name of a stage.
    """
    monkeypatch.chdir(tmp_path)
    Path("rm").mkdir()
    rewards = 'environment.rewards = ["arithmetic", "no_repetition"]\n'
    parse_staged(SAMPLE + rewards + FROM_SAMPLE, "p.toml")
    parse_staged(SAMPLE + "eval.solved_at = 0.5\n" + FROM_SAMPLE, "p.toml")
    parse_staged(f"{SAMPLE}environment.rewards = ['my.py:f']\n{FROM_SAMPLE}", "p.toml")
    parse_staged(MODEL.replace('"rm"', '"arithmetic"') + RL, "p.toml")
    parse_staged(MODEL + RL + 'environment.rewards = ["reward_model:rm"]', "p.toml")
    both = (
        RL + 'environment.rewards = ["stage:a,stage:b", "stage:a"]\nenvironment.weights = [1, 1]\n'
    )
    two = "".join(MODEL.replace('"rm"', name) for name in ('"a"', '"b"'))
    staged = parse_staged(f"{two}{both}environment.reward_model.std_factor = 1", "p.toml")
    stage_plans(staged, "p.toml")
    parse_recipe("[comparisons]\npairs = 'extremes'", "eval.toml")  # for sixfold eval
