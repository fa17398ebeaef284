"""`sixfold replay RUN --step N`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from typing import Literal

from ..cli.parsing import RUN_HELP, PositiveInt, VerbParser, argument, option, run_folder
from ..files.folder import one_stage
from ..report.replay import sample_table, table

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


@dataclass(frozen=True, kw_only=True)
class Options:
    run: str = argument(RUN_HELP)
    step: PositiveInt = option("step to recompute, from 1", MISSING)
    rewards: Literal["recorded", "recomputed"] = option(
        "rewards that the training half starts from: recorded (default; rewards and training are"
        " checked separately), or recomputed",
        "recorded",
    )


PARSER = VerbParser("replay", TEXT, Options)


def run(arguments: Sequence[str]) -> int:
    """Recompute the step, and print the comparison.

    Returns:
        The exit code: 0 if everything agrees, 1 if something differs.
    """
    given = PARSER.parse(arguments)
    folder = one_stage(run_folder(given.run))
    from ..run.replay import replay

    result = replay(folder, given.step, new_rewards=given.rewards == "recomputed", say=_say)
    print(f"step {given.step} of {folder}, from {result.checkpoint}\n")
    print(table(result.lines))
    if result.samples:
        print(f"\ntrajectories that differ: {len(result.samples)}\n{sample_table(result.samples)}")
    print(f"\n{result.verdict}")
    return 0 if result.agrees else 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
