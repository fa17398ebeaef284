"""CPU kernels of a transformer's body: `body.c`, called through ctypes.

`engine_kernels.compiled` compiles the file.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .engine_kernels import set_types

SOURCE = Path(__file__).with_name("body.c")

Compile = Callable[[Path], ctypes.CDLL | None]
"""Compiles a C file. Returns None if there is no compiler."""


CompiledAttention = tuple[ctypes.c_void_p, ctypes.Array[Any], bool]
"""A C function `Attend`, its arguments for each layer, and True if no row reads what another row
writes."""


class CLinear(ctypes.Structure):
    """`Linear` in `body.c`. The other structures below also mirror `body.c`."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("panels", "bias")] + [
        (name, ctypes.c_int64) for name in ("outputs", "inputs")
    ]


class CNorm(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("epsilon", ctypes.c_float)]


class CLayer(ctypes.Structure):
    _fields_ = [(name, CLinear) for name in ("qkv", "output", "gate_up", "down")]
    _fields_ += [(name, CNorm) for name in ("before_attention", "before_mlp", "q_norm", "k_norm")]


class _CBody(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("depth", "hidden", "heads", "kv_heads", "width")),
        ("last", CNorm),
    ]
    _fields_ += [
        (name, ctypes.c_void_p) for name in ("cosine", "sine", "attend", "attention", "positions")
    ]
    _fields_ += [(name, ctypes.c_void_p) for name in ("x", "normed", "qkv", "attended", "gate_up")]
    _fields_ += [("narrow", ctypes.c_void_p), ("room", ctypes.c_int64)]


@dataclass(frozen=True)
class CLayers:
    """Layers and last norm of a body, as C structures. Does not keep the weights alive."""

    layers: ctypes.Array[CLayer]
    last: CNorm


@dataclass(frozen=True)
class Rows:
    """Buffers of a forward pass of N rows.

    Attributes:
        x: [N, hidden] embeddings, overwritten by the residual stream.
        normed: [N, hidden] normalised rows; in the end the output of the body.
        qkv: [N, (heads + 2 kv_heads) D].
        gate_up: [N, 2 inner].
    """

    x: Tensor
    normed: Tensor
    qkv: Tensor
    gate_up: Tensor


@dataclass(frozen=True)
class Packed:
    """Stacked weights of linear layers that read the same input.

    Attributes:
        panels: weights in panels of `width` outputs. Zeros fill the last panel. The shape is
            [panels, K, width] in float32. In bfloat16 it is [panels, K' / 2, width, 2], where K' is
            K rounded up, with zeros.
        bias: [panels * width] float32, or None.
        outputs: total number of outputs (N).
        inputs: number of inputs (K).
    """

    panels: Tensor
    bias: Tensor | None
    outputs: int
    inputs: int

    @property
    def half(self) -> bool:
        """True if the weights are bfloat16."""
        return self.panels.dtype is torch.bfloat16

    def as_c(self) -> CLinear:
        """C structure with pointers to the weights."""
        return CLinear(
            self.panels.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(),
            self.outputs,
            self.inputs,
        )


class BodyKernels:
    """Typed calls into the compiled library.

    Tensors are float32 (indices int64), on the CPU. Rows may have any stride. Packed weights may be
    bfloat16: a product then rounds its inputs to bfloat16 and sums in float32.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, integer, real, threads = (
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_float,
            ctypes.c_int,
        )
        self._rms_norm = set_types(
            library.rms_norm, pointer, pointer, real, pointer, integer, integer, threads
        )
        self._silu_mul = set_types(library.silu_mul, pointer, integer, integer, threads)
        self._rotate = set_types(
            library.rotate, pointer, *[integer] * 5, pointer, pointer, real, *[pointer] * 3, threads
        )
        self._product = set_types(
            library.product, pointer, integer, *[pointer] * 3, *[integer] * 4, threads, threads
        )
        self._body = set_types(library.body, pointer, integer, threads, threads)
        self._narrow = set_types(library.narrow, pointer, *[integer] * 3, pointer, threads)
        self._product_half = set_types(
            library.product_half, *[pointer] * 4, *[integer] * 4, threads, threads
        )
        self._pack_half = set_types(library.pack_half, pointer, *[integer] * 3, pointer, threads)
        self._narrow_width = set_types(library.narrow_width, integer, result=integer)
        self._spare: int = set_types(library.spare_rows, result=integer)()
        kind: int = set_types(library.prepare_half, result=threads)()
        self.half_instructions = ("float32", "avx512_bf16", "amx")[kind]
        """Instruction set that computes products with bfloat16 weights."""
        self._pack = set_types(library.pack, pointer, *[integer] * 3, pointer, threads)
        self._width: int = set_types(library.panel_width, result=integer)()

    def pack(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], half: bool = False
    ) -> Packed:
        """Copy weights into the layout that `product` reads.

        Args:
            weights: [N_i, K] of each linear layer; all layers read the same x.
            biases: [N_i] of each layer, or None.
            half: round the weights to bfloat16.
        """
        outputs, inputs = sum(map(len, weights)), weights[0].shape[1]
        count = -(-outputs // self._width)
        if half:
            pairs = self._narrow_width(inputs) // 2
            panels = torch.zeros(count, pairs, self._width, 2, dtype=torch.bfloat16)
        else:
            panels = torch.empty(count, inputs, self._width)
            panels[-1] = 0.0
        pack, first = self._pack_half if half else self._pack, 0
        for weight in weights:
            # Bind the copy to a name: the kernel gets a raw pointer, which does not keep it alive.
            weight = weight.contiguous()
            pack(
                weight.data_ptr(),
                len(weight),
                inputs,
                first,
                panels.data_ptr(),
                torch.get_num_threads(),
            )
            first += len(weight)
        parts = [
            weights[0].new_zeros(len(w)) if b is None else b
            for w, b in zip(weights, biases, strict=True)
        ]
        bias = (
            F.pad(torch.cat(parts), (0, -outputs % self._width))
            if any(b is not None for b in biases)
            else None
        )
        return Packed(panels, bias, outputs, inputs)

    def product(self, x: Tensor, packed: Packed, out: Tensor, *, add: bool = False) -> None:
        """Linear layer: out = x W^T + b, or out += x W^T + b with `add`.

        The bits of a row do not depend on the other rows: each number is one sum, in the order of
        k.

        Args:
            x: [M, K] inputs.
            packed: W [N, K] and b [N].
            out: [M, N] outputs.
            add: add to `out` instead of overwriting it.
        """
        weights = (packed.panels.data_ptr(), 0 if packed.bias is None else packed.bias.data_ptr())
        target = (*weights, out.data_ptr(), out.stride(0))
        sizes = (x.shape[0], packed.outputs, packed.inputs)
        threads = torch.get_num_threads()
        if not packed.half:
            self._product(x.data_ptr(), x.stride(0), *target, *sizes, add, threads)
            return
        rows = self._room_for_narrow(len(x), packed.inputs)
        self._narrow(x.data_ptr(), x.stride(0), len(x), packed.inputs, rows.data_ptr(), threads)
        self._product_half(rows.data_ptr(), *target, *sizes, add, threads)

    def _room_for_narrow(self, rows: int, inputs: int) -> Tensor:
        """Memory for rows of bfloat16 inputs, plus the spare rows that a product may read."""
        shape = (rows + self._spare, self._narrow_width(inputs))
        return torch.empty(shape, dtype=torch.bfloat16)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> Tensor:
        """RMSNorm: out = x / rms(x) * weight.

        Args:
            x: [N, C].
            weight: [C].
            epsilon: added to the mean of squares.
            out: [N, C].

        Returns:
            `out`.
        """
        self._rms_norm(
            x.data_ptr(),
            weight.data_ptr(),
            epsilon,
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            torch.get_num_threads(),
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, in place of the gates.

        Args:
            gate_up: [N, 2 C]; the first half of each row is the gate, the second half is up.

        Returns:
            [N, C], a view of `gate_up`.
        """
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        self._silu_mul(gate_up.data_ptr(), rows, width, torch.get_num_threads())
        return gate_up[:, :width]

    def rotate(
        self,
        qkv: Tensor,
        heads: int,
        kv_heads: int,
        norms: tuple[Tensor, Tensor, float] | None,
        table: tuple[Tensor, Tensor],
        positions: Tensor,
    ) -> None:
        """Apply RMSNorm and rotary embedding to each head of queries and keys, in place.

        Args:
            qkv: [N, (heads + 2 kv_heads) D].
            heads: number of query heads.
            kv_heads: number of KV heads.
            norms: weights of the q norm and the k norm [D], and epsilon. None: no norms.
            table: cosines and sines, [P, D / 2] each.
            positions: [N].
        """
        q, k, epsilon = (
            (norms[0].data_ptr(), norms[1].data_ptr(), norms[2]) if norms else (0, 0, 0.0)
        )
        cosine, sine = table
        width = 2 * cosine.shape[1]
        args = (qkv.data_ptr(), qkv.stride(0), qkv.shape[0], heads, kv_heads, width, q, k, epsilon)
        self._rotate(
            *args, cosine.data_ptr(), sine.data_ptr(), positions.data_ptr(), torch.get_num_threads()
        )

    def body(
        self,
        weights: CLayers,
        rows: Rows,
        heads: int,
        kv_heads: int,
        table: tuple[Tensor, Tensor],
        positions: Tensor,
        attention: CompiledAttention,
        half: bool = False,
    ) -> Tensor:
        """Run all layers and the last norm in one call.

        Args:
            weights: layers and last norm.
            rows: buffers; `rows.x` holds the embeddings.
            heads: number of query heads.
            kv_heads: number of KV heads.
            table: cosines and sines, [P, D / 2] each.
            positions: [N].
            attention: compiled attention and its arguments for each layer.
            half: whether the packed weights are bfloat16.

        Returns:
            [N, hidden]: `rows.normed`.
        """
        count, hidden = rows.x.shape
        width = 2 * table[0].shape[1]
        attended, (attend, layers, apart) = rows.x.new_empty(count, heads * width), attention
        sizes = (len(weights.layers), hidden, heads, kv_heads, width)
        room = (
            t.data_ptr() for t in (positions, rows.x, rows.normed, rows.qkv, attended, rows.gate_up)
        )
        angles = (t.data_ptr() for t in table)
        deepest = max(hidden, heads * width, rows.gate_up.shape[1] // 2)
        narrow = self._room_for_narrow(count, deepest) if half else None
        body = _CBody(
            ctypes.addressof(weights.layers),
            *sizes,
            weights.last,
            *angles,
            attend,
            ctypes.addressof(layers),
            *room,
            None if narrow is None else narrow.data_ptr(),
            self._narrow_width(deepest),
        )
        self._body(ctypes.byref(body), count, apart, torch.get_num_threads())
        return rows.normed


def body_kernels(build: Compile) -> BodyKernels | None:
    """The compiled kernels, or None if `build` returns None."""
    library = build(SOURCE)
    return None if library is None else BodyKernels(library)
