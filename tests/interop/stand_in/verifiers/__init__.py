"""A small stand-in for the library verifiers 0.3 (classic environments), for machines without it.

It has the parts of its contract that Sixfold touches, with the same names and the same order of
calls. The tests run on the real library where it is installed: `make environments`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import signal
from collections.abc import Callable
from typing import Any

from .types import AssistantMessage, Message, ToolMessage, UserMessage


class Parser:
    def parse_answer(self, completion: Any) -> str:
        return str([m for m in completion if m["role"] == "assistant"][-1]["content"])


async def maybe_await(function: Callable[..., Any], **given: Any) -> Any:
    names = inspect.signature(function).parameters
    every = any(p.kind == p.VAR_KEYWORD for p in names.values())
    value = function(**(given if every else {k: v for k, v in given.items() if k in names}))
    return await value if inspect.isawaitable(value) else value


class Rubric:
    def __init__(self, funcs: Any = None, weights: Any = None, parser: Any = None) -> None:
        self.logger = logging.getLogger(f"verifiers.{type(self).__name__}")
        self.funcs = list(funcs or [])
        self.weights = list(weights or [1.0] * len(self.funcs))
        self.parser = parser or Parser()

    def add_metric(self, function: Any, weight: float = 0.0) -> None:
        self.funcs.append(function)
        self.weights.append(weight)

    def _is_group_func(self, function: Any) -> bool:
        return "completions" in inspect.signature(function).parameters

    @property
    def has_group_rewards(self) -> bool:
        return any(map(self._is_group_func, self.funcs))

    async def _one(self, function: Any, state: Any) -> float:
        given = {**state["input"], "state": state, "parser": self.parser}
        given |= {"prompt": state["prompt"], "completion": state["completion"]}
        try:
            return float(await maybe_await(function, **given))
        except Exception as error:  # noqa: BLE001 - as the library does
            self.logger.error(f"Error calling reward function {function.__name__}: {error}")
            return 0.0

    async def score_rollout(self, state: Any) -> None:
        await self.score_group([state])

    async def score_group(self, states: Any) -> None:
        for state in states:
            state["reward"], state["metrics"] = 0.0, {}
        for function, weight in zip(self.funcs, self.weights, strict=True):
            if self._is_group_func(function):
                values = await maybe_await(
                    function, completions=[s["completion"] for s in states], states=states
                )
            else:
                values = [await self._one(function, state) for state in states]
            for state, value in zip(states, values, strict=True):
                state["reward"] += weight * value
                state["metrics"][function.__name__] = value

    async def cleanup(self, state: Any) -> None: ...


class Environment:
    def __init__(
        self,
        dataset: Any = None,
        eval_dataset: Any = None,
        system_prompt: str | None = None,
        few_shot: Any = None,
        parser: Any = None,
        rubric: Any = None,
        max_turns: int = -1,
    ) -> None:
        self.system_prompt, self.few_shot = system_prompt, few_shot or []
        self.parser, self.rubric = parser or Parser(), rubric or Rubric()
        self.max_turns = max_turns
        self.tool_defs: list[Any] = []
        self.dataset_source, self.eval_dataset_source = None, None
        self.dataset, self.eval_dataset = self._formatted(dataset), self._formatted(eval_dataset)
        self.rubric.add_metric(self.num_turns)
        signal.signal(signal.SIGINT, lambda number, frame: None)

    async def num_turns(self, state: Any) -> int:
        return len(state["trajectory"])

    def _formatted(self, dataset: Any) -> Any:
        if dataset is None:
            return None
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return dataset.add_column("example_id", range(len(dataset))).map(
            lambda row: {
                "prompt": [*system, *self.few_shot, {"role": "user", "content": row["question"]}]
            }
        )

    def get_dataset(self, n: int = -1) -> Any:
        return self.dataset.select(range(min(n, len(self.dataset)))) if n > 0 else self.dataset

    def get_eval_dataset(self, n: int = -1) -> Any:
        found = self.dataset if self.eval_dataset is None else self.eval_dataset
        return found.select(range(min(n, len(found)))) if n > 0 else found

    async def setup_state(self, state: Any) -> Any:
        return state

    async def env_response(self, messages: Any, state: Any) -> Any:
        raise NotImplementedError

    async def stopped(self, state: Any) -> str:
        if state["error"] is not None:
            return "has_error"
        if 0 < self.max_turns <= len(state["trajectory"]):
            return "max_turns_reached"
        return "has_final_env_response" if state.get("final_env_response") else ""

    async def rollout(self, row: Any, client: Any, model: str, sampling_args: Any) -> Any:
        state = {"input": dict(row), "answer": row.get("answer"), "trajectory": [], "error": None}
        messages = [Message(**m) for m in row["prompt"]]
        state["prompt"] = list(messages)
        state = await self.setup_state(state) or state
        while not (stop := await self.stopped(state)):
            try:
                if state["trajectory"]:
                    new = await self.env_response(messages, state)
                    messages += [UserMessage(**m) if isinstance(m, dict) else m for m in new]
                    if state.get("final_env_response"):
                        continue
                response = await client.get_response(messages, model, sampling_args, self.tool_defs)
                said = response.message
                messages.append(AssistantMessage(content=said.content, tool_calls=said.tool_calls))
                state["trajectory"].append({"completion": [messages[-1]]})
            except Error as error:
                state["error"] = error
        state["stop_condition"] = stop
        state["completion"] = messages[len(state["prompt"]) :]
        return state


class Error(Exception): ...


class ModelError(Error): ...


class MultiTurnEnv(Environment): ...


class SingleTurnEnv(MultiTurnEnv):
    def __init__(self, **settings: Any) -> None:
        super().__init__(max_turns=1, **settings)


class ToolEnv(MultiTurnEnv):
    def __init__(self, tools: Any = (), max_turns: int = 10, **settings: Any) -> None:
        super().__init__(max_turns=max_turns, **settings)
        from .types import Tool

        self.tool_map = {tool.__name__: tool for tool in tools}
        self.tool_defs = [
            Tool(
                name=name,
                description=tool.__doc__ or "",
                parameters={
                    "type": "object",
                    "properties": {
                        p: {"type": "integer"} for p in inspect.signature(tool).parameters
                    },
                },
            )
            for name, tool in self.tool_map.items()
        ]

    async def stopped(self, state: Any) -> str:
        last = state["trajectory"][-1]["completion"][-1] if state["trajectory"] else None
        if last is not None and not last.tool_calls:
            return "no_tools_called"
        return await super().stopped(state)

    async def env_response(self, messages: Any, state: Any) -> Any:
        answers = []
        for call in messages[-1].tool_calls:
            try:
                said = str(self.tool_map[call.name](**json.loads(call.arguments)))
            except Exception as error:  # noqa: BLE001 - as the library does
                said = str(error)
            answers.append(ToolMessage(content=said, tool_call_id=call.id))
        await asyncio.sleep(0)
        return answers


__version__ = "0.3.1"
