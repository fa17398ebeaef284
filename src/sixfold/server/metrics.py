"""What /metrics says, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter

from .engine_thread import EngineThread


class Metrics:
    """Counts answers by path and status. seconds: spent on answered generations."""

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        self.seconds = 0.0
        self.generations = 0

    def text(self, engine: EngineThread) -> str:
        """The page. Numbers of the engine are those of its last step."""
        stats, scheduler = engine.engine.stats, engine.engine.scheduler
        lines = ["# HELP sixfold_http_answers_total Answers by path and status.", "# TYPE sixfold_http_answers_total counter"]
        lines += [f'sixfold_http_answers_total{{path="{path}",status="{status}"}} {count}' for (path, status), count in sorted(self.answers.items())]
        for name, kind, what, value in (
            ("generation_seconds_sum", "counter", "Seconds from request to last token, over answered generations.", self.seconds),
            ("generation_seconds_count", "counter", "Answered generations.", self.generations),
            ("aborted_total", "counter", "Requests given up because the client left or the server stopped.", engine.aborted),
            ("prefill_tokens_total", "counter", "Prompt tokens computed.", stats.prefill_tokens),
            ("reused_tokens_total", "counter", "Prompt tokens shared by samples or found in the prefix cache instead.", stats.reused_tokens),
            ("decoded_tokens_total", "counter", "Tokens sampled.", stats.decoded_tokens),
            ("steps_total", "counter", "Engine steps.", stats.steps),
            ("waiting_prompts", "gauge", "Prompts with samples that have not started.", engine.waiting),
            ("queue_prompts", "gauge", "Prompts that may wait.", engine.max_queue),
            ("running_sequences", "gauge", "Completions being sampled.", len(scheduler.running)),
            ("kv_blocks_used", "gauge", "Cache blocks in use.", scheduler.blocks.used),
            ("kv_blocks_idle", "gauge", "Cache blocks that only the prefix cache holds.", scheduler.blocks.idle),
            ("kv_blocks", "gauge", "Cache blocks.", scheduler.blocks.count),
            ("weight_version", "gauge", "Version of the weights.", engine.engine.version),
        ):
            lines += [f"# HELP sixfold_{name} {what}", f"# TYPE sixfold_{name} {kind}", f"sixfold_{name} {value}"]
        return "\n".join(lines) + "\n"
