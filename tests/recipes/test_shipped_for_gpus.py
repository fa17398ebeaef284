"""The shipped recipes for GPUs run on a local model and dataset of the form of theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sixfold.model.loading import load_policy
from sixfold.recipe.schema import ModelConfig, ScratchConfig
from sixfold.recipe.toml import load_recipe
from sixfold.run.start import train_run

from .test_shipped import FEW, check_run

GSM8K_COLUMNS = ["--data.prompt_field", "question", "--data.answer_after", "####"]
GSM8K_FORM = Path(__file__).parents[1] / "data" / "gsm8k_form"


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("gsm8k", []),
        ("gsm8k_lora_7b", ["--model.lora.rank", "4"]),
        # In one process; tests/run has runs on several ranks.
        ("math_7b_fsdp", [*GSM8K_COLUMNS, "--data.heldout", "2"]),
    ],
)
def test_gpu_recipes_run_on_a_local_model_and_dataset_of_the_same_form(
    name: str, extra: list[str], tmp_path: Path
) -> None:
    """The real loading path: a chat model folder by from_pretrained, a dataset folder by
    `datasets`, answers after ####, math-verify.
    """
    alphabet = "".join(chr(c) for c in range(32, 127)) + "\n"
    sizes = ScratchConfig(
        alphabet=alphabet,
        hidden_size=16,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=8,
        intermediate_size=32,
        context=1024,
    )
    load_policy(ModelConfig(scratch=sizes), seed=0, device="cpu").save(tmp_path / "model")
    local = [
        "--model.path",
        str(tmp_path / "model"),
        "--data.source",
        str(GSM8K_FORM),
        "--data.subset",
        "",
        "--run.device",
        "cpu",
    ]
    short = [
        "--data.max_prompt_tokens",
        "900",
        "--rollout.max_new_tokens",
        "16",
        "--engine.max_running",
        "8",
        "--environment.workers",
        "1",
    ]
    fast = ["--run.dir", str(tmp_path), "--environment.preflight", "0"]
    recipe = load_recipe(name, [*local, *short, *FEW, *fast, *extra])
    assert train_run(recipe) == 0
    check_run(tmp_path / name)
    records = [
        json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    ]
    assert all(r["reward/error_frac"] == 0.0 for r in records)
