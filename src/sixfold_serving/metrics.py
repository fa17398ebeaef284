"""The page /metrics, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

from sixfold.rollout.engine_thread import EngineThread

DESCRIPTIONS = {
    "aborted_total": "Requests aborted because the client disconnected or the server stopped.",
    "steps_total": "Engine steps.",
    "decoded_tokens_total": "Tokens sampled.",
    "prefill_tokens_total": "Prompt tokens computed.",
    "reused_tokens_total": "Prompt tokens shared by samples or found in the prefix cache.",
    "recomputed_tokens_total": "Tokens of preempted completions that were computed again.",
    "proposed_tokens_total": "Tokens proposed by speculative decoding.",
    "accepted_tokens_total": "Accepted tokens of speculative decoding.",
    "preemptions_total": "Completions preempted because KV cache blocks ran out.",
    "graph_captures_total": "Captured CUDA graphs of decode forward passes.",
    "graph_replays_total": "Decode forward passes replayed from a CUDA graph.",
    "eager_decodes_total": "Decode forward passes that ran eagerly although CUDA graphs are on.",
    "tokens_per_second": "Tokens sampled per second, over about the last 10 s.",
    "prefix_hit_ratio": "Share of all prompt tokens that were not computed.",
    "acceptance_ratio": "Share of proposed tokens that were accepted.",
    "tokens_per_pass": "Tokens per completion and forward pass.",
    "waiting_prompts": "Prompts with samples that have not started.",
    "queue_prompts": "Maximum number of waiting prompts.",
    "running_sequences": "Completions being sampled.",
    "kv_blocks_used": "KV cache blocks owned by requests.",
    "kv_blocks_idle": "KV cache blocks owned only by the prefix cache.",
    "kv_blocks_free": "Free KV cache blocks.",
    "kv_blocks": "KV cache blocks.",
    "kv_fragmentation_ratio": "Share of empty token slots in used blocks.",
    "weight_version": "Version of the weights.",
}
"""Description of each number of the engine. A name that ends with _total is a counter."""


class Metrics(Collector):
    """Counts answers by path and status. The engine's numbers are those of its last step.

    Attributes:
        seconds: total time from request to last token, over all answered generations.
        generations: number of answered generations.
    """

    # `prometheus_client.Counter` would also export a time series `_created`, and counts of other
    # processes if PROMETHEUS_MULTIPROC_DIR is set.

    def __init__(self, engine: EngineThread) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        self.seconds = 0.0
        self.generations = 0
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """The metrics of the page, in its order."""
        answers = CounterMetricFamily(
            "sixfold_http_answers_total", "Answers by path and status.", labels=("path", "status")
        )
        for (path, status), count in sorted(self.answers.items()):
            answers.add_metric((path, str(status)), count)
        yield answers
        yield SummaryMetricFamily(
            "sixfold_generation_seconds",
            "Time from request to last token, summed over completed generations.",
            self.generations,
            self.seconds,
        )
        for name, value in _values(self._engine).items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield kind(f"sixfold_{name}", DESCRIPTIONS[name], value)


def _values(engine: EngineThread) -> dict[str, float]:
    stats, usage = engine.engine.stats, engine.usage
    return {
        "aborted_total": engine.aborted,
        "steps_total": stats.steps,
        "decoded_tokens_total": stats.decoded_tokens,
        "prefill_tokens_total": stats.prefill_tokens,
        "reused_tokens_total": stats.reused_tokens,
        "recomputed_tokens_total": stats.recomputed_tokens,
        "proposed_tokens_total": stats.proposed_tokens,
        "accepted_tokens_total": stats.accepted_tokens,
        "preemptions_total": stats.preemptions,
        "graph_captures_total": stats.graph_captures,
        "graph_replays_total": stats.graph_replays,
        "eager_decodes_total": stats.eager_decodes,
        "tokens_per_second": engine.rate.value(),
        "prefix_hit_ratio": stats.hit_rate,
        "acceptance_ratio": stats.acceptance_rate,
        "tokens_per_pass": stats.tokens_per_pass,
        "waiting_prompts": engine.waiting,
        "queue_prompts": engine.max_queue or 0,
        "running_sequences": usage.running,
        "kv_blocks_used": usage.used,
        "kv_blocks_idle": usage.idle,
        "kv_blocks_free": usage.free,
        "kv_blocks": usage.used + usage.idle + usage.free,
        "kv_fragmentation_ratio": usage.fragmentation,
        "weight_version": engine.engine.version,
    }
