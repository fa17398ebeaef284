"""Training of a Bradley-Terry reward model on noisy preferences."""

from __future__ import annotations

import itertools
import math
import random

from sixfold.pages.lab import Bars, Breaking, Chart, Control, Curve, Lab, Outcome, Table, Value

from .controls import seed_control
from .preferences import PREFERENCE_SOURCE, RESPONSES, TRUE_SCORES, labelled_pair, logistic

PAIRS = tuple(itertools.combinations(range(len(RESPONSES)), 2))


def centred(scores: list[float]) -> list[float]:
    """Scores minus their mean. The Bradley-Terry loss does not change if all scores shift."""
    mean = sum(scores) / len(scores)
    return [score - mean for score in scores]


def score_error(learned: list[float]) -> float:
    """Root mean square of learned minus true scores, both centred."""
    pairs = zip(centred(learned), centred(list(TRUE_SCORES)), strict=True)
    return math.sqrt(sum((a - b) ** 2 for a, b in pairs) / len(learned))


def ordered_pairs(learned: list[float]) -> float:
    """Share of the six pairs that the learned scores order as the true scores do."""
    return sum(learned[high] > learned[low] for low, high in PAIRS) / len(PAIRS)


def fit(
    eta: float, steps: int, seed: int, source: str = "formula"
) -> tuple[list[float], list[float], list[bool]]:
    """Run SGD on -log sigmoid(r_w - r_l), one pair per step.

    Args:
        seed: seed of the pairs and their labels.
        source: "formula" or "library".

    Returns:
        (learned scores, loss of each pair, whether the model agreed with each label before its
        update).
    """
    draw, loss = random.Random(seed), logistic(source)
    scores = [0.0] * len(RESPONSES)
    losses: list[float] = []
    agreed: list[bool] = []
    for _ in range(steps):
        winner, loser = labelled_pair(draw)
        margin = scores[winner] - scores[loser]
        value, weight = loss(margin)
        losses.append(value)
        agreed.append(margin > 0)
        push = eta * weight
        scores[winner] += push
        scores[loser] -= push
    return scores, losses, agreed


def reward_model(*, eta: float, steps: int, seed: int, source: str) -> Outcome:
    """Fit a reward model to pairs with sampled labels."""
    scores, losses, agreed = fit(eta, steps, seed, source)
    learned, true = centred(scores), centred(list(TRUE_SCORES))
    shares = list(itertools.accumulate(agreed))
    rows: list[list[Value]] = [
        [name, TRUE_SCORES[i], true[i], learned[i]] for i, name in enumerate(RESPONSES)
    ]
    return Outcome(
        values={
            "pairs_seen": steps,
            "agreement_with_labels": shares[-1] / steps,
            "correctly_ordered_pairs": ordered_pairs(scores),
            "last_loss": losses[-1],
            "learned_scores": learned,
            "score_error": score_error(scores),
            "largest_score_gap": max(scores) - min(scores),
        },
        tables=(Table("Scores", ("response", "true", "true, centred", "learned"), rows),),
        figures=(
            Bars("Learned scores, centred", "score", RESPONSES, learned),
            Chart(
                "Training",
                "pairs",
                "share",
                (
                    Curve(
                        "agreement with the labels so far",
                        [(n, share / n) for n, share in enumerate(shares, 1)],
                    ),
                ),
            ),
        ),
    )


REWARD_MODEL = Lab(
    name="reward-model",
    title="Bradley-Terry reward model: noisy labels limit agreement, large steps jitter",
    about=(
        "Four responses have the true scores 0, 1, 2 and 2.5. Every step draws two of them and a"
        " winner w with probability sigmoid(score_w - score_l). SGD on the loss"
        " -log sigmoid(r_w - r_l) adds eta * sigmoid(r_l - r_w) to r_w and subtracts it from r_l."
        " The loss does not change if all scores shift, so scores are compared after centring."
        " Agreement with the labels stays below 100 %: even the true scores disagree with a"
        " sampled label. Bradley and Terry (1952); Ouyang et al. (2022), section 3.5."
    ),
    controls=(
        Control("eta", 0.3, "learning rate", low=0.01, high=1.0, step=0.01),
        Control("steps", 500, "number of pairs", low=1, high=10_000, step=50),
        seed_control("the pairs and labels"),
        PREFERENCE_SOURCE,
    ),
    run=reward_model,
    breaking=Breaking(
        breaks={"eta": 1.0, "steps": 5000, "seed": 0},
        safe={"eta": 0.02, "steps": 5000, "seed": 0},
        why="With a large step the last few noisy labels decide the scores.",
        failed=lambda outcome: outcome.number("score_error") > 0.4,
    ),
    most_outcomes=216,
)

LABS = (REWARD_MODEL,)
