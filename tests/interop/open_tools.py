"""An environment as echo and finqa of OpenEnv: its actions are calls of tools."""

from __future__ import annotations

from typing import Any

from tests.interop.open_games import (
    Action,
    CallToolAction,
    Environment,
    ListToolsAction,
    Observation,
    State,
)


class Counter(Environment):  # type: ignore[misc, valid-type]
    """As echo and finqa of OpenEnv: tools, and texts in the metadata alone."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self.count = 0

    def reset(self, seed: int | None = None, **more: Any) -> Observation:
        self.count = seed or 0
        return Observation(metadata={"question": f"Add to {self.count}."})

    def step(self, action: Action, timeout_s: Any = None, **more: Any) -> Any:
        if isinstance(action, ListToolsAction):
            number = {"type": "object", "properties": {"by": {"type": "integer"}}}
            add = {"name": "add", "description": "Add.", "input_schema": number}
            empty = {"type": "object", "properties": {}}
            send = {"name": "send", "description": "Send.", "input_schema": empty}
            return Listing(tools=[add, send])
        assert isinstance(action, CallToolAction)
        if action.tool_name == "send":  # an observation of its own ends the episode
            return Observation(done=True, reward=float(self.count), metadata={"truth": 7})
        if action.arguments["by"] > 9:
            failed = {"error_type": "execution_error", "message": "too large"}
            return Called(tool_name="add", error=failed)
        self.count += action.arguments["by"]
        text = [{"type": "text", "text": str(self.count)}]
        return Called(tool_name="add", result={"content": text, "is_error": False}, reward=0.5)

    @property
    def state(self) -> Any:
        return State(episode_id="x")  # type: ignore[call-arg]


class Listing(Observation):
    tools: list[dict[str, Any]]


class Called(Observation):
    tool_name: str
    result: Any = None
    error: dict[str, Any] | None = None
