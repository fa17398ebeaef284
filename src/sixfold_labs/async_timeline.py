"""Step time, idle time and clip fraction of a topology at a staleness."""

from __future__ import annotations

from sixfold.pages.lab import Breaking, Chart, Control, Curve, Lab, Outcome
from sixfold_planning.freshness import BANDS, clip_fraction, clip_verdict, idle_band
from sixfold_planning.step_time import TOPOLOGIES, StepTime, step_time

from .controls import seed_control, source_control
from .topology import phases, timeline

MOST_STALE = 12
VOCABULARY, SAMPLES, UPDATES, LEARNING_RATE, CLIP = 32, 512, 60, 6.0, 0.2


def idle_share(topology: str, step: StepTime) -> float:
    """Share of the step in which the pool that is done first waits for the other one.

    Colocated roles share one pool, which does not wait. Sync is not idle time.
    """
    if topology == "colocated":
        return 0.0
    return max(step.sampler_idle, step.trainer_idle) / step.seconds


def trained_clip_fraction(staleness: int, seed: int) -> tuple[float, float]:
    """Train a small policy on stale samples with the library's clipped surrogate.

    A softmax policy over 32 tokens with fixed random rewards makes 60 updates of 512 samples. The
    samples of an update come from the weights `staleness` updates before.

    Args:
        staleness: weight versions between sampling and training.

    Returns:
        Means over the updates of two shares of the samples: ratio outside the clip band, and
        gradient removed by the clip.
    """
    import torch

    from sixfold.algorithm.losses import clipped_surrogate

    draw = torch.Generator().manual_seed(seed)
    rewards = torch.rand(VOCABULARY, generator=draw)
    weights = torch.zeros(VOCABULARY)
    versions = [weights.log_softmax(-1)] * (staleness + 1)
    outside = active = 0.0
    for _ in range(UPDATES):
        old = versions[-1 - staleness]
        tokens = torch.multinomial(old.exp(), SAMPLES, replacement=True, generator=draw)
        advantages = rewards[tokens] - rewards[tokens].mean()
        weights.requires_grad_()
        logp = weights.log_softmax(-1)[tokens]
        clipped = clipped_surrogate(logp[None], old[tokens][None], advantages[None], CLIP, CLIP)
        (gradient,) = torch.autograd.grad(clipped.loss.mean(), weights)
        weights = (weights - LEARNING_RATE * gradient).detach()
        versions.append(weights.log_softmax(-1))
        outside += float(clipped.outside.double().mean()) / UPDATES
        active += float(clipped.active.double().mean()) / UPDATES
    return outside, active


def async_timeline(
    *,
    topology: str,
    rollout: float,
    train: float,
    sync: float,
    staleness: int,
    source: str,
    seed: int,
) -> Outcome:
    """Time a topology."""
    times = phases(rollout, train, sync)
    steps = {name: step_time(times, topology=name, sync_hidden=False) for name in TOPOLOGIES}
    step = steps[topology]
    stale = staleness if topology == "async" else 0
    clipped = active = clip_fraction(stale)
    if source == "library":
        clipped, active = trained_clip_fraction(stale, seed)
    curve = [(float(d), clip_fraction(d)) for d in range(MOST_STALE + 1)]
    return Outcome(
        values={
            "step_seconds": step.seconds,
            "relative_throughput": steps["colocated"].seconds / step.seconds,
            "idle_share": idle_share(topology, step),
            "idle_band_seconds": idle_band(rollout=rollout, trainer=train, sync=sync),
            "clip_fraction": clipped,
            "removed_gradients": active if source == "library" else None,
            "clip_verdict": clip_verdict(clipped, BANDS["async"]),
        },
        figures=(
            timeline(topology, step, times),
            Chart(
                "Clip fraction of async training",
                "staleness, weight versions",
                "share of tokens",
                (Curve("1 - exp(-staleness / 20)", curve),),
            ),
        ),
    )


ASYNC_TIMELINE = Lab(
    name="async-timeline",
    title="Async training: what it saves in idle time and costs in clipped tokens",
    about=(
        "A step takes R + T + S colocated, max(R, T) + S disaggregated and max(R, T, S) async, for"
        " rollout R, training T and weight sync S. The idle share is the part of a step in which"
        " the faster of two pools waits for the slower one. Async samples are `staleness` weight"
        " versions old; the clip fraction is modelled as 1 - exp(-staleness / 20). Below 5 % is"
        " healthy, below 15 % stable, from 25 % broken: at a staleness of 6 and more. With the"
        " library as source, a softmax policy over 32 tokens is trained on stale samples with"
        " sixfold's clipped surrogate, and the clip fraction is the measured share of ratios"
        " outside the clip band of 0.2."
    ),
    controls=(
        Control("topology", "async", "placement of the roles", choices=TOPOLOGIES),
        Control("rollout", 20.0, "seconds of rollout", unit="s", low=2.0, high=40.0, step=1.0),
        Control("train", 8.0, "seconds of training", unit="s", low=2.0, high=20.0, step=1.0),
        Control("sync", 3.0, "seconds of weight sync", unit="s", low=0.0, high=10.0, step=1.0),
        Control("staleness", 2, "weight versions, async only", low=0, high=MOST_STALE),
        source_control("the model of the clip fraction", "train a small policy"),
        seed_control("the small policy", sweep=()),
    ),
    run=async_timeline,
    breaking=Breaking(
        breaks={"staleness": 6},
        safe={"staleness": 2},
        why="Samples of weights that are six versions old are clipped too often to learn from.",
        failed=lambda outcome: outcome.values["clip_verdict"] == "broken",
    ),
)

LABS = (ASYNC_TIMELINE,)
