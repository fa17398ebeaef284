"""A stage that trains: its steps with their log, their checkpoints, its limits and its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from ..batch import Metrics
from ..checkpoint.best import BestSteps
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.registry import Registry, load_components, states_of
from ..checkpoint.state import with_progress
from ..recipe.schema import RunConfig
from ..trainer.trainer import Trainer
from .assemble import Assembly
from .context import RunContext
from .ending import Ending, Pace, why_ended
from .interrupts import Interrupted
from .last_step import LastStep
from .monitors import Monitors
from .step_log import StepLog


class Loop(Protocol):
    """Makes the steps of a stage."""

    def run(self, until: Callable[[int, Metrics], bool]) -> None:
        """Make steps until `until(step, metrics)` is True."""


class TrainingStage:
    """Trains until a limit of the recipe's [run] section is reached.

    Args:
        context: the run.
        assembly: model, tasks and settings.
        monitors: watch the metrics.
        trainer: trainer of the policy.
        components: what a checkpoint stores besides the progress, the sync and the monitors.

    Attributes:
        name: name of the stage for the user.
    """

    name = ""

    def __init__(
        self,
        context: RunContext,
        assembly: Assembly,
        monitors: Monitors,
        trainer: Trainer,
        components: Registry,
    ) -> None:
        self._context = context
        self._assembly = assembly
        self._monitors = monitors
        self._components = {**components, "sync": assembly.sync, **monitors.components()}
        self._last = LastStep(context, assembly.policy, trainer, self._components)
        self._pace = Pace(assembly.recipe.run)

    @property
    def version(self) -> int:
        """Version of the policy's weights."""
        raise NotImplementedError

    def loop(self, first_step: int) -> tuple[Loop, StepLog]:
        """The loop, and the log of its steps.

        Args:
            first_step: first step that this process will log.
        """
        raise NotImplementedError

    def resumed(self, checkpoint: Checkpoint) -> None:
        """Called if the stage goes on from a checkpoint of its steps, instead of its beginning."""

    def close_step(self, step: int, metrics: Metrics) -> None:
        """Called at the end of every step, before a checkpoint of it is saved."""

    def ended(self) -> None:
        """Called after the last step."""

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore the progress and all components.

        Raises:
            UserError: if a component is missing, unknown or does not fit.
        """
        load_components(checkpoint, with_progress(self._context.state, self._components))

    def save(self, *, required: bool) -> None:
        """Save a checkpoint. required: as in `Saver.save`."""
        context = self._context
        with context.interrupts.finishing():
            registry = with_progress(context.state_now(), self._components)
            states = states_of(registry)
            context.saver.save("step", self._assembly.policy, registry, states, required=required)

    def reached_limit(self) -> Ending | None:
        """As the function."""
        return reached_limit(self._context, self._assembly.recipe.run, self._monitors.best)

    @contextmanager
    def steps(self) -> Iterator[Loop | None]:
        """Log the steps that are made inside. If one fails, save the last.

        Yields:
            The loop, whose steps end with `end_step`. None if a limit is reached already.

        Raises:
            Interrupted: if a signal stops the run in the middle of a step.
        """
        context, limits = self._context, self._assembly.recipe.run
        unlogged, context.state = context.state.unlogged, replace(context.state, unlogged={})
        loop, log = self.loop(context.state.step + (0 if unlogged else 1))
        limit_s = 60 * limits.max_minutes - context.seconds if limits.max_minutes else math.inf
        context.progress.stage(self.name, limits.steps, limit_s)
        try:
            self._last.mark(replace(context.state_now(), unlogged=unlogged))
            done = self.reached_limit() is not None
            if unlogged:
                log.close_step(context.state.step, unlogged, self.version)
                done = self.end_step(context.state.step, unlogged)
            yield None if done else loop
            context.phase("end")
        except (Exception, Interrupted) as error:
            with context.interrupts.finishing():
                self._last.save_after(error)
            raise
        finally:
            log.close()
        self.ended()

    def end_step(self, step: int, metrics: Metrics) -> bool:
        """Save a checkpoint if it is time.

        Returns:
            True if the run ends here.
        """
        context, every = self._context, self._assembly.recipe.checkpoint.every
        self.close_step(step, metrics)
        if slow := self._pace.observe(step, context.seconds):
            context.notes.add(step, slow, warning=True)
        best = self._monitors.best.observe(step, metrics)
        done = context.interrupts.stopping() or bool(self.reached_limit())
        if done or best or (every and step % every == 0):
            self.save(required=done)
        self._last.mark(context.state_now())
        return done


def reached_limit(context: RunContext, limits: RunConfig, best: BestSteps) -> Ending | None:
    """Limit that has been reached after the current step. All ranks get the answer of rank 0.

    Args:
        context: the run.
        limits: the recipe's [run] section.
        best: held-out accuracies.
    """
    state, seconds = context.state, context.seconds
    ended = why_ended(limits, state.step, state.ema, seconds, best=best.highest, waited=best.since)
    return context.ranks.gather(ended)[0]  # the ranks' clocks differ
