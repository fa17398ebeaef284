"""Shared by all tests: one thread, no network, and tiny models made once.

The process that only distributes tests to workers loads this file too, before it starts them. So
torch is imported where it is needed, not at the top.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sixfold.model.loading import Policy
    from sixfold.recipe.schema import ScratchConfig

# Before torch is imported: it reads them once.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")
# `sixfold plan --measure` on this machine must not change the reports of runs in tests.
os.environ.setdefault("XDG_CACHE_HOME", f"{tempfile.gettempdir()}/sixfold-tests-without-a-cache")
# Flushing to the disk is most of the wall time of a tiny run. A killed process loses nothing that
# it has written; only a power failure would, and no test can cause one. Tests of the order of
# flushes replace this function by one that takes notes.
os.fsync = lambda descriptor: None  # type: ignore[assignment]

VOCABULARY = 61
END = 1
# Widths at which the CPU's kernels give a row the same bits in any company: heads of 32 query
# numbers per key head, MLPs in whole vectors.
_SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=256, bos_token_id=None, eos_token_id=END, pad_token_id=0,
)  # fmt: skip
_EXTRAS: dict[str, dict[str, object]] = {
    "qwen3": {},
    "llama": {},
    "gemma": {},
    "gemma2": dict(
        sliding_window=8,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
        query_pre_attn_scalar=16,
    ),
    "gemma3_text": dict(sliding_window=8, query_pre_attn_scalar=16),
    "gpt2": dict(n_embd=64, n_layer=2, n_head=2, n_positions=256),
    "qwen3_moe": dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2),
}
ARCHITECTURES = tuple(_EXTRAS)
# Attention of other shapes: values smaller than keys.
_EXTRAS["deepseek_v3"] = dict(
    num_key_value_heads=4, head_dim=8, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16,
    qk_rope_head_dim=8, v_head_dim=16,
    moe_intermediate_size=32, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
    n_group=1, topk_group=1, first_k_dense_replace=1,
)  # fmt: skip
# Sinks; windows on every other layer, YaRN, experts with biases.
_EXTRAS["gpt_oss"] = dict(
    sliding_window=8, num_local_experts=4, num_experts_per_tok=2,
    rope_parameters=dict(rope_type="yarn", rope_theta=150000.0, factor=4.0, beta_fast=32.0,
    beta_slow=1.0, truncate=False,
                         original_max_position_embeddings=64),
)  # fmt: skip
OTHER_ATTENTION = ("deepseek_v3", "gpt_oss")


LONG = (
    "devices",
    "run/test_resume.py",
    "run/test_reference_placements.py",
    "run/test_several_ranks.py",
    "trainer/test_context_parallel.py",
    "trainer/test_expert_parallel.py",
    "trainer/test_sharded.py",
    "trainer/test_tensor_parallel.py",
    "engine/test_sanitized_kernels.py",
    "run",
    "checkpoint",
    "commands",
    "engine",
    "rollout",
    "recipes",
    "server",
    "reference",
    "environment",
)
"""Folders and files whose tests begin first: a long file that begins last keeps one worker busy
while the other has nothing to do."""


@cache
def _prepare_torch() -> None:
    """Compute in one thread, and make our attention known to transformers."""
    import torch

    from sixfold.model.attention import register

    torch.set_num_threads(1)
    register()


def pytest_collectstart() -> None:
    """Runs in processes that run tests, not in the one that distributes them."""
    _prepare_torch()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests, and mark as slow what `mostly_slow` leaves out of the quick lane."""
    here = Path(__file__).parent
    seen: Counter[tuple[Path, str]] = Counter()
    for item in items:
        if mark := item.get_closest_marker("mostly_slow"):
            function = (item.path, item.location[2].partition("[")[0])
            seen[function] += 1
            if seen[function] > mark.args[0]:
                item.add_marker("slow")

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(here) if item.path.is_relative_to(here) else item.path
        return next((i for i, name in enumerate(LONG) if path.is_relative_to(name)), len(LONG))

    items.sort(key=place)


def make_tiny(name: str, **extra: object) -> PreTrainedModel:
    """A tiny random model of a transformers model type, whose distributions are far from flat."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    _prepare_torch()
    sizes = {} if name == "gpt2" else _SIZES
    config = AutoConfig.for_model(
        name,
        **{
            "vocab_size": VOCABULARY,
            "eos_token_id": END,
            **sizes,
            **_EXTRAS.get(name, {}),
            **extra,
        },
    )
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
    ):  # a test may ask first while it is in inference mode
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for key, p in model.named_parameters():
                if p.dim() > 1:
                    p.normal_(0, 0.12)
                elif key.endswith(
                    ".sinks"
                ):  # far from 0, so that one that is dropped or counted twice shows
                    p.normal_(0, 1.5)
    return model.eval()


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], PreTrainedModel]:
    """tiny(architecture): a tiny model under our attention and norms. The same object for all
    tests: copy it before changing it.
    """
    from sixfold.kernels.norms import fuse_norms
    from sixfold.model.attention import NAME

    made: dict[str, PreTrainedModel] = {}

    def get(name: str) -> PreTrainedModel:
        if name not in made:
            made[name] = make_tiny(name)
            made[name].set_attn_implementation(NAME)
            fuse_norms(made[name])
        return made[name]

    return get


@pytest.fixture(scope="session")
def plain() -> Callable[[str], PreTrainedModel]:
    """plain(architecture): the same weights as transformers alone would run them, the oracle."""
    made: dict[str, PreTrainedModel] = {}

    def get(name: str) -> PreTrainedModel:
        if name not in made:
            made[name] = make_tiny(name)
            made[name].set_attn_implementation("eager")
        return made[name]

    return get


@pytest.fixture(scope="session")
def scratch_config() -> ScratchConfig:
    """A model of two layers with the default alphabet."""
    from sixfold.recipe.schema import ScratchConfig

    return ScratchConfig(
        hidden_size=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate_size=64,
        context=128,
    )


@pytest.fixture(scope="session")
def policy(scratch_config: ScratchConfig) -> Policy:
    """A scratch model with its tokenizer. The same object for all tests: copy it before changing
    it.
    """
    from sixfold.model.loading import load_policy
    from sixfold.recipe.schema import ModelConfig

    return load_policy(ModelConfig(scratch=scratch_config), seed=3, device="cpu")
