"""The side of `engine.py` that is transformers' `generate`, with a dynamic or a static cache.

A batch is computed until its longest row is done, as `generate` does; of each row only the tokens
that were wanted count. Log-probs are taken (`output_logits`) in the check only: sampled runs are
timed without them, which is to its advantage.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from engine_job import Answer, Ask, Job, serve
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, DynamicCache, GenerationConfig, StaticCache

SETTINGS: dict[str, Any] = {"cache": "dynamic", "rows": 512}


class Generate:
    """rows: sequences in a batch. The prompts of a turn have one length, so nothing is padded.
    Batches keep their cache from turn to turn.
    """

    def __init__(self, job: Job, settings: dict[str, Any]) -> None:
        work = job.conversations()
        self.model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = (
            None  # what a GenerationConfig leaves open is taken from here
        )
        self.static = settings["cache"] == "static"
        self.rows = settings["rows"]
        self.longest = max(sum(map(len, c.turns)) + sum(map(max, c.lengths)) for c in work)

    def begin(self, greedy: bool) -> None:
        self.greedy = greedy
        self.caches: list[Cache] = []

    def answer(self, asks: list[Ask]) -> list[list[Answer]]:
        rows = [(ask, sample) for ask in asks for sample in range(len(ask.lengths))]
        answers: list[Answer] = []
        for batch, start in enumerate(range(0, len(rows), self.rows)):
            if batch == len(self.caches):
                self.caches.append(self._cache())
            answers += self._batch(rows[start : start + self.rows], self.caches[batch])
            if len(rows) == len(asks):
                continue
            self.caches[batch] = None  # type: ignore[call-overload]  # several samples: no further turn, its memory is free
        given = iter(answers)
        return [[next(given) for _ in ask.lengths] for ask in asks]

    def _cache(self) -> Cache:
        return (
            StaticCache(config=self.model.config, max_cache_len=self.longest)
            if self.static
            else DynamicCache(config=self.model.config)
        )

    def _batch(self, rows: list[tuple[Ask, int]], cache: Cache) -> list[Answer]:
        prompts = torch.tensor([ask.prompt for ask, _ in rows])
        wanted = [ask.lengths[sample] for ask, sample in rows]
        config = GenerationConfig(
            max_new_tokens=max(wanted),
            do_sample=not self.greedy,
            temperature=None if self.greedy else 1.0,
            top_k=None if self.greedy else 0,
            top_p=None if self.greedy else 1.0,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=self.greedy,
            return_dict_in_generate=True,
        )
        out = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            generation_config=config,
            past_key_values=cache,
        )
        tokens = out.sequences[:, prompts.shape[1] :]
        logps = self._logps(out.logits, tokens) if self.greedy else [None] * len(rows)
        return [
            Answer(row[:n], logp and logp[:n])
            for row, logp, n in zip(tokens.tolist(), logps, wanted, strict=True)
        ]

    @staticmethod
    def _logps(logits: tuple[Tensor, ...], tokens: Tensor) -> list[list[float]]:
        return (
            torch.stack(logits, dim=1)
            .log_softmax(-1)
            .gather(-1, tokens[..., None])[..., 0]
            .tolist()
        )


def main(path: str) -> None:
    """Run the job in the file at `path`."""
    job = Job.load(path)
    torch.set_num_threads(job.threads)
    settings = SETTINGS | job.settings
    serve(
        job,
        Generate(job, settings),
        {"torch": torch.__version__, "transformers": transformers.__version__},
        settings,
    )


if __name__ == "__main__":
    main(sys.argv[1])
