"""Plans of the GPU recipes count the parameters of the real model, and fit the GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sixfold.model.nf4 import Nf4Linear
from sixfold.model.trained_lora import add_lora, lower_base
from sixfold.recipe.adapter_folder import Base
from sixfold.recipe.memory import memory_of
from sixfold.recipe.plan import make_plan
from sixfold.recipe.schema import Recipe
from sixfold.recipe.toml import load_recipe
from sixfold.sizing.held import holdings
from sixfold.sizing.kv_cache import HEADROOM

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
RECIPES = {
    "gsm8k": ("qwen2.5-0.5b", 24, 1),
    "gsm8k_lora_7b": ("qwen2.5-7b", 24, 1),
    "math_7b_fsdp": ("qwen2.5-7b", 80, 8),
}
"""Name of the recipe -> folder with its model's config.json, GB of a GPU, number of GPUs."""


def local(name: str, flags: Sequence[str] = ()) -> Recipe:
    """The recipe, with a folder that has the config.json of its model."""
    return load_recipe(name, [f"--model.path={CONFIGS / RECIPES[name][0]}", *flags])


@pytest.mark.mostly_nightly(2)
@pytest.mark.parametrize(
    ("name", "flags"),
    [*((name, []) for name in RECIPES), ("gsm8k_lora_7b", ["--model.lora.base=nf4"])],
)
def test_the_plan_counts_what_the_module_has(name: str, flags: list[str]) -> None:
    recipe = local(name, flags)
    given = json.loads((CONFIGS / RECIPES[name][0] / "config.json").read_text())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**given), dtype=torch.float32)
    lora, trained = recipe.model.lora, model
    if lora.rank:
        lower_base(model, lora.base)
        trained = add_lora(model, lora, Base("", ""), 0).model
    plan = make_plan(recipe)
    assert plan.model.size is not None
    held = holdings(recipe, plan.model.size)
    assert held is not None
    learned = [p for p in trained.parameters() if p.requires_grad]
    stored = [m for m in model.modules() if isinstance(m, Nf4Linear)]
    packed = sum(m.in_features * m.out_features for m in stored)
    assert held.parameters == sum(p.numel() for p in model.parameters()) + packed
    tensors = [*model.parameters(), *(t for m in stored for t in (m.codes, m.scales))]
    assert held.stored == sum(t.nbytes for t in tensors)
    assert held.trained == sum(p.numel() for p in learned)


@pytest.mark.parametrize("name", RECIPES)
def test_the_plan_fits_the_gpu_with_a_tenth_to_spare(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(RECIPES[name][2]))
    plan, total = memory_of(make_plan(local(name))), RECIPES[name][1] * 10**9
    assert plan is not None and HEADROOM == 0.1
    cache = plan.cache_that_fits(total)
    assert cache is not None and cache >= 32 * plan.sequence, "32 full-length sequences at a time"
    assert plan.needed(cache) <= 0.9 * total
