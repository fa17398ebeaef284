"""From logits to a token and the log-prob it was sampled with, for a batch of rows that may each ask for other parameters.

Sampled and scored distribution are one tensor: tokens are drawn from exp(logp) by inverse transform, with the caller's uniform noise. Truncation
takes logits away before that tensor is made (`truncation.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.cpu.engine_kernels import cpu_kernels
from ..types import SamplingParams
from .asked import Asked, index, on
from .kv_cache import triton_serves
from .penalties import penalise
from .truncation import Truncation, truncate


class Draw(NamedTuple):
    """What a step sampled. token, logp: [B]. cut: what the rows that truncate kept; None where none does."""

    token: Tensor
    logp: Tensor
    cut: Truncation | None


Noise = Sequence[float] | np.ndarray


def sample(logits: Tensor, params: Sequence[SamplingParams], noise: Noise, history: Sequence[list[int]]) -> Draw:
    """logits [B, V] float32, noise [B] in [0, 1), history: each row's tokens so far -> the drawn tokens.

    A greedy row (temperature 0) takes the most probable token; its log-prob is at temperature 1. With truncation on, the log-prob is that of the
    truncated and renormalised distribution.
    """
    fast, asked = _fast_sampler(logits), _asked(params)
    # Row by row, not by what the batch happens to hold: a row's token must not depend on its company, and two ways may differ in the last bit.
    plain = asked.plain
    if fast is None or not any(plain):
        return _sample(logits, asked, noise, history)
    token, logp = fast(logits, asked.temperatures(logits.device), _on(noise, logits.device))
    if all(plain):
        return Draw(token, logp, None)
    others, slower = asked.others
    rows = asked.column("others", logits.device, lambda: torch.tensor(others))
    slow = _sample(logits[rows], slower, [noise[b] for b in others], [history[b] for b in others])
    token[rows], logp[rows] = slow.token, slow.logp
    cut = None if slow.cut is None else replace(slow.cut, rows=[others[row] for row in slow.cut.rows])
    return Draw(token, logp, cut)


def _asked(params: Sequence[SamplingParams]) -> Asked:
    return params if isinstance(params, Asked) else Asked(params)


def _on(noise: Noise, device: torch.device) -> Tensor:
    """[B] float64 on the device."""
    return on(torch.as_tensor(noise, dtype=torch.float64), device)


def _fast_sampler(logits: Tensor) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """logits [B, V], temperatures [B], noise [B] -> tokens, log-probs; for rows that are not truncated. None where no kernel serves."""
    if triton_serves(logits.device.type):
        from ..kernels.triton.attention import fused_sample

        return fused_sample
    kernels = cpu_kernels() if logits.is_cpu and logits.dtype == torch.float32 and logits.stride(-1) == 1 else None
    return None if kernels is None else kernels.sample


def _sample(logits: Tensor, params: Sequence[SamplingParams], noise: Noise, history: Sequence[list[int]]) -> Draw:
    """The same by PyTorch's operations."""
    logp, cut = distribution(logits, params, history)
    token = draw(logp, params, noise)
    return Draw(token, logp.gather(-1, token[:, None])[:, 0], cut)


def distribution(logits: Tensor, params: Sequence[SamplingParams], history: Sequence[list[int]]) -> tuple[Tensor, Truncation | None]:
    """logits [B, V] float32 -> log-probs [B, V] that tokens are sampled from (at temperature 1 in a greedy row), and what truncating rows kept."""
    asked = _asked(params)
    logits = _adjust(logits, asked, history)
    cut = truncate(logits, asked) if any(p.truncates for p in (asked[:1] if asked.alike else asked)) else None
    return (logits if cut is None else cut.apply(logits)).log_softmax(-1), cut


def draw(logp: Tensor, params: Sequence[SamplingParams], noise: Noise) -> Tensor:
    """A token from each row of logp [B, V], with noise [B] in [0, 1) -> [B]. The most probable one in a greedy row."""
    asked, token = _asked(params), inverse_transform(logp.exp(), _on(noise, logp.device))
    return torch.where(asked.greedy(logp.device), logp.argmax(-1), token) if asked.any_greedy else token


def inverse_transform(mass: Tensor, noise: Tensor) -> Tensor:
    """mass [B, V], not necessarily normalised, noise [B] float64 in [0, 1) -> token [B]: where the running sum passes that share of the whole."""
    # float64: in float32 the running sum over a large vocabulary loses the rare tokens.
    cumulative = mass.cumsum(-1, dtype=torch.float64)
    threshold = noise[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp_max(mass.shape[-1] - 1)


def likeliest(
    logits: Tensor, params: Sequence[SamplingParams], history: Sequence[list[int]], tokens: Tensor, logps: Tensor
) -> dict[int, dict[int, float]]:
    """Of each row that asks (`top_logprobs`) the likeliest tokens, with their log-probs in the distribution that `sample` drew from, best first.

    tokens, logps: what `sample` gave; of a token drawn the log-prob is that very one. Truncation may leave fewer tokens than are asked for.
    """
    rows = _asked(params).wants_top
    if not rows:
        return {}
    asking, at = [params[b] for b in rows], index(rows, logits.device)
    logp, _ = distribution(logits[at], asking, [history[b] for b in rows])
    logp.scatter_(1, tokens[at][:, None], logps[at][:, None])  # a kernel's last bit may be another
    best = logp.topk(min(max(p.top_logprobs for p in asking), logp.shape[-1]), dim=-1)
    top = {}
    for b, p, ids, values in zip(rows, asking, best.indices.tolist(), best.values.tolist(), strict=True):
        top[b] = {token: value for token, value in zip(ids[: p.top_logprobs], values, strict=False) if value > -torch.inf}
    return top


def _adjust(logits: Tensor, asked: Asked, history: Sequence[list[int]]) -> Tensor:
    """Repetition penalty, then presence and frequency penalties, then temperature."""
    if any(p.reads_history for p in asked):
        logits = penalise(logits, asked, history)
    if asked.alike:
        temperature = asked[0].temperature or 1.0
        return logits if temperature == 1.0 else logits / temperature
    return logits / asked.divisors(logits.device)
