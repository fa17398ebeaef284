"""Check that Sixfold computes a model correctly. The reference is the model's code in transformers.

There are three probes, each with two short sequences in one row:

- Unchanged: each sequence must get the logits that transformers computes for it alone.
- With attention windows reduced to less than the length of a sequence.
- With the second sequence at the end of the context. The first sequence's logits must not change.
  Rotary embeddings that are rescaled for long sequences (`longrope`, `dynamic`) take their
  frequencies from the largest position of a call. One long sequence would change all others in the
  call, and keys that are already in the KV cache would no longer match.

If the first probe fails, the model is refused. If another one fails, sequences below the window or
the threshold are still correct, so the context is limited to that length.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import UserError
from .attention import NAME
from .causal_lm import Segments, head_logits, hidden_states

_SPANS = ((0, 5), (5, 13))
_SMALL = 4
"""A window that is shorter than the longer sequence of the probe, in tokens."""
_WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention", "attention_window_size")
"""Names of the attention window or chunk size in configurations and layers."""
_WITHOUT_LIMIT = 1 << 20
_TOLERANCE = 1e-3
"""Largest accepted difference of logits, as a fraction of the largest logit."""

# Errors that a model's code may raise when it is called in a way that it does not support.
_FAILURES = (
    TypeError,
    AttributeError,
    RuntimeError,
    ValueError,
    LookupError,
    AssertionError,
    ArithmeticError,
)


@dataclass(frozen=True)
class Context:
    """Longest supported sequence.

    Attributes:
        note: why it is shorter than the model's configuration says; empty if it is not.
    """

    tokens: int
    note: str = ""


@torch.no_grad()
def check_split(model: PreTrainedModel) -> Context:
    """Check that body and head with Sixfold's attention are correct, and up to which length.

    Not supported are:

    - output heads that compute more than a matrix product, a scaling and a soft cap;
    - attention that needs other features, or that bypasses transformers' attention interface;
    - layers with state along the row (convolutions, Mamba, linear attention);
    - layers that compute or select the keys they attend to.

    Args:
        model: has Sixfold's attention set, and keeps it.

    Returns:
        The longest sequence for which the model is correct.

    Raises:
        UserError: the model is wrong even for short sequences. The message names the reason.
    """
    kind = f"{type(model).__name__} is not supported"
    config = model.config.get_text_config()
    if others := unknown_layer_kinds(model):
        raise UserError(
            f"{kind}: it has layers of kind {', '.join(others)}. The engine supports only full,"
            " sliding and chunked attention over all keys; the architecture"
            f" '{config.model_type}' needs more"
        )
    positions = torch.cat([torch.arange(b - a) for a, b in _SPANS])
    try:
        ours, layout = _logits(model, positions)
    except torch.OutOfMemoryError:
        raise
    except _FAILURES as error:
        raise UserError(
            f"{kind}: it cannot be run as body and head, so the engine does not support the"
            f" architecture '{config.model_type}'. {error_in_model(error)}"
        ) from error
    if layout.layers != list(range(config.num_hidden_layers)):
        raise UserError(
            f"{kind}: only {len(set(layout.layers))} of its {config.num_hidden_layers} layers use"
            " transformers' attention interface. All layers must use it"
        )
    difference = _difference(ours, _own_logits(model, kind))
    if not difference <= _TOLERANCE:
        raise UserError(
            f"{kind}: its logits differ from Sixfold's by {difference:.2g} of the largest logit."
            " Use a transformer with plain causal attention and a plain output head"
        )
    return min(
        _window_context(model, kind),
        _rope_context(model, kind, positions, ours),
        key=lambda c: c.tokens,
    )


def context_of(model: PreTrainedModel) -> int:
    """Number of positions of the model, from its configuration, in tokens."""
    settings = model.config.get_text_config().to_dict()
    return int(
        settings.get("max_position_embeddings") or settings.get("n_positions") or _WITHOUT_LIMIT
    )


def _window_context(model: PreTrainedModel, kind: str) -> Context:
    """Second probe: limit the context to the smallest window if small windows give wrong logits.

    Raises:
        UserError: logits are wrong and the smallest window is no longer than a probe's sequence.
    """
    whole = Context(context_of(model))
    windows = [value for *_, value in _windows(model)]
    if not windows or min(windows) >= whole.tokens:
        return whole
    positions = torch.cat([torch.arange(b - a) for a, b in _SPANS])
    with _small_windows(model):
        try:
            difference = _difference(_logits(model, positions)[0], _own_logits(model, kind))
        except torch.OutOfMemoryError:
            raise
        except (*_FAILURES, UserError):
            difference = torch.inf
    if difference <= _TOLERANCE:
        return whole
    if min(windows) <= max(b - a for a, b in _SPANS):
        raise UserError(
            f"{kind}: for sequences longer than its window of {min(windows)} tokens, its logits"
            f" differ from Sixfold's by {difference:.2g} of the largest logit"
        )
    return Context(
        min(windows),
        f"{type(model).__name__} does not pass its window of {min(windows)} tokens to the"
        " attention function, so longer sequences would be wrong. The context is limited to"
        f" {min(windows)} tokens instead of {whole.tokens}",
    )


def _rope_context(model: PreTrainedModel, kind: str, positions: Tensor, ours: Tensor) -> Context:
    """Third probe: limit the context to the length above which rotary frequencies change."""
    whole, (first, second) = context_of(model), (b - a for a, b in _SPANS)
    thresholds = sorted(n for n in _original_contexts(model) if second <= n < whole)
    for limit in [*([] if whole == _WITHOUT_LIMIT else [whole]), *reversed(thresholds)]:
        far = positions.clone()
        far[first:] += limit - second
        try:
            apart = _difference(_logits(model, far)[0][:first], ours[:first])
            # Later calls at small positions must get the original frequencies again.
            apart = max(apart, _difference(_logits(model, positions)[0], ours))
        except torch.OutOfMemoryError:
            raise
        except _FAILURES as error:
            raise UserError(
                f"{kind}: it fails at position {limit - 1} of its context: {error_in_model(error)}"
            ) from error
        if apart <= _TOLERANCE:
            note = (
                f"{type(model).__name__} changes its rotary frequencies if a sequence has more"
                f" than {limit} tokens, also for shorter sequences of the same batch. The context"
                f" is limited to {limit} tokens instead of {whole}"
            )
            return Context(limit, "" if limit == whole else note)
    if whole == _WITHOUT_LIMIT:
        return Context(whole)
    raise UserError(
        f"{kind}: the logits of a sequence depend on the positions of other sequences in the"
        " batch, and the configuration does not say above which length"
    )


def _original_contexts(model: PreTrainedModel) -> set[int]:
    """Context lengths in the configuration that rotary embeddings had before they were extended."""
    settings = model.config.get_text_config().to_dict()
    found, waiting = (
        set(),
        [
            settings,
            settings.get("rope_parameters"),
            settings.get("rope_scaling"),
        ],
    )
    while waiting:
        place = waiting.pop()
        if isinstance(place, dict):
            if isinstance(length := place.get("original_max_position_embeddings"), int):
                found.add(length)
            waiting += [
                value
                for key, value in place.items()
                if isinstance(value, dict) and place is not settings
            ]
    return found


def _logits(model: PreTrainedModel, positions: Tensor) -> tuple[Tensor, Segments]:
    """Logits with Sixfold's attention, float32 [N, V], and the layout that recorded the layers."""
    layout, tokens = Segments(_SPANS), _tokens(model)
    return (
        head_logits(model, hidden_states(model, tokens, positions.to(tokens.device), layout)),
        layout,
    )


def _own_logits(model: PreTrainedModel, kind: str) -> Tensor:
    """Logits of each sequence alone, computed by transformers, float32 [N, V]."""
    tokens = _tokens(model)
    model.set_attn_implementation("eager")
    try:
        return torch.cat(
            [
                model(input_ids=tokens[None, a:b], use_cache=False).logits[0].float()
                for a, b in _SPANS
            ]
        )
    except torch.OutOfMemoryError:
        raise
    except _FAILURES as error:
        raise UserError(
            f"{kind}: transformers cannot run it either: {error_in_model(error)}"
        ) from error
    finally:
        model.set_attn_implementation(NAME)


def _tokens(model: PreTrainedModel) -> Tensor:
    device = next(model.parameters()).device
    return (
        torch.arange(1, _SPANS[-1][1] + 1, device=device)
        % model.config.get_text_config().vocab_size
    )


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference of logits, as a fraction of the largest logit plus 1."""
    if ours.shape != theirs.shape:
        return torch.inf
    return float((ours - theirs).abs().max() / (theirs.abs().max() + 1.0))


def _windows(model: PreTrainedModel) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Every attribute that holds a window, as (attribute dictionary, name, tokens)."""
    owners = {
        id(o): o
        for o in (
            model.config,
            model.config.get_text_config(),
            *(vars(m).get("config") for m in model.modules()),
            *model.modules(),
        )
    }
    for owner in owners.values():
        if owner is not None:
            places = vars(owner)
            for name in _WINDOWS:
                value = places.get(name)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    yield places, name, value


@contextmanager
def _small_windows(model: PreTrainedModel) -> Iterator[None]:
    """Context in which windows are smaller than the sequences of the probe.

    A difference of one between windows is kept: some layers count the query itself, others do not.
    """
    places = list(_windows(model))
    smallest = min(value for *_, value in places)
    for attributes, name, value in places:
        attributes[name] = min(value, _SMALL + min(value - smallest, 1))
    try:
        yield
    finally:
        for attributes, name, value in places:
            attributes[name] = value


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


def error_in_model(error: Exception) -> str:
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
            place = _describe(type(owner), frame.f_code.co_filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return place


def _describe(owner: type[nn.Module], file: str, line: int) -> str:
    source = linecache.getline(file, line).strip()
    if len(source) > _SHOWN:
        source = source[:_SHOWN] + "..."
    shown = f": `{source}`" if source else ""
    return f"{owner.__name__} of {owner.__module__} (line {line}{shown})"
