"""What a supervised stage minimises, and what it measures on held-out examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from ..batch import Batch, LossOutput, Metrics, collate
from ..checkpointable import Checkpointable
from ..run.assemble import Assembly
from ..trainer.logprobs import SCORED_TOGETHER, Root, score_tables
from ..trainer.packing import PackedRow
from ..trainer.sft import SupervisedLoss
from ..types import Group
from .examples import Examples
from .pretrain_examples import bits_per_byte


class Objective(Protocol):
    """Objective of a supervised stage."""

    @property
    def frozen(self) -> Callable[[PackedRow], Tensor] | None:
        """As for `Trainer`."""
        ...

    @property
    def root(self) -> Root | None:
        """Model that is trained in place of the policy. None: the policy is."""
        ...

    def begin(self, examples: Examples) -> None:
        """Called before the first step of a new run, with the weights that it starts from."""
        ...

    def components(self) -> Mapping[str, Checkpointable]:
        """What a checkpoint stores of it, by name."""
        ...

    def restored(self, model: Path) -> None:
        """Called when the components are restored. model: the model folder of the checkpoint."""
        ...

    def batch(self, groups: Sequence[Group]) -> Batch:
        """The examples of a step on the device, with weights and all else that the loss reads."""
        ...

    def compute_loss(self, batch: Batch, logp: Tensor) -> LossOutput:
        """Loss of some rows of the newest batch. logp: scores of their tokens, [B, T]."""
        ...

    def derived(self, metrics: Metrics) -> Metrics:
        """Metrics of a step from those that the trainer has added up."""
        ...

    def heldout(self, examples: Sequence[Group]) -> Metrics:
        """Metrics of held-out examples, at least one, without training on them."""
        ...


class Imitation:
    """Mean negative log-prob of the trained tokens.

    Args:
        assembly: the policy.
        heldout_bytes: UTF-8 bytes that the held-out examples predict. 0 if they are no texts.
    """

    frozen = None
    root = None

    def __init__(self, assembly: Assembly, heldout_bytes: int) -> None:
        self._assembly = assembly
        self._heldout_bytes = heldout_bytes
        self._loss = SupervisedLoss()
        self.compute_loss = self._loss.compute_loss

    def begin(self, examples: Examples) -> None:
        """Does nothing."""

    def components(self) -> Mapping[str, Checkpointable]:
        return {}

    def restored(self, model: Path) -> None:
        """Does nothing."""

    def batch(self, groups: Sequence[Group]) -> Batch:
        return self._loss.prepare(collate(groups).to(self._assembly.device))

    def derived(self, metrics: Metrics) -> Metrics:
        return metrics

    def heldout(self, examples: Sequence[Group]) -> Metrics:
        nats, tokens = _heldout_loss(self._assembly, examples)
        found: Metrics = {"heldout/loss": nats / tokens}
        if self._heldout_bytes:
            found["heldout/bits_per_byte"] = bits_per_byte(nats, self._heldout_bytes)
        return found


def imitation(assembly: Assembly, examples: Examples, folder: Path) -> Objective:
    """The objective of pretraining, SFT and distillation."""
    return Imitation(assembly, examples.heldout_bytes)


def _heldout_loss(assembly: Assembly, examples: Sequence[Group]) -> tuple[float, int]:
    """Loss on held-out examples.

    Args:
        assembly: the policy.
        examples: the examples.

    Returns:
        Sum of the negative log-probs of the trained tokens, in nats, and their number.
    """
    config, scoring = assembly.recipe.trainer, replace(assembly.scoring, temperature=1.0)
    nats, tokens = 0.0, 0
    for at in range(0, len(examples), SCORED_TOGETHER):
        batch = collate(examples[at : at + SCORED_TOGETHER]).to(assembly.device)
        logp, _ = score_tables(
            assembly.root(),
            batch,
            scoring,
            config.max_tokens_per_microbatch,
            config.share_prefix,
            assembly.data_ranks,
        )
        nats -= float(logp[batch.mask].double().sum())
        tokens += int(batch.mask.sum())
    return nats, tokens
