"""Weight sync to an engine in another process: weights go over in the names of a checkpoint, under a version number.

The engine's memory cannot be looked into (fused, repacked, perhaps on another machine), so the proof is by what it computes: after every
hand-over a fixed sequence is scored by both sides. That the version arrived is told by the tokens: the engine itself stamps them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ..rollout.outside_engine import OutsideEngine
from .sync import SyncError, finite_weights

PROBE_TOKENS = 32


class VersionedSync:
    """The engine gets a copy every `every` steps. limit: largest mean difference of the probe's log-probs, in nats. longest: sequence that the
    engine takes.

    Steps, not versions: a step may make several updates, or none. waited: steps since the last copy.
    """

    def __init__(self, trainer: PreTrainedModel, engine: OutsideEngine, every: int, limit: float, longest: int) -> None:
        self._trainer = trainer
        self._engine = engine
        self._every = every
        self._limit = limit
        self._probe = _probe(int(trainer.config.get_text_config().vocab_size), min(PROBE_TOKENS, longest - 1))
        self._handed: dict[str, Tensor] = {}
        self.waited = 0

    def sync(self, version: int) -> None:
        """Called once a step: hand over if `every` steps have passed and the weights are others. Raises SyncError for non-finite weights or a probe
        that does not come out equal."""
        self.waited += 1
        if self.waited >= self._every and version != self._engine.version:
            self.waited = 0
            self._hand_over(version)

    def refresh(self) -> None:
        """Hand over now, under the number that the engine has, or 0 at first. Raises SyncError as `sync` does."""
        self._hand_over(max(self._engine.version, 0))

    def tensors(self) -> dict[str, Tensor]:
        """The engine's weights by name where they may be older than the trainer's; else nothing: they are in the checkpoint already."""
        return {f"engine/{name}": tensor for name, tensor in self._handed.items()}

    @contextmanager
    def policy_weights(self, version: int) -> Iterator[None]:
        """Within the block the engine samples from the policy's weights, not from stale ones.

        After it the engine has its earlier weights and their version again. Before RL, where every
        version is 0, it keeps the newer ones: nothing is trained from its samples then.

        Args:
            version: number of the policy's weights.
        """
        before, held = self._engine.version, self._handed
        if version == before > 0:
            yield
            return
        self._hand_over(version)
        if not held or version <= before:
            yield
            return
        self._handed = held  # what a checkpoint takes if the evaluation fails: the run ends with it
        yield
        self._engine.load(self._checkpoint_form(held), before)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], version: int, waited: int) -> None:
        """Give the engine what it had at a checkpoint, numbered `version`, `waited` steps after it was handed over."""
        self.waited = waited
        if self._every == 1:
            self._hand_over(version)
            return
        self._handed = {name: tensors[f"engine/{name}"].clone() for name in self._handed}
        self._engine.load(self._checkpoint_form(self._handed), version)

    @torch.no_grad()
    def _hand_over(self, version: int) -> None:
        weights = finite_weights(self._trainer)
        self._engine.load(self._checkpoint_form(weights), version)
        if self._every > 1:
            self._handed = {name: tensor.detach().clone() for name, tensor in weights.items()}
        self.prove()

    def _checkpoint_form(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The trainer's names to those of a checkpoint (experts are stacked here and apart there), tied weights under each of their names."""
        names = {id(p): name for name, p in self._trainer.named_parameters()}
        every = {name: weights[names[id(p)]] for name, p in self._trainer.named_parameters(remove_duplicate=False)}
        return revert_weight_conversion(self._trainer, every)

    @torch.no_grad()
    def prove(self) -> None:
        """Raises SyncError where the engine scores the probe otherwise than the trainer."""
        tokens = torch.tensor([self._probe], device=self._trainer.device)
        logits = self._trainer(tokens, use_cache=False).logits[0, :-1].float()
        ours = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0].cpu()
        gap = float((torch.tensor(self._engine.score(self._probe)) - ours).abs().mean())
        if not gap <= self._limit:
            raise SyncError(f"the engine scores the probe otherwise than the trainer, by {gap:.2g} nats in the mean (limit {self._limit:g})")


def _probe(vocabulary: int, length: int) -> list[int]:
    """Any tokens will do, as long as they are the same ones every time."""
    return torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(0)).tolist()
