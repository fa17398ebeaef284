"""Properties of every preference loss: splits, stability, gradient weights, and exact optima."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from preference_rows import loss_and_gradient, made, with_gradient

from sixfold.preference.loss import SCORES, Settings
from sixfold.preference.mixture import Mixture, Term
from sixfold.preference.pairs import Pairs, Statistics
from sixfold.preference.tilt import tilted
from sixfold.preference.zoo import LOSSES
from sixfold.recipe.knobs import knobs

PAIRED = [name for name, row in LOSSES.items() if not row.unpaired]
N = 11
DIVERGENCES = knobs()["preference.divergence"].choices


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_those_of_the_whole_for_every_split(name: str) -> None:
    row = LOSSES[name]
    given = replace(row.defaults, sft_weight=0.3, tail_weight=0.7, label_smoothing=0.1)
    for settings in (row.defaults, row.defaults if row.unpaired else given):
        rows = made(row, N, seed=1)
        whole, gradient = loss_and_gradient(row, rows, settings, [torch.arange(N)])
        assert gradient[:, :-1].abs().sum() > 0
        for seed in range(4):
            order = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
            for sizes in ([1] * N, [3, 8], [5, 2, 4]):
                found = loss_and_gradient(row, rows, settings, list(order.split(sizes)))
                torch.testing.assert_close(found, (whole, gradient), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_rows_of_weight_0_change_nothing(name: str) -> None:
    row = LOSSES[name]
    rows = made(row, N, seed=2)
    whole, gradient = loss_and_gradient(row, rows, row.defaults, [torch.arange(N)])
    fewer = rows.of(torch.arange(N - 1))
    less, rest = loss_and_gradient(row, fewer, row.defaults, [torch.arange(N - 1)])
    torch.testing.assert_close((whole, gradient[:, :-1]), (less, rest), rtol=1e-12, atol=1e-12)
    assert not gradient[:, -1].any()


@pytest.mark.parametrize("name", LOSSES)
def test_log_ratios_of_1000_give_finite_losses_and_gradients(name: str) -> None:
    row = LOSSES[name]
    rows = made(row, 64, seed=3, spread=1000.0, dtype=torch.float32)
    extremes = [row.defaults]
    if set(SCORES) <= set(row.reads):
        extremes += [replace(row.defaults, divergence=kind) for kind in DIVERGENCES]
    for settings in extremes:
        tracked, leaves = with_gradient(rows)
        losses = row.per_pair(tracked, settings, row.whole_batch(rows, settings))
        assert losses.isfinite().all(), settings
        losses.sum().backward()
        assert all(leaf.grad is None or leaf.grad.isfinite().all() for leaf in leaves), settings


def pair(margin: float, *, half: bool = True) -> tuple[Pairs, torch.Tensor]:
    """One pair with this difference of log-ratios; its log-prob of the better completion."""
    chosen = torch.tensor([margin - 50.0], dtype=torch.float64, requires_grad=True)
    minus = torch.tensor([-50.0], dtype=torch.float64)
    ones = torch.ones(1, dtype=torch.float64)
    return Pairs(chosen, minus, ones, ones, minus, minus), chosen


def gradient(name: str, margin: float, settings: Settings) -> float:
    rows, chosen = pair(margin)
    LOSSES[name].per_pair(rows, settings, Statistics()).sum().backward()
    assert chosen.grad is not None
    return float(chosen.grad)


@pytest.mark.parametrize("margin", [-1000.0, -3.0, 0.0, 2.0, 40.0])
def test_gradient_weights(margin: float) -> None:
    beta, s = 0.1, Settings()

    def weight(z: float) -> float:
        """sigmoid(-z)."""
        return float(torch.sigmoid(torch.tensor(-z, dtype=torch.float64)))

    z = beta * margin
    assert gradient("dpo", margin, s) == pytest.approx(-beta * weight(z))
    smooth = replace(s, label_smoothing=0.2)
    assert gradient("cdpo", margin, smooth) == pytest.approx(
        -beta * (0.8 * weight(z) - 0.2 * weight(-z))
    )
    assert gradient("hinge", margin, s) == pytest.approx(-beta if z < 1 else 0.0)
    assert gradient("ipo_sum", margin, s) == pytest.approx(2 * (margin - 1 / (2 * beta)))
    assert gradient("dpo_shift", margin, replace(s, shift=0.5)) == pytest.approx(
        -beta * weight(beta * margin)
    )
    simple = Settings(beta=2.0, target_margin=1.0)
    assert gradient("simpo", margin, simple) == pytest.approx(-2 * weight(2 * margin - 1))


def test_ipo_is_0_at_its_target_where_its_gradient_changes_sign() -> None:
    settings = Settings(beta=0.25)
    target = 1 / (2 * settings.beta)
    rows, _ = pair(target)
    assert LOSSES["ipo_sum"].per_pair(rows, settings, Statistics()).item() == 0.0
    assert (
        gradient("ipo_sum", target - 0.1, settings)
        < 0
        < gradient("ipo_sum", target + 0.1, settings)
    )


def test_dpop_is_dpo_until_the_better_completion_falls_below_the_reference() -> None:
    settings = LOSSES["dpop"].defaults
    assert gradient("dpop", 1.0, settings) == gradient("dpo", 1.0, settings)
    fallen, _ = pair(-1.0)
    expected = torch.nn.functional.softplus(torch.tensor(0.1 * (1.0 + 50.0)))
    found = LOSSES["dpop"].per_pair(fallen, settings, Statistics())
    assert float(found) == pytest.approx(float(expected))


def test_reference_free_losses_do_not_read_the_reference() -> None:
    free = [name for name, row in LOSSES.items() if not row.needs_reference]
    assert free == ["cpo", "simpo", "orpo", "sft"]
    for name in free:
        row = LOSSES[name]
        rows = made(row, N, seed=4)
        assert isinstance(rows, Pairs)
        parts = [torch.arange(N)]
        with_it = loss_and_gradient(row, rows, row.defaults, parts)
        without = loss_and_gradient(row, rows.without_reference(), row.defaults, parts)
        torch.testing.assert_close(with_it, without, rtol=0, atol=0)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_divergence_scores_by_the_derivative_of_its_f(kind: str) -> None:
    """f by finite differences; constants cancel in a margin."""
    alpha = 0.3
    f = {
        "reverse-kl": lambda t: t * t.log(),
        "forward-kl": lambda t: -t.log(),
        "js": lambda t: t * t.log() - (t + 1) * ((t + 1) / 2).log(),
        "alpha": lambda t: (t**alpha - 1) / (alpha * (alpha - 1)),
        "squared": lambda t: t.log() ** 2 / 2,
    }[kind]

    def slope(h: torch.Tensor) -> torch.Tensor:
        t = h.exp()
        return (f(t * (1 + 1e-5)) - f(t * (1 - 1e-5))) / (2e-5 * t)

    rows = made(LOSSES["hinge"], N, seed=5)
    assert isinstance(rows, Pairs) and rows.ref_chosen is not None
    assert rows.ref_rejected is not None
    settings = Settings(beta=1e-3, divergence=kind, divergence_alpha=alpha)
    found = 1 - LOSSES["hinge"].per_pair(rows, settings, Statistics())
    expected = slope(rows.chosen - rows.ref_chosen) - slope(rows.rejected - rows.ref_rejected)
    torch.testing.assert_close(found, 1e-3 * expected, rtol=1e-5, atol=1e-9)


def test_aot_compares_sorted_differences() -> None:
    row = LOSSES["aot_unpaired"]
    rows = made(row, N, seed=6).of(torch.arange(N - 1))
    assert isinstance(rows, Pairs) and rows.ref_chosen is not None
    assert rows.ref_rejected is not None
    tracked, leaves = with_gradient(replace(rows, weight=None))
    assert isinstance(tracked, Pairs)
    expected = torch.nn.functional.softplus(
        -0.1
        * (
            (tracked.chosen - rows.ref_chosen).sort().values
            - (tracked.rejected - rows.ref_rejected).sort().values
        )
    ).sum()
    gradients = torch.autograd.grad(expected, leaves[:2])
    found = loss_and_gradient(
        row, replace(rows, weight=None), row.defaults, list(torch.arange(N - 1).split(3))
    )
    torch.testing.assert_close(found[0], expected.detach())
    torch.testing.assert_close(found[1][:2], torch.stack(gradients))


def test_a_mixture_is_the_weighted_sum_and_resumes() -> None:
    names, weights = ("dpo", "beta_dpo", "sft"), (0.8, 0.2, 1.0)
    terms = [
        Term(LOSSES[name], LOSSES[name].defaults, weight)
        for name, weight in zip(names, weights, strict=True)
    ]
    mixture, rows = Mixture(terms), made(LOSSES["dpo"], N, seed=7)
    parts = [
        loss_and_gradient(term.row, rows, term.settings, [torch.arange(N)])[0] for term in terms
    ]
    statistics = mixture.whole_batch(rows)
    found = (rows.weights * mixture.per_pair(rows, statistics)).sum()
    torch.testing.assert_close(
        found, sum((w * p for w, p in zip(weights, parts, strict=True)), torch.zeros(()).double())
    )
    resumed = Mixture(terms)
    resumed.load(mixture.state())
    again, before = resumed.whole_batch(rows), mixture.whole_batch(rows, advance=False)
    assert again[1].running == before[1].running != statistics[1].running
    assert mixture.state() == {"running": [None, statistics[1].running, None]}


# The optimum of the reward objective


@pytest.mark.parametrize(
    ("beta", "expected"), [(1.0, [0.964, 0.029, 0.007]), (5.0, [0.663, 0.218, 0.119])]
)
def test_gibbs_tilt(beta: float, expected: list[float]) -> None:
    reference = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    rewards = torch.tensor([5.0, 2.0, 1.0], dtype=torch.float64)
    policy = tilted(reference.log(), rewards, beta).exp()
    assert policy.tolist() == pytest.approx(expected, abs=5e-4)

    def objective(p: torch.Tensor) -> float:
        return float(p @ rewards - beta * (p * (p / reference).log()).sum())

    for nudge in torch.eye(3, dtype=torch.float64):
        other = (policy + 1e-3 * nudge) / 1.001
        assert objective(other) < objective(policy)


def minimised(name: str, settings: Settings, reference: torch.Tensor | None) -> torch.Tensor:
    """Log-probs, or scores without a reference, that minimise a loss on all pairs of 4 completions.

    The labels are those of Bradley and Terry with the true scores, each with its probability.
    """
    true = torch.tensor([0.0, 1.0, 2.0, 2.5], dtype=torch.float64)
    both = torch.tensor([(a, b) for a in range(4) for b in range(4) if a != b])
    better, worse = both.unbind(1)
    weight = torch.sigmoid(true[better] - true[worse])
    logits = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    ones = torch.ones(len(both), dtype=torch.float64)
    optimiser = torch.optim.LBFGS(
        [logits],
        max_iter=200,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-12,
        tolerance_change=1e-16,
    )

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        logp = logits.log_softmax(0) if reference is not None else logits
        refs = [None, None] if reference is None else [reference[better], reference[worse]]
        rows = Pairs(logp[better], logp[worse], ones, ones, *refs, weight=weight)
        loss = (weight * LOSSES[name].per_pair(rows, settings, Statistics())).sum()
        loss.backward()
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    return (logits.log_softmax(0) if reference is not None else logits).detach()


@pytest.mark.parametrize("beta", [0.3, 1.0, 2.0])
def test_dpo_is_a_reward_model_and_the_exact_optimum(beta: float) -> None:
    """Z cancels: the tilt by a Bradley-Terry model's rewards is DPO's policy."""
    reference = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    rewards = minimised("cpo", Settings(beta=1.0), None)
    assert (rewards - rewards[0]).tolist() == pytest.approx([0.0, 1.0, 2.0, 2.5], abs=1e-5)
    by_reward = tilted(reference, rewards, beta)
    by_dpo = minimised("dpo", Settings(beta=beta), reference)
    torch.testing.assert_close(by_dpo.exp(), by_reward.exp(), atol=1e-6, rtol=1e-5)
