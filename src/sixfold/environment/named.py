"""Objects named in a recipe: a built-in name, `path/to/file.py:object` or `module:object`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ..errors import UserError, nearest


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
        noun: name of the kind, for messages.
        member: kind of the object after the colon, for messages.
        built_in: built-in name -> `module:object`.
    """

    noun: str
    member: str
    built_in: Mapping[str, str]

    @property
    def forms(self) -> str:
        """The two forms of a spec."""
        return f"path/to/file.py:{self.member} or module:{self.member}"

    def check(self, spec: str) -> None:
        """Check a spec without running any code.

        Raises:
            UserError: for an unknown name, a malformed spec or a missing file.
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
        try:
            return importlib.import_module(source)
        except Exception as error:
            raise UserError(
                f"{self.noun} {spec!r}: cannot import {source}: {type(error).__name__}: {error}"
            ) from error


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
    module_spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # the file may import modules beside it
    sys.modules[name] = module  # dataclasses in the file look up their module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{noun} file {path}: {type(error).__name__}: {error}") from error
    return module
