"""Objects named in a recipe: a built-in name, `path/to/file.py:object` or `module:object`."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ..errors import UserError, nearest, one_line
from ..plugins import module_spec
from ..user_code import calling

MOVED = {
    "sixfold.agents": "sixfold_serving.agents",
    "sixfold.environment.audit": "sixfold_environments.audit",
    "sixfold.environment.code": "sixfold_environments.code",
    "sixfold.environment.gym": "sixfold_environments.gym",
    "sixfold.environment.judge": "sixfold_environments.judge",
    "sixfold.environment.maths": "sixfold_environments.maths",
    "sixfold.environment.sandbox": "sixfold_environments.sandbox",
    "sixfold.environment.search": "sixfold_environments.search",
    "sixfold.environment.sql": "sixfold_environments.sql",
    "sixfold.environment.text": "sixfold_environments.text",
    "sixfold.environment.tools.mcp": "sixfold_environments.mcp",
    "sixfold.environment.web": "sixfold_environments.web",
    "sixfold.interop": "sixfold_interop",
    "sixfold.interop.environments": "sixfold_environments.adapters",
    "sixfold.labs": "sixfold_labs",
    "sixfold.planning": "sixfold_planning",
    "sixfold.server": "sixfold_serving",
}
"""Modules that have moved, with what is in them -> where they are now."""


def moved_to(module: str) -> str:
    """The present name of a module that has moved. "" for any other."""
    parts = module.split(".")
    for end in range(len(parts), 1, -1):
        if new := MOVED.get(".".join(parts[:end])):
            return ".".join([new, *parts[end:]])
    return ""


class _SourceLoader(SourceFileLoader):
    """Loader of a user's file that neither reads nor writes bytecode.

    Python considers bytecode up to date if its source has the same size and was changed in the same
    second. So a file that was just edited could run in its old version.
    """

    def path_stats(self, path: str) -> NoReturn:
        """Raise OSError instead of returning the time of the last change: no bytecode is used."""
        raise OSError(f"no bytecode for {path}")


@dataclass(frozen=True)
class Named:
    """A kind of object that recipes name.

    Attributes:
        member: kind of the object after the colon, for messages.
        built_in: built-in name -> `module:object`.
    """

    noun: str
    member: str
    built_in: Mapping[str, str]

    @property
    def forms(self) -> str:
        return f"path/to/file.py:{self.member} or module:{self.member}"

    def check(self, spec: str) -> None:
        """Check a spec without running any code.

        Raises:
            UserError: for an unknown name, a malformed spec, a missing file or package.
        """
        source, colon, name = spec.rpartition(":")
        if not colon and spec not in self.built_in:
            names = list(self.built_in)
            raise UserError(
                f"unknown {self.noun} {spec!r}. Use {', '.join([*names, self.forms])}."
                f"{nearest(spec, names)}"
            )
        if colon and not (source and name.isidentifier()):
            raise UserError(f"{self.noun} {spec!r} is malformed. Use {self.forms}")
        if source.endswith(".py") and not Path(source).is_file():
            raise UserError(
                f"{self.noun} {spec!r}: file not found: {source} (looked in {Path.cwd()})"
            )
        if colon and not source.endswith(".py"):
            package = source.partition(".")[0]
            if package not in sys.modules and module_spec(package) is None:
                file = f"{source.replace('.', '/')}.py"
                hint = f". For the file, write {file}:{name}" if Path(file).is_file() else ""
                raise UserError(f"{self.noun} {spec!r}: no module {package!r} is installed{hint}")
            if new := moved_to(source):
                raise UserError(f"{self.noun} {spec!r}: {source} has moved. Write {new}:{name}")

    def absolute(self, spec: str) -> str:
        """The spec with an absolute path, if it names a file: the working folder may change."""
        source, _, name = spec.rpartition(":")
        return f"{Path(source).absolute()}:{name}" if source.endswith(".py") else spec

    def load(self, spec: str) -> Callable[..., Any]:
        """The callable that `spec` names. This runs the module or file.

        Raises:
            UserError: if the name, file, module or object does not exist, or if the code fails to
                load.
        """
        return self.load_all([spec])[0]

    def load_all(self, specs: Sequence[str]) -> list[Callable[..., Any]]:
        """The callables that `specs` name. Each module or file is run once. See `load`."""
        modules: dict[str, ModuleType] = {}
        return [self._load(spec, modules) for spec in specs]

    def _load(self, spec: str, modules: dict[str, ModuleType]) -> Callable[..., Any]:
        self.check(spec)
        source, _, name = self.built_in.get(spec, spec).rpartition(":")
        if source not in modules:
            modules[source] = self._module(source, spec)
        members: Mapping[str, Any] = vars(modules[source])
        found = members.get(name)
        if not callable(found):
            hint = nearest(name, [other for other, member in members.items() if callable(member)])
            raise UserError(f"{self.noun} {spec!r}: {source} has no {self.member} {name!r}.{hint}")
        return found  # type: ignore[no-any-return]

    def name(self, spec: str) -> str:
        """Name of the object, without loading it."""
        return spec if spec in self.built_in else spec.rpartition(":")[2]

    def _module(self, source: str, spec: str) -> ModuleType:
        if source.endswith(".py"):
            return load_file(Path(source), self.noun)
        with loading(f"{self.noun} {spec!r}: cannot import {source}"):
            return importlib.import_module(source)


def load_object(spec: str) -> Any:
    """The object that `module:object` names in a row of a registry."""
    module, _, name = spec.partition(":")
    return getattr(importlib.import_module(module), name)


def load_file(path: Path, noun: str) -> ModuleType:
    """The module of a user's file. This runs it.

    Args:
        path: the file. The folder that holds it is added to the import path.
        noun: what the file has, such as "reward". Part of the module's name.

    Raises:
        UserError: if the file fails to load.
    """
    name = f"sixfold_{noun}_{path.stem}"
    loader = _SourceLoader(name, str(path))
    found = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # the file may import modules beside it
    sys.modules[name] = module  # dataclasses in the file look up their module
    with loading(f"{noun} file {path}"):
        found.loader.exec_module(module)
    return module


@contextmanager
def loading(where: str) -> Iterator[None]:
    """Context in which user code runs before training. What it raises becomes a UserError.

    `except Exception` would not be enough: after a `sys.exit(0)` or a `pytest.skip` the command
    would end as if it had done its work.

    Args:
        where: the file, module or environment, for the message.

    Raises:
        UserError: if the code raises anything, except for Ctrl-C.
    """
    try:
        with calling():
            yield
    except (UserError, KeyboardInterrupt):
        raise
    except SystemExit as error:
        raise UserError(
            f"{where}: it calls sys.exit({error.code!r}). Remove the call, or write it below"
            " `if __name__ == '__main__':`"
        ) from error
    except BaseException as error:
        raise UserError(f"{where}: {one_line(error)}{_moved_import(error)}") from error


def _moved_import(error: BaseException) -> str:
    """The remedy for an import of a module that has moved. "" for any other error."""
    missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if not moved_to(missing):
        return ""
    # The error names the first package that is gone, the line of the import the whole module.
    lines = [frame.line or "" for frame in traceback.extract_tb(error.__traceback__)]
    named = re.findall(rf"\b{re.escape(missing)}[\w.]*", " ".join(lines)) or [missing]
    return f". {named[-1]} has moved. Import {moved_to(named[-1])}"
