"""Stands for CUDA graphs where there is no GPU: the tensor operations and kernel launches of one
forward, written down at the capture, done again at each replay on the very same memory. No Python
of the forward runs then: numbers that came from the host are those of the capture.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]


def tensors(*values: object) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor)]


def storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


class Tape(TorchDispatchMode):
    """given: what may be read besides what the forward itself makes. A capture that reads any other
    tensor fails, for it would be stale at a replay (but a number without dimensions: those on the
    host are constants to a GPU's launch)."""

    recording: Tape | None = None

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._given = {storage(t) for t in given}
        self._made: dict[int, Tensor] = {}
        self.replays = 0

    def __enter__(self) -> Tape:
        Tape.recording = self
        return super().__enter__()  # type: ignore[return-value]

    def __exit__(self, *error: object) -> None:
        Tape.recording = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.record(func, args, kwargs or {})

    def record(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        for t in tensors(args, kwargs):
            assert storage(t) in self._given or storage(t) in self._made or t.dim() == 0, (
                f"{func} reads a tensor {list(t.shape)} made before the capture"
            )
        out, read = func(*args, **kwargs), {storage(t) for t in tensors(args, kwargs)}
        for t in tensors(out):
            if storage(t) not in self._given | read:
                self._made[storage(t)] = t
        self.calls.append((func, args, kwargs, out))
        return out

    def spoil(self) -> None:
        """Overwrite the results of the capture: a real capture computes nothing."""
        for t in self._made.values():
            t.untyped_storage().fill_(0x7F)

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for there, new in zip(tensors(out), tensors(again), strict=True):
                if there.data_ptr() != new.data_ptr():
                    there.copy_(new)

    def pool(self) -> None:
        """There is one memory."""


class Launched:
    """A Triton kernel whose launches are written down too."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        with _disable_current_modes():  # the interpreter's own copies are no part of the forward
            if Tape.recording is None:
                self._kernel[grid](*args, **constants)
            else:
                Tape.recording.record(self._kernel[grid], args, constants)


class TapeCapture:
    """In the place of `CUDACapture`."""

    def __init__(self, device: torch.device) -> None:
        self.tapes: list[Tape] = []

    def __call__(self, run: Callable[[], Tensor], beside: Tape | None) -> tuple[Tape, Tensor]:
        """run: a partial of a runner's method and the static inputs. The cache is put back: a
        capture writes nothing.
        """
        assert isinstance(run, partial)
        assert (beside is None) or beside in self.tapes
        runner: Any = run.func.__self__  # type: ignore[attr-defined]
        cache = runner.cache.tensors()
        before = [side.clone() for side in cache]
        modules = {
            runner.model.module,
            getattr(runner, "_body", runner.model).module,
        }  # its own copies of weights too
        weights = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        with Tape([*run.args[0], *weights, *cache]) as tape:
            result = run()
        tape.spoil()
        for side, old in zip(cache, before, strict=True):
            side.copy_(old)
        assert storage(result) in tape._made
        self.tapes.append(tape)
        return tape, result
