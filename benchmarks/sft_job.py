"""Work of `sft_step.py` and `dpo_step.py`: one job file per case, which all sides read.

A side gets the path of a job file (the fields of `Job`, as JSON). It trains on every row once, and
prints the lines of `trainer_job.Meter` and one more line per step:

    {"event": "loss", "loss": 7.2, "trained": 1034, "tokens": 2110}

loss is the mean over the `trained` tokens of the step, or over its pairs. `tokens` counts all
tokens of the sequences, without padding.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine_limit import THREADS
from trainer_job import LORA_SCALE

BETA = 0.1
"""Of DPO."""
USER, ASSISTANT = 2, 3
"""Words that begin a message. Messages have only other words."""
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    f"w{ASSISTANT} {{% generation %}}{{{{ message.content }}}} <eos>{{% endgeneration %}} "
    f"{{% else %}}w{USER} {{{{ message.content }}}} {{% endif %}}{{% endfor %}}"
    f"{{% if add_generation_prompt %}}w{ASSISTANT} {{% endif %}}"
)
"""Chat template. `generation` marks the trained tokens for TRL."""


@dataclass(frozen=True)
class Job:
    """Work of a side for one case. A row is a conversation, or a pair of completions.

    Attributes:
        model: folder of the model, with its chat template.
        rows: JSONL file of the rows, in any order.
        ordered: JSONL file of the same rows, in the order in which they are trained.
        rows_per_step: rows of an optimizer step.
        steps: steps before the last one, which runs under the profiler. The first is warm-up.
        micro_rows: rows in one forward and backward pass of TRL.
        micro_tokens: tokens in one forward and backward pass of Sixfold.
        longest: most tokens of a sequence.
        learning_rate: AdamW's.
        schedule: constant or linear.
        lora_rank: rank of the adapters. 0: all weights train.
    """

    model: str
    rows: str
    ordered: str
    rows_per_step: int
    steps: int
    micro_rows: int
    micro_tokens: int
    longest: int
    learning_rate: float
    schedule: str
    lora_rank: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    threads: int = THREADS

    @property
    def lora_alpha(self) -> int:
        """The product of the adapter's matrices is scaled by alpha / rank."""
        return int(LORA_SCALE * self.lora_rank)

    @classmethod
    def load(cls, path: str) -> Job:
        """Read the job in the file at `path`."""
        return cls(**json.loads(Path(path).read_text()))

    def save(self, path: Path) -> Path:
        """Write the job to a file, and return its path."""
        path.write_text(json.dumps(asdict(self)))
        return path


def draw_lengths(shortest: int, longest: int, count: int, rng: random.Random) -> list[int]:
    """Lengths of conversations in tokens: their logarithms are uniform."""
    low, high = math.log(shortest), math.log(longest + 1)
    return [min(longest, int(math.exp(rng.uniform(low, high)))) for _ in range(count)]


def draw_conversation(length: int, vocabulary: int, rng: random.Random) -> dict[str, Any]:
    """A random conversation of `length` tokens: two exchanges if there is room, else one."""
    exchanges = 2 if length >= 32 else 1
    words = length - 3 * exchanges  # each exchange has two words of the template and an <eos>
    cuts = sorted(rng.sample(range(1, words), 2 * exchanges - 1))
    sizes = [stop - start for start, stop in zip([0, *cuts], [*cuts, words], strict=True)]
    roles = ("user", "assistant") * exchanges
    messages = [
        {"role": role, "content": draw_text(size, vocabulary, rng)}
        for role, size in zip(roles, sizes, strict=True)
    ]
    return {"messages": messages}


def draw_text(size: int, vocabulary: int, rng: random.Random, power: int = 4) -> str:
    """A random text of `size` words. Low numbers are frequent, so there is something to learn.

    Args:
        size: number of words, each one token.
        vocabulary: size of the vocabulary.
        rng: draws the words.
        power: of the random number that gives a word. 1: all words have the same chance.
    """
    numbers = (int((vocabulary - ASSISTANT - 1) * rng.random() ** power) for _ in range(size))
    return " ".join(f"w{ASSISTANT + 1 + number}" for number in numbers)


def write_rows(rows: Sequence[dict[str, Any]], path: Path) -> str:
    """Write rows as JSONL, and return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def fill_adapter(model: Any) -> None:
    """Give all sides the same LoRA matrices at the start: PEFT draws one of each pair at random."""
    import torch

    for name, weight in model.named_parameters():
        if "lora_A" in name:
            start = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
            weight.data.copy_(start / weight.shape[1] ** 0.5)
