"""A Gymnasium environment that knows nothing of Sixfold: name the letter that follows, three times.

sixfold train benchmarks/interop/gymnasium.toml
"""

from __future__ import annotations

import string
from typing import Any

import gymnasium
from gymnasium import spaces

LETTERS = "abcdefgh"


class Letters(gymnasium.Env[str, str]):
    """Shows a letter. The action must begin with the next letter of the alphabet."""

    def __init__(self, rounds: int = 3) -> None:
        self.rounds = rounds
        self.action_space = spaces.Text(8, min_length=0, charset=string.printable)
        self.observation_space = spaces.Text(1, charset=LETTERS)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = self.rounds
        return self._draw(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = action[:1] == chr(ord(self.letter) + 1)
        self.left -= 1
        return self._draw(), float(right) / self.rounds, self.left == 0, False, {}

    def _draw(self) -> str:
        self.letter = LETTERS[int(self.np_random.integers(len(LETTERS)))]
        return self.letter


gymnasium.register("Letters-v0", entry_point=Letters)
