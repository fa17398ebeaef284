"""The page /metrics, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter

from .engine_thread import EngineThread


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
            "From request to last token, of answered generations.",
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
            "Requests given up because the client left or the server stopped.",
            engine.aborted,
        ),
        ("steps_total", "Engine steps.", stats.steps),
        ("decoded_tokens_total", "Tokens sampled.", stats.decoded_tokens),
        ("prefill_tokens_total", "Prompt tokens computed.", stats.prefill_tokens),
        (
            "reused_tokens_total",
            "Prompt tokens shared by samples or found in the prefix cache instead.",
            stats.reused_tokens,
        ),
        (
            "recomputed_tokens_total",
            "Tokens of preempted completions computed once more.",
            stats.recomputed_tokens,
        ),
        (
            "proposed_tokens_total",
            "Tokens guessed by speculation and checked.",
            stats.proposed_tokens,
        ),
        (
            "accepted_tokens_total",
            "Guessed tokens that completions took over.",
            stats.accepted_tokens,
        ),
        (
            "preemptions_total",
            "Completions stopped for lack of blocks, to go on later.",
            stats.preemptions,
        ),
        (
            "graph_captures_total",
            "CUDA graphs of decode forwards that were made.",
            stats.graph_captures,
        ),
        (
            "graph_replays_total",
            "Decode forwards that were the replay of a graph.",
            stats.graph_replays,
        ),
        (
            "eager_decodes_total",
            "Decode forwards that were not, where graphs are on.",
            stats.eager_decodes,
        ),
    ]


def _gauges(engine: EngineThread) -> list[tuple[str, str, float]]:
    usage = engine.usage
    return [
        (
            "tokens_per_second",
            "Tokens sampled a second, over about the last 10 s.",
            engine.rate.value(),
        ),
        (
            "prefix_hit_ratio",
            "Share of all prompt tokens so far that were not computed.",
            engine.engine.stats.hit_rate,
        ),
        (
            "acceptance_ratio",
            "Share of guessed tokens so far that completions took over.",
            engine.engine.stats.acceptance_rate,
        ),
        (
            "tokens_per_pass",
            "Tokens that a completion grows by in one pass through the model.",
            engine.engine.stats.tokens_per_pass,
        ),
        ("waiting_prompts", "Prompts with samples that have not started.", engine.waiting),
        ("queue_prompts", "Prompts that may wait.", engine.max_queue),
        ("running_sequences", "Completions being sampled.", usage.running),
        ("kv_blocks_used", "Cache blocks that requests hold.", usage.used),
        ("kv_blocks_idle", "Cache blocks that only the prefix cache holds.", usage.idle),
        ("kv_blocks_free", "Cache blocks that hold nothing.", usage.free),
        ("kv_blocks", "Cache blocks.", usage.used + usage.idle + usage.free),
        (
            "kv_fragmentation_ratio",
            "Share of the token slots in used blocks that hold nothing.",
            usage.fragmentation,
        ),
        ("weight_version", "Version of the weights.", engine.engine.version),
    ]
