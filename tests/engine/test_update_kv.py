"""Keys and values of running sequences after new weights: computed again, or kept."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.engine.drain import drain
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.engine.scheduler import ScheduledStep
from sixfold.engine.sequence import Sequence
from sixfold.engine.speculative import Speculation
from sixfold.model.causal_lm import CausalLM
from sixfold.types import SamplingParams

PROMPT = [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
CASES: dict[str, dict[str, object]] = {
    "plain": {},
    "pieces": {"prefill_tokens": 3, "chunked_prefill": True},
    "one at a time": {"max_running": 1},
    "hash": {"prefix_cache": "hash", "max_running": 2},
    "no cache": {"prefix_cache": "none"},
    "preempted": {"preemption": "recompute", "kv_tokens": 60},
    "preempting, one at a time": {"preemption": "recompute", "max_running": 1},
    "swapped": {"preemption": "swap", "kv_tokens": 60},
    "speculation": {"speculation": Speculation(2, None, 1, 3)},
}


@pytest.fixture(scope="module")
def weights(plain: Callable[[str], PreTrainedModel]) -> list[dict[str, Tensor]]:
    """Weights of versions 0 to 3, far from each other."""
    torch.manual_seed(5)
    first = {name: p.detach().clone() for name, p in plain("qwen3").named_parameters()}
    return [first] + [
        {name: p + 0.05 * torch.randn_like(p) for name, p in first.items()} for _ in range(3)
    ]


def engine_of(tiny: Callable[[str], PreTrainedModel], update_kv: str, **more: object) -> Engine:
    model = copy.deepcopy(tiny("qwen3")).requires_grad_(False)
    sizes = {"kv_tokens": 400, "block_size": 4, "update_kv": update_kv, **more}
    return Engine(CausalLM(model), **sizes)  # type: ignore[arg-type]


def off(oracle: PreTrainedModel, weights: list[dict[str, Tensor]], s: Sequence) -> list[float]:
    """Distance of the log-prob of each token from a forward pass of the whole text so far, with the
    weights that its version names.
    """
    logps = {}
    for version in {*s.version}:
        oracle.load_state_dict(weights[version], strict=False)
        with torch.no_grad():
            logps[version] = oracle(torch.tensor([s.tokens])).logits[0].log_softmax(-1)
    start = len(s.request.prompt)
    found = [
        abs(float(logps[version][start + i - 1, s.tokens[start + i]]) - s.logp[i])
        for i, version in enumerate(s.version)
    ]
    return found


@pytest.mark.mostly_nightly(4)
@pytest.mark.parametrize("case", CASES)
def test_recomputed_sequences_have_no_trace_of_older_weights(
    case: str,
    tiny: Callable[[str], PreTrainedModel],
    plain: Callable[[str], PreTrainedModel],
    weights: list[dict[str, Tensor]],
) -> None:
    """Requests that share a prefix; weights change, and twice more while blocks are outdated."""
    oracle = copy.deepcopy(plain("qwen3"))
    worst = {}
    for update_kv in ("recomputed", "kept"):
        engine, done = engine_of(tiny, update_kv, **CASES[case]), []
        params = SamplingParams(max_tokens=14, seed=1)
        engine.add("a", PROMPT, params, [0, 1, 2])
        gone = engine.add("gone", PROMPT, SamplingParams(max_tokens=40, seed=2), [0])
        engine.add("b", [*PROMPT, 12, 13], params, [0, 1])
        while len(done) < 1 and max((len(s.logp) for s in engine.scheduler.running), default=0) < 5:
            done += engine.step()
        engine.load_weights(weights[1], 1)
        for _ in range(6):
            done += engine.step()
        engine.load_weights(weights[2], 2)
        done += engine.step()
        engine.abort(gone)  # its blocks may be the ones that others share
        engine.load_weights(weights[3], 3)
        done += drain(engine)
        assert {v for s in done for v in s.version} >= {0, 3}
        assert engine.scheduler.blocks.used == 0
        again = [engine.add(f"again-{i}", s.tokens, params, [0]) for i, s in enumerate(done)]
        later = drain(engine)  # on the blocks that the sequences left in the prefix cache
        assert len(later) == len(again)
        assert max(d for s in later for d in off(oracle, weights, s)) < 1e-5
        worst[update_kv] = max(d for s in done for d in off(oracle, weights, s))
        if update_kv == "recomputed" and case == "plain":
            assert min(s.reused for s in later) >= len(PROMPT) + 8
    assert worst["recomputed"] < 1e-5 < 1e-2 < worst["kept"]


def test_a_prompt_on_blocks_that_another_sequence_sampled_is_computed_by_itself(
    tiny: Callable[[str], PreTrainedModel],
    plain: Callable[[str], PreTrainedModel],
    weights: list[dict[str, Tensor]],
) -> None:
    """A preempted sequence leaves its sampled tokens in the prefix cache, and another begins with
    them. A step computes sampled tokens after all prompts, so these blocks cannot be shared then.
    """
    engine = engine_of(tiny, "recomputed", preemption="recompute")
    engine.add("a", PROMPT, SamplingParams(max_tokens=20, seed=1), [0])
    for _ in range(12):
        engine.step()
    (first,) = engine.scheduler.running
    engine.scheduler._make_room(ScheduledStep(0))
    engine.step()
    engine.add("b", first.tokens[:22], SamplingParams(max_tokens=8, seed=2), [0])
    engine.step()
    assert [s.request.key for s in engine.scheduler.running] == ["a", "b"]
    assert engine.scheduler.running[1].reused >= 20
    engine.load_weights(weights[1], 1)
    oracle = copy.deepcopy(plain("qwen3"))
    assert max(d for s in drain(engine) for d in off(oracle, weights, s)) < 1e-5


def test_samples_that_start_later_have_logits_of_the_new_weights(
    tiny: Callable[[str], PreTrainedModel],
    plain: Callable[[str], PreTrainedModel],
    weights: list[dict[str, Tensor]],
) -> None:
    """Two requests with one prompt of whole blocks wait, so one finds all blocks computed again."""
    engine = engine_of(tiny, "recomputed", max_running=2)
    engine.add("a", PROMPT[:8], SamplingParams(max_tokens=6, seed=1), [0, 1, 2])
    engine.step()
    engine.add("b", PROMPT[:8], SamplingParams(max_tokens=6, seed=2), [0, 1], priority=1)
    engine.end(engine.scheduler.running[0], "stop")
    engine.step()
    assert [t.ready for t in engine.scheduler.waiting] == [True, True]
    engine.load_weights(weights[1], 1)
    done, oracle = drain(engine), copy.deepcopy(plain("qwen3"))
    assert sorted(s.version[0] for s in done) == [0, 0, 1, 1]
    assert max(d for s in done for d in off(oracle, weights, s)) < 1e-5


def test_bits_of_recomputed_sequences_do_not_depend_on_the_pieces(
    tiny: Callable[[str], PreTrainedModel], weights: list[dict[str, Tensor]]
) -> None:
    """The size of the pieces does not change a bit, nor do weights that sample no token."""
    results = []
    for tokens_per_step in (3, 64):
        engine = engine_of(tiny, "recomputed", prefill_tokens=tokens_per_step, chunked_prefill=True)
        params = SamplingParams(max_tokens=12, seed=3)
        engine.add("a", PROMPT, params, [0, 1], due={0: [0] * 6 + [2] * 6, 1: [0] * 4 + [2] * 8})
        done = []
        for version in (1, 2):
            # Held until new weights: these are loaded once nothing moves.
            moved = -1
            while moved != (moved := engine.stats.decoded_tokens + engine.stats.recomputed_tokens):
                for _ in range(12):
                    done += engine.step()
            engine.load_weights(weights[version], version)
        done += drain(engine)
        results.append(sorted((s.sample, s.tokens, s.logp, s.version) for s in done))
    assert results[0] == results[1]
    assert results[0][0][3] == [0] * 6 + [2] * 6
