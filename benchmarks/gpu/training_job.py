"""The update that both sides of `train.py` make: given prompts and completions, with rewards."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tiny_qwen import Shape, forward_flops


@dataclass(frozen=True)
class Job:
    """Data and settings of one update.

    Attributes:
        prompts: token ids of each prompt.
        completions: token ids of each prompt's completions.
        rewards: reward of each completion.
        microbatch: maximum tokens per micro-batch.
        checkpointing: none, selective or full.
        steps: number of timed updates.
        bfloat16: forward passes in bfloat16. Weights are float32 in either case.
    """

    prompts: list[list[int]]
    completions: list[list[list[int]]]
    rewards: list[list[float]]
    microbatch: int
    checkpointing: str
    steps: int
    bfloat16: bool

    @property
    def sampled(self) -> int:
        """Number of completion tokens."""
        return sum(len(text) for group in self.completions for text in group)

    @property
    def longest(self) -> int:
        """Length of the longest completion."""
        return max(len(text) for group in self.completions for text in group)

    def needed_flops(self, shape: Shape) -> int:
        """FLOPs of a forward and a backward pass, with each prompt once and nothing twice."""
        total = 0
        for prompt, group in zip(self.prompts, self.completions, strict=True):
            start = len(prompt)
            total += forward_flops(shape, 0, start, predictions=0)
            for text in group:
                total += forward_flops(shape, start, start + len(text), predictions=len(text))
        return 3 * total


def make_job(
    vocabulary: int,
    prompts: int,
    samples: int,
    prompt_tokens: int,
    completion_tokens: int,
    *,
    microbatch: int,
    checkpointing: str,
    steps: int,
    bfloat16: bool,
) -> Job:
    """Draw random prompts and completions of 0.5 to 1.5 times `completion_tokens` tokens."""
    rng = random.Random(0)

    def text(length: int) -> list[int]:
        return rng.choices(range(2, vocabulary), k=length)

    def length() -> int:
        return rng.randint(completion_tokens // 2, completion_tokens * 3 // 2)

    return Job(
        prompts=[text(prompt_tokens) for _ in range(prompts)],
        completions=[[text(length()) for _ in range(samples)] for _ in range(prompts)],
        rewards=[[float(k % 2) for k in range(samples)] for _ in range(prompts)],
        microbatch=microbatch,
        checkpointing=checkpointing,
        steps=steps,
        bfloat16=bfloat16,
    )
