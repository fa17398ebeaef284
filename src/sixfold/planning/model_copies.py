"""Copies of the model that each method keeps in memory, by role and pool of devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from . import checks
from .training_bytes import INFERENCE_WIDTH, STATES

POOLS = ("trainer", "reference", "rollout")


@dataclass(frozen=True)
class ModelCopy:
    """One copy of the weights.

    Attributes:
        role: "policy", "critic", "reference", "reward", "judge", "engine" or "snapshot".
        pool: pool of devices that shards the copy.
        bytes_per_parameter: training state for a trained model, else the width of a weight.
    """

    role: str
    pool: str
    bytes_per_parameter: float


_TRAINED, _READ = STATES["bfloat16"].total, float(INFERENCE_WIDTH)

COPIES = {
    copy.role: copy
    for copy in (
        ModelCopy("policy", "trainer", _TRAINED),
        ModelCopy("critic", "trainer", _TRAINED),
        ModelCopy("reference", "reference", _READ),
        ModelCopy("reward", "reference", _READ),
        ModelCopy("judge", "reference", _READ),
        ModelCopy("engine", "rollout", _READ),
        ModelCopy("snapshot", "trainer", _READ),
    )
}
"""Role -> copy. `snapshot` is the old policy that async training keeps for importance ratios."""


@dataclass(frozen=True)
class Method:
    """Models that a method needs.

    Attributes:
        required: roles of models that it always has.
        optional: roles of models that some recipes add or leave out.
        samples: it samples, so an engine holds one more copy of the policy.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    samples: bool

    @property
    def models(self) -> tuple[int, int]:
        """Smallest and largest number of distinct models. The engine's copy is not one."""
        return len(self.required), len(self.required) + len(self.optional)


METHODS = {
    "sft": Method(("policy",), (), samples=False),
    "dpo": Method(("policy", "reference"), (), samples=False),
    "ppo": Method(("policy", "critic", "reference", "reward"), (), samples=True),
    "grpo": Method(("policy", "reference"), ("reward",), samples=True),
    "rlaif": Method(("policy", "judge"), ("reference", "critic"), samples=True),
}
"""Method -> models. GRPO is PPO without a critic; DPO also has no reward model and no engine."""


def model_copies(
    method: str, *, optional: tuple[str, ...], asynchronous: bool
) -> tuple[ModelCopy, ...]:
    """Copies of the weights that a method keeps in memory.

    Args:
        method: a key of `METHODS`.
        optional: optional roles that are present, such as ("reward",).
        asynchronous: keep a snapshot of the old policy. Only for methods that sample.

    Raises:
        UserError: if the method is unknown, the method has no such optional role, or a method
            without sampling is asked to be asynchronous.
    """
    checks.one_of("method", method, METHODS)
    chosen = METHODS[method]
    for role in optional:
        checks.one_of(f"optional model of {method}", role, chosen.optional or ("none",))
    roles = [*chosen.required, *optional]
    if chosen.samples:
        roles.append("engine")
    if asynchronous:
        checks.one_of(
            "method of an asynchronous run", method, [n for n, m in METHODS.items() if m.samples]
        )
        roles.append("snapshot")
    return tuple(COPIES[role] for role in roles)


def bytes_per_device(
    copies: tuple[ModelCopy, ...], parameters: float, devices: Mapping[str, int]
) -> dict[str, float]:
    """Bytes of weights and training state on each device of each pool.

    All models have the same size and are sharded evenly over the devices of their pool.

    Args:
        copies: copies of the weights.
        parameters: parameters of one copy.
        devices: pool -> devices that shard a copy. For an engine with replicas, the devices of one
            replica.

    Returns:
        Pool -> bytes per device, for each pool with a copy.

    Raises:
        UserError: if a pool has no devices or a number is out of range.
    """
    checks.positive(parameters=parameters)
    total: dict[str, float] = {}
    for copy in copies:
        ranks = devices.get(copy.pool, 0)
        checks.whole(**{f"devices of {copy.pool}": ranks})
        size = copy.bytes_per_parameter * parameters / ranks
        total[copy.pool] = total.get(copy.pool, 0.0) + size
    return total
