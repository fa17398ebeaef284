"""The parity gate: which distributions of disagreement a run may start with."""

from __future__ import annotations

import math

import pytest
import torch

from sixfold.trainer.mismatch import mismatch_metrics
from sixfold.trainer.parity import Parity, parity_limits


def parity(gaps: list[float]) -> Parity:
    """Of tokens whose log-probs differ by these many nats."""
    return Parity.of(mismatch_metrics(torch.tensor(gaps), torch.zeros(len(gaps))), len(gaps))


def test_the_distribution_by_hand() -> None:
    """200 tokens: 198 agree within 0.01, two are half a nat and a whole nat off."""
    got = parity([0.01] * 198 + [-0.5, 1.0])
    assert got.mean == pytest.approx((198 * 0.01 + 0.5 + 1.0) / 200)
    assert (got.high, got.worst, got.tokens) == (pytest.approx(0.01), pytest.approx(1.0), 200)


def test_one_bad_token_in_bfloat16_is_rounding() -> None:
    """Real models: means around 0.005 nats, worst tokens of 0.26 to 0.95 nats."""
    sound = parity([0.005] * 9990 + [0.95] * 10)
    assert parity_limits("bfloat16", "cuda:0", outside=False).exceeded(sound) == ""


@pytest.mark.parametrize(
    ("gaps", "where"),
    [
        ([0.06] * 1000, "mean difference"),
        ([0.0] * 980 + [0.6] * 20, "99th percentile"),
        ([math.nan] + [0.0] * 999, "mean difference"),
    ],
    ids=["every token a little", "2 % of the tokens much", "not a number"],
)
def test_a_wrong_model_in_bfloat16_is_refused(gaps: list[float], where: str) -> None:
    assert where in parity_limits("bfloat16", "cuda:0", outside=False).exceeded(parity(gaps))


def test_in_float32_on_a_cpu_every_token_must_agree() -> None:
    off = parity([0.0] * 9999 + [2e-3])
    assert "maximum" in parity_limits("float32", "cpu", outside=False).exceeded(off)
    assert parity_limits("float32", "cuda", outside=False).exceeded(off) == "", (
        "its kernels add up in other orders"
    )


def test_another_program_may_differ_more_in_bfloat16_and_not_in_float32() -> None:
    between = parity([0.07] * 100)
    assert parity_limits("bfloat16", "cuda", outside=True).exceeded(between) == ""
    assert parity_limits("bfloat16", "cuda", outside=False).exceeded(between) != ""
    assert parity_limits("float32", "cpu", outside=True) == parity_limits(
        "float32", "cpu", outside=False
    )
