"""The engine's GPU kernels in Triton: decode attention over the paged cache, int8 writes, the sampler.

They compute what PyTorch code computes: `DecodeLayout.attend`, a cascade over shared prefixes (in the tests), `quantise`, `sample`. Nothing is
added up with atomics, so the same inputs give the same bits. Import this module only where tensors are on a GPU (or under TRITON_INTERPRET=1):
the base install has no Triton.

Decode attention is flash-decoding (Dao et al. 2023) over block tables. A *unit* is a few sequences whose keys are the same in [begin, end): all
members of a shared prefix, or one sequence and its own part. A program attends for all query heads of one key head of a unit's members over one
split of its keys; a second kernel joins the parts of each sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention import AttentionLayer

PROGRAMS = 512
"""Programs that a step should have at least, to fill a GPU: where sequences are fewer, their keys are split."""
LEAST_SPLIT, MOST_SPLITS = 256, 32
"""Keys in a split at least, and splits at most."""
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _dot(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """a @ b with float32 sums."""
    if INTERPRETED:  # which would multiply bfloat16 numbers as bit patterns; as float32 their products are the same
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision="ieee")


# The numbers that follow from the batch are not specialised on: a kernel for each value that happens
# to be 1 or a multiple of 16 would be compiled in the middle of a rollout.
@triton.jit(do_not_specialize=["columns", "first_part", "parts", "split_keys"])
def _attend(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, key_scales: tl.tensor, value_scales: tl.tensor, table: tl.tensor, positions: tl.tensor,
    members: tl.tensor, begin: tl.tensor, end: tl.tensor, out: tl.tensor, lse: tl.tensor, scale: tl.tensor, softcap: tl.tensor,
    window: tl.tensor, slots: tl.tensor, columns: tl.tensor, first_part: tl.tensor, parts: tl.tensor, split_keys: tl.tensor,
    MEMBERS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, INT8: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
) -> None:  # fmt: skip
    """Program (unit, key head, split): rows are its members' query heads. Writes out [B, H, parts, D] and lse [B, H, parts]."""
    unit, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    row, at_d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    sequence = tl.load(members + unit * MEMBERS + row // GROUP, mask=row < MEMBERS * GROUP, other=-1)
    live = sequence >= 0
    lane = sequence * heads + head * GROUP + row % GROUP
    queries = tl.load(q + lane[:, None] * D + at_d, mask=live[:, None] & (at_d < D), other=0.0)
    position = tl.load(positions + sequence, mask=live, other=0)
    blocks = table + tl.load(members + unit * MEMBERS) * columns
    start = tl.load(begin + unit) + split * split_keys
    stop = tl.minimum(start + split_keys, tl.load(end + unit))
    if WINDOW:
        start = tl.maximum(start, tl.min(tl.where(live, position, 2147483647)) - window + 1)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for low in range(start, stop, TILE):
        key = low + tl.arange(0, TILE)
        inside = key < stop
        block = tl.load(blocks + key // BLOCK_SIZE, mask=inside, other=0)
        slot = head.to(tl.int64) * slots + block * BLOCK_SIZE + key % BLOCK_SIZE
        there = inside[:, None] & (at_d < D)
        k = tl.load(keys + slot[:, None] * D + at_d, mask=there, other=0).to(queries.dtype)
        v = tl.load(values + slot[:, None] * D + at_d, mask=there, other=0).to(queries.dtype)
        scores = _dot(queries, tl.trans(k)) * scale
        if INT8:
            scores *= tl.load(key_scales + slot, mask=inside, other=0.0)
        if SOFTCAP:
            capped = scores / softcap
            scores = softcap * (1 - 2 / (tl.exp(2 * capped) + 1))  # tanh
        seen = inside & (key <= position[:, None])
        if WINDOW:
            seen &= position[:, None] - key < window
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # a row may see nothing here, and -inf - -inf is no number
        weights = tl.exp(scores - shift[:, None])
        decay = tl.exp(top - shift)
        total = total * decay + tl.sum(weights, 1)
        if INT8:
            weights *= tl.load(value_scales + slot, mask=inside, other=0.0)
        sums = sums * decay[:, None] + _dot(weights.to(v.dtype), v)
        top = higher
    part = lane * parts + first_part + split
    tl.store(out + part[:, None] * D + at_d, sums / tl.where(total > 0, total, 1.0)[:, None], mask=live[:, None] & (at_d < D))
    tl.store(lse + part, top + tl.log(tl.where(total > 0, total, 1.0)), mask=live)


@triton.jit(do_not_specialize=["parts"])
def _merge(out: tl.tensor, lse: tl.tensor, merged: tl.tensor, parts: tl.tensor, PARTS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr) -> None:
    """Program (sequence and head): parts [parts, D] with their log-sum-exps -> [D]."""
    lane = tl.program_id(0).to(tl.int64)
    part, at_d = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    weight = tl.load(lse + lane * parts + part, mask=part < parts, other=float("-inf"))
    weight = tl.exp(weight - tl.max(weight, 0))
    there = (part < parts)[:, None] & (at_d < D)
    sums = tl.load(out + (lane * parts + part)[:, None] * D + at_d, mask=there, other=0.0)
    tl.store(merged + lane * D + at_d, tl.sum(sums * weight[:, None], 0) / tl.sum(weight, 0), mask=at_d < D)


class Launch(NamedTuple):
    """How a program of `_attend` is run. warps: of 32 threads. tile: keys read at a time."""

    warps: int
    tile: int


def launch_of(rows: int, d: int, itemsize: int) -> Launch:
    """Warps and tile for which the compiler's registers suffice.

    Found by compiling for sm_80 and sm_90 (`benchmarks/gpu/spills.py`).

    Args:
        rows: query rows of a program, before they are rounded up to a power of two.
        d: head size.
        itemsize: bytes of a number of the cache's dtype as it enters the products.
    """
    rows, d = triton.next_power_of_2(max(16, rows)), triton.next_power_of_2(max(16, d))
    large = rows >= 64 or d >= 128
    tile = 32 if large else 64
    if itemsize == 4 and (rows * d >= 64 * 128 or d >= 256):
        tile = 16
    return Launch(8 if large else 4, tile)


@dataclass(frozen=True)
class Units:
    """What `decode_attention` reads together, on the device. members [U, R], begin and end [U]; see the module's docstring."""

    members: Tensor
    begin: Tensor
    end: Tensor


def units_of(positions: Tensor, members: Tensor, lengths: Tensor, own: Tensor) -> list[Units]:
    """Each sequence's own part and, before it, the prefixes that are shared (`SharedPrefixes`). positions: [B] of the queries."""
    rows = torch.arange(len(positions), device=positions.device)
    prefixes = [Units(members, torch.zeros_like(lengths), lengths)] if len(members) else []
    return [*prefixes, Units(rows[:, None], own, positions + 1)]


def units_of_prompts(members: Tensor, ends: Tensor) -> list[Units]:
    """Rows of prompts that read their keys together (`neighbours`): members [U, R], ends [U]."""
    return [Units(members, torch.zeros_like(ends), ends)]


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, positions: Tensor, units: list[Units], kernel: AttentionLayer,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """q [B, H, D] over the pools [H_kv, blocks, block_size, D] by table [B, M] -> [B, H, D].

    A sequence sees its keys up to its own position [B], within the layer's window. scales: of int8 pools, each [H_kv, blocks, block_size].
    """
    (batch, heads, d), (kv_heads, blocks, block_size, _) = q.shape, keys.shape
    width = table.shape[1] * block_size
    splits = [max(1, min(MOST_SPLITS, -(-width // LEAST_SPLIT), PROGRAMS // (len(u.members) * kv_heads))) for u in units]
    parts = sum(splits) + (kernel.sinks is not None)
    # A shared part that a sequence has none of stays at -inf, so it counts for nothing.
    lse = torch.full((batch, heads, parts), float("-inf"), device=q.device)
    out = torch.zeros(batch, heads, parts, d, device=q.device)
    if kernel.sinks is not None:
        lse[:, :, -1] = kernel.sinks  # a part of one key, whose value is 0
    group, padded, q = heads // kv_heads, triton.next_power_of_2(max(16, d)), q.contiguous()
    for i, unit in enumerate(units):
        count, members = unit.members.shape
        launch = launch_of(members * group, d, q.element_size())
        _attend[(count, kv_heads, splits[i])](
            q, keys, values, *(scales or (keys, values)), table, positions, unit.members, unit.begin, unit.end, out, lse,
            d**-0.5 if kernel.scale is None else kernel.scale, kernel.softcap or 1.0, kernel.window or 0,
            blocks * block_size, table.shape[1], sum(splits[:i]), parts, -(-width // splits[i]),
            MEMBERS=members, GROUP=group, ROWS=triton.next_power_of_2(max(16, members * group)), D=d, WIDTH=padded, BLOCK_SIZE=block_size,
            TILE=launch.tile, INT8=scales is not None, SOFTCAP=kernel.softcap is not None, WINDOW=kernel.window is not None,
            num_warps=launch.warps,
        )  # fmt: skip
    merged = torch.empty_like(q)
    _merge[(batch * heads,)](out, lse, merged, parts, PARTS=triton.next_power_of_2(parts), D=d, WIDTH=padded)
    return merged


@triton.jit(do_not_specialize=["count"])
def _write_int8(
    x: tl.tensor, slots: tl.tensor, pool: tl.tensor, scales: tl.tensor, count: tl.tensor, room: tl.tensor,
    D: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Program (token, key head): one row of D numbers to int8 and its scale."""
    token, head = tl.program_id(0), tl.program_id(1)
    at_d = tl.arange(0, WIDTH)
    row = tl.load(x + (head * count + token) * D + at_d, mask=at_d < D, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(row), 0), 127.0), 1e-30)
    whole = tl.floor(tl.div_rn(row, scale) + 0.5)
    slot = head.to(tl.int64) * room + tl.load(slots + token)
    tl.store(pool + slot * D + at_d, tl.minimum(tl.maximum(whole, -127.0), 127.0).to(tl.int8), mask=at_d < D)
    tl.store(scales + slot, scale)


def write_int8(x: Tensor, slots: Tensor, pool: Tensor, scales: Tensor) -> None:
    """Quantise x [H_kv, N, D] into `slots` [N] of pool [H_kv, blocks, block_size, D] and scales [H_kv, blocks, block_size]; see `quantise`."""
    kv_heads, count, d = x.shape
    room = pool.shape[1] * pool.shape[2]
    _write_int8[(count, kv_heads)](x.contiguous(), slots, pool, scales, count, room, D=d, WIDTH=triton.next_power_of_2(d))


@triton.jit
def _scaled(logits: tl.tensor, at: tl.tensor, end: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Logits at temperature; temperature 0 leaves them."""
    x = tl.load(logits + at, mask=at < end, other=float("-inf"))
    return tl.div_rn(x, tl.where(temperature == 0, 1.0, temperature))


@triton.jit
def _sample(
    logits: tl.tensor, temperatures: tl.tensor, noise: tl.tensor, tokens: tl.tensor, logps: tl.tensor, V: tl.tensor,
    TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row). Three passes over its logits, each in one order: normaliser, mass, pick."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * V
    temperature = tl.load(temperatures + row)
    top, total, best = float("-inf"), 0.0, 0
    for low in range(0, V, TILE):
        x = _scaled(logits, low + tl.arange(0, TILE), V, temperature)
        higher = tl.maximum(top, tl.max(x, 0))
        best = tl.where(higher > top, low + tl.argmax(x, 0), best)
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    lse = top + tl.log(total)
    mass = tl.zeros([TILE], tl.float64)
    for low in range(0, V, TILE):
        mass += tl.exp(_scaled(logits, low + tl.arange(0, TILE), V, temperature) - lse).to(tl.float64)
    # float64: in float32 the running sum over a large vocabulary loses the rare tokens.
    threshold = tl.load(noise + row) * tl.sum(mass, 0)
    before, token = tl.sum(mass, 0) * 0.0, 0
    for low in range(0, V, TILE):
        at = low + tl.arange(0, TILE)
        cumulative = before + tl.cumsum(tl.exp(_scaled(logits, at, V, temperature) - lse).to(tl.float64), 0)
        token += tl.sum(((cumulative <= threshold) & (at < V)).to(tl.int32), 0)
        before = tl.max(cumulative, 0)
    token = tl.where(temperature == 0, best, tl.minimum(token, V - 1))
    tl.store(tokens + row, token)
    tl.store(logps + row, _scaled(logits, token, V, temperature) - lse)


def fused_sample(logits: Tensor, temperatures: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """logits [B, V] float32, temperatures [B] float32 (0: greedy), noise [B] float64 in [0, 1) -> (token [B], log-prob [B]), as `sample` has it."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    logps = torch.empty(len(logits), device=logits.device)
    tile = min(1024, triton.next_power_of_2(logits.shape[1]))
    _sample[(len(logits),)](logits.contiguous(), temperatures, noise, tokens, logps, logits.shape[1], TILE=tile)
    return tokens, logps
