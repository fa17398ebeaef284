"""Base of the syncs after which the engine always has the trainer's current weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from torch import Tensor

from ..checkpointable import check_names
from ..engine.engine import Engine
from ..rollout.generator import Generator

E = TypeVar("E", Engine, Generator)


class CurrentSync(Generic[E]):
    """Sync after which the engine always has the trainer's current weights.

    So a checkpoint stores only the engine's version, and an evaluation needs no other weights.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: E) -> None:
        self._engine: E = engine

    def sync(self, version: int) -> None:
        """Pass the trainer's weights to the engine if the version has changed.

        Raises:
            SyncError: if the engine would have other weights than the trainer.
            WeightsNotFinite: if a weight is not finite. The engine keeps its old weights.
        """
        if version != self._engine.version:
            self._hand_over(version)

    def refresh(self) -> None:
        """Pass the weights now and keep the engine's version. Before RL every version is 0.

        Raises:
            SyncError: as `sync` does.
        """
        self._hand_over(self._engine.version)

    @contextmanager
    def policy_weights(self, version: int) -> Iterator[None]:
        """Context in which the engine samples from the policy's current weights.

        The engine keeps these weights afterwards.

        Args:
            version: version of the policy's weights.
        """
        if version == 0:  # SFT changes weights without a version
            self.refresh()
        self.sync(version)
        yield

    def tensors(self) -> dict[str, Tensor]:
        """Empty: the engine's weights equal the trainer's, which the trainer saves."""
        return {}

    def state(self) -> dict[str, int]:
        return {"version": self._engine.version}

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Continue at the checkpoint's version. The engine already has the trainer's weights.

        Raises:
            UserError: if the checkpoint has weights of an engine. Nothing has been changed then.
        """
        self.check(tensors, state)
        self._engine.version = state["version"]  # type: ignore[misc]  # that of an Engine

    def check(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Check what a checkpoint has for `load`.

        Raises:
            UserError: as `load` does.
        """
        check_names((), tensors, "tensor")
        check_names(self.state(), state, "value")

    def _hand_over(self, version: int) -> None:
        """Pass the trainer's weights and this version to the engine."""
        raise NotImplementedError
