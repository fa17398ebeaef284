"""The RL stage of a run: the loop over six roles, what precedes it, and the reference's resets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from ..algorithm.base import Algorithm
from ..batch import Metrics
from ..checkpoint.best import BestSteps
from ..checkpoint.checkpoint import Checkpoint
from ..checkpointable import WithoutTensors
from ..controller.asynchronous import AdmittingSync
from ..controller.collector import Collects
from ..controller.dead_letters import DeadLetters
from ..controller.loop import Controller
from ..controller.replay_buffer import ReplayBuffer, ReplayingCollector
from ..controller.step_rewards import StepRewardsCollector
from ..controller.stream import step_seed, task_stream
from ..data.task_set import few_tasks_notes
from ..errors import UserError
from ..recipe.algorithm_plan import check_recomputed
from ..recipe.checks import check_placement
from ..recipe.schema import Recipe, ReplayConfig
from ..report.alarms import Alarms
from ..sync.measured import MeasuredSync
from ..types import Task
from .assemble import Assembly
from .asynchronous import Schedule, async_collector, ledger_of
from .context import RunContext
from .curriculum import make_curriculum, never_judged
from .inputs import Inputs
from .monitors import Monitors
from .resume import rate_change
from .step_log import RolloutLog
from .trainable_roles import TrainableRoles, build_roles, method_of, teacher_of, training_collector
from .training import TrainingStage
from .warm_up import warm_up
from .work import Work


class RlWork(Work):
    """Work of a run that samples and learns from rewards, after SFT if the recipe has it.

    Args:
        recipe: the whole run.
        algorithm: replaces the recipe's algorithm.
        stop_after: stage after which the run ends.
        words: rewrites a line that names command-line flags for the caller's interface.
        schedule: the schedule of an asynchronous run to replay, or None.
    """

    predicted = True
    ahead = True

    def __init__(
        self,
        recipe: Recipe,
        algorithm: Algorithm | None = None,
        stop_after: Literal["sft"] | None = None,
        words: Callable[[str], str] = str,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__(method_of(recipe.algorithm, algorithm))
        self.algorithm = algorithm
        self.steps = stop_after != "sft"
        self.words = words
        self.schedule = schedule
        # Check here: a plan has checked the recipe's method, but not the caller's.
        check_recomputed(recipe, self.method)
        check_placement(recipe, self.method)
        if recipe.sft.epochs:
            raise UserError(
                f"sft.epochs = {recipe.sft.epochs} counts passes of a stage of kind sft, and this"
                " recipe has no stages. Set sft.steps for a warm-up, or add [[stages]]"
            )

    def load(self, assembly: Assembly) -> None:
        self._teacher = teacher_of(assembly, self.algorithm)
        per_step = assembly.recipe.rollout.prompts_per_step
        assembly.tasks.notes += few_tasks_notes(assembly.tasks, per_step)

    def monitors(self, best: BestSteps) -> Monitors:
        return Monitors(best, Alarms(self.method.equal_rewards_idle))

    def begin(self, context: RunContext, assembly: Assembly, checkpoint: Checkpoint | None) -> None:
        warm_up(context, assembly, self.method, checkpoint)

    def stage(self, context: RunContext, assembly: Assembly, monitors: Monitors) -> RlStage:
        roles = build_roles(assembly, self.algorithm, self._teacher)
        return RlStage(context, assembly, monitors, roles, self.schedule)


def replay_buffer(config: ReplayConfig, tasks: Sequence[Task]) -> ReplayBuffer | None:
    """The replay buffer of a run, or None."""
    if not config.share:
        return None
    by_id = {task.id: task for task in tasks}
    limits = config.capacity, config.max_ratio
    return ReplayBuffer(config.share, config.max_age, config.gamma, *limits, by_id)


class RlStage(TrainingStage):
    """Trains with the six roles.

    Args:
        context: the run.
        assembly: model, tasks and settings.
        monitors: watch the metrics.
        roles: roles that are trained or saved.
        schedule: the schedule of an asynchronous run to replay, or None.
    """

    name = "RL"

    def __init__(
        self,
        context: RunContext,
        assembly: Assembly,
        monitors: Monitors,
        roles: TrainableRoles,
        schedule: Schedule | None = None,
    ) -> None:
        components = roles.components()
        if ledger := ledger_of(assembly, schedule):
            components["ledger"] = WithoutTensors(ledger)
        if buffer := replay_buffer(assembly.recipe.replay, assembly.tasks.train):
            components["replay"] = WithoutTensors(buffer)
        # A replay trains the groups of its schedule, of which none was set aside.
        most, tasks = assembly.recipe.rollout.max_failures, assembly.tasks
        self._dead = DeadLetters(0 if schedule else most, tasks.train, tasks.weights)
        if most:
            components["dead_letters"] = WithoutTensors(self._dead)
        self._curriculum = make_curriculum(
            assembly, self._dead, context.state.step > 0, context.warn
        )
        if self._curriculum:
            components["curriculum"] = WithoutTensors(self._curriculum)
            rounds = roles.method.dynamic_sampling
            if text := never_judged(self._curriculum, assembly, rounds):
                context.warn(text)
        super().__init__(context, assembly, monitors, roles.policy, components)
        self._roles = roles
        self._timeline = context.timeline = assembly.player.timeline
        self._running = (
            async_collector(assembly, ledger, self._dead, roles.method, self._curriculum)
            if ledger
            else None
        )
        self._buffer = buffer

    @property
    def version(self) -> int:
        return self._roles.trainer.version

    def loop(self, first_step: int) -> tuple[Controller, RolloutLog]:
        sync = MeasuredSync(self._assembly.sync)
        log = RolloutLog(
            self._context,
            self._assembly,
            self._monitors,
            first_step,
            self._roles,
            self._last,
            sync,
            (lambda: running.scheduled) if (running := self._running) else None,
            self._dead,
            self._curriculum,
        )
        self._log = log
        return self._controller(log, sync), log

    def save(self, *, required: bool) -> None:
        self._timeline.phase("checkpoint")
        super().save(required=required)

    def end_step(self, step: int, metrics: Metrics) -> bool:
        """As `TrainingStage.end_step`. The newest steps are written to the trace."""
        done = super().end_step(step, metrics)
        self._timeline.end_step(step)
        if self._timeline.steps and step % self._timeline.steps == 0:
            self._log.write_trace()
        return done

    def resumed(self, checkpoint: Checkpoint) -> None:
        """Warn if changed settings make a learning rate jump."""
        saved = Inputs.of(checkpoint).settings
        trainers = [(self._roles.policy, "trainer.learning_rate")]
        if critic := self._roles.critic:
            trainers.append((critic.trainer, "critic.learning_rate"))
        steps, updates = self._assembly.recipe.run.steps, self._roles.method.updates
        for trainer, setting in trainers:
            if text := rate_change(saved, steps, trainer, updates, setting):
                self._context.warn(text)

    def close_step(self, step: int, metrics: Metrics) -> None:
        """Reset the reference if it is time."""
        heldout = metrics.get("heldout/accuracy")
        if why := self._roles.reset_reference(
            step, heldout if isinstance(heldout, float) else None
        ):
            self._context.progress.note(
                f"step {step}: copied the policy into the reference ({why})"
            )

    def ended(self) -> None:
        if self._running:
            self._running.stop()
        if self._roles.critic:
            self._roles.critic.save(self._context.folder.path / "critic")

    def _controller(self, log: RolloutLog, sync: MeasuredSync) -> Controller:
        context, assembly, roles = self._context, self._assembly, self._roles
        recipe, tasks = assembly.recipe, assembly.tasks
        collector: Collects = self._running or training_collector(
            assembly, roles.method, self._dead, self._curriculum
        )
        if roles.method.advantage == "process":
            collector = StepRewardsCollector(
                collector,
                lambda line: context.notes.add(context.state.step + 1, line, warning=True),
                expected=not (recipe.environment.several_turns or context.state.step),
            )
        if self._buffer:
            collector = ReplayingCollector(collector, self._buffer)
        # A run ahead ends the steps of its curriculum itself, before new groups start.
        told = self._running or self._curriculum
        after = AdmittingSync(sync, told) if told else sync
        drawn = None if self._running else self._curriculum
        return Controller(
            collector=collector,
            reference=roles.scorers,
            algorithm=roles.algorithm,
            trainer=roles.trainer,
            sync=after,
            tasks=drawn
            or task_stream(
                tasks.train,
                recipe.rollout.prompts_per_step,
                recipe.run.seed,
                tasks.weights,
                recipe.data.whole_steps,
            ),
            seed=lambda step: step_seed(recipe.run.seed, step),
            log=self._buffer.before(log.log) if self._buffer else log.log,
            on_phase=lambda role: context.phase(
                (roles.scoring or "batch") if role == "reference" else role
            ),
            device=assembly.device,
            steps_done=context.state.step,
        )
