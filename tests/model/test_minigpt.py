"""MiniGPT against its definition, written out in plain PyTorch, and as a model of engine and disk.

The sampler's and the trainer's log-probs are compared in tests/numerics/test_architectures.py.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import make_tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.engine.speculative import Speculation
from sixfold.errors import UserError
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import load_policy
from sixfold.model.minigpt import MiniGPTConfig, MiniGPTForCausalLM
from sixfold.model.scratch import scratch_model
from sixfold.recipe.model_shape import model_shape
from sixfold.recipe.schema import ModelConfig, ScratchConfig
from sixfold.recipe.toml import parse_recipe
from sixfold.sizing.model_size import read_size
from sixfold.trainer.checkpointing import apply_activation_checkpointing
from sixfold.types import SamplingParams

TOY = ScratchConfig(architecture="minigpt", alphabet="0123456789+-*/=()<>#;:,", context=11)
"""29 tokens with the 6 special ones, 11 positions, and the default sizes."""
TEXT = [7, 3, 60, 3, 7, 3, 0, 12, 12, 1, 7, 3, 5]


def dense_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Logits [T, V] from the weights alone: one position, one head at a time, in float64."""
    w = {name: p.detach().double() for name, p in model.state_dict().items()}
    width = w["model.tokens.weight"].shape[1]
    heads = model.config.num_attention_heads
    size = width // heads

    def norm(x: Tensor, name: str) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        scale = (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return x / scale * w[f"{name}.weight"] + w[f"{name}.bias"]

    x = torch.stack(
        [w["model.tokens.weight"][t] + w["model.positions.weight"][i] for i, t in enumerate(tokens)]
    )
    for n in range(model.config.num_hidden_layers):
        layer = f"model.layers.{n}"
        q, k, v = (norm(x, f"{layer}.attn_norm") @ w[f"{layer}.attn.qkv.weight"].T).split(width, -1)
        mixed = torch.zeros_like(x)
        for i in range(len(tokens)):
            for h in range(heads):
                head = slice(h * size, (h + 1) * size)
                scores = k[: i + 1, head] @ q[i, head] / math.sqrt(size)
                weights = scores.exp() / scores.exp().sum()
                mixed[i, head] = weights @ v[: i + 1, head]
        x = x + mixed @ w[f"{layer}.attn.out.weight"].T
        inner = (
            norm(x, f"{layer}.mlp_norm") @ w[f"{layer}.mlp.up.weight"].T + w[f"{layer}.mlp.up.bias"]
        )
        inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
        x = x + inner @ w[f"{layer}.mlp.down.weight"].T + w[f"{layer}.mlp.down.bias"]
    return norm(x, "model.norm") @ w["model.tokens.weight"].T


def model_with_biases(**sizes: Any) -> PreTrainedModel:
    """A random model whose norms and biases are not those of a new one."""
    model = make_tiny("minigpt", **sizes)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.linspace(-0.3, 0.4, len(p)))
    return model


def naive_greedy(model: PreTrainedModel, prompt: list[int], length: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < length:
        tokens.append(int(dense_logits(model, tokens)[-1].argmax()))
    return tokens


@settings(max_examples=30, deadline=None)
@given(
    st.integers(2, 60), st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.integers(1, 8)
)
def test_parameters_follow_the_formula(v: int, t: int, layers: int, heads: int, size: int) -> None:
    d = heads * size
    config = MiniGPTConfig(
        vocab_size=v,
        max_position_embeddings=t,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        hidden_size=d,
        intermediate_size=4 * d,
    )
    with torch.device("meta"):
        model = MiniGPTForCausalLM(config)
    expected = v * d + t * d + layers * (12 * d * d + 9 * d) + 2 * d
    assert sum(p.numel() for p in model.parameters()) == expected
    assert read_size(config.to_diff_dict()).parameters == expected


def test_the_toy_has_796_416_parameters_and_the_plan_counts_them() -> None:
    model, tokenizer = scratch_model(TOY, seed=0)
    assert len(tokenizer) == 29
    assert sum(p.numel() for p in model.parameters()) == 796_416
    shape = model_shape(ModelConfig(scratch=TOY))
    assert (shape.parameters, shape.context) == (796_416, 11)
    assert shape.size is not None
    # keys and values of 4 layers of width 128
    assert shape.size.cached(padded=False).numbers == 2 * 4 * 128


def test_initial_weights() -> None:
    """Matrices and embeddings have the standard deviation asked for, norms are identities."""
    for std in (0.02, 0.05):
        sizes = TOY.model_copy(update={"initializer_range": std})
        model, _ = scratch_model(sizes, seed=3)
        assert model.lm_head.weight is model.model.tokens.weight
        for name, p in model.named_parameters():
            if p.dim() > 1:
                assert p.std().item() == pytest.approx(std, rel=0.06), name
                assert abs(p.mean().item()) < 0.1 * std, name
            else:
                assert p.eq(1 if name.endswith("norm.weight") else 0).all(), name


@pytest.mark.parametrize("sizes", [{}, {"num_attention_heads": 2, "num_hidden_layers": 3}])
def test_logits_are_those_of_the_definition(sizes: dict[str, int]) -> None:
    model = model_with_biases(**sizes)
    with torch.no_grad():
        logits = model(torch.tensor([TEXT])).logits[0]
    torch.testing.assert_close(logits.double(), dense_logits(model, TEXT), rtol=0, atol=2e-5)


@pytest.mark.parametrize("attention", ["eager", "sixfold"])
def test_later_tokens_do_not_change_earlier_logits(attention: str) -> None:
    model = model_with_biases()
    model.set_attn_implementation(attention)
    with torch.no_grad():
        before = model(torch.tensor([TEXT])).logits[0]
        for t in range(len(TEXT) - 1):
            changed = TEXT[: t + 1] + [(token + 17) % 61 for token in TEXT[t + 1 :]]
            after = model(torch.tensor([changed])).logits[0]
            assert (after[: t + 1] - before[: t + 1]).abs().max() <= 1e-6
            assert (after[t + 1] - before[t + 1]).abs().max() > 1e-2


@pytest.mark.parametrize("speculation", [None, Speculation(k=3, shortest=1)])
def test_the_engine_fills_the_context_with_the_greedy_tokens(
    speculation: Speculation | None,
) -> None:
    """Up to the last position: a row beyond the table of positions would be an IndexError."""
    model = model_with_biases(max_position_embeddings=20)
    model.set_attn_implementation("sixfold")
    engine = Engine(CausalLM(model), kv_tokens=400, block_size=4, speculation=speculation)
    prompts = {"short": [5], "long": TEXT, "full": (TEXT * 2)[:19]}
    for key, prompt in prompts.items():
        engine.add(key, prompt, SamplingParams(max_tokens=20 - len(prompt), temperature=0), [0])
    done = {s.request.key: s for s in engine.run()}
    for key, prompt in prompts.items():
        expected = naive_greedy(model, prompt, 20)
        assert done[key].tokens == expected, key
        logp = dense_logits(model, expected).log_softmax(-1)
        scored = [float(logp[i - 1, expected[i]]) for i in range(len(prompt), 20)]
        assert done[key].logp == pytest.approx(scored, abs=2e-5), key


def test_two_calls_on_a_cache_are_one() -> None:
    model, cache = model_with_biases(), DynamicCache()
    with torch.no_grad():
        parts = [
            model(torch.tensor([part]), past_key_values=cache).logits[0].double()
            for part in (TEXT[:5], TEXT[5:])
        ]
    torch.testing.assert_close(torch.cat(parts), dense_logits(model, TEXT), rtol=0, atol=2e-5)


def test_transformers_generates_the_same_with_its_cache_and_with_padding() -> None:
    model = model_with_biases()
    model.generation_config.eos_token_id = None
    expected = [naive_greedy(model, prompt, len(prompt) + 6) for prompt in (TEXT, TEXT[:4])]
    padding = len(TEXT) - 4
    ids = torch.tensor([TEXT, [0] * padding + TEXT[:4]])
    mask = torch.tensor([[1] * len(TEXT), [0] * padding + [1] * 4])
    for use_cache in (True, False):
        made = model.generate(
            ids, attention_mask=mask, max_new_tokens=6, do_sample=False, use_cache=use_cache
        ).tolist()
        assert made[0] == expected[0]
        assert made[1][padding:] == expected[1]


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputed_layers_give_the_same_gradients(mode: Literal["selective", "full"]) -> None:
    gradients = []
    for chosen in ("none", mode):
        model = model_with_biases()
        apply_activation_checkpointing(model, chosen)
        calls: list[object] = []
        model.get_submodule("model.layers.0.mlp").register_forward_pre_hook(
            lambda *inputs, calls=calls: calls.append(inputs)
        )
        model(torch.tensor([TEXT])).logits.square().mean().backward()
        assert len(calls) == (1 if chosen == "none" else 2)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert bool(gradient.any())
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_a_saved_policy_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    policy = load_policy(ModelConfig(scratch=TOY), seed=5, device="cpu")
    policy.save(tmp_path)
    loaded = load_policy(ModelConfig(path=str(tmp_path)), seed=0, device="cpu")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.context == policy.context == 11
    assert loaded.vocabulary_hash == policy.vocabulary_hash
    for model in (loaded.model, plain):
        assert type(model) is MiniGPTForCausalLM
        assert model.lm_head.weight is model.model.tokens.weight
        for name, p in policy.model.named_parameters():
            assert torch.equal(model.get_parameter(name), p), name
    shape = model_shape(ModelConfig(path=str(tmp_path)))
    assert (shape.parameters, shape.context) == (796_416, 11)


RECIPE = """
run.name = "toy"
[model.scratch]
architecture = "minigpt"
"""


@pytest.mark.parametrize(
    ("setting", "value", "rule"),
    [
        ("kv_heads", 1, r"it is 4 \(as many as heads\)\. Remove it"),
        ("head_dim", 16, r"it is 32 \(hidden_size / heads\)\. Remove it"),
        ("intermediate_size", 500, r"it is 512 \(4 \* hidden_size\)\. Remove it"),
        ("rope_theta", 100.0, r"no effect .* Remove it"),
        ("hidden_size", 130, r"must be a multiple of heads = 4"),
    ],
)
def test_sizes_that_do_not_hold_are_refused(setting: str, value: float, rule: str) -> None:
    with pytest.raises(UserError, match=rf"^model\.scratch\.{setting} = {value}\b.* {rule}"):
        parse_recipe(f"{RECIPE}{setting} = {value}", "toy.toml")


def test_sizes_that_hold_may_be_given() -> None:
    text = "hidden_size = 96\nheads = 3\nkv_heads = 3\nintermediate_size = 384\nhead_dim = 32"
    sizes = parse_recipe(f"{RECIPE}{text}", "toy.toml").model.scratch
    model, _ = scratch_model(sizes, seed=0)
    assert model.config.intermediate_size == 384
    assert model.config.num_attention_heads == 3
    # heads = 3 would not go with the default of two key-value heads, which is Qwen3's
    assert parse_recipe(f"{RECIPE}hidden_size = 96\nheads = 3", "toy.toml").model.scratch.heads == 3
