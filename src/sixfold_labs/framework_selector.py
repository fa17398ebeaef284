"""Architecture, framework, first optimisation and main risk of a planned run."""

from __future__ import annotations

from sixfold.pages.lab import Breaking, Control, Lab, Outcome

OUTPUTS = ("short", "long", "agentic")
ENVIRONMENTS = ("fast", "slow")
STALENESS = ("on-policy", "tolerated")
BACKENDS = ("any", "vllm", "sglang", "megatron")
ONE_NODE_BILLIONS = 7.0
LARGE_BILLIONS = 70.0

FIRST_OPTIMISATION = {
    "short": "prefix caching: the samples of a group share their prompt",
    "long": "continuous batching and a length cap: the longest sample decides",
    "agentic": "reuse the KV cache across turns and dispatch tools asynchronously",
}

RISK = {
    "colocated": "memory: weights, optimizer and KV cache alternate on the same devices",
    "disaggregated": "weight sync: full weights cross the network in every step",
    "async": "stale samples: watch the clip fraction and limit the staleness",
}


def architecture(billions: float, output: str, environment: str, staleness: str) -> str:
    """Placement of the roles: "colocated", "disaggregated" or "async".

    Args:
        output: kind of completions.
        environment: "slow" if checks or tools take seconds.
        staleness: whether samples of older weights are acceptable.
    """
    waits = output == "agentic" or environment == "slow"
    if waits and staleness == "tolerated":
        return "async"
    return "colocated" if billions <= ONE_NODE_BILLIONS else "disaggregated"


def framework(placement: str, billions: float, backend: str) -> str:
    """Open-source framework that is built for this placement.

    Args:
        backend: engine or trainer that must be used, or "any".
    """
    if backend == "megatron":
        return "NeMo-RL"
    if placement == "async":
        return "slime" if backend == "sglang" else "AReaL"
    if placement == "colocated":
        return "verl" if backend == "sglang" else "TRL"
    return "verl" if billions > LARGE_BILLIONS or backend == "sglang" else "OpenRLHF"


def framework_selector(
    *, billions: float, output: str, environment: str, staleness: str, backend: str
) -> Outcome:
    """Select a framework."""
    placement = architecture(billions, output, environment, staleness)
    waiting = environment == "slow" and placement != "async"
    risk = "slow checks: both pools wait for the last one" if waiting else RISK[placement]
    return Outcome(
        values={
            "architecture": placement,
            "framework": framework(placement, billions, backend),
            "first_optimisation": FIRST_OPTIMISATION[output],
            "risk": risk,
            "waits_for_environment": waiting,
        }
    )


FRAMEWORK_SELECTOR = Lab(
    name="framework-selector",
    title="Model size, completions and environment suggest an architecture and a framework",
    about=(
        "Agentic completions or a slow environment are async if stale samples are tolerated."
        " Otherwise up to 7 billion parameters are colocated on one node, larger models are"
        " disaggregated. Frameworks: TRL colocated, OpenRLHF disaggregated, verl for large models"
        " and SGLang, AReaL async, slime async with SGLang, NeMo-RL for Megatron. The rules are"
        " ours, a summary of what each framework is built for."
    ),
    controls=(
        Control(
            "billions",
            7.0,
            "parameters, billions",
            unit="billion",
            low=0.5,
            high=700.0,
            sweep=(0.5, 7.0, 32.0, 70.0, 405.0, 700.0),
        ),
        Control("output", "long", "kind of completions", choices=OUTPUTS),
        Control("environment", "fast", "speed of checks and tools", choices=ENVIRONMENTS),
        Control("staleness", "tolerated", "samples of older weights", choices=STALENESS),
        Control("backend", "any", "engine or trainer that must be used", choices=BACKENDS),
    ),
    run=framework_selector,
    breaking=Breaking(
        breaks={"environment": "slow", "staleness": "on-policy"},
        safe={"environment": "slow", "staleness": "tolerated"},
        why="Training on fresh samples alone waits for the slowest check of every step.",
        failed=lambda outcome: outcome.values["waits_for_environment"] is True,
    ),
)

LABS = (FRAMEWORK_SELECTOR,)
