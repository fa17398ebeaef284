"""Create the folder of a new environment from the templates in this folder.

The tasks are made by running the new folder's tasks.py.
"""

from __future__ import annotations

import keyword
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ...errors import UserError

TEMPLATES = Path(__file__).parent
SUFFIX = ".template"
LONGEST_NAME = 60

_NAME = re.compile(r"[a-z][a-z0-9]*(?:[_-][a-z0-9]+)*")


def create(name: str, *, tools: bool) -> Path:
    """Create the folder `name` in the current folder.

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
