"""The one-file loop alone: its parts against hand-computed values and slow versions, and that it
learns.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import math
import random
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

SOURCE = Path(__file__).parents[2] / "recipes" / "minimal" / "grpo.py"


def load() -> ModuleType:
    """The recipe as a module; `recipes` is no package."""
    spec = importlib.util.spec_from_file_location("minimal_grpo", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


minimal = load()


@pytest.fixture
def model() -> nn.Module:
    return minimal.make_model(seed=3)


def trajectories(model: nn.Module, settings: object, seed: int = 0) -> object:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tasks = [minimal.draw_task(rng) for _ in range(settings.prompts_per_step)]
    return minimal.rollout(model, tasks, settings, generator)


def loss_of(
    model: nn.Module, t: object, ref_logp: Tensor | None = None, beta: float = 0.0
) -> Tensor:
    return minimal.step_loss(
        model, t.tokens, t.mask, t.logp, ref_logp, t.rewards, t.groups, beta, 0.2
    )


def test_it_imports_neither_sixfold_nor_anything_but_torch_and_transformers() -> None:
    names = set()
    for node in ast.walk(ast.parse(SOURCE.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or ".").split(".")[0])
    assert names - sys.stdlib_module_names == {"torch", "transformers"}


def test_text_round_trips_through_the_tokenizer() -> None:
    assert minimal.encode("3+4=") == [5, 12, 6, 13]
    assert minimal.decode([5, 12, 6, 13, minimal.EOS, minimal.PAD]) == "3+4="


@pytest.mark.parametrize(
    ("completion", "value"),
    [("7", 1.0), ("07", 0.5), ("5", 0.5 / 3), ("", 0.0), ("=7", 0.0), ("7+", 0.0)],
)
def test_verifier(completion: str, value: float) -> None:
    assert minimal.verify(completion, minimal.Task("3+4=", "7")) == value


def test_advantages_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.9, 0.0, 0.0, 0.9, 1.0, 0.9])
    groups = torch.tensor([0, 0, 1, 0, 0, 1, 0, 1])
    advantages = minimal.group_advantages(rewards, groups)
    high, low = (
        0.6 / (math.sqrt(0.24) + 1e-6),
        -0.4 / (math.sqrt(0.24) + 1e-6),
    )  # group 0: mean 0.4, population variance 0.24
    # 0.9 three times: in float32 their mean is not 0.9, and the last bit over 1e-6 would be an
    # advantage of 0.056
    torch.testing.assert_close(
        advantages, torch.tensor([high, low, 0.0, low, low, 0.0, high, 0.0]), rtol=1e-6, atol=0.0
    )


def test_weights_by_hand() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    expected = torch.tensor([[0, 1 / 6, 1 / 6, 0], [0, 1 / 9, 1 / 9, 1 / 9], [0, 0, 0, 0]])
    torch.testing.assert_close(minimal.sequence_weights(mask), expected)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [(1.1, 2.0, -2.2), (1.5, 2.0, -2.4), (0.5, 2.0, -1.0), (1.5, -2.0, 3.0), (0.5, -2.0, 1.6)],
)
def test_surrogate_is_clipped_only_where_that_makes_it_worse(
    ratio: float, advantage: float, loss: float
) -> None:
    value = minimal.clipped_surrogate(
        torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), 0.2
    )
    assert value.item() == pytest.approx(loss)


def test_k3_by_hand() -> None:
    r = torch.tensor([0.0, 1.0, -1.0])
    torch.testing.assert_close(
        minimal.k3(r, torch.zeros(3)), torch.tensor([0.0, math.exp(-1), math.e - 2])
    )


@torch.no_grad()
def test_token_logp_equals_one_forward_a_token(model: nn.Module) -> None:
    tokens = torch.tensor([[2, 12, 3, 13, 3, 1], [4, 12, 13, 0, 0, 0]])
    expected = torch.zeros(2, 6)
    for b, length in ((0, 6), (1, 3)):
        for t in range(1, length):
            expected[b, t] = (
                model(input_ids=tokens[b : b + 1, :t]).logits[0, -1] / 0.7
            ).log_softmax(-1)[tokens[b, t]]
    scored = minimal.token_logp(model, tokens, temperature=0.7)
    torch.testing.assert_close(scored[0], expected[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(scored[1, :3], expected[1, :3], rtol=0, atol=1e-6)


@torch.no_grad()
def test_captured_logp_is_the_scored_one_and_the_mask_ends_with_eos(model: nn.Module) -> None:
    settings = minimal.Settings(
        prompts_per_step=8, samples_per_prompt=4, max_new_tokens=12, temperature=0.8
    )
    t = trajectories(model, settings)
    scored = minimal.token_logp(model, t.tokens, 0.8).where(t.mask, 0.0)
    torch.testing.assert_close(t.logp, scored, rtol=0, atol=2e-6)
    lengths = set()
    for tokens, mask in zip(t.tokens.tolist(), t.mask.tolist(), strict=True):
        completion = tokens[4:]
        sampled = (
            completion.index(minimal.EOS) + 1 if minimal.EOS in completion else len(completion)
        )
        assert mask == [False] * 4 + [True] * sampled + [False] * (len(completion) - sampled)
        assert completion[sampled:] == [minimal.PAD] * (len(completion) - sampled)
        lengths.add(sampled)
    assert len(lengths) > 2  # rows end at different places, or this test says nothing


def test_on_policy_the_loss_is_zero_and_its_gradient_is_reinforce(model: nn.Module) -> None:
    t = trajectories(model, minimal.Settings(prompts_per_step=4, samples_per_prompt=8))
    loss = loss_of(model, t)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert abs(loss.item()) < 1e-6

    advantages = minimal.group_advantages(t.rewards, t.groups)
    logp = minimal.token_logp(model, t.tokens)
    reinforce = -sum(a * logp[b][t.mask[b]].mean() for b, a in enumerate(advantages)) / len(
        advantages
    )
    assert advantages.abs().max() > 1
    for gradient, expected in zip(
        gradients, torch.autograd.grad(reinforce, list(model.parameters())), strict=True
    ):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_kl_term_adds_beta_times_the_weighted_k3(model: nn.Module) -> None:
    t = trajectories(model, minimal.Settings(prompts_per_step=4, samples_per_prompt=8))
    ref_logp = minimal.token_logp(minimal.make_model(seed=4), t.tokens).detach()
    logp = minimal.token_logp(model, t.tokens)
    r = (logp - ref_logp)[t.mask]
    rows = t.mask.nonzero()[:, 0]
    expected = ((r.neg().exp() + r - 1) / t.mask.sum(-1)[rows]).sum() / len(t.mask)
    added = loss_of(model, t, ref_logp, beta=0.3) - loss_of(model, t)
    assert expected > 0.001
    assert added.item() == pytest.approx(0.3 * expected.item(), rel=1e-3)


def test_an_impossible_prompt_token_does_not_make_the_loss_nan(model: nn.Module) -> None:
    t = trajectories(model, minimal.Settings(prompts_per_step=2, samples_per_prompt=4))
    with torch.no_grad():
        model.lm_head.weight *= 2000
    logp = minimal.token_logp(model, t.tokens).detach()
    assert logp[~t.mask].min() < -200
    on_policy = minimal.Trajectories(t.tokens, t.mask, logp.where(t.mask, 0.0), t.rewards, t.groups)
    assert loss_of(model, on_policy, ref_logp=on_policy.logp, beta=0.1).isfinite()


def adamw_by_hand(model: nn.Module, batches: list[object], learning_rate: float) -> None:
    """Clip to norm 1, then AdamW (0.9, 0.95), eps 1e-8, no decay, written out."""
    first = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    second = copy.deepcopy(first)
    for step, t in enumerate(batches, start=1):
        gradients = torch.autograd.grad(loss_of(model, t), list(model.parameters()))
        norm = sum((g**2).sum() for g in gradients).sqrt()
        assert norm > 1.05  # the clip acts, or this test does not see it
        for (name, p), g in zip(model.named_parameters(), gradients, strict=True):
            g = g / norm
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.95 * second[name] + 0.05 * g**2
            with torch.no_grad():
                p -= (
                    learning_rate
                    * (first[name] / (1 - 0.9**step))
                    / ((second[name] / (1 - 0.95**step)).sqrt() + 1e-8)
                )


@pytest.mark.slow
def test_train_on_given_trajectories_is_clipped_adamw(model: nn.Module) -> None:
    model = model.double()  # so that Adam's division does not blow rounding up
    with torch.no_grad():
        model.lm_head.weight *= 20  # for gradients above the clip
    settings = minimal.Settings(steps=3, prompts_per_step=8, learning_rate=1e-3)
    batches = [trajectories(model, settings, seed) for seed in range(3)]
    expected, before = copy.deepcopy(model), copy.deepcopy(model)
    adamw_by_hand(expected, batches, 1e-3)
    losses = minimal.train(model, settings, given=lambda step: batches[step])
    assert len(losses) == 3
    for p, q, was in zip(
        model.parameters(), expected.parameters(), before.parameters(), strict=True
    ):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
        assert (p - was).abs().max() > 5e-4


@pytest.mark.slow
def test_same_seed_same_losses_and_the_kl_pulls() -> None:
    settings = minimal.Settings(steps=4, beta=0.1, learning_rate=1e-2)
    losses = minimal.train(minimal.make_model(), settings)
    assert losses == minimal.train(minimal.make_model(), settings)
    assert abs(losses[0]) < 1e-6 < 1e-4 < losses[3]  # the reference stays where the policy began


@pytest.mark.nightly
@pytest.mark.slow
def test_it_learns_to_add() -> None:
    right: list[float] = []
    settings = minimal.Settings(steps=150)
    minimal.train(
        minimal.make_model(),
        settings,
        report=lambda step, t, loss: right.append((t.rewards == 1.0).float().mean().item()),
    )
    first, last = sum(right[:10]) / 10, sum(right[-10:]) / 10
    assert first < 0.1
    assert last > 0.35


def test_the_script_prints_a_line_a_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--steps", "2"])
    minimal.main()
    lines = capsys.readouterr().out.splitlines()
    assert [
        int(re.match(r"step +(\d+)   right +[\d.]+%   loss [+-][\d.]+   \d\+\d=", line)[1])
        for line in lines
    ] == [0, 1]
