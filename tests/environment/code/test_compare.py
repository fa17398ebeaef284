"""Comparison of outputs with expected values."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from sixfold_environments.code.compare import Rules, same_text
from sixfold_environments.code.wire import MAX_DEPTH, MAX_PARTS, Encoder, NotPlain, decode

BIG = 10**40


def sent(value: Any) -> Any:
    """A value as it is received through the pipe."""
    return json.loads(json.dumps(Encoder().encode(value)))


PLAIN: list[Any] = [
    *(None, True, False, 0, -7, 2**53 - 1, 2**53, -(2**53), BIG, 0.1, -0.0, 1e300, "", "é\ud800"),
    *(
        [],
        [1, [2.5, "x"]],
        (1, (2,)),
        {1, 2},
        frozenset({3}),
        {"a": 1, 2: [None]},
        b"\0\xff",
        1 + 2j,
    ),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_keep_their_type_on_the_way(value: Any) -> None:
    found = decode(sent(value))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("value", PLAIN, ids=repr)
@pytest.mark.parametrize("as_python", [False, True])
def test_a_value_equals_itself_and_no_other(value: Any, as_python: bool) -> None:
    rules = Rules(as_python=as_python)
    for other in PLAIN:
        same = rules.same(value, sent(other))
        if as_python or type(value) is type(other):
            assert same is (value == other)


@pytest.mark.parametrize(
    ("expected", "found", "strict", "python"),
    [
        (0, False, False, True),
        (1, True, False, True),
        (True, 1, False, True),
        (3, 3.0, False, True),
        (3.0, 3, True, True),
        (3, "3", False, False),
        ("3", 3, False, False),
        ([1, 2], (1, 2), True, False),
        ((1, 2), [1, 2], True, False),
        ([1, 2], {1, 2}, False, False),
        ([[1], [2]], [(1,), (2,)], True, False),
        ({1, 2}, frozenset({1, 2}), True, True),
        ({"1": "a"}, {1: "a"}, True, False),
        ({"a": 1}, {"a": 1, "b": 2}, False, False),
        ({"a": 1}, [["a", 1]], False, False),
        (5 * 10**16, 5 * 10**16 + 1, False, False),
        (5 * 10**16, 5e16 + 8, False, False),
        (0.3, 0.1 + 0.2, False, False),
        (1.5, math.nan, False, False),
        (None, 0, False, False),
        ([], None, False, False),
    ],
)
def test_types_count_strictly_or_as_in_python(
    expected: Any, found: Any, strict: bool, python: bool
) -> None:
    assert Rules().same(expected, sent(found)) is strict
    assert Rules(as_python=True).same(expected, sent(found)) is python


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        (0.5, 0.5 + 1e-9, True),
        (0.5, 0.6, False),
        (1e9, 1e9 + 100, True),
        (3, 3.0, True),
        (0.5, math.nan, False),
        (0.5, math.inf, False),
        (0, False, False),
        ([0.5, 1], [0.5, 1.0000001], True),
        (0.5, 10**400, False),
        ("0.5", 0.5, False),
    ],
)
def test_a_tolerance_holds_for_finite_numbers_only(expected: Any, found: Any, same: bool) -> None:
    assert Rules(1e-6).same(expected, sent(found)) is same


@pytest.mark.parametrize(
    "forged",
    [
        {"i": "zz"},
        {"f": "x"},
        {"f": 3},
        {"d": 5},
        {"d": [[1]]},
        {"d": [1]},
        {"t": None},
        {"c": []},
        {"c": ["a", "b"]},
        {},
        {"x": 1},
        {"f": "0x1p99999"},
        {"s": {"s": 1}},
    ],
    ids=repr,
)
@pytest.mark.parametrize("as_python", [False, True])
def test_forged_json_equals_nothing(forged: Any, as_python: bool) -> None:
    rules = Rules(as_python=as_python)
    for expected in (*PLAIN, (), {}):
        assert not rules.same(expected, forged)


def test_large_sets_of_tuples_are_compared_in_linear_time() -> None:
    cells = {(x, (y, str(y))) for x in range(60) for y in range(60)}
    other = {(x, (y, str(y))) for x in range(59, -1, -1) for y in range(60)}
    for as_python in (False, True):
        rules = Rules(as_python=as_python)
        assert rules.same(cells, sent(other))
        assert not rules.same(cells, sent((other - {(0, (0, "0"))}) | {(0, (0, "1"))} | {(-1,)}))
        assert not rules.same(cells, sent((other - {(0, (0, "0"))}) | {(0, 0)}))


def test_large_dictionaries_are_compared_in_linear_time() -> None:
    large = {number: str(number) for number in range(5_000)}
    reverse = dict(reversed(large.items()))
    assert Rules(as_python=True).same(large, sent(reverse))
    assert not Rules(as_python=True).same(large, sent(reverse | {0: "1"}))


class Subclass(list[int]):
    """A list that equals everything."""

    def __eq__(self, other: object) -> bool:
        return True


@pytest.mark.parametrize(
    "value",
    [Subclass([1]), object(), iter([]), (x for x in ()), type, 1 << (1 << 19)],
    ids=lambda v: type(v).__name__,
)
def test_only_plain_data_is_sent(value: Any) -> None:
    with pytest.raises(NotPlain):
        Encoder().encode(value)


def test_values_are_limited_in_depth_and_size() -> None:
    deep: list[Any] = []
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    for value in (deep, cyclic, [0] * MAX_PARTS):
        with pytest.raises(NotPlain):
            Encoder().encode(value)


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        ("3\n", "3", True),
        ("3\n", "3  \n\n", True),
        ("1 2\n3\n", "1  2 \n3", True),
        ("1 2\n3\n", "1\n2\n3", False),
        ("1 2 3", "3 2 1", False),
        ("1 2 3", "1 2 3 3", False),
        ("yes", "YES", False),
        ("5", "5.0", False),
        ("5", "+5", False),
        ("007", "7", False),
        ("0010", "10", False),
        ("5.0", "5", True),
        ("5.50", "5.5", True),
        ("1e3", "1000", True),
        ("0.3", "0.30000000000000004", False),
        ("50000000000000000", "50000000000000001", False),
        ("5e16", "50000000000000001", False),
        ("3", "３", False),
        ("3.0", "３.0", False),
        ("nan", "nan", True),
        ("1.0", "nan", False),
        ("1.0", "inf", False),
        ("", "", True),
        ("", "x", False),
        ("a\n\nb", "a\nb", False),
        ("1.0", "1e99999999", False),
        ("1.5", "1_5e-1", False),
    ],
)
def test_printed_text_is_compared_word_by_word(expected: str, found: str, same: bool) -> None:
    assert same_text(expected, found) is same


def test_a_tolerance_also_holds_for_printed_integers() -> None:
    assert same_text("5", "5.0", 1e-6)
    assert same_text("0.333333 a", "0.33333333 a", 1e-6)
    assert not same_text("0.3", "0.4", 1e-6)
    assert not same_text("0.3", "nan", 1e-6)
