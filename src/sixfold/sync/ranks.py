"""Weight sync of several ranks, each of which has samplers of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..rollout.generator import Generator
from .base import AdaptedPolicy
from .current import CurrentSync
from .measured import StagedWeights
from .sync import SyncError, WeightsNotFinite, not_finite
from .versioned import Wait


class _CheckedWeights(StagedWeights):
    """Weights by name. Reading one checks that it is finite.

    Attributes:
        wrong: the first weight that is not finite.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__(weights, "gather")
        self.wrong = ""
        self._unread = dict.fromkeys(weights)

    def __getitem__(self, name: str) -> Tensor:
        self._unread.pop(name, None)
        tensor = super().__getitem__(name)
        if not self.wrong and not tensor.isfinite().all():
            self.wrong = name
        return tensor

    def drain(self) -> None:
        """Gather the tensors that were not read, because the other ranks gather them too."""
        for name in [*self._unread]:
            self[name]


class RanksSync(CurrentSync[Generator]):
    """Sync that gathers the trainer's weights after every update and passes them to samplers.

    All ranks read the same tensors at the same moment, and none holds all of them. If one rank
    fails, all raise an error.

    Args:
        weights: returns the trainer's weights by name. A tensor is gathered when it is read.
        engine: samplers of this rank.
        agree: exchanges the errors of the ranks (`Ranks.agree`).
        wait: runs a coroutine of the samplers to its end.
        loaded: called after each sync, when the samplers of all ranks have the new weights.
    """

    def __init__(
        self,
        weights: Callable[[], Mapping[str, Tensor]],
        engine: Generator,
        agree: Callable[[Exception | None], None],
        wait: Wait,
        loaded: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(engine)
        self._loaded = loaded
        self._weights = weights
        self._agree = agree
        self._wait = wait
        self._trains = False

    def sync(self, version: int) -> None:
        self._trains = True
        super().sync(version)

    @contextmanager
    def policy_weights(self, version: int) -> Iterator[None]:
        # Once the steps have begun, weights change with their version alone, and groups may run.
        if version == 0 and not self._trains:
            self.refresh()
        super().sync(version)
        yield

    def adapt(self, lora: AdaptedPolicy) -> None:
        """From now on, pass the weights with a trained adapter merged in. Passes them once now.

        Raises:
            SyncError: as `sync` does.
        """
        self._weights = lora.merged
        self.refresh()

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Continue at the checkpoint's version: the samplers get the trainer's weights."""
        self.check(tensors, state)
        self._hand_over(state["version"])

    def _hand_over(self, version: int) -> None:
        failure: Exception | None = None
        given = _CheckedWeights(self._weights())
        try:
            self._wait(self._engine.load(given, max(version, 0)))
        except ValueError as error:
            wrong = given.wrong
            failure = WeightsNotFinite(not_finite(wrong)) if wrong else SyncError(str(error))
        except Exception as error:  # noqa: BLE001  raised on all ranks
            failure = error
        if failure:
            given.drain()
        self._agree(failure)
        self._loaded()
