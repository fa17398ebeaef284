"""Weight sync of several ranks. Each has samplers of its own, or those of its machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..engine.weight_stages import stage
from ..rollout.generator import Generator
from .base import AdaptedPolicy
from .current import CurrentSync
from .measured import StagedWeights
from .sync import SyncError, WeightsNotFinite, not_finite
from .versioned import Wait, compare_probe


class _CheckedWeights(StagedWeights):
    """Weights by name. Reading one checks that it is finite."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__(weights, "gather")
        self._unread = dict.fromkeys(weights)

    def __getitem__(self, name: str) -> Tensor:
        """One weight.

        Raises:
            WeightsNotFinite: on all ranks, which read the same weight.
        """
        self._unread.pop(name, None)
        tensor = super().__getitem__(name)
        if not tensor.isfinite().all():
            raise WeightsNotFinite(not_finite(name))
        return tensor

    def drain(self) -> None:
        """Gather the tensors that were not read, because the other ranks gather them too."""
        for name in [*self._unread]:
            super().__getitem__(name)


Score = Callable[[Sequence[int]], list[float]]
"""Returns the log-probs of all tokens but the first."""


@dataclass(frozen=True)
class Probe:
    """A comparison of log-probs of the samplers with those of the trainer.

    Attributes:
        tokens: the sequence that both score.
        score: that of the trainer. All ranks call it together, and fail together.
        limit: largest mean difference, in nats.
    """

    tokens: Sequence[int]
    score: Score
    limit: float


class RanksSync(CurrentSync[Generator]):
    """Sync that gathers the trainer's weights after every update and passes them to samplers.

    All ranks read the same tensors at the same moment, and none holds all of them. If one rank
    fails, all raise an error.

    Args:
        weights: returns the trainer's weights by name. A tensor is gathered when it is read.
        engine: samplers of this rank, or of its machine.
        agree: exchanges the errors of the ranks (`Ranks.agree`).
        wait: runs a coroutine of the samplers to its end.
        loaded: called after each sync, when the samplers of all ranks have the new weights.
        probe: compares after each sync. None: the samplers compute as the trainer does.
    """

    def __init__(
        self,
        weights: Callable[[], Mapping[str, Tensor]],
        engine: Generator,
        agree: Callable[[Exception | None], None],
        wait: Wait,
        loaded: Callable[[], None] = lambda: None,
        probe: Probe | None = None,
    ) -> None:
        super().__init__(engine)
        self._probe = probe
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

    def adapt(self, lora: AdaptedPolicy, score: Score) -> None:
        """From now on, pass the weights with a trained adapter merged in. Passes them once now.

        Args:
            lora: the adapted policy.
            score: as `Probe.score`, of the adapted policy.

        Raises:
            SyncError: as `sync` does.
        """
        self._weights = lora.merged
        self._probe = self._probe and replace(self._probe, score=score)
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
            failure = SyncError(str(error))
        except Exception as error:  # noqa: BLE001  raised on all ranks
            failure = error
        if failure:
            given.drain()
        self._agree(failure)
        self._loaded()
        if self._probe:
            self._prove(self._probe)

    def _prove(self, probe: Probe) -> None:
        """Compare the log-probs of samplers and trainer.

        Raises:
            SyncError: if they differ by more than the limit.
        """
        failure: Exception | None = None
        with stage("verify"):
            ours = probe.score(probe.tokens)
            try:
                compare_probe(self._wait(self._engine.score(probe.tokens)), ours, probe.limit)
            except Exception as error:  # noqa: BLE001  raised on all ranks
                failure = error
        self._agree(failure)
