"""The memory plan against sums by hand, and what `explain` says of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen2Config, Qwen2ForCausalLM

from sixfold.errors import UserError
from sixfold.kernels.norms import fuse_norms
from sixfold.model import nf4
from sixfold.model.attention import NAME, register
from sixfold.recipe.explain import explain
from sixfold.recipe.explain import memory as memory_text
from sixfold.recipe.explain.memory import Device, memory_lines, parse_devices
from sixfold.recipe.memory import memory_of, what_helps
from sixfold.recipe.plan import make_plan
from sixfold.recipe.schema import LoraConfig
from sixfold.recipe.toml import load_recipe, parse_recipe
from sixfold.sizing import held as held_memory
from sixfold.sizing import work
from sixfold.sizing.held import adapter_parameters, holdings
from sixfold.sizing.memory import MemoryPlan
from sixfold.sizing.model_size import ModelSize, model_size
from sixfold.sizing.work import (
    TrainingPass,
    activation_bytes,
    kept_results,
    layer_bytes,
    layer_work_bytes,
)
from sixfold.trainer import fused_head, logprobs, tiled_head
from sixfold.trainer.checkpointing import Mode, apply_activation_checkpointing

QWEN = Path(__file__).parents[1] / "data" / "configs" / "qwen2.5-0.5b"
N = 494_032_768
SIZE = ModelSize(
    parameters=1000, layers=3, hidden=8, intermediate=20, heads=2, queries=16, keys=4, vocabulary=50
)


def memory(*flags: str, folder: Path = QWEN) -> MemoryPlan:
    recipe = load_recipe("gsm8k", [f"--model.path={folder}", *flags])
    plan = memory_of(make_plan(recipe))
    assert plan is not None
    return plan


def sizes(plan: MemoryPlan) -> dict[str, int]:
    return {part.name: part.size for part in plan.parts}


def lines(*flags: str, devices: list[Device] | None = None) -> str:
    plan = make_plan(load_recipe("gsm8k", [f"--model.path={QWEN}", *flags]))
    with patch("sixfold.recipe.explain.memory.find_devices", return_value=devices or []):
        return "\n".join(says for says, _ in memory_lines(plan))


def test_weights_and_all_that_is_held_with_them_by_hand() -> None:
    plain = sizes(memory())
    held = {"weights": 4 * N, "gradients": 4 * N, "AdamW moments": 8 * N, "engine's weights": 2 * N}
    assert held.items() <= plain.items()
    assert "reference" not in plain and "critic" not in plain and "sync copy" not in plain
    assert sizes(memory("--algorithm.beta=0.1"))["reference"] == 4 * N
    critic = sizes(memory("--algorithm.name=ppo"))
    assert (critic["critic"], critic["critic's moments"]) == (4 * N, 8 * N)
    assert "critic" not in sizes(memory("--algorithm.name=ppo", "--critic.body=policy"))
    small = memory("--algorithm.name=ppo", "--trainer.optimizer=adamw8bit")
    assert sizes(small)["critic's moments"] == sizes(small)["AdamW moments"] < 2.1 * N
    away = memory("--algorithm.name=ppo", "--trainer.offload=optimizer")
    assert away.host == 2 * 8 * N
    assert sizes(memory("--sync.kind=copy"))["sync copy"] == 4 * N
    single = sizes(memory("--run.precision=float32"))
    assert "engine's weights" not in single and "weights cast in a pass" not in single
    teacher = sizes(memory("--algorithm.beta=0.1", f"--reference.path={QWEN}"))
    assert teacher["reference"] == 4 * N


SEVEN = Path(__file__).parents[1] / "data" / "configs" / "qwen2.5-7b"
N7, TABLE7 = 7_615_616_512, 152_064 * 3584


def test_an_adapter_and_its_base_by_hand() -> None:
    """Qwen2.5-7B, rank 16: each layer has q and o (3584 x 3584), k and v (3584 x 512), gate, up
    and down (3584 x 18944). Embedding, biases and norms stay in float32.
    """
    trained = 28 * 16 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18_944))
    matrices = 28 * 3584 * (2 * 3584 + 2 * 512 + 3 * 18_944)
    flags = [f"--model.path={SEVEN}", "--model.lora.rank=16"]
    plan = memory_of(make_plan(load_recipe("gsm8k", flags)))
    assert plan is not None
    assert {
        "weights": 4 * N7,
        "adapter": 4 * trained,
        "gradients": 4 * trained,
        "AdamW moments": 8 * trained,
        "engine's weights": 2 * (N7 - TABLE7),
        "engine's adapter": 4 * trained,
        "head's gradient": 0,
    }.items() <= sizes(plan).items()
    flags += ["--model.lora.base=bfloat16", "--algorithm.beta=0.1"]
    plan = memory_of(make_plan(load_recipe("gsm8k", flags)))
    assert plan is not None
    lowered = sizes(plan)
    assert lowered["weights"] == 4 * N7 - 2 * (matrices + TABLE7)
    assert "engine's weights" not in lowered, "the engine reads the base"
    assert lowered["reference"] == 4 * trained
    assert lowered["weights cast in a pass"] == 0
    assert "critic" not in lowered
    plan = memory_of(make_plan(load_recipe("gsm8k", [*flags, "--algorithm.name=ppo"])))
    assert plan is not None
    critic = sizes(plan)
    assert (critic["critic"], critic["critic's moments"]) == (4 * trained, 8 * trained)
    plan = memory_of(make_plan(load_recipe("gsm8k", [*flags[:1], "--algorithm.name=ppo"])))
    assert plan is not None
    assert sizes(plan)["critic"] == 4 * (N7 - TABLE7), "a value model has no output head"


EXPERTS = {
    "model_type": "qwen3_moe", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128,
    "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 128, "num_experts_per_tok": 8,
    "mlp_only_layers": [1], "tie_word_embeddings": False, "max_position_embeddings": 4096,
}  # fmt: skip
"""Qwen3-30B-A3B's numbers of experts in 3 layers, of which the second has none."""


def test_experts_by_hand(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    free, measured, replayed = (
        memory("--rollout.prompts_per_step=2", f"--moe.routing={routing}", folder=tmp_path)
        for routing in ("free", "measure", "replay")
    )
    logits, index, layers, tokens = 4 * 128, 8 * 8, 2, 8192
    assert sizes(free)["routers"] == tokens * layers * (logits + index)
    assert sizes(measured)["routers"] == tokens * layers * (logits + index + 2 * 8)
    assert sizes(replayed)["routers"] == tokens * layers * (logits + 3 * index + 2 * 8)
    record = layers * 8
    assert measured.cache_token == replayed.cache_token == free.cache_token + record
    assert free.host == 0 and measured.host == 2 * 8 * 1024 * record
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS | {"num_experts": 300}))
    wide = memory("--moe.routing=measure", folder=tmp_path)
    assert wide.cache_token == free.cache_token + 2 * record, "two bytes above 256 experts"


@pytest.mark.parametrize(("mode", "layers"), [("none", 2), ("selective", 1), ("full", 1)])
def test_an_expert_group_gathers_less_and_exchanges_tokens(
    mode: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    flags = [f"--trainer.activation_checkpointing={mode}", "--moe.balance_loss=0.01"]
    plain = memory(*flags, folder=tmp_path)
    grouped = memory(*flags, "--parallel.experts=4", folder=tmp_path)
    experts = 2 * 128 * 3 * 64 * 32  # two of three layers have experts
    saved = (experts - experts // 4) / 3
    exchanged = 8192 * 8 * 64 * 4 * (layers + 2)
    assert sizes(grouped).keys() - sizes(plain).keys() == {"exchanged tokens"}
    assert sizes(grouped)["exchanged tokens"] == exchanged
    for name, value in sizes(plain).items():
        less = {"gathered weights": 2 * 2 * saved, "whole gradients": 2 * 6 * saved}.get(name, 0)
        assert sizes(grouped)[name] == pytest.approx(value - less, abs=16), name
    monkeypatch.delenv("WORLD_SIZE")
    assert "exchanged tokens" not in sizes(memory(*flags, folder=tmp_path))


@pytest.mark.parametrize(
    ("ranks", "flags", "helps"),
    [
        (8, [], True),
        (8, ["--parallel.replicas=8"], False),
        (3, [], False),
        (8, ["--trainer.optimizer=adamw8bit"], False),
        (8, ["--parallel.tensor=2"], False),
    ],
)
def test_explain_names_an_expert_group_that_the_run_can_have(
    ranks: int, flags: list[str], helps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    wide = {"moe_intermediate_size": 2048}  # more bytes than the tokens that are exchanged
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS | wide))
    plan = make_plan(load_recipe("gsm8k", [f"--model.path={tmp_path}", *flags]))
    found = memory_of(plan)
    assert found is not None and ("parallel.experts = 2" in dict(what_helps(plan, found))) == helps


def test_sft_of_all_weights_before_the_adapter_counts() -> None:
    short = "--trainer.max_tokens_per_microbatch=64"  # so that most of the memory is held

    def needed(*flags: str) -> tuple[int, int]:
        plan = memory_of(make_plan(load_recipe("demo_lora", [short, *flags])))
        assert plan is not None
        return plan.training, plan.sampling

    assert needed() == needed("--model.lora.rank=0")
    assert needed("--sft.steps=0") < needed()


def test_bytes_of_weights_and_state_by_hand() -> None:
    """Matrices take 2 bytes in bfloat16, norms and biases 4. A block of 256 8-bit moments has a
    float32 scale.
    """
    vectors = 24 * (2 * 896 + 896 + 2 * 128) + 896
    matrices = N - vectors
    half = memory("--trainer.weights=bfloat16")
    assert {
        "weights": 2 * matrices + 4 * vectors,
        "gradients": 4 * N,
        "master weights": 4 * matrices,
        "AdamW moments": 8 * N,
        "weights cast in a pass": 0,
    }.items() <= sizes(half).items()
    assert "engine's weights" not in sizes(half) and half.host == 0
    flags = ["--trainer.weights=bfloat16", "--trainer.rounding=stochastic"]
    lean = memory(*flags, "--trainer.optimizer=adamw8bit")
    assert "master weights" not in sizes(lean)
    assert sizes(lean)["AdamW moments"] == 2 * matrices * 260 // 256 + 8 * vectors
    away = memory("--trainer.weights=bfloat16", "--trainer.offload=optimizer")
    assert away.host == 4 * matrices + 8 * N
    assert half.training - away.training == away.host


def test_a_rank_holds_its_shard_and_gathers_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen2.5-7B on 8 ranks. Embedding and head are not tied."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    layer = (N7 - 2 * TABLE7) // 28
    flags = [f"--model.path={SEVEN}", "--engine.release_kv=true"]
    plan = memory_of(make_plan(load_recipe("gsm8k", flags)))
    assert plan is not None
    assert {
        "weights": N7 // 2,
        "gradients": N7 // 2,
        "AdamW moments": N7,
        "gathered weights": 4 * 2 * TABLE7 + 2 * 2 * layer,
        "whole gradients": 2 * 6 * layer,
        "sync copy": 4 * N7,
    }.items() <= sizes(plan).items()
    lowered = next(p for p in plan.parts if p.name == "engine's weights")
    assert lowered.size == 2 * (N7 - TABLE7) and not lowered.trains
    apart = memory_of(make_plan(load_recipe("gsm8k", [*flags, "--parallel.replicas=4"])))
    assert apart is not None and sizes(apart)["weights"] == 2 * N7
    grouped = memory_of(make_plan(load_recipe("gsm8k", [*flags, "--parallel.tensor=4"])))
    assert grouped is not None
    assert sizes(grouped)["weights"] == N7 // 2
    assert sizes(grouped)["gathered weights"] == 4 * 2 * TABLE7 + 2 * 2 * (layer // 4)
    assert sizes(grouped)["whole gradients"] == 2 * 6 * (layer // 4)
    whole_input = "--trainer.activation_checkpointing=full"  # the input of a layer is not divided
    for more, least, most in (((), 0.3, 0.7), ((whole_input,), 1.0, 1.0)):
        kept = []
        for group in ("1", "4"):
            words = [*flags, *more, f"--parallel.tensor={group}"]
            plan = memory_of(make_plan(load_recipe("gsm8k", words)))
            assert plan is not None
            kept.append(sizes(plan)["activations"])
        assert least <= kept[1] / kept[0] <= most


def test_a_context_group_divides_the_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the activations, a rank keeps its share, and keys that other ranks have computed."""
    alone = sizes(memory("--parallel.context=4"))
    assert alone == sizes(memory()), "one process has no groups"
    monkeypatch.setenv("WORLD_SIZE", "8")
    flags, none = ["--parallel.context=4"], "--trainer.activation_checkpointing=none"
    whole, divided = sizes(memory(none)), sizes(memory(none, *flags))
    assert 0.25 < divided["activations"] / whole["activations"] < 0.3
    same = ("weights", "gradients", "AdamW moments", "gathered weights", "logits")
    assert all(divided[name] == whole[name] for name in same)
    full = "--trainer.activation_checkpointing=full"
    kept = [sizes(memory(full, *more))["activations"] for more in ((), flags)]
    assert kept[0] == 4 * kept[1]
    tokens, keys = kept[0] // (4 * 896 * (24 + 2)), 128
    assert divided["gathered keys"] == 2 * 4 * tokens * keys and "gathered keys" not in whole
    plan = make_plan(load_recipe("gsm8k", [f"--model.path={QWEN}"]))
    found = memory_of(plan)
    assert found is not None and "parallel.context = 2" in dict(what_helps(plan, found))
    assert "4 of them compute the positions" in lines(*flags)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "parallel.context = 2" not in dict(what_helps(plan, found))


def test_ranks_share_an_adapter_out_and_hold_its_base_once(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--model.lora.rank=16", "--algorithm.name=ppo", "--algorithm.beta=0.1"]
    alone = sizes(memory(*flags))
    monkeypatch.setenv("WORLD_SIZE", "4")
    ranks = sizes(memory(*flags))
    assert ranks.keys() == alone.keys(), "nothing is gathered, and there is no sync copy"
    divided = {name for name in alone if ranks[name] < alone[name]}
    critic = {"critic", "critic's moments"}
    assert divided == {"adapter", "gradients", "AdamW moments", *critic}
    assert all(ranks[name] == alone[name] // (4 if name in divided else 1) for name in alone)


def test_reference_in_bfloat16_and_in_host_memory() -> None:
    beta = "--algorithm.beta=0.1"
    vectors = 24 * (2 * 896 + 896 + 2 * 128) + 896
    half = 2 * (N - vectors) + 4 * vectors
    assert sizes(memory(beta, "--reference.precision=bfloat16"))["reference"] == half
    assert sizes(memory(beta, "--trainer.weights=bfloat16"))["reference"] == half
    here, away = memory(beta), memory(beta, "--reference.offload=true")
    assert away.host == 4 * N and here.training - away.training == 4 * N
    assert here.sampling == away.sampling, "it is on the device while it scores"


def test_activations_in_host_memory_leave_one_layer() -> None:
    here, away = sizes(memory()), memory("--trainer.activation_offload=true")
    assert away.host == here["activations"]
    assert sizes(away)["activations on the GPU"] == here["activations"] // 24


def test_adapters_of_some_modules_and_their_magnitudes() -> None:
    size = model_size(json.loads((QWEN / "config.json").read_text()))
    assert size is not None
    some = LoraConfig(rank=4, targets=("q_proj", "down_proj"), dora=True)
    each = 4 * (896 + 896) + 896 + 4 * (4864 + 896) + 896
    assert adapter_parameters(some, size) == 24 * each
    assert adapter_parameters(some, replace(size, linears=None)) is None


def test_a_layer_by_hand() -> None:
    """float32: two norms' inputs, their results, q, the result of attention, k and v, four of the
    MLP; lse and two inverse deviations.
    """
    full, half = (TrainingPass(tokens=10, width=width) for width in (4, 2))
    layer = 4 * (4 * 8 + 2 * 16 + 2 * 4 + 4 * 20 + 2 + 2)
    assert layer_bytes(SIZE, full) == layer
    lowered = layer_bytes(SIZE, half)
    assert lowered == 4 * (2 * 8 + 2 + 2) + 2 * (5 * 8 + 2 * 16 + 2 * 4 + 4 * 20)
    assert layer_bytes(SIZE, replace(half, keys=1.5)) - lowered == 2 * 4
    # On a CPU: the mask of a query, and a copy of its result.
    assert layer_bytes(SIZE, replace(half, masked=30)) - lowered == 2 * (30 + 16)
    assert kept_results(SIZE, half) == 2 * (2 * 16 + 2 * 4 + 2 * 8 + 2 * 20) + 4 * 2
    kept, again = replace(full, mode="selective"), replace(full, mode="full")
    assert activation_bytes(SIZE, full) == 10 * (3 * layer + 2 * 32)
    assert activation_bytes(SIZE, again) == 10 * (3 * 32 + 2 * 32)
    assert activation_bytes(SIZE, kept) == 10 * (3 * (32 + kept_results(SIZE, full)) + 2 * 32)
    assert layer_work_bytes(SIZE, full) == 10 * 2 * 4 * 20
    assert layer_work_bytes(SIZE, again) == 10 * (layer + 2 * 4 * 20)
    assert layer_work_bytes(SIZE, kept) == 10 * (layer - 4 * (2 * 20 + 16 + 4) + 2 * 4 * 20)


TINY = Qwen2Config(
    vocab_size=40,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=3,
    num_attention_heads=16,
    num_key_value_heads=4,
    tie_word_embeddings=True,
)


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_forward_pass_keeps_what_the_formula_says(mode: Mode, precision: torch.dtype) -> None:
    """Counted: every storage that is alive after the forward pass and was not before."""
    register()
    torch.manual_seed(0)
    model, tokens = Qwen2ForCausalLM(TINY).eval(), 256
    model.set_attn_implementation(NAME)
    fuse_norms(model)
    apply_activation_checkpointing(model, mode)
    ids, places = torch.randint(40, (1, tokens)), torch.arange(tokens)[None]
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision is torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record, autocast:
        out = model.model(input_ids=ids, position_ids=places, use_cache=False)
    assert out.last_hidden_state.requires_grad
    alive = sum(
        e.nbytes() for e in record.profiler.kineto_results.events() if e.name() == "[memory]"
    )
    size = model_size(TINY.to_dict())
    assert size is not None
    width = precision.itemsize
    cast = (
        2 * (size.parameters - 40 * 256 - 7 * 256 - 3 * 384) if width == 2 and mode == "none" else 0
    )
    planned = activation_bytes(size, TrainingPass(tokens, width, mode)) + cast
    assert planned == pytest.approx(alive, rel=0.1)


def test_casts_last_as_long_as_something_reads_them() -> None:
    """The embedding is not cast. Without checkpointing casts stay until the backward pass; with it
    they are gone when the loss has its tables.
    """
    head = 151_936 * 896
    unkept = sizes(memory())["weights cast in a pass"]
    kept = sizes(memory("--trainer.activation_checkpointing=none"))["weights cast in a pass"]
    assert (unkept, kept) == (2 * head, 2 * head + 2 * (N - head))


def test_a_large_models_casts_are_the_peak_of_the_forward_pass() -> None:
    recipe = load_recipe(
        "gsm8k",
        [
            "--trainer.logprob_chunk=16",
            "--trainer.max_tokens_per_microbatch=16",
            "--rollout.max_new_tokens=16",
        ],
    )
    size = ModelSize(
        parameters=10**9,
        layers=10,
        hidden=8,
        intermediate=20,
        heads=2,
        queries=16,
        keys=4,
        vocabulary=50,
    )
    held = holdings(recipe, size)
    assert held is not None
    parts = {part.name: part.size for part in work.work_parts(recipe, size, held, 16, None)}
    later = parts["logits"] + parts["head's gradient"] + parts["backward pass of a layer"]
    forward = 2 * (10**9 - 400) + 3 * 4 * 16 * 50
    assert parts["forward pass of the head"] == forward - later > 10**9


def test_logits_by_hand() -> None:
    assert (work.TABLE, work.SMALL) == (logprobs.TABLE, logprobs.SMALL)
    assert (work.TILE_ROWS, work.TILE_COLUMNS) == (
        tiled_head.ROWS,
        tiled_head.COLUMNS,
    )
    assert (work.SLICE, work.ENTROPY_TABLE) == (
        fused_head.SLICE,
        fused_head.ENTROPY_TABLE,
    )
    assert (work.NF4_SLICE, held_memory.BLOCK_NF4) == (nf4.SLICE, nf4.BLOCK)
    table = 4 * 441 * 151_936
    assert sizes(memory())["logits"] == 3 * table // 2, "and their bfloat16 cast, on a GPU"
    assert sizes(memory("--run.precision=float32"))["logits"] == table
    assert sizes(memory("--trainer.logprob_chunk=100"))["logits"] == 6 * 100 * 151_936
    small = sizes(memory("--trainer.logprob_chunk=16"))
    assert small["logits"] == 4 * 4 * 16 * 151_936, "left to autograd"
    assert small["head's gradient"] == 2 * 4 * 151_936 * 896
    assert sizes(memory())["head's gradient"] == 4 * 151_936 * 896 + 4 * 2**24
    assert sizes(memory())["sampler's logits"] == 3 * 4 * 256 * 151_936


def test_a_shared_prompt_is_kept_once_for_each_completion() -> None:
    recipe = load_recipe("gsm8k")
    assert work.training_pass(recipe, 512).keys == (512 + 8 * 1024) / (512 + 8 * 512)
    alone = recipe.model_copy(
        update={"trainer": recipe.trainer.model_copy(update={"share_prefix": False})}
    )
    assert work.training_pass(alone, 512).keys == 1


def test_the_cache_is_what_is_left_and_one_sequence_at_least() -> None:
    plan = memory()
    assert (plan.cache_wanted, plan.cache_least, plan.cache_token) == (
        256 * 1024,
        1024,
        2 * 24 * 2 * 64 * 2,
    )
    total = 10 * (plan.training + 1024 * plan.cache_token) // 9 + 10
    assert plan.cache_that_fits(total) == 1024
    assert plan.cache_that_fits(total - plan.cache_token * 2) is None
    assert plan.cache_that_fits(80 * 10**9) == plan.cache_wanted
    assert plan.cache_that_fits(80 * 10**9, free=10**10) is None
    fixed = memory("--engine.kv_tokens=100000")
    assert fixed.cache_least == fixed.cache_wanted == 100_000
    assert fixed.needed(100_000) == fixed.training + 100_000 * plan.cache_token
    released = memory("--engine.kv_tokens=100000", "--engine.release_kv=true")
    assert released.needed(100_000) == max(
        released.training, released.sampling + 100_000 * plan.cache_token
    )


def test_explain_says_which_cards_hold_the_run() -> None:
    shown = lines()
    assert (
        "weights: 2.0 GB" in shown
        and "24 GB: fits" in shown
        and "80 GB: fits" in shown
        and "to fit on" not in shown
    )
    large = lines(
        "--trainer.max_tokens_per_microbatch=65536", "--trainer.activation_checkpointing=none"
    )
    assert "24 GB: does not fit; 40 GB: does not fit; 80 GB: does not fit" in large
    assert "to fit on 24 GB: trainer.activation_offload = true" in large
    assert "trainer.activation_checkpointing = 'full'" in large
    here = lines(devices=[Device(0, 10**10, 24 * 10**9)])
    assert "GPU 0, 10.0 GB of 24.0 GB free: does not fit" in here and "to fit on GPU 0" in here
    other = lines(
        "--run.device=cuda:1", devices=[Device(0, 1, 2), Device(1, 80 * 10**9, 80 * 10**9)]
    )
    assert "GPU 1" in other and "GPU 0" not in other


@pytest.mark.parametrize(
    ("visible", "described"), [("2,0", "GPU 2"), ("0", "GPU 0"), ("", None), ("GPU-8932", None)]
)
def test_explain_describes_the_gpu_that_cuda_shows_the_run(
    visible: str, described: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    shown = lines(devices=[Device(0, 10**10, 24 * 10**9), Device(2, 10**10, 24 * 10**9)])
    assert ([f"GPU {n}" for n in (0, 2) if f"GPU {n}," in shown] or [None]) == [described]


def test_settings_that_help_come_largest_first_and_really_help() -> None:
    flags = [
        "--run.precision=float32",
        "--sync.kind=copy",
        "--algorithm.name=ppo",
        "--trainer.activation_checkpointing=none",
    ]
    plan = make_plan(load_recipe("gsm8k", [f"--model.path={QWEN}", *flags]))
    before = memory_of(plan)
    assert before is not None
    helps = what_helps(plan, before)
    names, saved = [name.split(" = ")[0] for name, _ in helps], [size for _, size in helps]
    assert saved == sorted(saved, reverse=True) and min(saved) > 0
    wanted = {
        "run.precision",
        "trainer.activation_checkpointing",
        "trainer.max_tokens_per_microbatch",
        "critic.body",
        "sync.kind",
    }
    assert wanted <= set(names)


@pytest.mark.parametrize(
    ("flags", "helps"),
    [
        ([], {"model.lora.base = 'bfloat16'", "model.lora.base = 'nf4'"}),
        (
            ["--model.lora.base=bfloat16", "--trainer.activation_checkpointing=full"],
            {"model.lora.base = 'nf4'"},
        ),
        (["--model.lora.base=nf4"], set()),
        (["--model.lora.dora=true", "--sync.kind=copy"], {"model.lora.base = 'bfloat16'"}),
        (
            ["--run.precision=float32"],
            {
                f"model.lora.base = '{base}' with run.precision = 'bfloat16'"
                for base in ("bfloat16", "nf4")
            },
        ),
    ],
)
def test_a_smaller_base_of_an_adapter_helps_where_the_run_can_have_it(
    flags: list[str], helps: set[str]
) -> None:
    given = [f"--model.path={SEVEN}", "--model.lora.rank=16", *flags]
    plan = make_plan(load_recipe("gsm8k", given))
    before = memory_of(plan)
    assert before is not None
    found = {name for name, _ in what_helps(plan, before) if name.startswith("model.lora")}
    assert found == helps
    if "--trainer.activation_checkpointing=full" in flags:  # of 7B on 24 GB, nf4 makes it fit
        shown = "\n".join(says for says, _ in memory_lines(plan))
        assert "24 GB: does not fit" in shown
        assert "to fit on 24 GB: model.lora.base = 'nf4'" in shown
        flags = [given[0], given[1], *flags[1:], "--model.lora.base=nf4"]
        smaller = make_plan(load_recipe("gsm8k", flags))
        assert "24 GB: fits" in "\n".join(says for says, _ in memory_lines(smaller))


def test_a_model_without_known_sizes_is_said_to_be_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert (
        "GPU memory" in explain(make_plan(load_recipe("gsm8k")))
        and memory_of(make_plan(load_recipe("gsm8k"))) is None
    )
    (missing, remedy), *_ = memory_lines(make_plan(load_recipe("gsm8k")))
    assert "Qwen/Qwen2.5-0.5B-Instruct" in missing and "hf download Qwen/Qwen2.5-0.5B" in remedy
    teacher = make_plan(
        parse_recipe(
            'run.name = "x"', "x.toml", ["--algorithm.beta=0.1", "--reference.path=owner/name"]
        )
    )
    assert memory_of(teacher) is None
    (missing, _), *_ = memory_lines(teacher)
    assert "owner/name" in missing


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        (["--algorithm.beta=0.1"], "reference.path"),
        (["--engine.speculation.kind=draft"], "engine.speculation.path"),
    ],
)
def test_wrong_path_of_another_model_is_refused_by_its_own_setting(
    flags: list[str], setting: str
) -> None:
    plan = make_plan(load_recipe("demo", [*flags, f"--{setting}=no/such/folder"]))
    with pytest.raises(UserError) as error:
        memory_of(plan)
    assert str(error.value).startswith(f"{setting}: no folder")


def test_an_earlier_download_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "models--Qwen--Qwen2.5-0.5B-Instruct"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text((QWEN / "config.json").read_text())
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert make_plan(load_recipe("gsm8k")).model.parameters == N
    (folder / "snapshots" / "abc" / "config.json").write_text("[]")
    assert make_plan(load_recipe("gsm8k")).model.parameters is None


def test_the_list_of_nvidia_smi() -> None:
    assert parse_devices("0, 1000, 24564\n1, [N/A], 5\n\nNo devices\n2, 7, 8\n") == [
        Device(0, 1000 << 20, 24564 << 20),
        Device(2, 7 << 20, 8 << 20),
    ]


def test_a_missing_or_failing_nvidia_smi_is_no_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert memory_text.find_devices() == []
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    assert memory_text.find_devices() == []
    tool.write_text("#!/bin/sh\necho '0, 10, 20'\n")
    assert memory_text.find_devices() == [Device(0, 10 << 20, 20 << 20)]


RECIPES = {"gsm8k": [f"--model.path={QWEN}"], "demo": [], "reasoning_gym": []}


def documented() -> str:
    """The table of docs/memory.md: MB of every part of the shipped recipes."""
    plans = []
    for name, flags in RECIPES.items():
        plan = memory_of(make_plan(load_recipe(name, flags)))
        assert plan is not None
        plans.append(plan)
    columns = [
        sizes(p)
        | {
            "KV cache, as wanted": p.cache_wanted * p.cache_token,
            "peak": p.needed(p.cache_wanted),
        }
        for p in plans
    ]
    lines = ["| MB | " + " | ".join(RECIPES) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in columns[0]:
        lines.append(
            f"| {row} | " + " | ".join(f"{c.get(row, 0) / 1e6:,.1f}" for c in columns) + " |"
        )
    return "\n".join(lines)


def test_the_documented_table_is_the_plans() -> None:
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
    assert documented() in page, documented()


def test_the_shipped_gpu_recipe_fits_on_its_card() -> None:
    plan = memory()
    fits = plan.cache_that_fits(24 * 10**9)
    assert fits is not None and fits >= 128 * plan.sequence, "a step's 128 completions run at once"
