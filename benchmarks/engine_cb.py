"""The side of `engine.py` that is transformers' continuous batching. Log-probs are returned in the
check only: sampled runs are timed without.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from engine_job import Answer, Ask, Conversation, Job, serve
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.utils import WorkloadHints

SETTINGS: dict[str, Any] = {
    "page_size": 16,
    "max_requests_per_batch": 16,
    "max_memory_percent": 0.15,
    "max_batch_tokens": None,
}


def samples_of_a_request(work: list[Conversation]) -> int:
    """A manager forks every request alike: all samples of a prompt if their lengths are equal, else
    one, with the prompt shared through the cache.
    """
    samples = len(work[0].lengths[0])
    alike = all(
        len(set(lengths)) == 1 and len(lengths) == samples for c in work for lengths in c.lengths
    )
    return samples if alike else 1


class ContinuousBatching:
    """A manager a run: starting it is not timed. Its cache of shared prompts lives through the
    turns of a run.
    """

    def __init__(self, job: Job, settings: dict[str, Any]) -> None:
        work = job.conversations()
        self.model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32).eval()
        self.settings = settings
        self.samples = samples_of_a_request(work)
        longest = max(map(max, (lengths for c in work for lengths in c.lengths)))
        prompt = max(sum(map(len, c.turns)) for c in work) + (len(work[0].turns) - 1) * longest
        self.hints = WorkloadHints(prompt, longest, sum(len(c.lengths[0]) for c in work))
        self.manager: ContinuousBatchingManager | None = None

    def begin(self, greedy: bool) -> None:
        self.close()
        self.forks = 1 if greedy else self.samples
        generation = GenerationConfig(
            do_sample=not greedy,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=self.forks,
            eos_token_id=-1,
            pad_token_id=0,
        )
        config = ContinuousBatchingConfig(
            return_logprobs=greedy, auto_switch_to_flash=False, seed=0, **self.settings
        )
        self.manager = self.model.init_continuous_batching(
            generation_config=generation,
            continuous_batching_config=config,
            workload_hints=self.hints,
        )
        self.manager.start()

    def close(self) -> None:
        """Stop the manager's thread."""
        if self.manager is not None:
            self.manager.stop(block=True)
            self.manager.destroy()
            self.manager = None

    def answer(self, asks: list[Ask]) -> list[list[Answer]]:
        assert self.manager is not None
        names: dict[str, tuple[str, int]] = {}
        for ask in sorted(
            asks, key=lambda a: a.prompt
        ):  # in this order prompts that share a beginning follow one another
            for sample in range(0, len(ask.lengths), self.forks):
                name = self.manager.add_request(
                    ask.prompt, f"{ask.key}/{sample}", max_new_tokens=ask.lengths[sample]
                )
                names |= {
                    f"{name}__child#{fork - 1}" if fork else name: (ask.key, sample + fork)
                    for fork in range(self.forks)
                }
        done: dict[tuple[str, int], Answer] = {}
        while len(done) < len(names):
            result = self.manager.get_result(timeout=1)
            if result is None:
                if not self.manager.is_running():
                    raise RuntimeError("the generation thread ended")
            elif result.is_finished():
                done[names[result.request_id]] = Answer(
                    list(result.generated_tokens), list(result.logprobs) or None
                )
        return [[done[ask.key, sample] for sample in range(len(ask.lengths))] for ask in asks]


def main(path: str) -> None:
    """Run the job in the file at `path`."""
    job = Job.load(path)
    torch.set_num_threads(job.threads)
    settings = SETTINGS | job.settings
    side = ContinuousBatching(job, settings)
    serve(
        job, side, {"torch": torch.__version__, "transformers": transformers.__version__}, settings
    )
    side.close()


if __name__ == "__main__":
    main(sys.argv[1])
