"""Load the tools that `environment.tools` names: functions and MCP servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...errors import UserError
from ..named import Named
from .mcp import Listed, McpServer, mcp_tool
from .observation import ToolsFailed
from .replay import Recorder
from .tool import Registry, Tool, as_tool

BUILT_IN: dict[str, str] = {
    "calculator": "sixfold.environment.tools.arithmetic:calculator",
    "python": "sixfold.environment.code.python_tool:python",
    "search": "sixfold.environment.search.tools:corpus_tools",
    "sql": "sixfold.environment.sql.tool:sql_tools",
}
"""Built-in tools, as `module:object`."""

FILES = {"search": "environment.search.corpus", "sql": "environment.sql.database"}
"""Built-in tools that need a file -> setting that names the file."""

TOOLS = Named("tool", "function", BUILT_IN)


def load_tools(specs: Sequence[str], files: Mapping[str, str]) -> tuple[Tool, ...]:
    """The tools that `environment.tools.functions` names. Their modules and files are executed.

    Args:
        specs: built-in names, `path/to/file.py:function` or `module:function`.
        files: values of the settings in `FILES`, by name of the tool. "" if a file is not given.

    Raises:
        UserError: a tool does not exist, fails to load, has no schema, or needs a file that is not
            given or cannot be used. Or a file is given without its tool.
    """
    for name, setting in FILES.items():
        if bool(files.get(name)) != (name in specs):
            raise UserError(_unpaired(name, setting, named=name in specs))
    tools: list[Tool] = []
    for spec, function in zip(specs, TOOLS.load_all(specs), strict=True):
        if spec in FILES:
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


def mcp_tools(
    specs: Sequence[str], recorder: Recorder | None, ending: ExitStack
) -> tuple[Tool, ...]:
    """Tools of MCP servers. The servers start now, except in a replay.

    Args:
        specs: command lines and URLs.
        recorder: records or replays results. None: neither.
        ending: receives the closers of the servers.

    Raises:
        UserError: a server does not start, or is not in the recording.
    """
    tools: list[Tool] = []
    for spec in specs:
        if recorder is not None and recorder.replay:
            listed = [Listed(**one) for one in recorder.tools_of(spec)]
            tools += [mcp_tool(one, _not_in_replay) for one in listed]
            continue
        server = McpServer(spec)
        ending.callback(server.close)
        if recorder is not None:
            recorder.record_tools(spec, [asdict(one) for one in server.listed])
        tools += server.tools()
    return tuple(tools)


async def _not_in_replay(**values: Any) -> str:
    raise ToolsFailed("a replay calls no MCP server")
