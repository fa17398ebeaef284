"""From logits to a token and the log-prob it was sampled with, for a batch of rows that may each ask for other parameters.

Sampled and scored distribution are one tensor: tokens are drawn from exp(logp) by inverse transform, with the caller's uniform noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..types import SamplingParams
from .cpu_kernels import cpu_kernels


def sample(logits: Tensor, params: Sequence[SamplingParams], noise: Sequence[float], history: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """logits [B, V] float32, noise [B] in [0, 1), history: each row's tokens so far -> (token [B], log-prob [B]).

    A greedy row (temperature 0) takes the most probable token; its log-prob is at temperature 1. With truncation on, the log-prob is that of the
    truncated and renormalised distribution.
    """
    kernels = cpu_kernels() if logits.device.type == "cpu" and logits.stride(-1) == 1 else None
    alike = params[0] if len(set(map(id, params))) == 1 else None
    # Row by row, not by what the batch happens to hold: a row's token must not depend on its company, and two ways may differ in the last bit.
    plain = [not p.truncates for p in params] if alike is None else [not alike.truncates] * len(params)
    if kernels is None or not any(plain):
        return _sample(logits, params, noise, history)
    drawn = kernels.sample(logits, torch.tensor([p.temperature for p in params]), torch.tensor(noise, dtype=torch.float64))
    if not all(plain):
        others = [b for b, is_plain in enumerate(plain) if not is_plain]
        slow = _sample(logits[others], [params[b] for b in others], [noise[b] for b in others], [history[b] for b in others])
        for all_rows, rows in zip(drawn, slow, strict=True):
            all_rows[others] = rows
    return drawn


def _sample(logits: Tensor, params: Sequence[SamplingParams], noise: Sequence[float], history: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """The same by PyTorch's operations."""
    first = params[0]
    uniform_params = all(p is first or p == first for p in params)
    logits = _adjust(logits, params, history, uniform_params)
    logp = logits.log_softmax(-1)
    if uniform_params:
        logp = truncate(logp, first) if first.truncates else logp
    else:
        logp = torch.cat([truncate(row[None], p) if p.truncates else row[None] for row, p in zip(logp, params, strict=True)])
    # float64: in float32 the running sum over a large vocabulary loses the rare tokens.
    cumulative = logp.exp().cumsum(-1, dtype=torch.float64)
    threshold = torch.tensor(noise, dtype=torch.float64, device=logp.device)[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp_max(logits.shape[-1] - 1)
    greedy = torch.tensor([p.temperature == 0 for p in params], device=logits.device)
    if bool(greedy.any()):
        token = torch.where(greedy, logp.argmax(-1), token)
    return token, logp.gather(-1, token[:, None])[:, 0]


def _adjust(logits: Tensor, params: Sequence[SamplingParams], history: Sequence[list[int]], uniform_params: bool) -> Tensor:
    """Repetition penalty, then temperature."""
    if any(p.repetition_penalty != 1.0 for p in params):
        logits = logits.clone()
        for b, (p, seen) in enumerate(zip(params, history, strict=True)):
            at = torch.tensor(sorted(set(seen)), device=logits.device)
            row = logits[b, at]
            logits[b, at] = torch.where(row > 0, row / p.repetition_penalty, row * p.repetition_penalty)
    if uniform_params:
        temperature = params[0].temperature or 1.0
        return logits if temperature == 1.0 else logits / temperature
    return logits / torch.tensor([p.temperature or 1.0 for p in params], device=logits.device)[:, None]


def truncate(logp: Tensor, params: SamplingParams) -> Tensor:
    """Keep top-k, then the smallest set reaching top-p, then those at least min_p times as probable as the best; renormalise. [B, V] -> [B, V]."""
    if 0 < params.top_k < logp.shape[-1]:
        smallest = logp.topk(params.top_k, dim=-1).values[:, -1:]
        logp = logp.masked_fill(logp < smallest, float("-inf")).log_softmax(-1)
    if params.top_p < 1.0:
        ordered, order = logp.sort(dim=-1, descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()  # mass of the strictly better tokens
        wanted = before < params.top_p
        wanted[:, 0] = True  # the best is kept at top_p = 0 too
        kept = torch.zeros_like(logp, dtype=torch.bool).scatter(1, order, wanted)
        logp = logp.masked_fill(~kept, float("-inf")).log_softmax(-1)
    if params.min_p > 0.0:
        floor = logp.max(-1, keepdim=True).values + float(np.log(params.min_p))
        logp = logp.masked_fill(logp < floor, float("-inf")).log_softmax(-1)
    return logp
