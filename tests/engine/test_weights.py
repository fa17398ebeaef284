"""Weights that change while sequences are in flight: in place, whole or not at all, every token
stamped with the weights that sampled it, and no key or value of older weights found by a newer
request."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import VOCABULARY, make_tiny
from tests.engine.drain import drain
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from sixfold.engine import weights
from sixfold.engine.engine import Engine
from sixfold.engine.sequence import Request, Sequence
from sixfold.engine.speculative import Speculation
from sixfold.engine.weights import first_not_finite
from sixfold.model.causal_lm import CausalLM
from sixfold.types import SamplingParams

Named = dict[str, Tensor]
VERSIONS = 4


@pytest.fixture(scope="module")
def base(tiny: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    return tiny("qwen3")


@pytest.fixture
def model(base: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(base).requires_grad_(False)


@pytest.fixture(scope="module")
def trained(base: PreTrainedModel) -> list[Named]:
    """Weights by version: version 0 is the model as it is, the others are far from it and from each
    other.
    """
    torch.manual_seed(5)
    first = {name: p.detach().clone() for name, p in base.named_parameters()}
    return [first] + [
        {name: p + 0.05 * torch.randn_like(p) for name, p in first.items()}
        for _ in range(1, VERSIONS)
    ]


def engine_of(model: PreTrainedModel, **sizes: object) -> Engine:
    return Engine(CausalLM(model), **{"kv_tokens": 600, "block_size": 8, **sizes})  # type: ignore[arg-type]


def held(model: torch.nn.Module) -> Named:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a: Named, b: Named) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def drawn(sequence: Sequence) -> tuple[list[int], list[float]]:
    return sequence.tokens[len(sequence.request.prompt) :], sequence.logp


class TestInFlight:
    def test_each_token_is_of_the_weights_it_names_over_the_past_that_was_computed_then(
        self, model: PreTrainedModel, trained: list[Named], plain: Callable[[str], PreTrainedModel]
    ) -> None:
        """Against transformers' own cache, fed token by token with the weights exchanged at the
        same places.
        """
        engine, done = engine_of(model), []
        engine.add("t", [2, 3, 4, 5, 6], SamplingParams(max_tokens=12, seed=1), [0, 1])
        for step in range(13):
            if step in (4, 9):
                engine.load_weights(trained[1 if step == 4 else 2], 1 if step == 4 else 2)
            done += engine.step()
        assert len(done) == 2 and not engine.busy
        oracle = copy.deepcopy(plain("qwen3"))
        for s in done:
            assert s.version == [0] * 4 + [1] * 5 + [2] * 3
            cache, expected, text = DynamicCache(), [], s.tokens
            for i, version in enumerate(s.version):
                oracle.load_state_dict(trained[version], strict=False)
                new = text[:5] if i == 0 else text[4 + i : 5 + i]
                with torch.no_grad():
                    logits = oracle(
                        torch.tensor([new]), past_key_values=cache, use_cache=True
                    ).logits[0, -1]
                expected.append(float(logits.log_softmax(-1)[text[5 + i]]))
            assert s.logp == pytest.approx(expected, abs=1e-5)

    def test_samples_that_start_on_logits_of_older_weights_say_so(
        self, model: PreTrainedModel, trained: list[Named]
    ) -> None:
        """One place for two samples: the second starts after the change, from the prompt that the
        first shares with it.
        """
        engine = engine_of(model, max_running=1)
        request = engine.add("t", [2, 3, 4], SamplingParams(max_tokens=3, seed=2), [0, 1])
        engine.step()
        engine.load_weights(trained[1], 1)
        first, second = engine.run()
        assert (first.version, second.version) == ([0, 1, 1], [0, 1, 1])
        alone = engine_of(
            copy.deepcopy(model), max_running=1
        )  # holds version 1 now, of which it knows nothing
        alone.add("t", request.prompt, request.params, [1])
        assert drawn(alone.run()[0])[1][0] != second.logp[0], (
            "the first token was drawn from the old weights' logits"
        )

    @pytest.mark.parametrize("kind", ["radix", "hash"])
    def test_blocks_of_older_weights_are_never_reused(
        self, model: PreTrainedModel, trained: list[Named], kind: str
    ) -> None:
        """Neither what ran when they changed, nor what started later on its prompt."""
        engine = engine_of(model, max_running=1, prefix_cache=kind)
        prompt = [(7 * i + 2) % VOCABULARY for i in range(30)]
        engine.add("t", prompt, SamplingParams(max_tokens=12), [0, 1])
        for _ in range(3):
            engine.step()
        engine.load_weights(trained[1], 1)
        old = drain(engine)
        again = [
            engine.add(f"again-{i}", s.tokens, SamplingParams(max_tokens=3), [0])
            for i, s in enumerate(old)
        ]
        assert {len(set(s.version)) for s in old} == {2}
        found = drain(engine)
        # The second sample had the first one's prompt; and now the second text begins like the
        # first.
        assert engine.stats.reused_tokens == len(prompt) + (30 if kind == "radix" else 24)
        fresh = engine_of(model, prefix_cache="none")
        for request in again:
            fresh.add(request.key, request.prompt, request.params, [0])
        assert [drawn(s) for s in found] == [drawn(s) for s in fresh.run()]

    def test_stale_blocks_swapped_out_later_are_not_reused(
        self, model: PreTrainedModel, trained: list[Named]
    ) -> None:
        engine = engine_of(model, preemption="swap", kv_tokens=64, block_size=4)
        prompt = [(7 * i + 2) % VOCABULARY for i in range(24)]
        engine.add("first", [5, 6, 7], SamplingParams(max_tokens=40), [0], priority=1)
        swapped = engine.add("swapped", prompt, SamplingParams(max_tokens=30), [0])
        while not any(s.request is swapped for s in engine.scheduler.running):
            engine.step()
        engine.load_weights(trained[1], 1)
        drain(engine)
        assert engine.stats.preemptions == 1 and engine.stats.brought_back_bytes > 0
        results = []
        for each in (engine, engine_of(model, prefix_cache="none")):
            each.add("new", prompt, SamplingParams(max_tokens=3), [0])
            results.append(drawn(drain(each)[0]))
        assert results[0] == results[1]

    def test_waiting_prompts_are_computed_with_the_new_weights_only(
        self, model: PreTrainedModel, trained: list[Named]
    ) -> None:
        engine = engine_of(model, chunked_prefill=True, prefill_tokens=16)
        prompt = [(7 * i + 2) % VOCABULARY for i in range(50)]
        engine.add("t", prompt, SamplingParams(max_tokens=4), [0])
        engine.step()  # 16 of its 50 tokens
        assert engine.stats.prefill_tokens == 16
        engine.load_weights(trained[1], 1)
        (s,) = engine.run()
        fresh = engine_of(model)
        fresh.add("t", prompt, SamplingParams(max_tokens=4), [0])
        assert drawn(s) == drawn(fresh.run()[0]) and s.version == [1] * 4

    def test_buffers_keep_their_place(self, model: PreTrainedModel, trained: list[Named]) -> None:
        engine = engine_of(model)
        before = [p.data_ptr() for p in model.parameters()]
        engine.load_weights(iter(trained[1].items()), 1)
        assert [p.data_ptr() for p in model.parameters()] == before
        assert same(held(model), trained[1])


@pytest.mark.nightly
@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_sequences_started_after_an_update_have_one_version(
    data: st.DataObject, base: PreTrainedModel, trained: list[Named]
) -> None:
    """Requests that begin alike come, run, end and are aborted while weights change. Those that had
    not begun when they did must be what an engine
    that never had other weights draws: so no block of older keys and values was found in the prefix
    cache.
    """
    sizes = data.draw(
        st.sampled_from(
            [
                dict(prefix_cache="radix", max_running=3),
                dict(prefix_cache="hash", block_size=4, max_running=2),
                dict(prefix_cache="radix", chunked_prefill=True, prefill_tokens=12, max_running=4),
                dict(prefix_cache="radix", preemption="recompute", kv_tokens=90, max_running=6),
                dict(prefix_cache="radix", speculation=Speculation(k=3, shortest=1), max_running=3),
                dict(
                    prefix_cache="hash",
                    speculation=Speculation(k=2, draft=CausalLM(base)),
                    max_running=2,
                    block_size=4,
                ),
                dict(
                    prefix_cache="hash",
                    preemption="recompute",
                    kv_tokens=90,
                    chunked_prefill=True,
                    prefill_tokens=9,
                    block_size=4,
                ),
                dict(prefix_cache="radix", preemption="swap", kv_tokens=90, max_running=6),
                dict(
                    prefix_cache="hash",
                    preemption="swap",
                    kv_tokens=90,
                    chunked_prefill=True,
                    prefill_tokens=9,
                    block_size=4,
                ),
            ]
        )
    )
    model = copy.deepcopy(base).requires_grad_(False)
    engine, done, open_requests, overtaken = (
        engine_of(model, **sizes),
        list[Sequence](),
        [],
        set[Request](),
    )
    stem = [(5 * i + 2) % VOCABULARY for i in range(24)]
    for turn in range(data.draw(st.integers(8, 25))):
        what = data.draw(st.sampled_from(["add", "add", "step", "step", "step", "load", "abort"]))
        if what == "add":
            # A conversation's next turn is one of the prompts: its beginning was cached by a
            # sequence that ended.
            past = [s.tokens for s in done if len(s.tokens) < 40]
            text = [
                *data.draw(st.sampled_from([stem[: data.draw(st.integers(1, 24))], *past])),
                turn,
            ]
            params = SamplingParams(max_tokens=data.draw(st.integers(1, 9)), seed=turn)
            open_requests.append(
                engine.add(f"r{turn}", text, params, list(range(data.draw(st.integers(1, 3)))))
            )
        elif what == "load" and engine.version + 1 < VERSIONS:
            scheduler = engine.scheduler
            overtaken |= {s.request for s in scheduler.running} | {
                t.request for t in scheduler.waiting if t.sequence is not None
            }
            engine.load_weights(trained[engine.version + 1], engine.version + 1)
        elif what == "abort" and open_requests:
            engine.abort(open_requests.pop())
        elif engine.busy:
            done += engine.step()
    while engine.busy:
        done += engine.step()
    blocks = engine.scheduler.blocks
    assert (blocks.used, blocks.free + blocks.idle, engine.scheduler.reservation.reserved) == (
        0,
        blocks.count,
        0,
    )
    assert all(s.version == sorted(s.version) for s in done)
    for s in (s for s in done if s.request not in overtaken):
        assert len(set(s.version)) == 1
        model.load_state_dict(trained[s.version[0]], strict=False)
        fresh = engine_of(model, prefix_cache="none", speculation=sizes.get("speculation"))
        fresh.add(s.request.key, s.request.prompt, s.request.params, [s.sample])
        tokens, logp = drawn(fresh.run()[0])
        assert drawn(s)[0] == tokens
        # To rounding: a prompt may stand on tokens that were sampled, and so computed one by one.
        assert s.logp == pytest.approx(logp, abs=1e-5)


class TestWholeOrNotAtAll:
    @pytest.fixture
    def engine(self, model: PreTrainedModel) -> Engine:
        engine = engine_of(model)
        engine.add("t", [2, 3, 4], SamplingParams(max_tokens=9, seed=3), [0, 1, 2])
        for _ in range(4):
            engine.step()
        return engine

    @pytest.fixture
    def undisturbed(self, base: PreTrainedModel) -> list[tuple[list[int], list[float]]]:
        engine = engine_of(base)
        engine.add("t", [2, 3, 4], SamplingParams(max_tokens=9, seed=3), [0, 1, 2])
        return [drawn(s) for s in engine.run()]

    def goes_on(
        self, engine: Engine, old: Named, undisturbed: list[tuple[list[int], list[float]]]
    ) -> None:
        """Old weights, old version, and the very completions that would have come without the
        failed update.
        """
        assert same(held(engine.runner.model.module), old) and engine.version == 0
        finished = engine.run()
        assert [drawn(s) for s in finished] == undisturbed
        assert all(s.version == [0] * 9 for s in finished)

    @pytest.mark.parametrize("at", [0, 1, 11, -1])
    @pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
    def test_an_error_in_the_middle_of_the_copy_leaves_the_old_weights(
        self,
        engine: Engine,
        trained: list[Named],
        undisturbed: list[tuple[list[int], list[float]]],
        monkeypatch: pytest.MonkeyPatch,
        at: int,
        error: BaseException,
    ) -> None:
        at %= len(trained[1])
        calls, whole = [0], weights._copy

        def failing(target: Tensor, source: Tensor) -> None:
            calls[0] += 1
            if calls[0] == at + 1:
                target.view(-1)[: target.numel() // 2] = 7.0  # half of it was written
                raise error
            whole(target, source)

        old = held(engine.runner.model.module)
        monkeypatch.setattr(weights, "_copy", failing)
        with pytest.raises(type(error)):
            engine.load_weights(trained[1], 1)
        assert calls[0] == 2 * (at + 1), "what was written, the torn tensor included, was put back"
        self.goes_on(engine, old, undisturbed)

    def test_one_wrong_bit_is_found_named_and_undone(
        self,
        engine: Engine,
        trained: list[Named],
        undisturbed: list[tuple[list[int], list[float]]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        whole, spoilt = weights._copy, list[int]()

        def spoiling(target: Tensor, source: Tensor) -> None:
            whole(target, source)
            if len(spoilt) < len(trained[1]):
                spoilt.append(1)
                if torch.equal(source, trained[1]["model.norm.weight"]):
                    target.view(torch.int32)[5] ^= 1

        old = held(engine.runner.model.module)
        monkeypatch.setattr(weights, "_copy", spoiling)
        with pytest.raises(
            RuntimeError, match=r"'model\.norm\.weight' differs from the given tensor"
        ):
            engine.load_weights(trained[1], 1)
        self.goes_on(engine, old, undisturbed)

    def test_torn_weights_compute_nothing(
        self, engine: Engine, trained: list[Named], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The copy fails, and so does putting back."""
        calls, whole = [0], weights._copy

        def failing(target: Tensor, source: Tensor) -> None:
            calls[0] += 1
            if calls[0] >= 5:
                raise RuntimeError("the device is gone")
            whole(target, source)

        monkeypatch.setattr(weights, "_copy", failing)
        with pytest.raises(RuntimeError, match="the device is gone"):
            engine.load_weights(trained[1], 1)
        with pytest.raises(RuntimeError, match="the weights are torn"):
            engine.step()

    def test_wrong_tensors_are_refused_before_the_first_is_written(
        self,
        engine: Engine,
        trained: list[Named],
        undisturbed: list[tuple[list[int], list[float]]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        good = trained[1]
        last = "model.norm.weight"
        shaped, whole_numbers, nan, huge = (
            good | {last: t}
            for t in (good[last][:-1], good[last].int(), good[last] / 0, good[last] * 0 + 3e38)
        )
        cases: list[tuple[object, str]] = [
            (
                {k: v for k, v in good.items() if k != last},
                f"1 of the model's weights are missing, first '{last}'",
            ),
            (
                good | {"model.norm.wieght": good[last]},
                r"no weight 'model.norm.wieght'. Did you mean 'model.norm.weight'\?",
            ),
            ([*good.items(), (last, good[last])], f"'{last}' is given twice"),
            (shaped, rf"'{last}' has shape \[63\], but the model's has \[64\]"),
            (whole_numbers, rf"'{last}' is torch.int32, but the model's is torch.float32"),
            (nan, f"'{last}' is not finite in torch.float32"),
            (good | {last: good[last].to("meta")}, "meta device"),
            (
                good | {last: engine.runner.model.module.model.norm.weight},
                "the model's own storage",
            ),
        ]
        old = held(engine.runner.model.module)
        with monkeypatch.context() as patch:
            patch.setattr(weights, "_copy", lambda target, source: pytest.fail("written"))
            for tensors, message in cases:
                with pytest.raises(ValueError, match=message):
                    engine.load_weights(tensors, 1)  # type: ignore[arg-type]
            for version in (0, -1):
                with pytest.raises(RuntimeError, match=f"must increase: 0 -> {version}"):
                    engine.load_weights(good, version)
        engine.weights.load(huge)  # finite in float32
        engine.weights.load(old)
        half = engine_of(copy.deepcopy(engine.runner.model.module).half())
        with pytest.raises(ValueError, match=f"'{last}' is not finite in torch.float16"):
            half.load_weights(huge, 1)
        self.goes_on(engine, old, undisturbed)

    def test_other_floating_types_are_cast(
        self, model: PreTrainedModel, trained: list[Named]
    ) -> None:
        engine = engine_of(copy.deepcopy(model).bfloat16())
        engine.load_weights(trained[1], 1)
        assert same(
            held(engine.runner.model.module), {name: t.bfloat16() for name, t in trained[1].items()}
        )


class TestTiedWeights:
    HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"

    @pytest.fixture
    def tied(self) -> PreTrainedModel:
        model = make_tiny("gemma")
        assert model.lm_head.weight is model.model.embed_tokens.weight
        return model.requires_grad_(False)

    @pytest.mark.parametrize("names", [[HEAD], [TABLE], [HEAD, TABLE]])
    def test_both_names_are_accepted(self, tied: PreTrainedModel, names: list[str]) -> None:
        others = {name: p + 0.1 for name, p in tied.named_parameters() if name != self.TABLE}
        table = tied.model.embed_tokens.weight + 0.25
        engine_of(tied).load_weights(others | {name: table for name in names}, 1)
        assert (
            torch.equal(tied.lm_head.weight, table)
            and tied.lm_head.weight is tied.model.embed_tokens.weight
        )

    def test_two_that_differ_are_refused(self, tied: PreTrainedModel) -> None:
        before = held(tied)
        changed = {name: p + 0.1 for name, p in tied.named_parameters()}
        with pytest.raises(ValueError, match="are tied in the model"):
            engine_of(tied).load_weights(changed | {self.HEAD: changed[self.TABLE] + 1}, 1)
        assert same(held(tied), before)


def test_weights_change_in_any_order_of_the_same_work(
    base: PreTrainedModel, trained: list[Named]
) -> None:
    """The same versions at the same places of a sequence give the same tokens, whatever the
    company: here alone and among others.
    """
    results = []
    for others in ([], [3, 4, 5, 6]):
        engine = engine_of(copy.deepcopy(base).requires_grad_(False))
        engine.add("t", [2, 3, 4], SamplingParams(max_tokens=10, seed=8), [0])
        rng = random.Random(0)
        for n in others:
            engine.add(
                f"other-{n}",
                [rng.randrange(VOCABULARY) for _ in range(n)],
                SamplingParams(max_tokens=15, seed=n),
                [0, 1],
            )
        finished: list[Sequence] = []
        while engine.busy:
            if engine.stats.steps == 5:
                engine.load_weights(trained[1], 1)
            finished += engine.step()
        results += [(drawn(s), s.version) for s in finished if s.request.key == "t"]
    assert len(results) == 2 and results[0] == results[1]
    assert results[0][1] == [0] * 5 + [1] * 5


def test_blocks_in_host_memory_become_stale_too(
    base: PreTrainedModel, trained: list[Named]
) -> None:
    """A sequence is swapped out under the old weights and goes on under the new ones. Its next turn
    must find nothing of the old.
    """
    model = copy.deepcopy(base).requires_grad_(False)
    engine = engine_of(model, preemption="swap", kv_tokens=96, block_size=4)
    for i in range(4):
        engine.add(f"t{i}", [i + 2] * 12, SamplingParams(max_tokens=28, seed=i), [0])
    done: list[Sequence] = []
    while not any(ticket.sequence for ticket in engine.scheduler.waiting):
        done += engine.step()
    swapped = [ticket.sequence for ticket in engine.scheduler.waiting if ticket.sequence]
    assert engine.stats.taken_out_bytes > 0
    engine.load_weights(trained[1], 1)
    while engine.busy:
        done += engine.step()
    fresh = engine_of(model, prefix_cache="none")
    for s in swapped:
        for one in (engine, fresh):
            one.add("next", [*s.tokens, 3], SamplingParams(max_tokens=8, seed=1), [0])
        (here,), (there,) = drain(engine), fresh.run()
        assert drawn(here)[1] == pytest.approx(drawn(there)[1], abs=1e-5)


def test_the_first_non_finite_tensor_is_named() -> None:
    good = {
        "weights": torch.full((3,), torch.finfo(torch.float32).max),  # their sum is infinite
        "small": torch.ones(2, dtype=torch.bfloat16),
        "empty": torch.ones(0),
        "step": torch.tensor(3.0),
        "codes": torch.tensor([1, 2]),
    }
    assert first_not_finite(good) is None and first_not_finite({}) is None
    for name in ("weights", "small", "step"):
        for bad in (float("nan"), float("inf"), float("-inf")):
            broken = good[name].clone()
            broken.view(-1)[-1] = bad
            assert first_not_finite(good | {name: broken}) == name
