"""`sixfold plan TARGET` and `sixfold plan --points FILE`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sixfold.cli.parsing import (
    NonNegativeInt,
    PositiveFloat,
    VerbParser,
    above_zero,
    argument,
    at_least,
    option,
    run_folder,
)
from sixfold.errors import UserError
from sixfold.files.durable import check_target

if TYPE_CHECKING:
    from .hardware import Cluster
    from .page.simulation import SimulationRequest

PURPOSE = "predict memory, step time and cost before a run, or check the model of them"

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
    sixfold plan gsm8k --model.path Qwen/Qwen2.5-7B-Instruct --gpus 8xH100 --solve
    sixfold plan --measure; sixfold plan demo --gpus here

It begins with the answer: "Sixfold runs this", "runs it with these settings together", or "cannot
run this, because". The exit code is 0 if Sixfold runs this, 4 if it runs it with the settings that
are named, 1 if it cannot, 5 if the memory is not known, and 2 for a mistake in the command. With
--html it is 0 once the page is written.

TARGET is a recipe, a model folder or its config.json, the name of a public model, or a number of
parameters such as 70B, which stands for the nearest public model. Nothing is loaded, downloaded or
started. docs/planning.md says how far the times can be trusted. With --html FILE: write a page with
sliders instead of text. With --json: print the numbers, unrounded, as one JSON object (bytes,
seconds unless the name says otherwise).

With --solve: search topologies, ranks and settings for the recipe lines that fit and are fastest,
and print them, or what is missing (exit code 1).

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


@dataclass(frozen=True, kw_only=True)
class Options:
    target: str | None = argument("recipe or model", None)
    gpus: str | None = option("such as 8xH100 (default 1xH100), or 'here'", either="devices")
    hardware: str | None = option(
        "TOML file that describes a device", metavar="FILE", either="devices"
    )
    measure: bool = option("time this machine, for later use of --gpus here", False)
    out: str | None = option("with --measure: the file to write", metavar="FILE")
    length: PositiveFloat | None = option(
        "mean length of completions (default: as data.curriculum.profile has measured, else half of"
        " the bound)",
        metavar="TOKENS",
    )
    check: PositiveFloat | None = option(
        "seconds of a reward check after the last token (default: it hides behind sampling)",
        metavar="SECONDS",
    )
    pass_rate: Annotated[float, share] | None = option(
        "share of correct samples (default: as data.curriculum.profile has measured, else 0.5)",
        metavar="SHARE",
    )
    variation: Annotated[float, spread] = option(
        "standard deviation of lengths divided by their mean, at most 10 (default 0.8)",
        0.8,
        metavar="NUMBER",
    )
    solve: bool = option("search the recipe lines with which it fits and is fastest", False)
    simulate: Annotated[int, at_least(1, most=1000)] | None = option(
        f"simulate this many steps, at most 1000 ({STEPS} if no number is given)",
        nargs="?",
        const=STEPS,
        metavar="STEPS",
        group="simulation",
    )
    run: str | None = option(
        "take lengths and rewards from the rollouts of this run", metavar="FOLDER"
    )
    staleness: NonNegativeInt | None = option(
        f"bound of the age of samples in the async topology (default {STALENESS})",
        metavar="VERSIONS",
    )
    mtbf: PositiveFloat | None = option("mean time between failures of one device", metavar="HOURS")
    restart: PositiveFloat | None = option(
        f"time from a failure until work goes on (default {RESTART:g})", metavar="SECONDS"
    )
    seed: NonNegativeInt | None = option("seed of the simulation (default 0)", metavar="NUMBER")
    points: str | None = option("CSV file of published measurements", metavar="FILE", group="")
    html: str | None = option("write a page with sliders to FILE", metavar="FILE")
    json: bool = option("print the numbers as JSON", False)
    settings: tuple[str, ...] = ()


PARSER = VerbParser("plan", TEXT, Options)


def _simulation(given: Options) -> SimulationRequest | None:
    """What the options of the simulation ask for. None without `--simulate`."""
    if given.simulate is None:
        for name in ("run", "staleness", "mtbf", "restart", "seed"):
            if getattr(given, name) is not None:
                raise UserError(f"--{name} belongs to a simulation: add --simulate")
        return None
    if given.restart is not None and given.mtbf is None:
        raise UserError("--restart belongs to failures: add --mtbf HOURS")
    if given.run is not None and given.length is not None:
        raise UserError("--length and --run both give lengths of completions: leave one out")
    from .page.simulation import SimulationRequest, recorded_groups

    return SimulationRequest(
        steps=given.simulate,
        staleness=STALENESS if given.staleness is None else given.staleness,
        seed=given.seed or 0,
        recorded=None if given.run is None else recorded_groups(run_folder(given.run)),
        device_hours=given.mtbf,
        restart_seconds=given.restart or RESTART,
    )


def _devices(gpus: str | None, hardware: str | None) -> tuple[Cluster, str]:
    """The devices that the options name, and the hardware file that describes them, or ""."""
    from .hardware import parse_cluster
    from .hardware_file import measured_hardware, measured_path, read_hardware

    if gpus == HERE:
        path, here = measured_path(), measured_hardware()
        if here is None:
            raise UserError(
                f"--gpus {HERE}: this machine was not measured ({path} does not exist)."
                " Run sixfold plan --measure"
            )
        return here, str(path)
    if hardware is not None:
        return read_hardware(hardware), hardware
    return parse_cluster("H100" if gpus is None else gpus), ""


def _measure(given: Options) -> int:
    """Measure this machine."""
    if not given.measure:
        raise UserError("sixfold plan: --out belongs to a measurement: add --measure")
    _refuse_others(
        given,
        ("measure", "out"),
        "sixfold plan --measure times this machine and takes only --out FILE",
    )
    path = None if given.out is None else Path(given.out).expanduser()
    if path is not None:
        check_target(path)
    from .measure import measure

    return measure(path)


def _refuse_others(given: Options, taken: Sequence[str], rule: str) -> None:
    """Refuse options that a form of the command would ignore.

    Args:
        taken: names of the options that this form takes.
        rule: what this form does and takes, for the message.
    """
    others = [one for one in fields(given) if one.name not in taken]
    asked = [one.name for one in others if getattr(given, one.name) != one.default]
    if asked:
        setting = given.settings[0].lstrip("-") if given.settings else ""
        name = setting if asked[0] == "settings" else asked[0].replace("_", "-")
        raise UserError(f"{rule}: leave out {name}")


def run(arguments: Sequence[str]) -> int:
    """Print a plan, or compare predictions with published measurements. Returns the exit code."""
    given = PARSER.parse(arguments)
    if given.measure or given.out is not None:
        return _measure(given)
    if given.points is not None and given.target is None:
        _refuse_others(given, ("points", "json"), "sixfold plan --points FILE takes only --json")
        from .page.points import plan_points

        return plan_points(given.points, as_json=given.json)
    if given.points is not None or given.target is None:
        raise UserError(
            "sixfold plan needs either a recipe or model, or --points FILE. See sixfold plan --help"
        )
    if given.solve:
        taken = ("target", "settings", "gpus", "hardware", "length", "json", "solve")
        rule = "sixfold plan --solve takes devices, --length, --json and settings"
        _refuse_others(given, taken, rule)
        from .page.solution import solve_report

        devices, _ = _devices(given.gpus, given.hardware)
        return solve_report(
            given.target, given.settings, devices, mean_tokens=given.length, as_json=given.json
        )
    simulation = _simulation(given)
    cluster, hardware = _devices(given.gpus, given.hardware)
    recorded = None if simulation is None else simulation.recorded
    length = given.length if recorded is None else recorded.mean
    if given.html is not None:
        for name in ("json", "check"):
            if getattr(given, name):
                raise UserError(f"sixfold plan: --html writes a page: leave out --{name}")
        from .page.html import PlanQuestion, write_plan_page

        path = Path(given.html).expanduser()
        asked = (length, given.pass_rate, given.variation)
        question = PlanQuestion(given.target, given.settings, cluster, hardware, *asked)
        write_plan_page(question, path, simulation)
        print(f"wrote {path}")
        return 0
    from .page.report import plan_report

    return plan_report(
        given.target,
        given.settings,
        cluster,
        mean_tokens=length,
        check_s=given.check or 0.0,
        pass_rate=given.pass_rate,
        variation=given.variation,
        simulation=simulation,
        as_json=given.json,
    )
