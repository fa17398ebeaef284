"""Weight sync for an engine beside a sharded trainer: the engine has a whole copy of the weights.

A sync gathers one tensor after the other from all ranks, so no rank holds two whole models more
than it needs. All ranks sync at the same moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..checkpointable import check_names
from ..engine.engine import Engine
from .sync import SyncError


class GatheredSync:
    """Sync that copies the trainer's weights into the engine after every update.

    As with a shared module, the engine always has the trainer's weights. So checkpoints do not
    depend on the number of ranks.

    Args:
        weights: returns the trainer's weights by name. It gathers a tensor when it is read.
        engine: engine with its own weights.
        undo: keep the old weights until all new ones are written.
    """

    def __init__(
        self, weights: Callable[[], Mapping[str, Tensor]], engine: Engine, undo: bool
    ) -> None:
        self._weights = weights
        self._engine = engine
        self._undo = undo

    def sync(self, version: int) -> None:
        """Copy the weights if the version has changed.

        Raises:
            SyncError: if the weights are not finite or do not fit. The engine then keeps its old
                weights.
        """
        if version != self._engine.version:
            self._copy(version)

    def refresh(self) -> None:
        """Copy now, without changing the engine's version. Before RL, every version is 0."""
        self._copy(self._engine.version)

    @contextmanager
    def policy_weights(self, version: int) -> Iterator[None]:
        """In this block the engine samples from the policy's weights, which it does afterwards too.

        Args:
            version: version of the policy's weights.
        """
        if version == 0:  # weights change in SFT, and versions do not
            self.refresh()
        self.sync(version)
        yield

    def tensors(self) -> dict[str, Tensor]:
        """Nothing to save: the engine's weights are the trainer's."""
        return {}

    def state(self) -> dict[str, int]:
        """The engine's version."""
        return {"version": self._engine.version}

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Continue at the checkpoint's version. The weights are the trainer's.

        Raises:
            UserError: if the checkpoint has weights of an engine. Nothing has been changed then.
        """
        check_names((), tensors, "tensor")
        check_names(self.state(), state, "value")
        self._engine.version = state["version"]

    def _copy(self, version: int) -> None:
        try:
            self._engine.load_weights(self._weights(), version, undo=self._undo)
        except ValueError as error:
            raise SyncError(f"{error}: it was not copied to the engine") from error
