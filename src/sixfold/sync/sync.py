"""Weight sync in one process.

If trainer and engine share the module, nothing is copied. If the engine has its own module, its
weights are overwritten in place. A sharded trainer gathers a few tensors at a time, at the same
moment on all ranks, so no rank holds all gathered weights at once.

Every sync checks that the engine has the trainer's weights, or their quantised form: it compares
storage, or the copy tensor by tensor. Every token sampled afterwards carries the new version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, Literal, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..checkpointable import check_names, check_tensors
from ..engine.engine import Engine
from ..engine.weight_stages import stage
from ..engine.weights import first_not_finite
from ..rollout.generator import Generator
from .base import AdaptedPolicy
from .current import CurrentSync
from .measured import StagedWeights
from .quantise import quantised_weights

E = TypeVar("E", Engine, Generator)


class SyncError(RuntimeError):
    """The engine would sample from weights other than the trainer's."""


class WeightsNotFinite(SyncError):
    """A weight of the trainer is NaN or infinite. The engine keeps its old version."""


def finite_weights(trainer: PreTrainedModel) -> dict[str, Tensor]:
    """The trainer's weights by name.

    Raises:
        WeightsNotFinite: if a weight is not finite. Nothing has been changed then.
    """
    weights: dict[str, Tensor] = dict(trainer.named_parameters())
    if wrong := first_not_finite(weights):
        raise WeightsNotFinite(not_finite(wrong))
    return weights


def check_shared(trainers: nn.Module, engines: nn.Module) -> None:
    """Check that two modules have the same tensors in memory.

    Raises:
        SyncError: if a weight of the trainer's module is not the engine's.
    """
    theirs = engines.state_dict(keep_vars=True)
    for name, mine in trainers.state_dict(keep_vars=True).items():
        if name not in theirs or theirs[name].data_ptr() != mine.data_ptr():
            raise SyncError(f"weight '{name}' is no longer shared between trainer and engine")


def not_finite(name: str) -> str:
    """Message about a weight that is not finite."""
    return (
        f"weight '{name}' is not finite after an update: it was not passed to the engine. Lower"
        " trainer.learning_rate"
    )


class SharedSync(CurrentSync[Engine]):
    """Sync for a module shared by trainer and engine: only the version number changes."""

    def __init__(self, trainer: PreTrainedModel, engine: Engine) -> None:
        super().__init__(engine)
        self._trainer = trainer

    def refresh(self) -> None:
        """Nothing to copy."""

    def _hand_over(self, version: int) -> None:
        with stage("verify"):
            finite_weights(self._trainer)
            check_shared(self._trainer, self._engine.runner.model.module)
        self._engine.set_version(version)


class GatheredSync(CurrentSync[Engine]):
    """Sync that copies the trainer's weights into the engine after every update.

    The engine always has the trainer's weights, as with a shared module. So checkpoints do not
    store the engine's weights. If the weights are not finite or do not fit, the engine keeps its
    old ones.

    Args:
        weights: returns the trainer's weights by name. A tensor is gathered when it is read.
        engine: engine with its own weights.
        undo: keep the old weights until all new ones are written.
    """

    def __init__(
        self, weights: Callable[[], Mapping[str, Tensor]], engine: Engine, undo: bool
    ) -> None:
        super().__init__(engine)
        self._weights = weights
        self._undo = undo

    def _hand_over(self, version: int) -> None:
        weights = StagedWeights(self._weights(), "gather")
        try:
            self._engine.load_weights(weights, version, undo=self._undo)
        except ValueError as error:
            # One tensor at a time: all ranks read the same ones.
            again = self._weights().items()
            if wrong := next((n for n, t in again if not t.isfinite().all()), None):
                raise WeightsNotFinite(not_finite(wrong)) from error
            raise SyncError(f"{error}: it was not copied to the engine") from error


class PeriodicSync(Generic[E]):
    """Base of the syncs that copy the trainer's weights every `every` steps.

    `every` counts steps, not versions: a step may make several updates, or none.

    Args:
        trainer: the policy. Its weights are never modified.
        engine: engine that gets the copies.
        every: steps between copies.
        lora: the trained adapter. The engine then gets merged weights. None: there is no adapter.

    Attributes:
        waited: steps since the last copy.
    """

    def __init__(
        self, trainer: PreTrainedModel, engine: E, every: int, lora: AdaptedPolicy | None
    ) -> None:
        self._trainer = trainer
        self._lora = lora
        self._engine: E = engine
        self._every = every
        self.waited = 0

    def adapt(self, lora: AdaptedPolicy) -> None:
        """From now on, copy the weights with a trained adapter merged in. Copies once now.

        Raises:
            SyncError: as `sync` does.
        """
        self._trainer, self._lora = lora.model, lora
        self.refresh()

    def sync(self, version: int) -> None:
        """Called once per step. Copy if `every` steps have passed and the version has changed.

        Raises:
            WeightsNotFinite: if a weight is not finite. The engine keeps its old weights.
            SyncError: if the weights do not fit, or the engine computes other numbers with them.
        """
        self.waited += 1
        if self.waited >= self._every and version != self._engine.version:
            self.waited = 0
            self._hand_over(version)

    def refresh(self) -> None:
        """Copy now, under the engine's current version, or 0 if it has none yet.

        Raises:
            SyncError: as `sync` does.
        """
        self._hand_over(max(self._engine.version, 0))

    def state(self) -> dict[str, int]:
        """The engine's version, and the steps since the last copy."""
        return {"version": self._engine.version, "waited": self.waited}

    def _hand_over(self, version: int) -> None:
        """Copy the policy's weights and this version to the engine."""
        raise NotImplementedError


class CopySync(PeriodicSync[Engine]):
    """Sync for an engine with its own weights, overwritten in place every `every` steps.

    The addresses of the tensors do not change, so pointers to them stay valid.

    Args:
        trainer: as for `PeriodicSync`, as are `every` and `lora`.
        engine: engine whose weights are overwritten.
        form: "copy", or "int8" or "fp8" to quantise the trainer's weights anew at every copy.
    """

    def __init__(
        self,
        trainer: PreTrainedModel,
        engine: Engine,
        every: int,
        form: Literal["copy", "int8", "fp8"] = "copy",
        lora: AdaptedPolicy | None = None,
    ) -> None:
        super().__init__(trainer, engine, every, lora)
        self._form = form
        self._held: dict[str, Tensor] = {}

    @contextmanager
    def policy_weights(self, version: int) -> Iterator[None]:
        """In this block the engine samples from the policy's weights, neither stale nor quantised.

        Afterwards the engine has its earlier weights and version again. Training samples are
        therefore the same with and without an evaluation.

        Args:
            version: version of the policy's weights.
        """
        before = self._engine.version
        if version == before > 0 and self._form == "copy":  # before RL, every version is 0
            yield
            return
        # Hold the copy on the host: the GPU may have no room for a second one.
        held = {
            name: p.detach().to("cpu", copy=True)
            for name, p in self._engine.runner.model.module.named_parameters()
        }
        self._held = held
        self._copy(self._weights(), version)
        try:
            yield
        finally:
            # After a signal, sequences may still be running, and their weights must not change.
            # The run ends then, and the checkpoint saves the held weights.
            if not self._engine.busy:
                self._engine.version = before  # the engine refuses a lower version
                self._copy(held, before)
                self._held = {}

    def _hand_over(self, version: int) -> None:
        """Copy the trainer's weights, or their quantised form."""
        weights = self._weights()
        if self._form != "copy":
            plain = self._lora.base if self._lora else self._trainer
            weights = StagedWeights(quantised_weights(plain, self._form, weights), "cast")
        self._copy(weights, version)

    def _weights(self) -> Mapping[str, Tensor]:
        """The policy's weights by name. A trained adapter is merged in."""
        if self._lora:
            return StagedWeights(self._lora.merged(), "gather")
        return dict(self._trainer.named_parameters())

    def _copy(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Load weights into the engine, which checks all of them first and verifies each copy.

        On a GPU the old weights are not kept, because there may be no memory for them. If a write
        fails there, the engine refuses to compute and the run ends.
        """
        try:
            self._engine.load_weights(weights, version, undo=self._trainer.device.type == "cpu")
        except ValueError as error:
            finite_weights(self._trainer)  # if this is the reason, its message is more precise
            raise SyncError(f"{error}: it was not copied to the engine") from error

    def tensors(self) -> dict[str, Tensor]:
        """Weights that training samples from, by name, for a checkpoint.

        They may be older than the trainer's.
        """
        return self._held or dict(self._engine.runner.model.module.named_parameters())

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        check_names(self.state(), state, "value")
        check_tensors(self.tensors(), tensors)
        self._engine.load_weights(tensors, state["version"])
        self.waited = state["waited"]
