"""What the stages of a run share: its folder, its progress, its checkpoints and its signals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ..checkpoint.saver import Saver
from ..checkpoint.state import RunState
from ..errors import RunFailed
from ..files.folder import RunFolder
from ..ranks import Ranks
from ..report.notes import Notes
from ..report.progress import Progress
from ..timeline import Timeline
from .failures import what_is_left
from .interrupts import Interrupted, Interrupts


class FolderGone(RunFailed):
    """The run's folder was renamed or deleted during the run."""


@dataclass
class RunContext:
    """Shared by the stages of a run and by what records them. Holds no settings and no role.

    Attributes:
        folder: folder in which this rank writes.
        ranks: the ranks of the run.
        progress: display of the progress.
        interrupts: signals that stop the run.
        notes: messages that the report repeats.
        saver: saves checkpoints.
        state: progress that a checkpoint stores.
        started: `time.perf_counter()` at the start of the run, less the time of earlier processes.
        write_recipe: writes the recipe and the versions into the folder.
        gone: what became of the folder, if another program renamed or deleted it.
        timeline: keeps when the phases were.
    """

    folder: RunFolder
    ranks: Ranks
    progress: Progress
    interrupts: Interrupts
    notes: Notes
    saver: Saver
    state: RunState
    started: float
    write_recipe: Callable[[], None]
    gone: str = ""
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def seconds(self) -> float:
        """Wall time of the run, with that of earlier processes."""
        return time.perf_counter() - self.started

    def state_now(self) -> RunState:
        """Current progress, with the wall time."""
        return replace(self.state, seconds=self.seconds)

    def warn(self, text: str) -> None:
        """Show and store a warning about the current step."""
        self.notes.add(self.state.step, text, warning=True)

    def phase(self, name: str) -> None:
        """Announce a phase. From the trainer on, an interrupted step is finished first."""
        self.progress.phase(name)
        self.timeline.phase(name)
        self.check_folder()
        self.saver.check()
        self.interrupts.finish_first(name in ("trainer", "sync", "log"))

    def check_folder(self) -> None:
        """Stop a run whose folder another program has renamed or deleted.

        Other files that a resume needs are written again.

        Raises:
            FolderGone: says what happened.
        """
        if what := self.folder.displaced():
            raise FolderGone(what)
        self.folder.keep_lock()
        if not self.ranks.rank and not self.folder.recipe.is_file():
            self.write_recipe()
            self.warn(f"{self.folder.recipe} was deleted during the run. It is written again")

    def keep_folder(self) -> None:
        """Give the last checkpoint a place if the run's folder was renamed or deleted."""
        if what := self.folder.displaced():
            self.gone = what
            created = self.folder.follow()
            self.saver.checkpoints = self.folder.checkpoints
            if created:
                self.write_recipe()

    @contextmanager
    def gone_in_words(self) -> Iterator[None]:
        """Turn any error after the folder was renamed or deleted into one that says so.

        Raises:
            FolderGone: says what happened, and where the last checkpoint is.
        """
        try:
            yield
        except (Exception, Interrupted) as error:
            if not (what := self.gone or self.folder.displaced()):
                raise
            raise FolderGone(f"{what}. {what_is_left(self.folder)}") from error
