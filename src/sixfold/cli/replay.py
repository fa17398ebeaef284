"""`sixfold replay RUN --step N`."""

from __future__ import annotations

from collections.abc import Sequence

from .parsing import VerbParser, at_least, run_folder

TEXT = """\
Recompute a recorded step of a run, and show what differs from the record.

Rewards are recomputed from the recorded replies, with the current reward functions and
environments. Advantages, loss and gradient norm are recomputed by the trainer, from the checkpoint
before the step and the recorded trajectories. The run's folder is only read, so the run may go on
meanwhile.

The trajectories of the step must be recorded (log.rollouts_every), and there must be a checkpoint
of the step before it. An older checkpoint also works if the trajectories of all steps between are
recorded: these steps are replayed first.

Exit code: 0 if everything agrees, 1 if something differs, 2 for bad input.
"""


def parser() -> VerbParser:
    """Arguments of the verb."""
    arguments = VerbParser("replay", TEXT)
    arguments.add_argument("run", metavar="RUN", help="the run's folder, e.g. runs/demo")
    arguments.add_argument(
        "--step", metavar="N", type=at_least(1), required=True, help="step to recompute, from 1"
    )
    arguments.add_argument(
        "--rewards",
        choices=("recorded", "recomputed"),
        default="recorded",
        help=(
            "rewards that the training half starts from: recorded (default; rewards and training"
            " are checked separately), or recomputed"
        ),
    )
    return arguments


def run(argv: Sequence[str]) -> int:
    """Parse the arguments, recompute the step, and print the comparison."""
    given, _ = parser().parse(argv)
    folder = run_folder(given.run)
    from ..commands.replay import replay_command

    return replay_command(folder, given.step, new_rewards=given.rewards == "recomputed")
