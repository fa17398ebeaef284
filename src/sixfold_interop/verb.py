"""`sixfold import trl|verl|openrlhf CONFIG`: another framework's settings as a recipe."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sixfold.cli.parsing import PositiveInt, VerbParser, argument, option
from sixfold.errors import UserError, one_line
from sixfold.recipe.dump import toml_literal
from sixfold.recipe.knobs import kind_knobs, knobs
from sixfold.recipe.plan import make_plan
from sixfold.recipe.toml import parse_staged

from . import FRAMEWORKS
from .imported import import_settings
from .trl import ENTRIES
from .trl_stages import trainers

PURPOSE = "convert settings of TRL, verl or OpenRLHF into a recipe"

TEXT = """\
Convert settings of TRL, verl or OpenRLHF into a recipe, which is printed. Comments at its beginning
name what has no counterpart: sixfold import trl config.yaml > my.toml

CONFIG is a file: YAML, JSON or a shell script that starts the training; or for verl one or several
overrides KEY=VALUE, and for openrlhf flags after --.
"""

TRAINERS = (*ENTRIES, *trainers())
_ASSIGNED = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)")
_COMMAND = "(trainer)"
"""Key under which the words of a command have the trainer of TRL that it starts."""
_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^}]*))?\}|\$(\w+)")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True, kw_only=True)
class Options:
    framework: str = argument("trl, verl or openrlhf", choices=list(FRAMEWORKS))
    config: tuple[str, ...] = argument("file, or settings", nargs="+")
    processes: PositiveInt = option(
        "processes of TRL's training: its batch sizes count per process (default 1)", 1
    )
    trainer: str = option(
        f"trainer of TRL that has these settings: {', '.join(TRAINERS)} (default: told by the"
        " command or the settings)",
        "",
        choices=TRAINERS,
        metavar="TRAINER",
    )


PARSER = VerbParser("import", TEXT, Options)


def run(arguments: Sequence[str]) -> int:
    """Print the recipe."""
    words, flags = list(arguments), []
    if "--" in words:  # what follows are the framework's own flags
        at = words.index("--")
        words, flags = [*words[:at], "flags"], words[at + 1 :]
    given = PARSER.parse(words)
    config = flags or given.config
    settings = _read(given.framework, config)
    if not settings:
        raise UserError(
            f"{config[0]} has no settings of {given.framework}. Give a YAML or JSON file, a shell"
            " script, or the settings themselves"
        )
    trainer = given.trainer
    if given.framework == "trl":
        trainer = trainer or str(settings.pop(_COMMAND, ""))
    elif trainer:
        raise UserError(f"sixfold import {given.framework}: --trainer is for trl")
    made = import_settings(given.framework, settings, given.processes, trainer)
    known = {**knobs(), **kind_knobs()}
    notes = [*made.notes]
    notes += [
        f"{key} = {value!r} is no setting of a recipe"
        for key, value in made.settings.items()
        if key not in known
    ]
    text = _recipe({key: value for key, value in made.settings.items() if key in known})
    if made.kind:
        text += f'\n[[stages]]\nkind = "{made.kind}"\n'
    try:
        staged = parse_staged(text, "the converted recipe")
        for recipe in [stage.recipe for stage in staged.stages] or [staged.base]:
            make_plan(recipe)
    except UserError as error:
        notes.append(f"to be corrected: {error}")
    head = [f"# From {FRAMEWORKS[given.framework].title}.", *(f"# {note}" for note in notes)]
    print("\n".join(" ".join(line.split()) for line in head), text, sep="\n\n", end="")
    return 0


def _recipe(settings: Mapping[str, Any]) -> str:
    sections: dict[str, list[str]] = {}
    for key, value in sorted(settings.items()):
        section, _, name = key.rpartition(".")
        sections.setdefault(section, [f"[{section}]"]).append(f"{name} = {toml_literal(value)}")
    return "\n\n".join("\n".join(lines) for lines in sections.values()) + "\n"


def _read(framework: str, config: Sequence[str]) -> dict[str, Any]:
    path = Path(config[0])
    if len(config) > 1 or not path.is_file():
        if "=" not in config[0] and not config[0].startswith("--"):
            raise UserError(f"file not found: {config[0]} (looked in {Path.cwd()})")
        return dict(_words(framework, config))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error
    command = any(sign in text for sign in ("\\\n", "=", " --"))
    if path.suffix not in (".yaml", ".yml", ".json") and command:
        return dict(_words(framework, _command(text)))
    found = _yaml(text, str(path))
    if not isinstance(found, dict):
        raise UserError(f"{path} has no settings: give a mapping of names to values")
    return dict(_flat(found)) if framework != "trl" else {k: _value(v) for k, v in found.items()}


def _yaml(text: str, where: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{where} is not YAML: {one_line(error)}") from error


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + str(name), _value(value)


def _command(script: str) -> list[str]:
    """Words of a shell script, with its simple variables replaced."""
    variables: dict[str, str] = {}

    def replaced(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        return variables.get(name, found[2] or "") if name in variables or found[2] else found[0]

    words: list[str] = []
    for line in script.replace("\\\n", " ").splitlines():
        try:
            parts = shlex.split(_VARIABLE.sub(replaced, line), comments=True)
        except ValueError:  # a line of the shell's own language
            continue
        assigned = _ASSIGNED.fullmatch(" ".join(parts)) if parts else None
        if assigned and "." not in assigned[1]:
            variables[assigned[1]] = assigned[2]
        else:
            words += parts
    return words


def _words(framework: str, words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Settings among the words of a command: KEY=VALUE for verl, else --KEY VALUES."""
    if framework == "verl":
        for word in words:
            key, equals, value = word.partition("=")
            if equals and re.fullmatch(r"[+~]*\w+(\.[\w@]+)+", key):
                yield key.lstrip("+~"), _value(_yaml(value, word) if value else "")
        return
    if framework == "trl":
        train = [at for at in range(len(words)) if _trainer(words, at)][:1]
        yield from ((_COMMAND, _trainer(words, at)) for at in train)
    else:
        train = [at for at, word in enumerate(words) if "train_ppo_ray" in word]
    words = words[train[-1] + 1 :] if train else words
    starts = [at for at, word in enumerate(words) if word.startswith("--")]
    for at, end in zip(starts, [*starts[1:], len(words)], strict=True):
        key, equals, value = words[at].removeprefix("--").partition("=")
        values = [_value(_yaml(one, key)) for one in ([value] if equals else words[at + 1 : end])]
        if framework == "trl" and key.startswith("no_") and not values:
            yield key.removeprefix("no_"), False
        else:
            yield key, True if not values else values[0] if len(values) == 1 else values


def _trainer(words: Sequence[str], at: int) -> str:
    """The trainer of TRL that a word of a command names, if it starts one. Or empty.

    A command is `trl dpo`, `python scripts/dpo.py` or `python -m trl.scripts.dpo`.
    """
    before, name = (word.rpartition("/")[2] for word in ["", *words][at : at + 2])
    if not (before == "trl" or name.endswith(".py") or name.startswith("trl.scripts.")):
        return ""
    stem = name.removesuffix(".py").removeprefix("trl.scripts.")
    stem = "reward" if stem == "reward_modeling" else stem
    return stem if stem in (*TRAINERS, "sft") else ""


def _value(value: Any) -> Any:
    """The value, with a number as a number: YAML reads 1e-6 as text."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return float(value) if set(value) & set(".eE") else int(value)
    if isinstance(value, str) and value in ("None", "null"):
        return None
    return [_value(one) for one in value] if isinstance(value, list) else value
