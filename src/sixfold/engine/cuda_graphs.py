"""Decode forwards as CUDA graphs: what the body launches for inputs of one shape is captured once, and launched again as one piece.

A replay calls no Python. It reads its inputs from a buffer of its own, filled before, and weights and cache where they lay at the capture, whatever
numbers they hold by now. Head and sampler stay outside: they are a few launches, and every graph would keep logits of its own.

What cannot be replayed runs eagerly, to the same result: see `DecodeGraphs.run`.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..types import EngineStats
from .kv_cache import KVCache

MOST_GRAPHS = 32
"""Each holds its launches and a [rows, hidden] result; they share the rest of their memory."""
MOST_ROWS = 512
"""Beyond, a forward computes for longer than its launches take."""


def rounded_up(rows: int, columns: int) -> tuple[int, int]:
    """A table's shape up to the next one that graphs are kept for: 16, 32, 64, 96, ... rows up to MOST_ROWS, columns by powers of two."""
    many = 16 if rows <= 16 else -(-rows // 32) * 32
    return (many, 1 << (columns - 1).bit_length()) if many <= MOST_ROWS else (rows, columns)


class CUDACapture:
    """Captures on a stream of its own, behind a warm-up there: what libraries make at a first launch is then made outside the graph."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"CUDA graphs need a model on a CUDA device; this one is on {device}")
        self._stream = torch.cuda.Stream(device)

    def __call__(self, run: Callable[[], Tensor], beside: torch.cuda.CUDAGraph | None) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The graph, in the memory pool of the one `beside` it, and what `run` gave: where each replay leaves its result."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        graph, pool = torch.cuda.CUDAGraph(), None if beside is None else beside.pool()
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):  # other threads may use the GPU meanwhile
            result = run()
        return graph, result


class DecodeGraphs:
    """The graphs of one model over one cache, by the shapes of their inputs. Of more than MOST_GRAPHS the one used least recently goes."""

    def __init__(self, device: torch.device, cache: KVCache, stats: EngineStats, may_fail: bool = False) -> None:
        """may_fail: a capture that CUDA refuses ends the use of graphs, with a warning; without it
        the error is raised."""
        self.failure = ""
        self._may_fail = may_fail
        self._cache = cache
        self._stats = stats
        self._device = device
        self._capture = CUDACapture(self._device)
        self._graphs: OrderedDict[tuple[tuple[int, ...], ...], tuple[Tensor, torch.cuda.CUDAGraph, Tensor]] = OrderedDict()
        """Shapes -> all inputs one after another, the graph, and where it leaves its result."""
        self._held: object = None

    def clear(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()

    def run(
        self,
        inputs: list[np.ndarray],
        forward: Callable[[list[Tensor]], Tensor],
        footing: Callable[[], object | None],
        plain: bool,
    ) -> Tensor | None:
        """Replay the graph for inputs of these shapes, or capture it first.

        Args:
            inputs: int64 each.
            forward: what is captured; it gets the inputs as they are on the device.
            footing: fingerprint of everything a graph depends on besides the cache. Where it is
                another one, or the cache lies elsewhere, all graphs go. None: no capture.
            plain: False where something is added to the forward (adapters).

        Returns:
            forward(inputs), to be used before the next run. None where the caller must run it
            eagerly: not `plain`, more than MOST_ROWS rows, no footing, or a capture that failed.
        """
        fixed = footing() if plain and not self.failure and len(inputs[0]) <= MOST_ROWS else None
        if fixed is None:
            self._stats.eager_decodes += 1
            return None
        held = (fixed, [side.data_ptr() for side in self._cache.tensors()])
        if held != self._held:
            self.clear()
            self._held = held
        key = tuple(x.shape for x in inputs)
        given = torch.from_numpy(np.concatenate([x.reshape(-1) for x in inputs]))
        if key not in self._graphs and not self._add(key, given.to(self._device), forward):
            self._stats.eager_decodes += 1
            return None
        self._graphs.move_to_end(key)
        static, graph, hidden = self._graphs[key]
        static.copy_(given, non_blocking=True)
        graph.replay()
        self._stats.graph_replays += 1
        return hidden

    def _add(self, key: tuple[tuple[int, ...], ...], static: Tensor, forward: Callable[[list[Tensor]], Tensor]) -> bool:
        """Capture a graph for inputs of these shapes; False if CUDA refused and that is allowed."""
        if len(self._graphs) == MOST_GRAPHS:
            self._graphs.popitem(last=False)
        views = [part.view(shape) for part, shape in zip(static.split([int(np.prod(shape)) for shape in key]), key, strict=True)]
        beside = next(iter(self._graphs.values()))[1] if self._graphs else None
        try:
            self._graphs[key] = (static, *self._capture(partial(forward, views), beside))
        except RuntimeError as error:  # CUDA's own errors, out of memory among them
            if not self._may_fail:
                raise
            self.failure = str(error).strip() or type(error).__name__
            self.clear()
            warnings.warn(
                f"CUDA graphs are off from here on: a capture failed ({self.failure.splitlines()[0]}); engine.cuda_graphs = 'off' avoids the try",
                stacklevel=2,
            )
            return False
        self._stats.graph_captures += 1
        return True
