"""Sixfold's side of `engine.py`: the embedded engine, as rollout uses it."""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from engine_job import Answer, Ask, Job, serve

import sixfold
from sixfold.engine.engine import Engine
from sixfold.engine.sequence import Sequence
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import load_policy
from sixfold.recipe.schema import ModelConfig
from sixfold.types import SamplingParams

SETTINGS: dict[str, Any] = {"block_size": 64, "prefix_cache": "radix", "prefill_tokens": 4096}


class Sixfold:
    """Every sequence may run at once, and the cache holds them all."""

    def __init__(self, job: Job, settings: dict[str, Any]) -> None:
        work = job.conversations()
        rooms = [
            sum(map(len, c.turns)) + sum(lengths[s] for lengths in c.lengths)
            for c in work
            for s in range(len(c.lengths[0]))
        ]
        policy = load_policy(ModelConfig(path=job.model), seed=0, device="cpu")
        kv_tokens = sum(rooms) + 2 * settings["block_size"] * len(rooms)
        self.engine = Engine(
            CausalLM(policy.model), kv_tokens=kv_tokens, max_running=len(rooms), **settings
        )

    def begin(self, greedy: bool) -> None:
        self.temperature = 0.0 if greedy else 1.0
        self.engine.prefixes.clear()

    def answer(self, asks: list[Ask]) -> list[list[Answer]]:
        for ask in asks:
            for length, samples in ask.by_length().items():
                self.engine.add(
                    ask.key, ask.prompt, SamplingParams(length, self.temperature), samples
                )
        done: dict[tuple[str, int], Sequence] = {}
        while self.engine.busy:
            done |= {(s.request.key, s.sample): s for s in self.engine.step()}
        found = [[done[ask.key, sample] for sample in range(len(ask.lengths))] for ask in asks]
        return [
            [Answer(s.tokens[len(ask.prompt) :], s.logp) for s in row]
            for ask, row in zip(asks, found, strict=True)
        ]


def main(path: str) -> None:
    """Run the job in the file at `path`."""
    job = Job.load(path)
    torch.set_num_threads(job.threads)
    settings = SETTINGS | job.settings
    versions = {
        "sixfold": sixfold.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    serve(job, Sixfold(job, settings), versions, settings)


if __name__ == "__main__":
    main(sys.argv[1])
