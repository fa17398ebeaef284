"""Log-ratio and mismatch metrics: the published values, and edges by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from sixfold.trainer.mismatch import (
    log_ratio_metrics,
    mismatch_metrics,
    outside_share,
    temperature_metrics,
)
from sixfold.types import LOG_RATIO_EDGES

torch.set_num_threads(1)
CASE = json.loads((Path(__file__).parents[1] / "data" / "golden_loop.json").read_text())[
    "mismatch_metrics"
]


def test_golden() -> None:
    """Between the engine's log-probs and the trainer's; the file's `old_logp` is the trainer's own
    at the time of sampling.
    """
    tables = {
        name: torch.tensor(CASE["inputs"][name], dtype=torch.float64)
        for name in ("mask", "old_logp", "rollout_logp")
    }
    mask, expected = tables["mask"].bool(), CASE["expected"]
    trainer, engine = tables["old_logp"][mask], tables["rollout_logp"][mask]
    got = mismatch_metrics(trainer, engine)
    assert got["mismatch/prob_error"] == pytest.approx(expected["token_mult_prob_error"], abs=1e-6)
    assert got["mismatch/kl_k3"] == pytest.approx(expected["k3_rollout_to_train"], abs=1e-6)
    assert got["mismatch/max_abs_logp"] == pytest.approx(expected["max_abs_dlogp"], abs=1e-6)
    ratios = log_ratio_metrics(trainer, engine)
    assert ratios["train/ratio_mean"] == pytest.approx(expected["sampling_is_mean"], abs=1e-6)
    assert ratios["train/log_ratio_mean"] == pytest.approx(
        -expected["k1_rollout_to_train"], abs=1e-6
    )


def test_by_hand() -> None:
    got = mismatch_metrics(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
    assert got["mismatch/mean_abs_logp"] == pytest.approx(0.75)
    assert got["mismatch/max_abs_logp"] == pytest.approx(1.0)
    assert got["mismatch/prob_error"] == pytest.approx((math.exp(0.5) + math.e) / 2)
    assert got["mismatch/kl_k3"] == pytest.approx(((math.exp(0.5) - 1.5) + math.exp(-1.0)) / 2)


@pytest.mark.parametrize("gap", [2.0**-6, 2.0**-10, 2.0**-14])
def test_the_kl_of_small_gaps_is_half_their_square(gap: float) -> None:
    """Down to 2e-9 nats: the sum of its series, x^2 / 2 + x^3 / 6 + x^4 / 24 and so on."""
    got = mismatch_metrics(torch.tensor([-0.5 + gap, -0.5 - gap]), torch.full((2,), -0.5))
    assert got["mismatch/kl_k3"] == pytest.approx(gap**2 / 2 + gap**4 / 24, rel=1e-4)


def test_no_new_samples_give_no_metrics_instead_of_nan() -> None:
    assert mismatch_metrics(torch.zeros(0), torch.zeros(0)) == {}


def test_every_bin_of_the_histogram() -> None:
    """One log-ratio inside each of the 11 bins; a value on an edge belongs to the bin below it."""
    middles = torch.tensor([-9.0, -0.7, -0.3, -0.15, -0.05, 0.0, 0.05, 0.15, 0.3, 0.7, 9.0])
    assert log_ratio_metrics(middles, torch.zeros(11))["train/ratio_hist"] == [1.0] * 11
    edges = log_ratio_metrics(torch.tensor(LOG_RATIO_EDGES), torch.zeros(10))["train/ratio_hist"]
    assert edges == [1.0] * 10 + [0.0]


def test_a_wild_token_does_not_make_the_mean_infinite() -> None:
    got = log_ratio_metrics(torch.tensor([0.0, 0.0]), torch.tensor([-500.0, 0.0]))
    assert math.isfinite(got["train/ratio_mean"])  # type: ignore[arg-type]
    assert math.isfinite(
        mismatch_metrics(torch.tensor([0.0]), torch.tensor([-500.0]))["mismatch/prob_error"]
    )  # type: ignore[arg-type]


def sampled(
    temperature: float, noise: float = 0.0, spread: float = 2.0
) -> tuple[torch.Tensor, ...]:
    """Log-probs of 4,000 tokens at temperature 1 and at a sampling temperature, and the entropies
    at temperature 1, from one softmax each over 50 tokens.
    """
    draw = torch.Generator().manual_seed(0)
    logits = spread * torch.randn(4000, 50, generator=draw, dtype=torch.float64)
    engine = (logits / temperature).log_softmax(-1)
    tokens = torch.multinomial(engine.exp(), 1, generator=draw)
    trainer = logits.log_softmax(-1)
    logp, old_logp = (x.gather(-1, tokens)[:, 0] for x in (trainer, engine))
    old_logp += noise * torch.randn(4000, generator=draw, dtype=torch.float64)
    return logp, old_logp, -(trainer.exp() * trainer).sum(-1)


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("temperature", [0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1])
def test_the_temperature_is_estimated_to_one_percent(temperature: float, noise: float) -> None:
    """Also below the noise of bfloat16. The fit is of first order, so its error grows with the
    square of the difference.
    """
    found = temperature_metrics(*sampled(temperature, noise))["mismatch/temperature"]
    assert found == pytest.approx(temperature, abs=0.001 + (temperature - 1) ** 2)


@pytest.mark.parametrize(
    ("noise", "spread"),
    [(0.5, 2.0), (0.02, 1e5)],  # much noise; a softmax that is nearly an argmax
)
def test_a_temperature_that_the_tokens_do_not_determine_is_not_reported(
    noise: float, spread: float
) -> None:
    assert temperature_metrics(*sampled(1.0, noise, spread)) == {}


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_tokens_without_a_choice_have_no_temperature(tokens: int) -> None:
    """A softmax with probability 1, or too few tokens."""
    assert temperature_metrics(*torch.zeros(3, tokens)) == {}


def test_the_share_of_sequences_outside_a_band_by_hand() -> None:
    """Means over scored tokens: 0.001 (outside), 0.0001 (inside), -0.0004 (outside); the last row
    has no scored token.
    """
    mask = torch.tensor([[0, 1, 1], [0, 1, 1], [0, 1, 0], [0, 0, 0]], dtype=torch.bool)
    gap = torch.tensor(
        [[9.0, 0.0015, 0.0005], [9.0, 0.0003, -0.0001], [9.0, -0.0004, 9.0], [9.0, 9.0, 9.0]]
    )
    assert outside_share(
        gap, torch.zeros(4, 3), mask, low=math.log1p(-3e-4), high=math.log1p(4e-4)
    ) == pytest.approx(2 / 3)
