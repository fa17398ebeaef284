"""TRL 1.16: arguments of GRPOConfig, RLOOConfig, and experimental GMPOConfig and IWOPDConfig.

TRL 1.16 has no PPO. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sixfold.algorithm.method import LOSSES, Method

from .answer import (
    AT_ONE,
    BETAS,
    WEIGHT_DECAY,
    Answer,
    Run,
    Sizes,
    loggers,
    mean_of_all,
    minibatches,
    only,
    refill,
    std_note,
)

_TRL_BOTH: dict[str, object] = {
    "per_device_train_batch_size": 8,
    "steps_per_generation": None,
    "max_completion_length": 512,
    "num_iterations": 1,
    "lr_scheduler_type": "linear",
    "adam_beta2": 0.999,
    "weight_decay": 0.0,
    "epsilon": 0.2,
    "epsilon_high": None,
}

_GRPO: dict[str, object] = {
    **_TRL_BOTH,
    "num_generations": 8,
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "importance_sampling_level": "token",
    "delta": None,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "entropy_target": 0.2,
    "entropy_coef_delta": 0.005,
    "entropy_coef_max": 1.0,
    "top_entropy_quantile": 1.0,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "off_policy_mask_threshold": None,
}

ENTRIES = {"grpo": "GRPOConfig", "rloo": "RLOOConfig"}
"""Trainers that can be imported."""

DEFAULTS: dict[str, dict[str, object]] = {
    "GRPOConfig": _GRPO,
    "GMPOConfig": {**_GRPO, "epsilon": 0.4},
    "RLOOConfig": {**_TRL_BOTH, "num_generations": 2, "beta": 0.05, "normalize_advantages": False},
    "IWOPDConfig": {
        "per_device_train_batch_size": 8,
        "num_generations": 1,
        "max_completion_length": 512,
        "lr_scheduler_type": "linear",
        "learning_rate": 1e-6,
        "adam_beta2": 0.999,
        "weight_decay": 0.0,
        "top_p": 0.95,
        "iw_opd_gamma": 0.5,
        "teacher_model_name_or_path": None,
    },
}

TOGETHER: dict[tuple[str, str], dict[str, object]] = {
    ("clipped_surrogate", "token"): {"loss_type": "dapo"},
    ("clipped_surrogate", "sequence"): {"loss_type": "grpo"},
    ("clipped_surrogate", "sequence-sum"): {"loss_type": "luspo"},
    ("clipped_surrogate", "constant"): {"loss_type": "dr_grpo"},
    ("sequence_surrogate", "sequence"): {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
    },
    ("sequence_token_surrogate", "sequence"): {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
    },
    ("length_scaled_sequence_surrogate", "sequence"): {
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
    },
    ("clipped_weight", "token"): {"loss_type": "cispo"},
    ("soft_gate", "sequence"): {"loss_type": "sapo"},
    ("geometric_surrogate", "sequence"): {},
    ("power_weight", "token"): {"loss_type": "vespo"},
}
"""TRL selects a loss and its aggregation with one setting."""


def entry(m: Method) -> str:
    if m.needs_teacher:
        return "IWOPDConfig"
    if (
        m.advantage == "leave_one_out"
        and m.loss == "policy_gradient"
        and m.aggregation == "sequence-sum"
    ):
        return "RLOOConfig"
    return "GMPOConfig" if m.loss == "geometric_surrogate" else "GRPOConfig"


def _sizes(m: Method, s: Sizes) -> dict[str, object]:
    return {
        "per_device_train_batch_size": max(1, s.prompts // m.minibatches) * s.samples,
        "steps_per_generation": m.minibatches,
        "num_generations": s.samples,
        "max_completion_length": s.horizon,
        "num_iterations": m.epochs,
        "lr_scheduler_type": "constant",
        "adam_beta2": BETAS[1],
        "weight_decay": WEIGHT_DECAY,
    }


def _teacher(m: Method, s: Sizes) -> Answer:
    sizes = {
        key: value
        for key, value in _sizes(m, s).items()
        if key not in ("steps_per_generation", "num_iterations")
    }
    settings = {
        **sizes,
        "learning_rate": 1e-6,
        "top_p": 1.0,
        "iw_opd_gamma": 0.0,
        "teacher_model_name_or_path": "TEACHER",
    }
    lacks = "several updates per step on distillation samples" if m.updates > 1 else ""
    notes = (
        (
            "the loss is -log pi times the advantage, without ratio and clip: the gradient is"
            " the same in the first update of a step"
        ),
    )
    return Answer(
        settings, notes, lacks, ("# trl.experimental.iw_opd; gamma 0 makes its weights 1",)
    )


def _advantage(m: Method, s: Sizes) -> Answer:
    n = s.prompts * s.samples
    centred: dict[str, object] = {"scale_rewards": "none"}
    answers = {
        "group_mean": Answer(centred),
        "group_zscore": Answer({"scale_rewards": "group"}, (std_note(s, "1e-4"),)),
        "batch_std": Answer({"scale_rewards": "batch"}, (std_note(s, "1e-4", "N"),)),
        "normalise_then_sum": Answer(
            {"multi_objective_aggregation": "normalize_then_sum"},
            (
                "copy environment.weights to reward_weights",
                std_note(s, "1e-4"),
                std_note(s, "1e-4", "N"),
            ),
        ),
        "leave_one_out": Answer(centred, (mean_of_all(s),)),
        "no_baseline": Answer(
            centred,
            lacks=(
                "no baseline: the group's mean is subtracted. The expected gradient is (K - 1) /"
                f" K of Sixfold's, {(s.samples - 1) / s.samples:.4f} at K = {s.samples}, with"
                " less variance; RLOOConfig is unbiased"
            ),
        ),
        "length_weighted": Answer(
            centred,
            lacks=(
                "a baseline weighted by length. The plain mean is equal to it if all completions"
                " of a group have the same length"
            ),
        ),
        "maxrl": Answer(
            centred,
            lacks=(
                "division by the group's mean. Without it, each advantage is Sixfold's times the"
                " group's mean reward"
            ),
        ),
        "whitened_return": Answer(
            {"scale_rewards": "batch"},
            lacks=(
                "whitening over tokens without groups. The nearest settings subtract the group's"
                " mean and divide by the batch's standard deviation"
            ),
        ),
        "whitened_group_mean": Answer(
            {"scale_rewards": "batch"},
            lacks=(
                f"the standard deviation over tokens. TRL uses that of the {n} rewards before the"
                " group's mean is subtracted. It is larger, and more so if prompts differ in"
                " difficulty"
            ),
        ),
        "gae": Answer(
            centred,
            lacks=(
                "a critic: TRL 1.16 has no PPO trainer. GRPOConfig subtracts the group's mean"
                " instead"
            ),
        ),
    }
    return answers.get(
        m.advantage,
        Answer(
            centred,
            lacks=(
                f"the advantage {m.advantage}. scale_rewards='none' subtracts the group's mean"
                " instead"
            ),
        ),
    )


def _loss(m: Method) -> Answer:
    if m.loss == "mirror_descent":
        text = (
            f"the squared loss. On-policy, its gradient is 2 tau = {2 * (m.tau or 0.1):g} times"
            " that of these settings"
        )
        return only(text, loss_type="luspo")
    same = "clipped_surrogate" if m.loss == "policy_gradient" else m.loss
    notes = [AT_ONE] if m.loss == "policy_gradient" else []
    chosen = TOGETHER.get((same, m.aggregation))
    lacks = (
        ""
        if chosen is not None
        else (
            f"{m.loss} with aggregation '{m.aggregation}'. loss_type='dapo' clips each token's"
            " ratio and averages over tokens"
        )
    )
    clips: dict[str, object] = (
        {"epsilon": m.clip_low, "epsilon_high": m.clip_high} if LOSSES[m.loss].clips else {}
    )
    if m.loss == "clipped_weight":
        # TRL caps at epsilon_high; Sixfold, like verl, at 1 + clip_high.
        clips = {"epsilon_high": 1 + (m.clip_high or 0.0)}
        lacks = lacks or ("a lower bound for the weight" if m.clip_low is not None else "")
    if m.loss == "soft_gate":
        clips = {
            "sapo_temperature_pos": m.tau or 1.0,
            "sapo_temperature_neg": m.tau_negative or 1.05,
        }
    if m.dual_clip:
        clips["delta"] = m.dual_clip
    if m.loss in ("clipped_surrogate", "sequence_surrogate", "sequence_token_surrogate"):
        notes.append("log-ratios are not clamped to +-20")
    return Answer(
        {**(chosen if chosen is not None else {"loss_type": "dapo"}), **clips}, tuple(notes), lacks
    )


def _kl(m: Method) -> Answer:
    if not m.beta:
        return Answer({"beta": 0.0})
    if m.kl_target:
        return only(f"an adaptive beta: it stays at {m.beta:g}", beta=m.beta)
    if m.kl_in == "loss" and m.kl in ("k3", "k3-unbiased"):
        return Answer({"beta": m.beta, "use_bias_correction_kl": m.kl == "k3-unbiased"})
    return only(
        f"{m.kl} in the {m.kl_in}: GRPOConfig supports k3 in the loss",
        beta=m.beta,
        use_bias_correction_kl=m.kl in ("k2", "k3+"),
    )


def _entropy(m: Method) -> Iterator[Answer]:
    yield Answer({"entropy_coef": m.entropy_bonus})
    if m.entropy_target:
        settings = {
            "use_adaptive_entropy": True,
            "entropy_target": m.entropy_target,
            "entropy_coef_delta": 1e-3,
            "entropy_coef_max": 0.1,
        }
        yield Answer(
            settings, ("the entropy of the previous step decides whether the bonus is applied",)
        )
    if m.entropy_rule == "top-entropy":
        yield Answer(
            {"top_entropy_quantile": 0.2},
            ("tokens are selected in each micro-batch of each update; in Sixfold once per step",),
        )
    elif m.entropy_rule != "none":
        yield only(f"entropy_rule = '{m.entropy_rule}'")


def _correction(m: Method) -> Answer:
    switch, low, high = "vllm_importance_sampling_correction", *m.band
    if m.correction == "none":
        return Answer({switch: False})
    if m.correction == "negative-sequence":
        return Answer({switch: False, "off_policy_mask_threshold": high})
    modes = {
        "truncated": "token_truncate",
        "truncated-sequence": "sequence_truncate",
        "masked": "token_mask",
        "masked-sequence": "sequence_mask",
    }
    mode = (modes | {"decoupled": "token_mask"}).get(m.correction)
    if mode is None:
        return only(f"the correction {m.correction}", **{switch: False})
    bounds = {"vllm_importance_sampling_clip_max": high, "vllm_importance_sampling_clip_min": low}
    return Answer(
        {switch: True, "vllm_importance_sampling_mode": mode, **bounds},
        ("only with use_vllm=True",),
    )


def _reward(m: Method, s: Sizes) -> Iterator[Answer]:
    if m.overlong_buffer:
        call = (
            f"get_soft_overlong_punishment(max_completion_len={s.horizon},"
            f" soft_punish_cache={max(1, round(m.overlong_buffer * s.horizon))})"
        )
        lacks = (
            "a penalty for truncated completions only: all long completions are penalised"
            if m.overlong_truncated_only
            else ""
        )
        yield Answer({}, lacks=lacks, also=(f"reward_funcs.append({call})  # from trl.rewards",))
    if m.length_penalty != "none":
        yield only(f"length_penalty = '{m.length_penalty}'. Implement it as a reward function")
    if m.whiten != "none":
        yield only("rewards standardised by their running mean and standard deviation")
    if m.dynamic_sampling:
        yield only(refill(m))


def answers(m: Method, s: Sizes) -> Iterator[Answer]:
    kind = entry(m)
    if kind == "IWOPDConfig":
        yield _teacher(m, s)
        return
    yield Answer(_sizes(m, s))
    if kind == "RLOOConfig":
        k1 = not m.beta or (m.kl, m.kl_in) == ("k1", "reward")
        yield Answer(
            {"beta": m.beta, "normalize_advantages": False},
            (AT_ONE,),
            "" if k1 else f"{m.kl} in the {m.kl_in}: RLOOConfig supports k1 in the reward",
        )
    else:
        yield _advantage(m, s)
        yield _loss(m)
        yield _kl(m)
        yield from _entropy(m)
        yield _correction(m)
    yield from _reward(m, s)


def read(given: Mapping[str, Any], processes: int, entry: str = "") -> Run:
    """Read the arguments of GRPOConfig or RLOOConfig, with those of TRL's scripts.

    Args:
        entry: one of `ENTRIES`. Empty: told by the arguments.
    """
    entry = entry or ("RLOOConfig" if "normalize_advantages" in given else "GRPOConfig")
    full = {**DEFAULTS[entry], "gradient_accumulation_steps": 1, **given}
    rows = full["per_device_train_batch_size"] * processes
    per_update = rows * full["gradient_accumulation_steps"]
    generated = given.get("generation_batch_size") or rows * (
        full["steps_per_generation"] or full["gradient_accumulation_steps"]
    )
    samples = full["num_generations"]
    prompts, uneven = minibatches(generated, samples)
    updates, rest = minibatches(generated, per_update)
    settings: dict[str, object] = {
        "rollout.prompts_per_step": prompts,
        "rollout.samples_per_prompt": samples,
    }
    settings |= loggers(given.get("report_to"))
    notes = [f"batch sizes are for {processes} processes (--processes)", *uneven, *rest]
    steps = given.get("max_steps") or -1
    if steps > 0:
        settings["run.steps"] = max(1, round(steps / (updates * full["num_iterations"])))
    else:
        epochs = given.get("num_train_epochs", 3)
        notes.append(f"num_train_epochs = {epochs}: set run.steps to rows x epochs / {prompts}")
    if given.get("chat_template_kwargs"):
        pairs = given["chat_template_kwargs"].items()
        settings["model.template_args"] = [f"{k}={_word(v)}" for k, v in pairs]
    rewards = given.get("reward_funcs") or []
    rewards = [rewards] if isinstance(rewards, str) else list(rewards)
    if rewards:
        settings["environment.rewards"] = [":".join(str(r).rsplit(".", 1)) for r in rewards]
    notes += [
        f"reward {r!r}: name its file, path/to/file.py:{r}" for r in rewards if "." not in str(r)
    ]
    if any("." not in str(r) for r in rewards):
        del settings["environment.rewards"]
    for name, key in (("eval_steps", "eval.every"), ("save_steps", "checkpoint.every")):
        if isinstance(given.get(name), int):
            settings[key] = max(1, given[name] // (updates * full["num_iterations"]))
    if 0 < given.get("warmup_steps", 0) < 1 or given.get("warmup_ratio"):
        settings["trainer.warmup_steps"] = 0
        notes.append("a warm-up as a share of the run: set trainer.warmup_steps")
    low, high = full["epsilon"], full["epsilon_high"]
    high = low if high is None else high
    if full.get("loss_type") == "cispo":
        low, high = None, high - 1
    scale = full.get("scale_rewards")
    corrected = full.get("vllm_importance_sampling_correction", False)
    chosen = {
        **full,
        "scale_rewards": {"True": "group", "False": "none"}.get(str(scale), scale),
        "vllm_importance_sampling_correction": bool(corrected and given.get("use_vllm")),
    }
    choices = {name: chosen[name] for name in DEFAULTS[entry]}
    numbers = {
        "beta": float(full["beta"]),
        "clip_low": low,
        "clip_high": high,
        "dual_clip": full.get("delta") or 0.0,
        "entropy_bonus": full.get("entropy_coef", 0.0),
        "correction_low": full.get("vllm_importance_sampling_clip_min"),
        "correction_high": full.get("vllm_importance_sampling_clip_max"),
        "epochs": full["num_iterations"],
        "minibatches": updates,
    }
    return Run(entry, settings, choices, numbers, tuple(notes))


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
