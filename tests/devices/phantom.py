"""A fake accelerator: tensors on device `phantom` live in host memory and obey the rules of a GPU.

PyTorch treats the device like any other backend (its key is PrivateUse1), so autograd, autocast,
inference mode, optimizers and safetensors need no help. One fallback kernel runs every operation on
the CPU, over the same memory. Before that it

- raises an error if the operation mixes devices in a way that CUDA refuses;
- counts the operation if the host would have to wait for a GPU (`Synchronisations`);
- records the largest result (`LargestTensor`);
- counts it as a kernel launch if a GPU would compute something (`count_launches`).

It cannot tell which attention kernel a GPU would choose, how much memory or time one would need,
and it has no streams and no CUDA graphs. `fused_kernels.py` adds the two attention kernels of CUDA.

The device is registered for the whole process and cannot be removed: tests that use it run in a
process of their own (see `test_on_fake_device.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "phantom"
SOURCE = "/src/sixfold/"

# DLPack's codes of device types, as they stand in a capsule.
_AT_CPU, _AT_OTHER = 1, 12
_DEVICE_FIELD = 8  # bytes after the data pointer

# These kernels change sizes and storages only. The CPU's own versions work on any device.
_METADATA_ONLY = frozenset({"as_strided", "view", "_reshape_alias", "set_"})

_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

# Results, or shapes of results, that the host must know before it goes on.
_HOST_READS = frozenset(
    {
        "_local_scalar_dense",
        "bincount",
        "equal",
        "masked_select",
        "nonzero",
        "repeat_interleave",
        "unique_consecutive",
        "unique_dim",
        "_unique2",
    }
)

# CUDA's autocast: operations in the lower precision, and operations that stay in float32.
_LOWER = (
    "addmm addmv addr baddbmm bmm conv1d conv2d einsum linear matmul mm mv"
    " scaled_dot_product_attention"
)
_FLOAT32 = (
    "cumprod cumsum exp layer_norm log log10 log1p log2 log_softmax logsumexp norm pow prod"
    " reciprocal rsqrt softmax softplus sum"
)


@dataclass
class Synchronisations:
    """Points where the host waits for the device, by operation and place in the library.

    Attributes:
        reads: the device's values, or a shape that depends on them, go to the host.
        writes: a copy to the device that blocks the host.
        root: only frames below this path are named; others count as "elsewhere".
    """

    root: str = SOURCE
    reads: Counter[tuple[str, str]] = field(default_factory=Counter)
    writes: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """All waits."""
        return self.reads.total() + self.writes.total()

    def at(self, path: str) -> int:
        """Waits in files whose path below `root` begins with `path`."""
        return sum(
            n
            for (_, place), n in [*self.reads.items(), *self.writes.items()]
            if place.startswith(path)
        )

    def table(self) -> str:
        """One line per place, most waits first; for the message of a failed assertion."""
        lines = [
            (n, kind, *key)
            for kind, counts in (("read", self.reads), ("write", self.writes))
            for key, n in counts.items()
        ]
        return "\n".join(
            f"{n:5} {kind:5} {operation:24} {place}"
            for n, kind, operation, place in sorted(lines, reverse=True)
        )


@dataclass
class LargestTensor:
    """The largest tensor that an operation made on the device. elements, operation: of
    that tensor.
    """

    elements: int = 0
    operation: str = ""


# Operations that only make or resize memory.
_NO_LAUNCH = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
)

_counting: list[Synchronisations] = []
_launching: list[Counter[str]] = []
_measuring: list[LargestTensor] = []
_kernels: dict[str, Callable[..., Any]] = {}
_libraries: list[torch.library.Library] = []


@contextlib.contextmanager
def count_synchronisations(root: str = SOURCE) -> Iterator[Synchronisations]:
    """Count waits in all threads while the block runs."""
    counts = Synchronisations(root)
    _counting.append(counts)
    try:
        yield counts
    finally:
        _counting.remove(counts)


@contextlib.contextmanager
def largest_tensor() -> Iterator[LargestTensor]:
    """Watch what operations make, in all threads, while the block runs."""
    seen = LargestTensor()
    _measuring.append(seen)
    try:
        yield seen
    finally:
        _measuring.remove(seen)


@contextlib.contextmanager
def count_launches() -> Iterator[Counter[str]]:
    """Count operations that a GPU would compute, by name, in all threads while the block runs.

    One operation counts as one launch, although some have several. Reads by the host and copies
    between host and device do not count.
    """
    counts: Counter[str] = Counter()
    _launching.append(counts)
    try:
        yield counts
    finally:
        _launching.remove(counts)


def _wait(operation: str, *, write: bool = False) -> None:
    for counts in _counting:
        (counts.writes if write else counts.reads)[operation, _place(counts.root)] += 1


def _place(root: str) -> str:
    """The innermost frame of the library: "file:line function"."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        folder, found, file = frame.f_code.co_filename.rpartition(root)
        if found and folder + found + file != __file__:
            return f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


_pointer_of_capsule = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of_capsule.restype = ctypes.c_void_p
_pointer_of_capsule.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _map(function: Callable[[Any], Any], x: Any) -> Any:
    """The same nest of tuples, lists and dictionaries with `function` of every leaf.

    torch's `tree_map` does this for more types, and takes half of the time of a run.
    """
    if isinstance(x, (tuple, list)):
        return type(x)([_map(function, y) for y in x])
    if isinstance(x, dict):
        return {key: _map(function, y) for key, y in x.items()}
    return function(x)


def is_phantom(x: object) -> bool:
    """True for a tensor on the device."""
    return isinstance(x, Tensor) and x.device.type == NAME


def alias(x: Tensor, device: int) -> Tensor:
    """The same memory as a tensor on another device: the device is a field of a DLPack capsule."""
    capsule = torch._C._to_dlpack(x)  # type: ignore[attr-defined]
    memory = _pointer_of_capsule(capsule, b"dltensor")
    ctypes.c_int32.from_address(memory + _DEVICE_FIELD).value = device
    return torch._C._from_dlpack(capsule)  # type: ignore[attr-defined,no-any-return]


def on_cpu(x: Tensor) -> Tensor:
    """A CPU view of a tensor on the device. Not a copy, and not counted."""
    return alias(x, _AT_CPU)


def on_device(x: Tensor) -> Tensor:
    """A view on the device of a CPU tensor. Not a copy, and not counted."""
    return alias(x, _AT_OTHER)


@dataclass(frozen=True)
class _Facts:
    """Properties of an operation, looked up once: PyTorch computes them again at every access.

    Attributes:
        name: without namespace and overload.
        computes: a GPU would launch a kernel.
        pointwise: tagged as pointwise.
        mutable: writes to some argument, which may grow.
        takes_tensor: for each argument, whether the schema has a tensor there.
    """

    name: str
    computes: bool
    pointwise: bool
    mutable: bool
    takes_tensor: tuple[bool, ...]


@cache
def _facts(op: Any) -> _Facts:
    schema = op._schema
    name = schema.name.partition("::")[2]
    return _Facts(
        name,
        computes=not op.is_view and name not in _NO_LAUNCH and name != "_local_scalar_dense",
        pointwise=torch.Tag.pointwise in op.tags,
        mutable=schema.is_mutable,
        takes_tensor=tuple(isinstance(x.type, torch.TensorType) for x in schema.arguments),
    )


class _Call:
    """One operation, run on CPU views of its arguments.

    Attributes:
        args: positional arguments, with views in the place of tensors on the device.
        kwargs: keyword arguments, likewise.
        away: tensors among the arguments that are not on the device.
        views: (CPU view, tensor on the device) of the other tensors.
    """

    def __init__(self, name: str, args: Any, kwargs: Any) -> None:
        self.away: list[Tensor] = []
        self.views: list[tuple[Tensor, Tensor]] = []
        self._name = name
        self.args = [_map(self._down, x) for x in args]
        self.kwargs = {key: _map(self._down, x) for key, x in kwargs.items()}

    def run(self, op: Any, mutable: bool) -> Any:
        kernel = _kernels.get(self._name)
        out = (kernel or op)(*self.args, **self.kwargs)
        for view, original in self.views if mutable else ():
            if view.shape != original.shape:  # an `out` argument, or a resize, which grew
                grown = on_device(view)
                original.set_(grown.untyped_storage(), 0, grown.shape, grown.stride())  # type: ignore[call-overload]
        return _map(self._up, out)

    def _down(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            elsewhere = isinstance(x, torch.device) and x.type == NAME
            return torch.device("cpu") if elsewhere else x
        if x.device.type != NAME:
            self.away.append(x)
            return x
        may_grow = self._name == "resize_"
        view = torch.empty_like(x, device="cpu") if may_grow or not x.numel() else on_cpu(x)
        self.views.append((view, x))
        return view

    def _up(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        for view, original in self.views:
            if x is view:
                return original
        for seen in _measuring:
            if x.untyped_storage().nbytes() > 0 and x.numel() > seen.elements:
                seen.elements, seen.operation = x.numel(), self._name
        return on_device(x)


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Kernel of every operation that has a tensor on the device, or is asked to make one there."""
    facts = _facts(op)
    name = facts.name
    if name in _METADATA_ONLY:
        return op.redispatch(_CPU_KEYS, *args, **kwargs)
    call = _Call("copy_" if name == "_copy_from" else name, args, kwargs)
    if call.away:
        _check_devices(facts, call.away, args)
    if _counting and (call.away or call.views):
        _count(name, call.away, args, kwargs)
    if facts.computes and not call.away:
        for launches in _launching:
            launches[name] += 1
    if kwargs.get("generator") is not None:
        raise RuntimeError(f"{name}: a CPU generator cannot draw numbers on {NAME}")
    if name == "_copy_from":  # what `copy_` becomes as soon as one side is on the device
        op, call.args, call.kwargs = torch.ops.aten.copy_.default, call.args[1::-1], {}
    elif _number_for_tensor(facts, args):
        op = op.overloadpacket
    return call.run(op, facts.mutable)


def _number_for_tensor(facts: _Facts, args: Any) -> bool:
    """PyTorch passes a Python number where the schema has a tensor: another overload must
    take it.
    """
    return any(
        takes_tensor and isinstance(x, (int, float))
        for x, takes_tensor in zip(args, facts.takes_tensor, strict=False)
    )


def _index_is_elsewhere(name: str, args: Any) -> bool:
    """Indexing takes CPU indices (and CPU 0-dim values): PyTorch copies them to the device, and
    waits.
    """
    if name == "index":
        return is_phantom(args[0])
    return (
        name == "_index_put_impl_"
        and is_phantom(args[0])
        and (is_phantom(args[2]) or not args[2].dim())
    )


def _check_devices(facts: _Facts, away: list[Tensor], args: Any) -> None:
    name = facts.name
    if name == "_copy_from" or _index_is_elsewhere(name, args):
        return
    takes_numbers = facts.pointwise or name.startswith(("fill", "masked_fill"))
    if takes_numbers and not any(x.dim() for x in away):
        return
    raise RuntimeError(
        f"{name}: expected all tensors to be on the same device, found {NAME} and a CPU tensor of"
        f" shape {tuple(away[0].shape)}"
    )


def _count(name: str, away: list[Tensor], args: Any, kwargs: Any) -> None:
    if name == "_copy_from":
        to_device, non_blocking = is_phantom(args[1]), args[2:3] == (True,)
        if away and not (to_device and non_blocking):
            _wait("copy", write=to_device)
        return
    if away and (_index_is_elsewhere(name, args) or name == "where"):
        _wait(f"{name} with a CPU tensor", write=True)
    if name in _HOST_READS and kwargs.get("output_size") is None:
        _wait("item" if name == "_local_scalar_dense" else name)
    if (
        name == "_index_put_impl_"
        and args[2].numel() > 1
        and any(x is not None and x.dtype == torch.bool for x in args[1])
    ):
        _wait("nonzero of a boolean index")


def _autocast(op: Any, dtype: Callable[[], torch.dtype], /, *args: Any, **kwargs: Any) -> Any:
    """Run `op` with its floating-point arguments in the dtype that autocast wants."""
    wanted = dtype()

    def cast(x: Any) -> Any:
        eligible = is_phantom(x) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(wanted) if eligible else x

    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    with torch._C._ExcludeDispatchKeyGuard(key):  # type: ignore[attr-defined]
        return op(*_map(cast, args), **_map(cast, kwargs))


class _DeviceModule:
    """`torch.phantom`. Random numbers are the CPU's, which PyTorch saves and restores itself."""

    @staticmethod
    def is_initialized() -> bool:
        return True

    is_available = is_initialized

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def get_rng_state(*_: object) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def device(*_: object) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    @staticmethod
    def synchronize(*_: object) -> None:
        return None

    set_rng_state = manual_seed_all = empty_cache = synchronize


def add_kernel(name: str, kernel: Callable[..., Any]) -> None:
    """Let `kernel`, on CPU tensors, stand in for the operation aten::name, which the CPU lacks."""
    _kernels[name] = kernel


def _copy_of_tensor(original: Callable[[Tensor, Any], Tensor], x: Tensor, memo: Any) -> Tensor:
    if not is_phantom(x):
        return original(x, memo)
    if id(x) not in memo:
        memo[id(x)] = Tensor._make_subclass(type(x), x.detach().clone(), x.requires_grad)  # type: ignore[attr-defined]
    return memo[id(x)]  # type: ignore[no-any-return]


def register() -> torch.device:
    """Make the device known to PyTorch, once, and return it."""
    if _libraries:
        return torch.device(NAME, 0)
    _setup_privateuseone_for_python_backend(NAME, backend_module=_DeviceModule())
    # Without this, moving a module gives each parameter a new object, and tied weights come apart.
    torch.__future__.set_swap_module_params_on_conversion(True)
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _libraries.extend((everything, aten))
    everything.fallback(_fallback, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for names, dtype in (
        (_LOWER, partial(torch.get_autocast_dtype, NAME)),
        (_FLOAT32, lambda: torch.float32),
    ):
        for name in names.split():
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                if not overload.endswith("out"):
                    op = getattr(packet, overload)
                    aten.impl(op, partial(_autocast, op, dtype), "AutocastPrivateUse1")
    # The original asks the backend for an allocator.
    deepcopy: Any = partial(_copy_of_tensor, Tensor.__deepcopy__)  # type: ignore[attr-defined]
    Tensor.__deepcopy__ = lambda x, memo: deepcopy(x, memo)  # type: ignore[attr-defined,method-assign]
    # transformers counts an expert's tokens with histc, which the CPU lacks for integers.
    add_kernel("histc", lambda x, *rest: torch.histc(x.double(), *rest).to(x.dtype))
    return torch.device(NAME, 0)
