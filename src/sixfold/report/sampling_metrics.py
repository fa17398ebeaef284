"""Metrics of sampling and scoring: step, time, reward, rollout, dynamic sampling, held-out."""

from __future__ import annotations

from collections.abc import Mapping

from .metric import Metric

STEP = (
    Metric("step", "count", "step number, starting at 1", "optimizer steps, skipped ones included"),
    Metric(
        "tokens_total",
        "tokens",
        "tokens sampled since the start of the run",
        "sum over steps of rollout/tokens",
        timed_with="rollout.oversample",
    ),
)

_SYNC_STAGES = {
    "gather": "collecting the weights: shards of all ranks, the adapter, or merging the adapter",
    "cast": "conversion to the sampler's dtype, or rounding to int8 or fp8",
    "broadcast": "copying to the sampler, or to the file that it reads",
    "reshard": "an engine in another process: conversion to its names and layout, and loading",
    "invalidate": "dropping what the sampler computed with the old weights",
    "verify": "checks: all weights are finite, and the sampler has the trainer's weights",
}
SYNC_STAGES = tuple(
    Metric(
        f"time/sync_{stage}_s",
        "s",
        f"weight sync: {meaning}",
        "part of time/sync_s; absent in a step without new weights",
    )
    for stage, meaning in _SYNC_STAGES.items()
)

TIME = (
    Metric("time/total_s", "s", "whole step", "wall clock from its start to its end"),
    Metric("time/rollout_s", "s", "sampling", "wall clock until the last token of the step"),
    Metric(
        "time/environment_s",
        "s",
        "waiting for reward checks",
        "wall clock from the last token to the last check; earlier checks run during sampling",
    ),
    Metric(
        "time/batch_s",
        "s",
        "conversion of trajectories to tensors",
        "wall clock of collate and of the copy to the device",
    ),
    Metric(
        "time/reference_s",
        "s",
        "log-probs of the reference model",
        "wall clock of the reference role; absent without a reference",
    ),
    Metric(
        "time/scoring_s",
        "s",
        "values of the critic and the proximal pass, in a run without a reference",
        "wall clock of these scorers",
    ),
    Metric("time/algorithm_s", "s", "advantages and weights", "wall clock of Algorithm.prepare"),
    Metric(
        "time/trainer_s",
        "s",
        "forward pass, backward pass and optimizer",
        "wall clock of the trainer role",
    ),
    Metric("time/sync_s", "s", "weight sync", "wall clock of the weight sync"),
    *SYNC_STAGES,
    Metric(
        "time/log_s",
        "s",
        "writing the metrics and the rollout dump of the previous step",
        "wall clock of the loggers",
    ),
    Metric(
        "time/check_p50_s",
        "s",
        "median duration of checks",
        "median over trajectories of the duration of all checks of one",
    ),
    Metric(
        "time/check_p99_s",
        "s",
        "duration of the slowest 1% of checks",
        "99th percentile over trajectories of the duration of all checks of one",
    ),
    Metric(
        "time/check_p50_s/*",
        "s",
        "median duration of the checks of one reward; absent with a single reward",
        "median over trajectories of the duration of the check by NAME",
    ),
    Metric(
        "time/check_p99_s/*",
        "s",
        "duration of the slowest 1% of checks of one reward; absent with a single reward",
        "99th percentile over trajectories of the duration of the check by NAME",
    ),
    Metric(
        "time/eval_s",
        "s",
        "held-out evaluation",
        "wall clock of the evaluation; absent in a step without one",
    ),
)

REWARD = (
    Metric(
        "reward/mean",
        "reward",
        "mean reward of the step",
        "mean of r over trajectories whose check did not fail",
    ),
    Metric(
        "reward/std",
        "reward",
        "standard deviation of the rewards",
        "population standard deviation of r over the same trajectories",
    ),
    Metric(
        "reward/ema",
        "reward",
        "moving average of the mean reward",
        "0.9 · previous + 0.1 · reward/mean (with dynamic sampling: dynamic/reward_mean)",
    ),
    Metric(
        "reward/solved_frac",
        "share",
        "trajectories that solve their task (see eval.metric, eval.solved_at)",
        "solved trajectories / trajectories whose check did not fail",
    ),
    Metric(
        "reward/error_frac",
        "share",
        "checks that failed",
        "trajectories whose reward is an error / trajectories",
    ),
    Metric(
        "reward/not_applicable_frac",
        "share",
        "trajectories for which every reward returned None; absent if there were none",
        "trajectories to which no reward applies / trajectories",
    ),
    Metric(
        "reward/part/*",
        "reward",
        "mean of one named part of the reward",
        "mean of parts[NAME] over trajectories that have it",
    ),
    Metric(
        "reward/part_std/*",
        "reward",
        "standard deviation of one reward, before its weight",
        "population std over samples with a reward",
    ),
    Metric(
        "reward/rerun_frac",
        "share",
        "trajectories with a check that failed and ran again; absent if there were none",
        "trajectories with a check that ran again / trajectories",
        timed=True,
    ),
    Metric(
        "reward/cached_frac",
        "share",
        "trajectories with a check whose outcome was known; absent if there were none",
        "trajectories with an outcome of an earlier check / trajectories",
        timed=True,
    ),
    Metric(
        "reward/verdict/*",
        "share",
        "trajectories with one verdict: passed, wrong_answer, timeout, infrastructure_error, ...",
        "trajectories with verdict NAME / trajectories; absent if there were none",
    ),
    Metric(
        "reward/frac_format_only",
        "share",
        "trajectories that are wrong and still paid, for their format or another part",
        "trajectories whose deciding part (see eval.metric) is at most 0 while another part times"
        " its weight is above 0 / trajectories with several parts",
    ),
    Metric(
        "group/degenerate_frac",
        "share",
        "groups with equal rewards, which give no gradient",
        "groups whose rewards are all equal / groups",
    ),
)

ROLLOUT = (
    Metric(
        "rollout/tokens",
        "tokens",
        "tokens sampled in the step, also in dropped samples",
        "sum of mask",
        timed_with="rollout.oversample",
    ),
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
        "mean over trajectories of the number of sampled tokens",
    ),
    Metric(
        "rollout/length_max",
        "tokens",
        "length of the longest completion",
        "maximum over trajectories of the number of sampled tokens",
    ),
    Metric(
        "rollout/truncated_frac",
        "share",
        "completions that reached the length limit",
        "trajectories that a limit of tokens, turns or context ended / trajectories",
    ),
    Metric(
        "rollout/turns_mean",
        "count",
        "replies per episode; logged with environment.episode",
        "mean over trajectories of the number of replies",
    ),
    Metric(
        "rollout/tool_error_frac",
        "share",
        "replies with a tool call that failed; logged with environment.episode",
        "replies for which the environment reports tool errors / replies",
    ),
    Metric(
        "rollout/episode_s",
        "s",
        "duration of an episode; logged with environment.episode",
        "mean over trajectories of the wall clock from start to end, without the check of the"
        " reward",
    ),
    Metric(
        "rollout/branched_frac",
        "share",
        "samples that branched from another one; logged with rollout.branches. It is at most"
        " 1 - 1 / rollout.branches, and less if episodes end before the branch",
        "trajectories with a branch / trajectories",
    ),
    Metric(
        "rollout/kept_frac",
        "share",
        "samples that reach the loss; 0.5 to 0.95 is normal with dynamic K or dynamic sampling,"
        " otherwise about 1",
        "trajectories of the step / samples started for it",
    ),
    Metric(
        "rollout/dropped_tokens",
        "tokens",
        "tokens of samples that were discarded",
        "tokens in rollout/tokens whose trajectory is not in the step",
        timed=True,
    ),
    Metric(
        "rollout/greedy_tokens",
        "tokens",
        "tokens of the greedy completions whose rewards are the baseline",
        "sum of sampled tokens; not part of rollout/tokens",
    ),
    Metric(
        "rollout/greedy_reward",
        "reward",
        "mean greedy baseline of the step",
        "mean reward of the greedy completions whose check answered",
    ),
    Metric(
        "rollout/greedy_error_frac",
        "share",
        "prompts without a greedy baseline, whose advantages are 0 in this step",
        "greedy completions whose check failed / greedy completions",
    ),
    Metric(
        "rollout/solved_length_p98",
        "tokens",
        "length that solved tasks need; a much larger rollout.max_new_tokens gains nothing",
        "98th percentile (nearest rank) over solved trajectories of the number of sampled tokens;"
        " absent if nothing is solved",
    ),
    Metric(
        "rollout/kept_mean",
        "tokens",
        "tokens of the vocabulary kept by truncated sampling",
        "mean over sampled tokens of the size of the kept set",
    ),
    Metric(
        "rollout/kept_mass_frac",
        "share",
        "total probability of the kept tokens",
        "mean over sampled tokens of the probability of the kept set",
    ),
    Metric(
        "rollout/reused_frac",
        "share",
        "prompt tokens not computed, because samples share them or the prefix cache holds them",
        "1 - prompt tokens computed / rollout/prompt_tokens",
        timed=True,
    ),
    Metric(
        "rollout/kv_peak_frac",
        "share",
        "peak use of the KV cache",
        "maximum over engine steps of blocks held by requests / blocks",
        timed=True,
    ),
    Metric(
        "rollout/accepted_frac",
        "share",
        "accepted speculative tokens",
        "accepted speculative tokens / proposed speculative tokens",
    ),
    Metric(
        "rollout/queue_peak",
        "count",
        "peak length of the engine's queue",
        "maximum number of prompts and preempted completions that waited at once",
        timed=True,
    ),
    Metric(
        "rollout/preemptions",
        "count",
        "preempted completions: paused because no KV block was free, and continued later",
        "number of preemptions; 0 if engine.preemption.kind is none",
        timed=True,
    ),
    Metric(
        "rollout/recomputed_tokens",
        "tokens",
        "tokens computed again because of preemptions",
        "tokens of preempted completions that were computed a second time",
        timed=True,
    ),
    Metric(
        "rollout/swapped_bytes",
        "bytes",
        "KV cache of preempted completions copied to host memory",
        "bytes copied; logged if engine.preemption.kind is swap",
        timed=True,
    ),
)

DEAD = (
    Metric(
        "rollout/dead_prompts",
        "count",
        "prompts that were set aside in dead_letters.jsonl; only with rollout.max_failures",
        "prompts of which rollout.max_failures attempts failed since the last step",
    ),
)

CURRICULUM = (
    Metric(
        "data/new_frac",
        "share",
        "training tasks that have too few rewards to be judged, or are tested again",
        "tasks in the bucket new / tasks; buckets change every data.curriculum.every steps",
    ),
    Metric(
        "data/train_frac",
        "share",
        "training tasks that are neither easy nor hard",
        "tasks with data.curriculum.hard < pass rate < data.curriculum.easy / tasks",
    ),
    Metric(
        "data/easy_frac",
        "share",
        "training tasks that have left: they are nearly always solved",
        "tasks with pass rate >= data.curriculum.easy / tasks",
    ),
    Metric(
        "data/hard_frac",
        "share",
        "training tasks that are held: they are nearly never solved",
        "tasks with pass rate <= data.curriculum.hard / tasks",
    ),
    Metric(
        "data/pool",
        "count",
        "tasks from which the next prompts are drawn",
        "new, train, and data/spared",
    ),
    Metric(
        "data/spared",
        "count",
        "easy and hard tasks that are drawn because too few others are left for a step",
        "those whose pass rate is nearest to 1/2; 0 while there are enough others",
    ),
    Metric(
        "data/moved",
        "count",
        "tasks that changed their bucket after this step",
        "tasks with another bucket than before",
    ),
)

DYNAMIC = (
    Metric(
        "dynamic/rounds",
        "count",
        "sampling rounds of the step",
        "1 + rounds of refilling; ahead, groups sampled / groups trained, rounded up",
    ),
    Metric(
        "dynamic/extra_frac",
        "share",
        "trajectories sampled in addition to those kept",
        "trajectories sampled / trajectories kept - 1",
    ),
    Metric(
        "dynamic/kept_frac",
        "share",
        "sampled groups with different rewards",
        "groups sampled whose known rewards differ / groups sampled",
    ),
    Metric(
        "dynamic/unfilled",
        "count",
        "groups kept although their rewards are equal",
        "slots that were not filled in any round",
    ),
    Metric(
        "dynamic/degenerate_frac",
        "share",
        "groups of the step whose rewards are still equal after the filter; above 10%, the tasks"
        " are too easy or too hard for the policy",
        "dynamic/unfilled / groups kept",
    ),
    Metric(
        "dynamic/check_s",
        "s",
        "reward checks inside the rollout",
        "wall clock of the checks of all rounds; part of time/rollout_s",
    ),
    Metric(
        "dynamic/solved_frac",
        "share",
        "solved trajectories, discarded ones included",
        "trajectories that solve their task / trajectories sampled",
    ),
    Metric(
        "dynamic/reward_mean",
        "reward",
        "mean reward, discarded trajectories included",
        "mean of known r over trajectories sampled",
    ),
)

HELD_OUT = (
    Metric(
        "heldout/accuracy",
        "share",
        "held-out tasks solved (see eval.metric, eval.solved_at)",
        "mean over tasks of the share of samples that are solved; a failed check is not solved",
    ),
    Metric(
        "heldout/low",
        "share",
        "lower end of the 95% interval of heldout/accuracy",
        "interval over tasks",
    ),
    Metric(
        "heldout/high",
        "share",
        "upper end of the 95% interval of heldout/accuracy",
        "interval over tasks",
    ),
    Metric(
        "heldout/score",
        "reward",
        "mean of eval.metric on held-out tasks, partial credit included",
        "mean over tasks of the mean over samples",
    ),
    Metric(
        "heldout/strict",
        "share",
        "held-out samples that the verifier eval.strict counts as solved",
        "solved samples / samples, over those that both verifiers checked",
    ),
    Metric(
        "heldout/strict_gap",
        "share",
        "held-out samples solved by the usual verifier minus those solved by eval.strict",
        "difference of the two shares, over samples that both verifiers checked",
    ),
    Metric(
        "heldout/source/*",
        "share",
        "held-out tasks of one source that are solved",
        "as heldout/accuracy, for sources with at least 16 tasks",
    ),
    Metric(
        "heldout/change",
        "share",
        "change of the share of tasks solved since the best earlier evaluation",
        "mean over tasks of the share solved now minus then; absent at the first evaluation",
    ),
    Metric(
        "heldout/diverged",
        "count",
        "1 if held-out accuracy has fallen while the training reward has risen; then the policy may"
        " be exploiting the checker",
        "1 if heldout/change < 0 with p < 0.05 / (n (n + 1)) in a paired test, n earlier"
        " evaluations, and the mean reward of 20 steps rose by over 2 standard errors; else 0",
    ),
    Metric(
        "heldout/verdict/*",
        "share",
        "held-out samples with one verdict; absent if the rewards give plain numbers",
        "samples with verdict NAME / samples",
    ),
    Metric(
        "heldout/loss",
        "nats",
        "loss on held-out examples of a supervised stage",
        "-Σ log π(token) / tokens, over the trained tokens of the held-out examples",
    ),
    Metric(
        "heldout/bits_per_byte",
        "bits",
        "loss on held-out texts of pretraining, per byte, which does not depend on the tokenizer",
        "-Σ log2 π(token) / UTF-8 bytes of the predicted tokens",
    ),
    Metric(
        "heldout/version",
        "count",
        "version of the weights that were evaluated",
        "updates before the evaluation; always the policy's own weights",
    ),
)

SAMPLE = (
    Metric("sample/kept", "count", "completions kept by a sample stage", "per block of tasks"),
    Metric(
        "sample/kept_frac", "share", "share of the completions that are kept", "kept / completions"
    ),
    Metric(
        "sample/dropped/*",
        "count",
        "completions dropped for one reason, such as unsolved or duplicate",
        "the first reason that holds, in the order of stages/keepers.py",
    ),
    Metric(
        "search/prefilled_tokens",
        "tokens",
        "prompts and prefixes that the policy computed (`sample.search`)",
        "per block of tasks",
    ),
    Metric(
        "search/sampled_tokens",
        "tokens",
        "tokens that the searches sampled",
        "with those of chains that were dropped",
    ),
    Metric(
        "search/scored_tokens", "tokens", "tokens that the scorer's model computed", "per block"
    ),
    Metric("search/refused", "count", "texts that the scorer refused", "their score is 0"),
)

GROUPS: Mapping[str, tuple[Metric, ...]] = {
    "Step": STEP,
    "Time": TIME,
    "Reward": REWARD,
    "Rollout": ROLLOUT,
    "Prompts set aside": DEAD,
    "Curriculum": CURRICULUM,
    "Dynamic sampling": DYNAMIC,
    "Held-out": HELD_OUT,
    "Sampled datasets": SAMPLE,
}
