"""A tool: a function that the policy may call, with the schema of its arguments.

    @tool(timeout_s=2.0)
    def lookup(city: str, unit: Literal["C", "F"] = "C") -> str:
        \"\"\"Weather of a city.

        Args:
            city: name of the city.
        \"\"\"

Methods of a `ToolEpisode` may be tools too. They share the state of their episode.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, get_args, overload

from ...errors import UserError
from .observation import ErrorKind, ToolError, error_text
from .signature import Signature

_WRONG: tuple[Any, ...] = (None, "?", 0.5, [], {})
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class Arguments(Protocol):
    """Description of a tool's arguments, and validation of a call's arguments."""

    @property
    def description(self) -> str:
        """What the tool does."""
        ...

    @property
    def schema(self) -> Mapping[str, Any]:
        """JSON schema of the arguments, of type "object"."""
        ...

    def values(self, arguments: str) -> dict[str, Any]:
        """Arguments of a call as Python values. Raises ToolError if they do not fit."""
        ...


class Tool:
    """One tool. The object can be called like its function.

    Args:
        function: the function, which may be async.
        name: name for the policy. "": the name of the function.
        timeout_s: time limit of a call in seconds. None: the limit of the run.
        version: part of the key of recorded results. Change it when the function changes.
        stateful: True if a call may depend on earlier calls of the episode, as in methods.
        signature: the arguments. None: derive them from the function.

    Raises:
        UserError: the name or the time limit is invalid.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str = "",
        timeout_s: float | None = None,
        version: str = "1",
        stateful: bool = False,
        signature: Arguments | None = None,
    ) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.timeout_s = timeout_s
        self.version = version
        self.stateful = stateful or inspect.ismethod(function)
        self._is_method = False
        self._signature = signature
        self.__doc__ = inspect.getdoc(function)
        if not _NAME.fullmatch(self.name):
            raise UserError(
                f"tool {self.name!r}: a name has up to 128 letters, digits, '_', '.' and '-', and"
                " begins with a letter, a digit or '_'. Set it: @tool(name=...)"
            )
        if timeout_s is not None and not 0 < timeout_s < float("inf"):
            raise UserError(
                f"tool {self.name!r}: timeout_s = {timeout_s} must be positive and finite"
            )

    def __set_name__(self, owner: type, name: str) -> None:
        self._is_method, self.stateful = True, True

    def __get__(self, episode: object, owner: type | None = None) -> Tool:
        """The tool bound to an episode. Accessed through the class: the tool itself."""
        if episode is None or not self._is_method:
            return self
        return Tool(
            self.function.__get__(episode),
            name=self.name,
            timeout_s=self.timeout_s,
            version=self.version,
            stateful=True,
            signature=self.signature,  # derived once per class
        )

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function."""
        return self.function(*arguments, **named)

    @property
    def signature(self) -> Arguments:
        """The arguments. Raises UserError if no schema can be derived."""
        if self._signature is None:
            self._signature = Signature(self.function, self.name, self._is_method)
        return self._signature

    @property
    def is_recorded(self) -> bool:
        """True if results are recorded. Methods are not: they hold state, so a replay runs them."""
        return not inspect.ismethod(self.function)

    @property
    def description(self) -> Mapping[str, Any]:
        """Description of the tool in the format of chat templates and OpenAI's API."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.signature.description,
                "parameters": self.signature.schema,
            },
        }

    @property
    def is_async(self) -> bool:
        """True if a call returns an awaitable."""
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004  an object with an async call
        )

    def values(self, arguments: str) -> dict[str, Any]:
        """Arguments of a call as Python values. Raises ToolError if they do not fit."""
        return self.signature.values(arguments)


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *, name: str = "", timeout_s: float | None = None, version: str = "1", stateful: bool = False
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str = "",
    timeout_s: float | None = None,
    version: str = "1",
    stateful: bool = False,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool from a function or a method: `@tool`, or `@tool(timeout_s=2.0)`.

    Args:
        function: the function. Every parameter needs an annotation. The docstring describes the
            tool, and its `Args:` section the arguments.
        name: see `Tool`.
        timeout_s: see `Tool`.
        version: see `Tool`.
        stateful: see `Tool`.
    """
    if function is not None:
        return Tool(function)
    return lambda given: Tool(
        given, name=name, timeout_s=timeout_s, version=version, stateful=stateful
    )


def as_tool(given: Callable[..., Any]) -> Tool:
    """The argument if it is a tool, else a tool made from the function."""
    return given if isinstance(given, Tool) else Tool(given)


class Registry:
    """The tools of an episode, by name.

    Args:
        tools: in the order in which the policy sees them.

    Raises:
        UserError: two tools have the same name, or a tool has no schema.
    """

    def __init__(self, tools: list[Tool]) -> None:
        self._tools = {one.name: one for one in tools}
        names = [one.name for one in tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(
                f"environment.tools: two tools have the name {twice[0]!r}. Rename one:"
                " @tool(name=...)"
            )
        self.descriptions = tuple(one.description for one in tools)

    def find(self, name: str) -> Tool:
        """The tool of this name.

        Raises:
            ToolError: no tool has this name.
        """
        if name not in self._tools:
            known = ", ".join(self._tools)
            raise ToolError(f"there is no tool {name[:60]!r}. Tools: {known}"[:300], "unknown_tool")
        return self._tools[name]

    @property
    def errors(self) -> list[str]:
        """Texts with which the policy is told that a call cannot be right, for some such calls."""
        found = [error_text(kind, "") for kind in get_args(ErrorKind)]
        calls = [(one.name, wrong) for one in self._tools.values() for wrong in _wrong(one)]
        for name, arguments in [("?", ""), *calls]:
            try:
                self.find(name).values(arguments)
            except ToolError as error:
                found.append(error_text(error.kind, str(error)))
            except Exception:  # noqa: BLE001 - boundary: a type of the user
                continue
        return found


def _wrong(tool: Tool) -> list[str]:
    """Arguments that do not fit a tool, as its calls give them."""
    named = [{name: wrong} for name in tool.signature.schema["properties"] for wrong in _WRONG]
    return ["", "{", "[]", '{"?": 0}', *map(json.dumps, named)]
