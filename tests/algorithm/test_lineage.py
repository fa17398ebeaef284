"""The lineage table: the published one for the six algorithms of the family, and the account of who
changed what.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from sixfold.algorithm.lineage import cells, changes, docstring, home
from sixfold.algorithm.zoo import ZOO

PUBLISHED = {
    # baseline, ratio, what the advantage is divided by, what a token's loss is divided by
    "reinforce": ("none", "none", "none", "none"),
    "ppo": ("V", "symmetric", "batch norm", "token level"),
    "grpo": ("group mean", "symmetric", "std", "|y|"),
    "rloo": ("leave one out", "none", "none", "none"),
    "dapo": ("group mean", "asymmetric", "std", "token level"),
    "dr_grpo": ("group mean", "symmetric", "none", "constant"),
}

BASELINES = {
    "none": "none",
    "critic": "V",
    "group mean": "group mean",
    "mean of the others": "leave one out",
}
SCALES = {"-": "none", "batch std": "batch norm", "group std": "std"}
DIVISORS = {
    "sequence-sum": "none",
    "token": "token level",
    "sequence": "|y|",
    "constant": "constant",
}


def ratio(cell: str) -> str:
    """none, symmetric or asymmetric, from a cell such as "token, 0.8 to 1.28"."""
    if cell == "none":
        return "none"
    low, high = (float(word) for word in cell.removeprefix("token, ").split(" to "))
    return "symmetric" if abs(low + high - 2) < 1e-9 else "asymmetric"


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_matrix_of_the_six_is_the_published_one(name: str) -> None:
    cell = cells(ZOO[name])
    found = (
        BASELINES[cell["baseline"]],
        ratio(cell["ratio and clip"]),
        SCALES[cell["std/scale"]],
        DIVISORS[cell["aggregation"]],
    )
    assert found == PUBLISHED[name]


def test_models_and_samples_of_the_six() -> None:
    assert {
        name: (
            cells(ZOO[name])["critic"],
            cells(ZOO[name])["models in memory"],
            cells(ZOO[name])["samples"],
        )
        for name in PUBLISHED
    } == {
        "reinforce": ("no", "policy", "1"),
        "ppo": ("yes", "policy + critic", "1"),
        "grpo": ("no", "policy", "K >= 2"),
        "rloo": ("no", "policy", "K >= 2"),
        "dapo": ("no", "policy", "K >= 2"),
        "dr_grpo": ("no", "policy", "K >= 2"),
    }
    assert (
        cells(replace(ZOO["ppo"], beta=0.02))["models in memory"] == "policy + critic + reference"
    )
    assert cells(replace(ZOO["reinforce"], dynamic_sampling=2))["samples"] == "K >= 2"


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("cispo", "token, weight <= 5"),
        ("gspo", "sequence, 0.9997 to 1.0004"),
        ("gmpo", "sequence, log-ratios -0.4 to 0.4"),
        ("sapo", "token, tau 1 / 1.05"),
        ("kimi", "sequence, tau 0.1"),
    ],
)
def test_ratios_that_are_not_clipped_to_a_band_around_1(name: str, cell: str) -> None:
    assert cells(ZOO[name])["ratio and clip"] == cell


def test_a_dual_clip_and_a_weight_with_two_bounds_are_shown() -> None:
    assert (
        cells(replace(ZOO["grpo"], dual_clip=3.0))["ratio and clip"] == "token, 0.8 to 1.2, dual 3"
    )
    assert cells(replace(ZOO["cispo"], clip_low=0.5))["ratio and clip"] == "token, 0.5 to 5"


def test_the_four_patches_of_dapo_and_the_two_of_dr_grpo() -> None:
    assert changes(ZOO["dapo"]) == [
        ("aggregation", "sequence", "token"),
        ("clip_high", 0.2, 0.28),
        ("overlong_buffer", 0.0, 0.2),
        ("dynamic_sampling", 0, 4),
    ]
    assert changes(ZOO["dr_grpo"]) == [
        ("advantage", "group_zscore", "group_mean"),
        ("aggregation", "sequence", "constant"),
    ]
    assert changes(ZOO["reinforce"]) == []


@pytest.mark.parametrize("name", ZOO)
def test_a_row_is_its_predecessor_with_its_changes(name: str) -> None:
    row = ZOO[name]
    if row.patches:
        patched = replace(ZOO[row.patches], **{c.field: c.after for c in changes(row)})
        assert replace(patched, name=row.name, patches=row.patches, paper=row.paper) == row
        assert changes(row), "a row that changes nothing is not another algorithm"


def test_the_account_is_that_of_the_file_that_holds_the_row() -> None:
    from sixfold.algorithm import dapo, gspo, reinforce_pp

    assert docstring("dapo") == (dapo.__doc__ or "").strip()
    assert docstring("gspo_token") == docstring("gspo") == (gspo.__doc__ or "").strip()
    assert docstring("reinforce_pp_baseline") == (reinforce_pp.__doc__ or "").strip()


@pytest.mark.parametrize(
    "name", [name for name, row in ZOO.items() if row.patches and home(name).stem == name]
)
def test_the_account_names_what_the_row_changes(name: str) -> None:
    """'Patches GRPO in advantage and aggregation.' in the docstring is `changes`, in its order; no
    file says it in other words.
    """
    account = " ".join(docstring(name).split())
    ((predecessor, listed),) = re.findall(r"Patches (\w+) in (\w[\w ,]*)\.", account)
    assert ZOO[name].patches == predecessor.lower()
    assert re.split(r", | and ", listed) == [change.field for change in changes(ZOO[name])]
    assert "one line" not in account and "two lines" not in account
