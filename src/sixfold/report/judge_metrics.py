"""Metrics of the judging model. They are absent in a run without one."""

from __future__ import annotations

from .metric import Metric

JUDGE = (
    Metric(
        "judge/calls", "count", "requests that the judge answered", "answered requests of the step"
    ),
    Metric(
        "judge/calls_total",
        "count",
        "requests that the judge answered in the whole run",
        "sum over steps, with pre-flight, evaluations and earlier processes of the run",
    ),
    Metric(
        "judge/prompt_tokens",
        "tokens",
        "tokens of the prompts to the judge",
        "sum of the endpoint's counts; characters / 4 where it counts none",
    ),
    Metric(
        "judge/completion_tokens",
        "tokens",
        "tokens of the judge's replies",
        "as judge/prompt_tokens",
    ),
    Metric(
        "judge/cost_usd",
        "USD",
        "price of the step's requests",
        "tokens times environment.judge.input_price and output_price",
    ),
    Metric("judge/cost_total_usd", "USD", "price of the whole run", "as judge/calls_total"),
    Metric(
        "judge/retries",
        "count",
        "requests sent again after an error of the endpoint",
        "repeated requests of the step",
    ),
    Metric(
        "judge/cached_frac",
        "share",
        "questions whose answer was known; absent without questions",
        "questions answered from the cache / questions",
    ),
    Metric(
        "judge/refused_frac",
        "share",
        "completions that earn 0 without being judged: empty, master keys, forged verdicts",
        "refused completions / completions that a judge reward scored",
    ),
    Metric(
        "judge/unreadable_frac",
        "share",
        "replies without a readable verdict; each is followed by one reminder",
        "unreadable replies / replies",
    ),
    Metric(
        "judge/failed_frac",
        "share",
        "questions that the judge did not answer",
        "questions without a verdict / questions",
    ),
    Metric(
        "judge/position_bias",
        "share",
        "preference of the judge for the completion that it sees first: 1 always, 0 none, -1 never",
        "(comparisons won by the first - by the second) / both; absent without comparisons",
    ),
    Metric(
        "judge/unstable_frac",
        "share",
        "pairs whose verdict changes with the order; they count as ties",
        "pairs with different verdicts / pairs asked in both orders",
    ),
    Metric(
        "judge/length_corr",
        "correlation",
        "correlation of the judged value with the length of the completion",
        "Pearson's r over judged completions, length in characters; absent if one does not vary",
    ),
)
