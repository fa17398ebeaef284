"""CUDA's two attention kernels for ragged batches, on the fake device.

Each computes in float32, one sequence at a time, and checks the arguments that the true
kernel checks (ATen/native/transformers/cuda: flash_api.cpp, attention.cu). So a test sees whether
the library's calls are valid, and what their results and gradients are by the kernels' contract.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import torch
from phantom import add_kernel, register
from torch import Tensor

from sixfold.kernels import span_attention

LOWER_RIGHT = 2


def register_gpu() -> torch.device:
    """The fake device, with both kernels and everything in the library that chooses them."""
    device = register()
    _add_kernels()
    return device


@cache
def _add_kernels() -> None:
    real = span_attention.device_kernels
    every = frozenset({"flash", "efficient", "chunked"})
    span_attention.device_kernels = lambda device: (
        every if device.type == "phantom" else real(device)
    )  # type: ignore[assignment]
    span_attention._varlen_attn()  # makes its operator known
    add_kernel("_flash_attention_forward", flash_forward)
    add_kernel("_flash_attention_backward", flash_backward)
    add_kernel("_efficient_attention_forward", efficient_forward)
    add_kernel("_efficient_attention_backward", efficient_backward)


def _spans(offsets_q: Tensor, offsets_k: Tensor) -> Iterator[tuple[slice, slice]]:
    q, k = offsets_q.tolist(), offsets_k.tolist()
    return ((slice(*a), slice(*b)) for a, b in zip(pairwise(q), pairwise(k), strict=True))


def _probabilities(
    q: Tensor, k: Tensor, scale: float, left: int, right: int
) -> tuple[Tensor, Tensor]:
    """(softmax, log-sum-exp) of the scores of every head, aligned at the ends.

    Args:
        q: float32 [heads, queries, size].
        k: float32 [heads, keys, size].
        scale: of the scores.
        left: most keys before a query's own that it sees. -1 is no limit.
        right: most keys after it.
    """
    scores = q @ k.mT * scale
    queries, keys = scores.shape[1:]
    gap = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    if left >= 0:
        scores.masked_fill_(gap > left, -torch.inf)
    if right >= 0:
        scores.masked_fill_(gap < -right, -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp(), lse


def _by_head(x: Tensor, heads: int) -> Tensor:
    """[N, some heads, size] -> float32 [heads, N, size]: each head as often as it is read."""
    return x.float().repeat_interleave(heads // x.shape[1], 1).transpose(0, 1)


def _of_keys(grad: Tensor, like: Tensor) -> Tensor:
    """The reverse of `_by_head`: the sum over the query heads that read a head."""
    summed = grad.transpose(0, 1).unflatten(1, (like.shape[1], -1)).sum(2)
    return summed.to(like.dtype)


def _forward(q, k, v, offsets_q, offsets_k, scale, left, right) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    heads = q.shape[1]
    queries, keys, values = (_by_head(x, heads) for x in (q, k, v))
    out, lse = torch.zeros(heads, len(q), v.shape[-1]), torch.zeros(heads, len(q))
    for rows, seen in _spans(offsets_q, offsets_k):
        p, lse[:, rows] = _probabilities(queries[:, rows], keys[:, seen], scale, left, right)
        out[:, rows] = p @ values[:, seen]
    return out.transpose(0, 1).contiguous().to(q.dtype), lse


def _backward(grad, q, k, v, out, offsets_q, offsets_k, scale, left, right) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    heads = q.shape[1]
    grads, queries, keys, values, outs = (_by_head(x, heads) for x in (grad, q, k, v, out))
    dq, dk, dv = (torch.zeros(x.shape) for x in (queries, keys, values))
    for rows, seen in _spans(offsets_q, offsets_k):
        p, _ = _probabilities(queries[:, rows], keys[:, seen], scale, left, right)
        do, o = grads[:, rows], outs[:, rows]
        ds = p * (do @ values[:, seen].mT - (do * o).sum(-1, keepdim=True)) * scale
        dv[:, seen] += p.mT @ do
        dq[:, rows] = ds @ keys[:, seen]
        dk[:, seen] += ds.mT @ queries[:, rows]
    return dq.transpose(0, 1).contiguous().to(q.dtype), _of_keys(dk, k), _of_keys(dv, v)


def _check_offsets(offsets_q: Tensor, offsets_k: Tensor, max_q: int, max_k: int) -> None:
    assert offsets_q.dtype == offsets_k.dtype == torch.int32
    assert (
        offsets_q.is_contiguous() and offsets_k.is_contiguous() and len(offsets_q) == len(offsets_k)
    )
    assert max_q == offsets_q.diff().max() and max_k == offsets_k.diff().max()


def flash_forward(
    q,
    k,
    v,
    offsets_q,
    offsets_k,
    max_q,
    max_k,
    dropout,
    causal,
    debug,
    *,
    scale,
    window_size_left,
    window_size_right,
    **rest,
):  # type: ignore[no-untyped-def]
    assert not any(x is not None for x in rest.values()), rest
    assert q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    assert (
        q.shape[1] % k.shape[1] == 0
        and len(q) == offsets_q[-1]
        and len(k) == len(v) == offsets_k[-1]
    )
    assert dropout == 0 and not debug
    _check_offsets(offsets_q, offsets_k, max_q, max_k)
    right = 0 if causal else window_size_right
    out, lse = _forward(q, k, v, offsets_q, offsets_k, scale, window_size_left, right)
    return (
        out,
        lse,
        torch.zeros(2, dtype=torch.uint64),
        torch.zeros((), dtype=torch.uint64),
        torch.zeros(0),
    )


def flash_backward(  # type: ignore[no-untyped-def]
    grad,
    q,
    k,
    v,
    out,
    lse,
    offsets_q,
    offsets_k,
    max_q,
    max_k,
    dropout,
    causal,
    state,
    unused,
    *,
    scale,
    window_size_left,
    window_size_right,
):
    right = 0 if causal else window_size_right
    return _backward(grad, q, k, v, out, offsets_q, offsets_k, scale, window_size_left, right)


def efficient_forward(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    bias,
    offsets_q,
    offsets_k,
    max_q,
    max_k,
    dropout,
    mask_type,
    with_lse=False,
    *,
    scale,
    seqlen_k=None,
    window_size=None,
):
    assert bias is None and seqlen_k is None and dropout == 0 and mask_type == LOWER_RIGHT
    assert q.dtype == k.dtype == v.dtype and q.dtype != torch.float64
    assert len(q) == len(k) == len(v) == 1 and q.shape[2] == k.shape[2] == v.shape[2]
    assert all(x.shape[-1] % (4 if x.dtype == torch.float32 else 8) == 0 for x in (q, k, v))
    _check_offsets(offsets_q, offsets_k, max_q, max_k)
    out, lse = _forward(
        q[0],
        k[0],
        v[0],
        offsets_q,
        offsets_k,
        scale,
        -1 if window_size is None else window_size - 1,
        0,
    )
    state = torch.zeros((), dtype=torch.int64)
    return out[None], lse if with_lse else torch.zeros(0), state, state.clone(), max_q, max_k


def efficient_backward(  # type: ignore[no-untyped-def]
    grad,
    q,
    k,
    v,
    bias,
    out,
    offsets_q,
    offsets_k,
    max_q,
    max_k,
    lse,
    dropout,
    seed,
    offset,
    mask_type,
    bias_grad,
    *,
    scale,
    window_size=None,
    **_,
):
    assert lse.numel() and mask_type == LOWER_RIGHT
    grads = _backward(
        grad[0],
        q[0],
        k[0],
        v[0],
        out[0],
        offsets_q,
        offsets_k,
        scale,
        -1 if window_size is None else window_size - 1,
        0,
    )
    return *(g[None] for g in grads), torch.zeros(0)
