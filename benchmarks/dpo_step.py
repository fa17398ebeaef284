"""DPO compared with TRL's DPOTrainer: the loss curve, seconds per step, and peak memory.

    python benchmarks/dpo_step.py                             # the curve and every case
    python benchmarks/dpo_step.py --cases short --steps 1     # a quick look at one of them
    python benchmarks/dpo_step.py --quick                     # Sixfold's sides alone, small

All sides load the same model and the same pairs, tokenize them by the model's chat template, and
train with the loss of DPO. The reference is the model that training starts from. Rows, their order,
AdamW, its schedule, float32 and the start of LoRA matrices are the same (`sft_job.py`).

**Curve**: 20 steps with a decaying learning rate.

**Cases**: a constant learning rate.

In both, the harness ends with an error if the sides train on other tokens, or if a loss differs by
more than 1e-4.

| side | what it is |
|---|---|
| trl | `trl.DPOTrainer` 1.16, which on a CPU runs the head on prompts and padding too |
| trl-skip | the same, with the head on completions alone, as TRL does where it has Triton |
| sixfold | `sixfold train` on a recipe with one stage of kind preference |
| sixfold-cached | the same with `preference.reference = "cached"`: no reference in a step |
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sft_job import draw_text
from step_comparison import CURVE_TOLERANCE, Benchmark, Lines, loss_difference, losses, run

RATE = 1e-4
"""Learning rate of the cases. The first loss is log 2 on every side, so weights must change."""
TEMPLATE_WORDS = 3
"""The words that begin the two messages, and the end of the answer."""


@dataclass(frozen=True)
class Case:
    """Sizes of one comparison, as `step_comparison.Case`. A row is a pair of answers.

    Attributes:
        prompt: smallest and largest number of words of a prompt.
        answer: smallest and largest number of words of an answer.
    """

    vocabulary: int
    prompt: tuple[int, int]
    answer: tuple[int, int]
    rows: int
    micro_rows: int
    micro_tokens: int
    lora_rank: int = 0

    @property
    def longest(self) -> int:
        return self.prompt[1] + self.answer[1] + TEMPLATE_WORDS

    def __str__(self) -> str:
        lora = f", LoRA of rank {self.lora_rank}" if self.lora_rank else ""
        return (
            f"{self.rows} pairs per step, prompts of {self.prompt[0]} to {self.prompt[1]} words,"
            f" answers of {self.answer[0]} to {self.answer[1]}{lora}"
        )

    def draw(self, count: int, rng: random.Random) -> list[dict[str, Any]]:
        """Random pairs. Better answers have more of the frequent words."""

        def message(role: str, sizes: tuple[int, int], power: int) -> list[dict[str, str]]:
            text = draw_text(rng.randint(*sizes), self.vocabulary, rng, power)
            return [{"role": role, "content": text}]

        return [
            {
                "prompt": message("user", self.prompt, 4),
                "chosen": message("assistant", self.answer, 4),
                "rejected": message("assistant", self.answer, 2),
            }
            for _ in range(count)
        ]


SHORT = ((8, 32), (32, 128), 16, 8, 2048)
LONG_PROMPT = ((256, 512), (16, 64), 8, 4, 2048)
CASES = {
    "short": Case(1360, *SHORT),
    "long-prompt": Case(1360, *LONG_PROMPT),
    "vocabulary": Case(151_936, (32, 128), (16, 64), 4, 4, 2048),
    "lora-short": Case(1360, *SHORT, lora_rank=8),
    "lora-long-prompt": Case(1360, *LONG_PROMPT, lora_rank=8),
}
SMALL = Case(96, (4, 16), (4, 16), 4, 2, 128)
"""What `--quick` runs."""


def check_same_losses(name: str, first: Mapping[str, Lines]) -> None:
    """End the benchmark if a side trains on other tokens in a step or has another loss.

    Args:
        name: name of the case.
        first: output lines of one process of each side.
    """
    counts = {
        side: [(line["trained"], line["tokens"]) for line in losses(lines)]
        for side, lines in first.items()
    }
    if any(found != next(iter(counts.values())) for found in counts.values()):
        raise SystemExit(f"{name}: trained tokens and all tokens of the steps differ: {counts}")
    if (worst := loss_difference(first)) > CURVE_TOLERANCE:
        raise SystemExit(f"{name}: the losses differ by {worst:.1e}, more than {CURVE_TOLERANCE:g}")


SIDES = {"trl": "all", "trl-skip": "completions", "sixfold": "frozen", "sixfold-cached": "cached"}
BENCHMARK = Benchmark(
    name="dpo_step",
    sides=SIDES,
    curve_sides=tuple(SIDES),
    cases=CASES,
    curve=Case(1360, (8, 64), (8, 64), 16, 8, 1024),
    small=SMALL,
    rate=RATE,
    check=check_same_losses,
    rounds=1,
    steps=2,
)


def main(arguments: list[str] | None = None) -> None:
    """Compare the curves, measure every case and print the tables."""
    run(BENCHMARK, arguments)


if __name__ == "__main__":
    main()
