"""Detect out-of-memory errors, and suggest settings that help in each phase of a run."""

from __future__ import annotations

import traceback

import torch

from ..recipe.schema import Recipe

# PyTorch's CPU allocator, CUDA libraries and the driver raise a RuntimeError with these words.
_WORDS = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "not enough memory",
)

ENGINE_PHASES = ("rollout", "evaluation", "pre-flight")


def is_out_of_memory(error: BaseException) -> bool:
    """True if the error means that the memory of a device or of the host is used up."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def work_size(error: BaseException) -> str:
    """Size of the failed work as " (...)", from the notes of an error and of its causes."""
    notes, cause = list[str](), error
    while True:
        notes += vars(cause).get("__notes__", [])
        if cause.__cause__ is None:
            return f" ({'; '.join(notes)})" if notes else ""
        cause = cause.__cause__


def remedies(recipe: Recipe, phase: str) -> str:
    """Settings that reduce memory in a phase of the loop, with their current values.

    Settings that are already at their limit are left out.
    """
    rollout, trainer, engine = recipe.rollout, recipe.trainer, recipe.engine
    sampling = [
        f"engine.kv_tokens (now {engine.kv_tokens or 'enough for max_running sequences'})",
        f"engine.max_running (now {engine.max_running})" if engine.max_running > 1 else "",
        f"rollout.max_new_tokens (now {rollout.max_new_tokens})",
    ]
    scoring = [
        f"trainer.max_tokens_per_microbatch (now {trainer.max_tokens_per_microbatch})",
        f"trainer.logprob_chunk (now {trainer.logprob_chunk})",
    ]
    switches = [
        (
            "trainer.activation_checkpointing = 'full'"
            if trainer.activation_checkpointing != "full"
            else ""
        ),
        "run.precision = 'bfloat16'" if recipe.run.precision != "bfloat16" else "",
        "engine.release_kv = true" if not engine.release_kv else "",
    ]
    if phase == "loading":
        lower, set_to = [*sampling[:2]], ["a smaller model (model.path)", *switches[1:2]]
    elif phase in ENGINE_PHASES:
        lower, set_to = sampling, switches[1:2]
    elif phase == "reference":
        lower, set_to = (
            scoring,
            [
                "reference.placement = 'worker'" if recipe.reference.placement != "worker" else "",
                *switches[1:],
            ],
        )
    else:
        lower, set_to = (
            [
                *scoring,
                f"rollout.max_new_tokens (now {rollout.max_new_tokens})",
            ],
            switches,
        )
    others = ", ".join(filter(None, set_to))
    return f"lower {', '.join(filter(None, lower))}" + (f"; or set {others}" if others else "")


def free_memory_of(error: BaseException) -> None:
    """Release the memory held by the failed call.

    The frames of its traceback would keep activations and logits alive.
    """
    traceback.clear_frames(error.__traceback__)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
