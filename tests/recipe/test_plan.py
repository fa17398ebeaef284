"""Plans: their numbers compared with counts by hand, the real model and the trainer's packing, and
the messages of their refusals.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold.algorithm.zoo import ZOO
from sixfold.environment.registry import LIBRARIES
from sixfold.errors import UserError
from sixfold.recipe.algorithm_plan import resolve_algorithm
from sixfold.recipe.explain import Fact, asked_settings, explain, facts
from sixfold.recipe.plan import make_plan, microbatch_bound
from sixfold.recipe.schema import AlgorithmConfig, Recipe
from sixfold.recipe.toml import load_recipe, parse_recipe


def recipe(*flags: str) -> Recipe:
    return parse_recipe('run.name = "x"', "x.toml", flags)


def refusal(*flags: str) -> str:
    with pytest.raises(UserError) as caught:
        make_plan(recipe(*flags))
    return str(caught.value)


def test_the_numbers_of_the_defaults_by_hand() -> None:
    plan = make_plan(Recipe())
    assert plan.trajectories == 8 * 8
    assert (plan.longest_tokens, plan.max_prompt_tokens) == (512, 448)
    # 8 prompts of 448 tokens and 64 completions of 64 are 7,680 tokens. A full micro-batch has at
    # least 4096 - 511 tokens. 448 of them may repeat a prompt of the previous micro-batch, so at
    # least 3,137 are new. Two micro-batches can be full, and a third one has the rest.
    assert plan.microbatches == 3
    assert plan.step_tokens == 7680
    assert plan.kv_tokens == 256 * 512 and plan.kv_blocks == 8192
    # keys and values, 4 layers, 2 heads of 32 numbers, 4 bytes: 2 KiB per token
    assert plan.kv_bytes == 256 * 512 * 2 * 4 * 2 * 32 * 4
    assert not plan.keeps_reference
    assert plan.evaluations == 11


def test_scratch_parameters_are_those_of_the_real_model() -> None:
    from sixfold.model.scratch import scratch_model

    flags = [
        "--model.scratch.hidden_size=48",
        "--model.scratch.layers=3",
        "--model.scratch.heads=6",
        "--model.scratch.kv_heads=2",
    ]
    asked = recipe(
        *flags,
        "--model.scratch.head_dim=10",
        "--model.scratch.intermediate_size=80",
        "--model.scratch.alphabet=abc",
    )
    model, tokenizer = scratch_model(asked.model.scratch, seed=0)
    plan = make_plan(asked)
    assert plan.model.parameters == sum(p.numel() for p in model.parameters())
    assert f"{len(tokenizer)} tokens in the vocabulary" in plan.model.origin
    trained = "--model.scratch.tokenizer=trained", "--model.scratch.vocabulary=270"
    asked = recipe(*flags, *trained)
    model, tokenizer = scratch_model(asked.model.scratch, 0, ["some words, more words, some more"])
    plan = make_plan(asked)
    assert plan.model.parameters == sum(p.numel() for p in model.parameters())
    assert f"{len(tokenizer)} tokens in the vocabulary" in plan.model.origin


def write_model(folder: Path, config: dict[str, object], tensors: dict[str, list[int]]) -> Path:
    """A model folder as transformers saves it, without the numbers."""
    header = json.dumps(
        {"__metadata__": {"format": "pt"}}
        | {n: {"dtype": "F32", "shape": s, "data_offsets": [0, 0]} for n, s in tensors.items()}
    )
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())
    return folder


QWEN = dict(
    model_type="qwen2",
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    hidden_size=896,
    max_position_embeddings=1024,
)


def test_a_local_model_is_read_from_its_files(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", QWEN, {"a": [10, 7], "b": [5], "scalar": []})
    plan = make_plan(recipe(f"--model.path={folder}", "--run.precision=bfloat16"))
    assert plan.model.parameters == 76
    assert plan.checkpoint_bytes == 12 * 76
    assert plan.longest_tokens == 1024 and plan.max_prompt_tokens == 960
    assert plan.kv_bytes == 256 * 1024 * (2 * 24 * 2 * 64) * 2


def test_sizes_missing_from_the_config_stay_unknown(tmp_path: Path) -> None:
    folder = write_model(
        tmp_path / "gpt2", dict(model_type="gpt2", n_positions=128, n_embd=8), {"w": [3, 3]}
    )
    plan = make_plan(recipe(f"--model.path={folder}"))
    assert plan.longest_tokens == 128 and plan.kv_tokens == 256 * 128 and plan.kv_bytes is None
    hub = make_plan(recipe("--model.path=Qwen/Qwen2.5-0.5B"))
    assert (hub.model.parameters, hub.longest_tokens, hub.kv_tokens, hub.step_tokens) == (
        None,
        None,
        None,
        None,
    )
    assert hub.microbatches == hub.trajectories == 64
    bounded = make_plan(recipe("--model.path=Qwen/Qwen2.5-0.5B", "--data.max_prompt_tokens=36"))
    assert bounded.longest_tokens == 100 and bounded.kv_tokens == 256 * 112


@pytest.mark.parametrize("backend", ["vllm", "sglang", "sixfold"])
def test_what_only_the_embedded_engine_does_is_refused_with_another(backend: str) -> None:
    other = f"--rollout.backend.kind={backend}"
    for key, value in {
        "engine.speculation.kind": "ngram",
        "engine.preemption.kind": "swap",
        "engine.kv_dtype": "int8",
        "engine.chunked_prefill": "true",
        "engine.block_size": "8",
        "engine.release_kv": "true",
        "engine.cuda_graphs": "off",
    }.items():
        message = refusal(
            other, f"--{key}={value}", "--algorithm.correction=truncated", "--sync.kind=copy"
        )
        assert message.startswith(f"{key} = ") and f"rollout.backend.kind = '{backend}'" in message
    for key, value in {
        "engine.max_running": "8",
        "engine.kv_tokens": "4096",
        "engine.prefill_tokens_per_step": "512",
        "engine.prefix_cache": "none",
    }.items():
        if backend == "vllm":
            make_plan(recipe(other, f"--{key}={value}", "--sync.kind=copy"))
        else:
            assert refusal(other, f"--{key}={value}", "--sync.kind=copy").startswith(f"{key} = ")
    assert refusal(other, "--sync.kind=int8", "--algorithm.correction=truncated").startswith(
        "sync.kind = 'int8' rounds the embedded engine's weights, but rollout.backend.kind ="
        f" '{backend}' samples elsewhere"
    )
    for flag in ("top_p=0.9", "top_k=5", "min_p=0.1"):
        if backend == "sixfold":  # it reports the kept tokens
            make_plan(recipe(other, f"--rollout.{flag}"))
            continue
        assert refusal(other, f"--rollout.{flag}").startswith(
            f"rollout.top_p, top_k and min_p: rollout.backend.kind = '{backend}'"
        )


@pytest.mark.parametrize(
    ("flag", "setting"),
    [("--moe.routing=measure", "moe.routing"), ("--model.lora.rank=4", "model.lora.rank")],
)
def test_cuda_graphs_that_could_never_run_are_refused(flag: str, setting: str) -> None:
    said = refusal("--engine.cuda_graphs=on", flag)
    assert "engine.cuda_graphs = 'on'" in said and setting in said
    assert "engine.cuda_graphs = 'auto'" in said
    make_plan(recipe(flag))
    make_plan(recipe("--engine.cuda_graphs=on", "--model.lora.rank=4", "--sync.kind=copy"))


def test_contradictions_are_refused_with_their_reason(tmp_path: Path) -> None:
    alone = refusal("--rollout.samples_per_prompt=1")
    assert alone.startswith("rollout.samples_per_prompt = 1") and alone.endswith("at least 2")
    assert "'grpo'" in alone and "'rloo'" in refusal(
        "--rollout.samples_per_prompt=1", "--algorithm.name=rloo"
    )
    assert (
        refusal("--rollout.max_new_tokens=512")
        == "rollout.max_new_tokens = 512 leaves no room for a prompt in the model's context of 512"
        " tokens (model.scratch.context)"
    )
    assert (
        refusal("--rollout.max_new_tokens=112", "--data.max_prompt_tokens=401")
        == "data.max_prompt_tokens + rollout.max_new_tokens = 401 + 112 = 513 exceeds the model's"
        " context of 512 tokens (model.scratch.context)"
    )
    make_plan(recipe("--rollout.max_new_tokens=112", "--data.max_prompt_tokens=400"))
    small = refusal("--engine.kv_tokens=511")
    assert small.startswith("engine.kv_tokens = 511") and "at least 512" in small
    assert make_plan(recipe("--engine.kv_tokens=512")).kv_blocks == 32
    assert make_plan(recipe("--engine.kv_tokens=513")).kv_blocks == 33
    greedy = refusal("--eval.samples=4")
    assert greedy.startswith("eval.samples = 4") and "eval.temperature > 0" in greedy
    one = refusal("--rollout.top_k=1")
    assert one.startswith("rollout.top_k = 1") and "at least 2, or 0" in one
    target = refusal("--rollout.top_k=4", "--algorithm.entropy_target=1.4")
    assert target.startswith("algorithm.entropy_target = 1.4") and "ln 4 = 1.39" in target
    assert "rollout.top_k = 4" in target and "Lower it, or raise rollout.top_k" in target
    make_plan(recipe("--rollout.top_k=4", "--algorithm.entropy_target=1.3"))
    assert "alphabet has repeated characters: 'ab'" in refusal("--model.scratch.alphabet=abcba")
    assert "head_dim = 33 is odd" in refusal("--model.scratch.head_dim=33")
    folder = write_model(tmp_path / "m", QWEN, {"w": [2]})
    assert refusal(f"--model.path={folder}", "--rollout.max_new_tokens=1024").endswith(
        "context of 1024 tokens (its config.json)"
    )


def test_model_folders_that_are_none(tmp_path: Path) -> None:
    empty = refusal(f"--model.path={tmp_path}")
    assert empty.startswith(f"model.path: {tmp_path} has no config.json")
    assert empty.endswith("model folder")
    assert (
        refusal("--model.path=./no/such")
        == "model.path: no folder no/such, and './no/such' is not a hub id (owner/name)"
    )
    folder = write_model(tmp_path / "m", QWEN, {"w": [2]})
    assert "is a file; give the folder" in refusal(f"--model.path={folder}/config.json")
    (folder / "model.safetensors").write_bytes(b"\xff" * 20)
    assert "not a complete safetensors file" in refusal(f"--model.path={folder}")
    (folder / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(f"--model.path={folder}")


def test_an_algorithm_is_its_row_with_the_recipe_laid_over() -> None:
    assert resolve_algorithm(AlgorithmConfig()) == ZOO["grpo"]
    changed = resolve_algorithm(AlgorithmConfig(beta=0.04, clip_high=0.28, aggregation="token"))
    assert (changed.beta, changed.clip_low, changed.clip_high, changed.aggregation, changed.kl) == (
        0.04,
        0.2,
        0.28,
        "token",
        "k3",
    )
    assert make_plan(recipe("--algorithm.beta=0.04")).keeps_reference


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(data=st.data(), share=st.booleans())
def test_no_step_needs_more_microbatches_than_the_bound(data: st.DataObject, share: bool) -> None:
    packing = pytest.importorskip("sixfold.trainer.packing")
    import torch

    prompts, samples = data.draw(st.integers(1, 6)), data.draw(st.integers(2, 6))
    prompt, new, budget = (
        data.draw(st.integers(*bounds)) for bounds in ((1, 60), (1, 60), (16, 300))
    )
    asked = recipe(
        f"--rollout.prompts_per_step={prompts}",
        f"--rollout.samples_per_prompt={samples}",
        f"--rollout.max_new_tokens={new}",
        f"--trainer.max_tokens_per_microbatch={budget}",
        f"--trainer.share_prefix={str(share).lower()}",
    )
    of_group = [
        data.draw(st.one_of(st.just(prompt), st.integers(1, prompt))) for _ in range(prompts)
    ]
    prompt_lengths = [length for length in of_group for _ in range(samples)]
    lengths = [
        length + data.draw(st.one_of(st.just(new), st.integers(1, new)))
        for length in prompt_lengths
    ]
    group = [g for g in range(prompts) for _ in range(samples)]
    tokens = torch.zeros(len(lengths), prompt, dtype=torch.int64)
    columns = (torch.tensor(column) for column in (lengths, prompt_lengths, group))
    batch = SimpleNamespace(
        unit=None,
        tokens=tokens,
        **dict(zip(("lengths", "prompt_lengths", "group"), columns, strict=True)),
    )
    batch.at_host = lambda: batch
    parts = packing.microbatches(batch, range(len(lengths)), budget, share)
    assert len(parts) <= microbatch_bound(
        asked.trainer, asked.rollout, prompt, asked.episode_tokens
    )


@pytest.mark.parametrize(
    ("steps", "every"), [(0, 0), (0, 5), (1, 1), (10, 0), (10, 5), (11, 5), (9, 5), (3, 10)]
)
def test_evaluations_are_those_of_a_run_counted_one_by_one(steps: int, every: int) -> None:
    counted = 1 + sum(
        step == steps or (every > 0 and step % every == 0) for step in range(1, steps + 1)
    )
    assert make_plan(recipe(f"--run.steps={steps}", f"--eval.every={every}")).evaluations == counted
    assert (
        make_plan(
            recipe(f"--run.steps={steps}", f"--eval.every={every}", "--data.heldout=0")
        ).evaluations
        == 0
    )


def test_the_explanation_says_the_numbers_and_why() -> None:
    text = explain(
        make_plan(recipe("--algorithm.beta=0.04", "--run.max_minutes=5", "--run.target_reward=0.9"))
    )
    for line in (
        (
            "8 prompts x 8 samples = 64 trajectories, 1 optimizer step, at most 3 micro-batches of"
            " <= 4096 tokens"
        ),
        (
            "because a trajectory has at most 512 tokens and is never split; a prompt counts once"
            " for its completions (trainer.share_prefix)"
        ),
        "at most 131,072 tokens in 8,192 blocks of 16; 256 MiB",
        "because engine.kv_tokens = 0: room for engine.max_running = 256 sequences of 512 tokens",
        "a frozen copy of the policy, scored in the loop; KL k3 in the loss, weight 0.04",
        "because beta = 0.04 (algorithm.beta in the recipe)",
        (
            "after 100 RL steps or after 5 minutes or when the moving average of the reward reaches"
            " 0.9, whichever comes first"
        ),
        "training state: 12.1 MiB",
        "requested (4 of ",
        "algorithm.beta     0.04  (default the algorithm's own)",
    ):
        assert line in text
    assert "none is loaded" in explain(make_plan(Recipe()))


def fact(topic: str, *flags: str) -> Fact | None:
    """The line of the explanation on a topic, if there is one."""
    found = [f for f in facts(make_plan(recipe(*flags))) if f.topic == topic]
    assert len(found) < 2
    return found[0] if found else None


def says(topic: str, *flags: str) -> str:
    found = fact(topic, *flags)
    assert found is not None
    return found.says


def test_the_explanation_says_how_the_engine_admits_and_what_it_computes_once() -> None:
    plain = says("prefill")
    assert plain.startswith("a prompt is computed once for its 8 samples;")
    assert "radix tree" in plain and "at most 4096 prompt tokens, or one longer" in plain
    apart = says("prefill", "--engine.prefix_cache=none", "--engine.prefill_tokens_per_step=100")
    assert "separately" in apart and "at most 100 prompt tokens" in apart
    assert "full blocks" in says("prefill", "--engine.prefix_cache=hash")
    assert "in chunks" in says("prefill", "--engine.chunked_prefill=true")
    assert says(
        "prefill", "--rollout.samples_per_prompt=1", "--algorithm.name=reinforce"
    ).startswith("a prompt has one sample;")
    assert says("prefill", "--rollout.oversample=12").startswith(
        "a prompt is computed once for its 12 samples;"
    )
    assert "none is preempted" in says("admission")
    assert "computed again later" in says("admission", "--engine.preemption.kind=recompute")
    swap = "--engine.preemption.kind=swap"
    assert "moved to host memory and" in says("admission", swap)
    assert "host memory (5,000 tokens)" in says(
        "admission", swap, "--engine.preemption.host_tokens=5000"
    )
    assert fact("speculation") is None
    assert "up to 3 tokens are proposed from earlier text" in says(
        "speculation", "--engine.speculation.kind=ngram", "--engine.speculation.tokens=3"
    )
    assert says("KV cache", "--engine.kv_tokens=1000", "--engine.block_size=8").startswith(
        "1,000 tokens in 125 blocks of 8; 1.95 MiB"
    )


def test_the_explanation_counts_optimizer_steps() -> None:
    assert "64 trajectories, 1 optimizer step, at most 3 micro-batches of <= 4096 tokens" in says(
        "step"
    )
    ppo = says("step", "--algorithm.name=ppo")
    assert (
        "2 epochs x 1 minibatch = 2 optimizer steps, at most 3 micro-batches of <= 4096 tokens in"
        " each epoch" in ppo
    )
    assert "computed per pass over the samples" in says("training", "--algorithm.name=ppo")
    # each of the 4 minibatches ends a micro-batch
    assert "1 epoch x 4 minibatches = 4 optimizer steps, at most 6 micro-batches" in says(
        "step", "--algorithm.minibatches=4"
    )


def test_the_explanation_says_what_the_algorithm_is() -> None:
    assert says("algorithm", "--algorithm.name=cispo").startswith(
        "cispo: baseline: group mean; ratio and clip: token, weight <= 5; token losses"
    )
    assert "no ratio, no clip" in says("algorithm", "--algorithm.name=reinforce")
    assert "ratio and clip: token, 0.8 to 1.3" in says("algorithm", "--algorithm.clip_high=0.3")


def test_the_explanation_says_how_named_rewards_and_greedy_completions_are_used() -> None:
    one, two = "--environment.rewards=arithmetic", "--environment.rewards=arithmetic,math"
    gdpo, remax = "--algorithm.name=gdpo", "--algorithm.name=remax"
    assert says("parts", gdpo, two).startswith("2 rewards, each normalised within its group")
    alone = says("parts", gdpo, one)
    assert alone.startswith("1 reward") and "environment.rewards" in alone
    assert "temperature 0" in says("greedy", remax) and "not trained on" in says("greedy", remax)
    assert fact("parts", two) is None and fact("greedy", gdpo) is None


def test_the_explanation_names_the_environment_of_episodes() -> None:
    assert fact("episodes") is None
    flags = ("--environment.episode", "calculator")
    assert "calculator" in says("episodes", *flags)
    assert says("solved").startswith("arithmetic")
    assert says("solved", *flags).startswith("reward")


def test_the_explanation_says_what_else_is_kept() -> None:
    parameters = make_plan(Recipe()).model.parameters or 0
    critic = says("critic", "--algorithm.name=ppo", "--critic.warmup_steps=3")
    assert (
        f"training state: about {16 * parameters / 2**20:.3g} MiB more; learning rate 1e-05;"
        " only the critic is trained in the first 3 steps" in critic
    )
    assert "a value head on the policy's hidden states; training state: very small" in says(
        "critic", "--algorithm.name=ppo", "--critic.body=policy"
    )
    adapter = says("critic", "--algorithm.name=ppo", "--model.lora.rank=4")
    assert "an adapter of its own, of rank 4" in adapter and "frozen base" in adapter
    assert fact("critic") is None
    assert "has no effect" in says("critic", "--critic.warmup_steps=3")
    teacher = says(
        "teacher",
        "--algorithm.name=opd",
        "--reference.path=org/teacher",
        "--reference.placement=worker",
    )
    assert teacher.startswith("org/teacher, scored by another process while answers are checked;")
    adapted = says(
        "reference",
        "--algorithm.beta=0.02",
        "--algorithm.kl_target=0.1",
        "--reference.reset_every=7",
    )
    assert adapted.endswith(
        "KL k3 in the loss, weight 0.02, adapted until the KL is 0.1; replaced by a copy of the"
        " policy every 7 steps"
    )


def test_the_explanation_says_what_is_kept_of_the_distribution() -> None:
    assert fact("sampling") is None
    assert says("sampling", "--rollout.top_p=0.9").startswith(
        "from the smallest set with a probability of at least 0.9, renormalised; trainer"
    )
    all_three = says(
        "sampling", "--rollout.top_p=0.9", "--rollout.top_k=50", "--rollout.min_p=0.05"
    )
    assert (
        "the 50 most probable tokens, of these the smallest set with a probability of at least 0.9,"
        " of these tokens at least 0.05 times as pro" in all_three
    )
    assert "takes at most 200 bytes per sampled token" in all_three


def test_the_explanation_says_the_correction() -> None:
    stale = ("--sync.kind=copy", "--sync.every=4")
    found = fact("correction", "--algorithm.correction=masked", *stale)
    assert found is not None and found.says.endswith(
        "pi(start of the step) / pi(sampler), 0.5 to 5"
    )
    assert found.why == "algorithm.correction; sync.kind = copy, every = 4"
    assert says(
        "correction", "--algorithm.correction=truncated", "--algorithm.correction_high=4", *stale
    ).endswith("up to 4")
    assert "below -0.5" in says("correction", "--algorithm.correction=negative-sequence", *stale)
    assert fact("correction") is None


def test_the_explanation_says_whose_weights_sample() -> None:
    assert says("weights").startswith("engine and trainer share one set of weights; forward")
    assert says("weights", "--sync.kind=copy").startswith(
        "the engine has its own copy of the weights, updated after every step; forward"
    )
    rounded = says("weights", "--sync.kind=fp8", "--algorithm.correction=truncated")
    assert "rounded as in fp8 (simulated" in rounded


def test_the_explanation_says_what_dynamic_sampling_will_cost() -> None:
    found = fact("refill", "--algorithm.dynamic_sampling=3", "--rollout.samples_per_prompt=4")
    assert found is not None
    # q = p^4 + (1 - p)^4 is the share of equal rewards: 0.6562 for 0.1 and 0.9, 0.125 for 0.5.
    # The two further rounds sample q + q^2 more groups, and a share of q^3 stays degenerate.
    costs = [(q + q**2, q**3) for q in (0.1**4 + 0.9**4, 2 * 0.5**4, 0.9**4 + 0.1**4)]
    assert (
        f"probability 0.1, 0.5, 0.9: {', '.join(f'{more:.2f}' for more, _ in costs)} more groups"
        in found.says
    )
    assert f"a share of {', '.join(f'{left:.3f}' for _, left in costs)} stays" in found.says
    assert "in at most 3 rounds per step" in found.says and "p^4 + (1 - p)^4" in found.why
    assert fact("refill") is None


def test_the_explanation_says_the_overlong_buffer_in_tokens() -> None:
    found = fact("overlong", "--algorithm.overlong_buffer=0.2", "--rollout.max_new_tokens=100")
    assert found is not None
    assert found.says == "the reward of every completion falls beyond 80 tokens, by 1 at 100 tokens"
    assert found.why == "overlong_buffer = 0.2: the last 20 of 100 tokens"
    assert fact("overlong") is None


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("branches=2", ("rollout.branches = 2", "environment.episode", "rollout.branches = 1")),
        ("branches=3", ("rollout.samples_per_prompt = 8", "multiple of rollout.branches = 3")),
        ("branches=4 oversample=10", ("rollout.oversample = 10", "rollout.branches = 4")),
        ("branches=2 branch_turn=8", ("rollout.branch_turn = 8", "raise rollout.max_turns")),
    ],
)
def test_branches_that_cannot_part_are_refused(flags: str, named: tuple[str, ...]) -> None:
    asked = [f"--rollout.{flag}" for flag in flags.split()]
    if flags != "branches=2":
        asked.append("--environment.episode=calculator")
    told = refusal(*asked)
    assert all(name in told for name in named), told
    fine = ["--environment.episode=calculator", "--rollout.branches=8", "--rollout.branch_turn=0"]
    plan = make_plan(recipe(*fine))
    assert plan.trajectories == 64
    (fact,) = (fact for fact in facts(plan) if fact.topic == "branches")
    assert "1 episodes per task" in fact.says and "8 samples" in fact.says


@pytest.mark.parametrize("library", list(LIBRARIES))
def test_branches_of_another_librarys_environment_are_refused(library: str) -> None:
    episode = f"--environment.episode={library}:my_games.py:Maze"
    told = refusal(episode, "--rollout.branches=2")
    assert f"'{library}:my_games.py:Maze'" in told and "Use rollout.branches = 1" in told
    make_plan(recipe(episode, "--rollout.branches=1"))


@pytest.mark.parametrize("name", ["web", "web_shop"])
def test_branches_in_a_browser_are_refused(name: str) -> None:
    told = refusal(f"--environment.episode={name}", "--rollout.branches=2")
    assert f"environment.episode = '{name}'" in told and "rollout.branches = 1" in told
    assert "\n" not in told


def test_requested_and_resolved_values_are_separate() -> None:
    plan = make_plan(recipe("--algorithm.clip_high=0.2"))
    assert plan.recipe.algorithm.clip_low is None and plan.algorithm.clip_low == 0.2
    # 0.2 is also grpo's default, but it was requested
    assert asked_settings(plan.recipe) == [
        ("run.name", '"x"', '"run"'),
        ("algorithm.clip_high", "0.2", "the algorithm's own"),
    ]


@pytest.mark.parametrize("name", ["demo", "gsm8k", "reasoning_gym"])
def test_every_shipped_recipe_has_a_plan(name: str) -> None:
    plan = make_plan(load_recipe(name))
    assert name in explain(plan)
    assert plan.longest_tokens is not None, (
        "a shipped recipe bounds its lengths, so that its cache has a known size"
    )
