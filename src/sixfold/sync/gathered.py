"""Weight sync from a sharded trainer to an engine that has a whole copy of the weights.

All ranks sync at the same moment. They gather a few tensors at a time, so no rank holds all
gathered weights at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ..engine.engine import Engine
from .current import CurrentSync
from .measured import StagedWeights
from .sync import SyncError, WeightsNotFinite, not_finite


class GatheredSync(CurrentSync):
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
