"""Settings of the algorithm, and of the critic and the reference model that it may need."""

from __future__ import annotations

from typing import Literal

from .base import Real, Section, knob


class AlgorithmConfig(Section):
    """Algorithm of the zoo, and what to change in it.

    None: the named algorithm's own choice (`sixfold algorithms` lists them).
    """

    name: str = knob("grpo", "which algorithm of the zoo")
    advantage: str | None = knob(
        None, "how rewards become advantages, e.g. group_zscore, leave_one_out, gae"
    )
    loss: str | None = knob(
        None, "token loss, e.g. clipped_surrogate, sequence_surrogate, clipped_weight"
    )
    aggregation: Literal["token", "sequence", "sequence-sum", "constant", "prompt"] | None = knob(
        None, "how token losses are averaged"
    )
    clip_low: Real | None = knob(None, "ratio is clipped below 1 - clip_low", gt=0)
    clip_high: Real | None = knob(None, "ratio is clipped above 1 + clip_high", gt=0)
    dual_clip: Real | None = knob(
        None, "where A < 0 the loss is capped at -dual_clip * A (0: off)", ge=0
    )
    tau: Real | None = knob(
        None, "temperature of a soft gate, or strength of the mirror step", gt=0
    )
    lam: Real | None = knob(None, "GAE lambda", ge=0, le=1)
    beta: Real | None = knob(
        None, "weight of the KL to the reference; 0: no reference model is kept", ge=0
    )
    kl: Literal["k1", "k2", "k3", "k3+", "k3-unbiased"] | None = knob(None, "KL estimator")
    kl_in: Literal["loss", "reward"] | None = knob(
        None, "KL as a loss term, or taken off the reward"
    )
    kl_target: Real | None = knob(None, "adapt beta until the KL is this (0: beta is fixed)", ge=0)
    whiten: Literal["none", "all", "source"] | None = knob(
        None, "standardise rewards by a running mean and std, of all tasks or per source"
    )
    entropy_bonus: Real | None = knob(None, "weight of the policy's entropy in the objective", ge=0)
    entropy_target: Real | None = knob(
        None,
        "adapt the entropy bonus to hold the entropy at this, in nats (0: the bonus is fixed)",
        ge=0,
    )
    entropy_rule: Literal["none", "clip-cov", "kl-cov", "top-entropy"] | None = knob(
        None, "tokens held back, or trained alone, for entropy's sake"
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
    ) = knob(None, "importance weights for samples of older, or numerically other, weights")
    correction_low: Real | None = knob(
        None, "lowest importance weight that the correction lets through", ge=0
    )
    correction_high: Real | None = knob(
        None, "highest importance weight that the correction lets through", gt=0
    )
    overlong_buffer: Real | None = knob(
        None, "reward falls over this last share of max_new_tokens (0: off)", ge=0, lt=1
    )
    length_penalty: Literal["none", "kimi", "cosine", "stop-properly"] | None = knob(
        None, "reward by length; stop-properly: cut off pays nothing"
    )
    dynamic_sampling: int | None = knob(
        None,
        "most rounds of sampling in a step, to replace groups whose rewards are all equal (0: off)",
        ge=0,
    )
    epochs: int | None = knob(None, "passes over a step's samples", ge=1)
    minibatches: int | None = knob(None, "optimizer steps in a pass", ge=1)


class CriticConfig(Section):
    """The value model of algorithms that need one (PPO)."""

    body: Literal["own", "policy", "none"] = knob(
        "own",
        "own: a copy of the policy with a value head; policy: a head on the policy's features",
    )
    learning_rate: Real = knob(1e-5, "AdamW learning rate of the critic", gt=0)
    warmup_steps: int = knob(0, "steps at the start in which only the critic learns", ge=0)


class ReferenceConfig(Section):
    """The frozen model that the KL is measured against, or the teacher for distillation."""

    path: str = knob(
        "", "its folder or hub id, e.g. a teacher; empty: the policy as it is before RL"
    )
    placement: Literal["inline", "worker", "fused"] = knob(
        "inline",
        "scored in the loop; by a process beside it while answers are checked; or by the trainer,"
        " packed once (KL in the loss only)",
    )
    threads: int = knob(1, "CPU threads of the worker", ge=1, le=1024)
    reset_every: int = knob(0, "copy the policy into the reference every N steps (0: never)", ge=0)
    reset_patience: int = knob(
        0,
        "the same once held-out accuracy has not risen for N evaluations (0: never); the optimizer"
        " starts afresh too",
        ge=0,
    )
