"""Is a model computed right here? Its own code, run by transformers alone, is the oracle.

Three probes, each of two short texts in one row:

- as they are: both must get the logits that the model gives each alone;
- with windows made so small that the texts are longer, whatever the model's windows are;
- with the second text at the end of the context. The first must not notice. Rotary positions that
  are rescaled for long texts (`longrope`, `dynamic`) take their frequencies from the longest position
  of a call, so every text in it would change, and so would keys that are in the cache already.

Where the first probe fails the model is refused. Where another fails, texts that stay below the
window or the threshold are right, and the context ends there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import UserError
from .attention import NAME
from .causal_lm import Segments, head_logits, hidden_states
from .unsupported import raised, unknown_layer_kinds

_SPANS = ((0, 5), (5, 13))
_SMALL = 4
"""A window that the longer text of the probe exceeds."""
_WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention", "attention_window_size")
"""How configurations and layers name the number of keys that a query sees, or of a chunk that sees itself."""
_WITHOUT_LIMIT = 1 << 20

# What code of other people raises when it is called in a way that it does not expect.
_FAILURES = (TypeError, AttributeError, RuntimeError, ValueError, LookupError, AssertionError, ArithmeticError)


@dataclass(frozen=True)
class Context:
    """How long a text may be.

    Attributes:
        tokens: the longest.
        note: why it is shorter than the model's configuration says; empty if it is not.
    """

    tokens: int
    note: str = ""


@torch.no_grad()
def check_split(model: PreTrainedModel, tolerance: float = 1e-3) -> Context:
    """Find out whether the model is computed right as body and head with our attention, and up to which length.

    It is not with a head that is not plain, attention that asks more of ours than it does or passes
    it by, and layers of other kinds: those that carry state along the row (convolutions, Mamba,
    linear attention), and those that attend to keys of their own making or choice.

    Args:
        model: with our attention set, which it keeps.
        tolerance: of logits, as a share of the largest.

    Returns:
        The context in which it is right.

    Raises:
        UserError: it is not right even for short texts. The message says what is not.
    """
    kind = f"{type(model).__name__} is not supported"
    config = model.config.get_text_config()
    if others := unknown_layer_kinds(model):
        raise UserError(
            f"{kind}: it has layers of the kind {', '.join(others)}. The engine computes full, sliding and chunked attention over all keys; "
            f"the architecture '{config.model_type}' needs more"
        )
    positions = torch.cat([torch.arange(b - a) for a, b in _SPANS])
    try:
        ours, layout = _logits(model, positions)
    except torch.OutOfMemoryError:
        raise
    except _FAILURES as error:
        raise UserError(
            f"{kind}: it does not run as body and head, so the engine does not support the architecture '{config.model_type}'. {raised(error)}"
        ) from error
    if layout.layers != list(range(config.num_hidden_layers)):
        raise UserError(
            f"{kind}: {len(set(layout.layers))} of its {config.num_hidden_layers} layers attend through transformers' attention interface; all must"
        )
    difference = _difference(ours, _own_logits(model, kind))
    if not difference <= tolerance:
        raise UserError(
            f"{kind}: its logits differ by {difference:.2g} of the largest from ours; a transformer with plain causal attention and a plain "
            "head is needed"
        )
    return min(_window_context(model, kind, tolerance), _rope_context(model, kind, positions, ours, tolerance), key=lambda c: c.tokens)


def context_of(model: PreTrainedModel) -> int:
    """Longest sequence the model has positions for."""
    settings = model.config.get_text_config().to_dict()
    return int(settings.get("max_position_embeddings") or settings.get("n_positions") or _WITHOUT_LIMIT)


def _window_context(model: PreTrainedModel, kind: str, tolerance: float) -> Context:
    """Up to the smallest window if small windows are not computed right."""
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
    if difference <= tolerance:
        return whole
    if min(windows) <= max(b - a for a, b in _SPANS):
        raise UserError(f"{kind}: beyond its window of {min(windows)} tokens its logits differ by {difference:.2g} of the largest from ours")
    return Context(
        min(windows),
        f"{type(model).__name__} does not tell our attention of its window of {min(windows)} tokens: longer texts would be wrong, so the "
        f"context is {min(windows)} tokens, not {whole.tokens}",
    )


def _rope_context(model: PreTrainedModel, kind: str, positions: Tensor, ours: Tensor, tolerance: float) -> Context:
    """Up to the length from which on frequencies of rotary positions change with the longest position."""
    whole, (first, second) = context_of(model), (b - a for a, b in _SPANS)
    thresholds = sorted(n for n in _original_contexts(model) if second <= n < whole)
    for limit in [*([] if whole == _WITHOUT_LIMIT else [whole]), *reversed(thresholds)]:
        far = positions.clone()
        far[first:] += limit - second
        try:
            apart = _difference(_logits(model, far)[0][:first], ours[:first])
            # The texts above stood at the beginning: frequencies must be back to what they were.
            apart = max(apart, _difference(_logits(model, positions)[0], ours))
        except torch.OutOfMemoryError:
            raise
        except _FAILURES as error:
            raise UserError(f"{kind}: it does not run at position {limit - 1} of its context: {raised(error)}") from error
        if apart <= tolerance:
            note = (
                f"{type(model).__name__} turns positions otherwise in texts of more than {limit} tokens, and with them all shorter texts of "
                f"the same batch: the context is {limit} tokens, not {whole}"
            )
            return Context(limit, "" if limit == whole else note)
    if whole == _WITHOUT_LIMIT:
        return Context(whole)
    raise UserError(f"{kind}: a text changes with the positions of others in the same batch, and its configuration does not say from which on")


def _original_contexts(model: PreTrainedModel) -> set[int]:
    """Lengths that rotary positions were trained with before they were stretched."""
    settings = model.config.get_text_config().to_dict()
    found, waiting = set(), [settings, settings.get("rope_parameters"), settings.get("rope_scaling")]
    while waiting:
        place = waiting.pop()
        if isinstance(place, dict):
            if isinstance(length := place.get("original_max_position_embeddings"), int):
                found.add(length)
            waiting += [value for key, value in place.items() if isinstance(value, dict) and place is not settings]
    return found


def _logits(model: PreTrainedModel, positions: Tensor) -> tuple[Tensor, Segments]:
    """Ours, float32 [N, V], and the layout that noted which layers attended."""
    layout, tokens = Segments(_SPANS), _tokens(model)
    return head_logits(model, hidden_states(model, tokens, positions.to(tokens.device), layout)), layout


def _own_logits(model: PreTrainedModel, kind: str) -> Tensor:
    """What transformers gives each text alone, float32 [N, V]."""
    tokens = _tokens(model)
    model.set_attn_implementation("eager")
    try:
        return torch.cat([model(input_ids=tokens[None, a:b], use_cache=False).logits[0].float() for a, b in _SPANS])
    except torch.OutOfMemoryError:
        raise
    except _FAILURES as error:
        raise UserError(f"{kind}: transformers itself cannot run it: {raised(error)}") from error
    finally:
        model.set_attn_implementation(NAME)


def _tokens(model: PreTrainedModel) -> Tensor:
    device = next(model.parameters()).device
    return torch.arange(1, _SPANS[-1][1] + 1, device=device) % model.config.get_text_config().vocab_size


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Of logits, as a share of the largest."""
    if ours.shape != theirs.shape:
        return torch.inf
    return float((ours - theirs).abs().max() / (theirs.abs().max() + 1.0))


def _windows(model: PreTrainedModel) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Every place that holds a window: (attributes, name, tokens)."""
    owners = {id(o): o for o in (model.config, model.config.get_text_config(), *(vars(m).get("config") for m in model.modules()), *model.modules())}
    for owner in owners.values():
        if owner is not None:
            places = vars(owner)
            for name in _WINDOWS:
                value = places.get(name)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    yield places, name, value


@contextmanager
def _small_windows(model: PreTrainedModel) -> Iterator[None]:
    """While it lasts, windows are smaller than the texts of the probes.

    Some layers count the query itself, others do not: a difference of one is kept.
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
