"""Expected seconds of the phases of a run's steps, which a package may predict.

The prediction is stored in the run's folder as `prediction.json`. The report shows it beside what
was measured, and alarms compare the two.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .. import plugins

if TYPE_CHECKING:
    from ..recipe.schema import Recipe

FILE = "prediction.json"
PHASES = ("rollout", "reference", "trainer", "sync")
STEP = "step"


class Lengths(NamedTuple):
    """Measured lengths.

    Attributes:
        prompt: mean tokens of a prompt.
        mean: mean tokens of a completion.
        longest: tokens of the longest completion of a step.
        check: seconds of a reward check.
    """

    prompt: float
    mean: float
    longest: float
    check: float = 0.0


class Prediction(Protocol):
    """What is expected of a run.

    Attributes:
        first_step: first step that runs on these devices with these settings. A resume on another
            machine starts a new prediction.
        memory_bytes: predicted peak of one device, in bytes. None: not known.
    """

    first_step: int
    memory_bytes: int | None

    @property
    def devices(self) -> str:
        """The devices in words, and where their figures come from."""

    def seconds(
        self, lengths: Lengths | None = None, trained_share: float = 1.0
    ) -> dict[str, float]:
        """Seconds of each phase of a step, and of the step.

        Args:
            lengths: None: those assumed before the run.
            trained_share: share of the samples' tokens that the trainer computes.
        """

    def trained_tokens(self, lengths: Lengths | None) -> float:
        """Tokens that the trainer computes in a step if no group is left out."""


class Predictor(Protocol):
    """Makes and reads predictions."""

    def write(
        self, folder: Path, recipe: Recipe, *, device: str, ranks: int, step: int
    ) -> Prediction | None:
        """Predict the steps of a run, and store the prediction or why there is none.

        Args:
            device: "cpu", "cuda" or "cuda:N".
            ranks: processes of the run, each with a device of its own unless it is the CPU.
            step: steps done so far.
        """

    def read(self, folder: Path) -> Prediction | str:
        """The prediction in the folder of a run, or the reason as text if there is none.

        Raises:
            UserError: if a file cannot be read, or has another form.
        """


def write_prediction(
    folder: Path, recipe: Recipe, *, device: str, ranks: int, step: int
) -> Prediction | None:
    """`Predictor.write` of the installed predictor. None if there is none."""
    made = _predictor()
    return made.write(folder, recipe, device=device, ranks=ranks, step=step) if made else None


def read_prediction(folder: Path) -> Prediction | str:
    """`Predictor.read` of the installed predictor."""
    made = _predictor()
    return made.read(folder) if made else "no package for predictions is installed"


def _predictor() -> Predictor | None:
    found = plugins.names(plugins.PREDICTOR)
    return plugins.load(plugins.PREDICTOR, found[0]) if found else None
