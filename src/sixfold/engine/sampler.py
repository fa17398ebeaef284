"""Sampler: draw a token from each row of logits, with its log-prob. Rows may have different
parameters.

Tokens are drawn from exp(logp) by inverse transform sampling with the caller's uniform noise, so
the recorded log-prob is that of the distribution sampled from. Truncation masks logits before logp
is computed (`truncation.py`).
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
from .kv_cache import triton_serves
from .penalties import penalise
from .sampling_batch import SamplingBatch, index, on
from .truncation import Truncation, truncate


class Draw(NamedTuple):
    """Result of sampling.

    Attributes:
        token: [B] drawn tokens.
        logp: [B] their log-probs.
        cut: tokens kept by the rows that truncate; None if no row does.
    """

    token: Tensor
    logp: Tensor
    cut: Truncation | None


Noise = Sequence[float] | np.ndarray


def sample(
    logits: Tensor, params: Sequence[SamplingParams], noise: Noise, history: Sequence[list[int]]
) -> Draw:
    """Draw one token from each row.

    A greedy row (temperature 0) takes its most probable token; its log-prob is at temperature 1.
    With truncation, the log-prob is that of the truncated and renormalised distribution.

    Args:
        logits: [B, V] float32.
        noise: [B] in [0, 1).
        history: tokens of each row so far.

    Returns:
        The drawn tokens.
    """
    fast, batch = _fast_sampler(logits), _as_batch(params)
    # Choose the path per row, not per batch: the two paths may differ in the last bit, and a row's
    # token must not depend on the other rows.
    plain = batch.plain
    if fast is None or not any(plain):
        return _sample(logits, batch, noise, history)
    token, logp = fast(logits, batch.temperatures(logits.device), _on(noise, logits.device))
    if all(plain):
        return Draw(token, logp, None)
    others, slower = batch.others
    rows = batch.column("others", logits.device, lambda: torch.tensor(others))
    slow = _sample(logits[rows], slower, [noise[b] for b in others], [history[b] for b in others])
    token[rows], logp[rows] = slow.token, slow.logp
    cut = (
        None if slow.cut is None else replace(slow.cut, rows=[others[row] for row in slow.cut.rows])
    )
    return Draw(token, logp, cut)


def _as_batch(params: Sequence[SamplingParams]) -> SamplingBatch:
    return params if isinstance(params, SamplingBatch) else SamplingBatch(params)


def _on(noise: Noise, device: torch.device) -> Tensor:
    """[B] float64 on the device."""
    return on(torch.as_tensor(noise, dtype=torch.float64), device)


def _fast_sampler(
    logits: Tensor,
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """Kernel that samples plain rows (no truncation, no penalties), or None if there is none.

    The kernel maps logits [B, V], temperatures [B] and noise [B] to tokens [B] and log-probs [B].
    """
    if triton_serves(logits.device.type):
        from ..kernels.triton.attention import fused_sample

        return fused_sample
    kernels = (
        cpu_kernels()
        if logits.is_cpu and logits.dtype == torch.float32 and logits.stride(-1) == 1
        else None
    )
    return None if kernels is None else kernels.sample


def _sample(
    logits: Tensor, params: Sequence[SamplingParams], noise: Noise, history: Sequence[list[int]]
) -> Draw:
    """`sample` in plain PyTorch."""
    logp, cut = distribution(logits, params, history)
    token = draw(logp, params, noise)
    return Draw(token, logp.gather(-1, token[:, None])[:, 0], cut)


def distribution(
    logits: Tensor, params: Sequence[SamplingParams], history: Sequence[list[int]]
) -> tuple[Tensor, Truncation | None]:
    """Distribution that tokens are sampled from.

    Args:
        logits: [B, V] float32.
        history: tokens of each row so far.

    Returns:
        Log-probs [B, V], at temperature 1 in greedy rows, and the tokens kept by rows that truncate
        (None if no row does).
    """
    batch = _as_batch(params)
    logits = _adjust(logits, batch, history)
    cut = (
        truncate(logits, batch)
        if any(p.truncates for p in (batch[:1] if batch.alike else batch))
        else None
    )
    return (logits if cut is None else cut.apply(logits)).log_softmax(-1), cut


def draw(logp: Tensor, params: Sequence[SamplingParams], noise: Noise) -> Tensor:
    """Draw a token from each row of a distribution. Greedy rows take the most probable token.

    Args:
        logp: [B, V] log-probs.
        noise: [B] in [0, 1).

    Returns:
        Tokens [B].
    """
    batch, token = _as_batch(params), inverse_transform(logp.exp(), _on(noise, logp.device))
    return (
        torch.where(batch.greedy(logp.device), logp.argmax(-1), token)
        if batch.any_greedy
        else token
    )


def inverse_transform(mass: Tensor, noise: Tensor) -> Tensor:
    """Inverse transform sampling: the first token where the cumulative sum exceeds noise * total.

    Args:
        mass: [B, V] probabilities, not necessarily normalised.
        noise: [B] float64 in [0, 1).

    Returns:
        Tokens [B].
    """
    # float64: in float32 the cumulative sum over a large vocabulary loses rare tokens.
    cumulative = mass.cumsum(-1, dtype=torch.float64)
    threshold = noise[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp_max(mass.shape[-1] - 1)


def likeliest(
    logits: Tensor,
    params: Sequence[SamplingParams],
    history: Sequence[list[int]],
    tokens: Tensor,
    logps: Tensor,
) -> dict[int, dict[int, float]]:
    """Most likely tokens of each row that requests them (`top_logprobs`).

    Truncation may leave fewer tokens than requested.

    Args:
        logits: [B, V] float32.
        history: tokens of each row so far.
        tokens: [B] tokens drawn by `sample`.
        logps: [B] their log-probs. They are used for the drawn tokens, instead of computing them
            again.

    Returns:
        Row number -> token -> log-prob under the distribution that `sample` drew from, best first.
    """
    rows = _as_batch(params).wants_top
    if not rows:
        return {}
    asking, at = [params[b] for b in rows], index(rows, logits.device)
    logp, _ = distribution(logits[at], asking, [history[b] for b in rows])
    # The kernel's log-prob of the drawn token may differ in the last bit: keep the recorded one.
    logp.scatter_(1, tokens[at][:, None], logps[at][:, None])
    best = logp.topk(min(max(p.top_logprobs for p in asking), logp.shape[-1]), dim=-1)
    top = {}
    for b, p, ids, values in zip(
        rows, asking, best.indices.tolist(), best.values.tolist(), strict=True
    ):
        top[b] = {
            token: value
            for token, value in zip(ids[: p.top_logprobs], values, strict=False)
            if value > -torch.inf
        }
    return top


def _adjust(logits: Tensor, batch: SamplingBatch, history: Sequence[list[int]]) -> Tensor:
    """Apply repetition penalty, presence and frequency penalties, temperature, in this order."""
    if any(p.reads_history for p in batch):
        logits = penalise(logits, batch, history)
    if batch.alike:
        temperature = batch[0].temperature or 1.0
        return logits if temperature == 1.0 else logits / temperature
    return logits / batch.divisors(logits.device)
