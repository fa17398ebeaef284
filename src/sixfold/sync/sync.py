"""Weight sync in one process: nothing to copy when trainer and engine share the module, an in-place copy when the engine has its own.

After every sync the engine's weights are proven to be the trainer's, or what quantising makes of them (the same storage, or a copy that is compared
tensor by tensor), and every token sampled from then on carries the new version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor
from transformers import PreTrainedModel

from ..engine.engine import Engine
from ..engine.weights import first_false
from .quantise import quantised_weights


class SyncError(RuntimeError):
    """The engine would sample from other weights than the trainer's."""


def finite_weights(trainer: PreTrainedModel) -> dict[str, Tensor]:
    """The trainer's weights by name. Raises SyncError for one that is not finite: nothing is copied then, and the engine keeps its old ones whole."""
    weights: dict[str, Tensor] = dict(trainer.named_parameters())
    if wrong := first_false({name: source.isfinite().all() for name, source in weights.items()}):
        raise SyncError(f"weight '{wrong}' is not finite: not handed to the engine")
    return weights


class SharedSync:
    """Trainer and engine are one module: a sync is a new version number, and the proof is that no tensor was swapped for another.

    waited: steps since the last sync; always 0 here.
    """

    waited = 0

    def __init__(self, trainer: PreTrainedModel, engine: Engine) -> None:
        self._trainer = trainer
        self._engine = engine

    def sync(self, version: int) -> None:
        """Stamp the engine with `version`. Raises SyncError if a tensor is not the trainer's own storage."""
        if version == self._engine.version:
            return
        theirs = dict(self._engine.runner.model.module.named_parameters())
        for name, mine in self._trainer.named_parameters():
            if theirs[name].data_ptr() != mine.data_ptr():
                raise SyncError(f"weight '{name}' is no longer shared between trainer and engine")
        self._engine.set_version(version)

    def refresh(self) -> None:
        """Nothing to copy."""

    @contextmanager
    def policy_weights(self, version: int) -> Iterator[None]:
        """Within the block the engine samples from the policy's weights, as it always does here."""
        self.sync(version)
        yield

    def tensors(self) -> dict[str, Tensor]:
        """Nothing to save: the engine's weights are the trainer's."""
        return {}

    def load(self, tensors: Mapping[str, Tensor], version: int, waited: int) -> None:
        """Go on at `version`."""
        self._engine.version = version


class CopySync:
    """The engine has weights of its own, overwritten in place every `every` steps (data_ptr stays, so nothing that points at them breaks).

    form: copy, or int8 or fp8 for weights quantised anew, from the trainer's own, at every copy; those are not altered.

    Steps, not versions: a step may make several updates, or none. waited: steps since the last copy.
    """

    def __init__(self, trainer: PreTrainedModel, engine: Engine, every: int, form: str = "copy") -> None:
        self._trainer = trainer
        self._engine = engine
        self._every = every
        self._form = form
        self._held: dict[str, Tensor] = {}
        self.waited = 0

    def sync(self, version: int) -> None:
        """Called once a step: copy if `every` steps have passed and the weights are others. Raises SyncError for weights that are not
        finite or do not fit; the engine then keeps its old ones whole."""
        self.waited += 1
        if self.waited >= self._every and version != self._engine.version:
            self.waited = 0
            self._hand_over(version)

    def refresh(self) -> None:
        """Copy now, under the number that the engine has (before RL begins every number is 0). Raises SyncError as `sync` does."""
        self._hand_over(self._engine.version)

    @contextmanager
    def policy_weights(self, version: int) -> Iterator[None]:
        """Within the block the engine samples from the policy's weights, neither stale nor rounded.

        After it the engine has its earlier weights and their version again, so training samples are
        the same with and without an evaluation.

        Args:
            version: number of the policy's weights.
        """
        before = self._engine.version
        if version == before > 0 and self._form == "copy":  # 0 is the number of all weights before RL
            yield
            return
        # on the host: a GPU may have no room for a second copy
        held = {name: p.detach().to("cpu", copy=True) for name, p in self._engine.runner.model.module.named_parameters()}
        self._held = held
        self._copy(dict(self._trainer.named_parameters()), version)
        try:
            yield
        finally:
            # A signal may have left sequences in flight, whose weights cannot change: the run ends then, and a checkpoint takes what is held.
            if not self._engine.busy:
                self._engine.version = before  # the engine takes no number below its own
                self._copy(held, before)
                self._held = {}

    def _hand_over(self, version: int) -> None:
        """Copy the trainer's weights, or what quantising makes of them."""
        self._copy(dict(self._trainer.named_parameters()) if self._form == "copy" else quantised_weights(self._trainer, self._form), version)

    def _copy(self, weights: Mapping[str, Tensor], version: int) -> None:
        """The engine checks all of them before the first copy, and proves each copy.

        On a GPU the old weights are not kept meanwhile, for which there may be no memory: where
        writing fails the engine computes nothing more, and the run ends.
        """
        try:
            self._engine.load_weights(weights, version, undo=self._trainer.device.type == "cpu")
        except ValueError as error:
            raise SyncError(f"{error}: not handed to the engine") from error

    def tensors(self) -> dict[str, Tensor]:
        """The weights that training samples from, by name, for a checkpoint: they may be older than the trainer's."""
        weights = self._held or dict(self._engine.runner.model.module.named_parameters())
        return {f"engine/{name}": p for name, p in weights.items()}

    def load(self, tensors: Mapping[str, Tensor], version: int, waited: int) -> None:
        """Put a checkpoint's engine weights back, numbered `version`, `waited` steps after they were copied."""
        self.waited = waited
        names = [name for name, _ in self._engine.runner.model.module.named_parameters()]
        self._engine.load_weights({name: tensors[f"engine/{name}"] for name in names}, version)
