"""verl 0.9.1: the hydra keys of `verl.trainer.main_ppo`. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from sixfold.algorithm.method import Method

from .answer import BETAS, CRITIC_LEARNING_RATE, WEIGHT_DECAY, WHITEN, Answer, Sizes, only, std_note

NO_CAP = 1e9
"""Above every possible ratio: log-ratios are clamped at 20, and e^20 is 4.9e8."""

_ACTOR = "actor_rollout_ref.actor."
_LOSS = f"{_ACTOR}policy_loss."
_CORRECTION = "algorithm.rollout_correction."
_DISTILL = "distillation.distillation_loss."
_OVERLONG = "+reward.reward_kwargs.overlong_buffer_cfg."

DEFAULTS: dict[str, object] = {
    "data.train_batch_size": 1024,
    "data.max_response_length": 512,
    "actor_rollout_ref.rollout.n": 1,
    f"{_ACTOR}ppo_mini_batch_size": 256,
    f"{_ACTOR}ppo_epochs": 1,
    f"{_ACTOR}optim.betas": (0.9, 0.999),
    f"{_ACTOR}optim.weight_decay": 0.01,
    f"{_ACTOR}clip_ratio_low": 0.2,
    f"{_ACTOR}clip_ratio_high": 0.2,
    f"{_ACTOR}clip_ratio_c": 3.0,
    f"{_ACTOR}tau_pos": 1.0,
    f"{_ACTOR}tau_neg": 1.05,
    f"{_ACTOR}loss_agg_mode": "token-mean",
    f"{_ACTOR}loss_scale_factor": None,
    f"{_ACTOR}entropy_coeff": 0,
    f"{_ACTOR}use_kl_loss": False,
    f"{_ACTOR}kl_loss_coef": 0.001,
    f"{_ACTOR}kl_loss_type": "low_var_kl",
    f"{_LOSS}loss_mode": "vanilla",
    f"{_LOSS}clip_cov_ratio": 0.0002,
    f"{_LOSS}clip_cov_lb": 1.0,
    f"{_LOSS}clip_cov_ub": 5.0,
    f"{_LOSS}kl_cov_ratio": 0.0002,
    f"{_LOSS}ppo_kl_coef": 0.1,
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.filter_groups.enable": False,
    f"{_CORRECTION}rollout_is": None,
    f"{_CORRECTION}rollout_is_threshold": 2.0,
    f"{_CORRECTION}rollout_rs": None,
    f"{_CORRECTION}rollout_rs_threshold": None,
    "critic.optim.lr": 1e-5,
    "critic.optim.betas": (0.9, 0.999),
    "critic.optim.weight_decay": 0.01,
    "critic.cliprange_value": 0.5,
    "critic.loss_agg_mode": "${oc.select:actor_rollout_ref.actor.loss_agg_mode,token-mean}",
    "reward.reward_manager.name": "naive",
    "distillation.enabled": False,
    "distillation.teacher_models.teacher_model.model_path": None,
    f"{_DISTILL}loss_mode": "k3",
    f"{_DISTILL}use_task_rewards": True,
    f"{_DISTILL}use_policy_gradient": False,
    f"{_DISTILL}policy_loss_mode": "vanilla",
    f"{_DISTILL}clip_ratio_low": 0.2,
    f"{_DISTILL}clip_ratio_high": 0.2,
}
"""As in verl/trainer/config/_generated_ppo_trainer.yaml. Keys that start with + are not in it:
hydra adds them.
"""

AGGREGATIONS = {
    "token": Answer({f"{_ACTOR}loss_agg_mode": "token-mean"}),
    "sequence": Answer({f"{_ACTOR}loss_agg_mode": "seq-mean-token-mean"}),
    "sequence-sum": Answer({f"{_ACTOR}loss_agg_mode": "seq-mean-token-sum"}),
    "constant": Answer(
        {
            f"{_ACTOR}loss_agg_mode": "seq-mean-token-sum-norm",
            f"{_ACTOR}loss_scale_factor": "${data.max_response_length}",
        }
    ),
    "prompt": Answer(
        {f"{_ACTOR}loss_agg_mode": "token-mean"},
        lacks=(
            "a mean over prompts of token means. token-mean weights a prompt by the number of"
            " tokens of its group"
        ),
    ),
}

ESTIMATORS = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "k3+": "k3+"}


def _critic(m: Method) -> dict[str, object]:
    return {
        "algorithm.adv_estimator": "gae",
        "algorithm.gamma": m.gamma,
        "algorithm.lam": m.lam,
        "critic.cliprange_value": m.value_clip,
        "critic.loss_agg_mode": "token-mean",
        "critic.optim.lr": CRITIC_LEARNING_RATE,
        "critic.optim.betas": BETAS,
        "critic.optim.weight_decay": WEIGHT_DECAY,
    }


def _teacher(m: Method) -> Answer:
    settings = {
        "algorithm.adv_estimator": "grpo",
        "distillation.enabled": True,
        f"{_DISTILL}loss_mode": "k1",
        f"{_DISTILL}use_task_rewards": False,
        f"{_DISTILL}use_policy_gradient": True,
        f"{_DISTILL}policy_loss_mode": "vanilla",
        f"{_DISTILL}clip_ratio_low": m.clip_low,
        f"{_DISTILL}clip_ratio_high": m.clip_high,
        "distillation.teacher_models.teacher_model.model_path": "TEACHER",
    }
    return Answer(
        settings,
        (
            (
                "the advantage uses the log-probs of each update, in Sixfold those of the"
                " samples: they are the same in the first update of a step"
            ),
            (
                "the vanilla loss has dual clip at 3, and no key changes it: it takes effect"
                " where A < 0 and the ratio is above 3"
            ),
        ),
    )


def _advantage(m: Method, s: Sizes) -> Answer:
    estimator, grpo = "algorithm.adv_estimator", {"algorithm.adv_estimator": "grpo"}
    centred = {**grpo, "algorithm.norm_adv_by_std_in_grpo": False}
    answers = {
        "no_baseline": Answer(
            {**centred, "actor_rollout_ref.rollout.n": 1},
            (
                (
                    "exact only with one sample per prompt, where verl passes on the raw reward"
                    " of a group of one"
                ),
            ),
            lacks=(
                "no baseline with several samples per prompt: every estimator subtracts one."
                " These settings sample once per prompt"
            ),
        ),
        "group_mean": Answer(centred),
        "group_zscore": Answer(
            {**grpo, "algorithm.norm_adv_by_std_in_grpo": True}, (std_note(s, "1e-6"),)
        ),
        "leave_one_out": Answer({estimator: "rloo"}),
        "length_weighted": Answer({estimator: "opo"}),
        "gpg": Answer(
            {estimator: "gpg"},
            (
                (
                    "the factor is the number of rows divided by the number of rows with nonzero"
                    " reward; in Sixfold, divided by the number of rows in mixed groups"
                ),
            ),
        ),
        "normalise_then_sum": Answer(
            {
                estimator: "gdpo",
                "reward.reward_manager.name": "gdpo",
                "+algorithm.gdpo_reward_keys": ("REWARD_1", "REWARD_2"),
                "+algorithm.gdpo_reward_weights": (1.0, 1.0),
            },
            (
                std_note(s, "1e-6"),
                "the second normalisation is over tokens, so long rows count more; in Sixfold it"
                " is over rows",
            ),
        ),
        "greedy_baseline": Answer({estimator: "remax"}),
        "top_gap": Answer({estimator: "grpo_passk", "algorithm.norm_adv_by_std_in_grpo": False}),
        "batch_std": Answer(
            centred,
            lacks=(
                "division by the standard deviation of the batch. With grpo and no standard"
                " deviation, each advantage is Sixfold's times the standard deviation of the"
                " step's rewards"
            ),
        ),
        "maxrl": Answer(
            centred,
            lacks=(
                "division by the group's mean. With grpo and no standard deviation, each"
                " advantage is Sixfold's times the group's mean reward"
            ),
        ),
        "whitened_return": Answer(
            {estimator: "reinforce_plus_plus", "algorithm.gamma": m.gamma}, (WHITEN,)
        ),
        "whitened_group_mean": Answer({estimator: "reinforce_plus_plus_baseline"}, (WHITEN,)),
        "gae": Answer(_critic(m), (WHITEN,)),
        "teacher": _teacher(m),
    }
    return answers.get(
        m.advantage,
        Answer(
            centred,
            lacks=(
                f"the advantage {m.advantage}. grpo without standard deviation subtracts the"
                " group's mean instead"
            ),
        ),
    )


def _loss(m: Method) -> Answer:
    mode, low, high = f"{_LOSS}loss_mode", f"{_ACTOR}clip_ratio_low", f"{_ACTOR}clip_ratio_high"
    clip = {low: m.clip_low, high: m.clip_high}
    answers = {
        "policy_gradient": Answer({mode: "gpg"}),
        "clipped_surrogate": Answer(
            {mode: "vanilla", **clip, f"{_ACTOR}clip_ratio_c": m.dual_clip or NO_CAP}
        ),
        "sequence_surrogate": Answer(
            {mode: "gspo", **clip},
            ("the log of the sequence's ratio is clamped at 10, in Sixfold at 20",),
        ),
        "sequence_token_surrogate": Answer(
            {mode: "gspo", **clip},
            ("the log of the sequence's ratio is clamped at 10, in Sixfold at 20",),
        ),
        "length_scaled_sequence_surrogate": Answer(
            {mode: "gspo", **clip, f"{_ACTOR}loss_agg_mode": "seq-mean-token-sum"}
        ),
        "clipped_weight": Answer(
            {mode: "cispo", low: 1.0 if m.clip_low is None else m.clip_low, high: m.clip_high}
        ),
        "soft_gate": Answer(
            {
                mode: "sapo",
                f"{_ACTOR}tau_pos": m.tau or 1.0,
                f"{_ACTOR}tau_neg": m.tau_negative or 1.05,
            }
        ),
        "geometric_surrogate": Answer(
            {mode: "geo_mean", **clip},
            (
                (
                    "the loss is averaged over the micro-batch: it is the same only if an update is"
                    " one micro-batch"
                ),
            ),
        ),
        "mirror_descent": only(
            f"the squared loss. On-policy, its gradient is 2 tau = {2 * (m.tau or 0.1):g} times"
            " that of these settings. Off-policy, the square holds the policy back; these"
            " settings do not (dro squares each token's log-ratio, not their sum)",
            **{mode: "gpg", f"{_ACTOR}loss_agg_mode": "seq-mean-token-sum"},
        ),
    }
    return answers.get(
        m.loss,
        Answer(
            {mode: "vanilla"}, lacks=f"the loss {m.loss}. vanilla clips each token's ratio instead"
        ),
    )


def _kl(m: Method) -> Answer:
    in_loss, in_reward = f"{_ACTOR}use_kl_loss", "algorithm.use_kl_in_reward"
    if not m.beta:
        return Answer({in_loss: False, in_reward: False})
    ends = ("k3 is clamped at 10 and has no gradient above it",) if m.kl == "k3" else ()
    if m.kl_in == "reward":
        control = (
            {"algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.target_kl": m.kl_target}
            if m.kl_target
            else {}
        )
        settings = {
            in_reward: True,
            "algorithm.kl_penalty": ESTIMATORS[m.kl],
            "algorithm.kl_ctrl.kl_coef": m.beta,
            **control,
        }
        return Answer(settings, ends)
    estimator = ESTIMATORS.get(m.kl, "k3+")
    unbiased = (
        "k3 times the differentiable ratio. k3+ has the same gradient in the first update of a step"
        if m.kl not in ESTIMATORS
        else ""
    )
    fixed = (
        f"an adaptive beta for the KL in the loss: it stays at {m.beta:g}" if m.kl_target else ""
    )
    lacks = "; ".join(filter(None, (unbiased, fixed)))
    return Answer(
        {in_loss: True, f"{_ACTOR}kl_loss_coef": m.beta, f"{_ACTOR}kl_loss_type": estimator},
        ends,
        lacks,
    )


def _entropy(m: Method) -> Iterator[Answer]:
    yield Answer({f"{_ACTOR}entropy_coeff": m.entropy_bonus})
    if m.entropy_target:
        yield only("an adaptive entropy bonus: entropy_coeff is constant")
    if m.entropy_rule == "clip-cov":
        settings = {
            "loss_mode": "clip_cov",
            "clip_cov_ratio": 2e-4,
            "clip_cov_lb": 1.0,
            "clip_cov_ub": 5.0,
        }
        yield Answer(
            {f"{_LOSS}{k}": v for k, v in settings.items()},
            ("tokens are drawn in each micro-batch of each update; in Sixfold once per step",),
        )
    if m.entropy_rule == "kl-cov":
        settings = {"loss_mode": "kl_cov", "kl_cov_ratio": 2e-3, "ppo_kl_coef": 1.0}
        yield Answer(
            {f"{_LOSS}{k}": v for k, v in settings.items()},
            (
                (
                    "tokens that are not selected are not clipped either; on-policy this makes no"
                    " difference"
                ),
            ),
        )
    if m.entropy_rule == "top-entropy":
        yield only("training only on the tokens of highest entropy")


def _correction(m: Method) -> Answer:
    weights, bound = f"{_CORRECTION}rollout_is", f"{_CORRECTION}rollout_is_threshold"
    low, high = m.band
    both = f"{low or 1e-9:g}_{high:g}" if high else ""
    answers = {
        "none": Answer({weights: None, f"{_CORRECTION}rollout_rs": None}),
        "truncated": Answer({weights: "token", bound: high}),
        "truncated-sequence": Answer({weights: "sequence", bound: high}),
        "masked": Answer({weights: "token", bound: both}),
        "masked-sequence": Answer({weights: "sequence", bound: both}),
        "decoupled": Answer({weights: "token", bound: both}),
    }
    if m.correction == "geometric" and low and high:
        # verl's k1 is -log rho: its band is that of the inverse.
        reject = {
            f"{_CORRECTION}rollout_rs": "seq_mean_k1",
            f"{_CORRECTION}rollout_rs_threshold": f"{1 / high:.6f}_{1 / low:.6f}",
        }
        return Answer(
            {weights: "token", bound: NO_CAP, **reject},
            ("rejected rows do not count in the denominators; in Sixfold they do",),
        )
    return answers.get(m.correction, only(f"the correction {m.correction}"))


def _reward(m: Method, s: Sizes) -> Iterator[Answer]:
    if m.overlong_buffer:
        buffer = {
            "enable": True,
            "len": max(1, round(m.overlong_buffer * s.horizon)),
            "penalty_factor": m.overlong_penalty,
            "log": False,
        }
        settings: dict[str, object] = {
            "reward.reward_manager.name": "dapo",
            "+reward.reward_kwargs.max_resp_len": "${data.max_response_length}",
        }
        lacks = (
            "a penalty for truncated completions only: all long completions are penalised"
            if m.overlong_truncated_only
            else ""
        )
        yield Answer(
            {**settings, **{_OVERLONG + key: value for key, value in buffer.items()}}, lacks=lacks
        )
    if m.length_penalty != "none":
        yield only(
            f"length_penalty = '{m.length_penalty}'. Implement it in the reward function"
            " (reward.custom_reward_function.path)"
        )
    if m.whiten != "none":
        yield only("rewards standardised by their running mean and standard deviation")
    if m.dynamic_sampling:
        yield Answer(
            {"algorithm.filter_groups.enable": True},
            (
                (
                    "verl's default trainer (trainer.use_v1) ignores"
                    " algorithm.filter_groups.max_num_gen_batches and samples until the step is"
                    f" full. Sixfold samples at most {m.dynamic_sampling} rounds and then keeps"
                    " degenerate groups"
                ),
                (
                    "groups are filtered by the reward with the overlong penalty; in Sixfold by"
                    " the raw reward (use metric=acc if the reward function returns it)"
                ),
            ),
        )


def answers(m: Method, s: Sizes) -> Iterator[Answer]:
    yield Answer(
        {
            "data.train_batch_size": s.prompts,
            "data.max_response_length": s.horizon,
            "actor_rollout_ref.rollout.n": s.samples,
            f"{_ACTOR}ppo_mini_batch_size": max(1, s.prompts // m.minibatches),
            f"{_ACTOR}ppo_epochs": m.epochs,
            f"{_ACTOR}optim.betas": BETAS,
            f"{_ACTOR}optim.weight_decay": WEIGHT_DECAY,
        }
    )
    yield _advantage(m, s)
    if m.loss in ("soft_gate", "geometric_surrogate") and m.aggregation != "sequence":
        yield only(
            f"{m.loss} with aggregation '{m.aggregation}': verl always averages it over sequences"
        )
    yield AGGREGATIONS[m.aggregation]
    if not m.needs_teacher:
        yield _loss(m)
    yield _kl(m)
    yield from _entropy(m)
    yield _correction(m)
    yield from _reward(m, s)
