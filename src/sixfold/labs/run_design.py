"""Design of a run from three forces, and the family of a paper from four answers."""

from __future__ import annotations

from ..planning import paper_mapper
from ..planning.three_forces import RECIPES
from ..planning.three_forces import three_forces as choose
from .lab import Breaking, Control, Lab, Outcome


def three_forces(*, signal: float, bias_tolerance: float, gpus: int) -> Outcome:
    """Choose reward, algorithm, topology and recipe.

    Args:
        signal: share of tasks that a program can verify, percent.
        bias_tolerance: bias of the estimator that is acceptable, 0 to 100.
        gpus: number of GPUs.
    """
    choice = choose(signal=signal, bias_tolerance=bias_tolerance, devices=gpus)
    return Outcome(
        values={
            "reward": choice.reward,
            "algorithm": choice.algorithm,
            "topology": choice.topology,
            "recipe": choice.recipe,
            "recipe_in_words": RECIPES[choice.recipe],
        },
        lines=choice.reasons,
    )


THREE_FORCES = Lab(
    name="three-forces",
    title="Signal, bias and GPUs choose reward, algorithm, topology and recipe",
    about=(
        "Reward: verifier from a signal of 70, mixed from 30, else a reward model. Algorithm: DPO"
        " for fewer than 8 GPUs and a signal below 40; from 70, Dr. GRPO for a bias tolerance"
        " below 30, GRPO below 70, else DAPO; PPO below 40; otherwise GRPO on mixed rewards."
        " Topology: colocated up to 8 GPUs, disaggregated up to 64, then async. The recipe is the"
        " closest published one."
    ),
    controls=(
        Control("signal", 60.0, "verifiable tasks, percent", low=0.0, high=100.0, step=5.0),
        Control("bias_tolerance", 50.0, "acceptable bias", low=0.0, high=100.0, step=5.0),
        Control("gpus", 8, "GPUs", low=1, high=512, sweep=(1, 4, 8, 16, 32, 64, 65, 512)),
    ),
    run=three_forces,
    breaking=Breaking(
        breaks={"signal": 60.0, "gpus": 8},
        safe={"signal": 60.0, "gpus": 32},
        why="No published recipe trains on mixed rewards with so few GPUs.",
        failed=lambda outcome: outcome.values["recipe"] == "custom",
    ),
)


def paper_family(*, reward: str, policy: str, baseline: str, turns: str) -> Outcome:
    """Name the family of a paper.

    Args:
        reward: where rewards come from.
        policy: "on" or "off": whether the current policy samples.
        baseline: baseline of the advantage.
        turns: "single" or "multi".
    """
    family = paper_mapper.paper_family(reward=reward, policy=policy, baseline=baseline, turns=turns)
    return Outcome(
        values={
            "algorithm": " / ".join(family.algorithms),
            "reward": family.reward,
            "pages": list(family.pages),
            "warning": family.warning or None,
        },
        lines=(family.warning,) if family.warning else (),
    )


PAPER_FAMILY = Lab(
    name="paper-family",
    title="Four answers about a paper name its algorithm family and the pages to read",
    about=(
        "Preference pairs are the DPO family. Off-policy samples with a reward model are RAFT or"
        " ReST, other off-policy samples rejection-sampled fine-tuning or DPO. On-policy, the"
        " baseline decides: a critic is PPO, a group GRPO, DAPO or Dr. GRPO, leave-one-out RLOO,"
        " none REINFORCE."
    ),
    controls=(
        Control("reward", "verifier", "source of rewards", choices=tuple(paper_mapper.REWARDS)),
        Control("policy", "on", "does the current policy sample", choices=paper_mapper.POLICIES),
        Control("baseline", "group", "baseline", choices=paper_mapper.BASELINES),
        Control("turns", "single", "turns per task", choices=paper_mapper.TURNS),
    ),
    run=paper_family,
    breaking=Breaking(
        breaks={"reward": "preference", "policy": "on"},
        safe={"reward": "preference", "policy": "off"},
        why="Losses on preference pairs learn from fixed pairs, not from new samples.",
        failed=lambda outcome: outcome.values["warning"] is not None,
    ),
)

LABS = (THREE_FORCES, PAPER_FAMILY)
