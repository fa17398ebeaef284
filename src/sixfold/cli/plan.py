"""`sixfold plan TARGET` and `sixfold plan --points FILE`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from ..files.durable import check_target
from .parsing import VerbParser, above_zero, at_least, run_folder

if TYPE_CHECKING:
    from ..commands.plan_simulation import SimulationRequest
    from ..planning.hardware import Cluster

HERE = "here"
"""`--gpus here`: the machine that `sixfold plan --measure` measured."""
STEPS, STALENESS, RESTART = 20, 3, 300.0
"""Defaults of a simulation: steps, weight versions, seconds of a restart."""

TEXT = """\
Predict whether a run fits, how long a step takes, what limits it and what it costs.

    sixfold plan gsm8k --gpus 1xL4
    sixfold plan 70B --gpus 64xH100 --length 4000 --rollout.max_new_tokens 8192
    sixfold plan Qwen2.5-7B --hardware server.toml --run.steps 500
    sixfold plan gsm8k --gpus 8xH100 --simulate 50 --run runs/gsm8k
    sixfold plan gsm8k --gpus 1xL4 --html plan.html
    sixfold plan --measure; sixfold plan demo --gpus here

TARGET is a recipe, a model folder or its config.json, the name of a public model, or a number of
parameters such as 70B. Nothing is loaded, downloaded or started. docs/planning.md says how far the
times can be trusted. With --html FILE: write a page with sliders instead of text. With --json:
print the numbers, unrounded, as one JSON object (bytes, seconds unless the name says otherwise).

With --simulate: simulate some steps with lengths that differ, and show use of the devices,
staleness, the cost of the longest samples, other numbers of samples per prompt, and failures.

With --measure: time this machine (under a minute) and write a hardware file. Afterwards
--gpus here plans for it.

With --points FILE: predict published measurements, and print predicted, published and error. FILE
is a CSV file with the columns of tests/data/published_points.csv. Empty columns are allowed. Rows
that cannot be predicted are listed with the reason.
"""


def share(text: str) -> float:
    """Argument type: a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 0 to 1")
    return value


def spread(text: str) -> float:
    """Argument type: a number above 0 and at most 10."""
    value = above_zero(text)
    if value > 10:
        raise argparse.ArgumentTypeError(f"'{text}' is above 10")
    return value


def parser() -> VerbParser:
    """Arguments of the verb."""
    arguments = VerbParser("plan", TEXT, takes_recipe=True)
    arguments.add_argument("target", metavar="TARGET", nargs="?", help="recipe or model")
    devices = arguments.add_mutually_exclusive_group()
    devices.add_argument(
        "--gpus", metavar="GPUS", help="such as 8xH100 (default 1xH100), or 'here'"
    )
    devices.add_argument("--hardware", metavar="FILE", help="TOML file that describes a device")
    arguments.add_argument(
        "--measure", action="store_true", help="time this machine, for later use of --gpus here"
    )
    arguments.add_argument("--out", metavar="FILE", help="with --measure: the file to write")
    arguments.add_argument(
        "--length",
        metavar="TOKENS",
        type=above_zero,
        help="mean length of completions (default: half of the bound)",
    )
    arguments.add_argument(
        "--pass-rate",
        metavar="SHARE",
        type=share,
        default=0.5,
        help="share of correct samples (default 0.5)",
    )
    arguments.add_argument(
        "--variation",
        metavar="NUMBER",
        type=spread,
        default=0.8,
        help="standard deviation of lengths divided by their mean, at most 10 (default 0.8)",
    )
    _add_simulation(arguments)
    arguments.add_argument("--points", metavar="FILE", help="CSV file of published measurements")
    arguments.add_argument("--html", metavar="FILE", help="write a page with sliders to FILE")
    arguments.add_argument("--json", action="store_true", help="print the numbers as JSON")
    return arguments


def _add_simulation(arguments: VerbParser) -> None:
    group = arguments.add_argument_group("simulation")
    group.add_argument(
        "--simulate",
        metavar="STEPS",
        nargs="?",
        type=at_least(1, most=1000),
        const=STEPS,
        help=f"simulate this many steps, at most 1000 ({STEPS} if no number is given)",
    )
    group.add_argument(
        "--run", metavar="FOLDER", help="take lengths and rewards from the rollouts of this run"
    )
    group.add_argument(
        "--staleness",
        metavar="VERSIONS",
        type=at_least(0),
        help=f"bound of the age of samples in the async topology (default {STALENESS})",
    )
    group.add_argument(
        "--mtbf", metavar="HOURS", type=above_zero, help="mean time between failures of one device"
    )
    group.add_argument(
        "--restart",
        metavar="SECONDS",
        type=above_zero,
        help=f"time from a failure until work goes on (default {RESTART:g})",
    )
    group.add_argument(
        "--seed", metavar="NUMBER", type=at_least(0), help="seed of the simulation (default 0)"
    )


def _simulation(given: argparse.Namespace) -> SimulationRequest | None:
    """What the options of the simulation ask for. None without `--simulate`.

    Raises:
        UserError: if options do not go together, or the run has no rollouts.
    """
    if given.simulate is None:
        for name in ("run", "staleness", "mtbf", "restart", "seed"):
            if getattr(given, name) is not None:
                raise UserError(f"--{name} belongs to a simulation: add --simulate")
        return None
    if given.restart is not None and given.mtbf is None:
        raise UserError("--restart belongs to failures: add --mtbf HOURS")
    if given.run is not None and given.length is not None:
        raise UserError("--length and --run both give lengths of completions: leave one out")
    from ..commands.plan_rollouts import recorded_groups
    from ..commands.plan_simulation import SimulationRequest

    return SimulationRequest(
        steps=given.simulate,
        staleness=STALENESS if given.staleness is None else given.staleness,
        seed=given.seed or 0,
        recorded=None if given.run is None else recorded_groups(run_folder(given.run)),
        device_hours=given.mtbf,
        restart_seconds=given.restart or RESTART,
    )


def _devices(gpus: str | None, hardware: str | None) -> tuple[Cluster, str]:
    """The devices that the options name, and the hardware file that describes them, or "".

    Raises:
        UserError: if a name is unknown, a file is wrong, or this machine was not measured.
    """
    from ..planning.hardware import parse_cluster
    from ..planning.hardware_file import read_hardware
    from ..planning.measured import measured_hardware, measured_path

    if gpus == HERE:
        path = measured_path()
        here = measured_hardware(path)
        if here is None:
            raise UserError(
                f"--gpus {HERE}: this machine was not measured ({path} does not exist)."
                " Run sixfold plan --measure"
            )
        return here, str(path)
    if hardware is not None:
        return read_hardware(hardware), hardware
    return parse_cluster("H100" if gpus is None else gpus), ""


def _measure(given: argparse.Namespace, settings: Sequence[str]) -> int:
    """Measure this machine.

    Raises:
        UserError: if other options are given.
    """
    if not given.measure:
        raise UserError("sixfold plan: --out belongs to a measurement: add --measure")
    _refuse_others(
        given,
        settings,
        ("measure", "out"),
        "sixfold plan --measure times this machine and takes only --out FILE",
    )
    path = None if given.out is None else Path(given.out).expanduser()
    if path is not None:
        check_target(path)
    from ..commands.measure import measure

    return measure(path)


def _refuse_others(
    given: argparse.Namespace, settings: Sequence[str], taken: Sequence[str], rule: str
) -> None:
    """Refuse options that a form of the command would ignore.

    Args:
        taken: names of the options that this form takes.
        rule: what this form does and takes, for the message.

    Raises:
        UserError: if another option or a setting was given.
    """
    others = {name: value for name, value in vars(given).items() if name not in taken}
    asked = [name for name, value in others.items() if value != parser().get_default(name)]
    if asked or settings:
        name = asked[0].replace("_", "-") if asked else settings[0].lstrip("-")
        raise UserError(f"{rule}: leave out {name}")


def run(argv: Sequence[str]) -> int:
    """Print a plan, or compare predictions with published measurements."""
    given, settings = parser().parse(argv)
    if given.measure or given.out is not None:
        return _measure(given, settings)
    if (given.points is None) == (given.target is None):
        raise UserError(
            "sixfold plan needs either a recipe or model, or --points FILE. See sixfold plan --help"
        )
    if given.points is not None:
        _refuse_others(
            given, settings, ("points", "json"), "sixfold plan --points FILE takes only --json"
        )
        from ..commands.plan_points import plan_points

        return plan_points(given.points, as_json=given.json)
    simulation = _simulation(given)
    cluster, hardware = _devices(given.gpus, given.hardware)
    recorded = None if simulation is None else simulation.recorded
    length = given.length if recorded is None else recorded.mean
    if given.html is not None:
        if given.json:
            raise UserError("sixfold plan: --html writes a page: leave out --json")
        from ..commands.plan_page import PlanQuestion, write_plan_page

        path = Path(given.html).expanduser()
        asked = (length, given.pass_rate, given.variation)
        question = PlanQuestion(given.target, settings, cluster, hardware, *asked)
        write_plan_page(question, path, simulation)
        print(f"wrote {path}")
        return 0
    from ..commands.plan_report import plan_report

    return plan_report(
        given.target,
        settings,
        cluster,
        mean_tokens=length,
        pass_rate=given.pass_rate,
        variation=given.variation,
        simulation=simulation,
        as_json=given.json,
    )
