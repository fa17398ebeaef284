"""Runs the model on what the scheduler chose: builds the layout over the cache, calls body and head, gives back logits.

On the CPU a row of a matrix product comes out bit for bit the same whatever the other rows are, except in the kernels for very few rows; a column
likewise, except at a ragged end. So a forward is padded to at least MIN_ROWS tokens, and the keys that a decode looks at to a multiple of MIN_ROWS:
a sequence's logits then do not depend on its company, and neither do its tokens. (Mixtures of experts: to rounding only, as an expert may get very
few rows.)
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..model.causal_lm import head_logits, hidden_states
from .kv_cache import DecodeLayout, DecodeWindow, KVCache, PrefillLayout
from .sequence import Request, Sequence

MIN_ROWS = 16


class ModelRunner:
    """Owns the KV cache and the model it runs. precision: dtype of the forward (autocast when it is not the weights' own)."""

    def __init__(self, model: PreTrainedModel, cache: KVCache, autocast: torch.dtype | None) -> None:
        self.model = model
        self.cache = cache
        self.device = next(model.parameters()).device
        self._autocast = autocast
        self.window = DecodeWindow()
        self._members = -1
        self._table: tuple[int, int, np.ndarray] = (-1, 0, np.zeros((0, 0), dtype=np.int64))

    def prefill(self, requests: list[Request]) -> Tensor:
        """Compute the prompts, fill their blocks -> logits [len(requests), V] float32 that predict each first token."""
        size = self.cache.block_size
        tokens = [t for r in requests for t in r.prompt]
        positions = [i for r in requests for i in range(len(r.prompt))]
        slots = [r.blocks[i // size] * size + i % size for r in requests for i in range(len(r.prompt))]
        stops = np.cumsum([len(r.prompt) for r in requests]).tolist()
        spans = list(zip([0, *stops[:-1]], stops, strict=True))
        short = MIN_ROWS - len(tokens)
        if short > 0:
            spans.append((len(tokens), MIN_ROWS))
            tokens += [0] * short
            positions += [0] * short
            slots += [self.cache.scratch_slot + i % size for i in range(short)]
        layout = PrefillLayout(self.cache, self._tensor(slots), spans)
        return self._logits(tokens, positions, layout, rows=[s - 1 for s in stops])

    def decode(self, sequences: list[Sequence], revision: int, members: int) -> Tensor:
        """One token further for every sequence -> logits [B, V] float32.

        revision: changes whenever a block table does. members: changes whenever who runs, or in which order, does.
        """
        size = self.cache.block_size
        count = len(sequences)
        padded = max(count, MIN_ROWS)
        tokens = np.zeros(padded, dtype=np.int64)
        positions = np.zeros(padded, dtype=np.int64)
        tokens[:count] = [s.tokens[-1] for s in sequences]
        positions[:count] = [s.length - 1 for s in sequences]
        table = self._block_table(sequences, padded, revision)
        slots = table[np.arange(padded), positions // size] * size + positions % size
        width = table.shape[1] * size
        if self._members != members or padded > self.window.rows or width > self.window.capacity:
            self._members = members
            self.window.restart(padded, width)
        layout = DecodeLayout(self.cache, self.window, self._tensor(slots), self._tensor(table), self._tensor(positions))
        return self._logits(tokens, positions, layout, rows=None)[:count]

    def _block_table(self, sequences: list[Sequence], padded: int, revision: int) -> np.ndarray:
        """[padded, M] blocks of every sequence, scratch where it has fewer; M * block_size is a multiple of MIN_ROWS. Kept until a table changes."""
        if self._table[:2] != (revision, padded):
            step = math.lcm(self.cache.block_size, MIN_ROWS) // self.cache.block_size
            columns = -(-max(len(s.blocks) for s in sequences) // step) * step
            table = np.full((padded, columns), self.cache.blocks, dtype=np.int64)
            for row, s in zip(table, sequences, strict=False):
                row[: len(s.blocks)] = s.blocks
            self._table = (revision, padded, table)
        return self._table[2]

    def _logits(self, tokens: object, positions: object, layout: PrefillLayout | DecodeLayout, rows: list[int] | None) -> Tensor:
        with torch.autocast(self.device.type, self._autocast or torch.bfloat16, enabled=self._autocast is not None):
            hidden = hidden_states(self.model, self._tensor(tokens), self._tensor(positions), layout)
            if rows is None:
                return head_logits(self.model, hidden)
            # Padded for the head's product, for the reason in the module docstring.
            wanted = rows + rows[-1:] * max(0, MIN_ROWS - len(rows))
            return head_logits(self.model, hidden[self._tensor(wanted)])[: len(rows)]

    def _tensor(self, values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)
