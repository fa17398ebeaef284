"""Metrics of training: loss, policy ratio, corrections, critic, mismatch, weight sync."""

from __future__ import annotations

from collections.abc import Mapping

from ..types import LOG_RATIO_EDGES
from .metric import Metric

_EDGES = ", ".join(f"{edge:g}" for edge in LOG_RATIO_EDGES)

TRAINING = (
    Metric("train/loss", "nats", "loss that is minimised", "Σ weights · token_loss"),
    Metric("train/pg_loss", "nats", "policy-gradient part of the loss", "Σ weights · policy_loss"),
    Metric(
        "train/kl",
        "nats",
        "KL divergence from the reference",
        "mean of the recipe's KL estimator over sampled tokens in the rows that were computed",
    ),
    Metric(
        "train/entropy",
        "nats",
        "entropy of the policy",
        "mean over sampled tokens of -Σ_v p(v) log p(v)",
    ),
    Metric("train/grad_norm", "norm", "gradient norm before clipping", "√(Σ g²) of all parameters"),
    Metric("train/learning_rate", "rate", "learning rate of the step", "schedule(step)"),
    Metric(
        "train/tokens",
        "tokens",
        "tokens computed by the trainer",
        "without padding; a prompt shared by several samples counts once",
    ),
    Metric(
        "train/microbatches",
        "count",
        "forward and backward passes",
        "micro-batches of the step",
    ),
    Metric("train/updates", "count", "optimizer updates", "epochs · mini-batches - skipped ones"),
    Metric(
        "train/skipped",
        "count",
        "skipped updates",
        "updates whose loss or gradient was not finite; 1 if no token had a weight",
    ),
    Metric(
        "train/skipped_total",
        "count",
        "skipped updates since the start of the run",
        "sum of the updates whose loss or gradient was not finite",
    ),
    Metric("train/tok_s", "tokens/s", "training speed", "train/tokens / time/trainer_s"),
    Metric(
        "checkpoint/failed_total",
        "count",
        "checkpoints that this process could not save; absent while there is none",
        "sum of the saves that the disk refused",
    ),
)

POLICY_RATIO = (
    Metric(
        "train/ratio_mean",
        "ratio",
        "mean importance ratio; 1 when on-policy",
        "mean of exp(logp - old_logp) over sampled tokens",
    ),
    Metric(
        "train/log_ratio_mean",
        "nats",
        "mean log-ratio; 0 when on-policy",
        "mean of logp - old_logp over sampled tokens",
    ),
    Metric(
        "train/clipped_frac",
        "share",
        "tokens outside the clip range",
        "tokens with ratio < 1 - clip_low or ratio > 1 + clip_high / sampled tokens",
    ),
    Metric(
        "train/clip_active_frac",
        "share",
        "tokens whose gradient is removed by the clip",
        "tokens outside the range on the side that their advantage favours / sampled tokens",
    ),
    Metric(
        "train/ratio_hist",
        "counts",
        "histogram of the log-ratio",
        f"11 bins, the first and the last open; edges {_EDGES}",
        is_list=True,
        edges=LOG_RATIO_EDGES,
    ),
)

CORRECTION = (
    Metric(
        "correction/weight",
        "ratio",
        "importance weight of the policy loss",
        "mean over sampled tokens of the weight that the rule gives",
    ),
    Metric(
        "correction/dropped_frac",
        "share",
        "tokens without a policy loss",
        "tokens of weight 0 / sampled tokens",
    ),
    Metric(
        "correction/ess_frac",
        "share",
        "effective sample size; below 0.3, few samples carry most of the weight",
        "(Σ w)² / (n Σ w²), w = trainer probability / sampler probability, before any rule",
    ),
    Metric(
        "correction/chi2",
        "ratio",
        "χ² divergence of trainer and sampler; above 1, the correction is unreliable",
        "mean of w² - 1 over sampled tokens",
    ),
)

ADAPTIVE = (
    Metric(
        "algorithm/beta",
        "weight",
        "weight of the KL term, if algorithm.kl_target adapts it",
        "beta · (1 + clip(KL / target - 1, ± 0.2) · n / 10000)",
    ),
    Metric(
        "algorithm/entropy_bonus",
        "weight",
        "weight of the entropy bonus, if algorithm.entropy_target adapts it",
        "0 above the target; otherwise ± 0.001 per step",
    ),
)

CRITIC = (
    Metric(
        "critic/loss",
        "loss",
        "loss of the critic",
        "Σ weights · ½ max((V - R)², (clip(V, V_old ± eps) - R)²); mean over the updates of the"
        " step",
    ),
    Metric(
        "critic/grad_norm",
        "norm",
        "gradient norm of the critic before clipping",
        "√(Σ g²) of its parameters; mean over updates",
    ),
    Metric(
        "critic/learning_rate",
        "rate",
        "learning rate of the critic",
        "learning rate of the last update of the step",
    ),
    Metric(
        "critic/explained_variance",
        "share",
        "explained variance of the critic",
        "1 - Var(R - V) / Var(R) over sampled tokens, V as of sampling",
    ),
    Metric(
        "critic/value_mean",
        "reward",
        "mean value predicted by the critic",
        "mean of V over sampled tokens, as of sampling",
    ),
    Metric(
        "critic/skipped",
        "count",
        "skipped updates of the critic",
        "updates whose loss or gradient was not finite; 1 if no token had a weight",
    ),
)

MISMATCH = (
    Metric(
        "mismatch/max_abs_logp",
        "nats",
        "largest difference on one token",
        "max |engine logp - trainer logp| before the update",
    ),
    Metric(
        "mismatch/p99_abs_logp",
        "nats",
        "difference that 99% of tokens do not exceed",
        "99th percentile of |engine logp - trainer logp|",
    ),
    Metric(
        "mismatch/mean_abs_logp",
        "nats",
        "mean difference",
        "mean of |engine logp - trainer logp|",
    ),
    Metric(
        "mismatch/kl_k3",
        "nats",
        "estimate of KL(engine ‖ trainer)",
        "mean of exp(-r) + r - 1, r = engine logp - trainer logp",
    ),
    Metric(
        "mismatch/prob_error",
        "ratio",
        "mean factor between the probabilities; 1 if they are equal",
        "mean of exp |engine logp - trainer logp|",
    ),
    Metric(
        "mismatch/temperature",
        "ratio",
        "temperature of the engine's log-probs relative to the trainer's; 1 if they are equal",
        "1 / (1 + slope of engine logp - trainer logp over trainer logp + entropy)",
    ),
)

EXPERTS = (
    Metric(
        "moe/max_load",
        "ratio",
        "load of the busiest expert, relative to the mean; 1 if all experts have the same load",
        "mean over layers of max_e n_e / mean_e n_e, n_e: tokens of all trajectories of the update"
        " that expert e computes",
    ),
    Metric(
        "moe/load_entropy_frac",
        "share",
        "evenness of the load; 1 if all experts have the same load",
        "mean over layers of -Σ_e s_e log s_e / log E, s_e = n_e / Σ n_e",
    ),
    Metric(
        "moe/dead_frac",
        "share",
        "experts without a token",
        "experts with n_e = 0 in the update / all experts of all layers",
    ),
    Metric(
        "moe/balance_loss",
        "loss",
        "balance loss before its weight, if moe.balance_loss is set; k if all loads are equal",
        "mean over layers of E · Σ_e n_e / n · mean router probability of e",
    ),
    Metric(
        "moe/drift_frac",
        "share",
        "tokens whose routers choose other experts than at sampling, in at least one layer; absent"
        " if moe.routing is 'free'",
        "tokens with another set of experts / tokens with a record; mean over the updates",
    ),
    Metric(
        "moe/drift_layer_frac",
        "share",
        "pairs of token and layer whose experts differ from those at sampling",
        "pairs of token and layer with another set of experts / such pairs with a record",
    ),
)

WEIGHT_SYNC = (
    Metric(
        "sync/version",
        "count",
        "version of the sampler's weights",
        "updates that have reached the sampler",
    ),
    Metric(
        "sync/staleness",
        "updates",
        "age of the oldest rollout in the batch",
        "trainer version - oldest version in the batch",
    ),
    Metric(
        "sync/gather_bytes",
        "bytes",
        "weights collected: shards of all ranks, the adapter, or the adapter merged into its base",
        "sum over tensors, once for every time that one is collected",
    ),
    Metric(
        "sync/cast_bytes",
        "bytes",
        "weights converted to the sampler's dtype, or rounded to int8 or fp8",
        "sum of the results, once for every conversion",
    ),
    Metric(
        "sync/broadcast_bytes",
        "bytes",
        "weights copied to the sampler; 0 if it shares them with the trainer",
        "sum over the copied tensors; for an engine in another process, of the file that it reads",
    ),
)

ASYNCHRONOUS = (
    Metric(
        "async/age_mean",
        "steps",
        "age of the groups of the step; only with rollout.staleness > 0, as all in this list",
        "mean over groups of the steps that have ended between the start of a group and this step",
    ),
    Metric(
        "async/age_max",
        "steps",
        "age of the oldest group; the bound is in docs/topologies.md",
        "largest of the ages",
    ),
    Metric(
        "async/mixed_frac",
        "share",
        "trajectories that new weights reached while they were sampled",
        "trajectories with tokens of more than one version / trajectories",
    ),
    Metric(
        "async/running",
        "count",
        "groups that are being sampled or scored",
        "groups that have started and not finished, when the step takes its groups",
    ),
    Metric(
        "async/buffered",
        "count",
        "finished groups that wait for a later step",
        "finished groups that the step leaves",
    ),
    Metric(
        "async/age_hist",
        "tokens",
        "trained tokens by age: entry a counts those that weights of a updates before sampled",
        "count of sampled tokens with age = version that the step trains - version of the token",
        is_list=True,
    ),
)

BUSY = (
    Metric(
        "busy/trainer_frac",
        "share",
        "time in which the trainer's process trains; 1 - share is its idle share, as for all roles",
        "(time/batch_s + time/reference_s or time/scoring_s + time/algorithm_s + time/trainer_s)"
        " / seconds from the end of the last weight sync to the end of this one",
        timed=True,
    ),
    Metric("busy/sync_frac", "share", "weight sync", "time/sync_s / the same seconds", timed=True),
    Metric(
        "busy/environment_frac",
        "share",
        "time in which a check or a call of an environment is open",
        "length of the union of the calls / the same seconds",
        timed=True,
    ),
    Metric(
        "busy/sampler_frac/*",
        "share",
        "time in which the engine of one process computes, because it has an open request; absent"
        " for vLLM and servers",
        "seconds in steps of engine N / seconds between its last reports in two steps",
        timed=True,
    ),
    Metric(
        "sampler/tok_s/*",
        "tokens/s",
        "speed of one process that samples, its idle time included",
        "tokens that engine N sampled / seconds between its last reports in two steps",
    ),
    Metric(
        "sync/pause_s",
        "s",
        "pause of sampling for new weights; absent if trainer and sampler take turns",
        "longest weight load inside an engine of this step's sync",
    ),
)

REPLAY = (
    Metric(
        "replay/frac",
        "share",
        "groups of the step that were trained before; only with replay.share > 0, as all in this"
        " list",
        "replayed groups / groups of the step",
    ),
    Metric(
        "replay/age_mean",
        "steps",
        "age of the replayed groups; absent if there are none",
        "mean over replayed groups of the steps since they were new",
    ),
    Metric(
        "replay/ratio_dropped",
        "count",
        "groups that leave the buffer because their mean ratio exceeds replay.max_ratio",
        "groups of the step whose mean over tokens of exp(trainer - sampler log-prob) is larger",
    ),
)

CUSTOM = (
    Metric(
        "custom/*",
        "any",
        "metric of a custom algorithm",
        "a key that the algorithm reports and that is not in this list",
    ),
)

GROUPS: Mapping[str, tuple[Metric, ...]] = {
    "Training": TRAINING,
    "Policy ratio": POLICY_RATIO,
    "Off-policy correction": CORRECTION,
    "Adaptive weights": ADAPTIVE,
    "Critic": CRITIC,
    "Engine against trainer": MISMATCH,
    "Experts (mixture-of-experts models only)": EXPERTS,
    "Weight sync": WEIGHT_SYNC,
    "Asynchronous sampling": ASYNCHRONOUS,
    "Replay buffer": REPLAY,
    "Busy roles": BUSY,
    "Custom algorithms": CUSTOM,
}
