"""The RL stage of a run: the loop with its step log, its checkpoints and its end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..batch import Metrics
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.registry import load_components, states_of
from ..checkpoint.state import with_progress
from ..controller.loop import Controller
from ..controller.stream import step_seed, task_stream
from ..recipe.schema import RunConfig
from ..sync.measured import MeasuredSync
from .assemble import Assembly
from .context import RunContext
from .ending import Ending, Pace, why_ended
from .interrupts import Interrupted
from .last_step import LastStep
from .monitors import Monitors
from .resume import rate_change
from .step_log import StepLog
from .trainable_roles import TrainableRoles, training_collector


class RlStage:
    """Trains with the six roles until a limit of the recipe's [run] section is reached.

    Args:
        context: the run.
        assembly: model, tasks and settings.
        monitors: watch the metrics.
        roles: roles that are trained or saved.
    """

    def __init__(
        self, context: RunContext, assembly: Assembly, monitors: Monitors, roles: TrainableRoles
    ) -> None:
        self._context = context
        self._assembly = assembly
        self._monitors = monitors
        self._roles = roles
        self._components = {
            **roles.components(),
            "sync": assembly.sync,
            **monitors.components(),
        }
        self._last = LastStep(context, assembly.policy, roles.policy, self._components)
        self._pace = Pace(assembly.recipe.run)

    @property
    def version(self) -> int:
        """Version of the policy's weights."""
        return self._roles.trainer.version

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore the progress and all components.

        Raises:
            UserError: if a component is missing, unknown or does not fit.
        """
        load_components(checkpoint, with_progress(self._context.state, self._components))

    def warn_of_rates(self, saved: Mapping[str, Any]) -> None:
        """Warn if changed settings make a learning rate jump.

        Args:
            saved: settings of the run that made the checkpoint, by dotted key.
        """
        trainers = [(self._roles.policy, "trainer.learning_rate")]
        if critic := self._roles.critic:
            trainers.append((critic.trainer, "critic.learning_rate"))
        steps, updates = self._assembly.recipe.run.steps, self._roles.method.updates
        for trainer, setting in trainers:
            if text := rate_change(saved, steps, trainer, updates, setting):
                self._context.warn(text)

    def save(self, *, required: bool) -> None:
        """Save a checkpoint. required: as in `Saver.save`."""
        context = self._context
        with context.interrupts.finishing():
            registry = with_progress(context.state_now(), self._components)
            states = states_of(registry)
            context.saver.save("step", self._assembly.policy, registry, states, required=required)

    @contextmanager
    def steps(self) -> Iterator[Controller | None]:
        """Log the steps that are made inside. If one fails, save the last.

        Yields:
            The loop, whose steps end with `end_step`. None if a limit is reached already.

        Raises:
            Interrupted: if a signal stops the run in the middle of a step.
        """
        context, limits = self._context, self._assembly.recipe.run
        unlogged, context.state = context.state.unlogged, replace(context.state, unlogged={})
        sync = MeasuredSync(self._assembly.sync)
        first_step = context.state.step + (0 if unlogged else 1)
        log = StepLog(
            context, self._assembly, self._roles, self._monitors, self._last, sync, first_step
        )
        controller = self._controller(log, sync)
        limit_s = 60 * limits.max_minutes - context.seconds if limits.max_minutes else math.inf
        context.progress.stage("RL", limits.steps, limit_s)
        try:
            self._last.mark(replace(context.state_now(), unlogged=unlogged))
            done = reached_limit(context, limits) is not None
            if unlogged:
                log.close_step(context.state.step, unlogged, self.version)
                done = self.end_step(context.state.step, unlogged)
            yield None if done else controller
            context.phase("end")
        except (Exception, Interrupted) as error:
            with context.interrupts.finishing():
                self._last.save_after(error)
            raise
        finally:
            log.close()
        if self._roles.critic:
            self._roles.critic.save(context.folder.path / "critic")

    def end_step(self, step: int, metrics: Metrics) -> bool:
        """Reset the reference and save a checkpoint if it is time.

        Returns:
            True if the run ends here.
        """
        context, every = self._context, self._assembly.recipe.checkpoint.every
        heldout = metrics.get("heldout/accuracy")
        if why := self._roles.reset_reference(
            step, heldout if isinstance(heldout, float) else None
        ):
            context.progress.note(f"step {step}: copied the policy into the reference ({why})")
        if slow := self._pace.observe(step, context.seconds):
            context.notes.add(step, slow, warning=True)
        done = context.interrupts.stopping() or bool(
            reached_limit(context, self._assembly.recipe.run)
        )
        best = self._monitors.best.observe(step, metrics)
        if done or best or (every and step % every == 0):
            self.save(required=done)
        self._last.mark(context.state_now())
        return done

    def _controller(self, log: StepLog, sync: MeasuredSync) -> Controller:
        context, assembly, roles = self._context, self._assembly, self._roles
        recipe, tasks = assembly.recipe, assembly.tasks
        return Controller(
            collector=training_collector(assembly, roles.method),
            reference=roles.scorers,
            algorithm=roles.algorithm,
            trainer=roles.trainer,
            sync=sync,
            tasks=task_stream(
                tasks.train, recipe.rollout.prompts_per_step, recipe.run.seed, tasks.weights
            ),
            seed=lambda step: step_seed(recipe.run.seed, step),
            log=log.log,
            on_phase=lambda role: context.phase(
                (roles.scoring or "batch") if role == "reference" else role
            ),
            device=assembly.device,
            steps_done=context.state.step,
        )


def reached_limit(context: RunContext, limits: RunConfig) -> Ending | None:
    """Limit that RL has reached after the current step. All ranks get the answer of rank 0."""
    state = context.state
    ended = why_ended(limits, state.step, state.ema, context.seconds)
    return context.ranks.gather(ended)[0]  # the ranks' clocks differ
