"""Adapter files: what PEFT saved is read number for number, and what would be silently wrong is
refused by name.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.errors import UserError
from sixfold.model.lora import read_adapter

Q = "model.layers.1.self_attn.q_proj"
KEY = f"base_model.model.{Q}"


@pytest.fixture
def saved(plain: Callable[[str], PreTrainedModel], tmp_path: Path) -> Path:
    made = get_peft_model(
        copy.deepcopy(plain("qwen3")), LoraConfig(r=4, lora_alpha=10, target_modules=["q_proj"])
    )
    with torch.no_grad():
        for p in made.parameters():
            if p.requires_grad:
                p.uniform_(-1, 1)
    made.save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, tensors: dict[str, Tensor | None] | None = None, **config: object) -> None:
    """Write the files again with some settings and tensors changed (None: left out)."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    weights = folder / "adapter_model.safetensors"
    save_file(
        {k: t for k, t in (load_file(weights) | (tensors or {})).items() if t is not None}, weights
    )


@pytest.mark.parametrize(("stable", "scale"), [(False, 10 / 4), (True, 10 / 2)])
def test_layers_and_scale(
    saved: Path, tiny: Callable[[str], PreTrainedModel], stable: bool, scale: float
) -> None:
    """alpha / r, or alpha / sqrt(r)."""
    change(saved, use_rslora=stable)
    adapter, files = (
        read_adapter(str(saved), tiny("qwen3")),
        load_file(saved / "adapter_model.safetensors"),
    )
    assert sorted(adapter.layers) == ["model.layers.0.self_attn.q_proj", Q]
    down, up = adapter.layers[Q]
    assert torch.equal(down, files[f"{KEY}.lora_A.weight"]) and torch.equal(
        up, files[f"{KEY}.lora_B.weight"] * scale
    )


REFUSED: list[tuple[dict[str, object], str]] = [
    (dict(peft_type="IA3"), "peft_type = IA3 is not supported"),
    (dict(use_dora=True), "use_dora = True is not supported"),
    (dict(bias="all"), "bias = 'all' is not supported"),
    (dict(lora_bias=True), "lora_bias = True is not supported"),
    (dict(modules_to_save=["lm_head"]), r"modules_to_save = \['lm_head'\] is not supported"),
    (dict(rank_pattern={"q_proj": 8}), "rank_pattern"),
    (dict(alpha_pattern={"q_proj": 8}), "alpha_pattern"),
    (dict(layer_replication=[[0, 2]]), "layer_replication"),
    (dict(target_parameters=["x"]), "target_parameters"),
    (dict(of_a_later_version=1), "of_a_later_version = 1 is not supported"),
    (dict(init_lora_weights="pissa_niter_4"), "'pissa_niter_4' also changes the base model"),
    (dict(r=0), "r = 0, but r must be an integer of at least 1"),
    (dict(r=True), "r = True, but r must be an integer"),
    (dict(r=4.0), r"r = 4\.0, but r must be an integer"),
    (dict(r="4"), "r = '4', but r must be an integer"),
    (dict(lora_alpha=None), "lora_alpha = None, but lora_alpha must be a finite number"),
    (dict(lora_alpha=float("nan")), "lora_alpha = nan, but"),
    (dict(lora_alpha=float("-inf")), "lora_alpha = -inf, but"),
    (dict(lora_alpha=True), "lora_alpha = True, but"),
    (dict(lora_alpha="16"), "lora_alpha = '16', but"),
    (dict(lora_alpha=10**400), "lora_alpha = 10+, but"),
    (dict(r=5), r"lora_A of '.*q_proj' has shape \[4, 64\], but .* r need \[5, 64\]"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_settings_that_would_change_the_numbers_are_refused(
    saved: Path, tiny: Callable[[str], PreTrainedModel], config: dict[str, object], message: str
) -> None:
    change(saved, **config)
    with pytest.raises(UserError, match=message):
        read_adapter(str(saved), tiny("qwen3"))


WRONG: list[tuple[dict[str, Tensor | None], str]] = [
    (
        {f"{KEY}.lora_B.weight": None},
        rf"lora_B of '{Q}' is missing",
    ),
    (
        {f"{KEY}.lora_A.weight": torch.ones(4, 63)},
        rf"lora_A of '{Q}' has shape \[4, 63\], but .* need \[4, 64\]",
    ),
    (
        {f"{KEY}.lora_A.weight": torch.full((4, 64), torch.nan)},
        rf"lora_A of '{Q}' has values that are not finite",
    ),
    ({f"{KEY}.lora_magnitude_vector": torch.ones(64)}, "lora_magnitude_vector' is not supported"),
    (
        {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 61)},
        "lora_embedding_A' is not supported",
    ),
    (
        {f"base_model.model.{Q}s.lora_A.weight": torch.ones(4, 64)},
        rf"no layer '{Q}s'. Did you mean '{Q}'\?",
    ),
    (
        {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)},
        r"'lm_head' \(Linear\) is not supported",
    ),
    (
        {"base_model.model.model.norm.lora_A.weight": torch.ones(4, 64)},
        r"'model.norm' \(Qwen3RMSNorm\) is not supported",
    ),
]


@pytest.mark.parametrize(("tensors", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_tensors_that_do_not_fit_are_named(
    saved: Path,
    tiny: Callable[[str], PreTrainedModel],
    tensors: dict[str, Tensor | None],
    message: str,
) -> None:
    change(saved, tensors)
    with pytest.raises(UserError, match=message):
        read_adapter(str(saved), tiny("qwen3"))


def test_folders_that_are_none(
    saved: Path, tiny: Callable[[str], PreTrainedModel], tmp_path: Path
) -> None:
    def refusal(folder: Path) -> str:
        with pytest.raises(UserError) as caught:
            read_adapter(str(folder), tiny("qwen3"))
        return str(caught.value)

    assert "has no adapter_config.json (there is no such folder). Give a folder" in refusal(
        tmp_path / "nowhere"
    )
    change(saved, {key: None for key in load_file(saved / "adapter_model.safetensors")})
    assert "has no weights" in refusal(saved)
    (saved / "adapter_model.safetensors").write_bytes(b"x")
    assert "cannot be read" in refusal(saved)
    (saved / "adapter_config.json").write_text("[]")
    save_file({}, saved / "adapter_model.safetensors")
    assert "must be a JSON object" in refusal(saved)
    (saved / "adapter_model.safetensors").rename(saved / "adapter_model.bin")
    assert "has no adapter_model.safetensors" in refusal(saved)
