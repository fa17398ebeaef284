"""OpenRLHF 0.11.2: the flags of `openrlhf.cli.train_ppo_ray`, without leading dashes. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sixfold.algorithm.method import Method

from .answer import AT_ONE, CRITIC_LEARNING_RATE, Answer, Run, Sizes, minibatches, only, std_note

DEFAULTS: dict[str, object] = {
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "rollout.max_new_tokens": None,
    "train.batch_size": 128,
    "train.max_epochs": 1,
    "actor.lr_scheduler": "cosine_with_min_lr",
    "actor.lr_warmup_ratio": 0.03,
    "actor.eps_clip_low_high": None,
    "actor.dual_clip": None,
    "actor.policy_loss_type": "ppo",
    "actor.loss_agg_mode": "token-mean",
    "actor.entropy_coef": None,
    "critic.adam.lr": 9e-6,
    "critic.lr_scheduler": "cosine_with_min_lr",
    "critic.lr_warmup_ratio": 0.03,
    "critic.value_clip": 0.5,
    "algo.advantage.estimator": "gae",
    "algo.advantage.gamma": 1,
    "algo.advantage.lambd": 1,
    "algo.advantage.is_correction_level": "off",
    "algo.advantage.is_correction_mode": "mask",
    "algo.advantage.is_correction_threshold": (0.5, 5.0),
    "algo.kl.init_coef": 0.01,
    "algo.kl.target": None,
    "algo.kl.estimator": "k1",
    "algo.kl.use_loss": False,
    "algo.kl.unbiased_gradient": False,
    "algo.dynamic_filtering_enable": False,
    "algo.dynamic_filtering_range": (0, 1),
    "reward.overlong_buffer_len": None,
    "reward.overlong_penalty_factor": 1,
    "reward.stop_properly_penalty_coef": None,
}
"""Flags of openrlhf.cli.train_ppo_ray, without leading dashes."""

_TOKENS = "with loss_agg_mode=token-mean the gradient of a step is"

AGGREGATIONS = {
    "token": Answer({"actor.loss_agg_mode": "token-mean"}),
    "sequence": Answer({"actor.loss_agg_mode": "seq-mean-token-mean"}),
    "sequence-sum": only(
        f"aggregation 'sequence-sum'. {_TOKENS} Sixfold's divided by the step's mean length",
        **{"actor.loss_agg_mode": "token-mean"},
    ),
    "constant": only(
        f"aggregation 'constant'. {_TOKENS} Sixfold's times max_new_tokens, divided by the step's"
        " mean length",
        **{"actor.loss_agg_mode": "token-mean"},
    ),
    "prompt": only(
        "aggregation 'prompt'. token-mean weights a prompt by the number of tokens of its group",
        **{"actor.loss_agg_mode": "token-mean"},
    ),
}


def _advantage(m: Method, s: Sizes) -> Answer:
    estimator = "algo.advantage.estimator"
    centred: dict[str, object] = {estimator: "dr_grpo"}
    critic: dict[str, object] = {
        estimator: "gae",
        "algo.advantage.gamma": m.gamma,
        "algo.advantage.lambd": m.lam,
        "critic.value_clip": m.value_clip,
        "critic.adam.lr": CRITIC_LEARNING_RATE,
        "critic.lr_scheduler": "constant",
        "critic.lr_warmup_ratio": 0.0,
    }
    floor = "whitening divides by sqrt(max(variance, 1e-8)), in Sixfold by sqrt(variance + 1e-8)"
    answers = {
        "no_baseline": Answer(
            {estimator: "flash_reinforce"},
            lacks="no baseline. flash_reinforce subtracts the mean reward of the step",
        ),
        "group_mean": Answer(centred),
        "group_zscore": Answer({estimator: "group_norm"}, (std_note(s, "1e-9"),)),
        "leave_one_out": Answer({estimator: "rloo"}),
        "length_weighted": Answer(
            centred,
            lacks=(
                "a baseline weighted by length. The plain mean is equal to it if all completions"
                " of a group have the same length"
            ),
        ),
        "batch_std": Answer(
            centred,
            lacks=(
                "division by the standard deviation of the batch. Without it, each advantage is"
                " Sixfold's times the standard deviation of the step's rewards"
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
            {estimator: "reinforce", "algo.advantage.gamma": m.gamma}, (floor,)
        ),
        "whitened_group_mean": Answer({estimator: "reinforce_baseline"}, (floor,)),
        "gae": Answer(critic, (floor,)),
    }
    return answers.get(
        m.advantage,
        Answer(
            centred,
            lacks=f"the advantage {m.advantage}. dr_grpo subtracts the group's mean instead",
        ),
    )


def _loss(m: Method) -> Answer:
    kind, clip = "actor.policy_loss_type", {"actor.eps_clip_low_high": (m.clip_low, m.clip_high)}
    if m.loss == "policy_gradient":
        return Answer({kind: "ppo"}, (AT_ONE,))
    if m.loss == "clipped_surrogate":
        return Answer({kind: "ppo", **clip, "actor.dual_clip": m.dual_clip or None})
    if m.loss in ("sequence_surrogate", "sequence_token_surrogate") and m.aggregation == "sequence":
        return Answer({kind: "gspo", **clip}, ("log-ratios are not clamped to +-20",))
    return only(
        f"the loss {m.loss}. ppo clips each token's ratio instead. In the first update of a step,"
        f" where ratios are 1, {_first_update(m)}",
        **{kind: "ppo"},
    )


def _first_update(m: Method) -> str:
    if m.loss == "mirror_descent":
        return (
            f"Sixfold's gradient is 2 tau |o_i| = {2 * (m.tau or 0.1):g} |o_i| times that of"
            " loss_agg_mode=seq-mean-token-mean"
        )
    if m.loss == "length_scaled_sequence_surrogate":
        return "Sixfold's gradient is |o_i| times its gradient"
    return "the gradient is the same"


def _kl(m: Method) -> Answer:
    if not m.beta:
        return Answer({"algo.kl.init_coef": 0.0})
    settings: dict[str, object] = {
        "algo.kl.init_coef": m.beta,
        "algo.kl.use_loss": m.kl_in == "loss",
        "algo.kl.target": m.kl_target or None,
    }
    clamp = ("KL estimators are clamped at 10 and have no gradient above it",)
    if m.kl_in == "reward":
        late = (
            "the KL is subtracted after the baseline, and a token is charged for the tokens"
            " after it; in Sixfold the KL is part of the reward that the baseline sees"
        )
        return Answer(
            {**settings, "algo.kl.estimator": m.kl}, clamp + ((late,) if m.group_baseline else ())
        )
    tokens: tuple[str, ...] = (
        ("the KL is averaged over tokens for every actor.loss_agg_mode",)
        if m.aggregation != "token"
        else ()
    )
    exact = m.kl in ("k3+", "k3-unbiased")
    if m.kl == "k3+" and m.updates > 1:
        tokens += (
            (
                "after the first update of a step, the gradient of the KL is multiplied by the"
                " ratio; that of k3+ is not"
            ),
        )
    return Answer(
        {
            **settings,
            "algo.kl.estimator": "k3" if exact else m.kl,
            "algo.kl.unbiased_gradient": exact,
        },
        clamp + tokens,
    )


def _correction(m: Method) -> Answer:
    level, mode, bounds = (
        f"algo.advantage.is_correction_{key}" for key in ("level", "mode", "threshold")
    )
    low, high = m.band
    answers = {
        "none": Answer({level: "off"}),
        "truncated": Answer({level: "token", mode: "clip", bounds: (0.0, high)}),
        "masked": Answer({level: "token", mode: "mask", bounds: (low or 0.0, high)}),
        "decoupled": Answer({level: "token", mode: "mask", bounds: (low or 0.0, high)}),
        "geometric": Answer({level: "seq", mode: "mask", bounds: (low or 0.0, high)}),
    }
    return answers.get(m.correction, only(f"the correction {m.correction}", **{level: "off"}))


def _reward(m: Method, s: Sizes) -> Iterator[Answer]:
    if m.overlong_buffer:
        lacks = (
            "a penalty for truncated completions only: all long completions are penalised"
            if m.overlong_truncated_only
            else ""
        )
        buffer = max(1, round(m.overlong_buffer * s.horizon))
        yield Answer(
            {
                "reward.overlong_buffer_len": buffer,
                "reward.overlong_penalty_factor": m.overlong_penalty,
            },
            lacks=lacks,
        )
    if m.length_penalty == "stop-properly":
        yield Answer({"reward.stop_properly_penalty_coef": 0.0})
    elif m.length_penalty != "none":
        yield only(f"length_penalty = '{m.length_penalty}'. Implement it in the reward")
    if m.whiten != "none":
        yield only("rewards standardised by their running mean and standard deviation")
    if m.dynamic_sampling:
        yield Answer(
            {"algo.dynamic_filtering_enable": True, "algo.dynamic_filtering_range": (0, 1)},
            (
                (
                    "prompts are replaced without a limit until the step is full; in Sixfold in"
                    f" at most {m.dynamic_sampling} rounds"
                ),
                (
                    "a group is dropped if its mean score is outside (0, 1); for rewards other"
                    " than 0 and 1 this differs from dropping groups whose rewards are all equal"
                ),
            ),
        )


def answers(m: Method, s: Sizes) -> Iterator[Answer]:
    yield Answer(
        {
            "rollout.batch_size": s.prompts,
            "rollout.n_samples_per_prompt": s.samples,
            "rollout.max_new_tokens": s.horizon,
            "train.batch_size": max(1, s.prompts // m.minibatches) * s.samples,
            "train.max_epochs": m.epochs,
            "actor.lr_scheduler": "constant",
            "actor.lr_warmup_ratio": 0.0,
        }
    )
    if m.needs_teacher:
        yield only("a teacher's log-probs as the advantage: train_ppo_ray has no teacher")
    else:
        yield _advantage(m, s)
    yield AGGREGATIONS[m.aggregation]
    yield _loss(m)
    yield _kl(m)
    if m.entropy_bonus:
        yield Answer(
            {"actor.entropy_coef": m.entropy_bonus},
            ("the entropy is averaged over tokens for every actor.loss_agg_mode",),
        )
    if m.entropy_target:
        yield only("an adaptive entropy bonus: actor.entropy_coef is constant")
    if m.entropy_rule != "none":
        yield only(f"entropy_rule = '{m.entropy_rule}'")
    yield _correction(m)
    yield from _reward(m, s)


def read(given: Mapping[str, Any], processes: int) -> Run:
    """Read flags of openrlhf.cli.train_ppo_ray.

    Args:
        given: values by flag, without dashes.
        processes: not used: OpenRLHF's sizes count all processes.
    """
    full = {**DEFAULTS, **given}
    prompts, samples = full["rollout.batch_size"], full["rollout.n_samples_per_prompt"]
    updates, notes = minibatches(prompts * samples, full["train.batch_size"])
    settings: dict[str, object] = {}
    remote = str(given.get("reward.remote_url") or "")
    if remote.endswith(".py"):
        settings["environment.rewards"] = [f"{remote}:reward_func"]
    elif remote:
        notes += (f"reward.remote_url = {remote!r}: write a reward function that asks it",)
    episodes = given.get("train.num_episodes", 1)
    notes += (f"train.num_episodes = {episodes}: set run.steps to rows x episodes / {prompts}",)
    if full["actor.lr_warmup_ratio"]:
        notes += (
            f"actor.lr_warmup_ratio = {full['actor.lr_warmup_ratio']}: set trainer.warmup_steps",
        )
    if full["actor.lr_scheduler"] == "cosine_with_min_lr":
        notes += ("actor.lr_scheduler = cosine_with_min_lr ends at actor.min_lr_ratio, here at 0",)
    clip = full["actor.eps_clip_low_high"] or (given.get("actor.eps_clip", 0.2),) * 2
    beta = float(full["algo.kl.init_coef"] or 0.0)
    low, high = full["algo.advantage.is_correction_threshold"]
    horizon = full["rollout.max_new_tokens"] or 1024
    buffer = full["reward.overlong_buffer_len"] or 0
    numbers = {
        "beta": beta,
        "kl_target": float(full["algo.kl.target"] or 0.0),
        "clip_low": float(clip[0]),
        "clip_high": float(clip[1]),
        "dual_clip": float(full["actor.dual_clip"] or 0.0),
        "entropy_bonus": float(full["actor.entropy_coef"] or 0.0),
        "gamma": float(full["algo.advantage.gamma"]),
        "lam": float(full["algo.advantage.lambd"]),
        "value_clip": float(full["critic.value_clip"]),
        "correction_low": low or None,
        "correction_high": high,
        "epochs": full["train.max_epochs"],
        "minibatches": updates,
        "overlong_buffer": buffer / horizon,
    }
    if buffer:
        numbers["overlong_penalty"] = float(full["reward.overlong_penalty_factor"])
    choices = {key: full[key] for key in DEFAULTS}
    if not beta:
        choices |= {key: DEFAULTS[key] for key in choices if key.startswith("algo.kl.")}
    entry = "python -m openrlhf.cli.train_ppo_ray"
    return Run(entry, settings, choices, numbers, notes)
