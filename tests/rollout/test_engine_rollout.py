"""Tasks in, groups out: streams, order, rendering of text, and metrics."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tests.rollouts import EngineRollout

from sixfold.engine.engine import Engine
from sixfold.engine.speculative import Speculation
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import Policy
from sixfold.renderer.renderer import Renderer
from sixfold.types import SamplingParams, Task

TASKS = [Task(f"t{i}", f"{i}+{'7' * i}=") for i in (3, 0, 1, 12)]


def make_rollout(
    policy: Policy, samples: int = 3, release_kv: bool = False, **sizes: object
) -> EngineRollout:
    engine = Engine(CausalLM(policy.model), **{"kv_tokens": 2000, **sizes})  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=10, temperature=0.8, stop_token_ids=policy.stop_token_ids)
    return EngineRollout(engine, Renderer(policy.tokenizer), params, samples, release_kv)


def test_groups_come_in_task_order_and_trajectories_in_sample_order(policy: Policy) -> None:
    # Two at a time: sequences end in another order than that of the requests.
    groups = make_rollout(policy, max_running=2).generate(TASKS, seed=1)
    assert [g.task for g in groups] == TASKS
    for group in groups:
        assert [(t.task_id, t.sample) for t in group.trajectories] == [
            (group.task.id, k) for k in range(3)
        ]
        assert len({tuple(t.tokens) for t in group.trajectories}) == 3


def test_the_share_of_guesses_that_stood_is_of_the_call(policy: Policy) -> None:
    rollout = make_rollout(policy, speculation=Speculation(k=2, draft=CausalLM(policy.model)))
    shares = []
    for seed in (1, 2):
        before = replace(rollout.engine.stats)
        groups = rollout.generate(TASKS, seed=seed)
        now = rollout.engine.stats
        assert now.proposed_tokens > before.proposed_tokens
        expected = (now.accepted_tokens - before.accepted_tokens) / (
            now.proposed_tokens - before.proposed_tokens
        )
        assert rollout.stats()["rollout/accepted_frac"] == expected
        shares.append(expected)
        plain = make_rollout(policy)
        assert [[t.tokens for t in g.trajectories] for g in groups] == [
            [t.tokens for t in g.trajectories] for g in plain.generate(TASKS, seed=seed)
        ]
        assert "rollout/accepted_frac" not in plain.stats()
    assert min(shares) > 0.9  # the policy guesses for itself


def test_streams_cover_exactly_the_sampled_tokens(policy: Policy) -> None:
    rollout = make_rollout(policy)
    rollout.engine.set_version(5)
    renderer = Renderer(policy.tokenizer)
    for group in rollout.generate(TASKS, seed=1):
        prompt = renderer.encode(group.task)
        for t in group.trajectories:
            n, p = len(t.tokens), len(prompt)
            assert (
                t.tokens[:p] == prompt
                and t.prompt_length == p
                and [u.start for u in t.turns] == [p]
            )
            assert t.mask == [False] * p + [True] * (n - p)
            assert t.version == [-1] * p + [5] * (n - p)
            assert t.logp[:p] == [0.0] * p and all(x < 0 for x in t.logp[p:])
            assert t.finish_reason == (
                "stop" if t.tokens[-1] in policy.stop_token_ids else "length"
            )
            assert t.finish_reason == "stop" or n - p == 10
            assert t.reward is None and t.seconds > 0
            assert t.text == policy.tokenizer.decode(
                [x for x in t.tokens[p:] if x > 1]
            )  # padding and end tokens are left out


def test_recorded_log_probs_are_those_of_the_model_at_the_sampling_temperature(
    policy: Policy,
) -> None:
    for group in make_rollout(policy).generate(TASKS, seed=1):
        for t in group.trajectories:
            with torch.no_grad():
                logits = policy.model(torch.tensor([t.tokens]), use_cache=False).logits[0].float()
            expected = (
                (logits / 0.8)
                .log_softmax(-1)[:-1]
                .gather(-1, torch.tensor(t.tokens[1:])[:, None])[:, 0]
            )
            assert t.logp[t.prompt_length :] == pytest.approx(
                expected[t.prompt_length - 1 :].tolist(), abs=1e-5
            )


def test_same_seed_same_trajectories_and_other_seed_others(policy: Policy) -> None:
    def drawn(
        seed: int, tasks: list[Task], **sizes: int
    ) -> dict[tuple[str, int], tuple[list[int], list[float]]]:
        groups = make_rollout(policy, **sizes).generate(tasks, seed)
        return {(t.task_id, t.sample): (t.tokens, t.logp) for g in groups for t in g.trajectories}

    first = drawn(1, TASKS)
    assert drawn(1, TASKS[::-1], max_running=1) == first
    assert drawn(1, TASKS[:1]) == {k: v for k, v in first.items() if k[0] == TASKS[0].id}
    second = drawn(2, TASKS)
    assert all(second[k][0] != first[k][0] for k in first)


def test_one_task_twice_in_a_call_is_refused(policy: Policy) -> None:
    rollout = make_rollout(policy)
    with pytest.raises(ValueError, match="a task id is repeated"):
        rollout.generate([TASKS[0], TASKS[1], Task(TASKS[0].id, "1+1=")], seed=1)
    assert not rollout.engine.busy


def test_memory_is_freed_between_calls_if_requested(policy: Policy) -> None:
    keeps, gives = make_rollout(policy), make_rollout(policy, release_kv=True)
    for _ in range(2):
        tokens = [
            [t.tokens for g in r.generate(TASKS, 1) for t in g.trajectories] for r in (keeps, gives)
        ]
        assert tokens[0] == tokens[1]
        assert keeps.engine.runner.cache.tensors() != []
        assert gives.engine.runner.cache.tensors() == []


def test_metrics_count_one_call(policy: Policy) -> None:
    rollout = make_rollout(policy)
    for seed in (1, 2):
        groups = rollout.generate(TASKS, seed)
        stats, trajectories = rollout.stats(), [t for g in groups for t in g.trajectories]
        lengths = [t.sampled_length for t in trajectories]
        prompts = sum(t.prompt_length for t in trajectories)
        assert stats["rollout/tokens"] == sum(lengths)
        assert stats["rollout/prompt_tokens"] == prompts
        assert stats["rollout/reused_frac"] == pytest.approx(2 / 3)
        assert stats["rollout/length_mean"] == pytest.approx(sum(lengths) / len(lengths))
        assert stats["rollout/length_max"] == max(lengths)
        assert stats["rollout/truncated_frac"] == sum(
            t.finish_reason == "length" for t in trajectories
        ) / len(trajectories)


SMALL = Task("a", "1=")
"""4 tokens: one block of the tests below. Its two samples get 8 more each, so both need 1 + 2 + 2
blocks in the end.
"""


def small_engine(
    policy: Policy, blocks: int, preemption: str, prefix_cache: str = "none"
) -> EngineRollout:
    engine = Engine(
        CausalLM(policy.model),
        kv_tokens=4 * (blocks - 1),
        block_size=4,
        preemption=preemption,
        prefix_cache=prefix_cache,
    )  # type: ignore[arg-type]
    assert engine.scheduler.blocks.count == blocks  # the engine adds one
    return EngineRollout(engine, Renderer(policy.tokenizer), SamplingParams(max_tokens=8), 2)


@pytest.mark.mostly_slow(4)
@pytest.mark.parametrize(
    ("blocks", "preemption", "prefix_cache", "expected"),
    [
        # The ninth token of both samples needs a block, and only one is left. The second sample is
        # preempted, and computes its 8 tokens again after the first has ended.
        (4, "recompute", "none", (1, 8, 3 / 4, 1)),
        (
            4,
            "recompute",
            "radix",
            (1, 0, 3 / 4, 1),
        ),  # the cache has kept them: the first sample's end did not need their blocks
        (4, "none", "none", (0, 0, 3 / 4, 1)),  # one after the other
        (4, "swap", "none", (1, 0, 3 / 4, 1)),
        (5, "recompute", "none", (0, 0, 1.0, 1)),
    ],
)
def test_preemptions_and_peaks_by_hand(
    policy: Policy,
    blocks: int,
    preemption: str,
    prefix_cache: str,
    expected: tuple[float, float, float, float],
) -> None:
    rollout = small_engine(policy, blocks, preemption, prefix_cache)
    roomy = make_rollout(policy, samples=2)
    roomy.params = rollout.params
    for _ in range(2):  # the metrics of one call, not of the engine's whole life
        (group,) = rollout.generate([SMALL], seed=4)
        (wanted,) = roomy.generate([SMALL], seed=4)
        assert [t.tokens for t in group.trajectories] == [t.tokens for t in wanted.trajectories]
        assert [(t.prompt_length, t.sampled_length) for t in group.trajectories] == [(4, 8)] * 2
        stats = rollout.stats()
        names = ("preemptions", "recomputed_tokens", "kv_peak_frac", "queue_peak")
        assert tuple(stats[f"rollout/{name}"] for name in names) == expected


def test_the_peaks_are_of_the_last_call(policy: Policy) -> None:
    rollout = small_engine(policy, blocks=40, preemption="none")
    rollout.generate([SMALL, Task("b", "2="), Task("c", "3=")], seed=4)
    assert (rollout.stats()["rollout/queue_peak"], rollout.stats()["rollout/kv_peak_frac"]) == (
        3,
        15 / 40,
    )
    rollout.generate([SMALL], seed=4)
    assert (rollout.stats()["rollout/queue_peak"], rollout.stats()["rollout/kv_peak_frac"]) == (
        1,
        5 / 40,
    )


def test_a_model_that_only_ends_gives_empty_texts_with_one_scored_token(policy: Policy) -> None:
    model = copy.deepcopy(policy.model)
    end = policy.stop_token_ids[0]

    def only_end(module: torch.nn.Module, args: object, logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -50.0).index_fill_(-1, torch.tensor([end]), 50.0)

    model.get_output_embeddings().register_forward_hook(only_end)
    engine = Engine(CausalLM(model), kv_tokens=500)
    params = SamplingParams(max_tokens=10, stop_token_ids=(end,))
    for group in EngineRollout(engine, Renderer(policy.tokenizer), params, 2).generate(TASKS, 0):
        for t in group.trajectories:
            assert (t.tokens[t.prompt_length :], t.text, t.finish_reason) == ([end], "", "stop")
            assert t.logp[-1] == pytest.approx(0.0, abs=1e-6)
