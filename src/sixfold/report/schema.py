"""Every metric key with its unit, meaning and formula.

The JSONL logger refuses a key that is not here, so docs/metrics.md stays complete. `python -m
sixfold.report.schema > docs/metrics.md` writes the page; a test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import nearest
from ..types import LOG_RATIO_EDGES as LOG_RATIO_EDGES

Value = float | Sequence[float | None] | None
"""A metric as logged. None in a file is a number that was not finite. An absent key was not
measured in that step.
"""

_EDGES = ", ".join(f"{edge:g}" for edge in LOG_RATIO_EDGES)


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        key: name. A key that ends in `*` is a family: the run supplies the rest of the name, such
            as a reward part.
        unit: unit of the value.
        meaning: what it is.
        formula: how it is computed.
        is_list: whether the value is a list.
    """

    key: str
    unit: str
    meaning: str
    formula: str
    is_list: bool = False

    @property
    def is_family(self) -> bool:
        """True if the key stands for keys that only the run knows."""
        return self.key.endswith("*")

    def matches(self, key: str) -> bool:
        """True when `key` is this metric or, for a family, a member with a non-empty name."""
        if self.is_family:
            return len(key) >= len(self.key) and key.startswith(self.key[:-1])
        return key == self.key


GROUPS: Mapping[str, tuple[Metric, ...]] = {
    "Step": (
        Metric(
            "step",
            "count",
            "the step this line speaks of, from 1",
            "optimizer steps tried so far, skipped ones included",
        ),
        Metric(
            "tokens_total",
            "tokens",
            "tokens sampled since the run began",
            "sum over steps of rollout/tokens",
        ),
    ),
    "Time": (
        Metric(
            "time/total_s",
            "s",
            "the whole step",
            "wall clock from the first line of the step to the last",
        ),
        Metric("time/rollout_s", "s", "sampling", "wall clock of the rollout role"),
        Metric("time/environment_s", "s", "checking answers", "wall clock of the environment role"),
        Metric(
            "time/batch_s",
            "s",
            "trajectories to tensors",
            "wall clock of collate and the copy to the device",
        ),
        Metric(
            "time/reference_s",
            "s",
            "reference log-probs",
            "wall clock of the reference role; absent without a reference",
        ),
        Metric(
            "time/scoring_s",
            "s",
            "critic's values and the proximal pass, without a reference",
            "wall clock of the other scorers",
        ),
        Metric(
            "time/algorithm_s", "s", "advantages and weights", "wall clock of compute_advantages"
        ),
        Metric(
            "time/trainer_s", "s", "forward, backward, optimizer", "wall clock of the trainer role"
        ),
        Metric("time/sync_s", "s", "fresh weights to the sampler", "wall clock of the sync"),
        Metric(
            "time/log_s",
            "s",
            "metrics and rollout dump of the step before",
            "wall clock of the loggers",
        ),
        Metric(
            "time/check_p99_s",
            "s",
            "the slowest checks",
            "99th percentile over trajectories of the seconds that checking one took",
        ),
        Metric(
            "time/eval_s",
            "s",
            "held-out evaluation",
            "wall clock of the evaluation; absent in a step without one",
        ),
    ),
    "Reward": (
        Metric(
            "reward/mean",
            "reward",
            "mean reward of the step",
            "mean of r over trajectories whose check did not fail",
        ),
        Metric(
            "reward/std",
            "reward",
            "spread of the rewards",
            "population standard deviation of the same",
        ),
        Metric(
            "reward/ema",
            "reward",
            "smoothed mean reward",
            "0.9 · previous + 0.1 · reward/mean (under dynamic sampling, dynamic/reward_mean)",
        ),
        Metric(
            "reward/solved_frac",
            "share",
            "trajectories that solve their task (eval.metric, eval.solved_at)",
            "those whose score reaches full marks / trajectories whose check did not fail",
        ),
        Metric(
            "reward/error_frac",
            "share",
            "checks that failed",
            "trajectories whose reward is an error / trajectories",
        ),
        Metric(
            "reward/part/*",
            "reward",
            "mean of one named part of the reward",
            "mean of parts[NAME] over trajectories that have it",
        ),
        Metric(
            "group/degenerate_frac",
            "share",
            "groups that teach nothing",
            "groups whose rewards are all equal / groups",
        ),
    ),
    "Rollout": (
        Metric("rollout/tokens", "tokens", "tokens sampled", "sum of mask"),
        Metric(
            "rollout/prompt_tokens",
            "tokens",
            "prompt tokens of the step",
            "sum of prompt lengths over trajectories",
        ),
        Metric("rollout/tok_s", "tokens/s", "sampling speed", "rollout/tokens / time/rollout_s"),
        Metric(
            "rollout/length_mean",
            "tokens",
            "mean completion length",
            "mean of sampled tokens per trajectory",
        ),
        Metric(
            "rollout/length_max",
            "tokens",
            "longest completion",
            "max of sampled tokens per trajectory",
        ),
        Metric(
            "rollout/truncated_frac",
            "share",
            "completions cut by the limit",
            "those with finish_reason 'length' / trajectories",
        ),
        Metric(
            "rollout/kept_frac",
            "share",
            "begun samples that reach the loss; about 1 without dynamic K or sampling, 0.5 to 0.95"
            " is healthy with them, below they waste",
            "trajectories of the step / samples begun for it",
        ),
        Metric(
            "rollout/dropped_tokens",
            "tokens",
            "sampled in vain",
            "those of rollout/tokens whose trajectories are not in the step",
        ),
        Metric(
            "rollout/solved_length_p98",
            "tokens",
            "length that solved tasks need: rollout.max_new_tokens far above it buys no reward",
            "98th percentile (nearest rank) of sampled tokens over trajectories that solve their"
            " task; absent if there is none",
        ),
        Metric(
            "rollout/kept_mean",
            "tokens",
            "tokens that truncated sampling left to draw from",
            "mean over sampled tokens of the kept set's size",
        ),
        Metric(
            "rollout/kept_mass_frac",
            "share",
            "probability of those tokens together",
            "mean over sampled tokens of the kept set's probability",
        ),
        Metric(
            "rollout/reused_frac",
            "share",
            "prompt tokens not computed: shared by samples, or found in the prefix cache",
            "1 - prompt tokens computed / rollout/prompt_tokens",
        ),
        Metric(
            "rollout/kv_peak_frac",
            "share",
            "the KV cache at its fullest",
            "most blocks that requests held in an engine step / blocks",
        ),
        Metric(
            "rollout/accepted_frac",
            "share",
            "guessed tokens that stood",
            "speculation's tokens that completions took over / tokens guessed",
        ),
        Metric(
            "rollout/queue_peak",
            "count",
            "the engine's queue at its longest",
            "most prompts and preempted completions that waited at a time",
        ),
        Metric(
            "rollout/preemptions",
            "count",
            "completions stopped for lack of blocks, to go on later",
            "engine.preemption only",
        ),
        Metric(
            "rollout/recomputed_tokens",
            "tokens",
            "what preemptions cost",
            "tokens of preempted completions computed once more",
        ),
    ),
    "Training": (
        Metric("train/loss", "nats", "the loss that was differentiated", "Σ weights · token_loss"),
        Metric("train/pg_loss", "nats", "its policy-gradient part", "Σ weights · policy_loss"),
        Metric(
            "train/kl",
            "nats",
            "distance from the reference",
            "mean over the sampled tokens of the rows computed of the KL estimator of the recipe",
        ),
        Metric(
            "train/entropy",
            "nats",
            "entropy of the policy",
            "mean over sampled tokens of -Σ_v p(v) log p(v)",
        ),
        Metric(
            "train/grad_norm",
            "norm",
            "gradient norm before clipping",
            "√(Σ g²) over every parameter",
        ),
        Metric("train/learning_rate", "rate", "learning rate of the step", "schedule(step)"),
        Metric(
            "train/tokens",
            "tokens",
            "tokens computed",
            "without padding; a prompt shared by its samples counts once",
        ),
        Metric(
            "train/microbatches",
            "count",
            "forward and backward passes",
            "micro-batches of the step",
        ),
        Metric(
            "train/updates", "count", "updates made", "epochs x mini-batches, less those skipped"
        ),
        Metric(
            "train/skipped",
            "count",
            "updates not made",
            "those whose loss or gradient was not finite; 1 if no token had a weight",
        ),
        Metric(
            "train/skipped_total",
            "count",
            "updates skipped as not finite since the run began",
            "running count",
        ),
        Metric("train/tok_s", "tokens/s", "training speed", "train/tokens / time/trainer_s"),
    ),
    "Policy ratio": (
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
            "outside the clip band",
            "tokens with ratio < 1 - clip_low or > 1 + clip_high / sampled",
        ),
        Metric(
            "train/clip_active_frac",
            "share",
            "gradient removed by the clip",
            "tokens outside on the side A pushes to / sampled",
        ),
        Metric(
            "train/ratio_hist",
            "counts",
            "histogram of the log-ratio",
            f"11 bins, the outer two open; edges {_EDGES}",
            is_list=True,
        ),
    ),
    "Off-policy correction": (
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
            "tokens of weight 0 / sampled",
        ),
        Metric(
            "correction/ess_frac",
            "share",
            "samples that still count; below 0.3 little is left",
            "(Σ w)² / (n Σ w²), w = trainer / sampler, before any rule",
        ),
        Metric(
            "correction/chi2",
            "ratio",
            "distance of trainer and sampler; trouble above 1",
            "mean of w² - 1 over sampled tokens",
        ),
    ),
    "Steered by the algorithm": (
        Metric(
            "algorithm/beta",
            "weight",
            "weight of the KL, where it follows kl_target",
            "beta · (1 + clip(KL / target - 1, ± 0.2) · n / 10000)",
        ),
        Metric(
            "algorithm/entropy_bonus",
            "weight",
            "weight of the entropy, where it follows entropy_target",
            "0 above the target; else ± 0.001 a step",
        ),
    ),
    "Critic": (
        Metric(
            "critic/loss",
            "loss",
            "the critic's loss",
            "Σ weights · ½ max((V - R)², (clip(V, V_old ± eps) - R)²); mean over the step's"
            " updates",
        ),
        Metric(
            "critic/grad_norm",
            "norm",
            "the critic's gradient before clipping",
            "√(Σ g²) over its parameters; mean over updates",
        ),
        Metric(
            "critic/learning_rate",
            "rate",
            "the critic's learning rate",
            "that of the step's last update",
        ),
        Metric(
            "critic/explained_variance",
            "share",
            "how much of the returns the critic foresaw",
            "1 - Var(R - V) / Var(R) over sampled tokens, V at collection",
        ),
        Metric(
            "critic/value_mean",
            "reward",
            "mean value at collection",
            "mean of V over the same tokens",
        ),
        Metric(
            "critic/skipped",
            "count",
            "critic updates not made",
            "updates whose loss or gradient was not finite; 1 if nothing weighed",
        ),
    ),
    "Dynamic sampling": (
        Metric(
            "dynamic/rounds",
            "count",
            "rounds of sampling in the step",
            "1 + rounds of further tasks",
        ),
        Metric(
            "dynamic/extra_frac",
            "share",
            "what the refilling cost",
            "trajectories sampled / trajectories kept - 1",
        ),
        Metric(
            "dynamic/kept_frac",
            "share",
            "groups that teach something",
            "groups sampled whose known rewards differ / groups sampled",
        ),
        Metric(
            "dynamic/unfilled",
            "count",
            "groups kept although their rewards are equal",
            "slots that no round could fill",
        ),
        Metric(
            "dynamic/check_s",
            "s",
            "checking inside the rollout",
            "wall clock of the checks of all rounds; part of time/rollout_s",
        ),
        Metric(
            "dynamic/solved_frac",
            "share",
            "reward/solved_frac of all that was sampled",
            "trajectories that solve their task / those sampled",
        ),
        Metric(
            "dynamic/reward_mean",
            "reward",
            "mean reward of all that was sampled",
            "mean of known r over trajectories sampled, dropped ones too",
        ),
    ),
    "Engine against trainer": (
        Metric(
            "mismatch/max_abs_logp",
            "nats",
            "worst disagreement on one token",
            "max |engine logp - trainer logp| before the update",
        ),
        Metric(
            "mismatch/p99_abs_logp",
            "nats",
            "disagreement that 99 % of tokens stay within",
            "99 % quantile of |engine logp - trainer logp|",
        ),
        Metric(
            "mismatch/mean_abs_logp",
            "nats",
            "mean disagreement",
            "mean |engine logp - trainer logp|",
        ),
        Metric(
            "mismatch/kl_k3",
            "nats",
            "KL(engine ‖ trainer), estimated",
            "mean of exp(-r) + r - 1, r = engine logp - trainer logp",
        ),
        Metric(
            "mismatch/prob_error",
            "ratio",
            "factor between probabilities; 1 is perfect",
            "mean of exp |engine logp - trainer logp|",
        ),
    ),
    "Weight sync": (
        Metric(
            "sync/version",
            "count",
            "version of the weights in the sampler",
            "updates that reached the engine",
        ),
        Metric(
            "sync/staleness",
            "updates",
            "age of the rollouts trained on",
            "trainer version - oldest version in the batch",
        ),
    ),
    "Held-out": (
        Metric(
            "heldout/accuracy",
            "share",
            "held-out tasks solved (eval.metric, eval.solved_at)",
            "mean over tasks of the share of its samples that are solved; a failed check is not",
        ),
        Metric(
            "heldout/low",
            "share",
            "lower end of its 95 % interval",
            "interval of heldout/accuracy over tasks",
        ),
        Metric(
            "heldout/high",
            "share",
            "upper end of its 95 % interval",
            "interval of heldout/accuracy over tasks",
        ),
        Metric(
            "heldout/score",
            "reward",
            "mean of eval.metric on held-out tasks, with partial credit",
            "mean over tasks of the mean over samples",
        ),
        Metric(
            "heldout/source/*",
            "share",
            "solved held-out tasks of one source",
            "as heldout/accuracy, of sources with 16 tasks or more",
        ),
        Metric(
            "heldout/version",
            "count",
            "weights that were measured",
            "updates made before the evaluation; always the policy's own weights",
        ),
    ),
    "An algorithm of your own": (
        Metric(
            "custom/*",
            "its own",
            "what the algorithm itself measures",
            "the key it gives, which is not one of those above",
        ),
    ),
}

METRICS: tuple[Metric, ...] = tuple(metric for group in GROUPS.values() for metric in group)

ROLES: tuple[str, ...] = (
    "rollout",
    "environment",
    "batch",
    "reference",
    "scoring",
    "algorithm",
    "trainer",
    "sync",
    "log",
    "eval",
)
"""The shares of a step, in the order the loop runs them: `time/ROLE_s`."""


def find(key: str) -> Metric | None:
    """The metric of a key, or None if the schema does not have it."""
    return next((metric for metric in METRICS if metric.matches(key)), None)


def check(metrics: Mapping[str, Value]) -> None:
    """Check metrics before they are logged.

    Raises:
        ValueError: for a key that is not in the schema, or a value that is not a number (or a list
            of numbers, where the schema says so).
    """
    for key, value in metrics.items():
        metric = find(key)
        if metric is None:
            hint = nearest(key, [metric.key for metric in METRICS])
            raise ValueError(
                f"metric {key!r} is not in the schema.{hint} Add it to sixfold/report/schema.py"
                " with its unit and formula."
            )
        numbers = value if isinstance(value, list | tuple) and metric.is_list else [value]
        if not all(number is None or type(number) in (int, float) for number in numbers):
            kind = "a list of Python ints or floats" if metric.is_list else "a Python int or float"
            raise ValueError(
                f"metric {key!r} must be {kind}, got {type(value).__name__}: {value!r}"
            )


def adopt(metrics: dict[str, Any]) -> list[str]:
    """Move metrics of a user's algorithm under `custom/`, in place.

    A key in the schema keeps its name. Numbers of other libraries become Python numbers. Anything
    else is dropped.

    Returns:
        One line for each dropped value.
    """
    lines = []
    for key in [key for key in metrics if find(key) is None]:
        value = metrics.pop(key)
        try:
            metrics[f"custom/{key}"] = float(value)
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several numbers
            lines.append(
                f"metric '{key}' of the algorithm is left out: it must be a number, not"
                f" {type(value).__name__}"
            )
    return lines


def role_seconds(metrics: Mapping[str, Value]) -> dict[str, float]:
    """Seconds of each role in one step, or in sums over steps. Absent roles are left out.

    `other` is the part of time/total_s beyond the roles.
    """
    seconds = {
        role: value
        for role in ROLES
        if isinstance(value := metrics.get(f"time/{role}_s"), float | int)
    }
    total = metrics.get("time/total_s")
    if isinstance(total, float | int) and total > sum(seconds.values()):
        seconds["other"] = total - sum(seconds.values())
    return seconds


def render_markdown() -> str:
    """docs/metrics.md: one table per group."""
    lines = [
        "# Metrics",
        "",
        (
            "Generated by `python -m sixfold.report.schema > docs/metrics.md`; a test keeps it"
            " equal to the code."
        ),
        "",
        (
            "`metrics.jsonl` holds one JSON object a step. A key that is absent was not measured in"
            " that step; `null` is a number that was not"
        ),
        (
            "finite. Keys end in their unit where it is not obvious: `_s` seconds, `_frac` a share"
            " from 0 to 1, `_tok_s` tokens a second."
        ),
        (
            "Log-probs, KL and entropy are in nats. A key that is not listed here is refused by the"
            " logger."
        ),
    ]
    for group, metrics in GROUPS.items():
        lines += [
            "",
            f"## {group}",
            "",
            "| key | unit | what it is | how it is computed |",
            "|---|---|---|---|",
        ]
        cells = ((f"`{m.key}`", m.unit, m.meaning, m.formula) for m in metrics)
        lines += [
            "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render_markdown(), end="")
