"""Settings of [engine] take effect: each changes what the engine does, and exact ones no token."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import sixfold.run.parity_probe
from sixfold.checkpoint.model_source import with_model_folders
from sixfold.cli import main
from sixfold.engine.engine import Engine
from sixfold.engine.quantised_cache import Int8KVCache
from sixfold.engine.stats import EngineStats
from sixfold.errors import UserError
from sixfold.model.loading import Policy, load_policy
from sixfold.recipe.explain import explain
from sixfold.recipe.memory import memory_of
from sixfold.recipe.plan import make_plan
from sixfold.recipe.schema import ModelConfig
from sixfold.recipe.toml import parse_recipe
from sixfold.run.assemble import assemble
from sixfold.run.policy_evaluation import evaluate_policy
from sixfold.run.sampler import make_engine
from sixfold.run.start import train_run
from sixfold.types import Group, SamplingParams

from .processes import metrics, tiny_recipe

LONGEST = 64


def engine_of(policy: Policy, **settings: object) -> Engine:
    """Engine of a recipe with these settings of [engine]."""
    flags = [f"--engine.{k.replace('__', '.')}={str(v).lower()}" for k, v in settings.items()]
    recipe = parse_recipe("run.seed = 1", "x", flags)
    return make_engine(recipe, policy, LONGEST, None)


def completions(engine: Engine, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        engine.add(f"task {i}", prompt, SamplingParams(max_tokens=length), [0])
    return [s.tokens for s in sorted(engine.run(), key=lambda s: s.request.key)]


PROMPTS = [[7 + (3 * i + j) % 20 for j in range(4 + 3 * i)] for i in range(6)]
LENGTHS = [24, 4, 20, 6, 18, 5]


def test_chunked_prefill_lets_running_sequences_decode_in_between(policy: Policy) -> None:
    """A long prompt arrives while a sequence runs: every step of its prefill decodes a token."""
    tokens: dict[bool, list[list[int]]] = {}
    gained: dict[bool, list[int]] = {}
    for chunked in (False, True):
        engine = engine_of(policy, chunked_prefill=chunked, prefill_tokens_per_step=8)
        params = SamplingParams(max_tokens=20)
        engine.add("task 0", [7, 8, 9], params, [0])
        engine.step()
        (running,) = engine.scheduler.running
        engine.add("task 1", [7 + j % 20 for j in range(40)], params, [0])
        gained[chunked] = []
        while not any(s.request.key == "task 1" for s in engine.scheduler.running):
            before, computed = running.length, engine.stats.prefill_tokens
            engine.step()
            gained[chunked].append(running.length - before)
            if chunked:
                assert engine.stats.prefill_tokens - computed <= 8
        tokens[chunked] = [s.tokens for s in sorted(engine.run(), key=lambda s: s.request.key)]
    assert tokens[False] == tokens[True]
    assert len(gained[False]) <= 2 < 5 <= len(gained[True]) and set(gained[True]) == {1}


def test_host_tokens_bound_what_swapping_keeps(policy: Policy) -> None:
    found: dict[int, tuple[list[list[int]], EngineStats]] = {}
    for host in (400, 16):
        engine = engine_of(
            policy,
            kv_tokens=80,
            block_size=8,
            preemption__kind="swap",
            preemption__host_tokens=host,
        )
        found[host] = completions(engine, PROMPTS, [40] * 6), engine.stats
    assert found[400][0] == found[16][0]
    assert found[400][1].preemptions > 0 and found[400][1].recomputed_tokens == 0
    assert found[16][1].recomputed_tokens > 0


def test_an_int8_cache_is_the_engines(policy: Policy) -> None:
    assert isinstance(engine_of(policy, kv_dtype="int8").runner.cache, Int8KVCache)
    assert not isinstance(engine_of(policy).runner.cache, Int8KVCache)


def saved(policy: Policy, folder: Path) -> str:
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_a_draft_model_proposes(policy: Policy, tmp_path: Path) -> None:
    """A draft that equals the policy is always accepted, and draws the policy's own tokens."""
    plain = engine_of(policy)
    engine = engine_of(
        policy,
        speculation__kind="draft",
        speculation__path=saved(policy, tmp_path / "draft"),
        speculation__tokens=3,
    )
    assert completions(engine, PROMPTS, LENGTHS) == completions(plain, PROMPTS, LENGTHS)
    stats = engine.stats
    assert stats.accepted_tokens == stats.proposed_tokens > 0
    assert stats.pass_tokens / stats.target_passes > 2


def test_a_draft_model_that_does_not_fit_is_refused(policy: Policy, tmp_path: Path) -> None:
    path = saved(policy, tmp_path / "draft")
    flags = ["--engine.speculation.kind=draft", f"--engine.speculation.path={path}"]
    recipe = parse_recipe("run.seed = 1", "x", flags)
    with pytest.raises(UserError, match=r"engine\.speculation\.path = .*context"):
        make_engine(recipe, policy, policy.context + 1, None)
    other = parse_recipe("run.seed = 1", "x", ["--model.scratch.alphabet=0123"]).model.scratch
    small = load_policy(ModelConfig(scratch=other), seed=0, device="cpu")
    with pytest.raises(UserError, match=r"engine\.speculation\.path = .*vocabulary"):
        make_engine(recipe, small, LONGEST, None)


def test_the_plan_counts_the_memory_of_a_draft_model_and_an_int8_cache(
    policy: Policy, tmp_path: Path
) -> None:
    def memory(*flags: str) -> tuple[int, dict[str, int]]:
        found = memory_of(make_plan(parse_recipe("run.seed = 1", "x", flags)))
        assert found is not None
        return found.cache_token, {part.name: part.size for part in found.parts}

    plain, parts = memory()
    int8, _ = memory("--engine.kv_dtype=int8", "--algorithm.correction=truncated")
    # 4 layers, 2 key-value heads of 32 numbers; keys and values
    assert plain == 4 * 2 * 2 * 32 * 4 and int8 == 4 * 2 * 2 * (32 + 4)
    path = saved(policy, tmp_path / "draft")
    draft, with_draft = memory(
        "--engine.speculation.kind=draft", f"--engine.speculation.path={path}"
    )
    numbers = sum(p.numel() for p in policy.model.parameters())
    assert with_draft == {**parts, "draft model": 4 * numbers}
    config = policy.model.config
    own = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert draft == plain + 4 * own


def test_explain_names_the_draft_model_and_the_cache(policy: Policy, tmp_path: Path) -> None:
    path = saved(policy, tmp_path / "draft")
    flags = ["--engine.speculation.kind=draft", f"--engine.speculation.path={path}"]
    flags += ["--engine.kv_dtype=int8", "--algorithm.correction=truncated"]
    text = explain(make_plan(parse_recipe("run.seed = 1", "x", flags)))
    assert f"{path} proposes up to 4 tokens" in text and "in int8: log-probs change" in text


def train(folder: Path, **overrides: object) -> list[dict[str, float]]:
    """Two steps, with rewards that are never all equal."""
    folder.mkdir(exist_ok=True)
    (folder / "recipe.toml").write_text('run.name = "run"\n')
    (folder / "rewards.py").write_text(
        "def odd(completion, task):\n    return float(sum(map(ord, completion)) % 2)\n"
    )
    settings = {
        "run__steps": 2,
        "environment__preflight": 8,
        "environment__rewards": f'["{folder / "rewards.py"}:odd"]',
        **overrides,
    }
    flags = tiny_recipe(folder, **settings)
    assert main(["train", str(folder / "recipe.toml"), *flags]) == 0
    return metrics(folder / "run")


@pytest.mark.slow
def test_a_run_with_an_int8_cache_measures_its_drift(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = train(tmp_path, engine__kv_dtype="int8", algorithm__correction="truncated")
    said = capsys.readouterr().err
    assert "parity of engine and trainer log-probs: mean difference" in said
    assert "int8 KV cache change log-probs: mean difference" in said
    for m in steps:
        assert 1e-5 < m["mismatch/max_abs_logp"] < 1 and math.isfinite(m["mismatch/kl_k3"])
        assert "correction/ess_frac" in m


@pytest.mark.slow
def test_evaluations_use_an_exact_cache_even_with_kv_dtype_int8(tmp_path: Path) -> None:
    """They measure the policy. Training samples go through the int8 cache before and after."""

    def logps(groups: list[Group]) -> list[list[float]]:
        return [t.logp for g in groups for t in g.trajectories]

    found, sampled = {}, {}
    for kv_dtype in ("auto", "int8"):
        flags = tiny_recipe(
            tmp_path, engine__kv_dtype=kv_dtype, algorithm__correction="truncated", data__heldout=4
        )
        assembly = assemble(parse_recipe('run.name = "x"', "x", flags))
        try:
            heldout = assembly.tasks.heldout
            before = logps(assembly.sample(assembly.rollout(), heldout, seed=0))
            found[kv_dtype] = [
                logps(evaluate_policy(assembly, heldout, 0, probe=probe).groups)
                for probe in (False, True)
            ]
            sampled[kv_dtype] = logps(assembly.sample(assembly.rollout(), heldout, seed=0))
            assert sampled[kv_dtype] == before
        finally:
            assembly.close()
    assert found["int8"] == found["auto"]
    assert sampled["int8"] != sampled["auto"]


@pytest.mark.slow
def test_int8_cache_does_not_hide_other_differences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = tiny_recipe(tmp_path, engine__kv_dtype="int8", algorithm__correction="truncated")
    recipe = parse_recipe('run.name = "x"', "x", [*flags, "--run.steps=1"])
    exact = sixfold.run.parity_probe.exact_logp
    monkeypatch.setattr(sixfold.run.parity_probe, "exact_logp", lambda *a: exact(*a) + 2e-2)
    with pytest.raises(UserError, match=r"engine and trainer disagree .*run\.precision"):
        train_run(recipe)
    monkeypatch.setattr(sixfold.run.parity_probe, "exact_logp", exact)
    monkeypatch.setattr(sixfold.run.parity_probe, "QUANTISED_LIMIT", 1e-9)
    with pytest.raises(UserError, match=r"engine\.kv_dtype = 'int8'.*Use 'auto'"):
        train_run(recipe, overwrite=True)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_with_a_draft_model_samples_the_policys_distribution(tmp_path: Path) -> None:
    """The draft is the run's own first checkpoint. The log-probs of the samples stay the policy's,
    and the recipe of the run names the folder of that checkpoint.
    """
    first = tmp_path / "first"
    first.mkdir()
    train(first)
    second = tmp_path / "second"
    second.mkdir()
    steps = train(
        second, engine__speculation__kind="draft", engine__speculation__path=str(first / "run")
    )
    assert all(m["mismatch/max_abs_logp"] < 1e-4 for m in steps)
    recipe = parse_recipe((second / "run" / "recipe.toml").read_text(), "x")
    assert recipe.engine.speculation.kind == "draft"
    assert "checkpoints" in recipe.engine.speculation.path
    assert with_model_folders(recipe) == recipe


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_reports_swapped_bytes(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain")
    swapping = train(
        tmp_path / "swapping",
        engine__preemption__kind="swap",
        engine__max_running=4,
        engine__kv_tokens=64,
        engine__block_size=4,
    )
    for m, n in zip(plain, swapping, strict=True):
        assert "rollout/swapped_bytes" not in m
        assert (n["rollout/swapped_bytes"] > 0) == (n["rollout/preemptions"] > 0)
        assert m["reward/mean"] == n["reward/mean"]
