"""Weight sync of a trained LoRA adapter to an engine that shares the adapter's base."""

from __future__ import annotations

import torch

from ..engine.engine import Engine
from ..engine.weight_stages import count_bytes, stage
from ..engine.weights import first_not_finite
from .base import AdaptedPolicy
from .current import CurrentSync
from .sync import WeightsNotFinite, check_shared


class AdapterSync(CurrentSync):
    """Sync that passes copies of an adapter's matrices to the engine.

    The engine shares the weights of the base with the trainer, and adds the adapter's products to
    the outputs of the base. The copies are made when the object is created and at each sync. If a
    matrix is not finite, the engine keeps its old adapter.

    Args:
        policy: the trained adapter and its base.
        engine: engine that runs the base.

    Raises:
        SyncError: as `sync` does.
    """

    def __init__(self, policy: AdaptedPolicy, engine: Engine) -> None:
        super().__init__(engine)
        self._policy = policy
        self.refresh()

    @torch.no_grad()
    def _hand_over(self, version: int) -> None:
        with stage("gather"):
            adapter = self._policy.adapter()
        count_bytes("gather", sum(t.nbytes for pair in adapter.layers.values() for t in pair))
        parts = {
            f"lora_{side} of '{name}'": part
            for name, pair in adapter.layers.items()
            for side, part in zip("AB", pair, strict=True)
        }
        with stage("verify"):
            check_shared(self._policy.base, self._engine.runner.model.module)
            if wrong := first_not_finite(parts):
                raise WeightsNotFinite(
                    f"{wrong} is not finite after an update: it was not passed to the engine. Lower"
                    " trainer.learning_rate"
                )
        self._engine.run_adapter(adapter, version)
