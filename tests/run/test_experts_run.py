"""`sixfold train` on a mixture of experts: the reward rises with a balance loss, trajectories have
records of their experts, and a resumed run repeats the run bit for bit. Two ranks that divide the
experts learn as one process does.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from sixfold.cli import main
from sixfold.model.scratch import character_tokenizer
from sixfold.recipe.schema import ScratchConfig
from sixfold.report.rollouts import read_rollouts
from sixfold.types import Trajectory
from tests.rank_runs import train_on_ranks

from .processes import metrics, tiny_recipe
from .test_several_ranks import curve, same

pytestmark = pytest.mark.slow

REWARD = """
def sevens(completion, task):
    return completion.count("7") / max(1, len(completion))
"""
EXPERTS = {
    "moe__balance_loss": 0.02,
    "moe__routing": "replay",
    "sft__steps": 0,
    "rollout__max_new_tokens": 6,
    "trainer__learning_rate": 1e-2,
    "trainer__max_tokens_per_microbatch": 64,
    "log__rollouts_every": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: eight experts, two per token, in two layers."""
    path = tmp_path_factory.mktemp("experts")
    tokenizer = character_tokenizer(ScratchConfig().alphabet)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32,
        moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=64, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(path / "model")
    tokenizer.save_pretrained(path / "model")
    (path / "reward.py").write_text(REWARD)
    return path


def train(folder: Path, runs: Path, **overrides: object) -> Path:
    recipe = runs / "recipe.toml"
    reward = f'environment.rewards = ["{folder / "reward.py"}:sevens"]'
    recipe.write_text(f'run.name = "run"\n{reward}\n')
    settings = {"model__path": folder / "model", **EXPERTS, **overrides}
    flags = tiny_recipe(runs, **settings)
    assert main(["train", str(recipe), *flags]) == 0
    return runs / "run"


@pytest.mark.nightly
def test_reward_rises_and_a_resume_repeats_the_run(folder: Path, tmp_path: Path) -> None:
    run = train(folder, tmp_path, run__steps=12)
    steps = metrics(run)
    reward = [m["reward/mean"] for m in steps]
    assert statistics.mean(reward[-3:]) > 2 * statistics.mean(reward[:3])
    for m in steps:
        assert m["mismatch/max_abs_logp"] <= 1e-4
        assert m["moe/drift_frac"] == 0  # float32, fresh samples
        assert 1 <= m["moe/max_load"] <= 8 and 1.5 < m["moe/balance_loss"] < 8
        assert 0 < m["moe/load_entropy_frac"] <= 1 and 0 <= m["moe/dead_frac"] < 1
    for record in read_rollouts(run / "rollouts" / "step-000002.jsonl.zst"):
        t = Trajectory.from_record(record)
        assert t.routes is not None and (t.routes.layers, t.routes.top_k) == (2, 2)
        assert len(t.routes) == len(t.tokens) - 1
    weights = load_file(run / "checkpoints" / "step-000012" / "model" / "model.safetensors")

    again = tmp_path / "again"
    again.mkdir()
    train(folder, again, run__steps=6)
    assert main(["train", "--resume", str(again / "run"), "--run.steps", "12"]) == 0
    assert metrics(again / "run") == steps
    resumed = load_file(again / "run/checkpoints/step-000012/model/model.safetensors")
    assert all(torch.equal(resumed[name], weights[name]) for name in weights)


@pytest.mark.mostly_nightly(1)
@pytest.mark.parametrize(
    "more",
    [
        {"run__precision": "bfloat16", "algorithm__minibatches": 2},
        {"sync__kind": "int8", "algorithm__beta": 0.05, "algorithm__correction": "decoupled"},
    ],
    ids=["bfloat16", "quantised sampler"],
)
def test_runs_with_replay_report_the_drift(
    folder: Path, tmp_path: Path, more: dict[str, object]
) -> None:
    run = train(folder, tmp_path, run__steps=2, **more)
    for m in metrics(run):
        assert 0 <= m["moe/drift_layer_frac"] <= m["moe/drift_frac"] <= 1


@pytest.mark.nightly
def test_two_ranks_divide_the_experts_and_one_process_resumes(folder: Path, tmp_path: Path) -> None:
    more = {"algorithm__beta": 0.05, "run__steps": 4, "rollout__prompts_per_step": 5}
    alone = train(folder, tmp_path, **more)
    flags = tiny_recipe(
        tmp_path,
        **{"model__path": folder / "model", **EXPERTS, **more, "run__name": "ranks"}
        | {"run__steps": 2, "parallel__experts": 2},
    )
    ranks = train_on_ranks(2, ["train", str(tmp_path / "recipe.toml"), *flags], tmp_path / "errors")
    assert ranks.codes() == [0, 0], ranks.errors()
    resumed = ["--resume", str(tmp_path / "ranks"), "--run.steps", "4", "--parallel.experts", "1"]
    assert main(["train", *resumed]) == 0
    same(curve(tmp_path / "ranks"), curve(alone))
