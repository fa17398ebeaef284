"""Detect out-of-memory errors, and suggest settings that help in each phase of a run."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import UserError

# PyTorch's CPU allocator, CUDA libraries and the driver raise a RuntimeError with these words.
_WORDS = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "not enough memory",
)

_ONE = ("engine.max_running", 1)
_ENOUGH = "enough for max_running sequences"
_SMALLER_MODEL = "a smaller model (model.path)"
_SAMPLING = ("engine.kv_tokens", "engine.max_running", "rollout.max_new_tokens")
_SCORING = ("trainer.max_tokens_per_microbatch", "trainer.logprob_chunk")
_LEAST = {
    "trainer.activation_checkpointing": "'full'",
    "run.precision": "'bfloat16'",
    "engine.release_kv": "true",
    "reference.placement": "'worker'",
}
"""Setting -> the value with which it takes least memory."""

_ENGINE = (_SAMPLING, ("run.precision",))
_IN_TRAINING = (
    (*_SCORING, "rollout.max_new_tokens"),
    ("trainer.activation_checkpointing", "run.precision", "engine.release_kv"),
)
_REMEDIES = {
    "loading": (_SAMPLING[:2], ("model.path", "run.precision")),
    "rollout": _ENGINE,
    "evaluation": _ENGINE,
    "pre-flight": _ENGINE,
    "reference": (_SCORING, ("reference.placement", "run.precision", "engine.release_kv")),
}
"""Phase -> the settings to lower, and those to set to a value that takes less memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if the error means that the memory of a device or of the host is used up."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, UserError):  # it has words of its own, for example about a lost process
        return False
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def work_size(error: BaseException) -> str:
    """Size of the failed work as " (...)", from the notes of an error and of its causes."""
    notes, cause = list[str](), error
    while True:
        notes += vars(cause).get("__notes__", [])
        if cause.__cause__ is None:
            return f" ({'; '.join(notes)})" if notes else ""
        cause = cause.__cause__


def remedies(settings: Mapping[str, Any], phase: str) -> str:
    """Settings that reduce memory in a phase of the loop, with their current values.

    Settings that are already at their limit are left out.

    Args:
        settings: the recipe's settings, by dotted key.
        phase: phase in which memory was used up.
    """
    keys, others = _REMEDIES.get(phase, _IN_TRAINING)
    lower = [
        f"{key} (now {settings[key] or _ENOUGH})" for key in keys if (key, settings[key]) != _ONE
    ]
    set_to = [
        _SMALLER_MODEL if key == "model.path" else f"{key} = {_LEAST[key]}"
        for key in others
        if key == "model.path" or _literal(settings[key]) != _LEAST[key]
    ]
    return f"lower {', '.join(lower)}" + (f"; or set {', '.join(set_to)}" if set_to else "")


def _literal(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def free_memory_of(error: BaseException) -> None:
    """Release the memory held by the failed call.

    The frames of its traceback would keep activations and logits alive.
    """
    traceback.clear_frames(error.__traceback__)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
