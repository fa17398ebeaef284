"""The verbs, flags and settings of the command line equal options.txt, so that no change is
accidental.
"""

from __future__ import annotations

from pathlib import Path

from sixfold.cli import module_of, verbs
from sixfold.recipe.knobs import knobs

FROZEN = Path(__file__).with_name("options.txt")


def options() -> str:
    """Every verb with its arguments, then every setting with its valid values and default."""
    commands = [" ".join([verb, *module_of(verb).PARSER.options()]) for verb in verbs()]
    settings = [
        f"--{knob.key} {knob.accepts}; default {knob.default!r}" for knob in knobs().values()
    ]
    return "\n".join([*commands, "", *settings]) + "\n"


def test_the_options_are_the_frozen_ones() -> None:
    assert options() == FROZEN.read_text(encoding="utf-8"), (
        "the command line changed. If that is meant, write the new list with `python"
        " tests/cli/test_cli_options.py` and commit it"
    )


if __name__ == "__main__":
    FROZEN.write_text(options(), encoding="utf-8")
