"""Save the checkpoints of a run, in the background if the recipe says so.

Only saves during training run in the background. The first and the last save of a stage, and a save
after a failure or a signal, are finished before the run continues.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ..engine.weights import first_not_finite
from ..errors import UserError
from ..model.loading import Policy
from ..processes.deadline import Deadline
from ..ranks import Ranks, together
from ..recipe.schema import CheckpointConfig
from ..trainer.sharded import own_part
from ..trainer.trainer import TrainingDiverged
from .background import Background
from .best import BestSteps
from .checkpoint import save_checkpoint
from .listing import list_checkpoints
from .parts import Parts
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
    """Saves checkpoints of a run. All ranks save together.

    Args:
        checkpoints: directory of the checkpoints. The caller must hold the run's lock.
        settings: the recipe's [checkpoint] section.
        best: steps whose checkpoints are kept besides the newest.
        warn: receives a line about a failed save if training goes on.

    Attributes:
        failed: number of saves that have failed in this process.
    """

    def __init__(
        self,
        checkpoints: Path,
        ranks: Ranks,
        settings: CheckpointConfig,
        inputs: Mapping[str, Any],
        best: BestSteps,
        warn: Callable[[str], None],
    ) -> None:
        self.checkpoints = checkpoints
        self._ranks = ranks
        self._settings = settings
        self._inputs = inputs
        self._best = best
        self._warn = warn
        self._background = Background(
            Deadline(
                "the thread that writes checkpoints", WRITE_SECONDS, "Check the disk of run.dir"
            )
        )
        self._snapshots = Snapshots()
        self._failed_in_a_row = 0
        self.failed = 0

    def save(
        self,
        stage: Literal["sft", "step"],
        policy: Policy,
        registry: Registry,
        states: Mapping[str, Mapping[str, Any]],
        *,
        required: bool = True,
    ) -> Path:
        """Publish a checkpoint with the current tensors, and delete those that are not kept.

        Args:
            policy: supplies model and tokenizer, which are saved for from_pretrained.
            states: state of these components when their tensors last changed.
            required: True: finish the save before returning, and raise its error. False: the save
                may run in the background. If the disk refuses it, this is a warning, until
                `FAILURES` saves in a row have failed.

        Returns:
            The path of the checkpoint.

        Raises:
            TrainingDiverged: if a tensor is not finite. Nothing is written then.
            UserError: if the disk refuses the checkpoint, unless that is a warning.
        """
        self._tolerate(lambda: together(self._ranks, self._background.wait))
        every = self._live(policy, registry)
        self._check_finite(every)
        step = states[PROGRESS]["step" if stage == "step" else "sft_steps"]
        path = self.checkpoints / f"{stage}-{step:06d}"
        background = self._settings.asynchronous and not required
        adapter = _MODEL if policy.lora else ""
        parts = Parts(path, self._ranks, WRITE_SECONDS, adapter) if self._ranks.size > 1 else None
        if parts and not parts.open():
            return path
        nbytes = sum(tensor.nbytes for tensor in every.values())
        if parts:
            every = parts.share_out(every)
        elif background:
            every = self._snapshots.take(every)
        job = self._job(stage, step, policy, every, nbytes, states, parts)
        if background:
            self._background.start(job)
        elif required:
            together(self._ranks, job)
            self._failed_in_a_row = 0
        else:
            self._tolerate(lambda: together(self._ranks, job))
        return path

    def prune(self) -> None:
        """Delete the checkpoints that are not kept. A killed process may have left one.

        `best` must know the steps before a resume.
        """
        if self._ranks.rank == 0:
            spared = self._best.among(list_checkpoints(self.checkpoints))
            prune(self.checkpoints, self._settings.keep, spared)

    def check(self) -> None:
        """Report a failed save in the background.

        With several ranks, it is reported at the next save, where the ranks exchange errors.

        Raises:
            BaseException: the error of the save, unless the disk refused it and that is a warning.
        """
        if self._ranks.size == 1:
            self._tolerate(self._background.check)

    def settle(self) -> None:
        """Wait for the save in the background. Its error becomes a warning."""
        try:
            self._background.wait()
        except Exception as error:  # noqa: BLE001  the run ends, for another reason
            self._warn(f"{error}")

    def _live(self, policy: Policy, registry: Registry) -> dict[str, Tensor]:
        """Tensors to save, not copied: those of all components, and the policy's with a prefix."""
        weights = policy.weights()
        if self._ranks.size > 1:  # tied weights only once: this rank's part of them may be empty
            once = dict(policy.model.named_parameters())
            twice = dict(policy.model.named_parameters(remove_duplicate=False)).keys() - once
            weights = {name: t for name, t in weights.items() if name not in twice}
        return {**{_MODEL + name: t for name, t in weights.items()}, **tensors_of(registry)}

    def _check_finite(self, every: Mapping[str, Tensor]) -> None:
        wrong = first_not_finite({name: own_part(tensor) for name, tensor in every.items()})
        if found := next(filter(None, self._ranks.gather(wrong)), None):
            raise TrainingDiverged(
                f"'{found}' is not finite, so no checkpoint was saved. Lower trainer.learning_rate"
            )

    def _job(
        self,
        stage: Literal["sft", "step"],
        step: int,
        policy: Policy,
        every: Mapping[str, Tensor],
        nbytes: int,
        states: Mapping[str, Mapping[str, Any]],
        parts: Parts | None,
    ) -> Callable[[], bool]:
        """Make the function that writes a checkpoint.

        It uses the given tensors, and copies of everything else that may change meanwhile.

        Args:
            every: tensors of the components, and the policy's weights with the prefix `_MODEL`.
                With several ranks, only those that this rank writes.
            states: JSON state of the components.
            parts: writes the share of this rank. None: there is one rank.
        """
        best, keep = copy.deepcopy(self._best), self._settings.keep
        weights = {n.removeprefix(_MODEL): t for n, t in every.items() if n.startswith(_MODEL)}
        tensors = {name: t for name, t in every.items() if not name.startswith(_MODEL)}
        payload = Payload({} if parts else tensors, states, self._inputs)
        _ = payload.text  # now: the states may change while the tensors are written

        def write_model(folder: Path) -> None:
            policy.save(folder, weights if policy.lora or not parts else {})
            if parts:
                parts.collect(folder)

        def publish() -> None:
            checkpoints = self.checkpoints
            save_checkpoint(
                checkpoints,
                step,
                write_model=write_model,
                model_bytes=nbytes - sum(tensor.nbytes for tensor in payload.tensors.values()),
                payload=payload,
                stage=stage,
            )
            prune(checkpoints, keep, best.among(list_checkpoints(checkpoints)))

        def write() -> bool:
            if parts is None:
                publish()
            else:
                with parts.written(policy.model, weights, tensors):
                    if self._ranks.rank == 0:
                        publish()
            return True

        return write

    def _tolerate(self, action: Callable[[], bool]) -> None:
        """Run an action. A UserError becomes a warning, until `FAILURES` in a row have failed.

        Args:
            action: returns True if a checkpoint has been written.
        """
        try:
            if action():
                self._failed_in_a_row = 0
        except UserError as error:
            self.failed += 1
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= FAILURES:
                raise
            self._warn(f"{error}. Training goes on without this checkpoint")
