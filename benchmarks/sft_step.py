"""SFT compared with TRL's SFTTrainer: the loss curve, seconds per step, and peak memory.

    python benchmarks/sft_step.py                             # the curve and every case
    python benchmarks/sft_step.py --cases short --steps 2     # a quick look at one of them
    python benchmarks/sft_step.py --quick                     # Sixfold's side alone, small

Both sides load the same model and the same conversations, tokenize them by the model's chat
template, and train on the replies of the assistant alone. Both average the loss over all trained
tokens of a step. Rows, their order, AdamW, its schedule and float32 are the same (`sft_job.py`).

**Curve**: 20 steps with a decaying learning rate. The harness ends with an error if a loss of the
two sides differs by more than 1e-4.

**Cases**: the learning rate is so small that no weight changes. Each side trains on every row once,
so the harness can compare the mean loss over all of them, and finds a side that computes something
else. That holds for packed rows too, which TRL trains in another order.

| side | what it is |
|---|---|
| trl | `trl.SFTTrainer` 1.16 on padded rows, its default |
| trl-flat | the same with `padding_free`: the rows of a micro-batch are one row |
| trl-packed | the same with `packing` (`bfd`): rows of the whole dataset, in rows of equal length |
| sixfold | `sixfold train` on a recipe with one stage of kind sft |

TRL recommends FlashAttention for the last two. On a CPU, PyTorch's attention computes the whole
square of a flat row and masks what belongs to other conversations. The result is the same.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sft_job import draw_conversation, draw_lengths
from step_comparison import Benchmark, Lines, mean_loss, run

MEAN_TOLERANCE = 2e-5
STILL = 1e-12
"""Learning rate with which no float32 weight of the model changes."""


@dataclass(frozen=True)
class Case:
    """Sizes of one comparison, as `step_comparison.Case`. A row is a conversation.

    Attributes:
        shortest: tokens of the shortest conversation.
        longest: tokens of the longest conversation.
    """

    vocabulary: int
    shortest: int
    longest: int
    rows: int
    micro_rows: int
    micro_tokens: int
    lora_rank: ClassVar[int] = 0

    def __str__(self) -> str:
        return f"{self.rows} conversations of {self.shortest} to {self.longest} tokens per step"

    def draw(self, count: int, rng: random.Random) -> list[dict[str, Any]]:
        lengths = draw_lengths(self.shortest, self.longest, count, rng)
        return [draw_conversation(length, self.vocabulary, rng) for length in lengths]


CASES = {
    "short": Case(1360, 16, 64, 64, 16, 2048),
    "mix": Case(1360, 16, 512, 32, 8, 2048),
    # The same memory for a full micro-batch on both sides.
    "vocabulary": Case(151_936, 16, 512, 8, 4, 2048),
}
SMALL = Case(96, 16, 48, 4, 2, 128)
"""What `--quick` runs."""


def check_same_work(name: str, first: Mapping[str, Lines]) -> None:
    """End the benchmark if a side trains on other tokens or has another mean loss.

    Args:
        name: name of the case.
        first: output lines of one process of each side.
    """
    means = {side: mean_loss(lines) for side, lines in first.items()}
    values, counts = zip(*means.values(), strict=True)
    if len(set(counts)) > 1 or max(values) - min(values) > MEAN_TOLERANCE:
        raise SystemExit(f"{name}: mean loss and trained tokens of the sides differ: {means}")


BENCHMARK = Benchmark(
    name="sft_step",
    sides={"trl": "padded", "trl-flat": "flat", "trl-packed": "packed", "sixfold": ""},
    curve_sides=("trl", "trl-flat", "sixfold"),  # trl-packed trains in another order
    cases=CASES,
    curve=Case(1360, 16, 128, 16, 8, 1024),
    small=SMALL,
    rate=STILL,
    check=check_same_work,
    rounds=2,
    steps=5,
)


def main(arguments: list[str] | None = None) -> None:
    """Compare the curves, measure every case and print the tables."""
    run(BENCHMARK, arguments)


if __name__ == "__main__":
    main()
