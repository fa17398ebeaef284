"""Load the tools that `environment.tools.functions` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...errors import UserError
from ..named import Named
from ..registry import TOOLS
from .tool import Registry, Tool, as_tool

NAMED = Named("tool", "function", TOOLS)


def load_tools(specs: Sequence[str], files: Mapping[str, str]) -> tuple[Tool, ...]:
    """The tools that `environment.tools.functions` names. Their modules and files are executed.

    Args:
        specs: built-in names, `path/to/file.py:function` or `module:function`.
        files: values of the settings for files (`ToolRow.file`), by name of the tool.

    Raises:
        UserError: a tool does not exist, fails to load, has no schema, or needs a file that is not
            given or cannot be used. Or a file is given without its tool.
    """
    for name in TOOLS:
        setting = TOOLS.row(name).file
        if setting and bool(files.get(name)) != (name in specs):
            raise UserError(_unpaired(name, setting, named=name in specs))
    tools: list[Tool] = []
    for spec, function in zip(specs, NAMED.load_all(specs), strict=True):
        if spec in TOOLS and TOOLS.row(spec).file:
            tools += function(Path(files[spec]).expanduser())
            continue
        if isinstance(function, type):
            raise UserError(
                f"environment.tools.functions: {spec!r} is a class. Name a function, or set"
                f" environment.episode = {spec!r} if it is an episode"
            )
        tools.append(as_tool(function))
    Registry(tools)  # checks schemas and duplicate names
    return tuple(tools)


def _unpaired(name: str, setting: str, *, named: bool) -> str:
    """Message for a tool without its file, or for a file without its tool."""
    if named:
        return (
            f"environment.tools.functions has {name!r}, but {setting} is empty. Set it to the path"
            " of a file"
        )
    return (
        f"{setting} has no effect without {name!r} in environment.tools.functions. Add {name!r}"
        f" there, or remove {setting}"
    )
