"""Record the results of tool calls. A replay returns them without running the tools.

The key of a result is the tool's name and version and the arguments. For a stateful tool, the task
and the earlier calls of stateful tools in the episode are part of the key. Methods of an episode
are not recorded: they hold its state, so a replay runs them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import UserError
from .observation import ToolError, ToolsFailed


@dataclass(frozen=True)
class Recorded:
    """Outcome of a call.

    Attributes:
        result: result of the tool as text.
        error: kind of the error, or "".
    """

    result: str = ""
    error: str = ""
    message: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class CallKey:
    """What the outcome of a call depends on.

    Attributes:
        arguments: the arguments as canonical JSON.
        task: id of the task, for a stateful tool.
        before: digest of the earlier calls of the episode, for a stateful tool.
    """

    tool: str
    arguments: str
    version: str
    task: str = ""
    before: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 of the key, which names its record."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()


class Recorder:
    """A folder of recorded outcomes.

    Concurrent calls with the same key run once and share the outcome. So all samples of a task read
    the same result, and a replay repeats it.

    Args:
        folder: the folder. To record, it is created if it does not exist.
        replay: return recorded outcomes only, and run no tool.

    Raises:
        UserError: the folder does not exist (replay), or is not writable (record).
    """

    def __init__(self, folder: Path, replay: bool) -> None:
        self._folder = folder
        self.replay = replay
        self._running: dict[str, asyncio.Event] = {}
        self._known: dict[str, Recorded] = {}
        if replay:
            if not folder.is_dir():
                raise UserError(
                    f"environment.tools.replay = {str(folder)!r}: the folder does not exist."
                    " Record it first (environment.tools.record)"
                )
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise UserError(
                f"environment.tools.record = {str(folder)!r}: the folder is not writable"
                f" ({error.strerror}). Name another folder"
            ) from error

    async def outcome(self, key: CallKey, run: Callable[[], Awaitable[Recorded]]) -> Recorded:
        """The recorded outcome of a call. Without a record: run the call and record its outcome.

        Raises:
            ToolsFailed: a replay has no record of the call, or a record is damaged.
        """
        name = key.digest
        while name in self._running:
            await self._running[name].wait()
        if known := self._known.get(name) or self._read(name):
            self._known[name] = known
            return known
        if self.replay:
            raise ToolsFailed(
                f"environment.tools.replay: {self._folder} has no result of {key.tool}"
                f" (version {key.version}) with the arguments {key.arguments[:120]}"
            )
        ended = self._running[name] = asyncio.Event()
        try:
            outcome = await run()
            if outcome.error != "busy":  # "busy" depends on the load of the machine
                self._write(name, key, outcome)
                self._known[name] = outcome
        finally:
            del self._running[name]
            ended.set()
        return outcome

    def tools_of(self, server: str) -> list[dict[str, Any]]:
        """Recorded descriptions of the tools of an MCP server.

        Raises:
            UserError: they are not recorded, or the record is damaged.
        """
        path = self._server_path(server)
        try:
            return list(json.loads(path.read_text(encoding="utf-8"))["tools"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"environment.tools.replay: {path.parent} has no tools of the MCP server {server!r}"
                f" ({error}). Record it, or remove it from environment.tools.mcp"
            ) from error

    def record_tools(self, server: str, tools: list[dict[str, Any]]) -> None:
        """Record the descriptions of an MCP server's tools, so that a replay needs no server."""
        self._put(self._server_path(server), {"server": server, "tools": tools})

    def _server_path(self, server: str) -> Path:
        return self._folder / f"server-{hashlib.sha256(server.encode()).hexdigest()[:16]}.json"

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / f"{name}.json"

    def _read(self, name: str) -> Recorded | None:
        path = self._path(name)
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            return Recorded(**record["outcome"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ToolsFailed(f"the recorded result {path} cannot be read: {error}") from error

    def _write(self, name: str, key: CallKey, outcome: Recorded) -> None:
        self._put(self._path(name), {"call": asdict(key), "outcome": asdict(outcome)})

    @staticmethod
    def _put(path: Path, record: dict[str, Any]) -> None:
        """Write a record atomically."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, part = tempfile.mkstemp(dir=path.parent, suffix=".part")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(record, file, ensure_ascii=False)
            os.replace(part, path)
        except OSError as error:
            raise ToolsFailed(f"environment.tools.record: {path}: {error}") from error


def canonical(arguments: str) -> str:
    """Arguments as JSON with sorted keys.

    Raises:
        ToolError: they are not JSON.
    """
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise ToolError(
            f"the arguments are not a JSON object: {error}"[:300], "bad_json"
        ) from error
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
