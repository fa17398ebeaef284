"""Stop strings: every engine gives the completion without them, cut at the token that completes the
first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.rollouts import EngineRollout

from sixfold.engine.engine import Engine
from sixfold.engine.speculative import Speculation
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import Policy
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.generator import Sampled
from sixfold.rollout.stop_watch import cut_sampled
from sixfold.types import SamplingParams, Task, Trajectory

TASKS = [Task(f"t{i}", f"{i}+{'7' * i}=") for i in range(6)]
LONGEST = 10
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {}, "two at a time": {"max_running": 2},
    "preempted": {"kv_tokens": 96, "block_size": 4, "preemption": "recompute"}, "guesses": {},
}  # fmt: skip


def sample(policy: Policy, stops: Sequence[str], **sizes: Any) -> dict[tuple[str, int], Trajectory]:
    engine = Engine(CausalLM(policy.model), **{"kv_tokens": 2000, **sizes})
    params = SamplingParams(max_tokens=LONGEST, stop_token_ids=policy.stop_token_ids)
    rollout = EngineRollout(
        engine, Renderer(policy.tokenizer, policy.stop_token_ids), params, 4, stops=stops
    )
    found = {
        (t.task_id, t.sample): t for g in rollout.generate(TASKS, seed=1) for t in g.trajectories
    }
    assert engine.scheduler.blocks.used == 0
    assert rollout.stats()["rollout/tokens"] == sum(t.sampled_length for t in found.values())
    return found


def cut(free: Trajectory, renderer: Renderer, stops: Sequence[str]) -> tuple[list[int], str, str]:
    """Slow method: the shortest prefix whose text contains a stop string."""
    completion = free.tokens[free.prompt_length :]
    for length in range(1, len(completion) + 1):
        text = renderer.decode(completion[:length])
        if at := [text.index(stop) for stop in stops if stop in text]:
            return completion[:length], text[: min(at)], "stop"
    return completion, free.text, free.finish_reason


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("engine", ENGINES)
def test_completions_are_cut_and_otherwise_the_same(policy: Policy, engine: str) -> None:
    free = sample(policy, ())
    renderer = Renderer(policy.tokenizer, policy.stop_token_ids)
    stops = [t.text[3:5] for t in list(free.values())[:6]] + [next(iter(free.values())).text[-1]]
    guesses = (
        {"speculation": Speculation(k=3, draft=CausalLM(policy.model))}
        if engine == "guesses"
        else {}
    )
    stopped = sample(policy, stops, **ENGINES[engine], **guesses)
    expected = {key: cut(t, renderer, stops) for key, t in free.items()}
    assert sum(len(tokens) < LONGEST for tokens, _, _ in expected.values()) > 6
    for key, (tokens, text, reason) in expected.items():
        t, whole = stopped[key], free[key]
        assert (t.tokens[t.prompt_length :], t.text, t.finish_reason) == (tokens, text, reason)
        n = len(t.tokens)
        assert (t.mask, t.version) == (whole.mask[:n], whole.version[:n])
        assert t.logp == pytest.approx(whole.logp[:n], abs=1e-5)


def test_stop_tokens_and_stop_strings_in_one_step(policy: Policy) -> None:
    """A stop string that the last token completes counts, even if a stop token or a limit ends the
    completion there.
    """
    whole = sample(policy, ())["t5", 0]
    assert whole.finish_reason == "length" and len(whole.text) > 2
    t = sample(policy, [whole.text[-2:]])["t5", 0]
    assert t.tokens == whole.tokens
    assert (t.finish_reason, t.text) == ("stop", whole.text[: whole.text.index(whole.text[-2:])])


def test_a_finished_completion_is_cut_by_the_same_rule(policy: Policy) -> None:
    renderer = Renderer(policy.tokenizer, policy.stop_token_ids)
    tokens = renderer.plain("1+2=3;q: 4")
    n = len(tokens)
    logp = [-float(i) for i in range(n)]
    whole = Sampled(tokens, logp, list(range(n)), "length", 0, 0.0)
    cut = cut_sampled(whole, renderer, ["q:", ";q"])
    assert (cut.text, cut.finish_reason) == ("1+2=3", "stop")
    assert (cut.tokens, cut.logp) == (renderer.plain("1+2=3;q"), logp[:7])
    assert cut.version == list(range(7))
    assert cut_sampled(whole, renderer, []) == whole == cut_sampled(whole, renderer, ["x"])
