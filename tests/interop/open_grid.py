"""An environment as grid_world of OpenEnv."""

from __future__ import annotations

from enum import Enum
from typing import Any

from tests.interop.open_games import Action, Environment, Observation, State


class Direction(str, Enum):  # noqa: UP042  as in grid_world
    UP = "UP"
    DOWN = "DOWN"
    LEFT = "LEFT"
    RIGHT = "RIGHT"


class GridMove(Action):
    action: Direction


class GridSeen(Observation):
    x: int
    y: int
    message: str = ""
    hint: str | None = None
    reward: float = 0.0


class Grid(Environment):  # type: ignore[misc, valid-type]
    """As grid_world of OpenEnv: an enumerated action, and a `reset` without a seed.

    Args:
        size: rows and columns of the grid.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, size: int = 5) -> None:
        self.size = size
        self.x = self.y = 0

    def reset(self) -> GridSeen:
        self.x = self.y = 0
        return GridSeen(x=0, y=0, message=f"Goal is at {self.size - 1}.")

    def step(self, action: Action) -> GridSeen:
        """The annotation is the base class, as in coding_env of OpenEnv."""
        assert isinstance(action, GridMove)
        self.x += (action.action == Direction.DOWN) - (action.action == Direction.UP)
        self.y += (action.action == Direction.RIGHT) - (action.action == Direction.LEFT)
        return GridSeen(x=self.x, y=self.y, message="Keep going...", reward=-0.1)

    @property
    def state(self) -> Any:
        return State(episode_id="x")  # type: ignore[call-arg]


class Random(Grid):
    """Its beginning depends on no seed, although `reset` takes one."""

    COUNT = 0

    def reset(self, seed: int | None = None) -> GridSeen:  # type: ignore[override]
        Random.COUNT += 1
        return GridSeen(x=Random.COUNT, y=0)

    def step(self, action: GridMove) -> GridSeen:  # type: ignore[override]
        return super().step(action)
