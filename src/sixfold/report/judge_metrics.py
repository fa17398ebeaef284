"""Metrics of the judging model. They are absent in a run without a judge."""

from __future__ import annotations

from .metric import Metric

JUDGE = (
    Metric(
        "judge/calls", "count", "requests that the judge answered", "answered requests in the step"
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
        "sum of the endpoint's counts; if it reports none, estimated as UTF-8 bytes / 4",
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
    Metric(
        "judge/cost_total_usd", "USD", "price of the requests of the run", "as judge/calls_total"
    ),
    Metric(
        "judge/retries",
        "count",
        "requests sent again after a failure of the endpoint",
        "retries in the step",
        timed=True,
    ),
    Metric(
        "judge/cached_frac",
        "share",
        "questions that needed no request; absent without questions",
        "questions answered from the cache or by an equal running question / questions",
    ),
    Metric(
        "judge/refused_frac",
        "share",
        "completions that earn 0 without a question: empty answers, master keys, forged verdicts",
        "refused completions / completions scored by a judge reward",
    ),
    Metric(
        "judge/unreadable_frac",
        "share",
        "replies without a readable verdict; the judge is reminded once per question",
        "unreadable replies / replies",
    ),
    Metric(
        "judge/failed_frac",
        "share",
        "questions without a verdict",
        "questions without a verdict / questions",
    ),
    Metric(
        "judge/position_bias",
        "share",
        "bias towards the completion that is shown first: 1 it always wins, 0 no bias, -1 it never"
        " wins",
        "(wins of the first - wins of the second) / (wins of both); absent without wins",
    ),
    Metric(
        "judge/unstable_frac",
        "share",
        "pairs whose verdict changes with the order; they count as ties",
        "pairs with different verdicts / pairs compared in both orders",
    ),
    Metric(
        "judge/length_corr",
        "correlation",
        "correlation of the reward with the length of the completion",
        "Pearson's r over judged completions, length in characters; absent if one is constant",
    ),
)
