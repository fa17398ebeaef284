"""The CPU kernels of a transformer's body: `body.c`, called through ctypes and compiled by `engine_kernels.compiled`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SOURCE = Path(__file__).with_name("body.c")

Compile = Callable[[Path], ctypes.CDLL | None]
"""A C file -> what a machine's compiler made of it, if there is one."""


CompiledAttention = tuple[ctypes.c_void_p, ctypes.Array[Any], bool]
"""A C function `Attend`, what it is given in each layer, and whether no row reads what another one writes."""


class CLinear(ctypes.Structure):
    """These as in `body.c`."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("panels", "bias")] + [(name, ctypes.c_int64) for name in ("outputs", "inputs")]


class CNorm(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("epsilon", ctypes.c_float)]


class CLayer(ctypes.Structure):
    _fields_ = [(name, CLinear) for name in ("qkv", "output", "gate_up", "down")]
    _fields_ += [(name, CNorm) for name in ("before_attention", "before_mlp", "q_norm", "k_norm")]


class _CBody(ctypes.Structure):
    _fields_ = [("layers", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("depth", "hidden", "heads", "kv_heads", "width")), ("last", CNorm)]
    _fields_ += [(name, ctypes.c_void_p) for name in ("cosine", "sine", "attend", "attention", "positions")]
    _fields_ += [(name, ctypes.c_void_p) for name in ("x", "normed", "qkv", "attended", "gate_up")]


@dataclass(frozen=True)
class CLayers:
    """A body's layers and its last norm, as the kernels read them. It holds on to none of the weights."""

    layers: ctypes.Array[CLayer]
    last: CNorm


@dataclass(frozen=True)
class Rows:
    """What a forward of N rows computes in. x: [N, hidden], embeddings that become the residual stream. normed: [N, hidden]. qkv: [N, (heads + 2
    kv_heads) D]. gate_up: [N, 2 inner]."""

    x: Tensor
    normed: Tensor
    qkv: Tensor
    gate_up: Tensor


@dataclass(frozen=True)
class Packed:
    """Linear layers that read the same input, one below the other. panels: [panels, K, width], a width of outputs at a time, zeros behind the last.
    bias: [panels * width]. outputs: N."""

    panels: Tensor
    bias: Tensor | None
    outputs: int

    def as_c(self) -> CLinear:
        """Where it lies."""
        return CLinear(self.panels.data_ptr(), 0 if self.bias is None else self.bias.data_ptr(), self.outputs, self.panels.shape[1])


class BodyKernels:
    """Typed calls into the compiled library. Tensors are float32 (indices int64), on the CPU; rows lie one after another, at any distance."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, integer, real, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
        self._rms_norm = _typed(library.rms_norm, pointer, pointer, real, pointer, integer, integer, threads)
        self._silu_mul = _typed(library.silu_mul, pointer, integer, integer, threads)
        self._rotate = _typed(library.rotate, pointer, *[integer] * 5, pointer, pointer, real, *[pointer] * 3, threads)
        self._product = _typed(library.product, pointer, integer, *[pointer] * 3, *[integer] * 4, threads, threads)
        self._body = _typed(library.body, pointer, integer, threads, threads)
        self._pack = _typed(library.pack, pointer, *[integer] * 3, pointer, threads)
        self._width: int = _typed(library.panel_width, result=integer)()

    def pack(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Packed:
        """weights: each [N, K], of layers that read the same x; biases: each [N]. A copy, as `product` reads it."""
        outputs, depth = sum(map(len, weights)), weights[0].shape[1]
        panels = torch.empty(-(-outputs // self._width), depth, self._width)
        panels[-1] = 0.0
        first = 0
        for weight in weights:
            weight = weight.contiguous()  # a name of its own keeps a copy alive until it is read
            self._pack(weight.data_ptr(), len(weight), depth, first, panels.data_ptr(), torch.get_num_threads())
            first += len(weight)
        parts = [weights[0].new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
        bias = F.pad(torch.cat(parts), (0, -outputs % self._width)) if any(b is not None for b in biases) else None
        return Packed(panels, bias, outputs)

    def product(self, x: Tensor, packed: Packed, out: Tensor, *, add: bool = False) -> None:
        """out [M, N] = x W^T + b for x [M, K], or grows by it (`add`). A row's bits are the same in any company: each number is one sum, term by
        term in the order of k."""
        bias, panels = packed.bias, packed.panels
        start = (x.data_ptr(), x.stride(0), panels.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), out.stride(0))
        self._product(*start, x.shape[0], packed.outputs, x.shape[1], add, torch.get_num_threads())

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> Tensor:
        """x / rms(x) * weight over the last dimension of x [N, C]."""
        self._rms_norm(x.data_ptr(), weight.data_ptr(), epsilon, out.data_ptr(), x.shape[0], x.shape[1], torch.get_num_threads())
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """The first half of each row of gate_up [N, 2 C] becomes silu(it) * the second -> that half."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        self._silu_mul(gate_up.data_ptr(), rows, width, torch.get_num_threads())
        return gate_up[:, :width]

    def rotate(
        self, qkv: Tensor, heads: int, kv_heads: int, norms: tuple[Tensor, Tensor, float] | None, table: tuple[Tensor, Tensor], positions: Tensor
    ) -> None:
        """Queries and keys of qkv [N, (heads + 2 kv_heads) D] in place: each head's RMSNorm (weights of q and k, epsilon), then its rotation.

        table: cosines and sines, [P, D / 2]. positions: [N].
        """
        q, k, epsilon = (norms[0].data_ptr(), norms[1].data_ptr(), norms[2]) if norms else (0, 0, 0.0)
        cosine, sine = table
        width = 2 * cosine.shape[1]
        args = (qkv.data_ptr(), qkv.stride(0), qkv.shape[0], heads, kv_heads, width, q, k, epsilon)
        self._rotate(*args, cosine.data_ptr(), sine.data_ptr(), positions.data_ptr(), torch.get_num_threads())

    def body(
        self, weights: CLayers, rows: Rows, heads: int, kv_heads: int, table: tuple[Tensor, Tensor], positions: Tensor, attention: CompiledAttention
    ) -> Tensor:
        """All layers, in one call, and the last norm -> [N, hidden]. table, positions: as `rotate` has them."""
        count, hidden = rows.x.shape
        width = 2 * table[0].shape[1]
        attended, (attend, layers, apart) = rows.x.new_empty(count, heads * width), attention
        sizes = (len(weights.layers), hidden, heads, kv_heads, width)
        room = (t.data_ptr() for t in (positions, rows.x, rows.normed, rows.qkv, attended, rows.gate_up))
        angles = (t.data_ptr() for t in table)
        body = _CBody(ctypes.addressof(weights.layers), *sizes, weights.last, *angles, attend, ctypes.addressof(layers), *room)
        self._body(ctypes.byref(body), count, apart, torch.get_num_threads())
        return rows.normed


def body_kernels(build: Compile) -> BodyKernels | None:
    """The compiled kernels, if there are any to be had."""
    library = build(SOURCE)
    return None if library is None else BodyKernels(library)


def _typed(function: Callable[..., Any], *types: type, result: type | None = None) -> Callable[..., Any]:
    function.argtypes, function.restype = types, result  # type: ignore[attr-defined]
    return function
