"""Stages of preferences and reward models as configs of TRL's trainers, and back.

The configs are look-alikes of public ones: TRL's own commands (scripts/dpo.py, scripts/kto.py,
examples/scripts/cpo.py), and the YAML of the alignment handbook (rpo_alpha, older names).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sixfold.cli import main
from sixfold.preference.loss import Settings
from sixfold.preference.zoo import LOSSES
from sixfold.recipe.dump import flat
from sixfold.recipe.knobs import kind_knobs, knobs
from sixfold.recipe.preference_plan import resolve_losses
from sixfold.recipe.stages import Stage
from sixfold.recipe.toml import parse_staged
from sixfold_interop.trl_stages import trainers

HANDBOOK = """
model_name_or_path: org/base
torch_dtype: bfloat16
dataset_name: org/pairs
dataset_train_split: train_prefs
dataset_test_split: test_prefs
bf16: true
beta: 0.05
do_eval: true
eval_strategy: steps
eval_steps: 100
gradient_accumulation_steps: 4
gradient_checkpointing: true
learning_rate: 5.0e-7
lr_scheduler_type: cosine
max_length: 2048
max_prompt_length: 1024
num_train_epochs: 2
optim: adamw_torch
per_device_train_batch_size: 8
rpo_alpha: 0.5
save_steps: 100
warmup_ratio: 0.1
precompute_ref_log_probs: true
sync_ref_model: true
betaa: 1
"""

MPO = """
trl dpo \\
  --model_name_or_path org/base --dataset_name org/pairs --output_dir dpo \\
  --loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1.0 --max_steps 200 \\
  --warmup_steps 0.05 --per_device_train_batch_size 4 --no_remove_unused_columns \\
  --use_peft --lora_target_modules all-linear --lora_dropout 0 --max_length 512
"""


def imported(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Stage, str]:
    """The stage of the printed recipe, which must load, and its comments."""
    assert main(["import", "trl", *words]) == 0
    text = capsys.readouterr().out
    (stage,) = parse_staged(text, "printed").stages
    return stage, "\n".join(line for line in text.splitlines() if line.startswith("#"))


def expect(stage: Stage, **wanted: Any) -> None:
    found = flat(stage.recipe)
    keys = {key.replace("__", "."): value for key, value in wanted.items()}
    assert {key: found[key] for key in keys} == keys


def test_a_config_of_dpo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "dpo.yaml"
    file.write_text(HANDBOOK)
    stage, notes = imported(capsys, str(file), "--processes", "2")
    assert stage.kind == "preference"
    expect(
        stage,
        model__path="org/base",
        data__source="org/pairs",
        data__split="train_prefs",
        data__heldout_split="test_prefs",
        data__overlong="drop",
        comparisons__max_tokens=2048,
        comparisons__truncate=True,
        preference__losses=("dpo", "sft"),
        preference__weights=(1.0, 0.5),
        preference__beta=0.05,
        preference__examples_per_step=8 * 4 * 2,
        preference__epochs=2,
        preference__steps=0,
        preference__learning_rate=5e-7,
        preference__schedule="cosine",
        preference__reference="cached",
        trainer__betas=(0.9, 0.999),
        eval__every=100,
        checkpoint__every=100,
        model__lora__rank=0,
        run__precision="bfloat16",
        run__seed=42,
    )
    for said in (
        "betaa = 1 is unknown. Did you mean 'beta'?",
        "sync_ref_model = True has no counterpart",
        "max_prompt_length = 1024 has no counterpart",
        "set preference.warmup_steps",
    ):
        assert said in notes, notes


def test_a_command_of_dpo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """10 of 200 steps are 0.05; an adapter has TRL's rank 16, and no dropout is asked for."""
    file = tmp_path / "run.sh"
    file.write_text(MPO)
    stage, notes = imported(capsys, str(file))
    expect(
        stage,
        preference__losses=("dpo", "bco_pair", "sft"),
        preference__weights=(0.8, 0.2, 1.0),
        preference__steps=200,
        preference__warmup_steps=10,
        preference__schedule="linear",
        data__heldout=0,
        model__lora__rank=16,
        model__lora__alpha=32.0,
        model__lora__targets=("all-linear",),
    )
    assert "remove_unused_columns = False has no counterpart" in notes
    assert "dropout" not in notes


@pytest.mark.parametrize(
    ("words", "wanted", "said"),
    [
        ("kto --beta 0.2 --desirable_weight 1.3", {"losses": ("kto",), "liked_weight": 1.3}, ""),
        (
            "kto --loss_type apo_zero_unpaired --undesirable_weight 2",
            {"losses": ("apo_zero_unpaired",), "beta": None, "disliked_weight": 2.0},
            "",
        ),
        (
            "scripts/cpo.py --loss_type simpo --beta 2 --cpo_alpha 0 --simpo_gamma 0.5",
            {"losses": ("simpo",), "beta": None, "sft_weight": None, "target_margin": 0.5},
            "",
        ),
        ("cpo --loss_type simpo", {"sft_weight": 1.0, "beta": 0.1}, ""),
        ("cpo --loss_type hinge", {"losses": ("cpo",)}, "loss_type = 'hinge' has no counterpart"),
        ("cpo --alpha 0.5", {"losses": ("cpo",)}, "alpha = 0.5 has no counterpart"),
        ("orpo --beta 0.2", {"losses": ("orpo",), "beta": 0.2}, ""),
        ("dpo --loss_type hinge", {"losses": ("hinge",), "beta": 0.1}, ""),
        ("dpo --loss_type exo_pair", {"losses": ("exo",), "label_smoothing": None}, ""),
        ("dpo --use_weighting", {"losses": ("wpo",)}, ""),
        ("dpo --loss_type ipo --use_weighting", {"losses": ("ipo",)}, "use_weighting = True has"),
        ("dpo --ld_alpha 0.5", {"losses": ("dpo",), "tail_weight": 0.5}, ""),
        ("dpo --reference_free", {"losses": ("cpo",), "sft_weight": 0.0}, ""),
        (
            "dpo --f_divergence_type alpha_divergence --f_alpha_divergence_coef 0.3",
            {"divergence": "alpha", "divergence_alpha": 0.3},
            "",
        ),
        ("dpo --f_alpha_divergence_coef 0.3", {"divergence": None, "divergence_alpha": None}, ""),
        ("dpo --label_smoothing 0.1", {"losses": ("dpo",)}, "label_smoothing = 0.1 has no effect"),
        (
            "dpo --loss_type sigmoid robust --loss_weights 1.8 -0.8 --label_smoothing 0.1",
            {"losses": ("cdpo",), "weights": (), "label_smoothing": None},
            "",
        ),
        ("dpo --discopop_tau 0.1 --loss_type discopop", {"losses": ("discopop",)}, "discopop_tau"),
        ("dpo --truncation_mode keep_end", {"losses": ("dpo",)}, "'keep_end' has no counterpart"),
        ("dpo --loss_type sigmoidd", {"losses": ("dpo",)}, "Did you mean 'sigmoid'?"),
        ("dpo --loss_type typo", {"losses": ("dpo",)}, "['dpo'] takes its place"),
        ("dpo --loss_type ipo --loss_weights 0.5", {"weights": (0.5,)}, ""),
        (
            "dpo --loss_type sigmoid sft --rpo_alpha 0.5",
            {"losses": ("dpo", "sft"), "weights": (1.0, 1.5)},
            "rpo_alpha = 0.5: the loss sft",
        ),
        ("kto --rpo_alpha 0.5", {"losses": ("kto",)}, "rpo_alpha = 0.5 "),
        ("dpo --lora_task_type SEQ_CLS --use_peft", {}, "lora_task_type = 'SEQ_CLS' has no"),
        ("-m trl.scripts.kto --beta 0.2", {"losses": ("kto",)}, ""),
        ("--flag scripts/kto.py --beta 0.2", {"losses": ("kto",)}, ""),
        ("dpo --loss_type kto_pair", {"losses": ("dpo",)}, "loss_type = 'kto_pair' has no"),
        ("dpo --lora_r 8", {"losses": ("dpo",)}, "lora_r = 8 has no effect without use_peft"),
        ("dpo --report_to mlflow", {"losses": ("dpo",)}, "report_to = 'mlflow' has no counterpart"),
        ("dpo --num_train_epochs 0.5", {"epochs": 1}, "num_train_epochs = 0.5: 1 whole epochs"),
    ],
)
def test_losses_of_trl(
    words: str,
    wanted: dict[str, Any],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "run.sh"
    command = "mkdir -p runs/orpo\n" + ("python" if re.search(r"\.py|-m", words) else "trl")
    file.write_text(f"{command} {words} --model_name_or_path org/m --dataset_name org/d=x\n")
    stage, notes = imported(capsys, str(file))
    expect(stage, **{f"preference__{name}": value for name, value in wanted.items()})
    assert said in notes and "to be corrected" not in notes, notes


def test_a_reward_model_of_trl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rm.yaml"
    file.write_text(
        "model_name_or_path: org/m\ncenter_rewards_coefficient: 0.01\nuse_peft: true\n"
        "lora_task_type: SEQ_CLS\n"
        "datasets: [{path: json, data_files: pairs.jsonl, split: train}]\n"
    )
    stage, notes = imported(capsys, str(file))
    assert stage.kind == "reward_model"
    expect(
        stage,
        reward_model__centring=0.01,
        reward_model__learning_rate=1e-4,
        reward_model__examples_per_step=8,
        reward_model__epochs=3,
        comparisons__max_tokens=1024,
        comparisons__truncate=False,
        data__overlong="drop",
        data__source="pairs.jsonl",
        model__lora__rank=16,
        model__lora__alpha=32.0,
    )
    assert "adapter" not in notes and "lora_task_type" not in notes


def test_a_weight_for_each_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dpo.yaml").write_text("loss_type: [ipo, sft]\nloss_weights: [1.0]\n")
    assert main(["import", "trl", str(tmp_path / "dpo.yaml")]) == 2
    assert "loss_weights has 1 numbers, but loss_type has 2 losses" in capsys.readouterr().err


def test_the_trainer_is_asked_for_where_nothing_tells_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "some.yaml"
    file.write_text("dataset_name: org/d\nbeta: 0.1\nmax_length: 512\n")
    assert main(["import", "trl", str(file)]) == 2
    assert "DPOConfig, KTOConfig, CPOConfig, ORPOConfig: say which by --trainer" in (
        capsys.readouterr().err
    )
    stage, _ = imported(capsys, str(file), "--trainer", "orpo")
    assert stage.recipe.preference.losses == ("orpo",)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("gradient_accumulation_steps: auto", "= 'auto': expected a number"),
        ("warmup_steps: x", "warmup_steps = 'x': expected a number"),
        ("max_steps: 1.5", "max_steps = 1.5: expected a whole number"),
        ("loss_type: 3", "loss_type = 3: expected names"),
        ("loss_weights: [a]", "loss_weights = ['a']: expected numbers"),
        ("datasets: 3", "datasets = 3: expected mappings"),
    ],
)
def test_a_value_of_another_type(
    text: str, wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dpo.yaml").write_text(f"model_name_or_path: org/m\n{text}\n")
    assert main(["import", "trl", str(tmp_path / "dpo.yaml"), "--trainer", "dpo"]) == 2
    assert wanted in capsys.readouterr().err


def test_null_is_a_default_or_no_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "dpo.yaml"
    names = "num_train_epochs per_device_train_batch_size max_length learning_rate loss_type"
    nulls = "".join(f"{name}: null\n" for name in names.split())
    file.write_text(f"dataset_name: org/d\n{nulls}")
    stage, _ = imported(capsys, str(file), "--trainer", "dpo")
    expect(
        stage,
        preference__epochs=3,
        preference__examples_per_step=8,
        preference__learning_rate=1e-6,
        comparisons__max_tokens=0,
    )


@pytest.mark.parametrize(
    ("datasets", "source", "said"),
    [
        ("{path: json, data_files: [a.jsonl]}", "a.jsonl", ""),
        ("{path: json, data_files: [a.jsonl, b.jsonl]}", "", "name the files ['a.jsonl', 'b.jso"),
        ("{path: org/d, data_files: a.jsonl}", "org/d", "data_files = ['a.jsonl'] has no count"),
    ],
)
def test_files_of_datasets(
    datasets: str, source: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A list of datasets has no held-out split, so nothing is evaluated."""
    file = tmp_path / "dpo.yaml"
    file.write_text(f"datasets: [{datasets}]\neval_strategy: steps\neval_steps: 5\n")
    assert main(["import", "trl", str(file), "--trainer", "dpo"]) == 0
    text = capsys.readouterr().out
    assert said in text and 'source = "json"' not in text
    assert (f'source = "{source}"' in text) == bool(source)
    assert "heldout = 0" in text and "every = 5" not in text
    assert "name the held-out rows by data.heldout_split" in text


def test_a_trainer_without_a_conversion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.sh"
    file.write_text("trl sft --model_name_or_path org/m --max_steps 5 --learning_rate=1e-5\n")
    assert main(["import", "trl", str(file)]) == 2
    assert "'sft' has no conversion. Write a stage of kind sft" in capsys.readouterr().err


def test_a_tie_with_rl_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "some.yaml"
    file.write_text("beta: 0.1\nmax_prompt_length: 512\n")
    assert main(["import", "trl", str(file)]) == 2
    assert "GRPOConfig: say which by --trainer" in capsys.readouterr().err
    file.write_text("beta: 0.1\nmax_prompt_length: 512\ntemperature: 1.0\nmax_length: 9\n")
    assert main(["import", "trl", str(file)]) == 0
    assert "[algorithm]" in capsys.readouterr().out


COMMON = """
run.seed = 5
run.precision = "bfloat16"
model.path = "org/base"
trainer = {betas = [0.8, 0.9], grad_clip = 0.5, activation_checkpointing = "full"}
checkpoint.every = 70
[data]
source = "org/pairs"
subset = "a"
split = "train_prefs"
heldout_split = "test_prefs"
overlong = "drop"
[comparisons]
max_tokens = 700
"""
OF_STAGE = """
{section}.learning_rate = 2e-6
{section}.weight_decay = 0.1
{section}.schedule = "cosine"
{section}.warmup_steps = 7
{section}.examples_per_step = 24
{section}.epochs = 2
"""
RETURN = {
    "dpo": 'preference.losses = ["dpo"]\npreference.beta = 0.3',
    "file": 'data.source = "my.parquet"\ndata.subset = ""\ndata.heldout_split = ""\n'
    "data.heldout = 0\npreference.losses = ['robust']\npreference.label_smoothing = 0.2",
    "steps": "preference.epochs = 0\npreference.steps = 30\npreference.losses = ['ipo', 'hinge']\n"
    "preference.weights = [0.5, 2.0]\npreference.beta = 0.2",
    "adapter": "preference.reference = 'cached'\nmodel.lora = {rank = 8, alpha = 16.0, dora = true,"
    " targets = ['q_proj', 'v_proj']}",
    "divergence": "preference.divergence = 'alpha'\npreference.divergence_alpha = 0.2",
    "kto": "preference.losses = ['kto']\npreference.liked_weight = 1.5",
    "cpo": "preference.losses = ['cpo']\npreference.sft_weight = 0.5",
    "simpo": "preference.losses = ['simpo']\npreference.target_margin = 1.4",
    "orpo": "preference.losses = ['orpo']\npreference.beta = 0.25",
    "sum": "preference.losses = ['cdpo', 'sft']\npreference.weights = [0.7, 2.0]",
    "reward": "reward_model.centring = 0.01\nreward_model.normalise = false",
    "adapter of a reward": "reward_model.normalise = false\nmodel.lora = {rank = 8, alpha = 4.0}",
    **{
        f"of {name}": f"preference.losses = ['{name}']"
        for name, row in LOSSES.items()
        if name not in ("ipo_sum", "dpop", "dpo_shift", "beta_dpo", "squared_po", "bco", "outcome")
    },
}
"""Recipes that TRL can run, by what they have."""


@pytest.mark.parametrize("name", RETURN)
def test_a_stage_is_converted_and_returns(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All values are equal, and so are the losses with their settings."""
    section = "reward_model" if name.endswith("reward") else "preference"
    lines = dict(
        line.split(" = ", 1)
        for line in (OF_STAGE.format(section=section) + RETURN[name]).strip().splitlines()
    )
    if section == "preference":
        lines["comparisons.truncate"] = "true"
    table = "".join(f"{key} = {value}\n" for key, value in lines.items())
    file = tmp_path / "my.toml"
    file.write_text(f"{COMMON}[[stages]]\nkind = '{section}'\n{table}")
    assert main(["algorithms", str(file), "--convert", "trl"]) == 0
    text = capsys.readouterr().out
    assert "not available" not in text and "not converted" not in text
    config, command = tmp_path / "trl.yaml", re.search(r"# (.*) --config FILE", text)
    assert command is not None
    assert ('lora_task_type: "SEQ_CLS"' in text) == (name == "adapter of a reward")
    config.write_text(
        "\n".join(line for line in text.splitlines() if re.match(r"\w+: ", line)).partition(
            "difference: "
        )[0]
    )
    trainer = Path(command[1].split()[-1]).stem
    back, notes = imported(capsys, str(config), "--trainer", trainer)
    assert "has no counterpart" not in notes and "unknown" not in notes, notes
    (stage,) = parse_staged(file.read_text(), "my").stages
    before, after = flat(stage.recipe), flat(back.recipe)
    if section == "preference" and name != "of ld_dpo":  # which is dpo with a tail_weight
        assert resolve_losses(stage.recipe.preference) == resolve_losses(back.recipe.preference)
    losses = {f"preference.{one}" for one in ("losses", "weights", *Settings.__dataclass_fields__)}
    differ = {key: (value, after[key]) for key, value in before.items() if value != after[key]}
    assert differ.keys() <= losses | {"run.name", "run.dir"}, differ


def test_what_trl_lacks_of_a_stage_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.toml"
    file.write_text(
        """
[[stages]]
kind = "sft"
name = "start"
sft.steps = 3
[[stages]]
kind = "preference"
name = "align"
data.source = "pairs.jsonl"
data.prompt_field = "q"
comparisons.max_tokens = 50
comparisons.chosen_field = "good"
preference.losses = ["dpo", "orpo"]
preference.epochs = 1
[[stages]]
kind = "preference"
name = "mixed"
data.source = "pairs.jsonl"
preference.epochs = 1
preference.losses = ["dpo", "ld_dpo", "wpo", "hinge", "dpo_shift"]
[[stages]]
kind = "reward_model"
data.source = "pairs.jsonl"
reward_model.epochs = 1
reward_model.head = "mean"
"""
    )
    assert main(["algorithms", str(file), "--convert", "trl"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for said in (
        "stage start of kind sft is not converted to trl",
        "the loss orpo in one sum with dpo",
        'model.path = "stage:start", data.prompt_field = "q"',
        'comparisons.chosen_field = "good"',
        "there, longer comparisons are cut",
        "another ld_alpha for ld_dpo, 0.5: a sum has one",
        "another use_weighting for wpo, True: a sum has one",
        "another beta for hinge, 0.05: a sum has one",
        "a weight of the worse completion",
        'not available: reward_model.head = "mean"',
        "not available: reward_model.normalise = true",
        "data.heldout = 512: TRL trains on all rows",
        "for one process without gradient accumulation",
    ):
        assert said in text, said
    assert main(["algorithms", f"{file}:align", "--convert", "verl"]) == 2
    assert "stage align of kind preference is not converted to verl" in capsys.readouterr().err


def test_a_packed_file_and_a_stage_are_no_hub_datasets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.toml"
    file.write_text(
        """
[[stages]]
kind = "sample"
name = "s"
sample.keep = "all"
[[stages]]
kind = "preference"
name = "a"
data.source = "pairs.jsonl.gz"
data.split = "valid"
data.heldout_split = "stage:s"
preference.epochs = 1
"""
    )
    assert main(["algorithms", str(file), "--convert", "trl", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    settings = found[0]["changed"]
    files = {"path": "json", "data_files": "pairs.jsonl.gz", "split": "train"}
    assert settings["datasets"] == [files]
    assert "dataset_name" not in settings and "dataset_test_split" not in settings
    assert "stage s of kind sample is not converted to trl" in found[1]["lacks"]
    assert 'data.heldout_split = "stage:s"' in str(found[0]["differs"])


def test_the_tables_name_settings_that_exist() -> None:
    known = {**knobs(), **kind_knobs()}
    for trainer in trainers().values():
        for name, same in trainer.table.same.items():
            assert re.sub(r"\.\d$", "", same.ours) in known, name
            assert name in trainer.table.names
        assert trainer.table.read <= trainer.table.names
