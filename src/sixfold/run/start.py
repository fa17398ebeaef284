"""Start or resume a run: open its folder, load what it needs, and hand over to its work.

A run can resume after any crash. The metrics and rollouts of a step are written before the
checkpoint that covers them. A resume deletes everything after the checkpoint and reproduces it bit
for bit.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..algorithm.base import Algorithm
from ..checkpoint.best import BestSteps
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.saver import Saver
from ..checkpoint.state import RunState
from ..checks.prints import Prints
from ..controller.schedule import read_schedule
from ..data.task_set import TaskSet, given_tasks
from ..environment.episode import MakeEpisode
from ..errors import UserError
from ..files.durable import write_text_atomic
from ..files.folder import RunFolder, check_free, create_run, open_run, recover
from ..model.device import resolve_device
from ..processes.program import signal_on_death_of_parent
from ..ranks import Ranks, torchrun_ranks
from ..recipe.dump import dump_recipe, flat
from ..recipe.rank_checks import check_ranks
from ..recipe.schema import ParallelConfig, Recipe, RunConfig
from ..report.loggers import read_metrics
from ..report.notes import Notes
from ..report.prediction import write_prediction
from ..report.progress import Progress
from ..sizing.memory import ranks_started
from ..types import Task
from .assemble import Assembly, assemble
from .context import RunContext
from .ending import Ending, how_to_go_on, last_ending
from .failures import failures_in_words, what_is_left, where_it_stopped
from .finish import finish
from .inputs import Inputs, check_same, inputs_of, own_ends
from .interrupts import Interrupted, Interrupts
from .monitors import Monitors
from .recipe_environment import isolation_note
from .resume import cut_after, find_checkpoint
from .rl import RlWork
from .several_ranks import QUIET, copy_records, follower_folder, quiet_progress, remove_followers
from .training import TrainingStage, reached_limit
from .warm_up import tried
from .work import Work


@dataclass(frozen=True)
class Given:
    """Objects given from Python that replace parts of the recipe. For each see `sixfold.train`.

    Attributes:
        reward: replaces the recipe's rewards.
        environment: the environment that `environment.episode` names. None: load it.
        tasks: replace the recipe's dataset.
        replayed: the schedule that the samplers follow, or None.
    """

    reward: Callable[..., Any] | None = None
    environment: MakeEpisode | None = None
    tasks: TaskSet | None = None
    replayed: Path | None = None


def train_run(
    recipe: Recipe,
    *,
    resume: Path | None = None,
    overwrite: bool = False,
    stop_after: Literal["sft"] | None = None,
    reward: Callable[..., Any] | None = None,
    environment: MakeEpisode | None = None,
    algorithm: Algorithm | None = None,
    tasks: Iterable[Task] | None = None,
    heldout: Iterable[Task] = (),
    words: Callable[[str], str] = str,
    replayed: Path | None = None,
) -> int:
    """Run a recipe without stages, or resume an earlier run.

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
        replayed: `schedule.jsonl` of an asynchronous run, which is made again. None: a new run.

    Returns:
        The exit code: 0, or 130 / 143 if stopped by a signal.

    Raises:
        UserError: for an error that the user can fix.
    """
    schedule = None if replayed is None else read_schedule(replayed, ranks_started())
    work = RlWork(recipe, algorithm, stop_after, words, schedule)
    own_tasks = None if tasks is None else given_tasks(tasks, heldout)
    given = Given(reward, environment, own_tasks, replayed)
    ranks = connected_ranks(recipe.run, recipe.parallel)
    return run_work(recipe, work, ranks, resume=resume, overwrite=overwrite, given=given)


def connected_ranks(run: RunConfig, parallel: ParallelConfig) -> Ranks:
    """The ranks that torchrun has started, connected. A process calls this once."""
    return torchrun_ranks(resolve_device(run.device, "run.device"), parallel.timeout_s)


def run_work(
    recipe: Recipe,
    work: Work,
    ranks: Ranks,
    *,
    resume: Path | None = None,
    overwrite: bool = False,
    given: Given = Given(),
    accepted: Callable[[], None] | None = None,
    after: Callable[[RunContext, Assembly], None] | None = None,
) -> int:
    """Do some work in the folder of a run, or resume it there.

    Args:
        recipe: the whole run.
        work: what is done.
        ranks: the ranks of the run.
        resume: folder of the run to resume.
        overwrite: replace an earlier run of the same name.
        given: objects given from Python.
        accepted: called once all checks have passed, before the recipe is recorded.
        after: called when the work is done. None: nothing is.

    Returns:
        The exit code: 0, or 130 / 143 if stopped by a signal.

    Raises:
        UserError: for an error that the user can fix.
    """
    started = time.perf_counter()
    # Absolute: user code may change the working folder of this process.
    resume = resume and resume.absolute()
    directory, name = Path(recipe.run.dir).absolute(), recipe.run.name
    free = partial(check_free, directory, name, overwrite)
    run = RunFolder(resume or directory / name)
    with ExitStack() as stack:
        stack.enter_context(ranks.ending_together(partial(what_is_left, run)))
        progress = stack.enter_context(quiet_progress() if ranks.rank else Progress())
        interrupts = stack.enter_context(Interrupts(progress.note, ranks))
        _stop_with_launcher()
        stack.enter_context(failures_in_words(flat(recipe), run, progress))
        check_ranks(recipe, work.method, ranks.size)
        if ranks.rank:
            recipe = recipe.model_copy(update={"log": QUIET})
        if not work.ahead:
            recipe = recipe.with_settings({"rollout.staleness": 0})
        if isolation := isolation_note(recipe.environment):
            progress.note(isolation)
        try:
            checkpoint = None
            if resume:
                run = open_run(resume)
                if not ranks.rank:
                    stack.enter_context(run)
                if work.trains:
                    checkpoint = find_checkpoint(run, recipe, progress.note)
            elif not ranks.rank:
                recover(directory / name)
            progress.phase("loading")
            source = str(checkpoint.model_path) if checkpoint and not work.own_model else ""
            prints = stack.enter_context(closing(Prints()))
            assembly = assemble(
                recipe,
                source,
                reward=given.reward,
                episode=given.environment,
                tasks=given.tasks,
                own_ends=own_ends(checkpoint),
                ranks=ranks,
                prints=prints,
                texts=work.texts,
                # Mistakes of the recipe come first: they remain under another name of the run.
                before_model=None if resume or ranks.rank else free,
                replaying=given.replayed is not None,
            )
            stack.callback(assembly.close)
            work.load(assembly)
            _refuse_accuracy_limits(work, assembly)
            inputs = inputs_of(assembly, given.reward, work.algorithm, work.examples)
            state = _state_of(checkpoint, inputs, progress)
            run = _tried_folder(stack, run, assembly, resume is None, overwrite, progress)
            if given.replayed:
                write_text_atomic(run.replay_of, f"{given.replayed.parent}\n")
            best = BestSteps(recipe.checkpoint.keep_best)
            context = _context(
                run, assembly, inputs, best, state, progress, interrupts, started, accepted
            )
            stack.callback(context.saver.settle)
            with context.gone_in_words():
                if work.trains:
                    Training(context, assembly, work, work.monitors(best)).go(checkpoint)
                else:
                    work.go(context, assembly)
                if after:
                    after(context, assembly)
        except Interrupted:
            pass
        if interrupts.exit_code:
            progress.note(work.words(where_it_stopped(run)))
        return interrupts.exit_code


def _stop_with_launcher() -> None:
    """Stop this rank if its torchrun is killed. Nobody could stop it then."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal_on_death_of_parent(signal.SIGTERM)


def _refuse_accuracy_limits(work: Work, assembly: Assembly) -> None:
    """Refuse settings that compare shares of solved held-out tasks, where there are none."""
    if not work.trains or work.own_model or assembly.tasks.heldout:
        return
    run, keep_best = assembly.recipe.run, assembly.recipe.checkpoint.keep_best
    asked = {"run.patience": run.patience, "run.target_accuracy": run.target_accuracy}
    for name, value in {**asked, "checkpoint.keep_best": keep_best}.items():
        if value:
            raise UserError(
                f"{name} = {value:g} compares shares of solved held-out tasks, and there are none:"
                f" the recipe's own [data] names no tasks. Set {name} = 0"
            )


def _state_of(checkpoint: Checkpoint | None, inputs: Inputs, progress: Progress) -> RunState:
    """Progress of the checkpoint, whose inputs are compared with the current ones."""
    if checkpoint is None:
        return RunState()
    state = RunState.of(checkpoint)
    for note in check_same(checkpoint, inputs, evaluated=bool(state.before)):
        progress.note(note)
    return state


def _tried_folder(
    stack: ExitStack,
    run: RunFolder,
    assembly: Assembly,
    new: bool,
    overwrite: bool,
    progress: Progress,
) -> RunFolder:
    """Try the rewards, then open the folder in which this rank writes.

    A judge knows its earlier answers before it is tried. A new run keeps its answers, and what its
    rewards print, only after.
    """
    folder, ranks = run.path, assembly.ranks
    judge = assembly.judge
    if judge and not new:
        judge.keep(folder, ranks.rank)
    if warning := tried(assembly):
        progress.note(warning)
    run = _own_folder(stack, run, new, overwrite, ranks, progress)
    if judge and new:
        judge.keep(folder, ranks.rank)
    if assembly.prints:
        assembly.prints.keep_in(folder)
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

    Call this after all checks: a mistake in the recipe must not create or move any folder. Rank 0
    holds the lock of a run that is resumed.
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


def _context(
    run: RunFolder,
    assembly: Assembly,
    inputs: Inputs,
    best: BestSteps,
    state: RunState,
    progress: Progress,
    interrupts: Interrupts,
    started: float,
    accepted: Callable[[], None] | None,
) -> RunContext:
    """What the stages of a run share.

    Args:
        started: time.perf_counter() when this process began the run.
        accepted: as in `run_work`.
    """

    def warn(text: str) -> None:
        context.warn(text)

    def write_recipe() -> None:
        if accepted:
            accepted()
        write_text_atomic(run.recipe, dump_recipe(assembly.recipe))
        commits = {**assembly.policy.hub_commits, **assembly.tasks.hub_commits}
        run.write_environment(sys.argv, commits)

    settings, began = assembly.recipe.checkpoint, started - state.seconds
    saver = Saver(run.checkpoints, assembly.ranks, settings, asdict(inputs), best, warn)
    notes = Notes(run.path, progress.note)
    context = RunContext(
        run, assembly.ranks, progress, interrupts, notes, saver, state, began, write_recipe
    )
    return context


@dataclass
class Training:
    """The order of a run that trains: what is written before, between and after its steps.

    Attributes:
        context: the run.
        assembly: model, tasks and settings.
        work: what is trained, and how.
        monitors: watch the metrics.
    """

    context: RunContext
    assembly: Assembly
    work: Work
    monitors: Monitors

    def go(self, checkpoint: Checkpoint | None) -> None:
        """Do what the checkpoint lacks: the beginning, the steps, the final evaluation and report.

        Args:
            checkpoint: checkpoint to resume from, or None.

        Raises:
            Interrupted: if a signal stops the run.
        """
        context, monitors = self.context, self.monitors
        stage: TrainingStage | None = None
        if checkpoint and checkpoint.stage == "step":
            if ending := self._earlier_ending():
                # Before the recipe is written: nothing was trained under its settings.
                note = f"already finished: {ending.text}; {self.work.words(how_to_go_on(ending))}"
                context.progress.note(note)
                context.folder.end()
                return
            # Before the rest: a checkpoint that is refused must leave the run folder as it is.
            stage = self._stage()
            stage.restore(checkpoint)
        self._prepare(checkpoint)
        for note in self.assembly.tasks.notes:
            context.progress.note(note)
        if checkpoint and stage:
            stage.resumed(checkpoint)
        else:
            self.work.begin(context, self.assembly, checkpoint)
        monitors.start(context.state.before, read_metrics(context.folder.metrics))
        if stage:
            context.saver.prune()
        else:
            stage = self._stage()
            stage.save(required=True)
        ending = None
        if self.work.steps:
            with stage.steps() as loop:
                if loop:
                    loop.run(stage.end_step)
            ending = stage.reached_limit()
        finish(context, self.assembly, monitors, ending, stage.version, stage.name)
        with context.interrupts.finishing():
            context.folder.end()

    def _stage(self) -> TrainingStage:
        return self.work.stage(self.context, self.assembly, self.monitors)

    def _earlier_ending(self) -> Ending | None:
        """Limit at which an earlier process ended the run. None if the run has not ended."""
        state, seen = self.context.state, BestSteps(0)
        # A process that was killed may have logged steps after its newest checkpoint.
        seen.replay(read_metrics(self.context.folder.metrics), until=state.step)
        ending = reached_limit(self.context, self.assembly.recipe.run, seen)
        if not ending or state.unlogged or last_ending(self.context.folder) != ending.step:
            return None
        return ending

    def _prepare(self, checkpoint: Checkpoint | None) -> None:
        """Delete output after the checkpoint, and record the recipe and versions."""
        context, state = self.context, self.context.state
        if context.ranks.rank:
            context.ranks.barrier("the records of the run")
            copy_records(context.folder)
            return
        cut_after(context.folder, checkpoint, state, context.progress.note)
        context.notes.cut_after(state.step if checkpoint and checkpoint.stage == "step" else None)
        context.write_recipe()
        if self.work.predicted:
            self.monitors.alarms.prediction = write_prediction(
                context.folder.path,
                self.assembly.recipe,
                device=self.assembly.device,
                ranks=context.ranks.size,
                step=state.step,
            )
        context.ranks.barrier("the records of the run")
