"""`sixfold env init NAME` and `sixfold env list`.

The templates of a new environment are in the folder `new_environment`.
"""

from __future__ import annotations

import keyword
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..cli.parsing import VerbParser, argument, option
from ..errors import UserError

TEMPLATES = Path(__file__).with_name("new_environment")
SUFFIX = ".template"
LONGEST_NAME = 60

_NAME = re.compile(r"[a-z][a-z0-9]*(?:[_-][a-z0-9]+)*")

TEXT = """\
Create or list environments of several turns.

init NAME creates the folder NAME in the current folder, with an environment, its tasks, a recipe, a
README and a test. It is ready to use: `pytest NAME`, `sixfold train NAME/recipe.toml`.

list prints the built-in environments, and the libraries whose environments can be used.
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    action: Literal["init", "list"] = argument("init or list")
    name: str | None = argument("init: name of the new folder", None)
    tools: bool = option("init: create an environment in which the policy calls tools", False)


PARSER = VerbParser("env", TEXT, Options)


def run(arguments: Sequence[str]) -> int:
    given = PARSER.parse(arguments)
    if given.action == "list":
        if given.name or given.tools:
            raise UserError("sixfold env list takes no other arguments")
        from ..environment.episodes import described

        for name, line in described().items():
            print(f"{name:<16}{line}")
        return 0
    if not given.name:
        raise UserError("sixfold env init needs the NAME of the new folder")
    made = create(given.name, tools=given.tools)
    print(f"created {made}:")
    for path in sorted(made.iterdir()):
        print(f"  {path}")
    print(f"try it:   pytest {made}\ntrain it: sixfold train {made}/recipe.toml")
    return 0


def create(name: str, *, tools: bool) -> Path:
    """Create the folder `name` in the current folder. Its tasks are made by its tasks.py.

    Args:
        name: name of the folder. The names of the class and of the test follow from it.
        tools: make an environment whose policy calls tools.

    Returns:
        The new folder, relative to the current one.

    Raises:
        UserError: if the name is not allowed, or the folder exists.
    """
    _check(name)
    folder = Path(name)
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder.absolute()} exists. Choose another name, or remove it")
    module = name.replace("-", "_")
    words = {
        "NAME": name,
        "MODULE": module,
        "CLASS": "".join(word.capitalize() for word in module.split("_")),
    }
    # A half-written folder must not stay behind: it would be refused at the next try.
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=".") as made:
        new = Path(made) / "new"
        new.mkdir()
        for template in sorted((TEMPLATES / ("tools" if tools else "plain")).glob(f"*{SUFFIX}")):
            target = new / _filled(template.name.removesuffix(SUFFIX), words)
            target.write_text(_filled(template.read_text("utf-8"), words), "utf-8")
        with (new / "tasks.jsonl").open("wb") as tasks:
            subprocess.run([sys.executable, new / "tasks.py"], stdout=tasks, check=True)
        shutil.move(new, folder)
    return folder


def _check(name: str) -> None:
    """Raise UserError unless the name can be that of a folder, a module and a class."""
    if not _allowed(name):
        suggested = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_0123456789")[:40]
        suggested = suggested if _allowed(suggested) else f"{suggested}_env"
        hint = f", for example {suggested}" if _allowed(suggested) else ""
        raise UserError(
            f"sixfold env init: {name!r} cannot be the name of an environment. Use up to"
            f" {LONGEST_NAME} lower-case letters, digits, _ and -, and begin with a letter{hint}"
        )


def _allowed(name: str) -> bool:
    # A folder "sixfold" would hide the package from programs that run in the same folder.
    reserved = keyword.iskeyword(name) or name == "sixfold"
    return bool(_NAME.fullmatch(name)) and len(name) <= LONGEST_NAME and not reserved


def _filled(text: str, words: dict[str, str]) -> str:
    """The text with every `@KEY@` replaced."""
    for key, value in words.items():
        text = text.replace(f"@{key}@", value)
    return text
