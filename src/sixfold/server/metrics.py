"""The page /metrics, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter

from ..rollout.engine_thread import EngineThread


class Metrics:
    """Counts answers by path and status.

    Attributes:
        answers: (path, status) -> number of answers.
        seconds: total time from request to last token, over all answered generations.
        generations: number of answered generations.
    """

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        self.seconds = 0.0
        self.generations = 0

    def text(self, engine: EngineThread) -> str:
        """The text of the page. The engine's numbers are those of its last step."""
        answers = [
            f'http_answers_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self.answers.items())
        ]
        lines = _metric("http_answers_total", "counter", "Answers by path and status.", answers)
        seconds = [
            f"generation_seconds_sum {self.seconds}",
            f"generation_seconds_count {self.generations}",
        ]
        lines += _metric(
            "generation_seconds",
            "summary",
            "Time from request to last token, summed over completed generations.",
            seconds,
        )
        for name, what, value in _counters(engine):
            lines += _metric(name, "counter", what, [f"{name} {value}"])
        for name, what, value in _gauges(engine):
            lines += _metric(name, "gauge", what, [f"{name} {value}"])
        return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, what: str, samples: list[str]) -> list[str]:
    return [
        f"# HELP sixfold_{name} {what}",
        f"# TYPE sixfold_{name} {kind}",
        *(f"sixfold_{sample}" for sample in samples),
    ]


def _counters(engine: EngineThread) -> list[tuple[str, str, float]]:
    stats = engine.engine.stats
    return [
        (
            "aborted_total",
            "Requests aborted because the client disconnected or the server stopped.",
            engine.aborted,
        ),
        ("steps_total", "Engine steps.", stats.steps),
        ("decoded_tokens_total", "Tokens sampled.", stats.decoded_tokens),
        ("prefill_tokens_total", "Prompt tokens computed.", stats.prefill_tokens),
        (
            "reused_tokens_total",
            "Prompt tokens shared by samples or found in the prefix cache.",
            stats.reused_tokens,
        ),
        (
            "recomputed_tokens_total",
            "Tokens of preempted completions that were computed again.",
            stats.recomputed_tokens,
        ),
        (
            "proposed_tokens_total",
            "Tokens proposed by speculative decoding.",
            stats.proposed_tokens,
        ),
        (
            "accepted_tokens_total",
            "Accepted tokens of speculative decoding.",
            stats.accepted_tokens,
        ),
        (
            "preemptions_total",
            "Completions preempted because KV cache blocks ran out.",
            stats.preemptions,
        ),
        (
            "graph_captures_total",
            "Captured CUDA graphs of decode forward passes.",
            stats.graph_captures,
        ),
        (
            "graph_replays_total",
            "Decode forward passes replayed from a CUDA graph.",
            stats.graph_replays,
        ),
        (
            "eager_decodes_total",
            "Decode forward passes that ran eagerly although CUDA graphs are on.",
            stats.eager_decodes,
        ),
    ]


def _gauges(engine: EngineThread) -> list[tuple[str, str, float]]:
    usage = engine.usage
    return [
        (
            "tokens_per_second",
            "Tokens sampled per second, over about the last 10 s.",
            engine.rate.value(),
        ),
        (
            "prefix_hit_ratio",
            "Share of all prompt tokens that were not computed.",
            engine.engine.stats.hit_rate,
        ),
        (
            "acceptance_ratio",
            "Share of proposed tokens that were accepted.",
            engine.engine.stats.acceptance_rate,
        ),
        (
            "tokens_per_pass",
            "Tokens per completion and forward pass.",
            engine.engine.stats.tokens_per_pass,
        ),
        ("waiting_prompts", "Prompts with samples that have not started.", engine.waiting),
        ("queue_prompts", "Maximum number of waiting prompts.", engine.max_queue or 0),
        ("running_sequences", "Completions being sampled.", usage.running),
        ("kv_blocks_used", "KV cache blocks owned by requests.", usage.used),
        ("kv_blocks_idle", "KV cache blocks owned only by the prefix cache.", usage.idle),
        ("kv_blocks_free", "Free KV cache blocks.", usage.free),
        ("kv_blocks", "KV cache blocks.", usage.used + usage.idle + usage.free),
        (
            "kv_fragmentation_ratio",
            "Share of empty token slots in used blocks.",
            usage.fragmentation,
        ),
        ("weight_version", "Version of the weights.", engine.engine.version),
    ]
