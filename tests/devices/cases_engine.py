"""How often the host waits for the device while the engine samples and while weights change: a
fixed number of times, whatever the number of rows, tokens, layers or tensors."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from phantom import count_synchronisations, register

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.conftest import VOCABULARY, make_tiny
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.engine.speculative import Speculation
from sixfold.model.attention import NAME
from sixfold.model.causal_lm import CausalLM
from sixfold.sync.sync import CopySync
from sixfold.types import SamplingParams

DEVICE = register()


def model_on(device: torch.device | str, layers: int = 2, name: str = "qwen3") -> PreTrainedModel:
    model = make_tiny(name, num_hidden_layers=layers)
    model.set_attn_implementation(NAME)
    return model.to(device).requires_grad_(False)


def add(engine: Engine, prompts: int, samples: int, tokens: int, **params: Any) -> None:
    for i in range(prompts):
        prompt = [(3 * i + j) % VOCABULARY for j in range(5 + i % 3)]
        engine.add(
            str(i),
            prompt,
            SamplingParams(max_tokens=tokens, seed=i, **params),
            list(range(samples)),
        )


def drawn(engine: Engine) -> dict[tuple[str, int], list[int]]:
    return {(s.request.key, s.sample): s.tokens for s in engine.run()}


def waits(
    layers: int, prompts: int, samples: int, settings: dict[str, Any], params: dict[str, Any]
) -> tuple[int, int, str]:
    """Waits of the step in which samples start and of a decode step, and where they were."""
    engine = Engine(
        CausalLM(model_on(DEVICE, layers)), **{"kv_tokens": 2000, "block_size": 4, **settings}
    )
    add(engine, prompts, samples, 8, **params)
    with count_synchronisations() as start:
        engine.step()
    engine.step()
    with count_synchronisations() as decode:
        engine.step()
    return start.total, decode.total, start.table() + decode.table()


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    "plain": ({}, {}, 2, 2),
    "greedy": ({}, dict(temperature=0.0), 2, 2),
    "bfloat16": (dict(autocast=torch.bfloat16), {}, 2, 2),
    "int8 cache": (dict(kv_dtype="int8"), {}, 2, 2),
    "truncated": ({}, dict(top_p=0.9, top_k=20, min_p=0.01), 5, 5),
    "penalties": (
        {},
        dict(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1),
        2,
        2,
    ),
    "top_logprobs": ({}, dict(top_logprobs=3), 4, 4),
    "n-gram": (dict(speculation=Speculation(k=2, shortest=1)), {}, 2, 3),
}
"""Name -> the engine's settings, the request's, and the most waits of a start and of a decode step.
"""


@pytest.mark.parametrize("name", CASES)
def test_host_waits_of_an_engine_step_do_not_depend_on_the_number_of_rows(name: str) -> None:
    settings, params, most_at_start, most_at_decode = CASES[name]
    small = waits(1, 1, 2, settings, params)
    large = waits(4, 5, 3, settings, params)
    assert large[:2] == small[:2], large[2]
    assert large[0] <= most_at_start and large[1] <= most_at_decode, large[2]


SWAP = dict(preemption="swap", kv_tokens=72)
SCHEDULES = [{}, dict(preemption="recompute", kv_tokens=72), SWAP, dict(kv_dtype="int8")]


@pytest.mark.parametrize(
    ("name", "settings"), [*(("qwen3", settings) for settings in SCHEDULES), ("gpt_oss", SWAP)]
)
def test_the_same_tokens_as_on_the_cpu(name: str, settings: dict[str, Any]) -> None:
    there, here = (
        Engine(
            CausalLM(model_on(device, name=name)),
            **{"kv_tokens": 2000, "block_size": 4, **settings},
        )
        for device in (DEVICE, "cpu")
    )
    for engine in (there, here):
        add(engine, 3, 3, 12)
    assert drawn(there) == drawn(here)
    assert there.stats.preemptions > 0 or "preemption" not in settings


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_host_waits_of_a_swap_do_not_depend_on_the_number_of_layers(kv_dtype: str) -> None:
    found = []
    for layers in (1, 4):
        engine = Engine(
            CausalLM(model_on(DEVICE, layers)),
            kv_tokens=72,
            block_size=4,
            preemption="swap",
            kv_dtype=kv_dtype,
        )
        add(engine, 3, 3, 12)
        host = engine.runner.host
        out, back = host.take_out, host.bring_back
        counts: list[int] = []

        def counted(move: Callable[..., None], counts: list[int]) -> Callable[..., None]:
            def run(*args: Any) -> None:
                with count_synchronisations() as seen:
                    move(*args)
                counts.append(seen.total)

            return run

        host.take_out, host.bring_back = counted(out, counts), counted(back, counts)  # type: ignore[method-assign]
        engine.run()
        assert engine.stats.brought_back_bytes > 0
        found.append(counts)
    assert found[0] == found[1] and max(found[0]) <= (2 if kv_dtype == "int8" else 1)


@pytest.mark.parametrize("form", ["copy", "int8", "fp8"])
def test_host_waits_of_a_weight_sync_do_not_depend_on_the_number_of_tensors(form: str) -> None:
    found = []
    for layers in (1, 4):
        trainer = model_on(DEVICE, layers)
        engine = Engine(CausalLM(copy.deepcopy(trainer)), kv_tokens=64)
        sync = CopySync(trainer, engine, 1, form)
        for p in trainer.parameters():
            p.mul_(1.25)
        with count_synchronisations() as seen:
            sync.sync(1)
        found.append(seen.total)
        held = engine.runner.model.module.get_parameter("lm_head.weight")
        assert (
            torch.equal(held.cpu(), trainer.get_parameter("lm_head.weight").cpu())
            and engine.version == 1
        )
    assert found[0] == found[1] <= 2


def test_weights_from_host_memory_go_over_once() -> None:
    """One copy of each tensor; the old ones, kept in case that writing fails, come back in one."""
    model = model_on(DEVICE)
    engine = Engine(CausalLM(model), kv_tokens=64)
    new = {name: p.cpu() * 1.5 for name, p in model.named_parameters()}
    with count_synchronisations() as seen:
        engine.load_weights(new, 1)
    assert sum(seen.writes.values()) == len(new), seen.table()
    assert sum(seen.reads.values()) <= 2, seen.table()
    assert all(torch.equal(p.cpu(), new[name]) for name, p in model.named_parameters())


def test_a_failed_load_puts_the_old_weights_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from sixfold.engine import weights

    model = model_on(DEVICE)
    engine, written = Engine(CausalLM(model), kv_tokens=64), list[int]()
    old = {name: p.cpu().clone() for name, p in model.named_parameters()}
    whole = weights._copy

    def failing(target: torch.Tensor, source: torch.Tensor) -> None:
        written.append(1)
        if len(written) == 7:
            raise RuntimeError("out of memory")
        whole(target, source)

    monkeypatch.setattr(weights, "_copy", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.load_weights({name: p * 2 for name, p in old.items()}, 1)
    assert (
        all(torch.equal(p.cpu(), old[name]) for name, p in model.named_parameters())
        and engine.version == 0
    )
