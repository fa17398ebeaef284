"""`sixfold env init NAME` and `sixfold env list`."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UserError
from .parsing import VerbParser

ACTIONS = ("init", "list")

TEXT = """\
Create or list environments of several turns.

init NAME creates the folder NAME in the current folder, with an environment, its tasks, a recipe, a
README and a test. It is ready to use: `pytest NAME`, `sixfold train NAME/recipe.toml`.

list prints the built-in environments, and the libraries whose environments can be used.
"""


def parser() -> VerbParser:
    """Arguments of the verb."""
    arguments = VerbParser("env", TEXT)
    arguments.add_argument("action", metavar="ACTION", choices=ACTIONS, help=" or ".join(ACTIONS))
    arguments.add_argument("name", metavar="NAME", nargs="?", help="init: name of the new folder")
    arguments.add_argument(
        "--tools",
        action="store_true",
        help="init: create an environment in which the policy calls tools",
    )
    return arguments


def run(argv: Sequence[str]) -> int:
    """Create an environment, or list the available ones."""
    given, _ = parser().parse(argv)
    if given.action == "list":
        if given.name or given.tools:
            raise UserError("sixfold env list takes no other arguments")
        from ..environment.episodes import described

        for name, line in described().items():
            print(f"{name:<16}{line}")
        return 0
    if not given.name:
        raise UserError("sixfold env init needs the NAME of the new folder")
    from ..commands.new_environment import create

    made = create(given.name, tools=given.tools)
    print(f"created {made}:")
    for path in sorted(made.iterdir()):
        print(f"  {path}")
    print(f"try it:   pytest {made}\ntrain it: sixfold train {made}/recipe.toml")
    return 0
