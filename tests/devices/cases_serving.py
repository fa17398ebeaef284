"""The engine and the server on a GPU: adapters, draft models, n-grams, int8 caches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fused_kernels import register_gpu
from phantom import is_phantom
from tests.conftest import make_tiny
from tests.engine.test_adapters import make_peft
from tests.server.serving import ALPHABET, TEMPLATE, running
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.engine.speculative import Speculation
from sixfold.kernels.norms import fuse_norms
from sixfold.model.attention import NAME
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import load_policy
from sixfold.model.lora import read_adapter
from sixfold.model.split_check import check_split
from sixfold.recipe.schema import ModelConfig, ScratchConfig
from sixfold.types import SamplingParams

DEVICE = register_gpu()


def model(name: str = "qwen3", device: torch.device | str = DEVICE) -> PreTrainedModel:
    made = make_tiny(name)
    made.set_attn_implementation(NAME)
    fuse_norms(made)
    return made.to(device)


def drawn(engine: Engine, adapter: str | None = None) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probs of a few prompts."""
    for task in range(2):
        params = SamplingParams(8, 1.0, seed=task)
        engine.add(
            f"t{task}",
            [5 + task, 6, 7, 8],
            params,
            [0, 1],
            **({"adapter": adapter} if adapter else {}),
        )
    return [
        (s.tokens, list(s.logp))
        for s in sorted(engine.run(), key=lambda s: (s.request.key, s.sample))
    ]


def same(
    ours: list[tuple[list[int], list[float]]], theirs: list[tuple[list[int], list[float]]]
) -> None:
    assert [t for t, _ in ours] == [t for t, _ in theirs]
    for (_, a), (_, b) in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, abs=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2", "qwen3_moe"])
def test_the_engine_draws_the_tokens_of_the_cpu(name: str) -> None:
    on_gpu, on_cpu = (model(name, device) for device in (DEVICE, "cpu"))
    check_split(on_gpu)
    same(
        drawn(Engine(CausalLM(on_gpu), kv_tokens=512)),
        drawn(Engine(CausalLM(on_cpu), kv_tokens=512)),
    )


@pytest.mark.parametrize("proposer", ["ngram", "draft"])
def test_speculation(proposer: str) -> None:
    target = model()
    guesses = Speculation() if proposer == "ngram" else Speculation(k=3, draft=CausalLM(target))
    same(
        drawn(Engine(CausalLM(target), kv_tokens=512, speculation=guesses)),
        drawn(Engine(CausalLM(target), kv_tokens=512)),
    )


def test_adapters(tmp_path: Path) -> None:
    make_peft(make_tiny("qwen3"), 1).save_pretrained(tmp_path)
    results = []
    for device in (DEVICE, "cpu"):
        base = model(device=device)
        engine = Engine(CausalLM(base), kv_tokens=512)
        engine.load_adapter("a", read_adapter(str(tmp_path), base))
        results.append(drawn(engine, "a"))
    same(*results)
    assert results[0] != drawn(Engine(CausalLM(model()), kv_tokens=512))


def test_the_server_answers_as_on_the_cpu() -> None:
    answers = []
    for device in (DEVICE.type, "cpu"):
        scratch = ScratchConfig(
            hidden_size=32,
            layers=2,
            heads=2,
            kv_heads=1,
            head_dim=16,
            intermediate_size=32,
            context=256,
            alphabet=ALPHABET,
        )
        policy = load_policy(ModelConfig(scratch=scratch), seed=3, device=device)
        policy.tokenizer.chat_template = TEMPLATE
        assert is_phantom(next(policy.model.parameters())) == (device != "cpu")
        with running(policy) as server, ThreadPoolExecutor(3) as clients:

            def ask(seed: int, server=server) -> str | None:  # type: ignore[no-untyped-def]
                said = [{"role": "user", "content": f"{seed}+1="}]
                done = server.client().chat.completions.create(
                    model="tiny", messages=said, seed=seed, max_tokens=8, logprobs=True, top_p=0.9
                )
                assert done.choices[0].logprobs.content
                return done.choices[0].message.content

            answers.append(list(clients.map(ask, range(3))))
    assert answers[0] == answers[1]
