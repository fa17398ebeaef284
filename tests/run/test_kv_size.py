"""The KV cache's size against sums by hand: on a GPU no more than fits beside training."""

from __future__ import annotations

import copy

import pytest
import torch

from sixfold.errors import UserError
from sixfold.model.loading import Policy
from sixfold.recipe.explain import explain
from sixfold.recipe.plan import make_plan
from sixfold.recipe.schema import Recipe
from sixfold.recipe.toml import parse_recipe
from sixfold.run import embedded, kv_size, sampler
from sixfold.run.assemble import assemble
from sixfold.sizing import kv_cache

LONGEST = 100
PER_TOKEN = 2 * 2 * 2 * 16 * 4
"""Keys and values, 2 layers, 2 heads of 16 numbers, 4 bytes."""


def recipe(*flags: str) -> Recipe:
    return parse_recipe('run.name = "x"', "x.toml", flags)


def gpu(monkeypatch: pytest.MonkeyPatch, free: int, total: int) -> None:
    monkeypatch.setattr(kv_size, "free_memory", lambda device: (free, total))


def test_what_is_wanted_and_what_fits() -> None:
    assert kv_cache.whole_blocks(100, 16) == 112
    assert kv_cache.tokens_that_fit(free=10_000, reserved=2_000, per_token=100, wanted=50) == 50
    assert kv_cache.tokens_that_fit(free=10_000, reserved=2_000, per_token=100, wanted=500) == 80
    assert kv_cache.tokens_that_fit(free=10_000, reserved=20_000, per_token=100, wanted=500) == 0


def test_cpu_cache_has_the_requested_size(policy: Policy) -> None:
    notes: list[str] = []
    assert kv_size.kv_tokens(recipe(), policy, LONGEST, notes) == 256 * 112 and notes == []


def test_a_gpu_holds_what_fits_and_the_user_is_told(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = recipe(
        "--engine.max_running=8",
        "--trainer.max_tokens_per_microbatch=64",
        "--trainer.logprob_chunk=16",
    )
    config = policy.model.config.to_dict()
    reserved = kv_size.reserved_bytes(asked, policy, config, LONGEST)
    assert reserved > 12 * sum(p.numel() for p in policy.model.parameters())
    notes: list[str] = []
    total = 100_000_000
    gpu(monkeypatch, reserved + total // 10 + 8 * 112 * PER_TOKEN, total)
    assert kv_size.kv_tokens(asked, policy, LONGEST, notes) == 8 * 112 and notes == []
    gpu(monkeypatch, reserved + total // 10 + 300 * PER_TOKEN, total)
    assert kv_size.kv_tokens(asked, policy, LONGEST, notes) == 288, "whole blocks of 16"
    (note,) = notes
    assert (
        "288 tokens" in note
        and "896" in note
        and "engine.max_running = 8" in note
        and "engine.preemption.kind" in note
    )
    engine = sampler.make_engine(asked, policy, LONGEST, None, notes)
    assert engine.scheduler.blocks.count == 288 // 16 + 1 and len(notes) == 2
    given = sampler.make_engine(recipe("--engine.kv_tokens=4000"), policy, LONGEST, None, notes)
    assert given.scheduler.blocks.count == 4000 // 16 + 1, (
        "a size that the user gives is the user's"
    )


def test_no_room_for_one_sequence_is_said_before_anything_runs(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, 1000, 2000)
    with pytest.raises(
        UserError, match=r"engine\.kv_tokens.*rollout\.max_new_tokens.*engine\.release_kv"
    ):
        kv_size.kv_tokens(recipe(), policy, LONGEST, [])


def test_models_beside_the_policy_and_released_memory_count(policy: Policy) -> None:
    config, n = policy.model.config.to_dict(), sum(p.numel() for p in policy.model.parameters())

    def bytes_of(*flags: str) -> int:
        return kv_size.reserved_bytes(recipe(*flags), policy, config, LONGEST)

    alone = bytes_of("--algorithm.beta=0")
    assert bytes_of("--algorithm.beta=0.1") - alone == 4 * n
    # Weights and moments. Gradients of critic and policy are never held at the same time.
    assert bytes_of("--algorithm.name=ppo", "--algorithm.beta=0") - alone == 12 * n
    assert bytes_of("--algorithm.beta=0", "--engine.release_kv=true") == 12 * n
    assert bytes_of("--algorithm.beta=0", "--trainer.activation_checkpointing=full") < alone


def test_a_rank_reserves_its_share(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three quarters of the policy's weights are freed after the cache is created."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    config, n = policy.model.config.to_dict(), sum(p.numel() for p in policy.model.parameters())
    asked = recipe("--algorithm.beta=0", "--engine.release_kv=true")
    reserved = kv_size.reserved_bytes(asked, policy, config, LONGEST)
    assert reserved == n + 2 * n - (4 * n - n)


def test_explain_states_the_rule() -> None:
    assert "on a GPU at most its free memory, minus what training needs" in explain(
        make_plan(recipe())
    )


def test_cuda_graphs_as_the_recipe_says(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"engine\.cuda_graphs = 'on' needs a GPU.*auto"):
        sampler.make_engine(recipe("--engine.cuda_graphs=on"), policy, LONGEST, None)
    given: list[bool | None] = []
    monkeypatch.setattr(
        embedded, "Engine", lambda *args, cuda_graphs, **settings: given.append(cuda_graphs)
    )
    for asked in ("auto", "off"):
        sampler.make_engine(recipe(f"--engine.cuda_graphs={asked}"), policy, LONGEST, None)
    there = copy.copy(policy.model)
    monkeypatch.setattr(type(there), "device", torch.device("cuda"))
    monkeypatch.setattr(sampler, "kv_tokens", lambda *args: 64)
    sampler.make_engine(recipe("--engine.cuda_graphs=on"), policy, LONGEST, None)
    assert given == [None, False, True]


@pytest.mark.slow
def test_released_memory_is_released_after_every_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, evaluations and the probes of SFT share the GPU with the trainer alike."""
    sizes = [
        "layers=1",
        "hidden_size=16",
        "heads=2",
        "kv_heads=1",
        "head_dim=8",
        "intermediate_size=16",
        "context=64",
    ]
    flags = [f"--model.scratch.{size}" for size in sizes]
    flags += [
        "--data.heldout=4",
        "--data.limit=8",
        "--rollout.max_new_tokens=4",
        "--engine.kv_tokens=512",
    ]
    for released in ("true", "false"):
        assembly = assemble(recipe(*flags, f"--engine.release_kv={released}"))
        try:
            for rollout in (assembly.rollout(), assembly.evaluator(), assembly.prober()):
                assembly.sample(rollout, assembly.tasks.train[:2], seed=1)
                assert isinstance(assembly.engine, sampler.Engine)
                assert (assembly.engine.runner.cache.tensors() == []) == (released == "true")
        finally:
            assembly.close()
