"""Settings of TRL, verl and OpenRLHF as recipes, and back.

The files are look-alikes of public ones, with their traits: the YAML of open-r1 (arguments of a
script, of TrainingArguments and of the model in one file, numbers as 2.0e-05, older names), verl's
examples/grpo_trainer/*.sh (variables with defaults, quoted lists, line continuations) and
OpenRLHF's scripts (a job command before the flags, flat names of older versions).
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from sixfold.algorithm.zoo import ZOO
from sixfold.cli import main
from sixfold.recipe.algorithm_plan import resolve_algorithm
from sixfold.recipe.dump import flat
from sixfold.recipe.knobs import kind_knobs, knobs
from sixfold.recipe.plan import make_plan
from sixfold.recipe.schema import Recipe
from sixfold.recipe.toml import parse_recipe
from sixfold_interop import FRAMEWORKS, Sizes, convert
from sixfold_interop.imported import import_settings
from sixfold_interop.settings import table

OPEN_R1 = """
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
torch_dtype: bfloat16
dataset_name: AI-MO/NuminaMath-TIR
dataset_prompt_column: problem
bf16: true
use_vllm: true
gradient_accumulation_steps: 4
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
learning_rate: 2.0e-05
lr_scheduler_type: cosine_with_min_lr
max_prompt_length: 512
max_completion_length: 1024
max_steps: 120
num_generations: 16
num_iterations: 2
steps_per_generation: 8
per_device_train_batch_size: 16
reward_funcs:
- my.rewards.accuracy
reward_weights:
- 1.0
report_to:
- wandb
seed: 42
temperature: 0.7
warmup_ratio: 0.1
beta: 0.04
loss_type: grpo
epsilon_high: 0.28
epsilonn: 0.3
"""

VERL = """\
set -x
MODEL=${MODEL:-Qwen/Qwen2-7B-Instruct}
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=gsm8k.parquet \\
    data.val_files="['test.parquet']" \\
    data.train_batch_size=1024 data.max_response_length=768 \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.optim.lr=1e-5 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.rollout.n=5 \\
    +trainer.my_own=3 \\
    trainer.total_training_steps=30 trainer.save_freq=-1 trainer.test_freq=5 $@
"""

OPENRLHF = """\
ray job submit --address="http://127.0.0.1:8265" \\
   -- python3 -m openrlhf.cli.train_ppo_ray \\
   --pretrain meta/Llama-3-8b --advantage_estimator group_norm \\
   --train_batch_size 128 --rollout_batch_size 128 --n_samples_per_prompt 8 \\
   --generate_max_len 1024 --prompt_data rows.jsonl --input_key question \\
   --actor_learning_rate 5e-7 --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 \\
   --eps_clip_low_high 0.2 0.28 --adam_betas 0.9 0.95 --lr_scheduler constant --bogus 3
"""


def recipe(
    capsys: pytest.CaptureFixture[str], framework: str, *words: str
) -> tuple[dict[str, Any], str]:
    """Values of the printed recipe, which must load, and its comments."""
    assert main(["import", framework, *words]) == 0
    text = capsys.readouterr().out
    loaded = parse_recipe(text, "printed")
    make_plan(loaded)
    return flat(loaded), "\n".join(line for line in text.splitlines() if line.startswith("#"))


def expect(found: dict[str, Any], **wanted: Any) -> None:
    keys = {key.replace("__", "."): value for key, value in wanted.items()}
    assert {key: found[key] for key in keys} == keys


def test_a_config_of_trl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """16 rows x 8 steps per generation are 8 prompts of 16 samples on one process; 4 accumulated
    steps make 2 updates per pass. 120 optimizer steps are 30 steps of 2 x 2 updates.
    """
    file = tmp_path / "config.yaml"
    file.write_text(OPEN_R1)
    found, notes = recipe(capsys, "trl", str(file))
    expect(
        found,
        model__path="Qwen/Qwen2.5-1.5B-Instruct",
        data__source="AI-MO/NuminaMath-TIR",
        data__prompt_field="problem",
        data__max_prompt_tokens=512,
        run__steps=30,
        run__seed=42,
        run__precision="bfloat16",
        rollout__prompts_per_step=8,
        rollout__samples_per_prompt=16,
        rollout__max_new_tokens=1024,
        rollout__temperature=0.7,
        trainer__learning_rate=2e-5,
        trainer__betas=(0.9, 0.999),
        environment__rewards=("my.rewards:accuracy",),
        log__to=("wandb",),
    )
    method = resolve_algorithm(parse_recipe("algorithm.name = 'grpo'", "").algorithm)
    expect(
        found,
        algorithm__name="grpo",
        algorithm__beta=0.04,
        algorithm__kl="k3-unbiased",
        algorithm__clip_high=0.28,
        algorithm__epochs=2,
        algorithm__minibatches=2,
        algorithm__correction="masked-sequence",
    )
    assert method.aggregation == "sequence" and found["algorithm.aggregation"] is None
    assert "epsilonn = 0.3 is unknown. Did you mean 'epsilon'?" in notes
    assert "gradient_checkpointing_kwargs" in notes and "warm-up" in notes
    assert "lr_scheduler_type = 'cosine_with_min_lr' has no counterpart" in notes
    four, _ = recipe(capsys, "trl", str(file), "--processes", "4")
    assert four["rollout.prompts_per_step"] == 32


def test_a_script_of_verl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.sh"
    file.write_text(VERL)
    found, notes = recipe(capsys, "verl", str(file))
    expect(
        found,
        model__path="Qwen/Qwen2-7B-Instruct",
        data__source="gsm8k.parquet",
        data__heldout_split="test.parquet",
        data__max_prompt_tokens=512,
        run__steps=30,
        rollout__prompts_per_step=1024,
        rollout__samples_per_prompt=5,
        rollout__max_new_tokens=768,
        rollout__top_k=0,
        trainer__learning_rate=1e-5,
        trainer__weight_decay=0.01,
        checkpoint__every=0,
        eval__every=5,
        algorithm__name="grpo",
        algorithm__aggregation="token",
        algorithm__beta=0.001,
        algorithm__dual_clip=3.0,
        algorithm__minibatches=4,
    )
    assert "trainer.my_own = 3 is unknown" in notes
    assert "ppo_micro_batch_size_per_gpu = 40 has no counterpart" in notes


def test_overrides_of_verl_as_words(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = recipe(
        capsys,
        "verl",
        "actor_rollout_ref.model.path=org/some-model",
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla",
    )
    expect(found, algorithm__name="ppo", critic__learning_rate=1e-5, rollout__samples_per_prompt=1)


def test_a_minibatch_larger_than_the_step_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    """verl counts both in prompts: it refuses 64 of 32, for any number of samples."""
    words = ["data.train_batch_size=32", "actor_rollout_ref.rollout.n=8"]
    words += ["actor_rollout_ref.actor.ppo_mini_batch_size=64", "data.max_response_length=64"]
    found, notes = recipe(capsys, "verl", *words, "actor_rollout_ref.model.path=org/some")
    assert found["algorithm.minibatches"] in (None, 1)
    assert "batches of 64 do not divide a step of 32" in notes


def test_flags_of_openrlhf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """128 prompts x 8 samples in batches of 128 samples are 8 updates."""
    file = tmp_path / "run.sh"
    file.write_text(OPENRLHF)
    found, notes = recipe(capsys, "openrlhf", str(file))
    expect(
        found,
        model__path="meta/Llama-3-8b",
        data__source="rows.jsonl",
        data__prompt_field="question",
        rollout__prompts_per_step=128,
        rollout__samples_per_prompt=8,
        rollout__max_new_tokens=1024,
        trainer__learning_rate=5e-7,
        trainer__schedule="constant",
        trainer__betas=(0.9, 0.95),
        algorithm__name="grpo",
        algorithm__aggregation="token",
        algorithm__beta=0.001,
        algorithm__clip_high=0.28,
        algorithm__minibatches=8,
    )
    assert "bogus = 3 is unknown" in notes and "address" not in notes
    words, _ = recipe(
        capsys, "openrlhf", "--", "--actor.model_name_or_path", "org/some", "--train.seed", "5"
    )
    assert words["run.seed"] == 5 and words["algorithm.name"] == "ppo"


@pytest.mark.nightly
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_algorithm_returns_unless_something_is_lacking(framework: str) -> None:
    """A method that a framework has completely is the same after both conversions, in that
    framework's terms: its settings there are equal again.
    """
    sizes = Sizes(16, 8, 256)
    for name, row in ZOO.items():
        made = convert(framework, row, sizes)
        if made.lacks or made.entry in ("GMPOConfig", "IWOPDConfig"):
            continue
        back = import_settings(framework, {**made.kept, **made.changed})
        chosen = {
            key.removeprefix("algorithm."): value
            for key, value in back.settings.items()
            if key.startswith("algorithm.")
        }
        method = ZOO[chosen.pop("name")].__class__(
            **{**vars(ZOO[back.settings["algorithm.name"]]), **chosen}
        )
        again = convert(framework, method, sizes)
        assert {**again.kept, **again.changed} == {**made.kept, **made.changed}, name


RECIPE = """
[run]
seed = 7
steps = 50
[model]
path = "org/some-model"
[data]
source = "rows.jsonl"
[rollout]
prompts_per_step = 32
samples_per_prompt = 16
max_new_tokens = 300
temperature = 0.9
[algorithm]
name = "grpo"
beta = 0.02
minibatches = 2
epochs = 2
clip_high = 0.28
[trainer]
learning_rate = 3e-6
schedule = "cosine"
betas = [0.8, 0.9]
weight_decay = 0.1
[engine]
block_size = 32
"""
WRITTEN: dict[str, tuple[str, ...]] = {
    "trl": (
        "per_device_train_batch_size=256,",
        "steps_per_generation=2,",
        "num_generations=16,",
        "max_completion_length=300,",
        "num_iterations=2,",
        "lr_scheduler_type='cosine',",
        "adam_beta1=0.8,",
        "adam_beta2=0.9,",
        "weight_decay=0.1,",
        "epsilon_high=0.28,",
        "beta=0.02,",
        "seed=7,",
        "learning_rate=3e-06,",
        "temperature=0.9,",
        "max_steps=200,",
    ),
    "verl": (
        "data.train_batch_size=32",
        "actor_rollout_ref.rollout.n=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.actor.optim.betas=[0.8,0.9]",
        "actor_rollout_ref.actor.optim.weight_decay=0.1",
        "actor_rollout_ref.actor.optim.lr=3e-06",
        "actor_rollout_ref.model.path=org/some-model",
        "trainer.total_training_steps=50",
    ),
    "openrlhf": (
        "--rollout.batch_size 32",
        "--train.batch_size 256",
        "--actor.adam.lr 3e-06",
        "--actor.adam.betas 0.8 0.9",
        "--train.seed 7",
        "--algo.kl.init_coef 0.02",
    ),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_recipe_is_converted_and_returns(
    framework: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.toml"
    file.write_text(RECIPE)
    assert main(["algorithms", str(file), "--convert", framework]) == 0
    text = capsys.readouterr().out
    missing = [line for line in WRITTEN[framework] if line not in text.replace("'actor_", "actor_")]
    assert not missing, text
    joined = " ".join(text.split())
    assert "engine.block_size = 32" in joined[joined.index("not converted:") :]
    assert "max_prompt_length" not in text and "lora" not in text and "critic" not in text
    assert main(["algorithms", "grpo", "--recipe", str(file), "--convert", framework]) == 0
    assert capsys.readouterr().out == text
    loaded = parse_recipe(RECIPE, "recipe")
    method = resolve_algorithm(loaded.algorithm)
    made = convert(framework, method, Sizes(32, 16, 300), flat(loaded))
    back = import_settings(framework, {**made.kept, **made.changed}).settings
    for key in (
        "rollout.prompts_per_step",
        "rollout.samples_per_prompt",
        "rollout.max_new_tokens",
        "rollout.temperature",
        "trainer.learning_rate",
        "trainer.weight_decay",
        "trainer.schedule",
        "algorithm.name",
        "algorithm.beta",
        "algorithm.clip_high",
        "algorithm.epochs",
        "algorithm.minibatches",
    ):
        assert back[key] == flat(loaded)[key], key
    assert tuple(back["trainer.betas"]) == (0.8, 0.9)


def test_the_tables_name_settings_that_exist() -> None:
    known = {**knobs(), **kind_knobs()}
    for framework in FRAMEWORKS:
        found = table(framework)
        for name, same in found.same.items():
            assert re.sub(r"\.\d$", "", same.ours) in known, name
            assert name in found.names
        assert (found.read | found.only_in | set(found.older.values())) <= found.names
        for settings in FRAMEWORKS[framework].defaults.values():
            assert {key.lstrip("+") for key in settings} <= found.names


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trl", "no-such.yaml"], "no-such.yaml"),
        (["trl", "list.yaml"], "mapping"),
        (["verl", "empty.sh"], "no settings of verl"),
        (["slime", "x.yaml"], "slime"),
        (["trl", "broken.yaml"], "not YAML"),
    ],
)
def test_what_is_no_config_is_refused(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.yaml").write_text("- a\n- b\n")
    Path("empty.sh").write_text("X=1\necho $X\n")
    Path("broken.yaml").write_text("a: [1\n")
    assert main(["import", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_verb_needs_no_torch() -> None:
    assert import_module("sixfold_interop.verb").PARSER.verb == "import"
    assert Recipe().algorithm.name == "grpo"


@pytest.mark.parametrize("by", ["command", "option"])
def test_rloo_of_trl(by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has RLOOConfig's defaults: 2 generations and beta 0.05, which no setting tells."""
    file, words = tmp_path / "run.sh", ["--trainer", "rloo"] if by == "option" else []
    command = "python my.py" if words else "trl rloo"
    file.write_text(f"{command} --model_name_or_path org/m --max_steps 5 --scale_rewards none\n")
    found, notes = recipe(capsys, "trl", str(file), *words)
    expect(found, algorithm__name="rloo", rollout__samples_per_prompt=2)
    expect(found, rollout__prompts_per_step=4)
    assert "scale_rewards = 'none' has no counterpart" in notes
