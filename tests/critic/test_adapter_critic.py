"""A critic with an adapter of its own: equal to a critic with merged weights, apart from the
policy, and on the same base.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tests.critic.critics import (
    make_actor,
    make_critic,
    policy_gradient,
    ragged,
    randomise_head,
    settings,
    squared_error,
)
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, PreTrainedModel

from sixfold.algorithm.composed import make_algorithm
from sixfold.algorithm.zoo import ZOO
from sixfold.batch import Batch
from sixfold.critic.actor_critic import ActorCritic
from sixfold.critic.critic import Critic
from sixfold.critic.value_model import AdapterValueModel
from sixfold.model.merge import merge_into
from sixfold.model.scalar_head import scalar_head
from sixfold.model.trained_lora import TrainedLora, add_lora, lower_base
from sixfold.recipe.adapter_folder import Base
from sixfold.recipe.schema import CriticConfig, LoraConfig
from sixfold.trainer.logprobs import PolicyRoot, Scoring
from sixfold.trainer.trainer import Trainer

Tiny = Callable[[str], PreTrainedModel]


def moved(parameters: Iterator[nn.Parameter], seed: int) -> None:
    """Move parameters away from their start, where an adapter changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in parameters:
            if p.requires_grad:
                p.copy_(0.2 * torch.randn(p.shape, generator=generator))


def adapted(model: PreTrainedModel, base: str = "float32", **values: object) -> TrainedLora:
    """A policy with an adapter that changes its outputs, on a copy of the model."""
    config = LoraConfig.model_validate({"rank": 4, "alpha": 8.0, "base": base, **values})
    model = copy.deepcopy(model)
    lower_base(model, base)
    lora = add_lora(model, config, Base("", ""), 0)
    moved(lora.model.parameters(), 1)
    return lora


def critic_of(
    lora: TrainedLora, rate: float = 1e-2, precision: torch.dtype | None = None
) -> Critic:
    return Critic(
        PolicyRoot(lora.model),
        CriticConfig(learning_rate=rate),
        settings(),
        Scoring(chunk=16, autocast=precision),
        100,
        lora=lora,
    )


def inside(critic: Critic) -> AdapterValueModel:
    assert isinstance(critic.model, AdapterValueModel)
    return critic.model


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def first_moments(critic: Critic) -> dict[str, Tensor]:
    """Gradients of one update: AdamW's first moment after its first step is (1 - beta 1) times
    them.
    """
    assert critic.update(critic.score(ragged()), squared_error)["critic/skipped"] == 0.0
    state, factor = critic.trainer.optimizer.state, 1 - critic.trainer.config.betas[0]
    names = {p: name for name, p in critic.model.named_parameters()}
    return {names[p]: s["exp_avg"] / factor for p, s in state.items()}


def whole_critic(lora: TrainedLora, head: nn.Linear) -> Critic:
    """The same critic as one model with merged weights."""
    merged = copy.deepcopy(lora.base)
    merge_into(merged, lora.adapter())
    critic = make_critic(merged.requires_grad_(True), "own")
    scalar_head(critic.model).load_state_dict(head.state_dict())  # type: ignore[arg-type]
    return critic


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_values_and_gradients_are_those_of_a_critic_with_merged_weights(
    name: str, tiny: Tiny
) -> None:
    critic = critic_of(adapted(tiny(name)))
    moved(critic.model.parameters(), 2)
    lora, head = inside(critic).lora, inside(critic).score
    other, batch = whole_critic(lora, head), ragged()
    values, expected = critic.score(batch).values, other.score(batch).values
    assert values is not None and expected is not None and float(values[batch.mask].std()) > 0.1
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)
    pairs = {n: (a.clone(), b.clone()) for n, (a, b) in lora.adapter().layers.items()}
    scale = lora.config.scale
    ours, theirs = first_moments(critic), first_moments(other)
    assert len(ours) == 2 * len(pairs) + 2
    for layer, (down, up) in pairs.items():
        weight = theirs[f"{layer}.weight"]
        weight = weight.T if name == "gpt2" else weight  # Conv1D stores [in, out]
        wanted = {"A": up.T @ weight, "B": scale * weight @ down.T}
        for side, expected in wanted.items():
            found = ours[f"body.{layer}.lora_{side}.default.weight"]
            assert (found - expected).norm() <= 1e-5 * expected.norm() + 1e-7, (layer, side)
    for part in ("weight", "bias"):
        head_name = "classifier" if name == "gpt2" else "score"
        torch.testing.assert_close(ours[f"score.{part}"], theirs[f"{head_name}.{part}"])


def test_at_first_it_has_the_policys_adapter_and_every_value_is_zero(tiny: Tiny) -> None:
    lora = adapted(tiny("qwen3"))
    critic = critic_of(lora)
    own = {n: p.detach() for n, p in inside(critic).lora.weights().items()}
    assert equal(own, {n: p.detach() for n, p in lora.weights().items()})
    values = critic.score(ragged()).values
    assert values is not None and not values.any()


@pytest.mark.parametrize("base", ["float32", "nf4"])
def test_the_base_exists_once_and_each_adapter_is_trained_by_its_own_trainer(
    base: str, tiny: Tiny
) -> None:
    lora = adapted(tiny("qwen3"), base)
    precision = None if base == "float32" else torch.bfloat16
    critic = critic_of(lora, precision=precision)
    scoring = Scoring(chunk=16, autocast=precision)
    actor = Trainer(PolicyRoot(lora.model), settings(), scoring, 100)
    shared = {t.data_ptr() for t in [*lora.base.parameters(), *lora.base.buffers()]}
    frozen = [*inside(critic).body.parameters(), *inside(critic).body.buffers()]
    frozen = [t for t in frozen if not t.requires_grad]
    assert frozen and {t.data_ptr() for t in frozen} <= shared
    for trainer in (critic.trainer, actor):
        held = [p for group in trainer.optimizer.param_groups for p in group["params"]]
        assert {*held} == {p for p in trainer.model.parameters() if p.requires_grad}
    weights = {n: t.clone() for n, t in lora.base.state_dict().items()}
    policy, values = trained(lora.model), trained(critic.model)
    for _ in range(2):  # a head that starts at zero gives the adapter no gradient
        critic.update(critic.score(ragged()), squared_error)
    learned = trained(critic.model)
    assert equal(trained(lora.model), policy)
    assert not any(torch.equal(learned[n], values[n]) for n in values), "something did not learn"
    actor.train_step(ragged(), policy_gradient)
    assert equal(trained(critic.model), learned) and not equal(trained(lora.model), policy)
    assert all(torch.equal(t, weights[n]) for n, t in lora.base.state_dict().items())


def test_a_checkpoint_holds_adapter_head_and_moments_and_brings_them_back(tiny: Tiny) -> None:
    lora = adapted(tiny("qwen3"), dora=True)
    critic, other = critic_of(lora), critic_of(lora)
    for step in range(3):
        critic.update(critic.score(ragged(step)), squared_error)
    tensors = {name: t.detach().clone() for name, t in critic.tensors().items()}
    names = {n.removeprefix("weights/") for n in tensors if n.startswith("weights/")}
    assert names == trained(critic.model).keys()
    other.load(tensors, critic.state())
    ends = [[c.update(c.score(ragged(s)), squared_error) for s in (3, 4)] for c in (critic, other)]
    assert ends[0] == ends[1] and equal(trained(critic.model), trained(other.model))


@pytest.mark.slow
def test_ppo_learns_the_returns_with_a_critic_by_adapter(tiny: Tiny) -> None:
    lora = adapted(tiny("qwen3"))
    algorithm = make_algorithm(replace(ZOO["ppo"], epochs=1, gamma=1.0, lam=0.9), 16)
    actor = make_actor(lora.model, learning_rate=1e-4)
    both = ActorCritic(actor, critic_of(lora, rate=3e-2), algorithm, 0)
    samples = replace(ragged(), weights=None, returns=None)
    made = []
    for _ in range(12):
        batch = algorithm.prepare(both.critic.score(samples))
        made.append(both.train_step(batch, algorithm.compute_loss))
    assert made[0]["critic/explained_variance"] == 0.0 and both.version == 12
    assert made[-1]["critic/explained_variance"] > 0.3  # type: ignore[operator]


def padded_values(model: nn.Module, batch: Batch) -> Tensor:
    """[B, T] by a plain forward pass of each row: the logit at t - 1 for token t."""
    out = torch.zeros(batch.tokens.shape)
    for b, n in enumerate(batch.lengths.tolist()):
        with torch.no_grad():
            logits = model(input_ids=batch.tokens[b : b + 1, :n], use_cache=False).logits
        out[b, 1:n] = logits[0, :-1, 0]
    return torch.where(batch.mask, out, 0.0)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_peft_loads_the_saved_adapter_and_head(name: str, tiny: Tiny, tmp_path: Path) -> None:
    lora = adapted(tiny(name))
    lora.base.save_pretrained(tmp_path / "base")
    critic = critic_of(lora)
    randomise_head(critic)
    moved(critic.model.parameters(), 3)
    critic.save(tmp_path / "critic")
    base = AutoModelForTokenClassification.from_pretrained(
        tmp_path / "base", num_labels=1, attn_implementation="eager"
    )
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "critic")).eval()
    batch = ragged()
    torch.testing.assert_close(
        critic.score(batch).values, padded_values(loaded, batch), rtol=1e-5, atol=1e-5
    )


def test_an_architecture_without_a_value_model_can_have_one(tiny: Tiny, tmp_path: Path) -> None:
    """Gemma 3 has no token-classification class, which a whole copy needs."""
    critic = critic_of(adapted(tiny("gemma3_text")))
    assert critic.update(critic.score(ragged()), squared_error)["critic/skipped"] == 0.0
    critic.save(tmp_path / "critic")
    assert (tmp_path / "critic" / "adapter_model.safetensors").is_file()
