"""A stage that trains on given tokens: pretraining, SFT, distillation, preferences.

They differ in their examples, their objective and their trainer's settings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from ..algorithm.method import Method
from ..batch import Metrics
from ..checkpoint.best import BestSteps
from ..checkpoint.checkpoint import Checkpoint
from ..errors import UserError
from ..evaluation.record import record, shown, solved_if
from ..recipe.schema import TrainerConfig
from ..report.alarms import Alarms
from ..run.assemble import Assembly
from ..run.context import RunContext
from ..run.last_step import LastStep, unfinished
from ..run.monitors import Monitors
from ..run.policy_evaluation import evaluate_policy
from ..run.step_log import StepLog
from ..run.training import TrainingStage, reached_limit
from ..run.work import Work
from ..run.worked import supervised_trainer
from ..trainer.trainer import Trainer
from .examples import Examples
from .objective import Objective, imitation


class SupervisedWork(Work):
    """Work of a run that trains on examples.

    Args:
        name: name of the stage for the user.
        method: as for `Work`.
        trainer: settings of the trainer.
        make_examples: makes the examples, or refuses them.
        texts: texts of which a tokenizer is trained, if the stage trains one.
        epochs: passes over the examples, from which the number of steps follows. 0: the recipe has
            that number.
        neftune_alpha: scale of the noise on the embeddings. 0: none.
        section: section of the recipe with the settings of the stage.
        make_objective: makes what is minimised, from the folder of the run and its examples.
        own_model: as for `Work`.
    """

    def __init__(
        self,
        name: str,
        method: Method,
        trainer: TrainerConfig,
        make_examples: Callable[[Assembly], Examples],
        texts: Iterable[str] | None = None,
        epochs: int = 0,
        neftune_alpha: float = 0.0,
        section: str = "sft",
        make_objective: Callable[[Assembly, Examples, Path], Objective] = imitation,
        own_model: bool = False,
    ) -> None:
        super().__init__(method)
        self.texts = texts
        self._epochs = epochs
        self._neftune_alpha = neftune_alpha
        self._name = name
        self._trainer = trainer
        self._make_examples = make_examples
        self._section = section
        self._make_objective = make_objective
        self._new = False
        self.own_model = own_model

    def load(self, assembly: Assembly) -> None:
        self._examples = self._make_examples(assembly)
        self.examples = self._examples.fingerprint
        assembly.tasks.notes += self._examples.notes
        if self._epochs:
            steps = self._epochs * self._examples.steps_per_epoch
            if not steps:
                raise UserError(
                    f"{self._section}.epochs = {self._epochs}: sources that are drawn by weight"
                    f" have no epochs. Set {self._section}.steps instead, or remove the weights"
                    " of data.sources"
                )
            assembly.recipe = assembly.recipe.with_settings({"run.steps": steps})

    def monitors(self, best: BestSteps) -> Monitors:
        return Monitors(best, Alarms(True))

    def begin(self, context: RunContext, assembly: Assembly, checkpoint: Checkpoint | None) -> None:
        """Evaluate the model that the stage starts from."""
        self._new = True
        context.progress.phase("evaluation")
        if heldout := assembly.tasks.heldout:
            context.state.before = record(evaluate_policy(assembly, heldout, version=0))
            context.progress.note(
                f"held-out before {self._name}: {shown(context.state.before)};"
                f" {solved_if(assembly.environment.solved_rule.text)}"
            )

    def stage(self, context: RunContext, assembly: Assembly, monitors: Monitors) -> SupervisedStage:
        steps = assembly.recipe.run.steps
        objective = self._make_objective(assembly, self._examples, context.folder.path)
        trainer = supervised_trainer(
            assembly, self._trainer, steps, self._neftune_alpha, objective.frozen, objective.root
        )
        if self._new:
            objective.begin(self._examples)
        return SupervisedStage(
            self._name, context, assembly, monitors, trainer, self._examples, objective
        )


class SupervisedStage(TrainingStage):
    """Trains on examples.

    Args:
        name: name of the stage for the user.
        context: the run.
        assembly: model, tasks and settings.
        monitors: watch the metrics.
        trainer: trainer of the policy.
        examples: what it trains on.
        objective: what it minimises.
    """

    def __init__(
        self,
        name: str,
        context: RunContext,
        assembly: Assembly,
        monitors: Monitors,
        trainer: Trainer,
        examples: Examples,
        objective: Objective,
    ) -> None:
        components = {"policy": trainer, **objective.components()}
        super().__init__(context, assembly, monitors, trainer, components)
        self.name = name
        self._trainer = trainer
        self._examples = examples
        self._objective = objective

    @property
    def version(self) -> int:
        return self._trainer.version

    def restore(self, checkpoint: Checkpoint) -> None:
        super().restore(checkpoint)
        self._objective.restored(checkpoint.model_path)

    def loop(self, first_step: int) -> tuple[SupervisedLoop, SupervisedLog]:
        log = SupervisedLog(
            self._context,
            self._assembly,
            self._monitors,
            first_step,
            self._examples,
            self._objective,
            self._last,
        )
        return SupervisedLoop(
            self._context, self._trainer, self._examples, self._objective, log
        ), log


class SupervisedLoop:
    """Makes the steps: examples, update, log.

    Args:
        context: the run. Its state counts the steps.
        trainer: trainer of the policy.
        examples: what it trains on.
        objective: what it minimises.
        log: log of the steps.
    """

    def __init__(
        self,
        context: RunContext,
        trainer: Trainer,
        examples: Examples,
        objective: Objective,
        log: SupervisedLog,
    ) -> None:
        self._context = context
        self._trainer = trainer
        self._examples = examples
        self._objective = objective
        self._log = log

    def run(self, until: Callable[[int, Metrics], bool]) -> None:
        """Make steps until `until(step, metrics)` is True."""
        while True:
            step = self._context.state.step + 1
            metrics = self._step(step)
            self._context.phase("log")
            self._log.log(step, metrics, self._trainer)
            if until(step, metrics):
                return

    def _step(self, step: int) -> Metrics:
        began = time.perf_counter()
        self._context.phase("batch")
        batch = self._objective.batch(self._examples.groups(step))
        made = time.perf_counter()
        self._context.phase("trainer")
        metrics = self._trainer.train_step(batch, self._objective.compute_loss)
        ended = time.perf_counter()
        return {
            **self._objective.derived(metrics),
            "train/tok_s": int(batch.mask.sum()) / (ended - made),
            "time/batch_s": made - began,
            "time/trainer_s": ended - made,
            "time/total_s": ended - began,
        }


class SupervisedLog(StepLog):
    """Log of supervised steps. Evaluations also measure the loss on held-out examples.

    Args:
        context: as for `StepLog`, as are `assembly`, `monitors` and `first_step`.
        examples: have the held-out examples.
        objective: measures them.
        last: keeps the state at the end of the last step.
    """

    def __init__(
        self,
        context: RunContext,
        assembly: Assembly,
        monitors: Monitors,
        first_step: int,
        examples: Examples,
        objective: Objective,
        last: LastStep,
    ) -> None:
        super().__init__(context, assembly, monitors, first_step)
        self._examples = examples
        self._objective = objective
        self._last = last

    @property
    def heldout(self) -> bool:
        return super().heldout or bool(self._examples.heldout)

    def log(self, step: int, metrics: Metrics, trainer: Trainer) -> None:
        """Write and show a step."""
        context = self._context
        context.state.step = step
        if trainer.skip_reason and metrics["train/skipped"]:
            context.progress.note(f"step {step}: update skipped, {trainer.skip_reason}")
        for spike in trainer.spikes:
            context.notes.add(step, spike, warning=True)
        if context.saver.failed:
            metrics["checkpoint/failed_total"] = float(context.saver.failed)
        # If the evaluation fails, this step can still be saved.
        self._last.mark(replace(context.state_now(), unlogged=unfinished(metrics)))
        self.close_step(step, metrics, trainer.version)

    def close_step(self, step: int, metrics: Metrics, version: int) -> None:
        recipe = self._assembly.recipe
        due = recipe.eval.every and step % recipe.eval.every == 0
        # The tasks are solved after the last step anyway.
        if not due and reached_limit(self._context, recipe.run, BestSteps(0)):
            began = time.perf_counter()
            self._context.phase("evaluation")
            metrics |= self._heldout_metrics()
            metrics["time/eval_s"] = time.perf_counter() - began
        super().close_step(step, metrics, version)

    def evaluated(self, step: int, version: int) -> tuple[Metrics, str]:
        found, warning = super().evaluated(step, version) if super().heldout else ({}, "")
        return {**found, **self._heldout_metrics()}, warning

    def _heldout_metrics(self) -> Metrics:
        heldout = self._examples.heldout
        return self._objective.heldout(heldout) if heldout else {}
