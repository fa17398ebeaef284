"""Choose reward, algorithm, topology and recipe from three forces: signal, bias and cost."""

from __future__ import annotations

from dataclasses import dataclass

from . import checks


@dataclass(frozen=True)
class Choice:
    """A design for a run.

    Attributes:
        reward: "verifier", "mixed" or "reward-model".
        algorithm: "dpo", "dr_grpo", "grpo", "dapo", "ppo" or "grpo-mixed".
        topology: "colocated", "disaggregated" or "async".
        recipe: closest published recipe, a key of `RECIPES`.
        reasons: one sentence each for reward, algorithm and topology.
    """

    reward: str
    algorithm: str
    topology: str
    recipe: str
    reasons: tuple[str, str, str]


RECIPES = {
    "dpo-ablation": "preference pairs, no sampling",
    "r1": "verifier, GRPO family, large cluster",
    "instructgpt": "reward model, PPO, small cluster",
    "tulu-early": "SFT, DPO and PPO with a reward model",
    "mixed": "verifiers and reward models in turn, as in Tulu 3 and Qwen",
    "small-rlvr": "verifier on one node",
    "custom": "no published recipe is close",
}


def three_forces(*, signal: float, bias_tolerance: float, devices: int) -> Choice:
    """Choose a design.

    Args:
        signal: share of tasks that a program can verify, 0 to 100.
        bias_tolerance: how much bias of the estimator is acceptable, 0 to 100.
        devices: accelerators.

    Raises:
        UserError: if a number is out of range.
    """
    checks.between(0, 100, signal=signal, bias_tolerance=bias_tolerance)
    checks.whole(devices=devices)
    reward = "verifier" if signal >= 70 else "mixed" if signal >= 30 else "reward-model"
    algorithm = _algorithm(signal, bias_tolerance, devices)
    topology = "colocated" if devices <= 8 else "disaggregated" if devices <= 64 else "async"
    recipe = "dpo-ablation" if algorithm == "dpo" else _recipe(signal, bias_tolerance, devices)
    reasons = (_REWARD_REASONS[reward], _ALGORITHM_REASONS[algorithm], _TOPOLOGY_REASONS[topology])
    return Choice(reward, algorithm, topology, recipe, reasons)


def _algorithm(signal: float, bias_tolerance: float, devices: int) -> str:
    if devices < 8 and signal < 40:
        return "dpo"
    if signal >= 70:
        return "dr_grpo" if bias_tolerance < 30 else "grpo" if bias_tolerance < 70 else "dapo"
    return "ppo" if signal < 40 else "grpo-mixed"


def _recipe(signal: float, bias_tolerance: float, devices: int) -> str:
    """The first row that applies."""
    rows = (
        ("r1", signal >= 80 and bias_tolerance < 30 and devices >= 32),
        ("instructgpt", signal < 30 and devices <= 16),
        ("tulu-early", signal < 30 and devices <= 64),
        ("mixed", 40 <= signal < 80 and devices >= 32),
        ("small-rlvr", signal >= 70 and devices <= 8),
    )
    return next((name for name, applies in rows if applies), "custom")


_REWARD_REASONS = {
    "verifier": "Most tasks can be verified by a program.",
    "mixed": "Some tasks can be verified; a reward model scores the others.",
    "reward-model": "Few tasks can be verified, so a reward model scores them.",
}

_ALGORITHM_REASONS = {
    "dpo": "A weak signal and few devices: learn from fixed preference pairs.",
    "dr_grpo": "Exact rewards and little tolerance for bias: a group mean without normalisation.",
    "grpo": "Exact rewards: group statistics replace the critic.",
    "dapo": "Exact rewards and much tolerance for bias: asymmetric clip and dynamic sampling.",
    "ppo": "Noisy rewards need a critic.",
    "grpo-mixed": "Mixed rewards: group statistics per reward source.",
}

_TOPOLOGY_REASONS = {
    "colocated": "One node: roles take turns on the same devices.",
    "disaggregated": "Several nodes: sampling and training have pools of their own.",
    "async": "A large cluster: neither pool may wait for the other.",
}
