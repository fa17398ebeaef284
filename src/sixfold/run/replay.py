"""Recompute rewards, advantages, loss and gradient norm of a recorded step (`sixfold replay`).

The checkpoint before the step gives weights, optimizer and everything else that learns. The dump of
the step gives its trajectories. The training loop (`controller/loop.py`) makes the step, with a
collector that returns the recorded groups. Steps between checkpoint and step are replayed first.
The run's folder is only read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..algorithm.base import batch_metrics
from ..batch import Batch, Metrics
from ..checkpoint.checkpoint import Checkpoint, load_checkpoint
from ..checkpoint.listing import list_checkpoints
from ..checkpoint.manifest import OtherRelease
from ..checkpoint.registry import load_components
from ..checkpoint.state import RunState
from ..checkpointable import Checkpointable
from ..controller.loop import Controller
from ..errors import UserError
from ..files.folder import RunFolder
from ..recipe.resume_policy import allowed_changes
from ..recipe.schema import EnvironmentConfig, Recipe
from ..recipe.toml import load_recipe
from ..report.loggers import read_metrics
from ..report.metric import Value
from ..report.recorded_step import RecordedStep, read_step, replayable, steps_text
from ..report.replay import Line, Number, Sample, compare_columns, compare_metrics, verdict_of
from ..report.rewards import reward_metrics
from ..report.rollouts import dumped_steps
from ..report.schema import depends_on_time
from ..rollout.recorded import RecordedGroups, RecordedReplies
from ..types import Group
from .assemble import Assembly, assemble
from .inputs import Inputs, own_ends
from .rescoring import differing, rescored
from .step_log import first_advantages
from .trainable_roles import TrainableRoles, build_roles

FIRST_KEYS = ("train/loss", "train/pg_loss", "train/grad_norm")
"""Metrics at the top of the table."""


@dataclass
class Replayed:
    """Comparison of a step with its record.

    Attributes:
        checkpoint: name of the checkpoint from which the step was replayed.
        lines: numbers of the step.
        samples: trajectories that differ.
        earlier: first metric that differs in a step before this one, if such steps were replayed.
    """

    checkpoint: str
    lines: list[Line] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    earlier: str = ""

    @property
    def agrees(self) -> bool:
        """True if nothing differs by more than rounding."""
        return not self.samples and all(line.verdict != "DIFFERS" for line in self.lines)

    @property
    def verdict(self) -> str:
        """The result as one or two sentences."""
        if not self.agrees:
            first = f" {self.earlier} already differs." if self.earlier else ""
            return f"The step differs from its record.{first}"
        exact = all(line.verdict in ("equal", "not recorded") for line in self.lines)
        return f"The step agrees with its record{'' if exact else ' up to rounding'}."


def replay(
    folder: Path,
    step: int,
    *,
    new_rewards: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Replayed:
    """Recompute a step and compare it with its record.

    Args:
        folder: folder of the run. Nothing in it is changed.
        step: the step.
        new_rewards: train on the recomputed rewards instead of the recorded ones.
        say: receives progress and warnings.

    Raises:
        UserError: if the step is not recorded, if there is no usable checkpoint before it, or if
            rewards or tasks are not available.
    """
    run = RunFolder(folder)
    recipe = load_recipe(str(run.recipe))
    checkpoint = _checkpoint_before(run, step, say)
    _check_inputs(checkpoint, recipe, say)
    say(f"loading {checkpoint.path.name}")
    world = assemble(
        recipe.model_copy(update={"environment": _without_limits(recipe.environment)}),
        str(checkpoint.model_path),
        own_ends=own_ends(checkpoint),
        generator=RecordedReplies(),
    )
    if world.judge:
        world.judge.reuse(run.path)
    try:
        return _Replay(run, world, checkpoint, say).compare(step, new_rewards)
    finally:
        world.close()


def _without_limits(environment: EnvironmentConfig) -> EnvironmentConfig:
    """Without an error budget. Failed checks are shown and do not end the replay."""
    return environment.model_copy(update={"error_budget": 1.0})


def _checkpoint_before(run: RunFolder, step: int, say: Callable[[str], None]) -> Checkpoint:
    """Newest intact checkpoint before the step, if all steps from it on are recorded.

    Raises:
        UserError: says why the step cannot be replayed, and which steps can.
    """
    recorded = set(dumped_steps(run.rollouts))
    found: list[tuple[int, Path]] = []
    for path in list_checkpoints(run.checkpoints):
        stage, _, at = path.name.partition("-")
        if stage == "step":
            found.append((int(at), path))
    can = f"Steps that can be replayed: {steps_text(replayable(recorded, [n for n, _ in found]))}"
    if step not in recorded:
        raise UserError(
            f"step {step} is not recorded in {run.rollouts}: log.rollouts_every leaves it out, or"
            f" the run has not reached it. {can}"
        )
    for last, path in reversed([each for each in found if each[0] < step]):
        if missing := [n for n in range(last + 1, step) if n not in recorded]:
            raise UserError(
                f"step {step} cannot be replayed: the checkpoint before it is {path.name}, and"
                f" {steps_text(missing)} between are not recorded (log.rollouts_every). {can}"
            )
        try:
            return load_checkpoint(path)
        except OtherRelease:
            raise
        except UserError as error:
            say(f"skipping a checkpoint that cannot be read: {error}")
    raise UserError(
        f"step {step} cannot be replayed: there is no intact checkpoint before it; raise"
        f" checkpoint.keep to keep older ones. {can}"
    )


def _check_inputs(checkpoint: Checkpoint, recipe: Recipe, say: Callable[[str], None]) -> None:
    """Check that the recipe has the rewards and the algorithm of the run. List changed settings.

    Raises:
        UserError: if the run's rewards or its algorithm came from Python.
    """
    saved = Inputs.of(checkpoint)
    names = [name for name, _ in saved.rewards][: len(recipe.environment.rewards)]
    if names != [*recipe.environment.rewards]:
        raise UserError(
            f"the run was started from Python with the reward {', '.join(names)}, which is not in"
            " its recipe, so the step cannot be replayed. In new runs, put the reward into a file"
            " and name it in environment.rewards"
        )
    if saved.own_algorithm:
        raise UserError(
            f"the run was started from Python with the algorithm {saved.own_algorithm}, which is"
            " not in its recipe, so the step cannot be replayed. In new runs, choose a method by"
            " algorithm.name"
        )
    for change in allowed_changes(saved.settings, recipe, warming_up=False):
        say(f"setting changed since {checkpoint.path.name}: {change}")


@dataclass
class _Replay:
    """One replay, from its checkpoint on.

    Attributes:
        run: folder of the run.
        world: model, tasks and environment.
        checkpoint: checkpoint from which the replay starts.
        say: receives progress and warnings.
    """

    run: RunFolder
    world: Assembly
    checkpoint: Checkpoint
    say: Callable[[str], None]
    _recorded: RecordedGroups = field(default_factory=RecordedGroups)
    _batch: Batch | None = None

    def __post_init__(self) -> None:
        self._metrics = {_step(m): m for m in read_metrics(self.run.metrics)}
        self._tasks = {task.id: task for task in self.world.tasks.train}
        self._result = Replayed(self.checkpoint.path.name)

    def compare(self, step: int, new_rewards: bool) -> Replayed:
        """Replay all steps up to `step`, and compare `step` with its record."""
        learners, result = self._learners(), self._result
        controller = self._controller(learners)
        if RunState.of(self.checkpoint).unlogged:
            self._end_of(self.checkpoint.step, learners)
        for earlier in range(self.checkpoint.step + 1, step):
            self.say(f"replaying step {earlier} first")
            lines = self._trained(controller, self._read(earlier))
            wrong = next((line.what for line in lines if line.verdict == "DIFFERS"), "")
            if wrong and not result.earlier:
                result.earlier = f"{wrong} of step {earlier}"
            self._end_of(earlier, learners)
        recorded = self._read(step)
        scored = self._rewards(recorded)
        self.say("recomputing advantages, loss and gradient norm")
        groups = scored if new_rewards else recorded.groups
        lines = self._trained(controller, replace(recorded, groups=groups))
        advantages = self._advantages(recorded, groups)
        result.lines += [advantages, *lines]
        return result

    def _read(self, step: int) -> RecordedStep:
        read = read_step(self.run.rollout_file(step), self._tasks)
        for note in read.notes:
            self.say(f"step {step}: {note}")
        return read

    def _learners(self) -> TrainableRoles:
        """Build the trainer, the critic and the reference, and restore them from the checkpoint."""
        learners = build_roles(self.world)
        registry: dict[str, Checkpointable] = learners.components()
        saved = self.checkpoint.payload
        own = replace(
            saved,
            components={n: state for n, state in saved.components.items() if n in registry},
            tensors={n: t for n, t in saved.tensors.items() if n.partition("/")[0] in registry},
        )
        load_components(replace(self.checkpoint, payload=own), registry)
        return learners

    def _controller(self, learners: TrainableRoles) -> Controller:
        def keep(step: int, groups: Sequence[Group], batch: Batch, metrics: Metrics) -> None:
            self._batch = batch

        return Controller(
            collector=self._recorded,
            reference=learners.scorers,
            algorithm=learners.algorithm,
            trainer=learners.trainer,
            sync=_NoSync(),
            tasks=lambda step: [group.task for group in self._recorded.groups],
            seed=lambda step: 0,
            log=keep,
            device=self.world.device,
            steps_done=self.checkpoint.step,
        )

    def _trained(self, controller: Controller, recorded: RecordedStep) -> list[Line]:
        """Train on the groups of the next step, and compare the metrics with the record."""
        self._recorded.groups = recorded.groups
        metrics = controller.step()
        metrics |= reward_metrics(recorded.groups) | batch_metrics(self._trained_batch())
        known: dict[str, Value] = self._metrics.get(controller.steps_done, {})
        if not known:
            self.say(f"{self.run.metrics} has no line for step {controller.steps_done}")
        keys = [key for key in metrics if not depends_on_time(key)]
        keys.sort(key=lambda key: (key not in FIRST_KEYS, key))
        return compare_metrics(known, metrics, keys)

    def _trained_batch(self) -> Batch:
        if self._batch is None:
            raise RuntimeError("the loop has not given its batch to the log")
        return self._batch

    def _end_of(self, step: int, learners: TrainableRoles) -> None:
        """Do what a run does after a step: copy the policy into the reference if it is time."""
        heldout = self._metrics.get(step, {}).get("heldout/accuracy")
        learners.reset_reference(step, heldout if isinstance(heldout, float) else None)

    def _rewards(self, recorded: RecordedStep) -> list[Group]:
        """Recompute the rewards. The comparison is added to the result.

        Returns:
            The groups with recomputed rewards.
        """
        count = sum(len(group.trajectories) for group in recorded.groups)
        self.say(f"recomputing the rewards of {count} trajectories")
        again = self.world.loop.run(rescored(self.world, recorded.groups))
        before: list[Number] = [r for group in recorded.groups for r in group.rewards]
        after: list[Number] = [r for group in again.groups for r in group.rewards]
        self._result.lines.append(compare_columns("reward", before, after))
        self._result.samples += differing(recorded.groups, again)
        return again.groups

    def _advantages(self, recorded: RecordedStep, groups: Sequence[Group]) -> Line:
        """Compare the advantages. Trajectories that differ are added to the result."""
        new = [a for of_group in first_advantages(groups, self._trained_batch()) for a in of_group]
        old = [a for of_group in recorded.advantages for a in of_group]
        trajectories = [t for group in groups for t in group.trajectories]
        for trajectory, before, after in zip(trajectories, old, new, strict=True):
            if verdict_of(before, after) == "DIFFERS":
                sample = str(trajectory.sample)
                self._result.samples.append(
                    Sample(trajectory.task_id, sample, "advantage", before, after)
                )
        line = compare_columns("advantage", old, new)
        sizes = [[abs(a) for a in side] for side in (old, new)]
        means = compare_columns("|advantage|", *sizes)
        return replace(means, difference=line.difference, verdict=line.verdict)


class _NoSync:
    """Weight sync of a replay, which has no sampler."""

    def sync(self, version: int) -> None:
        """Do nothing."""


def _step(metrics: Mapping[str, Value]) -> int:
    """Step of a line of metrics.jsonl."""
    step = metrics["step"]
    if not isinstance(step, int | float):
        raise TypeError(f"the step of a line of metrics.jsonl is {step!r}")
    return int(step)
