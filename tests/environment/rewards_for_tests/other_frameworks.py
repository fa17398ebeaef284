"""Reward functions with the traits of public ones of TRL, verl and OpenRLHF.

TRL's rewards of length are objects with a `__name__` that ask for `completion_ids` alone. verl's
scorers take (solution_str, ground_truth), also under other names (geo3k, math_verify), return a
dictionary (math_dapo) or a tuple (prime_math), and one keeps a pool of processes that its first
call makes and catches every error (math_verify). OpenRLHF's examples return a dictionary of
tensors, whose place numpy takes here.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np


class SoftOverlong:
    __name__ = "soft_overlong_punishment_reward"

    def __init__(self, longest: int, buffer: int) -> None:
        self.longest, self.buffer = longest, buffer

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        free = self.longest - self.buffer
        return [max(-1.0, min(0.0, (free - len(ids)) / self.buffer)) for ids in completion_ids]


soft_overlong = SoftOverlong(4, 2)


def cosine(
    completions: list[Any], solution: list[str], completion_ids: list[list[int]], **kwargs: Any
) -> list[float | None]:
    return [
        None if s == "?" else float(len(ids))
        for s, ids in zip(solution, completion_ids, strict=True)
    ]


def accuracy(
    completions: list[list[dict[str, str]]], solution: list[str], log_extra: Any = None,
    log_metric: Any = None, **kwargs: Any,
) -> list[float]:  # fmt: skip
    contents = [completion[0]["content"] for completion in completions]
    right = [float(text == one) for text, one in zip(contents, solution, strict=True)]
    if log_extra:
        log_extra("solution", list(solution))
    if log_metric:
        log_metric("accuracy", sum(right) / len(right))
    return right


def by_keyword_alone(**kwargs: Any) -> list[float]:
    return [float(len(text)) for text in kwargs["completions"]]


def column_alone(solution: list[str], **kwargs: Any) -> list[float]:
    return [float(c == s) for c, s in zip(kwargs["completions"], solution, strict=True)]


def gsm8k(
    solution_str: str, ground_truth: str, method: str = "strict", score: float = 1.0
) -> float:
    return score if solution_str.rpartition("#### ")[2] == ground_truth else 0


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any
) -> dict[str, Any]:
    if data_source != "math_dapo":
        raise NotImplementedError(data_source)
    right = solution_str == ground_truth
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str,
            "index": extra_info["index"]}  # fmt: skip


async def compute_score_async(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any
) -> float:
    return float(solution_str == ground_truth)


def geo3k(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    return float(predict_str == ground_truth)


def prime_math(model_output: str, ground_truth: str) -> tuple[bool, str]:
    return model_output == ground_truth, model_output


def compute_score_batched(
    data_sources: list[str], solution_strs: list[str], ground_truths: list[str],
    extra_infos: list[dict[str, Any]],
) -> list[Any]:  # fmt: skip
    extra_infos[0]["rollout"] = 1
    return [
        {"score": float(text == truth), "extras": len(extra)}
        for text, truth, extra in zip(solution_strs, ground_truths, extra_infos, strict=True)
    ]


_pool: ProcessPoolExecutor | None = None


def equal(a: str, b: str) -> float:
    return float(a == b)


def math_verify(model_output: str, ground_truth: str, timeout_score: float = 0) -> float:
    global _pool
    try:
        if _pool is None:
            _pool = ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))
        return _pool.submit(max, float(model_output == ground_truth), 0.0).result()
    except Exception as error:  # noqa: BLE001
        print(f"Error in math_verify: {error}")
    return timeout_score


def reward_func(
    queries: list[str], prompts: list[str], labels: list[str], **kwargs: Any
) -> dict[str, Any]:
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        assert query.startswith(prompt)
        rewards.append(float(query[len(prompt) :].removesuffix("<end>") == label))
    return {
        "rewards": np.array(rewards),
        "scores": np.array(rewards),
        "extra_logs": {"length": np.array([len(query) for query in queries])},
    }


def old_reward_func(queries: list[str], prompts: list[str]) -> Any:
    return np.array([float(len(query)) for query in queries])
