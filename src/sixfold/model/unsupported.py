"""Why a model does not run here: the kinds of its layers, and where its own code raised an error."""

from __future__ import annotations

import linecache
from types import TracebackType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

_COMPUTED = {"full_attention", "sliding_attention", "chunked_attention"}
_SHOWN = 80
"""Characters of a line of source code in a message."""


def unknown_layer_kinds(model: PreTrainedModel) -> list[str]:
    """Kinds of layers that its configuration declares and our attention does not compute.

    Short texts may not show the difference: an index that picks 2,048 keys, or keys that stand for
    128 tokens each, change nothing in a text of 13 tokens.
    """
    declared = getattr(model.config.get_text_config(), "layer_types", None) or ()  # of some a property
    return sorted({str(kind) for kind in declared} - _COMPUTED)


def raised(error: Exception) -> str:
    """The error's kind and first line, and where in the model's code it was raised."""
    kind, text = type(error).__name__, str(error).strip().splitlines()
    told = f"{kind}: {text[0]}" if text else kind
    place = _place(error.__traceback__)
    return f"{place} raised {told}" if place else told


def _place(traceback: TracebackType | None) -> str:
    """The innermost part of the model that was running, PyTorch's own layers aside."""
    place = ""
    while traceback is not None:
        frame = traceback.tb_frame
        owner: Any = frame.f_locals.get("self")
        # The owner of a frame of `nn.Module.__call__` is the model's part, but its code is PyTorch's.
        theirs = [type(owner).__module__, str(frame.f_globals["__name__"])]
        if isinstance(owner, nn.Module) and not any(name.startswith("torch.") for name in theirs):
            place = _described(type(owner), frame.f_code.co_filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return place


def _described(owner: type[nn.Module], file: str, line: int) -> str:
    source = linecache.getline(file, line).strip()
    if len(source) > _SHOWN:
        source = source[:_SHOWN] + "..."
    shown = f": `{source}`" if source else ""
    return f"{owner.__name__} of {owner.__module__} (line {line}{shown})"
