"""Save the checkpoints of a run, in the background if the recipe says so.

Only a save during training runs in the background. The first and the last of a stage, and one after
a failure or a signal, are finished before the run continues.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ..engine.weights import first_not_finite
from ..errors import UserError
from ..trainer.sharded import gathered, own_part
from ..trainer.trainer import TrainingDiverged
from .assemble import World
from .background import Background
from .best import BestSteps
from .checkpoint import save_checkpoint
from .folder import RunFolder
from .inputs import Inputs
from .listing import list_checkpoints
from .payload import Payload
from .publication import prune
from .registry import Registry, tensors_of
from .snapshot import Snapshots
from .state import PROGRESS

WRITE_SECONDS = 1800.0
"""Longest time that a run waits for the thread that writes a checkpoint."""

FAILURES = 3
"""Number of failed saves in a row that end a run."""

_MODEL = "model/"
"""Prefix of the policy's weights among the tensors of a snapshot."""


class Saver:
    """Saves checkpoints of a run.

    Args:
        run: folder of the run, locked.
        world: model and settings.
        inputs: inputs of the run.
        best: steps whose checkpoints are kept beside the newest.
        warn: receives a line about a save that failed, if training goes on.

    Attributes:
        failed: number of saves that have failed in this process.
    """

    def __init__(
        self,
        run: RunFolder,
        world: World,
        inputs: Inputs,
        best: BestSteps,
        warn: Callable[[str], None],
    ) -> None:
        self._run = run
        self._world = world
        self._inputs = inputs
        self._best = best
        self._warn = warn
        self._background = Background("the thread that writes checkpoints", WRITE_SECONDS)
        self._snapshots = Snapshots()
        self._failed_in_a_row = 0
        self.failed = 0

    def save(
        self,
        stage: Literal["sft", "step"],
        registry: Registry,
        states: Mapping[str, Mapping[str, Any]],
        *,
        required: bool = True,
    ) -> Path:
        """Publish a checkpoint with the current tensors, and delete those that are not kept.

        Args:
            stage: stage that the checkpoint belongs to.
            registry: components whose tensors are saved.
            states: state of these components when their tensors last changed.
            required: finish the save before returning, and raise its error. Otherwise it may run in
                the background, and a disk that refuses it is a warning, up to `FAILURES` in a row.

        Returns:
            The path of the checkpoint.

        Raises:
            TrainingDiverged: if a tensor is not finite. Nothing is written then.
            UserError: if the disk refuses the checkpoint.
        """
        self._tolerate(self._background.wait)
        weights, tensors = self._world.policy.weights(), tensors_of(registry)
        every = {**{_MODEL + name: tensor for name, tensor in weights.items()}, **tensors}
        if wrong := self._not_finite(every):
            raise TrainingDiverged(
                f"'{wrong}' is not finite, so no checkpoint was saved. Lower trainer.learning_rate"
            )
        background = self._world.recipe.checkpoint.asynchronous and not required
        step = states[PROGRESS]["step" if stage == "step" else "sft_steps"]
        if self._world.shards:
            every = gathered(every, self._world.ranks)
        elif background:
            every = self._snapshots.take(every)
        if self._world.ranks.rank:  # rank 0 writes
            return self._run.checkpoints / f"{stage}-{step:06d}"
        job = self._job(stage, every, states)
        if background:
            self._background.start(job)
        elif required:
            job()
        else:
            self._tolerate(job)
        return self._run.checkpoints / f"{stage}-{step:06d}"

    def check(self) -> None:
        """Report a save in the background that has failed.

        Raises:
            BaseException: its error, unless it is of the disk and training may go on.
        """
        self._tolerate(self._background.check)

    def settle(self) -> None:
        """Wait until nothing is written any more. An error of a save is a warning."""
        try:
            self._background.wait()
        except Exception as error:  # noqa: BLE001  the run ends, for another reason
            self._warn(f"{error}")

    def _not_finite(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Name of a tensor with a part that is not finite, on any rank. Or None."""
        found = first_not_finite({name: own_part(t) for name, t in tensors.items()})
        return next(filter(None, self._world.ranks.gather(found)), None)

    def _job(
        self,
        stage: Literal["sft", "step"],
        every: Mapping[str, Tensor],
        states: Mapping[str, Mapping[str, Any]],
    ) -> Callable[[], None]:
        """Function that writes a checkpoint from these tensors and from copies of everything else.

        Args:
            stage: stage that the checkpoint belongs to.
            every: tensors of the components, and the policy's weights with the prefix `_MODEL`.
            states: JSON state of the components.
        """
        policy, best = self._world.policy, copy.deepcopy(self._best)
        weights = {n.removeprefix(_MODEL): t for n, t in every.items() if n.startswith(_MODEL)}
        tensors = {name: t for name, t in every.items() if not name.startswith(_MODEL)}
        payload = Payload(tensors, states, asdict(self._inputs))
        _ = payload.text  # now: the states may change while the tensors are written
        step = states[PROGRESS]["step" if stage == "step" else "sft_steps"]
        keep = self._world.recipe.checkpoint.keep

        def write() -> None:
            save_checkpoint(
                self._run.checkpoints,
                step,
                write_model=lambda folder: policy.save(folder, weights),
                model_bytes=sum(tensor.nbytes for tensor in weights.values()),
                payload=payload,
                stage=stage,
            )
            prune(self._run.checkpoints, keep, best.among(list_checkpoints(self._run.checkpoints)))
            self._failed_in_a_row = 0

        return write

    def _tolerate(self, action: Callable[[], None]) -> None:
        """Do `action`, and turn the refusal of a disk into a warning, up to `FAILURES` in a row."""
        try:
            action()
        except UserError as error:
            self.failed += 1
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= FAILURES:
                raise
            self._warn(f"{error}. Training goes on without this checkpoint")
