"""Support of transformers architectures. Tiny random models of every type are sampled, scored and
compared.

    python benchmarks/architectures.py [model type ...]

For each type: the check that every model goes through when it is loaded, then sampling by the
engine and scoring by the trainer's code, packed, against the model's own code on one text at a
time. Windows are 8 tokens and the texts up to 40, so that a window which is not honoured shows.
"""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import Iterator

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sixfold.batch import Batch, collate
from sixfold.engine.engine import Engine
from sixfold.errors import UserError
from sixfold.kernels.norms import fuse_norms
from sixfold.model.attention import NAME, register
from sixfold.model.causal_lm import CausalLM
from sixfold.model.scratch import character_tokenizer
from sixfold.model.split_check import check_split
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.base import groups_in_order
from sixfold.rollout.driver import Driver
from sixfold.rollout.engine_generator import EngineGenerator
from sixfold.rollout.player import Limits, Player
from sixfold.trainer.logprobs import Scoring, score_batch
from sixfold.types import Reward, SamplingParams, Task

VOCABULARY = 61
ALPHABET = "".join(chr(ord("0") + i) for i in range(VOCABULARY - 6))
CLOSE = 1e-4
"""Nats between two ways to compute a log-prob in float32."""

FAILURES = (
    TypeError,
    AttributeError,
    RuntimeError,
    ValueError,
    LookupError,
    AssertionError,
    ArithmeticError,
    ImportError,
    OSError,
    StrictDataclassError,
)

SIZES: dict[str, object] = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=128, bos_token_id=2, eos_token_id=1, pad_token_id=0,
    moe_intermediate_size=32, num_experts=4, num_local_experts=4,
    num_experts_per_tok=2, n_routed_experts=4, n_shared_experts=1,
    shared_expert_intermediate_size=32, first_k_dense_replace=1, n_group=1,
    topk_group=1, sliding_window=8,
    # Latent attention (DeepSeek): values are smaller than keys.
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    # Linear attention and state spaces.
    linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
    linear_num_value_heads=2, mamba_d_state=8, mamba_n_heads=4,
    mamba_d_head=32, mamba_n_groups=1, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8,
    n_groups=1,
)  # fmt: skip
GPT: dict[str, object] = dict(
    vocab_size=VOCABULARY,
    n_embd=64,
    n_layer=2,
    n_head=4,
    n_positions=128,
    eos_token_id=1,
    bos_token_id=2,
)
OLD: dict[str, object] = dict(
    GPT, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128
)
LONGROPE = dict(
    rope_type="longrope",
    short_factor=[1.0] * 8,
    long_factor=[4.0] * 8,
    original_max_position_embeddings=32,
    rope_theta=10000.0,
)
EXTRAS: dict[str, dict[str, object]] = {
    "gpt2": GPT,
    "gptj": dict(GPT, rotary_dim=4),
    "codegen": dict(GPT, rotary_dim=4),
    "gpt_bigcode": GPT,
    "openai-gpt": GPT,
    "bloom": OLD,
    "mpt": dict(vocab_size=VOCABULARY, d_model=64, n_layers=2, n_heads=4),
    "gemma2": dict(
        attn_logit_softcapping=3.0, final_logit_softcapping=5.0, query_pre_attn_scalar=16
    ),
    "gemma3_text": dict(query_pre_attn_scalar=16),
    "phimoe": dict(sliding_window=32),
    "olmoe": dict(sliding_window=None),  # its own code ignores a window
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "phi3": dict(
        rope_parameters=LONGROPE, original_max_position_embeddings=32, sliding_window=None
    ),
}


def types(asked: list[str]) -> Iterator[str]:
    """Model types that have a causal LM for text."""
    for name in asked or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        if name in CONFIG_MAPPING:
            yield name


def made(name: str) -> PreTrainedModel:
    """A tiny model with weights far from flat."""
    sizes = EXTRAS[name] if EXTRAS.get(name) in (GPT, OLD) else {**SIZES, **EXTRAS.get(name, {})}
    if (
        "kv_lora_rank" in AutoConfig.for_model(name).to_dict()
    ):  # latent attention derives the size of its heads
        sizes = {**sizes, "num_key_value_heads": 4}
        sizes.pop("head_dim")
    config = AutoConfig.for_model(name, **sizes)
    with torch.device("meta"):
        numbers = sum(
            p.numel() for p in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters()
        )
    if numbers > 20_000_000:
        raise ValueError(f"its tiny configuration has {numbers} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(0, 0.12)
            elif name.endswith(
                "sinks"
            ):  # far from 0, so that one that is dropped or added twice shows
                p.normal_(0, 1.5)
    return model.eval()


def own_log_probs(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """[B, T], one text at a time through the model's own forward."""
    out = torch.zeros(batch.tokens.shape)
    for b, n in enumerate(batch.lengths.tolist()):
        logp = model(batch.tokens[b : b + 1, :n], use_cache=False).logits[0].float().log_softmax(-1)
        out[b, 1:n] = logp[:-1].gather(-1, batch.tokens[b, 1:n, None])[:, 0]
    return out * batch.mask


@torch.no_grad()
def verdict(name: str) -> tuple[str, str]:
    """(works, refused, wrong, not tried; details)."""
    try:
        plain = made(name)
    except FAILURES as error:
        return (
            "not tried",
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        )
    model = copy.deepcopy(plain)
    plain.set_attn_implementation("eager")
    try:
        model.set_attn_implementation(NAME)
        fuse_norms(model)
        context = check_split(model)
    except UserError as error:
        return "refused", str(error)
    tokenizer = character_tokenizer(ALPHABET)
    engine = Engine(CausalLM(model), kv_tokens=1024, block_size=8, max_running=6)
    params = SamplingParams(max_tokens=10, temperature=1.0, stop_token_ids=(1,))
    tasks = [
        Task(f"t{i}", ALPHABET[i : i + n])
        for i, n in enumerate((1, 9, min(30, context.tokens - 16)))
    ]
    renderer = Renderer(tokenizer)
    player = Player(EngineGenerator(engine, renderer), renderer, Limits(context.tokens))
    groups = asyncio.run(groups_in_order(Driver(player, params, 3).play(tasks, 0), tasks))
    for group in groups:
        for t in group.trajectories:
            t.reward = Reward(0.0)
    batch = collate(groups)
    truth = own_log_probs(plain, batch)
    sampled = float((batch.old_logp - truth).abs().max())
    scored = float(
        (score_batch(model, batch, Scoring(temperature=1.0), 96, True) - truth).abs().max()
    )
    found = (
        f"sampler {sampled:.0e}, trainer {scored:.0e} nats from"
        f" transformers{'; ' + context.note if context.note else ''}"
    )
    return ("works" if max(sampled, scored) <= CLOSE else "wrong"), found


def main() -> int:
    register()
    torch.set_num_threads(1)
    counts: dict[str, int] = {}
    for name in types(sys.argv[1:]):
        try:
            word, details = verdict(name)
        except (
            FAILURES
        ) as error:  # what is looked for: anything that a user would see as a traceback
            word, details = (
                "traceback",
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            )
        counts[word] = counts.get(word, 0) + 1
        print(f"{name:28}{word:12}{details}", flush=True)
    print(counts)
    return 1 if counts.get("wrong") or counts.get("traceback") else 0


if __name__ == "__main__":
    sys.exit(main())
