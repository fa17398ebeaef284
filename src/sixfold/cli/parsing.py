"""Argument parsing of all verbs.

argparse reads the verb's own arguments. `--section.key` settings are passed on to the recipe.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from ..errors import UserError, nearest
from ..recipe.schema import device_name

RECIPE_HELP = "a .toml file, or the name of a shipped recipe such as demo"
Options = argparse.ArgumentParser | argparse._ArgumentGroup
"""Parser, or group of a parser, that accepts options."""


class VerbParser(argparse.ArgumentParser):
    """Argument parser of one verb. Mistakes raise UserError.

    Args:
        verb: name of the verb.
        description: first lines of --help.
        takes_recipe: accept settings, and list them in --help.
    """

    def __init__(self, verb: str, description: str, *, takes_recipe: bool = False) -> None:
        super().__init__(
            prog=f"sixfold {verb}",
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.verb = verb
        self.takes_recipe = takes_recipe

    def options(self) -> list[str]:
        """The verb's own arguments as the user writes them: positionals in capitals, then flags."""
        return [
            action.option_strings[-1] if action.option_strings else str(action.metavar)
            for action in self._actions
        ]

    def parse(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Split into the verb's own arguments and the settings, which stay flags.

        Raises:
            UserError: for an unknown or misspelt option.
        """
        own, settings = self._split(arguments)
        parsed, unknown = self.parse_known_args(own)
        if unknown:
            raise UserError(
                f"sixfold {self.verb}: unexpected argument '{unknown[0]}'. See sixfold {self.verb}"
                " --help"
            )
        return parsed, settings

    def _split(self, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
        """Separate the verb's own words from settings (`--key value` and `--key=value`).

        argparse cannot do this. It would take 1e-6 in `--trainer.learning_rate 1e-6 demo` for the
        recipe, and report a misspelt option as a missing one.
        """
        own: list[str] = []
        settings: list[str] = []
        words = iter(arguments)
        for word in words:
            name, equals, _ = word.partition("=")
            if (
                not name.startswith("--")
                or name == "--"
                or " " in name
                or name in self._option_string_actions
            ):
                own.append(word)
                continue
            near = "" if "." in name else nearest(name, list(self._option_string_actions))
            if near or not self.takes_recipe:
                raise UserError(
                    f"sixfold {self.verb}: unknown option '{name}'.{near} See sixfold {self.verb}"
                    " --help"
                )
            settings.append(word)
            if not equals:
                settings += [value for value in [next(words, None)] if value is not None]
        return own, settings

    def format_help(self) -> str:
        """argparse's help. For a verb that takes a recipe, the table of settings follows."""
        return super().format_help() + (f"\n{settings_table()}" if self.takes_recipe else "")

    def error(self, message: str) -> NoReturn:
        """Raise UserError, as for every other mistake; argparse would print the usage and exit."""
        raise UserError(f"sixfold {self.verb}: {message}. See sixfold {self.verb} --help")


def settings_table() -> str:
    """Table of all settings by section: key, default, description, valid values."""
    from ..recipe.dump import toml_literal
    from ..recipe.knobs import knobs

    lines = [f"settings ({len(knobs())}), in a recipe or as --section.key VALUE:"]
    section = ""
    for knob in knobs().values():
        if knob.section != section:
            section = knob.section
            lines.append(f"\n[{section}]")
        default = "the algorithm's" if knob.default is None else toml_literal(knob.default)
        lines.append(f"  --{knob.key} {default}")
        lines.append(f"      {knob.purpose} ({knob.accepts})")
    return "\n".join(lines) + "\n"


def at_least(least: int, *, most: int | None = None) -> Callable[[str], int]:
    """argparse type for an integer >= `least`, and <= `most` if there is such a limit."""

    def whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"expected an integer >= {least}, got '{text}'")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"expected an integer <= {most}, got '{text}'")
        return value

    return whole


def above_zero(text: str) -> float:
    """Argument type: a positive number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number")
    return value


def temperature(text: str) -> float:
    """argparse type for a temperature: 0, or a finite number >= 1e-20.

    Logits divided by a smaller number overflow float32.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and (value == 0 or value >= 1e-20)):
        raise argparse.ArgumentTypeError(
            f"expected 0 (greedy) or a finite number >= 1e-20, got '{text}'"
        )
    return value


def device(text: str) -> str:
    """argparse type for a device. Loading the model later checks that it exists."""
    try:
        return device_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"'{text}': use auto, cpu, cuda, or cuda:N for GPU number N"
        ) from error


def add_device(arguments: Options) -> None:
    """Add --device and --precision."""
    arguments.add_argument(
        "--device",
        metavar="DEVICE",
        type=device,
        default="auto",
        help="device of the model: auto, cpu, cuda or cuda:N (default auto)",
    )
    arguments.add_argument(
        "--precision",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help=(
            "precision of weights and computation; auto: bfloat16 on a GPU if the run or"
            " config.json uses 16 bits, otherwise float32 (default auto)"
        ),
    )


def run_folder(text: str) -> Path:
    """Folder of a run.

    Raises:
        UserError: if the folder does not hold a run.
    """
    folder = Path(text).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"no run at {folder}: {'it is a file' if folder.exists() else 'no such folder'}; a run"
            " is a folder such as runs/demo"
        )
    if not (folder / "recipe.toml").is_file():
        raise UserError(
            f"{folder} is not a run: it holds no recipe.toml; a run is a folder such as runs/demo"
        )
    return folder
