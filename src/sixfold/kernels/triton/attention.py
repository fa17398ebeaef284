"""The engine's Triton kernels: decode attention over the paged KV cache, int8 writes, sampling.

The kernels compute the same functions as PyTorch code: `DecodeLayout.attend`, a cascade over shared
prefixes (in the tests), `quantise`, `sample`. No sum uses atomics, so the same inputs give the same
bits. Import this module only if tensors are on a GPU, or under TRITON_INTERPRET=1: the base install
has no Triton.

Decode attention is flash-decoding (Dao et al. 2023) over block tables. A *unit* is a few sequences
that have the same keys in [begin, end): all members of a shared prefix, or one sequence with its
own part. One program handles one KV head of a unit and one split of its keys. It attends for all
query heads of that KV head, for all members of the unit. A second kernel merges the parts of each
sequence.
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
"""Number of programs that fills a GPU. With fewer sequences, their keys are split."""
LEAST_SPLIT, MOST_SPLITS = 256, 32
"""Minimum number of keys per split, and maximum number of splits."""
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _dot(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """a @ b with float32 sums."""
    # The interpreter would multiply bfloat16 numbers as bit patterns. In float32 the products are
    # the same as on a GPU.
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision="ieee")


# Do not specialise on numbers that depend on the batch: Triton would compile a new kernel, in the
# middle of a rollout, whenever a value happens to be 1 or a multiple of 16.
@triton.jit(do_not_specialize=["columns", "first_part", "parts", "split_keys"])
def _attend(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, key_scales: tl.tensor,
    value_scales: tl.tensor, table: tl.tensor, positions: tl.tensor,
    members: tl.tensor, begin: tl.tensor, end: tl.tensor, out: tl.tensor, lse: tl.tensor,
    scale: tl.tensor, softcap: tl.tensor,
    window: tl.tensor, slots: tl.tensor, columns: tl.tensor, first_part: tl.tensor,
    parts: tl.tensor, split_keys: tl.tensor,
    MEMBERS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, INT8: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
) -> None:  # fmt: skip
    """Attention of one program (unit, KV head, split). Its rows are the query heads of its members.

    Writes out [B, H, parts, D] and lse [B, H, parts].
    """
    unit, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    row, at_d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    sequence = tl.load(
        members + unit * MEMBERS + row // GROUP, mask=row < MEMBERS * GROUP, other=-1
    )
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
        # A row may see no key in this tile, and -inf - -inf is NaN.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - shift[:, None])
        decay = tl.exp(top - shift)
        total = total * decay + tl.sum(weights, 1)
        if INT8:
            weights *= tl.load(value_scales + slot, mask=inside, other=0.0)
        sums = sums * decay[:, None] + _dot(weights.to(v.dtype), v)
        top = higher
    part = lane * parts + first_part + split
    tl.store(
        out + part[:, None] * D + at_d,
        sums / tl.where(total > 0, total, 1.0)[:, None],
        mask=live[:, None] & (at_d < D),
    )
    tl.store(lse + part, top + tl.log(tl.where(total > 0, total, 1.0)), mask=live)


@triton.jit(do_not_specialize=["parts"])
def _merge(
    out: tl.tensor,
    lse: tl.tensor,
    merged: tl.tensor,
    parts: tl.tensor,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Merge the parts [parts, D] of one sequence and head by their log-sum-exps -> [D]."""
    lane = tl.program_id(0).to(tl.int64)
    part, at_d = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    weight = tl.load(lse + lane * parts + part, mask=part < parts, other=float("-inf"))
    weight = tl.exp(weight - tl.max(weight, 0))
    there = (part < parts)[:, None] & (at_d < D)
    sums = tl.load(out + (lane * parts + part)[:, None] * D + at_d, mask=there, other=0.0)
    tl.store(
        merged + lane * D + at_d,
        tl.sum(sums * weight[:, None], 0) / tl.sum(weight, 0),
        mask=at_d < D,
    )


class Launch(NamedTuple):
    """Launch parameters of `_attend`.

    Attributes:
        warps: warps (of 32 threads) per program.
        tile: keys read at a time.
    """

    warps: int
    tile: int


def launch_of(rows: int, d: int, itemsize: int) -> Launch:
    """Warps and tile for which no registers are spilled.

    Found by compiling for sm_80 and sm_90 (`benchmarks/gpu/spills.py`).

    Args:
        rows: query rows per program, before rounding up to a power of two.
        d: head size.
        itemsize: bytes per number of the dtype that enters the products.
    """
    rows, d = triton.next_power_of_2(max(16, rows)), triton.next_power_of_2(max(16, d))
    large = rows >= 64 or d >= 128
    tile = 32 if large else 64
    if itemsize == 4 and (rows * d >= 64 * 128 or d >= 256):
        tile = 16
    return Launch(8 if large else 4, tile)


@dataclass(frozen=True)
class Units:
    """Units of `decode_attention`, on the device. See the module docstring.

    Attributes:
        members: [U, R] row numbers of the members, -1 where a unit has fewer than R.
        begin: [U] first key position.
        end: [U] position after the last key.
    """

    members: Tensor
    begin: Tensor
    end: Tensor


def units_of(positions: Tensor, members: Tensor, lengths: Tensor, own: Tensor) -> list[Units]:
    """Units of a decode: the shared prefixes, if there are any, and each sequence's own part.

    Args:
        positions: [B] position of each query.
        members: see `SharedPrefixes`.
        lengths: see `SharedPrefixes`.
        own: see `SharedPrefixes`.
    """
    rows = torch.arange(len(positions), device=positions.device)
    prefixes = [Units(members, torch.zeros_like(lengths), lengths)] if len(members) else []
    return [*prefixes, Units(rows[:, None], own, positions + 1)]


def units_of_prompts(members: Tensor, ends: Tensor) -> list[Units]:
    """Units of prompt rows that read their keys together: members [U, R], ends [U]
    (`neighbours`)."""
    return [Units(members, torch.zeros_like(ends), ends)]


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, positions: Tensor, units: list[Units],
    kernel: AttentionLayer,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Decode attention over the paged KV cache.

    A query sees the keys up to its own position, within the layer's window.

    Args:
        q: [B, H, D] queries.
        keys: [H_kv, blocks, block_size, D] key pool.
        values: [H_kv, blocks, block_size, D] value pool.
        table: [B, M] block table of each query.
        positions: [B] position of each query.
        units: result of `units_of` or `units_of_prompts`.
        scales: scales of int8 pools, [H_kv, blocks, block_size, 1] each; None for other pools.

    Returns:
        [B, H, D].
    """
    (batch, heads, d), (kv_heads, blocks, block_size, _) = q.shape, keys.shape
    width = table.shape[1] * block_size
    splits = [
        max(1, min(MOST_SPLITS, -(-width // LEAST_SPLIT), PROGRAMS // (len(u.members) * kv_heads)))
        for u in units
    ]
    parts = sum(splits) + (kernel.sinks is not None)
    # Initialise with -inf: the shared part of a sequence without a shared prefix must get weight 0.
    lse = torch.full((batch, heads, parts), float("-inf"), device=q.device)
    out = torch.zeros(batch, heads, parts, d, device=q.device)
    if kernel.sinks is not None:
        lse[:, :, -1] = kernel.sinks  # the sink is a part with one key, whose value is 0
    group, padded, q = heads // kv_heads, triton.next_power_of_2(max(16, d)), q.contiguous()
    for i, unit in enumerate(units):
        count, members = unit.members.shape
        launch = launch_of(members * group, d, q.element_size())
        _attend[(count, kv_heads, splits[i])](
            q, keys, values, *(scales or (keys, values)), table, positions, unit.members,
            unit.begin, unit.end, out, lse,
            d**-0.5 if kernel.scale is None else kernel.scale, kernel.softcap or 1.0,
            kernel.window or 0,
            blocks * block_size, table.shape[1], sum(splits[:i]), parts, -(-width // splits[i]),
            MEMBERS=members, GROUP=group, ROWS=triton.next_power_of_2(max(16, members * group)),
            D=d, WIDTH=padded, BLOCK_SIZE=block_size,
            TILE=launch.tile, INT8=scales is not None, SOFTCAP=kernel.softcap is not None,
            WINDOW=kernel.window is not None,
            num_warps=launch.warps,
        )  # fmt: skip
    merged = torch.empty_like(q)
    _merge[(batch * heads,)](
        out, lse, merged, parts, PARTS=triton.next_power_of_2(parts), D=d, WIDTH=padded
    )
    return merged


@triton.jit(do_not_specialize=["count"])
def _write_int8(
    x: tl.tensor, slots: tl.tensor, pool: tl.tensor, scales: tl.tensor, count: tl.tensor,
    room: tl.tensor,
    D: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Quantise one row of D numbers to int8. One program per (token, KV head)."""
    token, head = tl.program_id(0), tl.program_id(1)
    at_d = tl.arange(0, WIDTH)
    row = tl.load(x + (head * count + token) * D + at_d, mask=at_d < D, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(row), 0), 127.0), 1e-30)
    whole = tl.floor(tl.div_rn(row, scale) + 0.5)
    slot = head.to(tl.int64) * room + tl.load(slots + token)
    tl.store(
        pool + slot * D + at_d,
        tl.minimum(tl.maximum(whole, -127.0), 127.0).to(tl.int8),
        mask=at_d < D,
    )
    tl.store(scales + slot, scale)


def write_int8(x: Tensor, slots: Tensor, pool: Tensor, scales: Tensor) -> None:
    """Quantise x into slots of an int8 pool. Same result as `quantise`.

    Args:
        x: [H_kv, N, D] keys or values.
        slots: [N] cache slots.
        pool: [H_kv, blocks, block_size, D] int8 pool.
        scales: [H_kv, blocks, block_size, 1] scales.
    """
    kv_heads, count, d = x.shape
    room = pool.shape[1] * pool.shape[2]
    _write_int8[(count, kv_heads)](
        x.contiguous(), slots, pool, scales, count, room, D=d, WIDTH=triton.next_power_of_2(d)
    )


@triton.jit
def _load_scaled(
    logits: tl.tensor, at: tl.tensor, end: tl.tensor, temperature: tl.tensor
) -> tl.tensor:
    """Load logits and divide them by the temperature. Temperature 0 counts as 1."""
    x = tl.load(logits + at, mask=at < end, other=float("-inf"))
    return tl.div_rn(x, tl.where(temperature == 0, 1.0, temperature))


@triton.jit
def _sum_chunk(
    logits: tl.tensor, temperatures: tl.tensor, tops: tl.tensor, bests: tl.tensor,
    sums: tl.tensor, V: tl.tensor,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Largest logit, its token, and the sum of exp(logit - largest), of one chunk of one row."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    logits += row.to(tl.int64) * V
    temperature = tl.load(temperatures + row)
    start = chunk * CHUNK
    top, total, best = float("-inf"), 0.0, start
    for low in range(start, start + CHUNK, TILE):
        x = _load_scaled(logits, low + tl.arange(0, TILE), V, temperature)
        higher = tl.maximum(top, tl.max(x, 0))
        best = tl.where(higher > top, low + tl.argmax(x, 0), best)
        # A tile may have no token that can be drawn, and -inf - -inf is NaN.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift), 0)
        top = higher
    at = row * tl.num_programs(1) + chunk
    tl.store(tops + at, top)
    tl.store(bests + at, best)
    tl.store(sums + at, total)


@triton.jit
def _normaliser(
    tops: tl.tensor, sums: tl.tensor, row: tl.tensor, chunks: tl.tensor, CHUNKS: tl.constexpr
) -> tl.tensor:
    """Log-sum-exp of a row, from its chunks."""
    chunk = tl.arange(0, CHUNKS)
    top = tl.load(tops + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    total = tl.load(sums + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    highest = tl.max(top, 0)
    return highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))


@triton.jit
def _weigh_chunk(
    logits: tl.tensor, temperatures: tl.tensor, tops: tl.tensor, sums: tl.tensor,
    masses: tl.tensor, V: tl.tensor,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Probability of one chunk of one row, in float64."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    logits += row.to(tl.int64) * V
    temperature = tl.load(temperatures + row)
    lse = _normaliser(tops, sums, row, tl.num_programs(1), CHUNKS)
    mass = tl.zeros([TILE], tl.float64)
    for low in range(chunk * CHUNK, (chunk + 1) * CHUNK, TILE):
        mass += tl.exp(_load_scaled(logits, low + tl.arange(0, TILE), V, temperature) - lse).to(
            tl.float64
        )
    tl.store(masses + row * tl.num_programs(1) + chunk, tl.sum(mass, 0))


@triton.jit
def _draw(
    logits: tl.tensor, temperatures: tl.tensor, noise: tl.tensor, tops: tl.tensor,
    bests: tl.tensor, sums: tl.tensor, masses: tl.tensor, tokens: tl.tensor, logps: tl.tensor,
    chunks: tl.tensor, V: tl.tensor,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Draw the token of one row: find its chunk, then its place in the chunk."""
    row, chunk = tl.program_id(0), tl.arange(0, CHUNKS)
    there = chunk < chunks
    temperature = tl.load(temperatures + row)
    lse = _normaliser(tops, sums, row, chunks, CHUNKS)
    # float64: in float32 the cumulative sum over a large vocabulary loses rare tokens.
    mass = tl.load(masses + row * chunks + chunk, mask=there, other=0.0)
    cumulative = tl.cumsum(mass, 0)
    threshold = tl.load(noise + row) * tl.sum(mass, 0)
    drawn = tl.minimum(tl.sum((there & (cumulative <= threshold)).to(tl.int32), 0), chunks - 1)
    before = tl.sum(tl.where(chunk < drawn, mass, 0.0), 0)
    logits += row.to(tl.int64) * V
    token = drawn * CHUNK
    for low in range(drawn * CHUNK, (drawn + 1) * CHUNK, TILE):
        at = low + tl.arange(0, TILE)
        within = before + tl.cumsum(
            tl.exp(_load_scaled(logits, at, V, temperature) - lse).to(tl.float64), 0
        )
        token += tl.sum(((within <= threshold) & (at < V)).to(tl.int32), 0)
        before = tl.max(within, 0)
    top = tl.load(tops + row * chunks + chunk, mask=there, other=float("-inf"))
    best = tl.load(bests + row * chunks + tl.argmax(top, 0))
    token = tl.where(temperature == 0, best, tl.minimum(token, V - 1))
    tl.store(tokens + row, token)
    tl.store(logps + row, _load_scaled(logits, token, V, temperature) - lse)


def fused_sample(logits: Tensor, temperatures: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token from each row. Same function as `sample` in `engine/sampler.py`.

    A row is read in chunks by separate programs, so that few rows fill a GPU. The chunks depend on
    V alone: a row's bits do not depend on the other rows.

    Args:
        logits: [B, V] float32.
        temperatures: [B] float32; 0 is greedy.
        noise: [B] float64 in [0, 1).

    Returns:
        Tokens [B] and log-probs [B].
    """
    (rows, v), device, logits = logits.shape, logits.device, logits.contiguous()
    tile = min(1024, triton.next_power_of_2(v))
    chunks = -(-v // (4 * tile))
    shape = (rows, chunks)
    tops, sums = torch.empty(shape, device=device), torch.empty(shape, device=device)
    bests = torch.empty(shape, dtype=torch.int32, device=device)
    masses = torch.empty(shape, dtype=torch.float64, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logps = torch.empty(rows, device=device)
    sizes = {"CHUNK": 4 * tile, "TILE": tile}
    _sum_chunk[shape](logits, temperatures, tops, bests, sums, v, **sizes)
    sizes["CHUNKS"] = triton.next_power_of_2(chunks)
    _weigh_chunk[shape](logits, temperatures, tops, sums, masses, v, **sizes)
    _draw[(rows,)](
        logits, temperatures, noise, tops, bests, sums, masses, tokens, logps, chunks, v, **sizes
    )  # fmt: skip
    return tokens, logps
