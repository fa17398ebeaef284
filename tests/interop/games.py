"""Gymnasium environments as users write them."""

from __future__ import annotations

import string
import threading
import time
from typing import Any

import gymnasium
from gymnasium import spaces

CLOSED: list[int] = []
"""Seed of every environment that was closed."""

MEETING = threading.Barrier(6)
"""Where steps with the fault "meet" wait for each other."""


class Word(gymnasium.Env[Any, Any]):
    """Text in, text out: say the letter that is shown, three times."""

    def __init__(self, letters: str = "abc", fault: str = "") -> None:
        self.letters = letters
        self.fault = fault
        self.action_space = spaces.Text(8, charset=string.printable)
        self.observation_space = spaces.Text(8, charset=string.printable)
        self.seed = -1
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.seed = -1 if seed is None else seed
        if self.fault == "reset":
            raise RuntimeError("no board")
        return self._shown(), {}

    def step(self, action: str) -> Any:
        self.steps += 1
        right = float(action.strip() == self.letter)
        if self.fault == "meet":
            MEETING.wait(5)
        if self.fault == "hang":
            time.sleep(1.5)
        if self.fault == "step":
            raise RuntimeError("broken board")
        if self.fault == "old":
            return self._shown(), right, False, {}
        if self.fault == "picture":
            return object(), right, False, False, {}
        reward = float("nan") if self.fault == "nan" else right
        last = self.steps == 3 and self.fault != "endless"
        return self._shown(), reward, last and right == 1, last and right == 0, {}

    def close(self) -> None:
        CLOSED.append(self.seed)
        if self.fault == "close":
            raise RuntimeError("does not close")

    def _shown(self) -> str:
        self.letter = self.letters[int(self.np_random.integers(len(self.letters)))]
        return self.letter


class Doors(gymnasium.Env[Any, Any]):
    """Discrete actions with names, which start at 3. The observation is a dictionary."""

    action_names = ("left", "up", "up left")

    def __init__(self) -> None:
        self.action_space = spaces.Discrete(3, start=3)
        self.observation_space = spaces.Dict({"text": spaces.Text(20), "door": spaces.Discrete(9)})
        self.taken: list[int] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return {"text": "which door?", "door": 1}, {}

    def step(self, action: int) -> Any:
        self.taken.append(int(action))
        return {"text": f"went {action}", "door": 2}, 1, False, False, {}


gymnasium.register("tests/Word-v0", entry_point=Word)
gymnasium.register("tests/Doors-v0", entry_point=Doors)
