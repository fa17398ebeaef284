"""Names of the labs, with the module of each. A module is imported when its lab is used."""

from __future__ import annotations

import importlib

from sixfold.errors import UserError, nearest
from sixfold.pages.lab import Lab

LABS: dict[str, str] = {
    # Policy gradients: what is sampled, scored and pushed.
    "bandit": "bandit",
    "rollouts": "rollouts",
    "verifier": "verifier",
    "kl-anchor": "kl_anchor",
    "advantages": "group_advantages",
    "loss-assembly": "loss_assembly",
    "stale-weights": "stale_weights",
    "controller": "controller_steps",
    "tool-mask": "tool_mask",
    "gradient-noise": "gradient_noise",
    "clip-cells": "clip_cells",
    "grpo-group": "group_advantages",
    "grpo-rloo": "group_advantages",
    "dapo-ablation": "dapo_ablation",
    "length-bias": "length_bias",
    # Rewards, preferences and search.
    "reward-model": "reward_model",
    "dpo-policy": "direct_preference",
    "dpo-margin": "direct_preference",
    "preference-losses": "preference_losses",
    "process-reward": "process_reward",
    "reward-hacking": "reward_hacking",
    "signal-density": "signal_density",
    # Systems: topology, memory, throughput.
    "topology": "topology",
    "kv-sizer": "kv_sizer",
    "decode-scheduling": "decode_scheduling",
    "memory-envelope": "memory_envelope",
    "wall-clock": "wall_clock",
    "straggler": "straggler",
    "async-timeline": "async_timeline",
    "time-budget": "time_budget",
    "step-triage": "cluster_planning",
    "weight-sync": "weight_sync",
    "sync-size": "cluster_planning",
    "async-planner": "cluster_planning",
    "framework-selector": "framework_selector",
    "three-forces": "run_design",
    "paper-family": "run_design",
    "concept-gaps": "concept_gaps",
    # The pipeline before reinforcement learning.
    "transformer-shapes": "transformer_shapes",
    "char-predictor": "char_predictor",
    "loss-mask": "loss_mask",
    "serial-compute": "serial_compute",
    "group-policy": "group_policy",
}
"""Name of a lab to its module in this package. The module has a tuple LABS that holds the lab."""


def find(name: str) -> Lab:
    """The lab of this name.

    Raises:
        UserError: if there is none. The message names the nearest.
    """
    if name not in LABS:
        words = name.replace("_", "-").casefold()
        inside = ", ".join(lab for lab in LABS if len(words) > 1 and words in lab)
        hint = f" Labs of that name: {inside}." if inside else nearest(name, list(LABS))
        hint = hint or f" Labs: {', '.join(LABS)}."
        raise UserError(
            f"no lab '{name}'.{hint} `sixfold lab` lists all {len(LABS)} with their subjects"
        )
    module = importlib.import_module(f".{LABS[name]}", __package__)
    labs: tuple[Lab, ...] = module.LABS
    return next(lab for lab in labs if lab.name == name)
