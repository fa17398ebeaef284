"""Tools of MCP servers, with the official SDK (the extra `mcp`).

A server is a command that speaks MCP over its standard input and output, or a URL. Each server has
its own thread with an event loop, so a server that hangs does not block the run's event loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import json
import logging
import os
import shlex
import shutil
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import IO, Any

from pydantic import ValidationError as UnreadableLine

from sixfold.environment.tools.observation import ToolError, ToolsFailed
from sixfold.environment.tools.replay import Recorder
from sixfold.environment.tools.tool import Tool
from sixfold.errors import UserError, one_line
from sixfold.processes.child import supervised

START_S = 60.0
"""Seconds within which a server must connect and list its tools."""
END_S = 8.0
"""Seconds to wait for the end of a server. The SDK kills its process earlier."""
RESTARTS = 1
"""How often a server that has ended is started again in a run."""
MAX_TOOLS = 1024
"""Maximum number of tools of one server."""


@dataclass(frozen=True)
class Listed:
    """Description of a tool by its server. It is the `Arguments` of the tool.

    Attributes:
        read_only: True if, according to the server, the tool changes no state.
    """

    name: str
    description: str
    schema: dict[str, Any]
    read_only: bool
    version: str

    def check_schema(self, server: str) -> None:
        """Check the schema, so that no call fails because of it.

        Args:
            server: command or URL of the server, for the message.

        Raises:
            UserError: the schema is not a JSON schema, or refers to a definition that it lacks.
        """
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for

        validator = validator_for(self.schema)
        try:
            validator.check_schema(self.schema, format_checker=validator.FORMAT_CHECKER)
            problem = _missing_reference(self.schema)
        except SchemaError as error:
            problem = f"{error.json_path}: {one_line(error.message)[:200]}"
        if problem:
            raise UserError(
                f"environment.tools.mcp: the tool {self.name!r} of the server {server!r} has an"
                f" invalid schema of its arguments ({problem}). Correct it in the server"
            )

    def values(self, arguments: str) -> dict[str, Any]:
        """Arguments of a call.

        Raises:
            ToolError: they do not fit the schema.
        """
        from jsonschema import ValidationError
        from jsonschema.validators import validator_for

        try:
            values = json.loads(arguments or "{}")
            # Neither NaN nor half of a surrogate pair can be sent to the server.
            json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
            found = next(validator_for(self.schema)(self.schema).iter_errors(values), None)
        except (ValueError, RecursionError) as error:
            problem = f"the arguments are not a JSON object: {error}"
            raise ToolError(problem[:300], "bad_json") from error
        if not isinstance(values, dict):
            raise ToolError("the arguments are not a JSON object", "bad_json")
        if isinstance(found, ValidationError):
            kinds = {"required": "missing_argument", "additionalProperties": "unknown_argument"}
            kind = kinds.get(str(found.validator), "") if not found.path else ""
            where = ".".join(map(str, found.path))
            problem = f"the argument {where!r}: {found.message}" if where else found.message
            raise ToolError(problem[:300], kind or "wrong_argument")  # type: ignore[arg-type]
        return values


class McpServer:
    """One server and its tools.

    If the server ends during the run, it is started again once. The calls that it was running fail
    with a structured error. If it ends again, the episodes that call it fail.

    Args:
        spec: a command line, or a URL that begins with http:// or https://.

    Raises:
        UserError: the SDK is not installed, the server does not start and list its tools, or a tool
            has an invalid schema.
    """

    def __init__(self, spec: str) -> None:
        if find_spec("mcp") is None:
            raise UserError(
                "environment.tools.mcp needs the MCP SDK. Run pip install 'sixfold[mcp]'"
            )
        self._spec = spec
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._connection: _Connection | None = None
        self._starts = 0
        self._restarting: asyncio.Lock | None = None
        try:
            self.listed = self._soon(self._connect()).result(START_S + END_S)
            for one in self.listed:
                one.check_schema(spec)
        except (Exception, KeyboardInterrupt) as error:
            self.close()
            if isinstance(error, KeyboardInterrupt | UserError):
                raise
            unread = self._connection.unreadable if self._connection else ""
            raise UserError(
                f"environment.tools.mcp: {spec!r} does not answer as an MCP server:"
                f" {_reason(error)}{unread}. Try the command alone"
            ) from error

    def tools(self) -> list[Tool]:
        return [mcp_tool(one, self._function(one.name)) for one in self.listed]

    def close(self) -> None:
        if self._loop.is_closed():
            return
        # A thread that does not end in time is a daemon: it ends with the process.
        with suppress(TimeoutError, concurrent.futures.CancelledError):
            self._soon(self._leave()).result(END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _soon(self, work: Any) -> concurrent.futures.Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _function(self, name: str) -> Callable[..., Awaitable[str]]:
        """Async function that calls a tool, from any event loop."""

        async def call(**values: Any) -> str:
            return str(await asyncio.wrap_future(self._soon(self._ask(name, values))))

        return call

    # The methods below run in the server's event loop.

    async def _connect(self) -> list[Listed]:
        self._starts += 1
        self._restarting = self._restarting or asyncio.Lock()
        self._connection = _Connection(self._spec)
        return await self._connection.ready

    async def _leave(self) -> None:
        if self._connection is not None:
            await self._connection.leave()

    async def _ask(self, name: str, values: Mapping[str, Any]) -> str:
        connection = self._connection
        assert connection is not None
        if connection.failure:
            connection = await self._again(connection)
        try:
            return await connection.call(name, values)
        except ConnectionError as error:
            await self._again(connection)
            raise ToolError(
                f"the MCP server {self._spec!r} ended during the call. It was started again"
            ) from error

    async def _again(self, ended: _Connection) -> _Connection:
        """Start the server again, unless another call has done so."""
        assert self._restarting is not None
        async with self._restarting:
            if self._connection is ended:
                if self._starts > RESTARTS:
                    raise ToolsFailed(f"the MCP server {self._spec!r} has ended {ended.last_words}")
                await ended.leave()
                try:
                    await self._connect()
                except Exception as error:
                    raise ToolsFailed(
                        f"the MCP server {self._spec!r} does not start again: {_reason(error)}"
                    ) from error
        assert self._connection is not None
        return self._connection


class _Connection:
    """One session with a server.

    The session runs in one asyncio task: the SDK must be entered and left in the same task.

    Args:
        spec: see `McpServer`.

    Attributes:
        ready: future descriptions of the tools, set when the session is connected.
        failure: why the session ended. "" while it is open.
        unreadable: note with the first line on the server's standard output that is no message of
            the protocol, or "".
    """

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self._client: Any = None
        self._left = asyncio.Event()
        self._errors: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.failure = ""
        self.unreadable = ""
        self.ready: asyncio.Future[list[Listed]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._session())

    @property
    def last_words(self) -> str:
        """The last line that the server wrote to its standard error, in brackets, or ""."""
        self._errors.flush()
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 2000))
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return f"(its last words: {lines[-1][:200]})" if lines else ""

    async def call(self, name: str, values: Mapping[str, Any]) -> str:
        """Call a tool. Returns its result as text.

        Raises:
            ToolError: the server refused the call, or the tool failed.
            ConnectionError: the server has ended.
        """
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED

        asked = asyncio.ensure_future(self._client.call_tool(name, dict(values)))
        ended = asyncio.ensure_future(self._left.wait())
        try:
            await asyncio.wait((asked, ended), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise ConnectionError(self.failure)
            answer = asked.result()
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                self.failure = one_line(error)
                raise ConnectionError(self.failure) from error
            raise ToolError(f"{error.message}"[:300]) from error
        except OSError as error:
            self.failure = one_line(error)
            raise ConnectionError(self.failure) from error
        finally:
            asked.cancel()
            ended.cancel()
        text = _text(answer)
        if answer.is_error:
            raise ToolError(text[:1000] or "the tool failed")
        return text

    async def leave(self) -> None:
        """End the session, and the server if it is a child process."""
        self._left.set()
        await asyncio.wait((self._task,), timeout=END_S)
        self._task.cancel()
        self._errors.close()

    async def _session(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(START_S):
                    self._client = await stack.enter_async_context(self._make_client())
                    listed = await self._list_tools()
                if not self.ready.done():
                    self.ready.set_result(listed)
                await self._left.wait()
        except Exception as error:  # noqa: BLE001  the SDK raises groups of many kinds
            self.failure = self.failure or f"{_reason(error)} {self.last_words}".strip()
            if not self.ready.done():
                self.ready.set_exception(ToolsFailed(self.failure))
        finally:
            self.failure = self.failure or "its session is over"
            self._left.set()

    def _make_client(self) -> Any:
        from mcp.client.client import Client
        from mcp.client.stdio import StdioServerParameters, stdio_client

        if self._spec.startswith(("http://", "https://")):
            return Client(self._spec)
        program, *arguments = shlex.split(self._spec)
        if program in ("python", "python3"):
            program = sys.executable
        if shutil.which(program) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), program)
        python, *more = supervised([program, *arguments])
        command = StdioServerParameters(command=python, args=more, env=dict(os.environ))
        logging.getLogger("mcp.client.stdio").addFilter(_is_no_unreadable_line)
        return Client(
            stdio_client(command, errlog=self._errors),  # type: ignore[arg-type]
            message_handler=self._note_message,
        )

    async def _note_message(self, message: Any) -> None:
        """Take what the server sends unasked: notifications, and lines that cannot be parsed."""
        if isinstance(message, UnreadableLine) and not self.unreadable:
            line = str(message.errors()[0]["input"])
            self.unreadable = (
                f" (its standard output has a line that is no message: {line[:100]!r})"
            )

    async def _list_tools(self) -> list[Listed]:
        info = self._client.server_info
        version = f"{info.name} {info.version}" if info else self._spec
        found: list[Listed] = []
        cursor = None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            for one in page.tools:
                hints = one.annotations
                read_only = bool(hints and hints.read_only_hint)
                schema = one.input_schema
                found.append(Listed(one.name, one.description or "", schema, read_only, version))
            cursor = page.next_cursor
            if not cursor:
                return found
            if len(found) > MAX_TOOLS:
                raise ToolsFailed(f"it lists over {MAX_TOOLS} tools")


def _is_no_unreadable_line(record: logging.LogRecord) -> bool:
    """Filter of the SDK's log, which has a traceback for each line that is no message."""
    return "Failed to parse" not in record.msg


def mcp_tool(listed: Listed, function: Any) -> Tool:
    """A tool of a server."""
    return Tool(
        function,
        name=listed.name,
        version=listed.version,
        stateful=not listed.read_only,
        signature=listed,
    )


def _missing_reference(schema: Mapping[str, Any]) -> str:
    """Problem of the first local `$ref` whose target does not exist. "" if all exist."""
    from referencing import Registry, Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    registry: Registry[Any] = Registry()
    resource = Resource.from_contents(schema, default_specification=DRAFT202012)
    resolver = registry.with_resource("", resource).resolver()
    for target in _references(schema):
        try:
            resolver.lookup(target)
        except (Unresolvable, ValueError):  # ValueError: a name where a list needs an index
            return f"its $ref {target!r} does not exist"
    return ""


def _references(schema: Any) -> Iterator[str]:
    """Targets of all `$ref` within the schema itself."""
    if isinstance(schema, Mapping):
        target = schema.get("$ref")
        if isinstance(target, str) and target.startswith("#"):
            yield target
        for key, value in schema.items():
            if key not in ("const", "default", "enum", "examples"):  # data, not schemas
                yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _text(answer: Any) -> str:
    """A result as text. Images and audio are replaced by a note."""
    parts = [
        part.text if part.type == "text" else f"[{part.type}: not shown]" for part in answer.content
    ]
    if not parts and answer.structured_content is not None:
        return json.dumps(answer.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _reason(error: BaseException) -> str:
    """The innermost error of a group, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError | concurrent.futures.TimeoutError):
        return f"no answer within {START_S:g} s"
    return str(error) if isinstance(error, ToolsFailed) else one_line(error)


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
