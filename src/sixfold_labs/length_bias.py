"""What one token weighs in a short and in a long response, by loss aggregation."""

from __future__ import annotations

from sixfold.pages.lab import Bars, Breaking, Control, Lab, Outcome, Table

from .controls import SOURCE

ADVANTAGE = 0.5
SAMPLES = 2

PerToken = dict[str, tuple[float, float]]
"""Algorithm to the gradient per token of the short and of the long response."""


def per_token(short: int, long: int) -> PerToken:
    """A / |y| for GRPO, A / sum of lengths for DAPO, A / K for Dr. GRPO."""
    token, sample = ADVANTAGE / (short + long), ADVANTAGE / SAMPLES
    return {
        "GRPO": (ADVANTAGE / short, ADVANTAGE / long),
        "DAPO": (token, token),
        "Dr. GRPO": (sample, sample),
    }


def library_per_token(short: int, long: int) -> PerToken:
    """The same from the weights of the library's aggregations, by automatic differentiation."""
    import torch

    from sixfold.algorithm.aggregation import AGGREGATIONS
    from sixfold.algorithm.losses import policy_gradient

    mask = torch.arange(long)[None] < torch.tensor([[short], [long]])
    group = torch.zeros(SAMPLES, dtype=torch.int64)
    # This lab leaves out GRPO's factor 1 / K, which both responses share.
    rules = {"GRPO": ("sequence", SAMPLES), "DAPO": ("token", 1), "Dr. GRPO": ("sequence-sum", 1)}
    found = {}
    for name, (rule, factor) in rules.items():
        logp = torch.zeros(SAMPLES, long, dtype=torch.float64, requires_grad=True)
        weights = AGGREGATIONS[rule](mask.double(), group, long)
        loss = (weights * policy_gradient(logp, torch.full_like(logp, ADVANTAGE).detach())).sum()
        (gradient,) = torch.autograd.grad(loss, logp)
        found[name] = (-factor * float(gradient[0, 0]), -factor * float(gradient[1, 0]))
    return found


def length_bias(*, short: int, long: int, source: str) -> Outcome:
    """Gradient per token of two responses with equal advantage."""
    found = (library_per_token if source == "library" else per_token)(short, long)
    ratios = {name: b / a for name, (a, b) in found.items()}
    return Outcome(
        values={
            "grpo_ratio": ratios["GRPO"],
            "dapo_ratio": ratios["DAPO"],
            "dr_grpo_ratio": ratios["Dr. GRPO"],
        },
        tables=(
            Table(
                "Gradient per token",
                ("algorithm", "short", "long", "long / short"),
                [(name, *pair, ratios[name]) for name, pair in found.items()],
            ),
        ),
        figures=tuple(
            Bars(name, "gradient per token", ("short", "long"), pair)
            for name, pair in found.items()
        ),
    )


LENGTH_BIAS = Lab(
    name="length-bias",
    title="Length bias: what one token weighs in a short and in a long response",
    about=(
        "Two responses (K = 2) with advantage 0.5. Gradient per token: GRPO A / |y|"
        " (arXiv:2402.03300, without the common factor 1 / K), DAPO A / sum of lengths"
        " (arXiv:2503.14476), Dr. GRPO A / K (arXiv:2503.20783, without its constant divisor). In"
        " GRPO a token of a long response weighs less, so long wrong responses are hardly punished."
    ),
    controls=(
        Control("short", 10, "tokens of the short response", unit="tokens", low=2, high=50),
        Control(
            "long", 200, "tokens of the long response", unit="tokens", low=50, high=500, step=10
        ),
        SOURCE,
    ),
    run=length_bias,
    breaking=Breaking(
        breaks={"short": 2, "long": 500},
        safe={"short": 50, "long": 50},
        why="The mean over each response divides the same advantage by very different lengths.",
        failed=lambda outcome: outcome.number("grpo_ratio") < 0.1,
    ),
)

LABS = (LENGTH_BIAS,)
