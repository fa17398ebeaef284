"""Training of an adapter: PEFT's modules on a shared, frozen base; bad targets are refused."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from tests.models.experts import expert_model
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.batch import Batch, LossOutput, collate, filled
from sixfold.engine.engine import Engine
from sixfold.errors import UserError
from sixfold.model.causal_lm import CausalLM, Segments, head_logits, hidden_states
from sixfold.model.merge import merge_into
from sixfold.model.trained_lora import TrainedLora, add_lora
from sixfold.model.weights_hash import weights_hash
from sixfold.recipe.adapter_folder import Base
from sixfold.recipe.schema import LoraConfig, TrainerConfig
from sixfold.reference.frozen import FrozenReference, FusedReference
from sixfold.sync.adapter import AdapterSync
from sixfold.sync.sync import CopySync, SyncError
from sixfold.trainer.logprobs import PolicyRoot, Scoring, score_batch
from sixfold.trainer.trainer import Trainer
from sixfold.types import Group, Reward, SamplingParams, Task, Trajectory, Turn

Tiny = Callable[[str], PreTrainedModel]
TOKENS = torch.arange(2, 12)
SCORING = Scoring(chunk=16)


def adapted(
    model: PreTrainedModel,
    architecture_targets: tuple[str, ...] = ("all-linear",),
    **settings: object,
) -> TrainedLora:
    config = LoraConfig(rank=4, alpha=8.0, targets=architecture_targets, **settings)  # type: ignore[arg-type]
    return add_lora(copy.deepcopy(model), config, Base("base"), seed=3)


def moved(lora: TrainedLora, seed: int = 0) -> TrainedLora:
    """Replace the adapter by random matrices that change the outputs, as training would."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in lora.weights().items():
            if "magnitude" in name:
                p.mul_(torch.empty(p.shape).uniform_(0.7, 1.4, generator=rng))
            else:
                p.normal_(0, 0.1, generator=rng)
    return lora


@torch.no_grad()
def logp(model: PreTrainedModel) -> Tensor:
    positions = torch.arange(len(TOKENS))
    layout = Segments(((0, len(TOKENS)),))
    return head_logits(model, hidden_states(model, TOKENS, positions, layout)).log_softmax(-1)


def batch() -> Batch:
    rng = torch.Generator().manual_seed(5)

    def trajectory(task: str, sample: int) -> Trajectory:
        tokens = torch.randint(2, 60, (9,), generator=rng).tolist()
        reward = Reward(float(torch.rand((), generator=rng)))
        logp, version = [0.0] * 3 + [-2.0] * 6, [-1] * 3 + [0] * 6
        turns = (Turn(3, 9),)
        return Trajectory(task, sample, tokens, "pppssssss", logp, version, turns, reward=reward)

    made = collate([Group(Task(t, "?"), [trajectory(t, k) for k in range(2)]) for t in ("a", "b")])
    return made.with_(weights=made.mask / made.mask.sum())


def test_an_adapter_that_has_not_been_trained_leaves_the_weights_of_its_base(tiny: Tiny) -> None:
    """So samples of a policy are on-policy for a stage that trains an adapter on it."""
    model = tiny("qwen3")
    lora = adapted(model)
    assert lora.adds_nothing() and not moved(lora).adds_nothing()
    assert weights_hash(lora.base.state_dict()) == weights_hash(model.state_dict())
    assert not adapted(model, dora=True).adds_nothing()


def loss(batch: Batch, logp: Tensor) -> LossOutput:
    scored = logp * batch.scores[:, None] * filled(batch.weights, "weights")
    return LossOutput(-torch.where(batch.mask, scored, 0.0).sum())


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gpt2", "minigpt", "qwen3_moe"])
@pytest.mark.parametrize("dora", [False, True])
def test_a_new_adapter_changes_no_output(tiny: Tiny, architecture: str, dora: bool) -> None:
    plain = tiny(architecture)
    lora = adapted(plain, dora=dora)
    assert torch.equal(logp(lora.model), logp(plain))
    assert torch.equal(logp(lora.base), logp(plain))


def test_the_base_exists_once_and_only_the_adapter_trains(tiny: Tiny) -> None:
    lora = adapted(tiny("qwen3"))
    base = {p.data_ptr() for p in lora.base.parameters()}
    own = {p.data_ptr() for n, p in lora.model.named_parameters() if ".lora_" not in n}
    assert own == base
    trained = [p for p in lora.model.parameters() if p.requires_grad]
    assert {id(p) for p in trained} == {id(p) for p in lora.weights().values()}
    assert len(trained) == 2 * 7 * 2  # two matrices, seven linear modules, two layers
    assert not any(p.requires_grad for p in lora.base.parameters())


def test_a_seed_decides_the_new_adapter(tiny: Tiny) -> None:
    before = torch.random.get_rng_state()
    a, b = (adapted(tiny("qwen3")).weights() for _ in range(2))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert torch.equal(torch.random.get_rng_state(), before)
    other = add_lora(copy.deepcopy(tiny("qwen3")), LoraConfig(rank=4), Base("base"), seed=4)
    assert not torch.equal(*(w["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"]
                             for w in (a, other.weights())))  # fmt: skip


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "minigpt", "qwen3_moe"])
@pytest.mark.parametrize("settings", [{}, {"rslora": True}, {"dora": True}])
def test_merged_weights_equal_the_adapter(
    tiny: Tiny, architecture: str, settings: dict[str, bool]
) -> None:
    lora = moved(adapted(tiny(architecture), **settings))
    merged = copy.deepcopy(lora.base)
    merge_into(merged, lora.adapter())
    assert (logp(merged) - logp(lora.model)).abs().max() <= 1e-5
    assert (logp(lora.base) - logp(lora.model)).abs().max() > 0.05


@pytest.mark.parametrize("settings", [{}, {"rslora": True}, {"dora": True}])
def test_peft_loads_the_saved_adapter_with_the_same_log_probs(
    tiny: Tiny, tmp_path: Path, settings: dict[str, bool]
) -> None:
    lora = moved(adapted(tiny("qwen3"), **settings))
    lora.save(tmp_path)
    loaded = PeftModel.from_pretrained(copy.deepcopy(lora.base), str(tmp_path))
    theirs = loaded.get_base_model()
    assert torch.equal(logp(theirs), logp(lora.model))
    merged = loaded.merge_and_unload()
    ours = copy.deepcopy(lora.base)
    merge_into(ours, lora.adapter())
    for (name, mine), (_, other) in zip(
        ours.named_parameters(), merged.named_parameters(), strict=True
    ):
        torch.testing.assert_close(mine, other, msg=name, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"dora": True}])
def test_a_saved_adapter_is_loaded_bit_for_bit(
    tiny: Tiny, tmp_path: Path, settings: dict[str, bool]
) -> None:
    lora = moved(adapted(tiny("qwen3"), **settings))
    lora.save(tmp_path)
    again = add_lora(copy.deepcopy(tiny("qwen3")), lora.config, Base("b"), 9, str(tmp_path))
    ours, theirs = again.weights(), lora.weights()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"rank": 2}, "model.lora.rank = 2.*has 4"),
        ({"alpha": 4.0}, "model.lora.alpha = 4.*has 8"),
        ({"rslora": True}, "model.lora.rslora = true.*has false"),
        ({"dora": True}, "model.lora.dora = true.*has false"),
        ({"targets": ("q_proj",)}, "model.lora.targets"),
    ],
)
def test_a_saved_adapter_of_other_settings_is_refused(
    tiny: Tiny, tmp_path: Path, changed: dict[str, object], named: str
) -> None:
    lora = adapted(tiny("qwen3"))
    lora.save(tmp_path)
    config = lora.config.model_copy(update=changed)
    with pytest.raises(UserError, match=named):
        add_lora(copy.deepcopy(tiny("qwen3")), config, Base("b"), 9, str(tmp_path))


@pytest.mark.parametrize("settings", [{}, {"dora": True}])
def test_gradients_equal_those_of_peft_run_by_hand(
    tiny: Tiny, tmp_path: Path, settings: dict[str, bool]
) -> None:
    """Packed rows with a shared prompt and chunks are compared with a forward pass per row."""
    lora, rows = moved(adapted(tiny("qwen3"), **settings)), batch()
    lora.save(tmp_path)
    config = TrainerConfig(max_tokens_per_microbatch=16)
    trainer = Trainer(PolicyRoot(lora.model), config, SCORING, 1)
    trainer._accumulate(rows.with_host(), [[0, 1], [2, 3]], loss)

    plain = copy.deepcopy(tiny("qwen3"))
    plain.set_attn_implementation("eager")
    peft = PeftModel.from_pretrained(plain, str(tmp_path), is_trainable=True)
    scored = torch.zeros(rows.tokens.shape)
    for row, tokens in enumerate(rows.tokens):
        logits = peft(tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        scored[row, 1:] = logits.gather(-1, tokens[1:, None])[:, 0]
    loss(rows, scored).loss.backward()
    theirs = {
        n.replace(".default", ""): p.grad for n, p in peft.named_parameters() if p.requires_grad
    }
    for name, p in lora.weights().items():
        other = theirs.get(name, theirs.get(name + ".weight"))
        assert p.grad is not None and other is not None and other.abs().max() > 0
        assert (p.grad - other).norm() <= 1e-5 * other.norm() + 1e-8, name
    assert all(p.grad is None for p in lora.base.parameters())


def test_a_step_moves_the_adapter_alone(tiny: Tiny) -> None:
    lora = moved(adapted(tiny("qwen3")))
    base = [p.detach().clone() for p in lora.base.parameters()]
    trainer = Trainer(PolicyRoot(lora.model), TrainerConfig(learning_rate=1e-2), SCORING, 1)
    before = {name: p.detach().clone() for name, p in lora.weights().items()}
    trainer.train_step(batch(), loss)
    assert all(not torch.equal(before[n], p) for n, p in lora.weights().items())
    assert all(torch.equal(a, b) for a, b in zip(base, lora.base.parameters(), strict=True))
    moments = {name for name in trainer.tensors() if "exp_avg/" in name}
    assert len(moments) == len(before)


@pytest.mark.parametrize("kind", [FrozenReference, FusedReference])
def test_the_reference_is_the_model_with_the_adapter_off(tiny: Tiny, kind: type) -> None:
    """It is exact, whatever the adapter has learned. The reference saves and trains nothing."""
    lora = moved(adapted(tiny("qwen3")))
    limits = () if kind is FusedReference else (64, True)
    reference = kind(lora.base, SCORING, *limits, base=lora.base)
    assert torch.equal(logp(reference.model), logp(tiny("qwen3")))
    storage = {p.data_ptr() for p in lora.base.parameters()}
    assert {p.data_ptr() for p in reference.model.parameters()} == storage
    assert reference.tensors() == {}
    if kind is FrozenReference:
        off = score_batch(copy.deepcopy(tiny("qwen3")), batch(), SCORING, 64, True)
        assert torch.equal(filled(reference.score(batch()).ref_logp, "ref_logp"), off)


def test_a_reference_may_have_an_adapter_of_its_own_on_the_same_base(tiny: Tiny) -> None:
    lora = moved(adapted(tiny("qwen3")))
    reference = FrozenReference(lora.model, SCORING, 64, True, base=lora.base)
    then = logp(lora.model)
    moved(lora, seed=1)
    assert torch.equal(logp(reference.model), then)
    assert reference.tensors().keys() == {
        n for n, _ in lora.model.named_parameters() if ".lora_" in n
    }
    shared = {p.data_ptr() for p in lora.base.parameters()}
    assert shared < {p.data_ptr() for p in reference.model.parameters()}
    reference.reset(lora.model)
    assert torch.equal(logp(reference.model), logp(lora.model))
    trainer = Trainer(PolicyRoot(lora.model), TrainerConfig(), SCORING, 1)
    reference.check_apart(trainer.optimizer)


def engine_of(model: PreTrainedModel) -> Engine:
    return Engine(CausalLM(model), kv_tokens=400, block_size=8)


def sampled(engine: Engine) -> tuple[list[int], list[float], list[int]]:
    engine.add("t", TOKENS.tolist(), SamplingParams(max_tokens=8), [0])
    done = engine.run()[0]
    return done.tokens, done.logp, done.version


def trainers_logp(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        layout = Segments(((0, len(tokens)),))
        hidden = hidden_states(model, torch.tensor(tokens), torch.arange(len(tokens)), layout)
        table = head_logits(model, hidden[:-1]).log_softmax(-1)
    return table.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "minigpt", "qwen3_moe"])
def test_the_engine_samples_from_the_trained_adapter(tiny: Tiny, architecture: str) -> None:
    lora = adapted(tiny(architecture))
    engine = engine_of(lora.base)
    sync = AdapterSync(lora, engine)
    before = sampled(engine)
    plain = engine_of(copy.deepcopy(tiny(architecture)))
    assert before[:2] == sampled(plain)[:2] and before[2] == [0] * 8
    moved(lora)
    sync.sync(1)
    tokens, logps, versions = sampled(engine)
    assert versions == [1] * 8
    theirs = trainers_logp(lora.model, tokens)[len(TOKENS) - 1 :]
    assert (torch.tensor(logps) - theirs).abs().max() <= 1e-5
    assert (torch.tensor(logps) - torch.tensor(before[1])).abs().max() > 1e-3
    sync.sync(1)  # a step without an update
    assert sampled(engine)[1] == logps


def test_the_prefix_cache_of_an_earlier_adapter_is_not_used(tiny: Tiny) -> None:
    lora = moved(adapted(tiny("qwen3")))
    engine = engine_of(lora.base)
    sync = AdapterSync(lora, engine)
    sampled(engine)
    moved(lora, seed=1)
    sync.sync(1)
    engine.add("t", TOKENS.tolist(), SamplingParams(max_tokens=1), [0])
    done = []
    while engine.busy:
        done += engine.step()
    assert done[0].reused == 0


def test_a_sync_of_a_non_finite_matrix_keeps_the_old_adapter(tiny: Tiny) -> None:
    lora = moved(adapted(tiny("qwen3")))
    engine = engine_of(lora.base)
    sync = AdapterSync(lora, engine)
    before = sampled(engine)
    name, p = next(iter(lora.weights().items()))
    with torch.no_grad():
        p[0, 0] = torch.nan
    with pytest.raises(SyncError, match=r"lora_A of .* is not finite"):
        sync.sync(1)
    assert sampled(engine) == before, name


def test_a_base_that_is_no_longer_shared_is_refused(tiny: Tiny) -> None:
    lora = adapted(tiny("qwen3"))
    engine = engine_of(copy.deepcopy(lora.base))
    with pytest.raises(SyncError, match="no longer shared"):
        AdapterSync(lora, engine)


@pytest.mark.parametrize("settings", [{}, {"dora": True}])
@pytest.mark.parametrize("form", ["copy", "int8"])
def test_an_engine_with_its_own_weights_gets_merged_ones(
    tiny: Tiny, settings: dict[str, bool], form: str
) -> None:
    lora = moved(adapted(tiny("qwen3"), **settings))
    engine = engine_of(copy.deepcopy(lora.base))
    sync = CopySync(lora.model, engine, 1, form, lora)
    sync.sync(1)
    tokens, logps, versions = sampled(engine)
    assert versions == [1] * 8
    theirs = trainers_logp(lora.model, tokens)[len(TOKENS) - 1 :]
    off = (torch.tensor(logps) - theirs).abs().max()
    assert off <= 1e-5 if form == "copy" else 1e-4 < off < 0.5


@pytest.mark.parametrize(
    ("targets", "named"),
    [
        (("q_prj",), "'q_prj' is no module.*Did you mean 'q_proj'"),
        (("c_attn",), "Use some of down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj$"),
        (("embed_tokens",), "'embed_tokens' is a module of class Embedding"),
        (("lm_head",), "'lm_head'.*not supported.*attention and MLP"),
    ],
)
def test_targets_that_cannot_get_an_adapter_are_refused(
    tiny: Tiny, targets: tuple[str, ...], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        adapted(tiny("qwen3"), targets)


def test_a_rank_larger_than_a_module_is_refused(tiny: Tiny) -> None:
    config = LoraConfig(rank=65)
    with pytest.raises(UserError, match=r"model.lora.rank = 65 .*64 outputs.*at most 64"):
        add_lora(copy.deepcopy(tiny("qwen3")), config, Base("b"), 0)


def test_without_peft_the_extra_is_named(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"pip install 'sixfold\[lora\]'"):
        adapted(tiny("qwen3"))


def test_a_bfloat16_base_gives_the_bits_of_a_float32_one_under_autocast(tiny: Tiny) -> None:
    from sixfold.model.trained_lora import lower_linears

    exact = moved(adapted(tiny("qwen3")))
    small = moved(adapted(tiny("qwen3")))
    lower_linears(small.base, torch.bfloat16)
    assert small.model.get_submodule("model.layers.0.mlp.up_proj").weight.dtype == torch.bfloat16
    assert small.base.get_input_embeddings().weight.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = logp(small.model), logp(exact.model)
    assert torch.equal(ours, theirs)


def test_peft_made_by_hand_has_the_same_modules(tiny: Tiny) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = get_peft_model(
            copy.deepcopy(tiny("qwen3")), PeftConfig(r=4, target_modules="all-linear")
        )
    theirs = {n.replace(".default", "") for n, p in made.named_parameters() if p.requires_grad}
    assert theirs == adapted(tiny("qwen3")).weights().keys()


@torch.no_grad()
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe", "jetmoe", "phimoe"])
def test_all_linear_of_a_mixture_of_experts_is_what_peft_loads(family: str, tmp_path: Path) -> None:
    """Families with dense layers beside stacked experts, gates with one output, and routers that
    are linear modules.
    """
    lora = moved(adapted(expert_model(family)))
    lora.save(tmp_path)
    again = PeftModel.from_pretrained(expert_model(family), str(tmp_path)).eval()
    kept = dict(again.named_parameters())
    for name, p in lora.weights().items():
        assert torch.equal(kept[name.replace(".weight", ".default.weight")], p)


def test_targets_that_peft_takes_for_stacked_experts_are_refused() -> None:
    with pytest.raises(UserError, match=r"model.lora.targets = \['gate_proj'\].*stacked experts"):
        adapted(expert_model("deepseek_v3"), ("gate_proj",))
