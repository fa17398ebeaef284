"""Run a recipe: build the roles, warm up, train, evaluate and write the report.

A run can resume after any crash. The metrics and rollouts of a step are written before the
checkpoint that covers them. A resume deletes everything after the checkpoint and reproduces it bit
for bit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from ..algorithm.base import Algorithm
from ..batch import Metrics
from ..checkpoint.best import BestSteps
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.registry import load_components, states_of
from ..checkpoint.saver import Saver
from ..checkpoint.state import RunState, with_progress
from ..checkpointable import Checkpointable, WithoutTensors
from ..controller.loop import Controller
from ..controller.stream import step_seed, task_stream
from ..data.task_set import given_tasks
from ..environment.episode import MakeEpisode
from ..evaluation.divergence import Divergence
from ..files.durable import write_text_atomic
from ..files.folder import RunFolder, check_free, create_run, open_run, recover
from ..model.device import resolve_device
from ..ranks import Ranks, torchrun_ranks
from ..recipe.algorithm_plan import check_recomputed
from ..recipe.dump import dump_recipe
from ..recipe.schema import Recipe
from ..report.alarms import Alarms
from ..report.learning import Learning
from ..report.loggers import read_metrics
from ..report.notes import Notes
from ..report.progress import Progress
from ..sync.measured import MeasuredSync
from ..types import Task
from .assemble import World, build_world
from .ending import Ending, how_to_go_on, why_ended
from .finish import finish
from .inputs import Inputs, check_same, inputs_of, own_ends
from .interrupts import Interrupted, Interrupts
from .isolation import announce_isolation
from .last_step import LastStep, failures_in_words, last_ending, what_is_left, where_it_stopped
from .learners import Learners, build_learners, method_of, teacher_of, training_collector
from .predict import write_prediction
from .recipe_judge import keep_answers
from .resume import cut_after, find_checkpoint
from .several_ranks import (
    check_supported,
    copy_records,
    follower_folder,
    quiet,
    quiet_progress,
    remove_followers,
)
from .step_log import StepLog
from .warm_up import tried, warm_up


def train_run(
    recipe: Recipe,
    *,
    resume: Path | None = None,
    overwrite: bool = False,
    stop_after: Literal["sft"] | None = None,
    reward: Callable[..., Any] | None = None,
    environment: MakeEpisode | None = None,
    algorithm: Algorithm | None = None,
    tasks: Sequence[Task] | None = None,
    heldout: Sequence[Task] = (),
    words: Callable[[str], str] = str,
) -> int:
    """Run a recipe, or resume an earlier run.

    Args:
        recipe: the whole run.
        resume: folder of the run to resume.
        overwrite: replace an earlier run of the same name.
        stop_after: stage after which the run ends.
        reward: replaces the recipe's rewards. For this and the following see `sixfold.train`.
        environment: the environment that `environment.episode` names. None: load it.
        algorithm: replaces the recipe's algorithm.
        tasks: replace the recipe's dataset.
        heldout: held-out tasks, used with `tasks`.
        words: rewrites a line that names command-line flags for the caller's interface.

    Returns:
        The exit code: 0, or 130 / 143 if stopped by a signal.

    Raises:
        UserError: for an error that the user can fix.
    """
    started = time.perf_counter()
    # Check here: a plan has checked the recipe's method, but not the caller's.
    check_recomputed(recipe, method_of(recipe, algorithm))
    given = None if tasks is None else given_tasks(tasks, heldout)
    directory, name = Path(recipe.run.dir), recipe.run.name
    run = RunFolder(resume or directory / name)
    ranks = torchrun_ranks(
        resolve_device(recipe.run.device, "run.device"), recipe.parallel.timeout_s
    )
    with ExitStack() as stack:
        stack.enter_context(ranks.ending_together(partial(what_is_left, run)))
        progress = stack.enter_context(quiet_progress() if ranks.rank else Progress())
        interrupts = stack.enter_context(Interrupts(progress.note, ranks))
        stack.enter_context(failures_in_words(recipe, run, progress))
        check_supported(recipe, method_of(recipe, algorithm), ranks)
        recipe = quiet(recipe) if ranks.rank else recipe
        announce_isolation(recipe, progress.note)
        try:
            checkpoint = None
            if resume:
                run = open_run(resume)
                if not ranks.rank:
                    stack.enter_context(run)
                checkpoint = find_checkpoint(run, recipe, progress.note)
            elif not ranks.rank:
                recover(directory / name)
                check_free(directory, name, overwrite)
            progress.phase("loading")
            source = str(checkpoint.model_path) if checkpoint else ""
            world = build_world(
                recipe,
                source,
                reward=reward,
                episode=environment,
                tasks=given,
                own_ends=own_ends(checkpoint),
                ranks=ranks,
            )
            stack.callback(world.close)
            teacher = teacher_of(world, algorithm)
            inputs = inputs_of(world, reward, algorithm)
            state = RunState.of(checkpoint) if checkpoint else RunState()
            if checkpoint:
                for note in check_same(checkpoint, inputs, evaluated=bool(state.before)):
                    progress.note(note)
            run = _tried_folder(stack, run, world, resume is None, overwrite, progress)
            work = Run(
                recipe,
                run,
                world,
                inputs,
                progress,
                interrupts,
                started - state.seconds,
                algorithm,
                teacher,
                words,
                state,
            )
            stack.callback(work.saver.settle)
            work.go(checkpoint, stop_after)
        except Interrupted:
            pass
        if interrupts.exit_code:
            progress.note(words(where_it_stopped(run)))
        return interrupts.exit_code


def _tried_folder(
    stack: ExitStack,
    run: RunFolder,
    world: World,
    new: bool,
    overwrite: bool,
    progress: Progress,
) -> RunFolder:
    """Try the rewards, then open the folder in which this rank writes.

    A judge knows its earlier answers before it is tried. A new run keeps its answers only after.

    Args:
        stack: closes the folder.
        run: the run. Rank 0 holds its lock if it is resumed.
        world: the rewards with their judge.
        new: create the run.
        overwrite: replace an earlier run of this name.
        progress: receives warnings.
    """
    folder, ranks = run.path, world.ranks
    if not new:
        keep_answers(world.judge, folder, ranks.rank)
    if warning := tried(world):
        progress.note(warning)
    run = _own_folder(stack, run, new, overwrite, ranks, progress)
    if new:
        keep_answers(world.judge, folder, ranks.rank)
    return run


def _own_folder(
    stack: ExitStack,
    run: RunFolder,
    new: bool,
    overwrite: bool,
    ranks: Ranks,
    progress: Progress,
) -> RunFolder:
    """Open the folder in which this rank writes: the run's for rank 0, else a temporary one.

    Call this after all checks: a mistake in the recipe must not create or move any folder.

    Args:
        stack: closes the folder.
        run: the run. Rank 0 holds its lock if it is resumed.
        new: create the run.
        overwrite: replace an earlier run of this name.
        ranks: the ranks of the run.
        progress: receives a message about a run that was replaced.
    """
    if new and not ranks.rank:
        run = stack.enter_context(create_run(run.path.parent, run.path.name, overwrite))
        stack.callback(
            lambda: progress.note(run.says_of_earlier()) if run.says_of_earlier() else None
        )
    if not ranks.rank:
        remove_followers(run.path)
    ranks.barrier("the run folder")
    return stack.enter_context(follower_folder(run.path, ranks.rank)) if ranks.rank else run


@dataclass
class Run:
    """Work of one process on a run."""

    recipe: Recipe
    run: RunFolder
    world: World
    inputs: Inputs
    progress: Progress
    interrupts: Interrupts
    started: float
    algorithm: Algorithm | None
    teacher: PreTrainedModel | None = None
    words: Callable[[str], str] = str
    state: RunState = field(default_factory=RunState)
    alarms: Alarms = field(default_factory=Alarms)
    divergence: Divergence = field(default_factory=Divergence)
    learning: Learning = field(default_factory=Learning)

    def __post_init__(self) -> None:
        self.notes = Notes(self.run.path, self.progress.note)
        self.best = BestSteps(self.recipe.checkpoint.keep_best)
        self.saver = Saver(
            self.run.checkpoints,
            self.world.ranks,
            self.recipe.checkpoint,
            asdict(self.inputs),
            self.best,
            lambda text: self.notes.add(self.state.step, text, warning=True),
        )
        self.alarms.group_baseline = method_of(self.recipe, self.algorithm).equal_rewards_idle

    def _prepare(self, checkpoint: Checkpoint | None) -> None:
        """Delete output after the checkpoint, and record the recipe and versions."""
        if self.world.ranks.rank:
            self.world.ranks.barrier("the records of the run")
            copy_records(self.run)
            return
        cut_after(self.run, checkpoint, self.state, self.progress.note)
        self.notes.cut_after(self.state.step if checkpoint and checkpoint.stage == "step" else None)
        write_text_atomic(self.run.recipe, dump_recipe(self.recipe))
        self.run.write_environment(
            sys.argv, {**self.world.policy.hub_commits, **self.world.tasks.hub_commits}
        )
        self.alarms.prediction = write_prediction(
            self.run.path,
            self.recipe,
            device=self.world.device,
            ranks=self.world.ranks.size,
            step=self.state.step,
        )
        self.world.ranks.barrier("the records of the run")

    def go(self, checkpoint: Checkpoint | None, stop_after: Literal["sft"] | None) -> None:
        """Run the stages that the checkpoint lacks: SFT, first evaluation, RL and report.

        Raises:
            Interrupted: if a signal stops the run.
        """
        learners: Learners | None = None
        ending: Ending | None = None
        if checkpoint and checkpoint.stage == "step":
            ending = self._earlier_ending()
            # First: a checkpoint that is refused must leave the run folder as it is.
            learners = None if ending else self._restored(checkpoint)
        if ending:  # before the recipe is written: nothing was trained under its settings
            note = f"already finished: {ending.text}; {self.words(how_to_go_on(ending))}"
            self.progress.note(note)
            self.run.end()
            return
        self._prepare(checkpoint)
        for note in self.world.tasks.notes:
            self.progress.note(note)
        if learners:
            self.watch()
        else:
            warm_up(self, checkpoint)
            learners = build_learners(self.world, self.algorithm, self.teacher)
            self._save(learners, required=True)
        if stop_after != "sft":
            self._loop(learners)
            if learners.critic:
                learners.critic.save(self.run.path / "critic")
        finish(
            self,
            self._ended(self.state.step) if stop_after != "sft" else None,
            learners.trainer.version,
        )
        with self.interrupts.finishing():
            self.run.end()

    def _restored(self, checkpoint: Checkpoint) -> Learners:
        """Learners with the state of a checkpoint of RL."""
        learners = build_learners(self.world, self.algorithm, self.teacher)
        load_components(checkpoint, self.registry(learners, self.state))
        return learners

    def _earlier_ending(self) -> Ending | None:
        """Limit at which an earlier process ended the run. None if the run has not ended."""
        ending = self._ended(self.state.step)
        if not ending or self.state.unlogged or last_ending(self.run) != ending.step:
            return None
        return ending

    def _loop(self, learners: Learners) -> None:
        recipe = self.recipe
        unlogged, self.state = self.state.unlogged, replace(self.state, unlogged={})
        last = LastStep(self, learners)
        sync = MeasuredSync(self.world.sync)
        step_log = StepLog(self, learners, last, sync, self.state.step + (0 if unlogged else 1))
        stream = task_stream(
            self.world.tasks.train,
            recipe.rollout.prompts_per_step,
            recipe.run.seed,
            self.world.tasks.weights,
        )
        controller = Controller(
            collector=training_collector(self.world, self.algorithm),
            reference=learners.scorers,
            algorithm=learners.algorithm,
            trainer=learners.trainer,
            sync=sync,
            tasks=stream,
            seed=lambda step: step_seed(recipe.run.seed, step),
            log=step_log.log,
            on_phase=lambda role: self.phase(
                (learners.scoring or "batch") if role == "reference" else role
            ),
            device=self.world.device,
            steps_done=self.state.step,
        )

        def until(step: int, metrics: Metrics) -> bool:
            heldout = metrics.get("heldout/accuracy")
            if why := learners.reset_reference(
                step, heldout if isinstance(heldout, float) else None
            ):
                self.progress.note(f"step {step}: copied the policy into the reference ({why})")
            done = self.interrupts.stopping() or self._ended(step) is not None
            best = self.best.look(step, metrics)
            if done or best or (recipe.checkpoint.every and step % recipe.checkpoint.every == 0):
                self._save(learners, required=done)
            last.mark(self.state_now())
            return done

        self.progress.stage("RL", recipe.run.steps)
        try:
            last.mark(replace(self.state_now(), unlogged=unlogged))
            done = self._ended(self.state.step) is not None
            if unlogged:
                step_log.close_step(self.state.step, unlogged, learners.trainer.version)
                done = until(self.state.step, unlogged)
            if not done:
                controller.run(until)
            self.phase("end")
        except (Exception, Interrupted) as error:
            with self.interrupts.finishing():
                last.save_after(error)
            raise
        finally:
            step_log.close()

    def phase(self, name: str) -> None:
        """Announce a phase. From the trainer on, an interrupted step is finished first."""
        self.progress.phase(name)
        self.saver.check()
        self.interrupts.finish_first(name in ("trainer", "sync", "log"))

    def _ended(self, step: int) -> Ending | None:
        seconds = time.perf_counter() - self.started
        ended = why_ended(self.recipe.run, step, self.state.ema, seconds)
        return self.world.ranks.gather(ended)[0]  # the ranks' clocks differ

    def watch(self) -> None:
        """Start to track learning, from the first evaluation and the steps before a resume."""
        before = self.state.before
        self.learning = Learning((before["accuracy"], *before["interval"]) if before else None)
        if self.state.step:
            self.learning.replay(read_metrics(self.run.metrics))
            self.best.replay(read_metrics(self.run.metrics))

    def state_now(self) -> RunState:
        """Current progress, with the wall time."""
        return replace(self.state, seconds=time.perf_counter() - self.started)

    def registry(self, learners: Learners, state: RunState) -> dict[str, Checkpointable]:
        """Components that a checkpoint of RL stores.

        Args:
            learners: roles of the loop that have state.
            state: progress to store or to restore.
        """
        others: dict[str, Checkpointable] = {
            **learners.components(),
            "sync": self.world.sync,
            "alarms": WithoutTensors(self.alarms),
            "divergence": WithoutTensors(self.divergence),
        }
        return with_progress(state, others)

    def _save(self, learners: Learners, *, required: bool) -> None:
        with self.interrupts.finishing():
            registry = self.registry(learners, self.state_now())
            self.saver.save(
                "step", self.world.policy, registry, states_of(registry), required=required
            )
