"""Work of `sft_step.py`: one job file per case, which both sides read.

A side gets the path of a job file (the fields of `Job`, as JSON). It trains on every row once, and
prints the lines of `trainer_job.Meter` and one more line per step:

    {"event": "loss", "loss": 7.2, "trained": 1034, "tokens": 2110}

loss is the mean over the `trained` tokens of the step. `tokens` counts all tokens of the rows,
without padding.
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
    """Work of a side for one case.

    Attributes:
        model: folder of the model, with its chat template.
        rows: JSONL file of the conversations, in any order.
        ordered: JSONL file of the same conversations, in the order in which they are trained.
        rows_per_step: conversations of an optimizer step.
        steps: steps before the last one, which runs under the profiler. The first is warm-up.
        micro_rows: conversations in one forward and backward pass of TRL.
        micro_tokens: tokens in one forward and backward pass of Sixfold.
        longest: tokens of the longest conversation.
        learning_rate: AdamW's.
        schedule: constant or linear.
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
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    threads: int = THREADS

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

    def text(size: int) -> str:
        # Low numbers are frequent, so there is something to learn.
        numbers = (int((vocabulary - ASSISTANT - 1) * rng.random() ** 4) for _ in range(size))
        return " ".join(f"w{ASSISTANT + 1 + number}" for number in numbers)

    roles = ("user", "assistant") * exchanges
    messages = [{"role": role, "content": text(n)} for role, n in zip(roles, sizes, strict=True)]
    return {"messages": messages}


def write_rows(rows: Sequence[dict[str, Any]], path: Path) -> str:
    """Write rows as JSONL, and return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
