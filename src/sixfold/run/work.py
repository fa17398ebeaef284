"""Base class of what a run does once its folder is open."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..algorithm.base import Algorithm
from ..algorithm.method import Method
from ..checkpoint.best import BestSteps
from ..checkpoint.checkpoint import Checkpoint
from .assemble import Assembly
from .context import RunContext
from .monitors import Monitors
from .training import TrainingStage


class Work:
    """What a run does once its folder is open: train in steps, or anything else.

    Args:
        method: method of the run, which decides what several ranks support.

    Attributes:
        algorithm: algorithm given from Python, or None.
        examples: hash of examples that the tasks do not decide, known once they are loaded.
        texts: texts of which a tokenizer is trained, or None.
        words: rewrites a line that names command-line flags for the caller's interface.
        trains: it trains in steps, whose order `run.start` knows. False: `go` does everything.
        steps: make the steps. False: end before the first.
        predicted: predict the durations of the steps, which are steps of RL.
        ahead: samples may be drawn while others are trained (`rollout.staleness`).
        own_model: the model of its checkpoints is another one than the policy.
    """

    algorithm: Algorithm | None = None
    examples: str = ""
    texts: Iterable[str] | None = None
    words: Callable[[str], str] = str
    trains = True
    steps = True
    predicted = False
    ahead = False
    own_model = False

    def __init__(self, method: Method) -> None:
        self.method = method

    def load(self, assembly: Assembly) -> None:
        """Load what may be refused. The run's folder is not made yet.

        Raises:
            UserError: if it does not fit.
        """

    def monitors(self, best: BestSteps) -> Monitors:
        """What watches the metrics.

        Args:
            best: steps whose checkpoints are kept.
        """
        raise NotImplementedError

    def begin(self, context: RunContext, assembly: Assembly, checkpoint: Checkpoint | None) -> None:
        """Do what precedes the first step.

        Args:
            context: the run.
            assembly: model, tasks and settings.
            checkpoint: checkpoint of this beginning to resume from, or None.
        """
        raise NotImplementedError

    def stage(self, context: RunContext, assembly: Assembly, monitors: Monitors) -> TrainingStage:
        """The stage that makes the steps. It may copy the policy, whose weights are final now."""
        raise NotImplementedError

    def go(self, context: RunContext, assembly: Assembly) -> None:
        """Do what is left to do, and write the report. Called if `trains` is False.

        Raises:
            Interrupted: if a signal stops the run.
        """
        raise NotImplementedError
