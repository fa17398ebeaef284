"""An environment as users write it for OpenEnv, with the library's base class if installed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

try:
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.mcp_types import CallToolAction, ListToolsAction
    from openenv.core.env_server.types import Action, Observation, State
except ImportError:
    Environment = State = object  # type: ignore[assignment, misc]

    class Action(BaseModel):  # type: ignore[no-redef]
        metadata: dict[str, Any] = {}

    class Observation(BaseModel):  # type: ignore[no-redef]
        done: bool = False
        reward: bool | int | float | None = None
        metadata: dict[str, Any] = {}

    class ListToolsAction(Action):  # type: ignore[no-redef]
        type: Literal["list_tools"] = "list_tools"

    class CallToolAction(Action):  # type: ignore[no-redef]
        type: Literal["call_tool"] = "call_tool"
        tool_name: str
        arguments: dict[str, Any] = {}


CLOSED: list[int] = []


class Say(Action):
    message: str


class Heard(Observation):
    said: str
    length: int = 0


class Parrot(Environment):  # type: ignore[misc, valid-type]
    """Say the letter of the seed. It ends after two turns."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    fault = ""

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, seed: int | None = None, episode_id: Any = None, **more: Any) -> Heard:
        self.turns, self.seed = 0, seed or 0
        self.letter = "abc"[self.seed % 3]
        return Heard(said=self.letter, done=False, reward=None)

    def step(self, action: Say, timeout_s: Any = None, **more: Any) -> Any:
        self.turns += 1
        if self.fault == "raises":
            raise RuntimeError("no parrot")
        if self.fault == "text":
            return "polly"
        right = float(action.message == self.letter)
        reward = float("nan") if self.fault == "nan" else right
        return Heard(said=action.message, reward=reward, done=self.turns == 2)

    @property
    def state(self) -> Any:
        return State(episode_id="x", step_count=self.turns)  # type: ignore[call-arg]

    def close(self) -> None:
        CLOSED.append(self.seed)


class Raises(Parrot):
    fault = "raises"


class Text(Parrot):
    fault = "text"


class Nan(Parrot):
    fault = "nan"


class Move(Action):
    x: int
    y: int = 0


class Board(Parrot):
    def step(self, action: Move, timeout_s: Any = None, **more: Any) -> Heard:  # type: ignore[override]
        return Heard(said=f"{action.x},{action.y}", reward=1)


class Unknown:
    def reset(self, seed: int | None = None) -> Any: ...

    def step(self, action: Any) -> Any: ...
