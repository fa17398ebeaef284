"""Stage `recycle`: solved rows, general rows by share, and how alike the solutions are."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from curated_rows import rows_of

from sixfold.errors import UserError
from sixfold_curation.recycle import Recycle
from sixfold_curation.stage import Record, decided

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def made(solutions: int, general: int, *, alike: int = 0, failed: int = 0) -> list[Record]:
    """Solutions, the first `alike` of which differ in a number only; failed ones; general rows."""
    fields: list[dict[str, Any]] = [
        {
            "prompt": f"p{n}",
            "completion": f"So it is {n}." if n < alike else " ".join([WORDS[n % 10]] * (n + 1)),
            "reward": 1.0,
            "source": "kept",
        }
        for n in range(solutions)
    ]
    fields += [{"prompt": "f", "completion": "no", "reward": 0.5, "source": "kept"}] * failed
    fields += [{"prompt": f"g{n}", "completion": "chat", "source": "chat"} for n in range(general)]
    return rows_of([{**one, "id": f"{n}"} for n, one in enumerate(fields)])


def test_solved_rows_and_a_quarter_of_general_ones() -> None:
    decisions, health = decided(Recycle(general=("chat",)), made(30, 40, failed=7))
    counted = Counter((one.record.source, one.kept, one.reason) for one in decisions)
    assert counted == {
        ("kept", True, ""): 30,
        ("kept", False, "unsolved"): 7,
        ("chat", True, ""): 10,
        ("chat", False, "not_drawn"): 30,
    }
    assert health.figures["domains"]["general"]["share"] == 0.25 and not health.alarm


@pytest.mark.parametrize(("alike", "alarm"), [(19, False), (26, True)])
def test_alarm_if_five_templates_make_up_half(alike: int, alarm: bool) -> None:
    """60 solutions, `alike` of one template: with 4 others, (alike + 4) / 60 against 0.5."""
    rows = made(60, 20, alike=alike)
    _, health = decided(Recycle(general=("chat",)), rows)
    assert health.value == pytest.approx((alike + 4) / 60)
    assert ("So it is #." in health.alarm) == alarm


def test_entropy_by_hand() -> None:
    """Four solutions, of one word each: 2 bits per 1-gram. General rows do not count."""
    rows = rows_of(
        [{"prompt": w, "completion": f"{w} {w}", "source": "kept"} for w in WORDS[:4]]
        + [{"prompt": "g", "completion": "chat", "source": "chat"}] * 2
    )
    _, health = decided(Recycle(general=("chat",), share=0.2, ngram=1), rows)
    assert health.figures["n-gram entropy, bits"] == pytest.approx(math.log2(4))


@pytest.mark.parametrize(
    ("stage", "named"),
    [
        (Recycle(), "no row comes from general"),
        (Recycle(general=("kept",), share=0.5), "no row of another source"),
        (Recycle(general=("chat",), column="solution"), "'solution'"),
    ],
)
def test_what_is_missing_is_named(stage: Recycle, named: str) -> None:
    rows = made(4, 4 if stage.general == ("chat",) else 0)
    with pytest.raises(UserError, match=named):
        decided(stage, rows)


def test_rewards_of_a_csv_file_are_numbers() -> None:
    rows = rows_of(
        [{"prompt": f"p{r}", "completion": "x", "reward": r} for r in ("1.0", "0.0", "")]
    )
    decisions, _ = decided(Recycle(share=0), rows)
    assert [one.reason for one in decisions] == ["", "unsolved", ""]
    with pytest.raises(UserError, match=r"'high' is no number.*general"):
        decided(Recycle(share=0), rows_of([{"prompt": "p", "completion": "x", "reward": "high"}]))
