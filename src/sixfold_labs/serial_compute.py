"""Serial steps of a sum with and without written intermediate results."""

from __future__ import annotations

import math

from sixfold.pages.lab import Breaking, Chart, Control, Curve, Lab, Outcome, Table

MOST_SUMMANDS = 12
DIRECT_ACCURACY = (0.95, 0.80, 0.55, 0.30, 0.15)
"""Illustrative accuracy of direct answers to sums of 2, 3, 4, 5 and 6 numbers with 4 layers."""
MEASURED_LAYERS = 4
ACCURACY_PER_ADDITION = 0.98


def additions(k: int) -> int:
    """Dependent additions in a sum of k numbers."""
    return k - 1


def written_tokens(k: int) -> int:
    """Tokens of the written-out additions: 6 per addition and 5 for the rest."""
    return additions(k) * 6 + 5


def _logit(p: float) -> float:
    return math.log(p / (1 - p))


def direct_accuracy(k: int, layers: int) -> float:
    """Predicted accuracy without intermediate results.

    Linear interpolation of DIRECT_ACCURACY in the logit, continued with the outer slopes. A model
    with one layer more has the accuracy of a sum with one number less.

    Args:
        k: numbers in the sum.
    """
    points = [_logit(p) for p in DIRECT_ACCURACY]
    place = k - 2 - (layers - MEASURED_LAYERS)
    left = min(max(place, 0), len(points) - 2)
    logit = points[left] + (place - left) * (points[left + 1] - points[left])
    return 1 / (1 + math.exp(-logit))


def written_accuracy(k: int) -> float:
    """Predicted accuracy with intermediate results: 0.98 per addition, errors compound."""
    return float(ACCURACY_PER_ADDITION ** additions(k))


def serial_compute(*, layers: int, k: int) -> Outcome:
    """Compare a direct answer with written intermediate results."""
    tokens = written_tokens(k)
    sizes = range(2, MOST_SUMMANDS + 1)
    direct = [(n, direct_accuracy(n, layers)) for n in sizes]
    written = [(n, written_accuracy(n)) for n in sizes]
    return Outcome(
        values={
            "additions_needed": additions(k),
            "serial_slots_direct": layers,
            "solvable_directly": additions(k) <= layers,
            "written_tokens": tokens,
            "serial_slots_written": tokens * layers,
            "solvable_written": additions(k) <= tokens * layers,
            "layer_operations_direct": layers,
            "layer_operations_written": tokens * layers,
            "accuracy_direct": direct_accuracy(k, layers),
            "accuracy_written": written_accuracy(k),
        },
        tables=(
            Table(
                "Predicted accuracy",
                ("numbers", "direct", "written"),
                [[n, d, w] for (n, d), (_, w) in zip(direct, written, strict=True)],
            ),
        ),
        figures=(
            Chart(
                "Predicted accuracy",
                "numbers in the sum",
                "share of correct answers",
                (Curve("direct", direct), Curve("written", written)),
            ),
        ),
    )


SERIAL_COMPUTE = Lab(
    name="serial-compute",
    title="Chain of thought adds serial steps: a forward pass has one per layer",
    about=(
        "A sum of K numbers needs K - 1 dependent additions. One forward pass of L layers has L"
        " serial slots; R written tokens have R * L. Written out, the additions take 6 (K - 1) + 5"
        " tokens. The accuracies are illustrative: direct answers follow 95, 80, 55, 30 and 15 %"
        " for 2 to 6 numbers with 4 layers, extrapolated in the logit; written ones lose 2 % per"
        " addition, because errors compound."
    ),
    controls=(
        Control("layers", 4, "layers of the model (L)", low=1, high=12),
        Control("k", 4, "numbers in the sum (K)", low=2, high=MOST_SUMMANDS),
    ),
    run=serial_compute,
    breaking=Breaking(
        breaks={"layers": 4, "k": 12},
        safe={"layers": 4, "k": 5},
        why="Eleven dependent additions do not fit into the four serial slots of a forward pass.",
        failed=lambda outcome: outcome.values["solvable_directly"] is False,
    ),
)

LABS = (SERIAL_COMPUTE,)
