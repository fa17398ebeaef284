"""Design of a run from three forces, and the family of a paper from four answers."""

from __future__ import annotations

import tomllib
from importlib import resources

from sixfold.pages.lab import Breaking, Control, Lab, Outcome

TEXTS = tomllib.loads((resources.files("sixfold_labs") / "run_design.toml").read_text("utf-8"))


def three_forces(*, signal: float, bias_tolerance: float, gpus: int) -> Outcome:
    """Choose reward, algorithm, topology and recipe."""
    chosen = {
        "reward": "verifier" if signal >= 70 else "mixed" if signal >= 30 else "reward-model",
        "algorithm": _algorithm(signal, bias_tolerance, gpus),
        "topology": "colocated" if gpus <= 8 else "disaggregated" if gpus <= 64 else "async",
    }
    recipe = _recipe(signal, bias_tolerance, gpus)
    if chosen["algorithm"] == "dpo":
        recipe = "dpo-ablation"
    return Outcome(
        values={**chosen, "recipe": recipe, "recipe_in_words": TEXTS["recipe"][recipe]},
        lines=tuple(TEXTS[part][choice] for part, choice in chosen.items()),
    )


def _algorithm(signal: float, bias_tolerance: float, gpus: int) -> str:
    if gpus < 8 and signal < 40:
        return "dpo"
    if signal >= 70:
        return "dr_grpo" if bias_tolerance < 30 else "grpo" if bias_tolerance < 70 else "dapo"
    return "ppo" if signal < 40 else "grpo-mixed"


def _recipe(signal: float, bias_tolerance: float, gpus: int) -> str:
    """The first row that applies."""
    rows = (
        ("r1", signal >= 80 and bias_tolerance < 30 and gpus >= 32),
        ("instructgpt", signal < 30 and gpus <= 16),
        ("tulu-early", signal < 30 and gpus <= 64),
        ("mixed", 40 <= signal < 80 and gpus >= 32),
        ("small-rlvr", signal >= 70 and gpus <= 8),
    )
    return next((name for name, applies in rows if applies), "custom")


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
        Control(
            "signal", 60.0, "verifiable tasks, percent", unit="%", low=0.0, high=100.0, step=5.0
        ),
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
    """Name the family of a paper by the first rule that applies.

    Preference pairs: DPO and its variants. Off-policy with a reward model: RAFT, ReST. Off-policy
    otherwise: SFT on kept samples, or DPO. On-policy: by the baseline.
    """
    warning = ""
    if reward == "preference":
        algorithms = ["DPO", "IPO", "KTO", "ORPO", "SimPO"]
        if policy == "on":
            warning = "DPO learns from fixed pairs: on-policy pairs make it iterative DPO."
    elif policy == "off":
        algorithms = ["RAFT", "ReST"] if reward == "reward-model" else ["RS-SFT", "DPO"]
    else:
        algorithms = TEXTS["baseline"][baseline]
    pages = [TEXTS["page"][name] for name in algorithms if name in TEXTS["page"]]
    if reward in ("verifier", "process"):
        pages.append("docs/environments.md")
    if turns == "multi":
        pages.append("docs/agents.md")
    return Outcome(
        values={
            "algorithm": " / ".join(algorithms),
            "reward": TEXTS["source"][reward],
            "pages": pages,
            "warning": warning or None,
        },
        lines=(warning,) if warning else (),
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
        Control("reward", "verifier", "source of rewards", choices=tuple(TEXTS["source"])),
        Control("policy", "on", "does the current policy sample", choices=("on", "off")),
        Control("baseline", "group", "baseline", choices=tuple(TEXTS["baseline"])),
        Control("turns", "single", "turns per task", choices=("single", "multi")),
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
