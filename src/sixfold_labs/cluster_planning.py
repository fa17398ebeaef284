"""Three short models of a cluster: first fix of a step, size of a sync, async against sync."""

from __future__ import annotations

from sixfold.pages.lab import Bars, Breaking, Chart, Control, Curve, Lab, Outcome
from sixfold_planning.sync_time import sync_volume

FIXES = {
    "rollout": "rollout: prefix caching, continuous batching, more engines",
    "verifier": "verifier: run checks asynchronously and cache them",
    "trainer": "trainer: packing, chunked cross-entropy, more trainer GPUs",
    "sync": "sync: overlap it with the next rollout, send buckets or FP8",
}


def step_triage(
    *, rollout: float, verifier: float, train: float, sync: float, overlap: float
) -> Outcome:
    """Find what limits a step."""
    visible = sync * (1 - overlap / 100)
    sampling = rollout + verifier
    whole = sampling + train + sync
    concurrent = max(sampling, train) + visible
    limiting = (
        {"rollout": rollout, "verifier": verifier} if sampling >= train else {"trainer": train}
    )
    terms = limiting | {"sync": visible}
    wall = max(terms, key=terms.__getitem__)
    labels = ("rollout", "verifier", "train", "sync")
    return Outcome(
        values={
            "synchronous_seconds": whole,
            "async_seconds": concurrent,
            "speedup": whole / concurrent,
            "wall": wall,
            "first_fix": FIXES[wall],
        },
        figures=(Bars("Terms", "seconds", labels, (rollout, verifier, train, sync)),),
    )


STEP_TRIAGE = Lab(
    name="step-triage",
    title="Four durations tell what to fix first",
    about=(
        "A synchronous step takes R + V + T + S. An asynchronous one takes max(R + V, T) +"
        " S (1 - overlap), for rollout R, verifier V, training T and weight sync S. The wall is the"
        " largest term that the asynchronous step waits for."
    ),
    controls=(
        Control("rollout", 240.0, "seconds of rollout", unit="s", low=20.0, high=1000.0, step=20.0),
        Control(
            "verifier", 40.0, "seconds of reward checks", unit="s", low=0.0, high=500.0, step=20.0
        ),
        Control("train", 120.0, "seconds of training", unit="s", low=20.0, high=500.0, step=20.0),
        Control("sync", 20.0, "seconds of weight sync", unit="s", low=0.0, high=200.0, step=10.0),
        Control(
            "overlap",
            0.0,
            "hidden share of the sync, percent",
            unit="%",
            low=0.0,
            high=90.0,
            step=10.0,
        ),
    ),
    run=step_triage,
    breaking=Breaking(
        breaks={"rollout": 40.0, "verifier": 500.0},
        safe={"verifier": 10.0},
        why="Slow checks keep the samples from the trainer for longer than it takes to sample.",
        failed=lambda outcome: outcome.values["wall"] == "verifier",
    ),
)


def sync_size(*, billions: float, copies: int, bandwidth: float, step: float) -> Outcome:
    """Size of a weight sync in bfloat16."""
    volume = sync_volume(
        billions * 1e9, width=2, copies=copies, bytes_per_second=bandwidth * 1e9, step_seconds=step
    )
    return Outcome(
        values={
            "model_gb": volume.model_bytes / 1e9,
            "sent_gb": volume.sent_bytes / 1e9,
            "sync_seconds": volume.seconds,
            "tax": volume.tax,
            "verdict": volume.verdict,
        },
        figures=(Bars("Step", "seconds", ("step", "sync"), (step, volume.seconds)),),
    )


SYNC_SIZE = Lab(
    name="sync-size",
    title="Bytes of a weight sync, its share of a step, and how to send it",
    about=(
        "A sync sends 2 bytes per parameter to every copy. Its tax is the time to send all copies"
        " divided by the step: up to 0.25 a broadcast will do, up to 1 send buckets and overlap"
        " them, above that relay the weights between engines."
    ),
    controls=(
        Control(
            "billions", 70.0, "parameters, billions", unit="billion", low=7.0, high=405.0, step=7.0
        ),
        Control("copies", 4, "engines that receive all weights", low=1, high=64, step=3),
        Control(
            "bandwidth",
            100.0,
            "bandwidth of the sender, GB/s",
            unit="GB/s",
            low=25.0,
            high=900.0,
            step=25.0,
        ),
        Control(
            "step", 60.0, "seconds of a step without sync", unit="s", low=5.0, high=300.0, step=5.0
        ),
    ),
    run=sync_size,
    breaking=Breaking(
        breaks={"billions": 405.0, "copies": 16, "bandwidth": 25.0},
        safe={"billions": 7.0},
        why="Sending the weights to every engine takes longer than the step.",
        failed=lambda outcome: outcome.number("tax") > 1,
    ),
)

ORCHESTRATION_SECONDS = 30
FREE_LAG = 4
WORTH_IT = 1.1
"""Asynchronous training is worth its complexity from this speed-up on. The number is Sixfold's own:
no source gives one.
"""


def synchronous_seconds(gen: float, tail: float, env: float, train: float) -> float:
    """gen * tail + env + train + 30: everything waits for the longest sample."""
    return gen * tail + env + train + ORCHESTRATION_SECONDS


def async_seconds(gen: float, tail: float, env: float, train: float, lag: int) -> float:
    """(max(gen (1 + 0.22 (tail - 1)) + 0.45 env, train) + 8) (1 + 0.06 max(0, lag - 4)).

    Seconds for the progress of one synchronous step: samples more than four versions old cost 6 %
    per version.

    Args:
        gen: seconds of generation at the mean length.
        tail: longest divided by mean length.
        lag: most weight versions between sampling and training.
    """
    sampling = gen * (1 + 0.22 * (tail - 1)) + 0.45 * env
    return (max(sampling, train) + 8) * (1 + 0.06 * max(0, lag - FREE_LAG))


def async_planner(*, gen: float, tail: float, env: float, train: float, lag: int) -> Outcome:
    """Compare synchronous and asynchronous training."""
    whole = synchronous_seconds(gen, tail, env, train)
    concurrent = async_seconds(gen, tail, env, train, lag)
    speedup = whole / concurrent
    call = "asynchronous" if speedup >= WORTH_IT else "synchronous"
    curve = [(float(n), async_seconds(gen, tail, env, train, n)) for n in range(13)]
    return Outcome(
        values={
            "synchronous_seconds": whole,
            "async_seconds": concurrent,
            "speedup": speedup,
            "call": call,
            "staleness_penalty": 0.06 * max(0, lag - FREE_LAG),
        },
        figures=(Chart("Async", "lag, weight versions", "seconds", (Curve("async", curve),)),),
    )


ASYNC_PLANNER = Lab(
    name="async-planner",
    title="Asynchronous or synchronous: long tails and slow environments against staleness",
    about=(
        "A synchronous step takes gen * tail + env + train + 30 seconds. Asynchronous training"
        " takes (max(gen (1 + 0.22 (tail - 1)) + 0.45 env, train) + 8) (1 + 0.06 max(0, lag - 4)):"
        " it hides most of the tail and of the environment, and stale samples cost 6 % per version"
        " beyond four. The call is asynchronous from a speed-up of 1.1."
    ),
    controls=(
        Control("gen", 60.0, "seconds of generation", unit="s", low=5.0, high=600.0, step=25.0),
        Control("tail", 3.0, "longest / mean length", low=1.0, high=6.0, step=0.5),
        Control(
            "env", 20.0, "seconds of the environment", unit="s", low=0.0, high=300.0, step=20.0
        ),
        Control("train", 60.0, "seconds of training", unit="s", low=5.0, high=600.0, step=25.0),
        Control("lag", 4, "most weight versions of staleness", low=0, high=12),
    ),
    run=async_planner,
    breaking=Breaking(
        breaks={"gen": 5.0, "tail": 1.0, "env": 0.0, "train": 300.0, "lag": 12},
        safe={},
        why="Training takes longest, so async hides little, and stale samples cost 48 %.",
        failed=lambda outcome: outcome.number("speedup") < 1,
    ),
)

LABS = (STEP_TRIAGE, SYNC_SIZE, ASYNC_PLANNER)
