"""SFT stage: train on worked solutions with the same trainer, until a probe set is solved."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ..batch import Metrics, collate
from ..controller.stream import task_stream
from ..data.task_set import drawn_tasks
from ..errors import UserError
from ..recipe.plan import SFT_PROBE_EVERY
from ..report.numbers import percent
from ..trainer.sft import SupervisedLoss
from ..trainer.trainer import Trainer, TrainingDiverged
from ..types import Task
from .assemble import Assembly
from .interrupts import Interrupted, Interrupts
from .out_of_memory import free_memory_of, is_out_of_memory
from .policy_evaluation import evaluate_policy
from .several_ranks import alike
from .worked import stage_trainer_config, supervised_trainer, training_tasks, worked_groups

PROBE_TASKS = 128


@dataclass(frozen=True)
class SftMark:
    """Progress of SFT.

    Attributes:
        step: steps done.
        counters: the trainer's counters after that step.
        unlogged: metrics of that step, if it was trained but not logged yet.
    """

    step: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)
    unlogged: Metrics = field(default_factory=dict)


@dataclass
class SftStage:
    """Supervised warm-up of an assembly's policy.

    Attributes:
        assembly: its policy is trained in place.
        on_step: called with the metrics of each step.
        save: called every `every` steps, and if training stops early. Its arguments are the
            trainer, the progress, and True if training stops here.
        every: steps between saves. 0: never.
        interrupts: signals when to stop.
        enough: the probe result that reached `sft.stop_at_accuracy`, in words. Empty before that.
    """

    assembly: Assembly
    on_step: Callable[[Metrics], None]
    save: Callable[[Trainer, SftMark, bool], None] = lambda trainer, mark, last: None
    every: int = 0
    interrupts: Interrupts = field(default_factory=lambda: Interrupts(print))
    enough: str = field(default="", init=False)
    _mark: SftMark = field(default_factory=SftMark, init=False)
    _good: SftMark = field(default_factory=SftMark, init=False)
    _began: float = field(default_factory=time.perf_counter, init=False)
    _tokens: int = field(default=0, init=False)

    def run(self, restore: Callable[[Trainer], SftMark] = lambda trainer: SftMark()) -> int:
        """Train, and return the number of steps done.

        The probe set comes from the training tasks, so the held-out tasks stay unseen.

        Args:
            restore: restores the trainer from the checkpoint of an earlier process, whose weights
                the policy has, and returns the progress of that process.

        Raises:
            Interrupted: if a signal arrived. `save` has been called.
        """
        recipe = self.assembly.recipe
        sft = recipe.sft
        tasks = training_tasks(self.assembly)
        probe = drawn_tasks(tasks, PROBE_TASKS, recipe.run.seed) if sft.stop_at_accuracy else []
        # With few tasks, the probe tasks are trained on too, so the probe measures memorisation.
        # Without a probe, SFT would continue until all tasks are memorised.
        probed = {task.id for task in probe} if len(tasks) > 2 * PROBE_TASKS else set()
        rest = [task for task in tasks if task.id not in probed]
        if sft.tasks > len(rest):
            raise UserError(
                f"sft.tasks = {sft.tasks}: only {len(rest)} training tasks have a solution and are"
                " not in the probe set. Lower it"
            )
        rest = drawn_tasks(rest, sft.tasks, recipe.run.seed)
        stream = task_stream(
            rest, sft.examples_per_step, recipe.run.seed, self.assembly.tasks.weights
        )
        trainer = supervised_trainer(
            self.assembly, stage_trainer_config(recipe.trainer, sft), sft.steps, sft.neftune_alpha
        )
        self._mark = self._good = restore(trainer)
        try:
            self._train(trainer, stream, probe)
        except (Exception, Interrupted) as error:
            if alike(error, self.assembly.ranks):
                self._keep(trainer, error)
            raise
        self.assembly.sync.refresh()
        return self._mark.step

    def _train(
        self, trainer: Trainer, stream: Callable[[int], list[Task]], probe: list[Task]
    ) -> None:
        """Train until all steps are done or the probe set is solved well enough."""
        steps = self.assembly.recipe.sft.steps
        solved = bool(self._mark.unlogged) and self._log(self._mark.unlogged, probe)
        while self._mark.step < steps and not solved:
            step = self._mark.step + 1
            with self.interrupts.finishing():
                metrics = self._step(trainer, stream(step), step)
                self._mark = SftMark(step, trainer.state(), metrics)
            solved = self._log(metrics, probe)
            if self.every and step % self.every == 0 and step < steps and not solved:
                with self.interrupts.finishing():
                    self.save(trainer, self._mark, False)

    def _step(self, trainer: Trainer, tasks: list[Task], step: int) -> Metrics:
        objective, examples = SupervisedLoss(), collate(worked_groups(self.assembly, tasks))
        batch = objective.prepare(examples.to(self.assembly.device))
        metrics = trainer.train_step(batch, objective.compute_loss)
        self._tokens += int(examples.mask.sum())
        return metrics | {
            "step": float(step),
            "train/tok_s": self._tokens / (time.perf_counter() - self._began),
        }

    def _log(self, metrics: Metrics, probe: list[Task]) -> bool:
        """Complete and log the metrics of the last step, with a probe if it is due.

        Returns:
            True if the probe set is solved well enough.
        """
        self.interrupts.stop_here()  # before writing anything: a resume repeats all of this
        solved = False
        if probe and self._mark.step % SFT_PROBE_EVERY == 0:
            found = evaluate_policy(self.assembly, probe, version=0, probe=True)
            metrics = {**metrics, **found.metrics()}
            # The weakest source decides: a source that is never solved gives RL no gradient.
            weakest = min(found.by_source.values(), default=found.interval.mean)
            solved = weakest >= self.assembly.recipe.sft.stop_at_accuracy
            if solved:
                self.enough = (
                    f"{percent(weakest, 0)} of the probe tasks"
                    f"{' of the weakest source' if found.by_source else ''} are solved"
                )
        with self.interrupts.finishing():
            self.on_step(metrics)
            self._mark = replace(self._mark, unlogged={})
            self._good = self._good if self._mark.counters["skipped_in_a_row"] else self._mark
        return solved

    def _keep(self, trainer: Trainer, error: BaseException) -> None:
        """Save the last step, unless weights may have changed since.

        If training has diverged, save the last step that was not skipped.
        """
        if is_out_of_memory(error):
            free_memory_of(error)
        counts = trainer.state()
        mark, keys = (
            (self._good, ["version"])
            if isinstance(error, TrainingDiverged)
            else (self._mark, [*counts])
        )
        if mark.step and all(counts[key] == mark.counters[key] for key in keys):
            # Save nothing if the tensors in memory are not finite.
            with self.interrupts.finishing(), suppress(TrainingDiverged):
                self.save(trainer, mark, True)
