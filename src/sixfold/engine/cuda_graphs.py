"""CUDA graphs of decode forward passes.

The kernel launches of the model's body are captured once per input shape, and replayed with one
launch. A replay runs no Python. It reads its inputs from a static buffer that is filled beforehand.
It reads weights and KV cache at the addresses of the capture, with their current contents.

The head and the sampler are not captured: they are only a few launches, and every graph would need
its own buffer of logits.

A forward pass that cannot be replayed runs eagerly, with the same result: see `DecodeGraphs.run`.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from .kv_cache import KVCache
from .stats import EngineStats

MOST_GRAPHS = 32
"""Maximum number of graphs. Each graph holds its launches and a [rows, hidden] result. The graphs
share all other memory."""
MOST_ROWS = 512
"""Maximum rows of a captured forward pass. In larger ones the launches are not the bottleneck."""


def rounded_up(rows: int, columns: int) -> tuple[int, int]:
    """Round a table's shape up to the next shape that graphs are kept for.

    Rows round up to 16, 32, 64, 96, ..., MOST_ROWS, and columns to powers of two. A shape with more
    than MOST_ROWS rows is returned unchanged.
    """
    many = 16 if rows <= 16 else -(-rows // 32) * 32
    return (many, 1 << (columns - 1).bit_length()) if many <= MOST_ROWS else (rows, columns)


class CUDACapture:
    """Captures graphs on a separate stream, after a warm-up run.

    The warm-up makes libraries allocate outside the graph what they allocate at a first launch.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(
                f"CUDA graphs need a model on a CUDA device, but this model is on {device}"
            )
        self._stream = torch.cuda.Stream(device)

    def __call__(
        self, run: Callable[[], Tensor], beside: torch.cuda.CUDAGraph | None
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture one graph.

        Args:
            beside: graph whose memory pool is shared, or None.

        Returns:
            The graph, and the tensor that each replay writes its result to.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        graph, pool = torch.cuda.CUDAGraph(), None if beside is None else beside.pool()
        # "thread_local": in the default mode, GPU calls of other threads would break the capture.
        with torch.cuda.graph(
            graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            result = run()
        return graph, result


class DecodeGraphs:
    """CUDA graphs of one model over one KV cache, by input shapes.

    At most MOST_GRAPHS are kept. The least recently used graph is dropped first.
    """

    def __init__(
        self, device: torch.device, cache: KVCache, stats: EngineStats, may_fail: bool = False
    ) -> None:
        """Create an empty set of graphs.

        Args:
            may_fail: if a capture fails, warn and stop using graphs. Otherwise the error is raised.
        """
        self.failure = ""
        self._may_fail = may_fail
        self._cache = cache
        self._stats = stats
        self._device = device
        self._capture = CUDACapture(self._device)
        self._graphs: OrderedDict[
            tuple[tuple[int, ...], ...], tuple[Tensor, torch.cuda.CUDAGraph, Tensor]
        ] = OrderedDict()
        """Input shapes -> static buffer of all inputs, the graph, and the tensor of its result."""
        self._held: object = None

    def clear(self) -> None:
        self._graphs.clear()

    def run(
        self,
        inputs: list[np.ndarray],
        forward: Callable[[list[Tensor]], Tensor],
        fingerprint: Callable[[], object | None],
        plain: bool,
    ) -> Tensor | None:
        """Replay the graph for inputs of these shapes, or capture it first.

        Args:
            inputs: int64 arrays.
            forward: forward pass to capture. It gets the inputs as tensors on the device.
            fingerprint: returns a fingerprint of everything that a graph depends on besides the
                cache. If it changes, or the cache moves to another address, all graphs are dropped.
                If it is None, nothing is captured.
            plain: False if adapters add to the forward pass.

        Returns:
            forward(inputs), valid until the next run. None if the caller must run it eagerly: not
            `plain`, more than MOST_ROWS rows, no fingerprint, or a failed capture.
        """
        fixed = (
            fingerprint() if plain and not self.failure and len(inputs[0]) <= MOST_ROWS else None
        )
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

    def _add(
        self,
        key: tuple[tuple[int, ...], ...],
        static: Tensor,
        forward: Callable[[list[Tensor]], Tensor],
    ) -> bool:
        """Capture a graph for inputs of these shapes.

        Returns:
            False if the capture failed and `may_fail` is set.
        """
        if len(self._graphs) == MOST_GRAPHS:
            self._graphs.popitem(last=False)
        views = [
            part.view(shape)
            for part, shape in zip(
                static.split([int(np.prod(shape)) for shape in key]), key, strict=True
            )
        ]
        beside = next(iter(self._graphs.values()))[1] if self._graphs else None
        try:
            self._graphs[key] = (static, *self._capture(partial(forward, views), beside))
        except RuntimeError as error:  # includes CUDA errors and out of memory
            if not self._may_fail:
                raise
            self.failure = str(error).strip() or type(error).__name__
            self.clear()
            warnings.warn(
                "CUDA graphs are now off, because a capture failed"
                f" ({self.failure.splitlines()[0]}). Set engine.cuda_graphs = 'off' to skip the"
                " attempt",
                stacklevel=2,
            )
            return False
        self._stats.graph_captures += 1
        return True
