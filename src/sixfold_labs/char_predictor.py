"""Next-character predictor from counts of two and three characters."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache

from sixfold.pages.lab import Bars, Breaking, Control, Lab, Outcome, Table

TEXT = (
    "the model reads the text one character at a time and learns which character comes next. "
    "the rollout samples from the policy, the verifier scores the answer, and the trainer moves "
    "the weights. then the new weights go to the rollout and the next step begins. "
    "the reference stays where it was, so that the policy does not move too far from the text "
    "that it has learned to write. "
)
BIGRAM, TRIGRAM = 0.7, 0.3
TOP = 5

Distribution = dict[str, float]


def normalised(counts: Counter[str]) -> Distribution:
    """Counts divided by their sum."""
    total = counts.total()
    return {character: count / total for character, count in counts.items()}


@cache
def followers(text: str, context: str) -> Distribution:
    """Distribution of the character after `context` in the text. Empty if it never occurs."""
    size = len(context)
    places = range(len(text) - size)
    counts = Counter(text[i + size] for i in places if text[i : i + size] == context)
    return normalised(counts) if counts else {}


def predict(text: str, prompt: str) -> Distribution:
    """0.7 * P(next | last character) + 0.3 * P(next | last two characters).

    An unseen context of two falls back to the last character, and an unseen last character to the
    frequencies of the text.
    """
    one = followers(text, prompt[-1:]) or followers(text, "")
    two = (followers(text, prompt[-2:]) if len(prompt) >= 2 else {}) or one
    return {c: BIGRAM * one.get(c, 0.0) + TRIGRAM * two.get(c, 0.0) for c in {*one, *two}}


def tempered(distribution: Distribution, temperature: float) -> Distribution:
    """p^(1/T), normalised: the softmax of log p / T."""
    top = max(distribution.values())
    powers = {c: (p / top) ** (1 / temperature) for c, p in distribution.items()}
    total = sum(powers.values())
    return {c: power / total for c, power in powers.items()}


def entropy(distribution: Distribution) -> float:
    """Entropy in nats."""
    return -sum(p * math.log(p) for p in distribution.values() if p > 0)


def char_predictor(*, prompt: str, temperature: float) -> Outcome:
    """Predict the next character."""
    distribution = tempered(predict(TEXT, prompt.lower()), temperature)
    ranked = sorted(distribution.items(), key=lambda item: (-item[1], item[0]))[:TOP]
    nats = entropy(distribution)
    characters = [repr(c) for c, _ in ranked]
    return Outcome(
        values={
            "most_likely": ranked[0][0],
            "probability": ranked[0][1],
            "entropy_nats": nats,
            "perplexity": math.exp(nats),
            "possible_characters": len(distribution),
        },
        tables=(
            Table(
                "Most likely characters", ("character", "probability"), [[c, p] for c, p in ranked]
            ),
        ),
        figures=(
            Bars("Most likely characters", "probability", characters, [p for _, p in ranked]),
        ),
    )


CHAR_PREDICTOR = Lab(
    name="char-predictor",
    title="A character predictor: temperature, entropy and perplexity",
    about=(
        "Predicts the next character as 0.7 * P(next | last character) + 0.3 * P(next | last two),"
        " counted in a built-in text of a few sentences. Temperature T turns p into"
        " p^(1/T) / sum. Entropy is -sum p log p in nats, perplexity is exp(entropy): the number of"
        " equally likely characters with that entropy."
    ),
    controls=(
        Control("prompt", "the r", "text before the character", sweep=("the r", "th", "wei", "q")),
        Control("temperature", 1.0, "sampling temperature", low=0.1, high=2.0, step=0.1),
    ),
    run=char_predictor,
    breaking=Breaking(
        breaks={"prompt": "the r", "temperature": 2.0},
        safe={"prompt": "the r", "temperature": 0.3},
        why="A high temperature flattens the distribution, so samples are almost random.",
        failed=lambda outcome: outcome.number("probability") < 0.5,
    ),
)

LABS = (CHAR_PREDICTOR,)
