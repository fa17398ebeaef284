"""DPO on a policy over four responses, and on one pair of log-probabilities."""

from __future__ import annotations

import math
import random

from sixfold.pages.lab import Bars, Breaking, Chart, Control, Curve, Lab, Outcome, Table, Value

from .controls import seed_control
from .preferences import PREFERENCE_SOURCE, RESPONSES, TRUE_SCORES, labelled_pair, logistic, sigmoid
from .softmax_policy import softmax

FIRST, BEST = 0, len(RESPONSES) - 1
TRUE_GAP = TRUE_SCORES[BEST] - TRUE_SCORES[FIRST]


def optimal_policy(beta: float, source: str = "formula") -> list[float]:
    """Maximiser of E[score] - beta * KL(pi || uniform): softmax(score / beta)."""
    if source == "formula":
        return softmax([score / beta for score in TRUE_SCORES])
    import torch

    from sixfold.preference.tilt import tilted

    scores = torch.tensor(TRUE_SCORES, dtype=torch.float64)
    found: list[float] = tilted(torch.zeros_like(scores), scores, beta).exp().tolist()
    return found


def train_policy(
    beta: float, eta: float, steps: int, seed: int, source: str = "formula"
) -> tuple[list[float], list[float]]:
    """Run SGD on the DPO loss with a uniform reference, one pair per step.

    Args:
        steps: number of pairs.
        seed: seed of the pairs and their labels.
        source: "formula" or "library".

    Returns:
        (logits, pi(D) after each step).
    """
    draw, loss = random.Random(seed), logistic(source)
    logits = [0.0] * len(RESPONSES)
    best: list[float] = []
    for _ in range(steps):
        winner, loser = labelled_pair(draw)
        # The reference is uniform, so log-ratios differ by the difference of the logits.
        margin = beta * (logits[winner] - logits[loser])
        push = eta * beta * loss(margin)[1]
        logits[winner] += push
        logits[loser] -= push
        best.append(softmax(logits)[BEST])
    return logits, best


def dpo_policy(*, beta: float, eta: float, steps: int, seed: int, source: str) -> Outcome:
    """Train a softmax policy over four responses by DPO."""
    logits, best = train_policy(beta, eta, steps, seed, source)
    policy = softmax(logits)
    log_policy = [math.log(max(p, 1e-300)) for p in policy]
    rewards = [beta * (logp + math.log(len(RESPONSES))) for logp in log_policy]
    gap = rewards[BEST] - rewards[FIRST]
    best_policy = optimal_policy(beta, source)
    rows: list[list[Value]] = [
        [name, TRUE_SCORES[i], policy[i], best_policy[i], log_policy[i], rewards[i]]
        for i, name in enumerate(RESPONSES)
    ]
    columns = ("response", "true score", "pi", "optimal pi", "log pi", "implicit reward")
    return Outcome(
        values={
            "pairs": steps,
            "policy": policy,
            "log_probabilities": log_policy,
            "average_probability_of_best": sum(best) / len(best),
            "implicit_reward_gap": gap,
            "true_reward_gap": TRUE_GAP,
        },
        tables=(Table("Responses", columns, rows),),
        figures=(
            Bars("Policy", "probability", RESPONSES, policy),
            Chart(
                "Training",
                "pairs",
                "probability",
                (Curve("pi(D)", [(n, p) for n, p in enumerate(best, 1)]),),
            ),
        ),
    )


DPO_POLICY = Lab(
    name="dpo-policy",
    title="DPO on four responses: beta and the learning rate decide the implicit reward",
    about=(
        "Four responses have the true scores 0, 1, 2 and 2.5; the reference policy is uniform."
        " Every step draws a pair with a Bradley-Terry label and updates the logits by"
        " eta * beta * sigmoid(-margin) * grad(log pi_w - log pi_l), with"
        " margin = beta * (log-ratio_w - log-ratio_l). At the optimum"
        " pi = pi_ref * exp(score / beta) / Z, and the implicit reward beta * log(pi / pi_ref)"
        " has the gaps of the true scores: 2.5 between D and A. Rafailov et al. (2023),"
        " equations 4 to 7."
    ),
    controls=(
        Control("beta", 0.5, "KL weight", low=0.05, high=2.0, step=0.05),
        Control("eta", 0.1, "learning rate", low=0.01, high=0.5, step=0.01),
        Control("steps", 500, "number of pairs", low=1, high=20_000, step=50),
        seed_control("the pairs and labels"),
        PREFERENCE_SOURCE,
    ),
    run=dpo_policy,
    breaking=Breaking(
        breaks={"beta": 0.05, "eta": 0.01, "steps": 500, "seed": 0},
        safe={"beta": 0.5, "eta": 0.1, "steps": 5000, "seed": 0},
        why="A margin grows by at most 2 * eta * beta^2 per pair: hardly at all if both are small.",
        failed=lambda outcome: abs(outcome.number("implicit_reward_gap") - TRUE_GAP) > 1.0,
    ),
    most_outcomes=100,
)


def dpo_margin(*, beta: float, eta: float, steps: int, source: str) -> Outcome:
    """Train the log-probabilities of one pair by DPO.

    The gradient of the loss is -beta * sigmoid(-margin) for the chosen response and the opposite
    for the rejected one.
    """
    loss = logistic(source)
    chosen = rejected = 0.0  # log-ratios to the reference
    margins = [0.0]
    for _ in range(steps):
        push = eta * beta * loss(margins[-1])[1]
        chosen, rejected = chosen + push, rejected - push
        margins.append(beta * (chosen - rejected))
    margin = margins[-1]
    return Outcome(
        values={
            "reward_chosen": beta * chosen,
            "reward_rejected": beta * rejected,
            "margin": margin,
            "preference_probability": sigmoid(margin),
            "preference_accuracy": float(margin > 0),
            "loss": loss(margin)[0],
            "gradient_of_chosen": -beta * loss(margin)[1],
        },
        figures=(Chart("Margin", "step", "margin", (Curve("margin", list(enumerate(margins))),)),),
    )


DPO_MARGIN = Lab(
    name="dpo-margin",
    title="DPO on one pair: the margin grows more slowly the larger it is",
    about=(
        "Chosen and rejected response start at the reference: both log-ratios are 0. Every step"
        " adds eta * beta * sigmoid(-margin) to log pi(chosen) and subtracts it from"
        " log pi(rejected), with margin = r_w - r_l and r = beta * log(pi / pi_ref)."
        " The loss is -log sigmoid(margin). Rafailov et al. (2023), equation 7."
    ),
    controls=(
        Control("beta", 0.1, "KL weight", low=0.05, high=1.0, step=0.05),
        Control("eta", 0.2, "learning rate", low=0.01, high=1.0, step=0.01),
        Control("steps", 100, "number of updates", low=0, high=2000, step=10),
        PREFERENCE_SOURCE,
    ),
    run=dpo_margin,
    breaking=Breaking(
        breaks={"beta": 0.05, "eta": 0.01},
        safe={"beta": 0.5, "eta": 0.2},
        why="The first steps add 2 * eta * beta^2 * sigmoid(0) to the margin, which is almost 0.",
        failed=lambda outcome: outcome.number("preference_probability") < 0.51,
    ),
)

LABS = (DPO_POLICY, DPO_MARGIN)
