"""Settings of the environment."""

from __future__ import annotations

from typing import Literal

from .base import Real, Section, knob


class SandboxConfig(Section):
    """Isolation of programs that the model has written."""

    isolation: Literal["namespaces", "limits"] = knob(
        "namespaces",
        "weakest isolation that is allowed; a machine that gives less refuses to start; limits:"
        " resource limits only, which do not stop hostile code",
    )


class EnvironmentConfig(Section):
    """Checks of answers, and their limits."""

    episode: str = knob(
        "",
        "environment of several turns: calculator, path.py:Class or module:Class (empty: one reply"
        " per task)",
    )
    rewards: tuple[str, ...] = knob(
        ("arithmetic",),
        "reward functions, summed; an environment of several turns may give the reward itself:"
        " arithmetic, code, code_fraction, diversity, math, math_boxed, math_strict,"
        " short_answer, web_answer, tool_calls,"
        " think_format, think_answer_format, json_format, word_count, no_repetition, language,"
        " reasoning_gym, reasoning_gym_solved,"
        " path.py:function or module:function",
    )
    weights: tuple[Real, ...] = knob((), "weight of each reward (empty: 1 for each)")
    timeout_s: Real = knob(
        5.0,
        "seconds one check, or one step of an environment of several turns, may take before it is"
        " stopped and recorded as an error",
        gt=0,
    )
    error_budget: Real = knob(
        0.1, "share of checks per step that may fail before the run stops", ge=0, le=1
    )
    workers: int = knob(1, "number of processes that check answers", ge=1, le=1024)
    preflight: int = knob(
        50,
        "number of rollouts before the first step, to report whether the tasks are too easy or"
        " too hard",
        ge=0,
    )
    sandbox: SandboxConfig = SandboxConfig()
