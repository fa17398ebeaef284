"""Keep the state at the end of the last step, so that it can be saved if the next step fails.

Weights and optimizer moments are not copied. They change only in an update, and the trainers count
the updates they try. While those counts are unchanged, the tensors in memory are those of the last
step.
"""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..batch import Metrics
from ..checkpoint.listing import list_checkpoints
from ..checkpoint.registry import Registry, States, states_of
from ..checkpoint.state import PROGRESS, RunState, with_progress
from ..errors import UserError
from ..model.loading import Policy
from ..trainer.trainer import Trainer, TrainingDiverged
from .context import RunContext
from .interrupts import Interrupted
from .out_of_memory import free_memory_of, is_out_of_memory
from .several_ranks import alike

TRAINED = ("policy", "critic")
"""Components that count their updates."""


class LastStep:
    """State at the end of each step, saved if the next step fails.

    Args:
        context: the run.
        policy: the trained model.
        trainer: its trainer.
        components: what a checkpoint stores besides the progress.
    """

    def __init__(
        self, context: RunContext, policy: Policy, trainer: Trainer, components: Registry
    ) -> None:
        self._context = context
        self._policy = policy
        self._trainer = trainer
        self._components = components
        self._states: States | None = None
        self._good: States | None = None

    def mark(self, state: RunState) -> None:
        """Remember the state at the end of a step."""
        self._states = states_of(with_progress(state, self._components))
        if self._trainer.skipped_in_a_row == 0:
            self._good = self._states

    def save_after(self, error: BaseException) -> Path | None:
        """Publish the newest state that is safe after a step has failed.

        Returns:
            None if no state is newer than the checkpoints on disk, if the other ranks have not
            stopped at the same point, because all ranks must save together, or if the disk refuses
            the checkpoint too.

        Raises:
            UserError: if the run was interrupted and the disk refuses the checkpoint.
        """
        if not alike(error, self._context.ranks):
            return None
        self._context.saver.settle()
        self._context.ranks.barrier("the last save")  # after it, all see the same checkpoints
        self._context.keep_folder()
        if is_out_of_memory(error):
            free_memory_of(error)
            self._trainer.optimizer.zero_grad(set_to_none=True)
        with suppress(TrainingDiverged):  # the tensors in memory are not finite
            try:
                return self.save_good() if isinstance(error, TrainingDiverged) else self.save()
            except UserError as refused:
                if isinstance(error, Interrupted):
                    raise
                self._context.progress.note(f"WARNING: the last step was not saved: {refused}")
        return None

    def save(self) -> Path | None:
        """Publish the last step, if no update was tried since its end.

        Returns:
            None otherwise: an update may be incomplete.
        """
        states, now = self._states, states_of(self._components)
        tried = states is None or any(states[name] != now[name] for name in TRAINED if name in now)
        if (agreed := self._agreed(None if tried else states)) is None:
            return None
        return self._publish(agreed)

    def save_good(self) -> Path | None:
        """Publish the last step whose update was applied, if no update was applied since.

        Updates that were tried and skipped change no weights.
        """
        good, now = self._good, states_of(self._components)
        applied = good is None or any(
            good[name]["version"] != now[name]["version"] for name in TRAINED if name in now
        )
        if (agreed := self._agreed(None if applied else good)) is None:
            return None
        newest = list_checkpoints(self._context.folder.checkpoints)[-1:]
        if newest and newest[0].name > f"step-{agreed[PROGRESS]['step']:06d}":
            return newest[0]  # its step was skipped, so its weights are the same
        return self._publish(agreed)

    def _agreed(self, states: States | None) -> States | None:
        """Return the states if all ranks want to save the same step, otherwise None."""
        steps = self._context.ranks.gather(states[PROGRESS]["step"] if states else None)
        return states if len({*steps}) == 1 else None

    def _publish(self, states: States) -> Path:
        """Publish states of an earlier moment with the current tensors, which belong to it."""
        registry = with_progress(self._context.state, self._components)
        return self._context.saver.save("step", self._policy, registry, states)


def unfinished(metrics: Metrics) -> dict[str, Any]:
    """Metrics as JSON for `RunState.unlogged`.

    Non-finite values become None, as in the metrics file.
    """

    def number(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    return {
        key: (
            number(value)
            if isinstance(value, float | int) or value is None
            else [*map(number, value)]
        )
        for key, value in metrics.items()
    }
