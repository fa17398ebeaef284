"""An environment for verifiers that knows nothing of Sixfold: the letter after the one asked for.

sixfold train benchmarks/interop/verifiers.toml
"""

from __future__ import annotations

import itertools
from typing import Any

import verifiers as vf
from datasets import Dataset

LETTERS = "abcdefgh"


class Rounds(vf.MultiTurnEnv):
    """Asks for one letter per turn."""

    async def setup_state(self, state: Any) -> Any:
        state["asked"] = [str(state["prompt"][-1]["content"])]
        return state

    async def env_response(self, messages: Any, state: Any, **more: Any) -> Any:
        wanted = state["input"]["info"]["letters"][len(state["asked"])]
        state["asked"].append(wanted)
        return [{"role": "user", "content": wanted}]


def right(completion: Any, state: Any) -> float:
    """Share of replies that begin with the letter after the one asked for."""
    replies = [m["content"] for m in completion if m["role"] == "assistant"]
    found = [
        reply[:1] == chr(ord(asked) + 1)
        for reply, asked in zip(replies, state["asked"], strict=False)
    ]
    return sum(found) / 3


async def short(completion: Any) -> float:
    """Full marks for one character per reply."""
    replies = [m["content"] for m in completion if m["role"] == "assistant"]
    return sum(len(reply) == 1 for reply in replies) / 3


def load_environment() -> Any:
    rows = [
        {"question": letters[0], "info": {"letters": list(letters)}}
        for letters in itertools.product(LETTERS, repeat=3)
    ]
    return Rounds(
        dataset=Dataset.from_list(rows[: 7 * len(rows) // 8]),
        eval_dataset=Dataset.from_list(rows[7 * len(rows) // 8 :]),
        rubric=vf.Rubric(funcs=[right, short], weights=[1.0, 0.1]),
        max_turns=3,
    )
