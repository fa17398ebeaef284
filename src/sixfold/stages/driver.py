"""Run the stages of a recipe, each as a run of its own, in the folder of the whole run.

    runs/NAME/recipe.toml           the recipe with its stages
    runs/NAME/stages/STAGE/         a run: metrics, checkpoints, report; artifact.json at its end
    runs/NAME/stages.json           the stage table
    runs/NAME/report.html           all stages on one page

A stage with an artifact is finished. After a crash the first stage without one is resumed, so there
is no other state. A stage that is made again is moved to `replaced/` until the run has ended.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from rich.console import Console

from ..checkpoint.model_source import recorded_models, with_model_folders
from ..data.sources import load_tasks
from ..data.task_set import TaskSet, apart_from_heldout
from ..environment.named import load_object
from ..errors import UserError
from ..files.durable import disk_errors, faultpoint, write_text_atomic
from ..files.folder import ARTIFACT, MARKER, RunFolder, create_run, open_run, recover
from ..ranks import Ranks, together
from ..recipe.dump import flat
from ..recipe.read_stages import unread
from ..recipe.schema import DataConfig
from ..recipe.stages import STAGES, Stage, StagedRecipe, in_stage
from ..recipe.toml import load_recipe
from ..report.html import write_report
from ..report.progress import Progress
from ..report.staged import screen_tables
from ..run.recipe_environment import check_names, task_rewards
from ..run.start import Given, connected_ranks, run_work
from .artifact import Artifact, publish, read_artifact, verified
from .drift import measure
from .kind import StageKind
from .table import write_table

REPLACED = "replaced"


class StagedRun:
    """The stages of one run.

    Args:
        staged: the recipe.
        folder: folder of the run.
        ranks: the ranks of the run. Rank 0 publishes and moves.
        say: receives messages for the user.
    """

    def __init__(
        self, staged: StagedRecipe, folder: Path, ranks: Ranks, say: Callable[[str], None]
    ) -> None:
        self._staged = staged
        self._folder = folder
        self._ranks = ranks
        self._say = say

    def record(self) -> None:
        """Write recipe.toml, and environment.json with the versions, of the whole run."""
        run = RunFolder(self._folder)
        write_text_atomic(run.recipe, self._staged.dump())
        run.write_environment(sys.argv, {})

    def folder_of(self, name: str) -> Path:
        """Folder of a stage."""
        return self._folder / STAGES / name

    def go(self, stages: tuple[Stage, ...]) -> int:
        """Run those of the stages that are not finished.

        Returns:
            The exit code of the first that was stopped, or 0.
        """
        for stage in stages:
            if self._finished(stage):
                self._say(f"stage {stage.name}: already finished")
                continue
            with in_stage(stage.name):
                if code := self._run(stage):
                    return code
                together(self._ranks, partial(self._publish, stage))
        return 0

    def check(self, stages: tuple[Stage, ...], anew: bool) -> None:
        """Refuse what does not fit, before anything is changed.

        Args:
            stages: stages that will be run.
            anew: make them again even if they are finished.

        Raises:
            UserError: if a finished stage does not fit the recipe, or the input of one is missing.
        """
        needed = {stage.name for stage in stages}
        for stage in reversed(self._staged.stages):
            if stage.name in needed:
                needed |= {name for _, name in stage.inputs}
        coming: list[str] = []
        for stage in self._staged.stages:
            if anew and stage in stages:
                self._inputs(stage, coming)
            elif stage.name in needed:
                self._finished(stage, coming)
            if stage in stages:
                coming.append(stage.name)

    def replace(self, stages: tuple[Stage, ...]) -> None:
        """Move the folders of stages aside. They are deleted when the run has ended."""
        aside = self._folder / REPLACED
        for stage in reversed(stages):
            folder = self.folder_of(stage.name)
            if not folder.is_dir():
                continue
            with disk_errors(f"cannot move {folder} aside"):
                aside.mkdir(exist_ok=True)
                if (aside / stage.name).exists():  # an unfinished attempt to replace it
                    shutil.rmtree(folder)
                else:
                    os.rename(folder, aside / stage.name)
                faultpoint("stages.replace")

    def end(self) -> None:
        """Delete what was replaced, if all stages are finished."""
        if all(read_artifact(self.folder_of(stage.name)) for stage in self._staged.stages):
            shutil.rmtree(self._folder / REPLACED, ignore_errors=True)

    def _finished(self, stage: Stage, coming: list[str] | None = None) -> Artifact | None:
        """The artifact of a stage, or None if it has to be made.

        Args:
            stage: the stage.
            coming: stages that will be made before it.

        Raises:
            UserError: if it was made with other settings or inputs, or lacks an input.
        """
        artifact = read_artifact(self.folder_of(stage.name))
        inputs = self._inputs(stage, coming or [])
        if artifact is None:
            return None
        if why := artifact.difference(stage, inputs) or self._cut_short(stage):
            raise UserError(
                f"stage '{stage.name}' is finished, but {why}. To make it and the stages after it"
                f" again: --from {stage.name}; or give the run another --run.name"
            )
        return artifact

    def _cut_short(self, stage: Stage) -> str:
        """How run.max_minutes ended a finished stage that may go on now. Empty if it did not."""
        path = RunFolder(self.folder_of(stage.name)).summary
        summary = json.loads(path.read_bytes()) if path.is_file() else {}
        ended, limit = summary.get("ended") or {}, stage.recipe.run.max_minutes
        seconds = summary.get("seconds", 0) + 0.1  # a summary rounds to tenths
        if ended.get("reason") != "max_minutes" or 0 < 60 * limit <= seconds:
            return ""
        return f"run.max_minutes ended it after step {ended['step']}, and is {limit:g} now"

    def _inputs(self, stage: Stage, coming: list[str]) -> dict[str, str]:
        """Hash of each finished stage that a stage reads, by name."""
        found = {}
        for key, name in stage.inputs:
            if artifact := read_artifact(self.folder_of(name)):
                found[name] = artifact.sha256
            elif name not in coming:
                raise UserError(
                    f"stage '{stage.name}': {key} = 'stage:{name}', but stage '{name}' has not"
                    f" finished in {self._folder}. Run it first: --only {name}, or all stages"
                )
        return found

    def _run(self, stage: Stage) -> int:
        """Start or resume one stage. Returns its exit code."""
        folder = self.folder_of(stage.name)
        paths = {}
        for _, name in stage.inputs:
            artifact = read_artifact(self.folder_of(name))
            assert artifact is not None  # `_finished` has refused the stage otherwise
            paths[name] = str(verified(self.folder_of(name), artifact))
        recipe = stage.bound(paths).with_settings(
            {"run.dir": str(folder.parent), "run.name": stage.name}
        )
        # Asked of rank 0 alone: it may create the folder before another rank looks.
        started = self._ranks.gather(RunFolder(folder).recipe.is_file())[0]
        resume = folder if started else None
        if started:
            recorded = load_recipe(str(RunFolder(folder).recipe))
            recipe = recipe.with_settings(recorded_models(flat(recipe), flat(recorded)))
        recipe = with_model_folders(recipe)
        check_names(recipe.environment, recipe.eval)
        self._say(f"stage {stage.name} ({stage.kind}): {stage.row.purpose}")
        kind: StageKind = load_object(stage.row.spec)(recipe)
        after = None
        if "model.path" in dict(stage.inputs) and stage.row.makes == "model":
            after = partial(measure, recipe.model.path)
        given = Given(tasks=self._tasks(stage, recipe.data))
        return run_work(
            recipe,
            kind.work(),
            self._ranks,
            resume=resume,
            given=given,
            accepted=self.record,
            after=after,
        )

    def _tasks(self, stage: Stage, data: DataConfig) -> TaskSet | None:
        """Tasks of a stage that trains on other rows than the tasks of the recipe's [data].

        It is evaluated on the held-out tasks of the recipe, as the other stages are.

        Args:
            stage: the stage.
            data: its own [data], with paths in place of stage names.

        Returns:
            None: the tasks are those of the stage's own [data].
        """
        evaluated = self._staged.evaluated_on(stage)
        if evaluated == stage.recipe.data:
            return None
        base = self._staged.base
        rows = TaskSet([], [])
        if stage.reads_tasks:
            whole = data.model_copy(update={"heldout": 0})
            rows = load_tasks(whole, seed=stage.recipe.run.seed, rewards=())
        if evaluated is None:  # the recipe has no tasks of its own
            return rows
        rewards = task_rewards(base.environment, base.eval.strict, None)
        found = load_tasks(evaluated, seed=base.run.seed, rewards=rewards)
        kept = apart_from_heldout(rows.train, found.heldout)
        notes = [*rows.notes, *found.notes]
        if left := len(rows.train) - len(kept):
            notes.append(f"{left} rows of the dataset left out: their prompts are held out")
        if rows.train and not kept:
            raise UserError(
                "data: the prompt of every row is held out for evaluation, so no row is left to"
                " train on"
            )
        return TaskSet(kept, found.heldout, notes, rows.weights)

    def _publish(self, stage: Stage) -> None:
        if self._ranks.rank:
            return
        self.record()
        publish(self.folder_of(stage.name), stage, stage.row.makes, self._inputs(stage, []))
        write_table(self._folder, self._staged)


def train_stages(
    staged: StagedRecipe,
    *,
    resume: Path | None = None,
    overwrite: bool = False,
    only: str = "",
    first: str = "",
) -> int:
    """Run the stages of a recipe, or resume an earlier run of them.

    Args:
        staged: the recipe.
        resume: folder of the run to resume.
        overwrite: replace an earlier run of the same name.
        only: run this stage alone, with the artifacts of a run of the same name. "": all.
        first: make this stage and those after it again, with the artifacts of the earlier stages of
            a run of the same name. "": all that are not finished.

    Returns:
        The exit code: 0, or 130 / 143 if stopped by a signal.

    Raises:
        UserError: for an error that the user can fix.
    """
    base = staged.base
    directory, name = Path(base.run.dir).absolute(), base.run.name
    folder = (resume or directory / name).absolute()
    chosen = staged.stages
    if only:
        chosen = (staged.stages[staged.position(only, name)],)
    if first:
        chosen = staged.stages[staged.position(first, name) :]
    if overwrite and (one := only or first):
        _check_nothing_lost(folder, one)
    ranks = connected_ranks(base.run, base.parallel)
    with ExitStack() as stack:
        stack.enter_context(
            ranks.ending_together(lambda: f"Go on with: sixfold train --resume {folder}")
        )
        say = Progress().note if not ranks.rank else _silent
        for note in unread(staged):
            say(note)
        if not ranks.rank:
            earlier = resume or ((only or first) and RunFolder(folder).recipe.is_file())
            if earlier and not overwrite:
                recover(folder)
                run = stack.enter_context(open_run(folder))
            else:
                run = stack.enter_context(create_run(directory, name, overwrite))
                stack.callback(_remove_unused, run)
                for unused in (run.checkpoints, run.rollouts):  # the stages have their own
                    with suppress(OSError):
                        unused.rmdir()
            stages = StagedRun(staged, run.path, ranks, say)
            stages.check(chosen, anew=bool(first))
            if first:
                stages.replace(chosen)
            if not earlier or overwrite or first:
                stages.record()  # a resumed run does so when a stage accepts the recipe
        ranks.barrier("the folder of the stages")
        stages = StagedRun(staged, folder, ranks, say)
        code = stages.go(chosen)
        if not code and not ranks.rank:
            stages.record()
            run.end()
            stages.end()
            write_table(folder, staged)
            Console().print(screen_tables(folder))
            say(f"report: {write_report(folder)}")
        return code


def _check_nothing_lost(folder: Path, stage: str) -> None:
    """Refuse --overwrite together with --only or --from if it would delete finished stages."""
    made = sorted(path.parent.name for path in folder.glob(f"{STAGES}/*/{ARTIFACT}"))
    if made:
        raise UserError(
            f"--overwrite replaces the whole run {folder}, and its stages {', '.join(made)} are"
            f" finished. Leave it out: --only {stage} makes a stage that is not finished, --from"
            f" {stage} makes it and those after it again"
        )


def _remove_unused(run: RunFolder) -> None:
    """Remove the records of a new run in which no stage has begun: a mistake leaves no run."""
    stages = run.path / STAGES
    if not any(stages.glob("*/recipe.toml")):
        shutil.rmtree(stages, ignore_errors=True)
        for file in (run.recipe, run.environment, run.path / MARKER):
            file.unlink(missing_ok=True)
        with suppress(OSError):
            run.path.rmdir()


def _silent(text: str) -> None:
    """A rank above 0 says nothing."""
