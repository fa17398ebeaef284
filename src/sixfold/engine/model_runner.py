"""Runs the model on what the scheduler chose: builds the layout over the cache, calls body and head, gives back logits.

A sequence's logits do not depend on its company, and neither do its tokens. With the CPU kernels that is so by their making. Of PyTorch's products on
the CPU a row comes out bit for bit the same whatever the other rows are, on most machines and except in the kernels for very few rows; a column
likewise, except at a ragged end: so a forward is padded to at least MIN_ROWS tokens, and the keys that a decode looks at to a multiple of MIN_ROWS.
Prompts attend row by row, or in tiles of one shape, whole or in pieces. (Mixtures of experts: to rounding only, as an expert may get very few rows.)
"""

from __future__ import annotations

import copy
import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ..kernels.cpu.engine_kernels import compiled, cpu_kernels
from ..model.base import LanguageModel, Layout
from ..types import EngineStats
from .adapters import MIN_ROWS, Additions, LoadedAdapter, Owners, rows_by_adapter
from .block_tables import DecodeTable, block_table
from .columns import Columns
from .cuda_graphs import DecodeGraphs, rounded_up
from .kv_cache import TILE, DecodeLayout, KVCache, PrefillLayout, Tiles, triton_serves
from .offload import HostPools
from .scheduler import Work
from .sequence import Chunk
from .shared_prefixes import find_shared_prefixes, neighbours

Rows = list[int] | range | np.ndarray
Chosen = list[LoadedAdapter | None]
Piece = tuple[Chunk, int, int]
"""A chunk and the positions [start, stop) of it that are computed."""
TILE_KEYS = 1 << 16
"""Keys that are gathered at most for one attention of a prefill (but always those of one tile)."""
REPLAY_ROWS = 32
"""Sampled tokens of a preempted sequence computed at a time on the CPU; each gathers the keys of its whole sequence."""
DEVICE_TILE, DEVICE_TILE_KEYS = 256, 1 << 18
"""Queries of a tile, and keys, on a device for which neither the CPU's nor Triton's kernels serve."""
DEVICE_REPLAY = 4096
"""Sampled tokens of preempted sequences computed at a time there and on a GPU."""


class ModelRunner:
    """Owns the KV cache and the model it runs. precision: dtype of the forward (autocast when it is not the weights' own). adapted: whether it is the
    model that the requests' adapters were made for."""

    def __init__(self, model: LanguageModel, cache: KVCache, autocast: torch.dtype | None, *, adapted: bool = True) -> None:
        self.model = model
        self.cache = cache
        self.device = next(model.module.parameters()).device
        self._autocast = autocast
        self.host = HostPools(cache)
        self._adapted = adapted
        self._body = model.body(compiled if cpu_kernels() is not None else None) if autocast is None else model.lowered(autocast)
        self._ready = self._body
        self._table = DecodeTable(cache.blocks)
        self._shared: tuple[object, tuple[np.ndarray, ...]] = (None, ())
        self._graphs: DecodeGraphs | None = None
        self._tile_rows, self._tile_keys = (TILE, TILE_KEYS) if self.device.type == "cpu" else (DEVICE_TILE, DEVICE_TILE_KEYS)

    def use_graphs(self, stats: EngineStats, may_fail: bool = False) -> None:
        """Decode forwards run as CUDA graphs from here on, where they can. may_fail: as `DecodeGraphs`
        has it. Raises ValueError for a model that is not on a CUDA device."""
        self._graphs = DecodeGraphs(self.device, self.cache, stats, may_fail)

    def over(self, cache: KVCache) -> ModelRunner:
        """A runner for prefills alone, over another cache: the same model with the same copies of weights."""
        other = copy.copy(self)
        other.cache, other.host, other._graphs = cache, HostPools(cache), None
        return other

    def release_memory(self) -> None:
        """Drop the buffers of the cache and of what is beside it, and copies of weights."""
        self.cache.clear()
        self._body.release()
        self.host.clear()
        if self._graphs is not None:
            self._graphs.clear()

    def refresh(self) -> None:
        """The weights may have changed in a way that PyTorch does not see."""
        self._body.refresh()

    def prefill(self, chunks: list[Chunk], everywhere: bool = False) -> Tensor:
        """Compute the prompt tokens of each chunk, fill their blocks -> logits [len(chunks), V] float32 after the last of them; `everywhere`: after
        each, [tokens of all, V]."""
        self._ready = self._body.ready()
        pieces = [(c, c.start, c.prompt_stop) for c in chunks]
        hidden, sizes = self._prompts(pieces), [stop - start for _, start, stop in pieces]
        rows = list(range(sum(sizes))) if everywhere else (np.cumsum(sizes) - 1).tolist()
        # Padded for the head's product, for the reason in the module docstring.
        wanted = rows + rows[-1:] * max(0, self._least_rows() - len(rows))
        return self._logits(hidden[self._tensor(wanted)])[: len(rows)]

    def _prompts(self, pieces: list[Piece]) -> Tensor:
        """Compute pieces of texts one after another in a row, and fill their blocks -> [tokens of all or more, hidden]."""
        tokens = [t for c, start, stop in pieces for t in c.ticket.tokens[start:stop]]
        positions = [i for _, start, stop in pieces for i in range(start, stop)]
        sizes = [stop - start for _, start, stop in pieces]
        owner = np.repeat(np.arange(len(pieces)), sizes)
        short = max(0, self._least_rows() - len(tokens))
        slots = np.concatenate([*(self._slots(c.blocks, start, stop, c.known) for c, start, stop in pieces), self._slots([], 0, short)])
        to, at = self._tensor(slots), self._tensor(positions + [0] * short)
        tables = [c.blocks for c, _, _ in pieces]
        if triton_serves(self.device.type):
            layout: Layout = self._triton_layout(to, at, np.array(positions, dtype=np.int64), tables, owner, short)
        else:
            by_row = cache(lambda: DecodeLayout(self.cache, to, self._tensor(self._rows_table(tables, owner)), at))
            layout = PrefillLayout(self.cache, to, by_row, cache(lambda: self._tiles(pieces)))
        additions = self._additions(zip([c.ticket.request.adapter for c, _, _ in pieces], sizes, strict=True), len(tokens) + short)
        return self._hidden(self._tensor(tokens + [0] * short), at, layout, additions)

    def _triton_layout(
        self, slots: Tensor, positions: Tensor, places: np.ndarray, tables: list[list[int]], owner: np.ndarray, short: int
    ) -> Layout:  # fmt: skip
        """Prompts on the GPU's decode kernel: neighbouring queries of a text read its keys together.

        Args:
            slots: [N + short] where each token goes.
            positions: [N + short] of the tokens; 0 in padding.
            places: the first N of them, on the host.
            tables: the blocks of each text.
            owner: [N] whose a token is.
            short: rows of padding at the end.
        """
        from ..kernels.triton.attention import units_of_prompts
        from .triton_layout import TritonDecodeLayout

        columns = int(places.max()) // self.cache.block_size + 1
        table = block_table([blocks[:columns] for blocks in tables], (len(tables) + 1, columns), self.cache.blocks)
        owners = np.append(owner, np.full(short, len(tables)))
        members, ends = neighbours(places, owner, short)
        expanded = self._tensor(table).index_select(0, self._tensor(owners))
        units = units_of_prompts(self._tensor(members), self._tensor(ends))
        return TritonDecodeLayout(self.cache, slots, expanded, positions, units)

    def _slots(self, blocks: list[int], start: int, stop: int, known: int = 0) -> np.ndarray:
        """Cache slots of positions [start, stop); scratch for those below `known`, and where there is no block."""
        size = self.cache.block_size
        at = np.arange(start, stop)
        table = np.append(np.asarray(blocks, dtype=np.int64), self.cache.blocks)
        slots = table[np.minimum(at // size, len(blocks))] * size + at % size
        return np.where(at < known, self.cache.scratch_slot + at % size, slots)

    def _tiles(self, pieces: list[tuple[Chunk, int, int]]) -> list[Tiles]:
        """Cut pieces of prompts at multiples of a tile's rows; tiles of one index are attended for together, up to a number of keys."""
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
        """cut: (first query in the tile, queries, their first row, chunk) for each of n tiles."""
        size = self._tile_rows
        rows = np.zeros((len(cut), size), dtype=np.int64)
        for line, (first, count, row, _) in zip(rows, cut, strict=True):
            line[first : first + count] = np.arange(row, row + count)
        keys = np.stack([self._slots(chunk.blocks, 0, width) for *_, chunk in cut])
        at = np.concatenate([np.arange(i * size + first, i * size + first + count) for i, (first, count, _, _) in enumerate(cut)])
        return Tiles(self._tensor(rows), self._tensor(keys), self._tensor(at), self._tensor(rows.reshape(-1)[at]))

    def decode(self, batch: Columns, revision: int, at_least: int) -> Tensor:
        """One token further for every sequence -> logits [B, V] float32.

        revision: changes whenever a block table does. at_least: rows to compute.
        """
        self._ready = self._body.ready()
        rows = max(len(batch), at_least, self._least_rows())
        table = self._table.update(batch.sequences, revision, rows, self._shape)
        return self._logits(self._decode(batch.newest, batch.lengths - 1, table, batch.owners, self._table.key))[: len(batch)]

    def replay(self, chunks: list[Chunk]) -> None:
        """Compute again the sampled tokens of each chunk.

        On the CPU REPLAY_ROWS at a time, by a decode's arithmetic, row for row: the same bits. On a
        GPU, which makes no such promise, as if they were prompts, many at a time.
        """
        if self.device.type != "cpu":
            self._replay_as_prompts([c for c in chunks if c.prompt_stop < c.stop])
            return
        for chunk in chunks:
            self._ready = self._body.ready()
            for start in range(chunk.prompt_stop, chunk.stop, REPLAY_ROWS):
                stop = min(chunk.stop, start + REPLAY_ROWS)
                table = self._rows_table([chunk.blocks], np.zeros(stop - start, dtype=np.int64))
                self._decode(chunk.ticket.tokens[start:stop], range(start, stop), table, [(chunk.ticket.request.adapter, stop - start)])

    def _replay_as_prompts(self, chunks: list[Chunk]) -> None:
        pieces = [
            (c, start, min(c.stop, start + DEVICE_REPLAY)) for c in chunks for start in range(c.prompt_stop, c.stop, DEVICE_REPLAY)
        ]  # fmt: skip
        while pieces:
            total, many = 0, 0
            while many < len(pieces) and (not many or total + pieces[many][2] - pieces[many][1] <= DEVICE_REPLAY):
                total += pieces[many][2] - pieces[many][1]
                many += 1
            self._ready = self._body.ready()
            self._prompts(pieces[:many])
            pieces = pieces[many:]

    def decode_rows(
        self, tables: list[list[int]], owner: np.ndarray, tokens: np.ndarray, positions: np.ndarray, adapters: Chosen | None = None
    ) -> Tensor:
        """Any number of tokens of each sequence, by a decode's arithmetic, row for row -> logits [N, V] float32. A row sees what the same forward
        writes before its position.

        tables, adapters: blocks and adapter of each sequence. owner, tokens, positions: [N], whose a row is, its token, and where that stands.
        """
        self._ready = self._body.ready()
        owners = [(adapters[i], 1) for i in owner] if adapters is not None else []
        return self._logits(self._decode(tokens, positions, self._rows_table(tables, owner), owners))[: len(tokens)]

    def _decode(self, tokens: Rows, positions: Rows, table: np.ndarray, owners: Owners, batch: object = None) -> Tensor:
        """Compute tokens by a decode's arithmetic.

        Args:
            tokens: [N] token ids.
            positions: [N] where each stands in its sequence.
            table: [rows, M] blocks of each token's sequence; rows from N on are padding.
            owners: whose adapter each row wants.
            batch: equal for as long as the same sequences decode; each token is then of another
                sequence. None: the rows may be of any sequences.

        Returns:
            [rows, hidden].
        """
        size, rows = self.cache.block_size, np.zeros((2, len(table)), dtype=np.int64)
        rows[:, : len(tokens)] = tokens, positions
        slots = table[np.arange(len(table)), rows[1] // size] * size + rows[1] % size
        inputs = [*rows, slots, table, *self._shared_prefixes(table, rows[1], batch)]
        additions = self._additions(owners, len(table))
        hidden = None if self._graphs is None else self._graphs.run(inputs, self._decode_hidden, self._ready.footing, additions is None)
        return self._decode_hidden([self._tensor(x) for x in inputs], additions, batch is not None) if hidden is None else hidden

    def _decode_hidden(self, inputs: list[Tensor], additions: Additions | None = None, apart: bool = False) -> Tensor:
        """inputs: tokens, positions, slots [B], table [B, M]; for GPU kernels those of `SharedPrefixes` too. Reads nothing else that may change: a
        graph of it is replayed with other inputs."""
        tokens, positions, slots, table, *shared = inputs
        layout: Layout = DecodeLayout(self.cache, slots, table, positions, apart)
        if shared:
            from ..kernels.triton.attention import units_of
            from .triton_layout import TritonDecodeLayout

            layout = TritonDecodeLayout(self.cache, slots, table, positions, units_of(positions, *shared))
        return self._hidden(tokens, positions, layout, additions)

    def _shared_prefixes(self, table: np.ndarray, positions: np.ndarray, batch: object) -> tuple[np.ndarray, ...]:
        """`SharedPrefixes` for GPU kernels, nothing for others. Found once for a batch: while it
        runs, only blocks behind the prefixes are added to the table."""
        if not triton_serves(self.device.type):
            return ()
        if batch is None or batch is not self._shared[0]:
            self._shared = (batch, find_shared_prefixes(table, positions, self.cache.block_size).padded())
        return self._shared[1]

    def _rows_table(self, tables: list[list[int]], owner: np.ndarray) -> np.ndarray:
        """A table with a row for each of `owner` [N], and padding behind."""
        rows, _ = self._shape(len(owner), 1)
        padded = np.pad(owner, (0, rows - len(owner)), constant_values=len(tables))
        return self._block_table(tables, len(tables) + 1)[padded]  # the last is the padding's, all scratch

    def _block_table(self, tables: list[list[int]], rows: int) -> np.ndarray:
        """[rows or more, M] blocks of every sequence, scratch where it has fewer."""
        return block_table(tables, self._shape(rows, max(map(len, tables))), self.cache.blocks)

    def _shape(self, rows: int, blocks: int) -> tuple[int, int]:
        """Of a decode's table with room for so many: enough rows, of a multiple of MIN_ROWS slots; with graphs, one that comes again."""
        step = math.lcm(self.cache.block_size, MIN_ROWS) // self.cache.block_size
        rows, steps = max(rows, self._least_rows()), -(-blocks // step)
        rows, steps = (rows, steps) if self._graphs is None else rounded_up(rows, steps)
        return rows, steps * step

    def _least_rows(self) -> int:
        return 1 if self.cache.steady and self._ready.steady else MIN_ROWS

    def _additions(self, owners: Owners, rows: int) -> Additions | None:
        owned = [(adapter, self._tensor(own)) for adapter, own in rows_by_adapter(owners)] if self._adapted else []
        return Additions(owned, rows) if owned else None

    def _hidden(self, tokens: Tensor, positions: Tensor, layout: Layout, additions: Additions | None) -> Tensor:
        with self._precision():
            return self._ready.hidden(tokens, positions, layout, additions)

    def _logits(self, hidden: Tensor) -> Tensor:
        with self._precision():
            return self._ready.logits(hidden)

    def _precision(self) -> torch.autocast:
        """No cache of cast weights: a graph would go on reading what the end of a context frees."""
        return torch.autocast(self.device.type, self._autocast or torch.bfloat16, enabled=self._autocast is not None, cache_enabled=False)

    def _tensor(self, values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one of this thread: Triton and CUDA graphs launch there, wherever the
    tensors are that they are given."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def fill(runner: ModelRunner, work: Work) -> list[tuple[Chunk, Tensor]]:
    """Bring the runner's cache to where a step's waiting prompts and preempted sequences want it -> each prompt's chunk and its logits [V]."""
    runner.host.take_out(work.taken_out, work.host_slots)
    runner.cache.copy_blocks(work.tails)
    runner.host.bring_back(work.brought_back)
    prompts = [chunk for chunk in work.chunks if chunk.start < chunk.prompt_stop]
    logits = list(zip(prompts, runner.prefill(prompts), strict=True)) if prompts else []
    runner.replay(work.chunks)  # after the prompts, which stand before it
    runner.cache.copy_blocks(work.copies)
    return logits
