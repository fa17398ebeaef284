"""Operations of a weight sync, and five optimisations that shorten it."""

from __future__ import annotations

from sixfold.pages.lab import Bars, Breaking, Control, Lab, Outcome, Table, Value
from sixfold_planning.sync_time import (
    OPERATIONS,
    OPTIMISATIONS,
    SyncLinks,
    broadcast_sends,
    cumulative_sync_seconds,
    optimised_sync_seconds,
    sync_operations,
)

NVLINK, MEMORY = 300e9, 3.35e12
"""Bytes per second: NVLink of an A100 in one direction, memory of an H100."""

MOST_TAX = 0.25
"""Share of a step above which a plain broadcast is too slow."""


def weight_sync(
    *,
    billions: float,
    ranks: int,
    engines: int,
    network: float,
    step: float,
    tree: bool,
    buckets: bool,
    fp8: bool,
    zero_copy: bool,
    overlap: bool,
) -> Outcome:
    """Time a weight sync in bfloat16, then apply the optimisations."""
    seconds = sync_operations(
        billions * 1e9,
        links=SyncLinks(gather=NVLINK, network=network * 1e9, reshard=network * 1e9, memory=MEMORY),
        trainer_ranks=ranks,
        trained_width=2,
        sent_width=2,
        operations=OPERATIONS,
    )
    switches = (tree, buckets, fp8, zero_copy, overlap)
    enabled = [name for name, on in zip(OPTIMISATIONS, switches, strict=True) if on]
    plain = sum(seconds.values())
    found = optimised_sync_seconds(plain, enabled)
    stages = {"none": plain} | cumulative_sync_seconds(plain, enabled)
    rows: list[list[Value]] = [[name, value, value / plain] for name, value in stages.items()]
    return Outcome(
        values={
            **{f"{name}_seconds": value for name, value in seconds.items() if value},
            "plain_seconds": plain,
            "sync_seconds": found,
            "relative": found / plain,
            "tax": found / step,
            "extra_staleness": int(overlap),
            "most_sends": max(broadcast_sends(engines, tree=tree)),
        },
        tables=(Table("One after another", ("optimisation", "seconds", "relative"), rows),),
        figures=(Bars("Sync", "seconds", tuple(stages), tuple(stages.values())),),
    )


WEIGHT_SYNC = Lab(
    name="weight-sync",
    title="Five optimisations of a weight sync",
    about=(
        "A sync gathers the trainer's shards (NVLink, 300 GB/s in one direction), broadcasts the"
        " weights and reshards them for the engine. With all optimisations before it, a tree leaves"
        " 0.55 of the time, buckets 0.45, FP8 0.30 and zero-copy 0.22. These shares are published,"
        " not derived. Overlap with the next prefill hides the rest, but samples are one weight"
        " version older. In a tree, engines pass the weights on, so no node sends them more than"
        " ceil(log2(engines + 1)) times. Without an earlier optimisation, a later one keeps its"
        " ratio. The tax is the sync divided by the step."
    ),
    controls=(
        Control(
            "billions", 70.0, "parameters, billions", unit="billion", low=1.0, high=405.0, step=17.0
        ),
        Control("ranks", 8, "ranks of the trainer", low=1, high=64, step=3),
        Control("engines", 8, "engines that receive the weights", low=1, high=127, step=7),
        Control(
            "network",
            50.0,
            "bandwidth to the engines, GB/s",
            unit="GB/s",
            low=5.0,
            high=450.0,
            step=20.0,
        ),
        Control(
            "step", 60.0, "seconds of a step without sync", unit="s", low=5.0, high=300.0, step=15.0
        ),
        Control("tree", False, "broadcast over a tree"),
        Control("buckets", False, "send many tensors at once"),
        Control("fp8", False, "send FP8 instead of bfloat16"),
        Control("zero_copy", False, "receive into the engine's weights"),
        Control("overlap", False, "load during the next prefill"),
    ),
    run=weight_sync,
    breaking=Breaking(
        breaks={"billions": 405.0, "network": 25.0},
        safe={
            **{"billions": 405.0, "network": 25.0, "tree": True, "buckets": True},
            **{"fp8": True, "zero_copy": True},
        },
        why="A plain sync of 405 billion parameters takes more than a quarter of the step.",
        failed=lambda outcome: outcome.number("tax") > MOST_TAX,
    ),
)

LABS = (WEIGHT_SYNC,)
