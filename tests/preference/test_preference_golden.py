"""Preference losses against values worked out in float64 (tests/data/golden_preference.json)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sixfold.preference.loss import PreferenceLoss, Settings
from sixfold.preference.pairs import Pairs, Statistics, Unpaired
from sixfold.preference.zoo import LOSSES

FILE = Path(__file__).parents[1] / "data" / "golden_preference.json"
CASES: dict[str, Any] = {case["name"]: case for case in json.loads(FILE.read_text())["cases"]}


def numbers(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def pairs_of(case: str) -> Pairs:
    given = {name: numbers(values) for name, values in CASES[case]["inputs"].items()}
    return Pairs(
        given["policy_chosen"].requires_grad_(),
        *(given["policy_rejected"], given["len_chosen"], given["len_rejected"]),
        *(given["ref_chosen"], given["ref_rejected"]),
    )


def losses(case: str, name: str, **changes: float) -> tuple[Tensor, Pairs, Statistics]:
    row = LOSSES[name]
    settings, pairs = replace(row.defaults, **changes), pairs_of(case)
    statistics = row.whole_batch(pairs, settings)
    return row.per_pair(pairs, settings, statistics), pairs, statistics


@pytest.mark.parametrize(
    ("case", "expected", "name", "changes"),
    [
        ("dpo_sigmoid", "loss", "dpo", {"beta": 0.1}),
        ("cdpo", "loss", "cdpo", {"beta": 0.1, "label_smoothing": 0.1}),
        ("robust_dpo", "loss", "robust", {"beta": 0.1, "label_smoothing": 0.1}),
        ("ipo", "loss_sum", "ipo_sum", {"beta": 0.1}),
        ("ipo", "loss_avg", "ipo", {"beta": 0.1}),
        ("slic_hinge", "loss", "hinge", {"beta": 0.1}),
        ("dpo_norm", "loss", "dpo_norm", {"beta": 5.0}),
        ("simpo", "loss", "simpo", {"beta": 2.0, "target_margin": 1.0}),
        ("dpo_shift", "loss_f095", "dpo_shift", {"beta": 0.1, "shift": 0.95}),
        ("dpo_shift", "loss_f1", "dpo_shift", {"beta": 0.1, "shift": 1.0}),
        ("beta_dpo_batch", "loss", "beta_dpo", {"beta": 0.1, "adaptation": 0.6, "kept": 1.0}),
        ("apo_zero", "loss", "apo_zero", {"beta": 0.1}),
        ("sppo_hard", "loss", "sppo", {"beta": 0.1}),
    ],
)
def test_mean_loss(case: str, expected: str, name: str, changes: dict[str, float]) -> None:
    assert CASES[case]["params"].get("beta", 0.1) == changes["beta"]
    found, _, _ = losses(case, name, **changes)
    assert float(found.detach().mean()) == pytest.approx(
        CASES[case]["expected"][expected], abs=1e-6
    )


def test_dpo_per_pair_and_gradient() -> None:
    found, pairs, _ = losses("dpo_sigmoid", "dpo")
    expected = CASES["dpo_sigmoid"]["expected"]
    assert found.tolist() == pytest.approx(expected["per"], abs=1e-6)
    (gradient,) = torch.autograd.grad(found.mean(), pairs.chosen)
    assert gradient.tolist() == pytest.approx(expected["grad_policy_chosen"], abs=1e-6)


def test_orpo_is_the_cross_entropy_and_the_odds_ratio() -> None:
    found, _, _ = losses("orpo", "orpo", beta=0.1)
    expected = CASES["orpo"]["expected"]
    assert float(found.detach().mean()) == pytest.approx(
        expected["nll"] + 0.1 * expected["or_term"], abs=2e-6
    )
    odds, _, _ = losses("orpo", "orpo", beta=1.0, sft_weight=0.0)
    assert float(odds.detach().mean()) == pytest.approx(expected["or_term"], abs=1e-6)


def test_beta_dpo_remembers_the_mean_margin() -> None:
    _, _, statistics = losses("beta_dpo_batch", "beta_dpo", kept=1.0)
    expected = CASES["beta_dpo_batch"]["expected"]
    assert float(statistics.beta or 0) == pytest.approx(expected["beta_batch"], abs=1e-6)
    assert statistics.running == pytest.approx(expected["M0_next"], abs=1e-9)


def test_beta_dpo_keeps_the_pairs_nearest_to_the_running_mean() -> None:
    row, pairs = LOSSES["beta_dpo"], pairs_of("beta_dpo_batch")
    margins = CASES["beta_dpo_batch"]["expected"]["M"]
    settings = replace(row.defaults, kept=2 / 3)
    for before, left_out in ((0.0, 0), (0.15, 1), (-0.04, 0), (0.06, 1)):
        factor = row.whole_batch(pairs, settings, before).factor
        assert factor is not None
        far = max(range(3), key=lambda i: abs(margins[i] - before))
        assert far == left_out
        assert factor.tolist() == [0.0 if i == far else 1.5 for i in range(3)]


def kto_rows() -> tuple[PreferenceLoss, Settings, Unpaired]:
    given = CASES["kto"]["inputs"]
    rows = Unpaired(
        *(numbers(given["policy"]), numbers(given["ref"])),
        numbers(given["label"]).bool(),
        mismatched=numbers(given["kl_policy"]) - numbers(given["kl_ref"]),
    )
    return LOSSES["kto"], LOSSES["kto"].defaults, rows


def test_kto_per_completion() -> None:
    row, settings, rows = kto_rows()
    expected = CASES["kto"]["expected"]
    statistics = row.whole_batch(rows, settings)
    assert float(statistics.reference_point or 0) == pytest.approx(expected["z0"])
    found = row.per_pair(rows, settings, statistics)
    assert found.tolist() == pytest.approx(expected["per"], abs=1e-6)


def test_kto_weights_each_label_and_its_reference_point_is_never_negative() -> None:
    row, settings, rows = kto_rows()
    statistics = row.whole_batch(rows, settings)
    plain = row.per_pair(rows, settings, statistics)
    averse = replace(settings, liked_weight=1.5, disliked_weight=2.0)
    weighted = row.per_pair(rows, averse, statistics)
    torch.testing.assert_close(weighted, plain * numbers([1.5, 1.5, 2.0, 2.0]))
    assert rows.mismatched is not None
    low = row.whole_batch(replace(rows, mismatched=-rows.mismatched.abs()), settings)
    assert float(low.reference_point or 0) == 0.0


def test_bco_shift_is_the_mean_of_both_labels_then_a_running_one() -> None:
    _, _, rows = kto_rows()
    row = LOSSES["bco"]
    h = (rows.logp - rows.ref_logp).tolist()
    now = 0.1 * ((h[0] + h[1]) / 2 + (h[2] + h[3]) / 2) / 2
    first = row.whole_batch(rows, row.defaults)
    assert first.running == pytest.approx(now)
    assert row.whole_batch(rows, row.defaults, 0.5).running == pytest.approx(0.9 * 0.5 + 0.1 * now)
    found = row.per_pair(rows, row.defaults, first)
    likelihood = torch.sigmoid(0.1 * numbers(h) - now)
    torch.testing.assert_close(
        found, -torch.where(rows.liked, likelihood, 1 - likelihood).log(), rtol=1e-12, atol=0
    )


def test_outcome_is_the_cross_entropy_of_the_label_with_its_slope() -> None:
    _, _, rows = kto_rows()
    row = LOSSES["outcome"]
    assert row.defaults.beta == 0.05 and not row.statistics
    logp = rows.logp.clone().requires_grad_()
    rows = replace(rows, logp=logp)
    found = row.per_pair(rows, row.defaults, row.whole_batch(rows, row.defaults))
    p = [1 / (1 + math.exp(-0.05 * h)) for h in (logp - rows.ref_logp).tolist()]
    liked = rows.liked.tolist()
    by_hand = [-math.log(q if y else 1 - q) for q, y in zip(p, liked, strict=True)]
    assert found.tolist() == pytest.approx(by_hand, rel=1e-12)
    (slope,) = torch.autograd.grad(found.sum(), logp)
    right = [0.05 * (q - y) for q, y in zip(p, liked, strict=True)]
    assert slope.tolist() == pytest.approx(right, rel=1e-12)
