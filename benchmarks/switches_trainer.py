"""The trainer's side of `switches.py`: optimizer steps on one batch of random texts, under some
settings.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from engine_job import make_work, peak_mb
from switches_job import Job, TrainerWork, emit_all
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.batch import Batch, collate
from sixfold.kernels.attention import AttentionLayer, causal_attention
from sixfold.model.loading import load_policy
from sixfold.recipe.schema import ModelConfig, TrainerConfig
from sixfold.trainer.logprobs import PolicyRoot, Scores, Scoring
from sixfold.trainer.packing import PackedRow
from sixfold.trainer.sft import SupervisedLoss, example
from sixfold.trainer.trainer import Trainer
from sixfold.types import Group, Task


@dataclass(frozen=True)
class PaddedRow(PackedRow):
    """`count` texts of one length [B, T], end to end: attention is that of an ordinary padded
    batch, one call for all of them.
    """

    count: int = 1

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        """q [1, H, B * T, D] -> [1, B * T, H, D]."""
        q, k, v = (x[0].unflatten(1, (self.count, -1)).transpose(0, 1) for x in (q, k, v))
        return causal_attention(q, k, v, kernel).transpose(1, 2).flatten(0, 1)[None]


def padded(row: PackedRow) -> PaddedRow:
    """The texts of a row that shares no prompts, each filled up with token 0 to the longest. What
    is scored stays what it was.
    """
    lengths = torch.diff(
        (row.positions == 0).nonzero()[:, 0], append=torch.tensor([len(row.tokens)])
    )
    count, longest = len(lengths), int(lengths.max())
    place = torch.arange(count).repeat_interleave(lengths) * longest + row.positions
    tokens = torch.zeros(count * longest, dtype=torch.int64).index_copy(0, place, row.tokens)
    positions = torch.arange(longest).repeat(count)
    return PaddedRow(
        tokens,
        positions,
        row.attention,
        place[row.reads],
        row.target,
        row.row,
        row.column,
        row.slot,
        row.members,
        row.kept,
        count,
    )


class CountingRoot(PolicyRoot):
    """Scores a micro-batch, padded or as it is. positions: that the body computed. logits: most
    that existed at one time.
    """

    def __init__(self, model: PreTrainedModel, pads: bool) -> None:
        super().__init__(model)
        self.pads = pads
        self.positions = self.logits = 0

    def forward(self, row: PackedRow, scoring: Scoring) -> Scores:
        row = padded(row) if self.pads else row
        self.positions += len(row.tokens)
        self.logits = max(
            self.logits, min(scoring.chunk, len(row.target)) * int(self.model.config.vocab_size)
        )
        return super().forward(row, scoring)


def make_batch(work: TrainerWork) -> Batch:
    """Groups of random completions of one prompt each, every token of them scored."""
    rng, groups = random.Random(1), []
    for i, c in enumerate(make_work(work.profile, work.prompts, work.vocabulary)):
        task = Task(str(i), "")
        texts = [rng.choices(range(2, work.vocabulary), k=n) for n in c.lengths[0]]
        rows = [
            replace(example(task, c.turns[0], text).trajectories[0], sample=k)
            for k, text in enumerate(texts)
        ]
        groups.append(Group(task, rows))
    return SupervisedLoss().prepare(collate(groups))


def lines(job: Job) -> Iterator[dict[str, Any]]:
    """The lines of this side. settings: those of `TrainerConfig`, and two of this benchmark:
    `chunk`, positions whose logits exist at one time, and `padded`."""
    torch.set_num_threads(job.threads)
    assert isinstance(job.work, TrainerWork)
    settings, batch = dict(job.settings), make_batch(job.work)
    scoring, pads = Scoring(chunk=settings.pop("chunk", 1024)), settings.pop("padded", False)
    config = TrainerConfig(
        learning_rate=1e-6, max_tokens_per_microbatch=job.work.budget, **settings
    )
    model = load_policy(ModelConfig(path=job.model), seed=0, device="cpu").model
    root, loss = CountingRoot(model, pads), SupervisedLoss().compute_loss
    trainer = Trainer(root, config, scoring, job.repeats + 1)
    metrics = trainer.train_step(batch, loss)
    needed, scored = int(batch.lengths.sum()), int(batch.mask.sum())
    counters = {
        "tokens": scored,
        "positions": root.positions,
        "padding": max(0.0, 1 - needed / root.positions),
        "logits": root.logits,
        "microbatches": metrics["train/microbatches"],
    }
    yield {
        "event": "check",
        "loss": metrics["train/loss"],
        "norm": metrics["train/grad_norm"],
        "counters": counters,
    }
    for _ in range(job.repeats):
        start = time.perf_counter()
        trainer.train_step(batch, loss)
        yield {"event": "run", "seconds": time.perf_counter() - start, "pause": 0.0}
    yield {"event": "end", "peak_mb": peak_mb()}


if __name__ == "__main__":
    emit_all(lines)
