"""Settings of the algorithm, and of the critic and the reference model that it may need."""

from __future__ import annotations

from typing import Literal

from .base import Real, Section, knob


class AlgorithmConfig(Section):
    """Algorithm of the zoo, and what to change in it.

    None: the named algorithm's own choice (`sixfold algorithms` lists them).
    """

    name: str = knob("grpo", "name of a built-in algorithm (list: sixfold algorithms)")
    advantage: str | None = knob(
        None, "method of computing advantages from rewards, e.g. group_zscore, leave_one_out, gae"
    )
    loss: str | None = knob(
        None,
        "policy loss per token or sequence, e.g. clipped_surrogate, sequence_surrogate,"
        " clipped_weight",
    )
    aggregation: Literal["token", "sequence", "sequence-sum", "constant", "prompt"] | None = knob(
        None, "method of averaging token losses over the batch"
    )
    clip_low: Real | None = knob(None, "lower clip: ratios below 1 - clip_low are clipped", gt=0)
    clip_high: Real | None = knob(None, "upper clip: ratios above 1 + clip_high are clipped", gt=0)
    dual_clip: Real | None = knob(
        None, "maximum loss where A < 0, as a multiple of -A (0: no maximum)", ge=0
    )
    tau: Real | None = knob(
        None,
        "temperature of the soft_gate loss where A > 0; strength of the quadratic penalty in"
        " the mirror_descent loss",
        gt=0,
    )
    lam: Real | None = knob(
        None,
        "lambda of GAE: 0 gives one-step TD errors, 1 gives full returns minus values",
        ge=0,
        le=1,
    )
    beta: Real | None = knob(
        None, "weight of the KL to the reference model (0: no reference model is loaded)", ge=0
    )
    kl: Literal["k1", "k2", "k3", "k3+", "k3-unbiased"] | None = knob(None, "estimator of the KL")
    kl_in: Literal["loss", "reward"] | None = knob(
        None, "loss: the KL is added to the loss; reward: it is subtracted from the reward"
    )
    kl_target: Real | None = knob(
        None, "adapt beta until the KL has this value (0: beta is constant)", ge=0
    )
    whiten: Literal["none", "all", "source"] | None = knob(
        None,
        "standardise rewards by a running mean and standard deviation, over all tasks or"
        " per source",
    )
    entropy_bonus: Real | None = knob(None, "weight of the policy's entropy in the objective", ge=0)
    entropy_target: Real | None = knob(
        None,
        "adapt entropy_bonus until the entropy has this value, in nats (0: entropy_bonus"
        " is constant)",
        ge=0,
    )
    entropy_rule: Literal["none", "clip-cov", "kl-cov", "top-entropy"] | None = knob(
        None,
        "rule against entropy collapse: clip-cov and kl-cov restrict a few tokens, top-entropy"
        " trains only the tokens of highest entropy",
    )
    correction: (
        Literal[
            "none",
            "truncated",
            "truncated-sequence",
            "masked",
            "masked-sequence",
            "geometric",
            "decoupled",
            "negative-sequence",
        ]
        | None
    ) = knob(None, "importance weights for samples from older or numerically different weights")
    correction_low: Real | None = knob(None, "minimum importance weight", ge=0)
    correction_high: Real | None = knob(None, "maximum importance weight", gt=0)
    overlong_buffer: Real | None = knob(
        None,
        "share of max_new_tokens at the end of a completion over which the reward falls (0: off)",
        ge=0,
        lt=1,
    )
    length_penalty: Literal["none", "kimi", "cosine", "stop-properly"] | None = knob(
        None,
        "change of the reward by completion length; stop-properly: a truncated completion"
        " gets no reward",
    )
    dynamic_sampling: int | None = knob(
        None,
        "maximum number of sampling rounds per step, to replace groups whose rewards are"
        " all equal (0: off)",
        ge=0,
    )
    epochs: int | None = knob(None, "passes over the samples of a step", ge=1)
    minibatches: int | None = knob(None, "optimizer steps per pass", ge=1)


class CriticConfig(Section):
    """The value model of algorithms that need one (PPO)."""

    body: Literal["own", "policy", "none"] = knob(
        "own",
        "own: a copy of the policy with a value head, or with model.lora an adapter of its own on"
        " the policy's base; policy: a value head on the policy's hidden states; none: no critic",
    )
    learning_rate: Real = knob(1e-5, "AdamW learning rate of the critic", gt=0)
    warmup_steps: int = knob(0, "number of initial steps in which only the critic is trained", ge=0)


class ReferenceConfig(Section):
    """The frozen model that the KL is measured against, or the teacher for distillation."""

    path: str = knob(
        "",
        "reference model or teacher: a run, a model folder or a hub id (empty: the policy"
        " before RL)",
    )
    placement: Literal["inline", "worker", "fused"] = knob(
        "inline",
        "where log-probs of the reference are computed: inline (in the loop), worker"
        " (another process, while answers are checked), fused (by the trainer; only for a"
        " KL in the loss)",
    )
    precision: Literal["policy", "bfloat16"] = knob(
        "policy",
        "dtype of the reference's weight matrices: that of the policy, or bfloat16 (2 instead of 4"
        " bytes per parameter; needs run.precision = 'bfloat16')",
    )
    offload: bool = knob(
        False,
        "keep the reference's weights in host memory, and on the GPU only while it scores; needs"
        " placement = 'inline'",
    )
    threads: int = knob(1, "CPU threads of the worker", ge=1, le=1024)
    reset_every: int = knob(
        0, "steps between copies of the policy into the reference (0: never)", ge=0
    )
    reset_patience: int = knob(
        0,
        "evaluations without a rise of held-out accuracy after which the policy is copied"
        " into the reference and the optimizer is reset (0: never)",
        ge=0,
    )
