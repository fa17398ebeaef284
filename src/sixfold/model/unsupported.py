"""Reasons why a model is not supported: the kinds of its layers, or an error in its code."""

from __future__ import annotations

import linecache
from types import TracebackType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

_COMPUTED = {"full_attention", "sliding_attention", "chunked_attention"}
_SHOWN = 80
"""Characters of a source line shown in an error message."""


def unknown_layer_kinds(model: PreTrainedModel) -> list[str]:
    """Kinds of layers in the model's configuration that Sixfold's attention does not compute.

    A probe with short sequences may not show the difference: an index that selects 2,048 keys, or
    keys that represent 128 tokens each, change nothing in a sequence of 13 tokens.
    """
    # Not `vars`: some configurations have `layer_types` as a property.
    declared = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return sorted({str(kind) for kind in declared} - _COMPUTED)


def raised(error: Exception) -> str:
    """The error's type and first line, and the place in the model's code that raised it."""
    kind, text = type(error).__name__, str(error).strip().splitlines()
    told = f"{kind}: {text[0]}" if text else kind
    place = _place(error.__traceback__)
    return f"{place} raised {told}" if place else told


def _place(traceback: TracebackType | None) -> str:
    """The innermost submodule that was running, not counting PyTorch's own layers."""
    place = ""
    while traceback is not None:
        frame = traceback.tb_frame
        owner: Any = frame.f_locals.get("self")
        # In a frame of `nn.Module.__call__`, `self` is the model's submodule but the code is
        # PyTorch's.
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
