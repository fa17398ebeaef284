"""Name the family of a post-training paper from four answers."""

from __future__ import annotations

from dataclasses import dataclass

from . import checks

REWARDS = {
    "verifier": "outcome checked by a program",
    "reward-model": "outcome scored by a reward model",
    "preference": "pairs of a better and a worse answer",
    "process": "each step scored by a process reward model",
}
POLICIES = ("on", "off")
BASELINES = ("critic", "group", "leave-one-out", "none")
TURNS = ("single", "multi")

_BY_BASELINE = {
    "critic": ("PPO",),
    "group": ("GRPO", "DAPO", "Dr.GRPO"),
    "leave-one-out": ("RLOO",),
    "none": ("REINFORCE",),
}

_PAGES = {
    "PPO": "docs/algorithms/ppo.md",
    "GRPO": "docs/algorithms/grpo.md",
    "DAPO": "docs/algorithms/dapo.md",
    "Dr.GRPO": "docs/algorithms/dr_grpo.md",
    "RLOO": "docs/algorithms/rloo.md",
    "REINFORCE": "docs/algorithms/reinforce.md",
}


@dataclass(frozen=True)
class PaperFamily:
    """Family of a paper.

    Attributes:
        algorithms: names of the algorithms, the most common one first.
        reward: the reward in words.
        warning: what does not fit together, or "".
        pages: pages of the documentation to read, from the root of the repository.
    """

    algorithms: tuple[str, ...]
    reward: str
    warning: str
    pages: tuple[str, ...]


def paper_family(*, reward: str, policy: str, baseline: str, turns: str) -> PaperFamily:
    """Name the family by the first rule that applies.

    Preference pairs: DPO and its variants. Off-policy with a reward model: RAFT, ReST. Off-policy
    otherwise: SFT on kept samples, or DPO. On-policy: by the baseline.

    Args:
        reward: "verifier", "reward-model", "preference" or "process".
        policy: "on" or "off": the samples come from the current policy or not.
        baseline: "critic", "group", "leave-one-out" or "none".
        turns: "single" or "multi".

    Raises:
        UserError: if an answer is unknown. Lists the valid ones.
    """
    checks.one_of("reward", reward, REWARDS)
    checks.one_of("policy", policy, POLICIES)
    checks.one_of("baseline", baseline, BASELINES)
    checks.one_of("turns", turns, TURNS)
    warning = ""
    if reward == "preference":
        algorithms: tuple[str, ...] = ("DPO", "IPO", "KTO", "ORPO", "SimPO")
        if policy == "on":
            warning = "DPO learns from fixed pairs: on-policy pairs make it iterative DPO."
    elif policy == "off":
        algorithms = ("RAFT", "ReST") if reward == "reward-model" else ("RS-SFT", "DPO")
    else:
        algorithms = _BY_BASELINE[baseline]
    pages = [_PAGES[name] for name in algorithms if name in _PAGES]
    if reward in ("verifier", "process"):
        pages.append("docs/environments.md")
    if turns == "multi":
        pages.append("docs/agents.md")
    return PaperFamily(algorithms, REWARDS[reward], warning, tuple(pages))
