"""Runs the model on what the scheduler chose: builds the layout over the cache, calls body and head, gives back logits.

On the CPU a row of a matrix product comes out bit for bit the same whatever the other rows are, except in the kernels for very few rows; a column
likewise, except at a ragged end. So a forward is padded to at least MIN_ROWS tokens, and the keys that a decode looks at to a multiple of MIN_ROWS:
a sequence's logits then do not depend on its company, and neither do its tokens. Prompts attend row by row, or in tiles of one shape, whole or in
pieces. (Mixtures of experts: to rounding only, as an expert may get very few rows.)
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from .adapters import MIN_ROWS, Additions, LoadedAdapter, Owners, rows_by_adapter
from .cpu_kernels import cpu_kernels
from .gpu_kernels import triton_serves
from .kv_cache import TILE, DecodeLayout, KVCache, PrefillLayout, Tiles
from .language_model import LanguageModel, Layout
from .offload import HostPools
from .scheduler import Work
from .sequence import Chunk, Sequence
from .shared_prefixes import SharedPrefixes, find_shared_prefixes

Rows = list[int] | np.ndarray
TILE_KEYS = 1 << 16
"""Keys that are gathered at most for one attention of a prefill (but always those of one tile)."""
REPLAY_ROWS = 32
"""Sampled tokens of a preempted sequence computed at a time; each gathers the keys of its whole sequence."""


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
        self._body = model.body(cpu_kernels() if autocast is None else None)
        self._table: tuple[int, int, np.ndarray] = (-1, 0, np.zeros((0, 0), dtype=np.int64))
        self._shared: tuple[np.ndarray | None, SharedPrefixes | None] = (None, None)

    def release_memory(self) -> None:
        """Drop the buffers of the cache and of what is beside it."""
        self.cache.clear()
        self.host.clear()

    def prefill(self, chunks: list[Chunk], everywhere: bool = False) -> Tensor:
        """Compute the prompt tokens of each chunk, fill their blocks -> logits [len(chunks), V] float32 after the last of them; `everywhere`: after
        each, [tokens of all, V]."""
        pieces = [(c, c.start, c.prompt_stop) for c in chunks]
        tokens = [t for c, start, stop in pieces for t in c.ticket.tokens[start:stop]]
        positions = [i for _, start, stop in pieces for i in range(start, stop)]
        slots = np.concatenate([self._slots(c.blocks, start, stop, c.known) for c, start, stop in pieces])
        stops = np.cumsum([stop - start for _, start, stop in pieces]).tolist()
        short = max(0, MIN_ROWS - len(tokens))
        padding = self.cache.scratch_slot + np.arange(short) % self.cache.block_size
        owner = np.repeat(np.arange(len(chunks)), [stop - start for _, start, stop in pieces])
        by_row = DecodeLayout(
            self.cache,
            self._tensor(np.concatenate([slots, padding])),
            self._tensor(self._row_tables([c.blocks for c in chunks], np.pad(owner, (0, short), constant_values=len(chunks)))),
            self._tensor(positions + [0] * short),
        )
        layout = PrefillLayout(by_row, lambda: self._tiles(pieces))
        rows = list(range(len(tokens))) if everywhere else [s - 1 for s in stops]
        owners = [(c.ticket.request.adapter, stop - start) for c, start, stop in pieces]
        return self._logits(tokens + [0] * short, positions + [0] * short, layout, owners, rows)

    def _slots(self, blocks: list[int], start: int, stop: int, known: int = 0) -> np.ndarray:
        """Cache slots of positions [start, stop); scratch for those below `known`, and where there is no block."""
        size = self.cache.block_size
        at = np.arange(start, stop)
        table = np.append(np.asarray(blocks, dtype=np.int64), self.cache.blocks)
        slots = table[np.minimum(at // size, len(blocks))] * size + at % size
        return np.where(at < known, self.cache.scratch_slot + at % size, slots)

    def _tiles(self, pieces: list[tuple[Chunk, int, int]]) -> list[Tiles]:
        """Cut pieces of prompts at multiples of TILE; tiles of one index are attended for together, up to TILE_KEYS keys."""
        by_index: dict[int, list[tuple[int, int, int, Chunk]]] = {}
        row = 0
        for chunk, start, stop in pieces:
            for t in range(start // TILE, -(-stop // TILE)):
                low, high = max(start, t * TILE), min(stop, (t + 1) * TILE)
                by_index.setdefault(t, []).append((low - t * TILE, high - low, row, chunk))
                row += high - low
        tiles = []
        for t, cut in by_index.items():
            width = (t + 1) * TILE
            many = max(1, TILE_KEYS // width)
            tiles += [self._tile(cut[i : i + many], width) for i in range(0, len(cut), many)]
        return tiles

    def _tile(self, cut: list[tuple[int, int, int, Chunk]], width: int) -> Tiles:
        """cut: (first query in the tile, queries, their first row, chunk) for each of n tiles."""
        rows = np.zeros((len(cut), TILE), dtype=np.int64)
        for line, (first, count, row, _) in zip(rows, cut, strict=True):
            line[first : first + count] = np.arange(row, row + count)
        keys = np.stack([self._slots(chunk.blocks, 0, width) for *_, chunk in cut])
        at = np.concatenate([np.arange(i * TILE + first, i * TILE + first + count) for i, (first, count, _, _) in enumerate(cut)])
        return Tiles(self._tensor(rows), self._tensor(keys), self._tensor(at), self._tensor(rows.reshape(-1)[at]))

    def decode(self, sequences: list[Sequence], revision: int, at_least: int) -> Tensor:
        """One token further for every sequence -> logits [B, V] float32.

        revision: changes whenever a block table does. at_least: rows to compute.
        """
        size = self.cache.block_size
        count = len(sequences)
        padded = max(count, at_least, MIN_ROWS)
        tokens = np.zeros(padded, dtype=np.int64)
        positions = np.zeros(padded, dtype=np.int64)
        tokens[:count] = [s.tokens[-1] for s in sequences]
        positions[:count] = [s.length - 1 for s in sequences]
        table = self._block_table(sequences, padded, revision)
        slots = table[np.arange(padded), positions // size] * size + positions % size
        layout = self._decode_layout(slots, table, positions)
        return self._logits(tokens, positions, layout, [(s.request.adapter, 1) for s in sequences], rows=None)[:count]

    def _decode_layout(self, slots: np.ndarray, table: np.ndarray, positions: np.ndarray) -> Layout:
        where = (self._tensor(slots), self._tensor(table), self._tensor(positions))
        if triton_serves(self.device.type):
            from .triton_kernels import TritonDecodeLayout, units_of

            if table is not self._shared[0]:  # a new one is made whenever a block table changes
                self._shared = (table, find_shared_prefixes(table, positions, self.cache.block_size))
            return TritonDecodeLayout(self.cache, *where, units_of(where[2], self._shared[1]))
        return DecodeLayout(self.cache, *where)

    def replay(self, chunks: list[Chunk]) -> None:
        """Compute again the sampled tokens of each chunk, REPLAY_ROWS at a time, by a decode's arithmetic, row for row: the same bits."""
        for chunk in chunks:
            for start in range(chunk.prompt_stop, chunk.stop, REPLAY_ROWS):
                stop = min(chunk.stop, start + REPLAY_ROWS)
                tokens = np.array(chunk.ticket.tokens[start:stop])
                rows = self._rows([chunk.blocks], np.zeros(stop - start, dtype=np.int64), tokens, np.arange(start, stop))
                self._hidden(*rows, [(chunk.ticket.request.adapter, stop - start)])

    def decode_rows(
        self,
        tables: list[list[int]],
        owner: np.ndarray,
        tokens: np.ndarray,
        positions: np.ndarray,
        adapters: list[LoadedAdapter | None] | None = None,
    ) -> Tensor:
        """Any number of tokens of each sequence, by a decode's arithmetic, row for row -> logits [N, V] float32.

        tables, adapters: blocks and adapter of each sequence. owner, tokens, positions: [N], whose a row is, its token, and where that stands.
        """
        owners = [(adapters[i], 1) for i in owner] if adapters is not None else []
        return self._logits(*self._rows(tables, owner, tokens, positions), owners, rows=None)[: len(tokens)]

    def _rows(self, tables: list[list[int]], owner: np.ndarray, tokens: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, Layout]:
        """Padded tokens and positions, and the layout with a table for each row; a row sees what the same forward writes before its position."""
        size, short = self.cache.block_size, (0, max(0, MIN_ROWS - len(tokens)))
        table = self._row_tables(tables, np.pad(owner, short, constant_values=len(tables)))
        tokens, positions = np.pad(tokens, short), np.pad(positions, short)
        slots = table[np.arange(len(table)), positions // size] * size + positions % size
        return tokens, positions, self._decode_layout(slots, table, positions)

    def _row_tables(self, tables: list[list[int]], owner: np.ndarray) -> np.ndarray:
        """[N, M] the table of each row's owner [N]; all scratch where that is len(tables), the padding's."""
        table = np.full((len(tables) + 1, self._columns(max(map(len, tables)))), self.cache.blocks, dtype=np.int64)
        for row, blocks in zip(table, tables, strict=False):
            row[: len(blocks)] = blocks
        return table[owner]

    def _block_table(self, sequences: list[Sequence], padded: int, revision: int) -> np.ndarray:
        """[padded, M] blocks of every sequence, scratch where it has fewer; M * block_size is a multiple of MIN_ROWS. Kept until a table changes."""
        if self._table[:2] != (revision, padded):
            table = np.full((padded, self._columns(max(len(s.blocks) for s in sequences))), self.cache.blocks, dtype=np.int64)
            for row, s in zip(table, sequences, strict=False):
                row[: len(s.blocks)] = s.blocks
            self._table = (revision, padded, table)
        return self._table[2]

    def _columns(self, blocks: int) -> int:
        """Columns of a decode's table with room for `blocks`: their slots are a multiple of MIN_ROWS."""
        step = math.lcm(self.cache.block_size, MIN_ROWS) // self.cache.block_size
        return -(-blocks // step) * step

    def _hidden(self, tokens: Rows, positions: Rows, layout: Layout, owners: Owners) -> Tensor:
        owned = [(adapter, self._tensor(rows)) for adapter, rows in rows_by_adapter(owners)] if self._adapted else []
        additions = Additions(owned, len(positions)) if owned else None
        with torch.autocast(self.device.type, self._autocast or torch.bfloat16, enabled=self._autocast is not None):
            return self._body.hidden(self._tensor(tokens), self._tensor(positions), layout, additions)

    def _logits(self, tokens: Rows, positions: Rows, layout: Layout, owners: Owners, rows: list[int] | None) -> Tensor:
        hidden = self._hidden(tokens, positions, layout, owners)
        with torch.autocast(self.device.type, self._autocast or torch.bfloat16, enabled=self._autocast is not None):
            if rows is None:
                return self.model.logits(hidden)
            # Padded for the head's product, for the reason in the module docstring.
            wanted = rows + rows[-1:] * max(0, MIN_ROWS - len(rows))
            return self.model.logits(hidden[self._tensor(wanted)])[: len(rows)]

    def _tensor(self, values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)


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
