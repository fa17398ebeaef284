"""`sixfold show RUN --step N`."""

from __future__ import annotations

from collections.abc import Sequence

from .parsing import VerbParser, at_least, run_folder

TEXT = """\
Print trajectories of a step: the origin of each token, turns, tool calls and rewards.

Without --task it shows the trajectory with the best reward, the one with the worst reward, and one
that failed, if there is one. The trajectories of the step must be recorded (log.rollouts_every).
The run may continue meanwhile.
"""


def parser() -> VerbParser:
    """Arguments of the verb."""
    arguments = VerbParser("show", TEXT)
    arguments.add_argument("run", metavar="RUN", help="the run's folder, e.g. runs/demo")
    arguments.add_argument(
        "--step", metavar="N", type=at_least(1), help="step to show (default: the last recorded)"
    )
    arguments.add_argument("--task", metavar="ID", default="", help="only samples of this task")
    arguments.add_argument(
        "--sample", metavar="K", type=at_least(0), help="only this sample of each task, from 0"
    )
    arguments.add_argument(
        "--limit",
        metavar="N",
        type=at_least(1),
        help="maximum number of trajectories (default: at most 3, or all samples of --task)",
    )
    arguments.add_argument(
        "--tokens",
        action="store_true",
        help="list the tokens one by one, with id, log-prob, probability, advantage and version",
    )
    arguments.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="auto (default): on a terminal, unless NO_COLOR is set",
    )
    arguments.add_argument("--json", action="store_true", help="print the records as JSON")
    return arguments


def run(argv: Sequence[str]) -> int:
    """Parse the arguments and print the trajectories."""
    given, _ = parser().parse(argv)
    folder = run_folder(given.run)
    from ..commands.show import Choice, show_command

    return show_command(
        folder,
        given.step,
        Choice(given.task, given.sample, given.limit),
        tokens=given.tokens,
        colour=given.color,
        as_json=given.json,
    )
