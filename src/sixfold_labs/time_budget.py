"""Budget of one training step by role, and what each optimisation takes off it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sixfold.errors import UserError
from sixfold.pages.lab import Bars, Breaking, Control, Lab, Outcome, Table, Value

ROLES = ("rollout", "train", "ref", "sync", "algo")


@dataclass(frozen=True)
class Optimisation:
    """An optimisation that multiplies the time of one role."""

    role: str
    factor: float
    default: bool
    help: str


OPTIMISATIONS = {
    "prefix": Optimisation("rollout", 0.4, True, "prefix caching"),
    "continuous": Optimisation("rollout", 0.6, True, "continuous batching"),
    "speculative": Optimisation("rollout", 0.7, False, "speculative decoding"),
    "fp8": Optimisation("rollout", 0.7, False, "FP8 weights or KV cache"),
    "chunked_ce": Optimisation("train", 0.8, True, "chunked cross-entropy"),
    "packing": Optimisation("train", 0.7, True, "packed variable-length sequences"),
    "fsdp": Optimisation("train", 0.85, True, "FSDP and activation checkpointing"),
    "overlap": Optimisation("sync", 0.0, False, "sync hidden behind the next rollout"),
    "sync_every_5": Optimisation("sync", 0.2, False, "sync every fifth step"),
    "ref_pool": Optimisation("ref", 0.0, False, "reference on separate devices"),
}


def base_budget(rollout: float, train: float, ref: float, sync: float) -> dict[str, float]:
    """Percent of the step per role. The algorithm takes what the four leave of 100.

    Raises:
        UserError: if the four add up to more than 100.
    """
    total = rollout + train + ref + sync
    if total > 100:
        raise UserError(
            f"--rollout, --train, --ref and --sync add up to {total:g} %."
            " Their sum must be at most 100 %: lower one of them"
        )
    return {"rollout": rollout, "train": train, "ref": ref, "sync": sync, "algo": 100 - total}


def optimised(base: Mapping[str, float], on: Mapping[str, bool]) -> dict[str, float]:
    """Time of every role after the optimisations that are on, in percent of the base step."""
    after = dict(base)
    for name, optimisation in OPTIMISATIONS.items():
        if on[name]:
            after[optimisation.role] *= optimisation.factor
    return after


def time_budget(*, rollout: float, train: float, ref: float, sync: float, **on: bool) -> Outcome:
    """Apply optimisations to the time budget of a step."""
    base = base_budget(rollout, train, ref, sync)
    after = optimised(base, on)
    total, largest = sum(after.values()), max(after, key=after.__getitem__)
    rows: list[list[Value]] = [
        [role, base[role], after[role], after[role] / total] for role in ROLES
    ]
    return Outcome(
        values={
            "baseline": sum(base.values()),
            "optimised": total,
            "speedup": sum(base.values()) / total,
            "largest_slice": largest,
            "largest_share": after[largest] / total,
        },
        tables=(Table("Budget", ("role", "before, %", "after, %", "share of the rest"), rows),),
        figures=(Bars("After", "percent of the base step", ROLES, [after[r] for r in ROLES]),),
        lines=(f"The next bottleneck is '{largest}'.",),
    )


def _share(name: str, default: float, low: float, high: float, sweep: tuple[float, ...]) -> Control:
    about = f"share of {name}, percent"
    return Control(name, default, about, low, high, 5, sweep=sweep, unit="%")


TIME_BUDGET = Lab(
    name="time-budget",
    title="Where a step spends its time, and the speed-up of each optimisation",
    about=(
        "A step takes 100 units: rollout, training, reference and weight sync take the given"
        " shares, the algorithm the rest. Every optimisation multiplies one share: prefix caching"
        " 0.4, continuous batching 0.6, speculative decoding 0.7 and FP8 0.7 (rollout); chunked"
        " cross-entropy 0.8, packing 0.7 and FSDP with checkpointing 0.85 (training); overlap 0"
        " and sync every fifth step 0.2 (sync); separate devices 0 (reference). Factors are assumed"
        " to be independent. Shares that add up to more than 100 are an error."
    ),
    controls=(
        _share("rollout", 60.0, 20, 90, (20.0, 30.0, 40.0, 50.0, 60.0, 65.0)),
        _share("train", 20.0, 5, 50, (5.0, 10.0, 15.0, 20.0, 25.0)),
        _share("ref", 10.0, 0, 30, (0.0, 5.0, 10.0, 15.0)),
        _share("sync", 5.0, 0, 30, (0.0, 5.0, 10.0)),
        *(Control(name, each.default, each.help) for name, each in OPTIMISATIONS.items()),
    ),
    run=time_budget,
    breaking=Breaking(
        breaks={"prefix": False, "continuous": False},
        safe={},
        why="Optimising the trainer alone leaves rollout, the largest share, as it is.",
        failed=lambda outcome: outcome.number("speedup") < 1.3,
    ),
)

LABS = (TIME_BUDGET,)
