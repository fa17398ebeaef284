"""Planned bytes of the KV cache against those that the engine's cache allocates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.models.public_sizes import PUBLIC
from tests.models.tiny_configs import saved, tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM

from sixfold.engine.kv_cache import KVCache
from sixfold.engine.quantised_cache import Int8KVCache
from sixfold.kernels.attention import AttentionLayer
from sixfold.model.attention import NAME, register
from sixfold.model.causal_lm import Segments, hidden_states
from sixfold.sizing.families import FAMILIES
from sixfold.sizing.kv_cache import token_bytes
from sixfold.sizing.model_size import cached_numbers, read_size
from sixfold_planning.memory import latent_bytes_per_token

TOKENS, BLOCK = 5, 4


@dataclass(frozen=True)
class Writing:
    """A layout that writes keys and values to caches, and attends within the row."""

    caches: tuple[KVCache, ...]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        for cache in self.caches:
            cache.write(kernel.layer, k[0], v[0], torch.arange(TOKENS))
        return Segments(((0, TOKENS),)).attend(q, k, v, kernel)


@torch.no_grad()
def allocated(config: Any) -> tuple[float, float]:
    """Bytes per token of the engine's caches: float32 and int8."""
    register()
    config._attn_implementation = NAME
    model = AutoModelForCausalLM.from_config(config).eval()
    caches = KVCache(3, BLOCK), Int8KVCache(3, BLOCK)
    row = torch.arange(TOKENS)
    hidden_states(model, row, row, Writing(caches))
    plain, quantised = (sum(t.nbytes for t in c.tensors()) / (4 * BLOCK) for c in caches)
    return plain, quantised


@pytest.mark.mostly_slow(5)
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_engine_allocates_the_planned_bytes(kind: str) -> None:
    config = tiny_config(kind)
    cached = read_size(saved(config)).cached(padded=False)
    planned = token_bytes(cached, 4, "auto"), token_bytes(cached, 4, "int8")
    assert planned == allocated(config)


@pytest.mark.parametrize(
    ("name", "per_token"),
    [
        ("Llama-2-7B", 524_288),
        ("Llama-3-70B", 327_680),
        ("Mixtral-8x7B", 131_072),
        ("Qwen3-30B-A3B", 98_304),
        ("gpt-oss-20b", 49_152),
    ],
)
def test_bytes_of_public_models_in_bfloat16(name: str, per_token: int) -> None:
    cached = read_size(PUBLIC[name][1]).cached(padded=True)
    assert token_bytes(cached, 2, "auto") == per_token


def test_latent_attention_is_cached_as_whole_keys_and_values() -> None:
    """The engine has no compressed cache. On a GPU, values are padded to the size of the keys."""
    size = read_size(PUBLIC["DeepSeek-V3"][1])
    assert size.cached(padded=False).numbers == 61 * 128 * (128 + 64 + 128)
    assert size.cached(padded=True).numbers == 61 * 128 * 2 * (128 + 64)
    # Engines with a compressed cache, such as vLLM: published as 70 KB per token.
    compressed = latent_bytes_per_token(
        layers=size.layers, latent=size.latent, rotary=size.rotary, width=2
    )
    assert compressed == 70_272


def test_other_families_are_not_guessed() -> None:
    fields = dict(num_hidden_layers=2, num_attention_heads=4, hidden_size=32)
    shared = cached_numbers({"model_type": "new", **fields}, padded=True)
    assert shared is not None and shared.numbers == 2 * 2 * 32
    assert cached_numbers({"model_type": "new", **fields, "kv_lora_rank": 8}, padded=True) is None
    assert cached_numbers({"model_type": "new", "hidden_size": 32}, padded=True) is None
