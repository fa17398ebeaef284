"""Environments as users write them for verifiers 0.1 to 0.3."""

from __future__ import annotations

import time
from typing import Any

import verifiers as vf
from datasets import Dataset


def rows(*letters: str) -> Dataset:
    return Dataset.from_list([{"question": f"say {x}", "answer": x} for x in letters])


async def right(completion: Any, answer: str, parser: Any) -> float:
    return float(parser.parse_answer(completion) == answer)


def short(completion: Any) -> float:
    return 1.0 / (1 + len(completion[-1]["content"]))


def load_environment(weight: float = 0.5, count: int = 3) -> Any:
    parser = vf.Parser()
    return vf.SingleTurnEnv(
        dataset=rows(*"abcdefgh"[:count]),
        eval_dataset=rows(*"xyz"),
        system_prompt="one letter",
        few_shot=[
            {"role": "user", "content": "say q"},
            {"role": "assistant", "content": "q"},
        ],
        parser=parser,
        rubric=vf.Rubric(funcs=[right, short], weights=[1.0, weight], parser=parser),
    )


class Count(vf.MultiTurnEnv):
    """The policy counts up to the third letter. The state belongs to the environment."""

    fault = ""

    async def setup_state(self, state: Any) -> Any:
        if self.fault == "setup":
            raise RuntimeError("no state")
        state["seen"] = 0
        return state

    async def env_response(self, messages: Any, state: Any, **more: Any) -> Any:
        if self.fault == "blocks":
            time.sleep(600)
        if self.fault == "response":
            raise RuntimeError("no response")
        if self.fault == "library":
            raise vf.Error("no sandbox")
        if self.fault == "rewrites":
            messages[0].content = "forget it"
        state["seen"] += 1
        said = [{"role": "user", "content": f"{state['seen']}"}]
        if state["seen"] == 2:
            state["final_env_response"] = said
        return said


def counted(state: Any) -> float:
    return float(state["seen"])


def broken(completion: Any) -> float:
    raise KeyError("no key")


def undefined(completion: Any) -> float:
    return float("nan")


def counting(fault: str = "", turns: int = -1) -> Any:
    reward = {"reward": broken, "nan": undefined}.get(fault, counted)
    env = Count(dataset=rows(*"abc"), rubric=vf.Rubric(funcs=[reward]), max_turns=turns)
    env.fault = fault
    return env


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: first number.
        b: second number.
    """
    return a + b


def tools() -> Any:
    def said(completion: Any, answer: str) -> float:
        return float("5" in completion[-1]["content"])

    return vf.ToolEnv(dataset=rows("a"), tools=[add], rubric=vf.Rubric(funcs=[said]))


def longest(completions: Any, states: Any) -> list[float]:
    lengths = [
        sum(len(m["content"]) for m in completion if m["role"] == "assistant")
        for completion in completions
    ]
    return [float(length == max(lengths)) for length in lengths]


def group() -> Any:
    return vf.SingleTurnEnv(dataset=rows(*"abc"), rubric=vf.Rubric(funcs=[longest, right]))


def counting_group() -> Any:
    return Count(dataset=rows(*"abc"), rubric=vf.Rubric(funcs=[longest]), max_turns=-1)


def nothing() -> Any:
    return object()


def popping() -> Any:
    """The rubric takes from a list of the row."""

    def taken(levels: Any) -> float:
        return float(levels.pop(0))

    data = Dataset.from_list([{"question": "say a", "answer": "a", "levels": [3, 2, 1]}])
    return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[taken]))
