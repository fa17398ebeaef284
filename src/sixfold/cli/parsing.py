"""Arguments of the verbs.

A verb declares its arguments once, as fields of a frozen dataclass:

    @dataclass(frozen=True, kw_only=True)
    class Options:
        run: str = argument("the run's folder, e.g. runs/demo")
        step: PositiveInt = option("step to show", 1)
        color: Literal["auto", "always", "never"] = option("when to write colours", "auto")
        settings: tuple[str, ...] = ()

    PARSER = VerbParser("show", "Print a step.", Options)

The field `settings` is for a verb that takes a recipe. It receives the words `--section.key VALUE`,
which are passed on to the recipe. argparse reads the other words, and converts them by the types of
the fields.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from ..errors import UserError, nearest
from ..recipe.schema import device_name

RECIPE_HELP = "a .toml file, or the name of a shipped recipe such as demo"
RUN_HELP = "the run's folder, e.g. runs/demo"
DEVICE_HELP = "device of the model: auto, cpu, cuda or cuda:N (default auto)"
PRECISION_HELP = (
    "precision of weights and computation; auto: bfloat16 on a GPU if the run or config.json uses"
    " 16 bits, otherwise float32 (default auto)"
)

Given = TypeVar("Given")
"""The options of a verb."""


def argument(help: str, default: Any = MISSING, **form: Any) -> Any:
    """Declare a positional argument as a field of the options.

    Args:
        help: description for --help.
        default: value if the user gives none. Without it, the argument is required.
        form: other keywords of `argparse.ArgumentParser.add_argument`.
    """
    return field(default=default, metadata={"help": help, "positional": True, **form})


def option(help: str, default: Any = None, **form: Any) -> Any:
    """Declare an option as a field of the options. The field `max_tokens` is `--max-tokens`.

    Args:
        help: description for --help.
        default: value if the user gives none. False: the option takes no value, and means True.
            MISSING: the option is required.
        form: other keywords of `argparse.ArgumentParser.add_argument`. `group` is a title in
            --help, above this option and those that follow; "" ends the group. Options with the
            same `either` exclude each other.
    """
    return field(default=default, metadata={"help": help, **form})


class VerbParser(argparse.ArgumentParser, Generic[Given]):
    """Argument parser of one verb. Mistakes raise UserError.

    Args:
        verb: name of the verb.
        description: first lines of --help.
        options: dataclass that declares the arguments.
    """

    def __init__(self, verb: str, description: str, options: type[Given]) -> None:
        super().__init__(
            prog=f"sixfold {verb}",
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.verb = verb
        self._made = options
        types = get_type_hints(options, include_extras=True)
        self.takes_recipe = "settings" in types
        self._group: argparse.ArgumentParser | argparse._ArgumentGroup = self
        self._exclusive: dict[str, argparse._MutuallyExclusiveGroup] = {}
        declared: Sequence[Field[Any]] = fields(options)  # type: ignore[arg-type]
        for one in declared:
            if one.metadata:
                self._declare(one.name, types[one.name], one.default, **one.metadata)

    def _declare(
        self,
        name: str,
        kind: Any,
        default: Any,
        *,
        positional: bool = False,
        group: str | None = None,
        either: str = "",
        **form: Any,
    ) -> None:
        if group is not None:
            self._group = self.add_argument_group(group) if group else self
        to = self._group
        if either:
            to = self._exclusive.get(either) or to.add_mutually_exclusive_group()
            self._exclusive[either] = to
        required = default is MISSING
        if not required:
            form["default"] = list(default) if isinstance(default, tuple) else default
        form = _form_of(kind) | form
        if positional:
            if not required:
                form.setdefault("nargs", "?")
            to.add_argument(name, **{"metavar": name.upper()} | form)
            return
        if default is False:
            form["action"] = "store_true"
        flag = "--" + name.rstrip("_").replace("_", "-")
        to.add_argument(flag, dest=name, required=required, **form)

    def options(self) -> list[str]:
        """The verb's own arguments as the user writes them: positionals in capitals, then flags."""
        return [
            action.option_strings[-1] if action.option_strings else str(action.metavar)
            for action in self._actions
        ]

    def parse(self, arguments: Sequence[str]) -> Given:
        """The options that the words of a command line give.

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
        given = {n: tuple(v) if isinstance(v, list) else v for n, v in vars(parsed).items()}
        return self._made(**given, **({"settings": tuple(settings)} if self.takes_recipe else {}))

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


def _form_of(kind: Any) -> dict[str, Any]:
    """Keywords of argparse that follow from the type of a field.

    Args:
        kind: `str`, `bool`, another type, `Literal[choices]`, `Annotated[type, function of a
            text, metavar]`, one of these `| None`, or `tuple[one of these, ...]`.
    """
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) is Annotated:
        _, function, *metavar = get_args(kind)
        return {"type": function} | ({"metavar": metavar[0]} if metavar else {})
    return {} if kind in (str, bool) else {"type": kind}


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


PositiveInt = Annotated[int, at_least(1), "N"]
NonNegativeInt = Annotated[int, at_least(0), "N"]
PositiveFloat = Annotated[float, above_zero]
Temperature = Annotated[float, temperature]
Device = Annotated[str, device]
Precision = Literal["auto", "float32", "bfloat16"]
"""Types of options."""


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
