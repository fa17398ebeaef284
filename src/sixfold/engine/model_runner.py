"""Model runner: build the layout over the KV cache, run the model, return logits.

Batch invariance: the logits of a sequence, and so its tokens, do not depend on the other sequences
in the batch. The CPU kernels guarantee this by construction. PyTorch's matrix products on the CPU
need padding. On most machines a row of a product is bit-for-bit the same whatever the other rows
are, except in the kernels for very few rows. The same holds for a column, except at a ragged end.
So each forward pass is padded to at least MIN_ROWS tokens, and the keys of a decode to a multiple
of MIN_ROWS. Prompts attend row by row, or in tiles of one shape, whether they are computed whole or
in pieces. For mixtures of experts the invariance holds only up to rounding, because an expert may
get very few rows.
"""

from __future__ import annotations

import copy
import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ..kernels.cpu.engine_kernels import cpu_kernels, load_library
from ..model.base import LanguageModel, Layout
from .adapters import MIN_ROWS, Additions, LoadedAdapter, Owners, rows_by_adapter
from .batch_state import BatchState
from .block_tables import DecodeTable, block_table
from .cuda_graphs import DecodeGraphs, rounded_up
from .kv_cache import TILE, DecodeLayout, KVCache, PrefillLayout, Tiles, triton_serves
from .offload import HostPools
from .scheduler import ScheduledStep
from .sequence import Chunk
from .shared_prefixes import find_shared_prefixes, neighbours
from .stats import EngineStats

Rows = list[int] | range | np.ndarray
Chosen = list[LoadedAdapter | None]
Piece = tuple[Chunk, int, int]
"""A chunk and its positions [start, stop) to compute."""
TILE_KEYS = 1 << 16
"""Maximum number of keys gathered for one attention call of a prefill. One tile always fits."""
REPLAY_ROWS = 32
"""Sampled tokens of a preempted sequence per forward pass on the CPU. Each row gathers the keys of
its whole sequence."""
DEVICE_TILE, DEVICE_TILE_KEYS = 256, 1 << 18
"""Tile size and maximum number of keys on a device that is not a CPU and has no Triton kernels."""
DEVICE_REPLAY = 4096
"""Sampled tokens of preempted sequences per forward pass on any device other than a CPU."""


class ModelRunner:
    """Runs one model over one KV cache. Owns the cache.

    Args:
        autocast: dtype of the forward pass under autocast. None: the dtype of the weights.
        adapted: True if the requests' adapters belong to this model. False for a draft model.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: KVCache,
        autocast: torch.dtype | None,
        *,
        adapted: bool = True,
    ) -> None:
        self.model = model
        self.cache = cache
        self.device = next(model.module.parameters()).device
        self._autocast = autocast
        self.host = HostPools(cache)
        self._adapted = adapted
        build = load_library if cpu_kernels() is not None else None
        self._body = model.body(build) if autocast is None else model.lowered(autocast, build)
        self._ready = self._body
        self._table = DecodeTable(cache.blocks)
        self._shared: tuple[object, tuple[np.ndarray, ...]] = (None, ())
        self._graphs: DecodeGraphs | None = None
        self._tile_rows, self._tile_keys = (
            (TILE, TILE_KEYS) if self.device.type == "cpu" else (DEVICE_TILE, DEVICE_TILE_KEYS)
        )

    def use_graphs(self, stats: EngineStats, may_fail: bool = False) -> None:
        """Run later decode forward passes as CUDA graphs where possible.

        Args:
            stats: counters to update.
            may_fail: see `DecodeGraphs`.

        Raises:
            ValueError: if the model is not on a CUDA device.
        """
        self._graphs = DecodeGraphs(self.device, self.cache, stats, may_fail)

    def over(self, cache: KVCache) -> ModelRunner:
        """Prefill-only runner over another cache. Shares the model and its copies of weights."""
        other = copy.copy(self)
        other.cache, other.host, other._graphs = cache, HostPools(cache), None
        return other

    def release_memory(self) -> None:
        """Free the KV cache, the host pools, the copies of weights and the CUDA graphs."""
        self.cache.clear()
        self._body.release()
        self.host.clear()
        if self._graphs is not None:
            self._graphs.clear()

    def refresh(self) -> None:
        """Note that the weights may have changed in a way that PyTorch does not detect."""
        self._body.refresh()

    def prefill(self, chunks: list[Chunk], everywhere: bool = False) -> Tensor:
        """Compute the prompt tokens of each chunk and fill their blocks.

        Args:
            chunks: chunks with at least one prompt token each.
            everywhere: return logits after every token, not only after the last of each chunk.

        Returns:
            Logits, float32: [len(chunks), V], or [tokens of all chunks, V] with `everywhere`.
        """
        self._ready = self._body.ready()
        pieces = [(c, c.start, c.prompt_stop) for c in chunks]
        hidden, sizes = self._prompts(pieces), [stop - start for _, start, stop in pieces]
        rows = list(range(sum(sizes))) if everywhere else (np.cumsum(sizes) - 1).tolist()
        # Pad the head's product too: with very few rows its bits would depend on the batch.
        wanted = rows + rows[-1:] * max(0, self._least_rows() - len(rows))
        return self._logits(hidden[self._tensor(wanted)])[: len(rows)]

    def _prompts(self, pieces: list[Piece]) -> Tensor:
        """Compute pieces of token sequences, packed into one row, and fill their blocks.

        Returns:
            [tokens of all pieces plus padding, hidden].
        """
        tokens = [t for c, start, stop in pieces for t in c.ticket.tokens[start:stop]]
        positions = [i for _, start, stop in pieces for i in range(start, stop)]
        sizes = [stop - start for _, start, stop in pieces]
        owner = np.repeat(np.arange(len(pieces)), sizes)
        short = max(0, self._least_rows() - len(tokens))
        slots = np.concatenate(
            [
                *(self._slots(c.blocks, start, stop, c.known) for c, start, stop in pieces),
                self._slots([], 0, short),
            ]
        )
        to, at = self._tensor(slots), self._tensor(positions + [0] * short)
        tables = [c.blocks for c, _, _ in pieces]
        if triton_serves(self.device.type):
            layout: Layout = self._triton_layout(
                to, at, np.array(positions, dtype=np.int64), tables, owner, short
            )
        else:
            by_row = cache(
                lambda: DecodeLayout(
                    self.cache, to, self._tensor(self._rows_table(tables, owner)), at
                )
            )
            layout = PrefillLayout(self.cache, to, by_row, cache(lambda: self._tiles(pieces)))
        additions = self._additions(
            zip([c.ticket.request.adapter for c, _, _ in pieces], sizes, strict=True),
            len(tokens) + short,
        )
        return self._hidden(self._tensor(tokens + [0] * short), at, layout, additions)

    def _triton_layout(
        self,
        slots: Tensor,
        positions: Tensor,
        places: np.ndarray,
        tables: list[list[int]],
        owner: np.ndarray,
        short: int,
    ) -> Layout:
        """Layout that computes prompts with the GPU's decode kernel.

        Neighbouring queries of one prompt read its keys together.

        Args:
            slots: [N + short] cache slot of each token.
            positions: [N + short] position of each token; 0 in padding.
            places: [N] the positions without padding, on the host.
            owner: [N] index of the prompt that each token belongs to.
            short: padding rows at the end.
        """
        from ..kernels.triton.attention import units_of_prompts
        from .triton_layout import TritonDecodeLayout

        columns = int(places.max()) // self.cache.block_size + 1
        table = block_table(
            [blocks[:columns] for blocks in tables], (len(tables) + 1, columns), self.cache.blocks
        )
        owners = np.append(owner, np.full(short, len(tables)))
        members, ends = neighbours(places, owner, short)
        expanded = self._tensor(table).index_select(0, self._tensor(owners))
        units = units_of_prompts(self._tensor(members), self._tensor(ends))
        return TritonDecodeLayout(self.cache, slots, expanded, positions, units)

    def _slots(self, blocks: list[int], start: int, stop: int, known: int = 0) -> np.ndarray:
        """Cache slots of positions [start, stop).

        Positions below `known`, and positions without a block, map to the scratch block.
        """
        size = self.cache.block_size
        at = np.arange(start, stop)
        table = np.append(np.asarray(blocks, dtype=np.int64), self.cache.blocks)
        slots = table[np.minimum(at // size, len(blocks))] * size + at % size
        return np.where(at < known, self.cache.scratch_slot + at % size, slots)

    def _tiles(self, pieces: list[tuple[Chunk, int, int]]) -> list[Tiles]:
        """Cut pieces of prompts into tiles, at multiples of the tile size.

        Tiles with the same index share one attention call, up to a maximum number of keys.
        """
        size = self._tile_rows
        by_index: dict[int, list[tuple[int, int, int, Chunk]]] = {}
        row = 0
        for chunk, start, stop in pieces:
            for t in range(start // size, -(-stop // size)):
                low, high = max(start, t * size), min(stop, (t + 1) * size)
                by_index.setdefault(t, []).append((low - t * size, high - low, row, chunk))
                row += high - low
        tiles = []
        for t, cut in by_index.items():
            width = (t + 1) * size
            many = max(1, self._tile_keys // width)
            tiles += [self._tile(cut[i : i + many], width) for i in range(0, len(cut), many)]
        return tiles

    def _tile(self, cut: list[tuple[int, int, int, Chunk]], width: int) -> Tiles:
        """Build `Tiles`. cut: for each of n tiles (first query in the tile, number of queries, row
        of the first query, chunk)."""
        size = self._tile_rows
        rows = np.zeros((len(cut), size), dtype=np.int64)
        for line, (first, count, row, _) in zip(rows, cut, strict=True):
            line[first : first + count] = np.arange(row, row + count)
        keys = np.stack([self._slots(chunk.blocks, 0, width) for *_, chunk in cut])
        at = np.concatenate(
            [
                np.arange(i * size + first, i * size + first + count)
                for i, (first, count, _, _) in enumerate(cut)
            ]
        )
        return Tiles(
            self._tensor(rows),
            self._tensor(keys),
            self._tensor(at),
            self._tensor(rows.reshape(-1)[at]),
        )

    def decode(self, batch: BatchState, revision: int, at_least: int) -> Tensor:
        """Compute the newest token of every sequence.

        Args:
            revision: changes whenever a block table changes.
            at_least: minimum number of rows to compute.

        Returns:
            Logits [B, V], float32.
        """
        self._ready = self._body.ready()
        rows = max(len(batch), at_least, self._least_rows())
        table = self._table.update(batch.sequences, revision, rows, self._shape)
        return self._logits(
            self._decode(batch.newest, batch.lengths - 1, table, batch.owners, self._table.key)
        )[: len(batch)]

    def replay(self, chunks: list[Chunk]) -> None:
        """Recompute the sampled tokens of each chunk, after a preemption.

        On the CPU they are computed as decode rows, REPLAY_ROWS at a time, which gives the same
        bits as before. GPU kernels do not guarantee equal bits, so there the tokens are computed as
        if they were prompts, many at a time.
        """
        if self.device.type != "cpu":
            self._replay_as_prompts([c for c in chunks if c.prompt_stop < c.stop])
            return
        for chunk in chunks:
            self._ready = self._body.ready()
            for start in range(chunk.prompt_stop, chunk.stop, REPLAY_ROWS):
                stop = min(chunk.stop, start + REPLAY_ROWS)
                table = self._rows_table([chunk.blocks], np.zeros(stop - start, dtype=np.int64))
                self._decode(
                    chunk.ticket.tokens[start:stop],
                    range(start, stop),
                    table,
                    [(chunk.ticket.request.adapter, stop - start)],
                )

    def _replay_as_prompts(self, chunks: list[Chunk]) -> None:
        pieces = [
            (c, start, min(c.stop, start + DEVICE_REPLAY))
            for c in chunks
            for start in range(c.prompt_stop, c.stop, DEVICE_REPLAY)
        ]
        while pieces:
            total, many = 0, 0
            while many < len(pieces) and (
                not many or total + pieces[many][2] - pieces[many][1] <= DEVICE_REPLAY
            ):
                total += pieces[many][2] - pieces[many][1]
                many += 1
            self._ready = self._body.ready()
            self._prompts(pieces[:many])
            pieces = pieces[many:]

    def decode_rows(
        self,
        tables: list[list[int]],
        owner: np.ndarray,
        tokens: np.ndarray,
        positions: np.ndarray,
        adapters: Chosen | None = None,
    ) -> Tensor:
        """Compute any number of tokens per sequence, each as a decode row.

        A row attends to all earlier positions, including those that the same forward pass writes.

        Args:
            owner: [N] index of the sequence that each row belongs to.
            tokens: [N] token ids.
            positions: [N] position of each token in its sequence.
            adapters: adapter of each sequence, or None for no adapters.

        Returns:
            Logits [N, V], float32.
        """
        self._ready = self._body.ready()
        owners = [(adapters[i], 1) for i in owner] if adapters is not None else []
        return self._logits(
            self._decode(tokens, positions, self._rows_table(tables, owner), owners)
        )[: len(tokens)]

    def _decode(
        self, tokens: Rows, positions: Rows, table: np.ndarray, owners: Owners, batch: object = None
    ) -> Tensor:
        """Compute tokens as decode rows.

        Args:
            tokens: [N] token ids.
            positions: [N] position of each token in its sequence.
            table: [rows, M] block table of each token's sequence; rows from N on are padding.
            batch: key that stays equal while the same sequences decode. Each row then belongs to a
                different sequence. None: several rows may belong to one sequence.

        Returns:
            [rows, hidden].
        """
        size, rows = self.cache.block_size, np.zeros((2, len(table)), dtype=np.int64)
        rows[:, : len(tokens)] = tokens, positions
        slots = table[np.arange(len(table)), rows[1] // size] * size + rows[1] % size
        inputs = [*rows, slots, table, *self._shared_prefixes(table, rows[1], batch)]
        additions = self._additions(owners, len(table))
        hidden = (
            None
            if self._graphs is None
            else self._graphs.run(
                inputs, self._decode_hidden, self._ready.graph_fingerprint, additions is None
            )
        )
        return (
            self._decode_hidden([self._tensor(x) for x in inputs], additions, batch is not None)
            if hidden is None
            else hidden
        )

    def _decode_hidden(
        self, inputs: list[Tensor], additions: Additions | None = None, apart: bool = False
    ) -> Tensor:
        """Forward pass of decode rows, which a CUDA graph may capture.

        It must not read anything else that changes: the graph is replayed with other inputs.

        Args:
            inputs: tokens, positions and slots [B], table [B, M]; for GPU kernels also the arrays
                of `SharedPrefixes`.
            additions: outputs of adapters to add, or None.
            apart: True if no row reads what another row writes.

        Returns:
            [B, hidden].
        """
        tokens, positions, slots, table, *shared = inputs
        layout: Layout = DecodeLayout(self.cache, slots, table, positions, apart)
        if shared:
            from ..kernels.triton.attention import units_of
            from .triton_layout import TritonDecodeLayout

            layout = TritonDecodeLayout(
                self.cache, slots, table, positions, units_of(positions, *shared)
            )
        return self._hidden(tokens, positions, layout, additions)

    def _shared_prefixes(
        self, table: np.ndarray, positions: np.ndarray, batch: object
    ) -> tuple[np.ndarray, ...]:
        """Arrays of `SharedPrefixes` for GPU kernels; empty for other kernels.

        They are computed once per batch: while a batch runs, its table only gets blocks after the
        prefixes.
        """
        if not triton_serves(self.device.type):
            return ()
        if batch is None or batch is not self._shared[0]:
            self._shared = (
                batch,
                find_shared_prefixes(table, positions, self.cache.block_size).padded(),
            )
        return self._shared[1]

    def _rows_table(self, tables: list[list[int]], owner: np.ndarray) -> np.ndarray:
        """Block table with one row for each entry of `owner` [N], then padding rows."""
        rows, _ = self._shape(len(owner), 1)
        padded = np.pad(owner, (0, rows - len(owner)), constant_values=len(tables))
        # The extra row of the table is all scratch: padding rows must not write into real blocks.
        return self._block_table(tables, len(tables) + 1)[padded]

    def _block_table(self, tables: list[list[int]], rows: int) -> np.ndarray:
        """Block table [rows or more, M] of every sequence, filled up with the scratch block."""
        return block_table(tables, self._shape(rows, max(map(len, tables))), self.cache.blocks)

    def _shape(self, rows: int, blocks: int) -> tuple[int, int]:
        """Shape of a decode table with room for `rows` rows of `blocks` blocks.

        The slots per row are a multiple of MIN_ROWS. With CUDA graphs the shape is rounded up, so
        that shapes repeat and graphs are reused.
        """
        step = math.lcm(self.cache.block_size, MIN_ROWS) // self.cache.block_size
        rows, steps = max(rows, self._least_rows()), -(-blocks // step)
        rows, steps = (rows, steps) if self._graphs is None else rounded_up(rows, steps)
        return rows, steps * step

    def _least_rows(self) -> int:
        return 1 if self.cache.steady and self._ready.steady else MIN_ROWS

    def _additions(self, owners: Owners, rows: int) -> Additions | None:
        owned = (
            [(adapter, self._tensor(own)) for adapter, own in rows_by_adapter(owners)]
            if self._adapted
            else []
        )
        return Additions(owned, rows) if owned else None

    def _hidden(
        self, tokens: Tensor, positions: Tensor, layout: Layout, additions: Additions | None
    ) -> Tensor:
        with self._precision():
            return self._ready.hidden(tokens, positions, layout, additions)

    def _logits(self, hidden: Tensor) -> Tensor:
        with self._precision():
            return self._ready.logits(hidden)

    def _precision(self) -> torch.autocast:
        """Autocast context without its weight cache: a CUDA graph would read cast weights that the
        context frees at its end."""
        return torch.autocast(
            self.device.type,
            self._autocast or torch.bfloat16,
            enabled=self._autocast is not None,
            cache_enabled=False,
        )

    def _tensor(self, values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current device of this thread.

    Triton and CUDA graphs launch on the current device, even if their tensors are on another one.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def fill(runner: ModelRunner, work: ScheduledStep) -> list[tuple[Chunk, Tensor]]:
    """Do the copies and the prefills of one step, for new prompts and preempted sequences.

    Returns:
        The chunk and the logits [V] of each prompt.
    """
    runner.host.take_out(work.taken_out, work.host_slots)
    runner.cache.copy_blocks(work.tails)
    runner.host.bring_back(work.brought_back)
    prompts = [chunk for chunk in work.chunks if chunk.start < chunk.prompt_stop]
    logits = list(zip(prompts, runner.prefill(prompts), strict=True)) if prompts else []
    runner.replay(work.chunks)  # after the prompts: sampled tokens attend to them
    runner.cache.copy_blocks(work.copies)
    return logits
