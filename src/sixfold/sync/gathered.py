"""Weight sync from a sharded trainer to an engine that has a whole copy of the weights.

All ranks sync at the same moment. They gather one tensor after the other, so no rank holds all
gathered weights at once.
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

    The engine always has the trainer's weights, as with a shared module. So checkpoints do not
    store the engine's weights.

    Args:
        weights: returns the trainer's weights by name. A tensor is gathered when it is read.
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
        """Copy the weights now and keep the engine's version. Before RL every version is 0."""
        self._copy(self._engine.version)

    @contextmanager
    def policy_weights(self, version: int) -> Iterator[None]:
        """Context in which the engine samples from the policy's current weights.

        The engine keeps these weights afterwards.

        Args:
            version: version of the policy's weights.
        """
        if version == 0:  # weights change in SFT, and versions do not
            self.refresh()
        self.sync(version)
        yield

    def tensors(self) -> dict[str, Tensor]:
        """Empty: the engine's weights equal the trainer's, which the trainer saves."""
        return {}

    def state(self) -> dict[str, int]:
        """The engine's version."""
        return {"version": self._engine.version}

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Continue at the checkpoint's version. The engine was created with its weights.

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
