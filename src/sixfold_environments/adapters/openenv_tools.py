"""Episodes of OpenEnv environments whose actions are calls of tools, which they list themselves.

The policy sees the tools in the format of its chat template. A call becomes a `CallToolAction`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MethodType
from typing import Any

from sixfold.environment.episode import Action, End, Observation
from sixfold.environment.tools.episode import ToolEpisode
from sixfold.environment.tools.observation import ToolError
from sixfold.environment.tools.tool import Tool
from sixfold.errors import UserError
from sixfold.types import Message, Task

from ..mcp import Listed
from .openenv_sessions import Seen, Session
from .seeds import first_observation, task_seed

ERRORS = {"tool_not_found": "unknown_tool", "invalid_args": "wrong_argument", "timeout": "timeout"}
"""Kind of an error in the library -> kind of a tool error. Others are exceptions."""


class ToolWorld(ToolEpisode):
    """One episode. The rewards of the calls in a reply are the reward of the turn.

    `done` after a call, or a reply without a call, ends the episode.

    Args:
        where: name of the environment in messages.
        task: its column `seed` seeds the environment.
    """

    def __init__(self, where: str, session: Session, task: Task) -> None:
        super().__init__(task)
        self._where = where
        self._session = session
        self._reward = 0.0
        self._ended = False

    async def start(self) -> Observation:
        """Reset the environment and list its tools.

        Raises:
            UserError: it lists no tools.
        """
        seen = await self._session.reset(task_seed(self.task))
        listed = (await self._session.step({"type": "list_tools"})).fields.get("tools")
        if not listed:
            raise UserError(
                f"{self._where}: its actions have no fields, and it lists no tools. Annotate the"
                " class of its actions: def step(self, action: MyAction)"
            )
        self._functions = [self._tool(one) for one in listed]
        first = first_observation(self.task, seen.text)
        messages = first.messages or (Message(role="user", content=first.text),)
        return Observation(messages, tools=self.registry.descriptions)

    async def step(self, action: Action) -> Observation | End:
        """Run the calls of a reply, or end the episode if it has none."""
        self._reward = 0.0
        answer = await super().step(action)
        if isinstance(answer, End):
            return answer
        if self._ended:
            return End(self._reward, events=answer.events, tool_errors=answer.tool_errors)
        return replace(answer, reward=self._reward)

    async def final(self, action: Action) -> End:
        """End the episode. Its return is the sum of the rewards of its calls."""
        return End(0.0)

    async def close(self) -> None:
        await self._session.close()

    def _tool(self, given: Mapping[str, Any]) -> Tool:
        name = str(given["name"])

        async def call(episode: ToolWorld, /, **values: Any) -> Any:
            if episode._ended:
                raise ToolError("an earlier call of this reply has ended the episode")
            action = {"type": "call_tool", "tool_name": name, "arguments": values}
            seen = await episode._session.step(action)
            episode._reward += seen.reward
            episode._ended = seen.done
            return _result(seen)

        schema = dict(given.get("input_schema") or {"type": "object", "properties": {}})
        listed = Listed(name, str(given.get("description") or ""), schema, False, "1")
        # A method: results of tools with a state are not replayed.
        return Tool(MethodType(call, self), name=name, signature=listed)


def _result(seen: Seen) -> Any:
    """The result of a call."""
    if "result" not in seen.fields:  # the environment answered with an observation of its own
        return seen.text
    if error := seen.fields.get("error"):
        raise ToolError(str(error["message"]), ERRORS.get(error["error_type"], "exception"))
    result = seen.fields["result"]
    if not isinstance(result, Mapping) or "content" not in result:
        return result
    texts = [str(part["text"]) for part in result["content"] if "text" in part]
    if result.get("is_error") or result.get("isError"):
        raise ToolError("\n".join(texts))
    return "\n".join(texts) or result.get("structured_content")
