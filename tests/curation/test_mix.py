"""Stage `mix`: exact shares, one draw per seed, and no row more often than allowed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from curated_rows import rows_of
from hypothesis import given
from hypothesis import strategies as st

from sixfold.errors import UserError
from sixfold_curation.mix import Mix, allocate
from sixfold_curation.stage import Context, Decision, Record, decided


def made(counts: dict[str, int]) -> list[Record]:
    """Rows of each source in turn, with `level` = number modulo 4."""
    names = [(name, n) for name, count in counts.items() for n in range(count)]
    return rows_of(
        [
            {"id": f"{s}/{n}", "source": s, "prompt": "x" * (n + 1), "answer": "ab", "level": n % 4}
            for s, n in names
        ]
    )


def kept(decisions: list[Decision]) -> list[str]:
    return [one.record.id for one in decisions if one.kept]


@pytest.mark.parametrize(
    ("counts", "weights", "total", "copies", "expected"),
    [
        # 70 : 30 with 21 and 30 rows: 30 rows use up the first.
        ({"a": 21, "b": 30}, {"a": 0.7, "b": 0.3}, 0, 1, {"a": 21, "b": 9}),
        # Thirds of 10: the remainder goes to the first of the equal remainders.
        ({"a": 9, "b": 9, "c": 9}, {"a": 1, "b": 1, "c": 1}, 10, 1, {"a": 4, "b": 3, "c": 3}),
        ({"a": 3, "b": 50}, {"a": 1, "b": 1}, 20, 4, {"a": 10, "b": 10}),
        ({"a": 3, "b": 50}, {"a": 1, "b": 1}, 20, 1, {"a": 3, "b": 10}),
        ({"a": 5, "b": 7}, {"a": 0, "b": 2}, 0, 1, {"a": 0, "b": 7}),
    ],
)
def test_counts_by_hand(
    counts: dict[str, int],
    weights: dict[str, float],
    total: int,
    copies: int,
    expected: dict[str, int],
) -> None:
    decisions, health = decided(Mix(weights=weights, total=total, copies=copies), made(counts))
    drawn = Counter(one.record.source for one in decisions if one.kept)
    assert {name: drawn[name] for name in weights} == expected
    assert {n: row["rows"] for n, row in health.figures["domains"].items()} == expected
    names = kept(decisions)
    assert len(set(names)) == len(names)
    uses = Counter(name.partition("/copy-")[0] for name in names)
    assert max(uses.values()) - min(uses.values()) <= copies - 1 and max(uses.values()) <= copies


@given(
    st.lists(st.tuples(st.integers(1, 400), st.floats(0.01, 5)), min_size=1, max_size=5),
    st.integers(1, 3),
)
def test_the_largest_mix_has_the_shares_to_one_row_and_no_larger_one_fits(
    domains: list[tuple[int, float]], copies: int
) -> None:
    counts = {str(i): count for i, (count, _) in enumerate(domains)}
    weights = {str(i): weight for i, (_, weight) in enumerate(domains)}
    found = allocate(weights, counts, 0, copies)
    total, whole = sum(found.values()), sum(weights.values())
    for name, rows in found.items():
        assert rows <= counts[name] * copies
        assert abs(rows - total * weights[name] / whole) < 1 + 1e-6
    # One more row of every domain that is used up would be needed for a larger one.
    larger = total + len(domains) + 1
    assert any(larger * w / whole > counts[n] * copies - 1e-6 for n, w in weights.items())


def test_a_draw_depends_on_seed_and_ids_alone() -> None:
    rows, mix = made({"a": 40, "b": 40}), Mix(weights={"a": 3, "b": 1}, total=24)
    first, _ = decided(mix, rows)
    again, _ = decided(mix, rows[::-1])
    other, _ = decided(mix, rows, Context(seed=1))
    assert kept(first) == kept(again)[::-1] and set(kept(first)) != set(kept(other))
    assert Counter(one.reason for one in first) == {"": 24, "not_drawn": 56}


def test_every_row_has_the_same_chance() -> None:
    """10 of 40 rows under 400 seeds: each is drawn 100 +- 5 * sqrt(400 * 0.25 * 0.75) times."""
    rows, mix = made({"a": 40}), Mix(weights={"a": 1}, total=10)
    drawn = Counter(n for s in range(400) for n in kept(decided(mix, rows, Context(seed=s))[0]))
    assert all(abs(drawn[row.id] - 100) < 44 for row in rows)


def test_by_a_nested_column_with_figures() -> None:
    rows = rows_of([{"prompt": "p" * n, "answer": "a", "meta": {"n": n % 2}} for n in range(1, 9)])
    _, health = decided(Mix(weights={"0": 1, "1": 1}, by="meta.n"), rows)
    table = health.figures["domains"]
    assert table["0"]["prompt characters"] == 5 and table["1"]["prompt characters"] == 4
    assert (health.value, health.alarm) == (0, "")


def test_alarm_if_shares_or_the_total_are_missed() -> None:
    rows = made({"a": 3, "b": 50})
    _, short = decided(Mix(weights={"a": 1, "b": 1}, total=20), rows)
    # 3 of 13 are 0.23 in place of 0.5.
    assert short.value == pytest.approx(0.5 - 3 / 13) and "'a'" in short.alarm
    _, both = decided(Mix(weights={"a": 3, "b": 50}, total=106), rows)
    assert both.value == pytest.approx(0) and both.alarm
    _, exact = decided(Mix(weights={"a": 1, "b": 1}), rows)
    assert not exact.alarm


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"weights": {"a": 1}}, "'b'.*no weight"),
        ({"weights": {"a": 1, "b": 1, "c": 1}}, "'c', but no row"),
        ({"weights": {"a": 1, "b": 1}, "by": "lvl"}, "'lvl'.*'level'"),
        ({"weights": {"a": 1, "b": 1}, "by": "nested"}, "'nested'"),
    ],
)
def test_what_does_not_fit_the_rows_is_named(settings: dict[str, Any], named: str) -> None:
    rows = made({"a": 2, "b": 2})
    rows[0].fields["nested"] = ["x"]  # type: ignore[index]
    with pytest.raises(UserError, match=named):
        decided(Mix(**settings), rows)


@pytest.mark.parametrize("weights", [{"a": -1}, {"a": 0}, {"a": float("nan")}, {}])
def test_weights_that_say_nothing_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="weight"):
        Mix(weights=weights)
