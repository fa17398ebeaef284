"""PPO's clip (lesson 10), DAPO without its changes (13), and length bias (14)."""

from __future__ import annotations

import pytest
import torch

from sixfold_labs.catalogue import find
from sixfold_labs.dapo_changes import Changes
from sixfold_labs.dapo_training import LEARNING_RATE, LONGEST, SAMPLES, TOKENS, Group, update

CLIP, DAPO, LENGTH = find("clip-cells"), find("dapo-ablation"), find("length-bias")


@pytest.mark.parametrize("source", ["formula", "library"])
@pytest.mark.parametrize(
    ("chosen", "s1", "s2", "least", "branch", "gradient"),
    [
        ("low-positive", 0.70, 0.80, 0.70, "unclipped", True),
        ("low-negative", -0.70, -0.80, -0.80, "clipped", False),
        ("inside-positive", 1.0, 1.0, 1.0, "equal", True),
        ("inside-negative", -1.0, -1.0, -1.0, "equal", True),
        ("high-positive", 1.4, 1.2, 1.2, "clipped", False),
        ("high-negative", -1.4, -1.2, -1.4, "unclipped", True),
    ],
)
def test_six_cells(
    chosen: str, s1: float, s2: float, least: float, branch: str, gradient: bool, source: str
) -> None:
    outcome = CLIP(chosen=chosen, source=source)
    assert outcome.number("unclipped") == pytest.approx(s1)
    assert outcome.number("clipped") == pytest.approx(s2)
    assert outcome.number("objective") == pytest.approx(least)
    assert (outcome.values["branch"], outcome.values["gradient"]) == (branch, gradient)
    assert outcome.values["cells_without_gradient"] == 2


def test_a_wide_band_clips_nothing() -> None:
    assert CLIP(eps=0.5).values["cells_without_gradient"] == 0


CHANGES = ("clip_higher", "dynamic_sampling", "token_level", "overlong_penalty")


def means(**off: bool) -> tuple[float, float, float]:
    outcomes = [DAPO(**off, seed=seed) for seed in range(60)]
    names = ("final_reward_average", "useful_steps", "entropy")
    final, useful, entropy = (sum(o.number(name) for o in outcomes) / 60 for name in names)
    return final, useful, entropy


@pytest.mark.parametrize(
    ("off", "final", "useful", "entropy"),
    [
        ((), 0.914, 200, 0.70),
        (("clip_higher",), 0.512, 200, 0.02),
        (("dynamic_sampling",), 0.845, 70, 0.70),
        (("token_level",), 0.855, 200, 0.70),
        (("overlong_penalty",), 0.875, 200, 0.70),
        (CHANGES, 0.537, 70, 0.02),
    ],
)
def test_mean_effect_of_each_change(
    off: tuple[str, ...], final: float, useful: float, entropy: float
) -> None:
    found = means(**dict.fromkeys(off, False))
    random = "dynamic_sampling" in off
    assert found[0] == pytest.approx(final, abs=0.02 if random else 1e-3)
    assert found[1] == pytest.approx(useful, abs=4 if random else 0)
    assert found[2] == pytest.approx(entropy, abs=1e-9)


def test_clip_higher_matters_most() -> None:
    losses = {name: means(**{name: False})[0] for name in CHANGES}
    assert min(losses, key=losses.__getitem__) == "clip_higher"


@pytest.mark.nightly
@pytest.mark.slow
def test_changes_of_a_trained_policy() -> None:
    def means(name: str, **off: bool) -> float:
        return sum(DAPO(**off, seed=s, source="library").number(name) for s in range(3)) / 3

    all_off = dict.fromkeys(CHANGES, False)
    assert means("useful_steps") > means("useful_steps", dynamic_sampling=False) + 5
    length = means("mean_length")
    assert length < means("mean_length", token_level=False) - 0.5
    assert length < means("mean_length", overlong_penalty=False) - 0.5
    assert means("final_reward_average") > means("final_reward_average", **all_off) + 0.04
    assert means("entropy") > means("entropy", **all_off) + 0.1


@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize("clip_higher", [True, False])
def test_first_update_of_the_trained_policy_by_hand(token_level: bool, clip_higher: bool) -> None:
    """The ratio is 1 at first, so the gradient is sum_t w_t A (onehot - p)."""
    tokens = torch.tensor([[3], [2]]).repeat(SAMPLES // 2, LONGEST)
    lengths = torch.tensor([2, 8] * (SAMPLES // 2))
    mask = torch.arange(LONGEST)[None] < lengths[:, None]
    rewards = torch.tensor([1.0, 0.0] * (SAMPLES // 2), dtype=torch.float64)
    changes = Changes(clip_higher, False, token_level, False)
    logits = torch.zeros(TOKENS, dtype=torch.float64)
    moved = update(logits, Group(tokens, mask, rewards), changes, 1)
    # Half of the answers: token 3, A = 1, 2 tokens. Half: token 2, A = -1, 8 tokens.
    good, bad = (0.2, 0.8) if token_level else (0.5, 0.5)
    uniform = (good - bad) / TOKENS
    expected = torch.full((TOKENS,), -uniform, dtype=torch.float64)
    expected[3] += good
    expected[2] -= bad
    assert moved.tolist() == pytest.approx((LEARNING_RATE * expected).tolist(), abs=1e-5)


@pytest.mark.parametrize("source", ["formula", "library"])
@pytest.mark.parametrize(
    ("short", "long", "expected"),
    [
        (10, 200, {"GRPO": (0.05, 0.0025), "DAPO": (0.0024, 0.0024), "Dr. GRPO": (0.25, 0.25)}),
        (10, 100, {"GRPO": (0.05, 0.005), "Dr. GRPO": (0.25, 0.25)}),
    ],
)
def test_gradient_per_token(
    source: str, short: int, long: int, expected: dict[str, tuple[float, float]]
) -> None:
    outcome = LENGTH(short=short, long=long, source=source)
    found = {row[0]: row[1:3] for row in outcome.tables[0].rows}
    for name, pair in expected.items():
        assert found[name] == pytest.approx(pair, abs=5e-5)
    assert outcome.number("grpo_ratio") == pytest.approx(short / long)
    assert outcome.number("dapo_ratio") == outcome.number("dr_grpo_ratio") == 1
