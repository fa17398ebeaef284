"""Adapters by request: each completion is what PEFT's own model gives, in one batch with others and
with none, and neither the company nor the prefix cache nor the trainer's forward learns of it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tests.conftest import VOCABULARY
from tests.engine.drain import drain
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.engine.sequence import Sequence
from sixfold.engine.speculative import Speculation
from sixfold.model.causal_lm import CausalLM
from sixfold.model.lora import read_adapter
from sixfold.types import SamplingParams

ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
KINDS: dict[str, dict[str, object]] = {
    "small": dict(r=1, lora_alpha=2, target_modules=["q_proj", "v_proj"]),
    "all": dict(r=8, lora_alpha=16, target_modules=ATTENTION + MLP),
    "stable": dict(r=20, lora_alpha=12, use_rslora=True, target_modules=MLP),
}
PROMPTS = [
    [(5 * i + 3 * j + 2) % VOCABULARY for j in range(n)] for i, n in enumerate((1, 7, 16, 33, 70))
]


def make_peft(model: PreTrainedModel, seed: int, **settings: object) -> PeftModel:
    """A copy of the model under an adapter that changes much."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = get_peft_model(copy.deepcopy(model), LoraConfig(**settings))  # type: ignore[arg-type]
        with torch.no_grad():
            for name, p in made.named_parameters():
                if "lora_B" in name:
                    p.normal_(0, 0.3)
    return made.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def oracles(plain: Callable[[str], PreTrainedModel], folder: Path) -> dict[str, PeftModel]:
    """By name; the first use writes the files."""
    made = {
        name: make_peft(plain("qwen3"), seed, **settings)
        for seed, (name, settings) in enumerate(KINDS.items())
    }
    for name, model in made.items():
        model.save_pretrained(folder / name)
    return made


@pytest.fixture
def engine_with(
    tiny: Callable[[str], PreTrainedModel], oracles: dict[str, PeftModel], folder: Path
) -> Callable[..., Engine]:
    def make(*names: str, **sizes: object) -> Engine:
        engine = Engine(CausalLM(tiny("qwen3")), **{"kv_tokens": 3000, "block_size": 8, **sizes})  # type: ignore[arg-type]
        for name in names or KINDS:
            engine.load_adapter(name, read_adapter(str(folder / name), tiny("qwen3")))
        return engine

    return make


def score(model: torch.nn.Module, s: Sequence) -> list[float]:
    """Log-probs of the completion by another model's plain forward."""
    prompt = len(s.request.prompt)
    with torch.no_grad():
        logp = (
            model(input_ids=torch.tensor([s.tokens]), use_cache=False)
            .logits[0]
            .float()
            .log_softmax(-1)
        )
    return logp[prompt - 1 : -1].gather(-1, torch.tensor(s.tokens[prompt:])[:, None])[:, 0].tolist()


Drawn = dict[tuple[str, int], tuple[list[int], list[float]]]


def draw(engine: Engine, jobs: list[tuple[int, str | None]]) -> Drawn:
    """All in one batch: (task, sample) -> (tokens, log-probs)."""
    for i, name in jobs:
        engine.add(
            f"{i}-{name}", PROMPTS[i], SamplingParams(max_tokens=12, seed=4), [0, 1], adapter=name
        )
    return {(s.request.key, s.sample): (s.tokens, s.logp) for s in engine.run()}


JOBS: list[tuple[int, str | None]] = [
    (i, name) for i in range(len(PROMPTS)) for name in (None, *KINDS)
]


@pytest.mark.slow
def test_log_probs_are_pefts_own_and_those_of_the_merged_model(
    engine_with: Callable[..., Engine],
    oracles: dict[str, PeftModel],
    plain: Callable[[str], PreTrainedModel],
) -> None:
    """Three adapters and none in one batch."""
    engine = engine_with()
    for i, name in JOBS:
        engine.add(f"{i}", PROMPTS[i], SamplingParams(max_tokens=12, seed=4), [0], adapter=name)
    finished = engine.run()
    merged = {name: copy.deepcopy(model).merge_and_unload() for name, model in oracles.items()}
    assert len(finished) == len(JOBS) and len({tuple(s.tokens) for s in finished}) == len(JOBS)
    for s in finished:
        name = s.request.adapter and s.request.adapter.name
        theirs = [plain("qwen3")] if name is None else [oracles[name], merged[name]]
        for model in theirs:
            assert s.logp == pytest.approx(score(model, s), abs=1e-5)
        if name is not None:
            assert s.logp != pytest.approx(score(plain("qwen3"), s), abs=0.05), (
                "the adapter changes something"
            )


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["qwen3", "gpt2"])
def test_a_draft_model_guesses_without_the_adapters(
    engine_with: Callable[..., Engine],
    oracles: dict[str, PeftModel],
    plain: Callable[[str], PreTrainedModel],
    tiny: Callable[[str], PreTrainedModel],
    draft: str,
) -> None:
    """The draft is another model, to which adapters mean nothing. If the model is its own draft,
    every guess is accepted, but not under an adapter.
    """
    rates = {}
    for name in (None, *KINDS):
        engine = engine_with(speculation=Speculation(k=3, draft=CausalLM(tiny(draft))))
        for i, prompt in enumerate(PROMPTS):
            engine.add(f"{i}", prompt, SamplingParams(max_tokens=12, seed=4), [0, 1], adapter=name)
        for s in engine.run():
            assert s.logp == pytest.approx(
                score(oracles[name] if name else plain("qwen3"), s), abs=1e-5
            )
        rates[name] = engine.stats.acceptance_rate
    assert (rates[None] == 1.0) == (draft == "qwen3") and all(
        0.0 < rates[name] < 0.9 for name in KINDS
    )


def test_adapters_also_apply_after_the_fused_body_is_dropped(
    engine_with: Callable[..., Engine], oracles: dict[str, PeftModel]
) -> None:
    """A hook of somebody else's makes the module run itself."""
    engine, calls = engine_with(), list[int]()
    engine.add("t", PROMPTS[3], SamplingParams(max_tokens=10, seed=4), [0], adapter="all")
    engine.step()
    handle = engine.runner.model.module.model.norm.register_forward_hook(lambda *_: calls.append(1))
    (s,) = engine.run()
    handle.remove()
    assert len(calls) == 9 and s.logp == pytest.approx(score(oracles["all"], s), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "llama", "qwen3_moe"])
def test_other_architectures(
    name: str,
    tiny: Callable[[str], PreTrainedModel],
    plain: Callable[[str], PreTrainedModel],
    tmp_path: Path,
) -> None:
    targets = ["c_attn", "c_proj", "c_fc"] if name == "gpt2" else ATTENTION
    oracle = make_peft(
        plain(name), 3, r=4, lora_alpha=8, target_modules=targets, fan_in_fan_out=name == "gpt2"
    )
    oracle.save_pretrained(tmp_path)
    engine = Engine(CausalLM(tiny(name)), kv_tokens=500)
    engine.load_adapter("a", read_adapter(str(tmp_path), tiny(name)))
    for adapter in ("a", None):
        engine.add("t", PROMPTS[3], SamplingParams(max_tokens=10), [0, 1], adapter=adapter)
    for s in engine.run():
        assert s.logp == pytest.approx(
            score(oracle if s.request.adapter else plain(name), s), abs=1e-5
        )


SIZES: list[dict[str, object]] = [
    dict(prefix_cache="none", max_running=1),
    dict(max_running=5, prefix_cache="hash", block_size=4),
    dict(prefill_tokens=20, chunked_prefill=True),
    dict(preemption="recompute", kv_tokens=150, block_size=4),
    dict(speculation=Speculation(k=3, shortest=1), max_running=6),
]


@pytest.mark.mostly_nightly(3)
@pytest.mark.slow
@pytest.mark.parametrize("written_out", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_completion_does_not_depend_on_the_batch(
    engine_with: Callable[..., Engine],
    sizes: dict[str, object],
    written_out: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit: all together, and in another order under other sizes; whether the body is
    written out or the module's own.
    """
    if not written_out:
        monkeypatch.setattr(CausalLM, "body", lambda model, kernels: model)
    together = draw(engine_with(), JOBS)
    order = JOBS.copy()
    random.Random(str(sizes)).shuffle(order)
    engine = engine_with(**sizes)
    assert draw(engine, order) == together
    assert (engine.stats.recomputed_tokens > 0) == bool(sizes.get("preemption"))


@pytest.mark.slow
@pytest.mark.parametrize("written_out", [True, False])
def test_alone_without_other_adapters_loaded(
    engine_with: Callable[..., Engine], written_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not written_out:
        monkeypatch.setattr(CausalLM, "body", lambda model, kernels: model)
    together = draw(engine_with(), JOBS)
    for i, name in JOBS:
        engine = engine_with(*([name] if name else []))
        assert draw(engine, [(i, name)]).items() <= together.items()


def test_an_adapter_of_zeros_is_the_base_bit_for_bit(
    tiny: Callable[[str], PreTrainedModel], plain: Callable[[str], PreTrainedModel], tmp_path: Path
) -> None:
    get_peft_model(copy.deepcopy(plain("qwen3")), LoraConfig(**KINDS["all"])).save_pretrained(
        tmp_path
    )  # type: ignore[arg-type]  # B begins as zero
    engine = Engine(CausalLM(tiny("qwen3")), kv_tokens=3000)
    engine.load_adapter("zero", read_adapter(str(tmp_path), tiny("qwen3")))
    results = []
    for adapter in (None, "zero"):
        for i, prompt in enumerate(PROMPTS):
            engine.add(
                f"{i}", prompt, SamplingParams(max_tokens=12, seed=4), [0, 1], adapter=adapter
            )
        results.append({(s.request.key, s.sample): (s.tokens, s.logp) for s in engine.run()})
    assert results[0] == results[1]


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("kind", ["radix", "hash"])
def test_keys_and_values_of_another_adapter_are_never_reused(
    engine_with: Callable[..., Engine], kind: str
) -> None:
    engine = engine_with(prefix_cache=kind)
    prompt = PROMPTS[4]
    reused = []
    for name in (None, "all", "small", "all", None):
        before = engine.stats.reused_tokens
        engine.add("t", prompt, SamplingParams(max_tokens=1), [0], adapter=name)
        (s,) = drain(engine)
        fresh = engine_with(prefix_cache="none")
        fresh.add("t", prompt, SamplingParams(max_tokens=1), [0], adapter=name)
        assert (s.tokens, s.logp) == next((f.tokens, f.logp) for f in fresh.run())
        reused.append(engine.stats.reused_tokens - before)
    known = 69 if kind == "radix" else 64
    assert reused == [0, 0, 0, known, known]


@pytest.mark.parametrize("written_out", [True, False])
def test_the_trainers_forward_through_the_shared_module_meets_no_adapter(
    engine_with: Callable[..., Engine], written_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not written_out:
        monkeypatch.setattr(CausalLM, "body", lambda model, kernels: model)
    engine = engine_with()
    module = engine.runner.model.module
    tokens = torch.tensor([PROMPTS[4]])

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        module.zero_grad()
        logits = module(tokens, use_cache=False).logits
        logits.square().sum().backward()
        return logits.detach().clone(), module.model.layers[0].self_attn.q_proj.weight.grad.clone()

    before = forward()
    engine.add("t", PROMPTS[2], SamplingParams(max_tokens=9), [0, 1], adapter="all")
    for _ in range(4):
        engine.step()
    assert all(torch.equal(a, b) for a, b in zip(forward(), before, strict=True)), (
        "between two steps"
    )
    module.zero_grad()
    assert not any(m._forward_hooks for m in module.modules())
    engine.run()


def test_an_error_in_a_forward_leaves_no_hook(
    engine_with: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CausalLM, "body", lambda model, kernels: model)
    engine = engine_with()
    engine.add("t", PROMPTS[2], SamplingParams(max_tokens=9), [0], adapter="all")
    layers = engine.runner.model.module.model.layers
    hooked: list[bool] = []

    def fail(x: torch.Tensor) -> None:
        hooked.append(bool(layers[0].mlp.down_proj._forward_hooks))
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(layers[1].mlp.down_proj, "forward", fail)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert hooked == [True] and not any(
        m._forward_hooks for m in engine.runner.model.module.modules()
    )


def test_without_adapters_in_a_forward_the_model_is_called_as_ever(
    engine_with: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded ones cost nothing to requests without: no hook is ever made."""
    monkeypatch.setattr(CausalLM, "body", lambda model, kernels: model)
    engine = engine_with()
    monkeypatch.setattr(
        torch.nn.Module, "register_forward_hook", lambda *_, **__: pytest.fail("a hook")
    )
    assert len(draw(engine, [(2, None), (3, None)])) == 4


def test_names_are_checked(engine_with: Callable[..., Engine]) -> None:
    engine = engine_with()
    weights = engine.adapters.of("all")
    assert engine.adapters.names == list(KINDS)
    with pytest.raises(ValueError, match=r"no adapter 'smal' is loaded. Did you mean 'small'\?"):
        engine.add("t", [2], SamplingParams(max_tokens=1), [0], adapter="smal")
    with pytest.raises(ValueError, match="adapter 'all' is already loaded"):
        engine.load_adapter("all", weights)
    with pytest.raises(ValueError, match="name is empty"):
        engine.load_adapter("", weights)
    assert not engine.busy


def test_adapters_run_in_bfloat16(
    engine_with: Callable[..., Engine], oracles: dict[str, PeftModel]
) -> None:
    engine = engine_with(autocast=torch.bfloat16)
    engine.add("t", PROMPTS[3], SamplingParams(max_tokens=10), [0], adapter="all")
    (s,) = engine.run()
    gap = max(abs(a - b) for a, b in zip(s.logp, score(oracles["all"], s), strict=True))
    assert 1e-6 < gap < 0.3
