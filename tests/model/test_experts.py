"""Routers of every family: record of their choices, and replay of given choices."""

from __future__ import annotations

import pytest
import torch
from tests.models.experts import FAMILIES, VOCABULARY, expert_model
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.model.causal_lm import Segments, head_logits, hidden_states
from sixfold.model.experts import OWN, Routers, RoutingRecord, find_routers

TOKENS = 12
UNREPLAYED = {"phimoe"}
SIGMOID = {
    *("afmoe", "deepseek_v3", "dots1", "glm4_moe", "glm4_moe_lite", "laguna", "minimax_m2"),
    "solar_open",
}


def logits(model: PreTrainedModel) -> Tensor:
    tokens = torch.arange(TOKENS) * 7 % VOCABULARY
    return head_logits(
        model, hidden_states(model, tokens, torch.arange(TOKENS), Segments(((0, TOKENS),)))
    )


def found(model: PreTrainedModel) -> Routers:
    routers = find_routers(model)
    assert routers is not None
    return routers


def watched(
    model: PreTrainedModel, given: Tensor | None = None
) -> tuple[Tensor, RoutingRecord, Routers]:
    routers = found(model)
    with routers.watch(model, given) as record:
        out = logits(model)
    return out, record, routers


@pytest.mark.parametrize("name", FAMILIES)
def test_routers_are_those_that_transformers_reports(name: str) -> None:
    model = expert_model(name)
    with torch.no_grad():
        plain = logits(model)
        out, record, routers = watched(model)
        reported = model(
            torch.arange(TOKENS)[None] * 7 % VOCABULARY, output_router_logits=True, use_cache=False
        ).router_logits
    assert torch.equal(out, plain)
    assert (routers.experts, routers.top_k) == (8, 2)
    assert routers.sigmoid == (name in SIGMOID)
    assert routers.replays == (name not in UNREPLAYED)
    assert record.choices().shape == (TOKENS, len(routers.names), 2)
    if reported is not None and name != "jetmoe":  # JetMoE reports in another order
        for i, layer in enumerate(reported):
            torch.testing.assert_close(record.logits[i], layer, atol=1e-6, rtol=1e-6)
    assert torch.equal(logits(model), plain)  # nothing stays behind
    assert not any("forward" in vars(part) for part in model.modules())


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - UNREPLAYED))
@torch.no_grad()
def test_replay_of_own_choices_changes_nothing(name: str) -> None:
    model = expert_model(name)
    plain, record, _ = watched(model)
    again, second, _ = watched(model, record.choices())
    torch.testing.assert_close(again, plain, atol=2e-5, rtol=2e-5)
    free, _, _ = watched(model, torch.full_like(record.choices(), OWN))
    assert torch.equal(free, plain)
    for i in record.used:
        assert torch.equal(second.own[i].sort(-1)[0], record.own[i].sort(-1)[0])


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - UNREPLAYED))
@torch.no_grad()
def test_other_weights_replay_the_choices_of_the_first(name: str) -> None:
    """Routers with other weights choose other experts, but not under a replay.

    Experts get weights from the current logits. Tokens without given choices are routed freely.
    """
    model = expert_model(name)
    first = watched(model)[1].choices()
    routers = found(model)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=torch.manual_seed(1))
    alone = watched(model)[1].choices()
    different = (alone.sort(-1)[0] != first.sort(-1)[0]).any(-1)
    assert different.any()
    given = first.clone()
    given[-3:] = OWN
    out, record, _ = watched(model, given)
    assert torch.equal(record.choices()[:-3], first[:-3])
    # Attention is causal: the last tokens, which are routed freely, do not affect the others.
    torch.testing.assert_close(out[:-3], watched(model, first)[0][:-3], atol=2e-5, rtol=2e-5)
    # `own` records the router's own choice despite the replay. In the first layer with experts the
    # input is the same, so the choice is too.
    layer = min(range(len(routers.names)), key=lambda i: (order(model, routers.names[i]), i))
    assert torch.equal(record.own[layer].sort(-1)[0], alone[:, layer].sort(-1)[0])


def order(model: PreTrainedModel, name: str) -> int:
    """Sort key of routers by the forward pass: attention precedes the experts of its layer."""
    return 0 if "layers.0.self_attention" in name else 1


@pytest.mark.parametrize("normalised", [True, False])
@torch.no_grad()
def test_replayed_experts_get_the_weights_of_the_family(normalised: bool) -> None:
    """Weights are a softmax over all experts, normalised over the given experts or not."""
    model = expert_model("qwen3_moe")
    for name in found(model).names:
        model.get_submodule(name).norm_topk_prob = normalised  # type: ignore[assignment]
    outputs: list[tuple[Tensor, Tensor, Tensor]] = []
    gate = model.model.layers[0].mlp
    hook = gate.experts.register_forward_pre_hook(lambda _, a: outputs.append(a))
    given = torch.tensor([[[6, 7]] * 2] * TOKENS)
    _, record, _ = watched(model, given)
    hook.remove()
    _, index, weight = outputs[-1]
    p = record.logits[0].softmax(-1)[:, 6:]
    expected = p / p.sum(-1, keepdim=True) if normalised else p
    assert torch.equal(index, given[:, 0])
    torch.testing.assert_close(weight, expected)


@torch.no_grad()
def test_experts_of_an_excluded_group_get_a_weight() -> None:
    """DeepSeek-V2 sets scores of other groups to 0, so a replay must replace the groups too."""
    model = expert_model("deepseek_v2")
    used: list[Tensor] = []
    model.model.layers[1].mlp.experts.register_forward_pre_hook(lambda _, a: used.append(a[2]))
    for first in range(4):
        watched(model, torch.tensor([[[first, 4 + first]]] * TOKENS))
        assert bool((used[-1] > 1e-4).all())


def test_gradient_reaches_the_router_through_the_given_experts() -> None:
    model = expert_model("mixtral")
    given = torch.tensor([[[0, 7]] * 2] * TOKENS)
    out, record, _ = watched(model, given)
    (gradient,) = torch.autograd.grad(out.square().sum(), [record.logits[1]])
    assert bool((gradient[:, [0, 7]].abs() > 0).all())


def test_a_dense_model_has_no_routers(tiny: object) -> None:
    assert find_routers(tiny("qwen3")) is None  # type: ignore[operator]
