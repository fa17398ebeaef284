"""How every verb reads its arguments: argparse for the verb's own, `--section.key` settings kept
apart for the recipe.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from ..errors import UserError, nearest
from ..recipe.schema import device_name

RECIPE_HELP = "a .toml file, or the name of a shipped recipe, e.g. demo"


class VerbParser(argparse.ArgumentParser):
    """Arguments of one verb. With takes_recipe, settings are allowed and listed by --help. Mistakes
    are UserErrors.
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
        """(the verb's own arguments, the settings as flags for `recipe_io`)."""
        own, settings = self._split(arguments)
        parsed, unknown = self.parse_known_args(own)
        if unknown:
            raise UserError(
                f"sixfold {self.verb}: unexpected argument '{unknown[0]}'. See sixfold {self.verb}"
                " --help"
            )
        return parsed, settings

    def _split(self, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
        """Keep apart the verb's own words and, for a recipe, `--key value` and `--key=value` of
        everything that is not the verb's own.

        argparse cannot: given `--trainer.learning_rate 1e-6 demo` it would take 1e-6 for the
        recipe; and for a misspelt option it complains of the one that is then missing.
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
        """argparse's help and, for a verb that takes a recipe, the table of settings."""
        return super().format_help() + (f"\n{settings_table()}" if self.takes_recipe else "")

    def error(self, message: str) -> NoReturn:
        """argparse would print usage and exit; one line is what every other mistake gets."""
        raise UserError(f"sixfold {self.verb}: {message}. See sixfold {self.verb} --help")


def settings_table() -> str:
    """Every knob by section: key, default, valid values, one line on what it is."""
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
        lines.append(f"      {knob.description} ({knob.accepts})")
    return "\n".join(lines) + "\n"


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number >= least."""

    def whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"expected an integer >= {least}, got '{text}'")
        return value

    return whole


def temperature(text: str) -> float:
    """An argparse type: 0, or a finite number from 1e-20; logits divided by less overflow
    float32.
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
    """A device's name; whether it is there is known when a model is loaded."""
    try:
        return device_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"'{text}': use auto, cpu, cuda, or cuda:N for GPU number N"
        ) from error


def add_device(arguments: argparse.ArgumentParser) -> None:
    """The options that say where a model runs, and in which precision."""
    arguments.add_argument(
        "--device",
        metavar="DEVICE",
        type=device,
        default="auto",
        help="auto, cpu, cuda or cuda:N (default auto)",
    )
    arguments.add_argument(
        "--precision",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help=(
            "of weights and computation; auto: on a GPU bfloat16 where the run or config.json says"
            " 16 bits, else float32 (default auto)"
        ),
    )


def run_folder(text: str) -> Path:
    """A folder that holds a run. UserError when it does not."""
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
