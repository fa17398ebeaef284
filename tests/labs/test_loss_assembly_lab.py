"""The loss of a batch (lesson 5), against sums written out by hand."""

from __future__ import annotations

import math

import pytest

from sixfold_labs.catalogue import find
from sixfold_labs.loss_assembly import Token, terms

LAB = find("loss-assembly")

REF_MINUS_OLD = (0.1, -0.1, 0.1, 0.2, 0.1, -0.1)
"""Of the six tokens in the mask."""


def test_unchanged_log_probs_leave_only_the_kl_term() -> None:
    outcome = LAB(spread=0.0, beta=0.5)
    kl = sum(math.exp(d) - d - 1 for d in REF_MINUS_OLD) / 6
    assert outcome.number("pg_mean") == pytest.approx(0.0, abs=1e-12)  # 3 x 0.71 - 3 x 0.71
    assert outcome.number("beta_kl") == pytest.approx(0.5 * kl)
    assert outcome.number("total") == pytest.approx(0.5 * kl)
    assert outcome.number("frac_clipped") == 0


@pytest.mark.parametrize("source", ["formula", "library"])
@pytest.mark.parametrize(("eps", "beta", "seed"), [(0.2, 0.05, 0), (0.05, 0.5, 3), (0.4, 0.0, 7)])
def test_totals_follow_from_the_shown_columns(
    source: str, eps: float, beta: float, seed: int
) -> None:
    outcome = LAB(eps=eps, beta=beta, spread=0.6, seed=seed, source=source)
    table = outcome.tables[0]
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    pg = kl = outside = active = 0.0
    for row in rows:
        if not row["mask"]:
            assert row["pg"] == row["kl"] == 0
            continue
        new, old, ref, a = (float(str(row[name])) for name in ("new", "old", "ref", "A"))
        ratio = math.exp(new) / math.exp(old)
        held = 1 + eps if ratio > 1 + eps else 1 - eps if ratio < 1 - eps else ratio
        pg += max(-ratio * a, -held * a)
        kl += math.exp(ref) / math.exp(new) - (ref - new) - 1
        outside += held != ratio
        active += (a > 0 and ratio > 1 + eps) or (a < 0 and ratio < 1 - eps)
    assert outside > 0
    assert outcome.number("pg_mean") == pytest.approx(pg / 6)
    assert outcome.number("beta_kl") == pytest.approx(beta * kl / 6)
    assert outcome.number("total") == pytest.approx(pg / 6 + beta * kl / 6)
    assert outcome.number("frac_clipped") == pytest.approx(outside / 6)
    assert outcome.number("frac_clip_active") == pytest.approx(active / 6)


def test_shares_outside_the_band_and_clipped_differ_by_the_sign_of_the_advantage() -> None:
    away = Token(0, "a", old=-1.0, ref=-1.0, advantage=-1.0, mask=True)
    above = terms(away, new=-0.5, eps=0.2)
    assert above.outside and not above.active
    assert terms(away, new=-1.5, eps=0.2).active


@pytest.mark.parametrize(
    ("switch", "column"), [("show_old", "old"), ("show_ref", "ref"), ("show_advantage", "A")]
)
def test_a_switch_hides_its_column_and_nothing_else(switch: str, column: str) -> None:
    shown, hidden = LAB(), LAB(**{switch: False})
    assert set(shown.tables[0].columns) - set(hidden.tables[0].columns) == {column}
    assert shown.values == hidden.values
