"""Read hydra overrides of verl 0.9.1 for a recipe. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .answer import Run, loggers, minibatches
from .verl import DEFAULTS, NO_CAP

_ACTOR = "actor_rollout_ref.actor."
_THRESHOLD = "algorithm.rollout_correction.rollout_is_threshold"


def read(given: Mapping[str, Any], processes: int) -> Run:
    """Read hydra overrides of verl.trainer.main_ppo.

    Args:
        processes: not used: verl's sizes count prompts.
    """
    given = {key.lstrip("+"): value for key, value in given.items()}
    full = {**{key.lstrip("+"): value for key, value in DEFAULTS.items()}, **given}
    prompts, part = full["data.train_batch_size"], full[f"{_ACTOR}ppo_mini_batch_size"]
    updates, notes = minibatches(prompts, part)
    settings: dict[str, Any] = {"rollout.prompts_per_step": prompts}
    settings |= loggers(given.get("trainer.logger"))
    path, name = (given.get(f"reward.custom_reward_function.{key}") for key in ("path", "name"))
    if path:
        settings["environment.rewards"] = [f"{path}:{name or 'compute_score'}"]
    files = given.get("data.train_files")
    if isinstance(files, list | tuple):
        settings["data.source"] = files[0]
        notes += ("data.train_files has several files: use [[data.sources]]",) * (len(files) > 1)
    held_out = given.get("data.val_files")
    if isinstance(held_out, list | tuple):
        settings["data.heldout_split"] = held_out[0]
    if not given.get("trainer.total_training_steps"):
        epochs = given.get("trainer.total_epochs", 30)
        notes += (f"trainer.total_epochs = {epochs}: set run.steps to rows x epochs / {prompts}",)
    if (given.get(f"{_ACTOR}optim.lr_warmup_steps_ratio") or 0) > 0:
        notes += ("a warm-up as a share of the run: set trainer.warmup_steps",)
    horizon = full["data.max_response_length"]
    buffer = "reward.reward_kwargs.overlong_buffer_cfg."
    numbers: dict[str, Any] = {
        "beta": 0.0,
        "clip_low": full[f"{_ACTOR}clip_ratio_low"],
        "clip_high": full[f"{_ACTOR}clip_ratio_high"],
        "dual_clip": 0.0
        if full[f"{_ACTOR}clip_ratio_c"] >= NO_CAP
        else full[f"{_ACTOR}clip_ratio_c"],
        "entropy_bonus": float(full[f"{_ACTOR}entropy_coeff"]),
        "gamma": float(full["algorithm.gamma"]),
        "lam": float(full["algorithm.lam"]),
        "value_clip": float(full["critic.cliprange_value"]),
        "epochs": full[f"{_ACTOR}ppo_epochs"],
        "minibatches": updates,
        "overlong_buffer": 0.0,
    }
    if full["algorithm.use_kl_in_reward"]:
        adaptive = full["algorithm.kl_ctrl.type"] == "adaptive"
        numbers |= {
            "beta": float(full["algorithm.kl_ctrl.kl_coef"]),
            "kl_target": float(full["algorithm.kl_ctrl.target_kl"]) if adaptive else 0.0,
        }
    elif full[f"{_ACTOR}use_kl_loss"]:
        numbers["beta"] = float(full[f"{_ACTOR}kl_loss_coef"])
    if given.get(f"{buffer}enable"):
        numbers |= {
            "overlong_buffer": given.get(f"{buffer}len", 0) / horizon,
            "overlong_penalty": float(given.get(f"{buffer}penalty_factor", 1.0)),
        }
    band = str(full[_THRESHOLD]).split("_")
    numbers["correction_high"] = float(band[-1])
    numbers["correction_low"] = float(band[0]) if len(band) > 1 else None
    choices = {key: full[key.lstrip("+")] for key in DEFAULTS}
    entry = "python -m verl.trainer.main_ppo"
    return Run(entry, settings, choices, numbers, notes)
