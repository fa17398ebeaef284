"""The written-out body is the module's own, to rounding, and stands aside for every module that it
is not.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.conftest import ARCHITECTURES, VOCABULARY, make_tiny
from torch import Tensor, nn
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.engine.kv_cache import DecodeLayout, PrefillLayout
from sixfold.engine.model_runner import ModelRunner
from sixfold.engine.speculative import Speculation
from sixfold.kernels.cpu.body_kernels import BodyKernels
from sixfold.kernels.cpu.engine_kernels import cpu_kernels, load_library
from sixfold.kernels.norms import fuse_norms
from sixfold.model.attention import NAME
from sixfold.model.base import LayerAdditions
from sixfold.model.causal_lm import CausalLM
from sixfold.model.fused_decoder import FusedDecoder
from sixfold.types import SamplingParams

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="no C compiler: every module runs as it is",
)

WRITTEN_OUT = {"qwen3", "llama"}
"""Of the architectures of all tests."""
MORE = {
    "qwen2": {},
    "mistral": dict(sliding_window=8),
    "ministral3": {},
    "seed_oss": {},
    "granite": {},
    "smollm3": {},
}


def prepared(name: str, **extra: object) -> PreTrainedModel:
    model = make_tiny(name, **{**MORE.get(name, {}), **extra})
    model.set_attn_implementation(NAME)
    fuse_norms(model)
    return model


@pytest.fixture
def llama() -> PreTrainedModel:
    return prepared("llama")


def written_out(model: PreTrainedModel) -> FusedDecoder | None:
    found = CausalLM(model).body(load_library if cpu_kernels() else None)
    return found if isinstance(found, FusedDecoder) else None


def body(model: nn.Module) -> FusedDecoder:
    found = written_out(model)  # type: ignore[arg-type]
    assert found is not None
    return found


class Spy:
    """The hidden states of a whole engine run by two bodies, forward by forward, prefill and
    decode, on one cache each.
    """

    def __init__(self, model: PreTrainedModel, ours: FusedDecoder | None) -> None:
        self.engine = Engine(
            CausalLM(model), kv_tokens=800, block_size=8, chunked_prefill=True, prefill_tokens=40
        )
        self.engine.runner._body = self  # type: ignore[assignment]
        self.body = ours or CausalLM(model)
        self.states: list[Tensor] = []

    def hidden(
        self, tokens: Tensor, positions: Tensor, layout: object, additions: LayerAdditions | None
    ) -> Tensor:
        self.states.append(self.body.ready().hidden(tokens, positions, layout, additions))  # type: ignore[arg-type]
        return self.states[-1]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.body.ready().logits(hidden)

    steady = False  # forwards of the same shapes for both

    def ready(self) -> Spy:
        return self

    def refresh(self) -> None:
        self.body.refresh()

    def run(self, clear: bool = True) -> list[Tensor]:
        for i, length in enumerate((1, 8, 70, 17)):
            self.engine.add(
                str(i),
                [(3 * i + 7 * j) % VOCABULARY for j in range(length)],
                SamplingParams(max_tokens=6, seed=i),
                [0, 1],
            )
        if clear:
            self.engine.run()
        while self.engine.busy:
            self.engine.step()
        return self.states


def assert_same_states(model: PreTrainedModel, ours: FusedDecoder) -> None:
    pairs = list(zip(Spy(model, ours).run(), Spy(model, None).run(), strict=True))
    assert len(pairs) > 8
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def uses_the_module(
    model: PreTrainedModel, ours: FusedDecoder, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Whether a forward goes through the module itself."""
    calls: list[int] = []
    theirs, spy = CausalLM.hidden, Spy(model, ours)
    monkeypatch.setattr(CausalLM, "hidden", lambda *args: calls.append(1) or theirs(*args))
    spy.run()
    monkeypatch.undo()
    return bool(calls)


# --- which modules
# --------------------------------------------------------------------------------------------------


@pytest.mark.mostly_slow(4)
@pytest.mark.parametrize("name", sorted({*ARCHITECTURES, *MORE}))
def test_supported_architectures_are_fused(name: str) -> None:
    model = prepared(name)
    ours = written_out(model)
    assert (ours is not None) == (name in WRITTEN_OUT | set(MORE))
    if ours is not None:
        assert_same_states(model, ours)


VARIANTS: dict[str, tuple[str, dict[str, object], bool]] = {
    "tied embeddings": ("qwen3", dict(tie_word_embeddings=True), True),
    "biases of attention": ("llama", dict(attention_bias=True), True),
    "biases of the MLP": ("llama", dict(mlp_bias=True), True),
    "a sliding window in the later layers": ("qwen2",
    dict(use_sliding_window=True, sliding_window=8, max_window_layers=1), True),
    "one key head": ("qwen3", dict(num_key_value_heads=1), True),
    "narrow heads": ("llama", dict(head_dim=10), True),
    "heads wider than hidden": ("qwen3", dict(head_dim=64), True),
    "many layers": ("llama", dict(num_hidden_layers=40), True),
    "a long context": ("llama", dict(max_position_embeddings=1 << 20), True),
    "linear RoPE": ("llama",
    dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4)), True),
    "YaRN": ("llama",
    dict(rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=1e4,
    original_max_position_embeddings=64)), True),
    "dynamic RoPE": ("llama",
    dict(rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=1e4)), False),
    "LongRoPE": (
        "llama",
        dict(
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=1e4,
                short_factor=[1.0] * 8,
                long_factor=[2.0] * 8,
                original_max_position_embeddings=64,
            )
        ),
        False,
    ),
    "another activation": ("llama", dict(hidden_act="gelu"), False),
    "scaled embeddings": ("granite", dict(embedding_multiplier=12.0), False),
    "scaled residuals": ("granite", dict(residual_multiplier=0.22), False),
    "scaled scores": ("granite", dict(attention_multiplier=0.5), True),
    "layers without RoPE": ("smollm3", dict(num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0]),
    False),
    "queries that grow with the position": (
        "ministral3",
        dict(
            rope_parameters=dict(
                rope_type="yarn", factor=4.0, rope_theta=1e4, original_max_position_embeddings=64,
                llama_4_scaling_beta=0.1,
                beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
            )
        ),
        False,
    ),
}  # fmt: skip


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_is_fused_or_left_unchanged(variant: str) -> None:
    name, extra, expected = VARIANTS[variant]
    model = prepared(name, **extra)
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            if "bias" in parameter_name:
                p.uniform_(-1, 1)
    ours = written_out(model)
    assert (ours is not None) == expected
    if ours is not None:
        assert_same_states(model, ours)


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize(
    ("name", "extra"),
    [("llama", dict(hidden_act="gelu")), ("granite", dict(residual_multiplier=0.22))],
)
def test_zero_initialised_projections_hide_no_difference(
    name: str, extra: dict[str, object]
) -> None:
    """All layers add nothing yet, so the module and a Llama of its weights agree; after the first
    update they would not.
    """
    model = prepared(name, **extra)
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
    assert written_out(model) is None


def test_the_comparison_leaves_weights_and_random_numbers_alone(llama: PreTrainedModel) -> None:
    before, state = copy.deepcopy(llama.state_dict()), torch.get_rng_state()
    parameters = [*llama.parameters()]
    body(llama)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p is q for p, q in zip(llama.parameters(), parameters, strict=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in llama.state_dict().items())


class Wrapped(nn.Linear):
    """As an adapter does: the weight of old, and something more."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * x.sum(-1, keepdim=True)


def wrap(model: PreTrainedModel) -> None:
    old = model.model.layers[1].self_attn.v_proj
    new = Wrapped(old.in_features, old.out_features, bias=False)
    new.weight = old.weight
    model.model.layers[1].self_attn.v_proj = new


def add_norm(model: PreTrainedModel) -> None:
    model.model.layers[0].extra_layernorm = copy.deepcopy(model.model.layers[0].input_layernorm)


def hook(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda _module, _inputs, output: output * 1.5)


def hook_before(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda _module, inputs: (inputs[0] * 0.5,)
    )


def prune(model: PreTrainedModel) -> None:
    nn.utils.parametrizations.orthogonal(model.model.layers[0].self_attn.q_proj)


CHANGES: list[Callable[[PreTrainedModel], None]] = [wrap, add_norm, hook, hook_before, prune]


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_module_runs_as_it_is(
    change: Callable[[PreTrainedModel], None],
    llama: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Changed before the engine is made: refused. Changed later: noticed at the next forward."""
    ours = body(llama)
    assert not uses_the_module(llama, ours, monkeypatch)
    plain = Spy(llama, ours).run()
    change(llama)
    assert written_out(llama) is None
    assert uses_the_module(llama, ours, monkeypatch)
    assert_same_states(llama, ours)
    assert (
        not all(torch.equal(a, b) for a, b in zip(plain, Spy(llama, ours).run(), strict=True))
        or change is add_norm
    )


def test_removing_the_hook_enables_the_fused_body_again(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, seen = body(llama), []
    handle = llama.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    assert uses_the_module(llama, ours, monkeypatch) and seen
    handle.remove()
    assert not uses_the_module(llama, ours, monkeypatch)


# --- which weights
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_weights_are_seen_at_once(name: str) -> None:
    model = prepared(name, attention_bias=True)
    ours = body(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1).add_(0.01)
    assert_same_states(model, ours)
    for parameter_name, p in list(model.named_parameters()):  # others in their place
        owner, _, leaf = parameter_name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(p.detach() * 0.9 + 0.005))
    assert_same_states(model, ours)
    model.model.layers[0].self_attn.q_proj.bias = None
    assert_same_states(model, ours)


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("way", ["run", "set_version"])
def test_uncounted_weight_writes_are_seen_after_refresh(way: str, llama: PreTrainedModel) -> None:
    """Written through `.data`, as some optimizers do: a new call of run(), or a new version."""
    spy = Spy(llama, body(llama))
    spy.run()
    version, weight = (
        llama.model.layers[0].mlp.down_proj.weight._version,
        llama.model.layers[0].mlp.down_proj.weight,
    )
    weight.data.mul_(1.5)
    assert weight._version == version, "PyTorch counts it now: refresh() can go"
    new_version = way == "set_version"
    if new_version:
        spy.engine.set_version(1)
    spy.states.clear()
    ours, theirs = spy.run(clear=not new_version), Spy(llama, None).run()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_what_was_there_before_a_write_is_not_packed_again(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[int] = []
    pack = BodyKernels.pack
    monkeypatch.setattr(BodyKernels, "pack", lambda *args: packed.append(1) or pack(*args))
    ours = body(llama)
    engine = Spy(llama, ours)
    packed.clear()
    engine.run()
    assert len(packed) == 4 * len(llama.model.layers) + 1  # once, for all steps
    engine.run(clear=False)
    assert len(packed) == 4 * len(llama.model.layers) + 1


def test_weight_copies_are_freed_with_the_cache(llama: PreTrainedModel) -> None:
    """Between two rollouts, the trainer may need the memory."""
    engine = Engine(CausalLM(llama), kv_tokens=200)
    for _ in range(2):
        engine.add("t", [2, 3, 4], SamplingParams(max_tokens=5), [0])
        engine.run()
        assert all(linear.packed is not None for linear in engine.runner._body._linears)  # type: ignore[attr-defined]
        engine.release_memory()
        assert all(linear.packed is None for linear in engine.runner._body._linears)  # type: ignore[attr-defined]


# --- in one call
# --------------------------------------------------------------------------------------------------

Drawn = list[tuple[str, int, list[int], list[float]]]


def draw(model: PreTrainedModel, length: int = 6, **sizes: object) -> Drawn:
    """Of 14 prompts with 14 samples each: enough for three threads to have a share each, and no
    whole number of tiles.
    """
    engine = Engine(
        CausalLM(model), max_running=200, **{"kv_tokens": 20_000, "block_size": 8, **sizes}
    )  # type: ignore[arg-type]
    for i in range(14):
        engine.add(
            str(i),
            [(3 * i + 7 * j) % VOCABULARY for j in range(1 + 2 * i)],
            SamplingParams(max_tokens=length + i % 3),
            list(range(14)),
        )
    return sorted((s.request.key, s.sample, s.tokens, s.logp) for s in engine.run())


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_all_layers_in_one_call_equal_single_operations_bitwise(
    name: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = prepared(name)
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            if "bias" in parameter_name or "norm" in parameter_name:
                p.uniform_(-1, 1)
    at_once = draw(model)
    for layout in (DecodeLayout, PrefillLayout):
        monkeypatch.setattr(layout, "compiled", lambda *_: None)
    assert draw(model) == at_once


@pytest.mark.slow
def test_rows_run_in_parallel_only_if_none_reads_another_rows_write(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of one sequence, as prompts, preempted sequences and guesses have them, go through
    each layer together.
    """
    seen: dict[str, set[bool]] = {}
    at: list[str] = []

    def labelled(name: str) -> Callable[..., object]:
        original = getattr(ModelRunner, name)

        def call(*args: object) -> object:
            at.append(name)
            return original(*args)

        return call

    for name in ("prefill", "decode", "replay", "decode_rows"):
        monkeypatch.setattr(ModelRunner, name, labelled(name))
    run = BodyKernels.body
    monkeypatch.setattr(
        BodyKernels,
        "body",
        lambda *args: seen.setdefault(at[-1], set()).add(args[-2][-1]) or run(*args),
    )
    plain = draw(llama, 30)
    assert draw(llama, 30, preemption="recompute", kv_tokens=1000) == plain
    assert draw(llama, 30, speculation=Speculation(k=3)) == plain
    assert seen == {"prefill": {False}, "decode": {True}, "replay": {False}, "decode_rows": {False}}


# --- the head
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("llama", {}),
        ("qwen3", dict(tie_word_embeddings=True)),
        ("granite", dict(logits_scaling=4.0)),
        ("llama", dict(vocab_size=200)),
    ],
)
def test_the_heads_product_is_the_modules(name: str, extra: dict[str, object]) -> None:
    model = prepared(name, **extra)
    ours, hidden = body(model), torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for _ in range(2):
            logits = ours.ready().logits(hidden)
            torch.testing.assert_close(logits, CausalLM(model).logits(hidden), rtol=1e-5, atol=1e-5)
            for first, last in ((0, 1), (3, 5), (20, 40)):
                assert torch.equal(ours.ready().logits(hidden[first:last]), logits[first:last])
            model.lm_head.weight.mul_(1.1)


def test_a_changed_head_runs_as_it_is(llama: PreTrainedModel) -> None:
    ours, hidden = body(llama), torch.randn(3, 64)
    handle = llama.lm_head.register_forward_hook(lambda _module, _inputs, output: output * 2)
    with torch.no_grad():
        assert ours.ready() is ours._model and not ours.ready().steady
        assert torch.equal(ours.ready().logits(hidden), 2 * (hidden @ llama.lm_head.weight.T))
        handle.remove()
        assert ours.ready() is ours and ours.steady
        llama.lm_head = nn.Linear(64, VOCABULARY)
        assert ours.ready() is ours._model
        assert torch.equal(ours.ready().logits(hidden), llama.lm_head(hidden))


@pytest.mark.slow
def test_a_change_between_two_steps_is_noticed_by_the_next(llama: PreTrainedModel) -> None:
    """By prompts, by steps that decode, by preempted sequences and by guesses that are checked."""

    def draw(written_out: bool, **sizes: object) -> dict[int, list[int]]:
        model = copy.deepcopy(llama)
        engine = Engine(CausalLM(model), **{"kv_tokens": 400, "block_size": 4, **sizes})  # type: ignore[arg-type]
        if not written_out:
            engine.runner._body = engine.runner._ready = engine.runner.model
        for i in range(4):
            engine.add(str(i), [2 + i, 3, 4] * 3, SamplingParams(max_tokens=20), [0])
        done = [s for _ in range(6) for s in engine.step()]
        model.model.layers[0].mlp.register_forward_hook(lambda _module, _inputs, output: output * 3)
        while engine.busy:
            done += engine.step()
        return {int(s.request.key): s.tokens for s in done}

    guessing = Speculation(k=3, shortest=1, longest=3)
    for sizes in (
        {},
        dict(preemption="recompute", kv_tokens=44),
        dict(chunked_prefill=True, prefill_tokens=5),
        dict(speculation=guessing),
    ):
        assert draw(True, **sizes) == draw(False, **sizes)


def test_a_head_that_is_more_than_a_product_is_the_modules(llama: PreTrainedModel) -> None:
    """The body is written out still, but rows are padded for the head's sake."""
    llama.lm_head = Wrapped(64, VOCABULARY, bias=False)
    ours, hidden = body(llama), torch.randn(3, 64)
    assert not ours.steady
    with torch.no_grad():
        assert torch.equal(ours.ready().logits(hidden), llama.lm_head(hidden))


def test_one_sequence_is_one_row(llama: PreTrainedModel) -> None:
    """If a row's bits do not depend on the number of rows, nothing is padded."""
    rows: list[int] = []
    engine = Engine(CausalLM(llama), kv_tokens=200)
    ours = engine.runner._body
    hidden = ours.hidden
    ours.hidden = lambda *args: rows.append(len(args[0])) or hidden(*args)  # type: ignore[method-assign]
    engine.add("t", [2, 3, 4], SamplingParams(max_tokens=5), [0])
    engine.run()
    assert rows == [
        16,
        1,
        1,
        1,
        1,
    ]  # before the first there is no cache that would say who reads it


# --- other weights
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["everywhere", "one norm", "the embedding"])
def test_another_dtype_is_left_to_the_module(
    where: str, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels read plain float32: of half as many bytes they would read beside them."""
    ours = body(llama)
    part = {
        "everywhere": llama,
        "one norm": llama.model.layers[1].input_layernorm,
        "the embedding": llama.model.embed_tokens,
    }[where]
    part.double() if where == "one norm" else part.bfloat16()
    if where == "everywhere":
        assert uses_the_module(llama, ours, monkeypatch)
    assert not ours._as_built() and written_out(llama) is None
    part.float()
    assert not uses_the_module(llama, ours, monkeypatch)


def test_another_device_is_left_to_the_module(llama: PreTrainedModel) -> None:
    ours = body(llama)
    llama.model.layers[1].to("meta")
    assert not ours._as_built() and written_out(llama) is None


def test_training_mode_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our attention knows no dropout, in the module either."""
    model = prepared("llama", attention_dropout=0.5).train()
    ours = body(model)
    assert not uses_the_module(model, ours, monkeypatch)
    assert_same_states(model, ours)


def test_weights_that_are_not_numbers_give_tokens_of_the_vocabulary(llama: PreTrainedModel) -> None:
    """A diverged run: the log-probs are NaN, which the trainer leaves out."""
    with torch.no_grad():
        llama.model.layers[0].mlp.down_proj.weight[3, 3] = float("nan")
    engine = Engine(CausalLM(llama), kv_tokens=200)
    engine.add("t", [2, 3, 4], SamplingParams(max_tokens=5), [0, 1])
    for s in engine.run():
        assert all(0 <= token < VOCABULARY for token in s.tokens)
        assert all(logp != logp for logp in s.logp)


def test_without_kernels_no_module_is_fused(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIXFOLD_KERNELS", "torch")
    cpu_kernels.cache_clear()
    assert written_out(llama) is None
    monkeypatch.undo()
    cpu_kernels.cache_clear()
    assert written_out(llama) is not None
