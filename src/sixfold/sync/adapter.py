"""Weight sync of a trained LoRA adapter to an engine that shares the adapter's base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..checkpointable import check_names
from ..engine.engine import Engine
from ..engine.weights import first_not_finite
from .base import AdaptedPolicy
from .sync import SyncError, WeightsNotFinite


class AdapterSync:
    """Sync that passes copies of an adapter's matrices to the engine.

    The engine shares the weights of the base with the trainer, and adds the adapter's products to
    the outputs of the base. The copies are made when the object is created and at each sync.

    Args:
        policy: the trained adapter and its base.
        engine: engine that runs the base.

    Raises:
        SyncError: as `sync` does.
    """

    def __init__(self, policy: AdaptedPolicy, engine: Engine) -> None:
        self._policy = policy
        self._engine = engine
        self.refresh()

    def sync(self, version: int) -> None:
        """Copy the adapter if the version has changed.

        Raises:
            SyncError: if a tensor of the base is no longer shared.
            WeightsNotFinite: if a matrix is not finite. The engine keeps its old adapter.
        """
        if version != self._engine.version:
            self._hand_over(version)

    def refresh(self) -> None:
        """Copy the adapter now and keep the engine's version. Before RL every version is 0.

        Raises:
            SyncError: as `sync` does.
        """
        self._hand_over(self._engine.version)

    @contextmanager
    def policy_weights(self, version: int) -> Iterator[None]:
        """Context in which the engine samples from the policy's current adapter."""
        if not version == self._engine.version > 0:
            self._hand_over(version)
        yield

    def tensors(self) -> dict[str, Tensor]:
        """Empty: the engine's adapter equals the trainer's, which the trainer saves."""
        return {}

    def state(self) -> dict[str, int]:
        """The engine's version."""
        return {"version": self._engine.version}

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Pass the trainer's adapter to the engine, with the checkpoint's version.

        Raises:
            UserError: if the checkpoint has weights of an engine. Nothing has been changed then.
        """
        check_names((), tensors, "tensor")
        check_names(self.state(), state, "value")
        self._hand_over(state["version"])

    @torch.no_grad()
    def _hand_over(self, version: int) -> None:
        self._check_base()
        adapter = self._policy.adapter()
        parts = {
            f"lora_{side} of '{name}'": part
            for name, pair in adapter.layers.items()
            for side, part in zip("AB", pair, strict=True)
        }
        if wrong := first_not_finite(parts):
            raise WeightsNotFinite(
                f"{wrong} is not finite after an update: it was not passed to the engine. Lower"
                " trainer.learning_rate"
            )
        self._engine.run_adapter(adapter, version)

    def _check_base(self) -> None:
        theirs = dict(self._engine.runner.model.module.named_parameters())
        for name, mine in self._policy.base.named_parameters():
            if theirs[name].data_ptr() != mine.data_ptr():
                raise SyncError(f"weight '{name}' is no longer shared between trainer and engine")
