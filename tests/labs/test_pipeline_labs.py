"""Labs of the pipeline before reinforcement learning, and of its last stage: G01 to G06."""

from __future__ import annotations

import math

import pytest

from sixfold_labs.catalogue import find
from sixfold_labs.char_predictor import entropy, followers, predict, tempered
from sixfold_labs.group_advantages import degenerate, zscore
from sixfold_labs.group_policy import update
from sixfold_labs.loss_mask import IGNORED, example, targets
from sixfold_labs.serial_compute import direct_accuracy, written_accuracy


def test_parameters_of_the_small_transformer() -> None:
    outcome = find("transformer-shapes")()
    assert outcome.values["parameters"] == 796_416
    assert outcome.number("parameters_per_block") == pytest.approx(197_800, abs=50)
    assert outcome.values["forward_flops_per_token"] == 2 * 796_416
    assert outcome.values["training_flops"] == 6 * 796_416 * 4 * 11


def test_shapes_and_causal_mask() -> None:
    outcome = find("transformer-shapes")(batch=2, length=3, width=16, heads=4, vocabulary=29)
    shapes = {str(name): shape for name, shape in outcome.tables[0].rows}
    assert shapes["queries, keys, values"] == "2 x 4 x 3 x 4"
    assert shapes["attention scores"] == "2 x 4 x 3 x 3"
    assert shapes["logits"] == "2 x 3 x 29"
    assert [row[1] for row in outcome.tables[2].rows] == ["1..", "11.", "111"]


@pytest.mark.parametrize(
    ("width", "heads", "used"), [(128, 4, 4), (128, 7, 4), (48, 16, 16), (80, 9, 8)]
)
def test_heads_are_lowered_to_a_divisor_of_the_width(width: int, heads: int, used: int) -> None:
    outcome = find("transformer-shapes")(width=width, heads=heads)
    assert outcome.values["heads"] == used
    assert outcome.values["head_width"] == width // used


def test_predictions_counted_by_hand() -> None:
    # After "a": b, c, b. After "ba": c.
    assert followers("abacab", "a") == pytest.approx({"b": 2 / 3, "c": 1 / 3})
    mixed = predict("abacab", "ba")
    assert mixed == pytest.approx({"b": 0.7 * 2 / 3, "c": 0.7 / 3 + 0.3})
    cold = tempered(mixed, 0.5)
    assert cold["b"] == pytest.approx(mixed["b"] ** 2 / (mixed["b"] ** 2 + mixed["c"] ** 2))
    # "za" never occurs, so "a" alone decides. "z" never occurs, so frequencies decide.
    assert predict("abacab", "za") == pytest.approx({"b": 2 / 3, "c": 1 / 3})
    assert predict("abacab", "z") == pytest.approx({"a": 1 / 2, "b": 1 / 3, "c": 1 / 6})


def test_entropy_and_perplexity_of_the_predictor() -> None:
    assert entropy({"a": 0.5, "b": 0.5}) == pytest.approx(math.log(2))
    outcomes = [find("char-predictor")(temperature=t) for t in (0.1, 1.0, 2.0)]
    perplexities = [outcome.number("perplexity") for outcome in outcomes]
    assert perplexities == sorted(perplexities)
    assert perplexities[2] < outcomes[2].number("possible_characters")
    assert math.log(perplexities[1]) == pytest.approx(outcomes[1].number("entropy_nats"))


def test_targets_ignore_all_but_the_last_prompt_position() -> None:
    prompt, response = example("abcd")
    assert (prompt, response) == ("<abcd>", "dcba#")
    assert targets(prompt, response, masked=True) == [IGNORED] * 5 + list("dcba#")
    assert targets(prompt, response, masked=False) == list("abcd>dcba#")


@pytest.mark.parametrize("word", ["hello", "cat", "banana", "post"])
def test_trained_positions_of_each_word(word: str) -> None:
    outcome = find("loss-mask")(word=word)
    size = len(word)
    assert outcome.values["ignored_positions"] == list(range(size + 1))
    assert outcome.values["trained_positions"] == list(range(size + 1, 2 * size + 2))
    assert outcome.values["first_trained_prediction"] == word[-1]
    unmasked = find("loss-mask")(word=word, mask_prompt=False)
    assert unmasked.values["trained_prompt_characters"] == size + 1


@pytest.mark.parametrize(
    ("k", "direct", "written"), [(2, 95, 98), (3, 80, 96), (4, 55, 94), (5, 30, 92), (6, 15, 90)]
)
def test_illustrative_accuracies_with_4_layers(k: int, direct: float, written: float) -> None:
    assert 100 * direct_accuracy(k, 4) == pytest.approx(direct)
    assert 100 * written_accuracy(k) == pytest.approx(written, abs=0.5)


def test_serial_slots_and_written_tokens() -> None:
    outcome = find("serial-compute")(layers=3, k=5)
    assert outcome.values["additions_needed"] == 4
    assert outcome.values["serial_slots_direct"] == 3
    assert outcome.values["solvable_directly"] is False
    assert outcome.values["written_tokens"] == 29
    assert outcome.values["serial_slots_written"] == 87
    assert find("serial-compute")(layers=4, k=5).values["solvable_directly"] is True


def test_direct_accuracy_falls_with_numbers_and_rises_with_layers() -> None:
    by_size = [direct_accuracy(k, 4) for k in range(2, 13)]
    by_depth = [direct_accuracy(6, layers) for layers in range(1, 13)]
    assert by_size == sorted(by_size, reverse=True)
    assert by_depth == sorted(by_depth)
    assert 0 < by_size[-1] < by_depth[-1] < 1


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 1, 0], [1, -1, 1, -1]),
        ([1, 1, 1, 0], [0.577, 0.577, 0.577, -1.732]),
        ([1, 1, 1, 1], [0, 0, 0, 0]),
        ([0, 0], [0, 0]),
    ],
)
def test_group_advantages(rewards: list[float], expected: list[float]) -> None:
    assert zscore(rewards) == pytest.approx(expected, abs=5e-4)
    assert degenerate(rewards) is not any(expected)


def test_group_updates_by_hand() -> None:
    assert update(0.2, [1, 0, 1, 0], beta=0.5) == pytest.approx(0.2 + 0.18 * 0.5)
    assert update(0.6, [1, 0, 1, 0], beta=0.5) == pytest.approx(0.6 + 0.09 - 0.18 * 0.5 * 0.4)
    assert update(0.6, [1, 1, 1, 1], beta=0.5) == 0.6
    assert update(0.95, [1, 0, 1, 0], beta=0.0) == 0.99


@pytest.mark.parametrize(("k", "dead"), [(2, 0.68), (4, 0.4112), (8, 0.1678)])
def test_share_of_dead_groups_at_the_start(k: int, dead: float) -> None:
    # p^K + (1 - p)^K at p = 0.2
    runs = [
        find("group-policy")(k=k, steps=1, seed=s).number("dead_group_rate") for s in range(800)
    ]
    assert sum(runs) / len(runs) == pytest.approx(dead, abs=0.05)


def test_kl_weight_holds_the_policy_back() -> None:
    lab = find("group-policy")
    free, held = lab(beta=0.0, k=8), lab(beta=0.5, k=8)
    assert free.number("kl") == pytest.approx(10 * 0.79**2)
    assert held.number("kl") < free.number("kl")
    assert held.number("recent_dead_group_rate") < free.number("recent_dead_group_rate")


def test_group_policy_by_the_library_takes_the_same_path() -> None:
    """Both advantages are 0 for a dead group, and agree to rounding otherwise."""
    lab = find("group-policy")
    ours, librarys = lab(steps=60, seed=1), lab(steps=60, seed=1, source="library")
    assert librarys.values["last_rewards"] == ours.values["last_rewards"]
    assert librarys.number("p_correct") == pytest.approx(ours.number("p_correct"), rel=1e-6)


def test_measured_dead_groups_agree_with_the_formula_along_the_path() -> None:
    """One group is dead or not, with the probability at its own p: their sum has mean 0 around the
    expectation and a variance below steps / 4.
    """
    for seed in range(5):
        outcome = find("group-policy")(k=4, steps=2000, seed=seed)
        gap = outcome.number("dead_group_rate") - outcome.number("expected_dead_group_rate")
        assert abs(gap) < 4 * 0.5 / 2000**0.5
