"""The engine's CPU kernels: `kernels.c`, compiled once by the machine's own C compiler and called through ctypes. What the model's body has between
its attentions is compiled by the same means (`compiled`).

They exist because a decode step of a small batch is sixty small operations a layer, each of which costs more to call than to compute. Where there is
no compiler, or SIXFOLD_KERNELS=torch says so, the engine runs on PyTorch's operations alone: the same results to rounding, slower.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE, HEADER = (Path(__file__).with_name(f"kernels.{end}") for end in "ch")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
_COMPILE_S, _WHOLE = 60, b"all is here"

Triple = tuple[Tensor, Tensor, Tensor]


class _Scratch(threading.local):
    """Room for the kernels' sums. Each Python thread has its own: a call lets the others run."""

    floats = torch.empty(0)


class Attention(ctypes.Structure):
    """As in `kernels.h`."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("keys", "values", "sinks", "slots", "table", "positions", "scratch")]
    _fields_ += [(name, ctypes.c_int64) for name in ("pool", "columns", "block", "heads", "kv_heads", "width", "window")]
    _fields_ += [(name, ctypes.c_float) for name in ("scale", "softcap")]


class CPUKernels:
    """Typed calls into the compiled library. Tensors are float32 (indices int64), on the CPU; rows lie one after another."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, integer, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._attend = _typed(library.paged_attention, pointer, *[integer] * 2, *[pointer] * 3, *[integer] * 2, pointer, integer, threads)
        self.attend = ctypes.cast(library.paged_attention, pointer)
        """The C function `Attend`."""
        self._attention_room = _typed(library.attention_room, *[integer] * 4, result=integer)
        self._sample = _typed(library.sample, pointer, *[integer] * 3, *[pointer] * 5, threads)
        self._scratch = _Scratch()

    def attention(
        self,
        pools: tuple[Tensor, Tensor],
        where: Triple,
        heads: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Attention:
        """What the C function is told of a layer. It holds on to no tensor, and is good until this
        thread asks for a larger one.

        Args:
            pools: keys and values of the layer, [kv_heads, blocks, block_size, D].
            where: slots [N], table [N, M], positions [N].
            heads: of the queries.
            scale: of the scores.
            window: keys that a query sees at most, itself included; None: all before it.
            softcap: scores become softcap * tanh(scores / softcap).
            sinks: [heads] one more score of each head, without a value; contiguous.
        """
        kv_heads, blocks, block_size, width = pools[0].shape
        columns = where[1].shape[1]
        scratch = self._room(2 * torch.get_num_threads() * self._attention_room(heads // kv_heads, width, columns, block_size))
        sizes = (blocks * block_size * width, columns, block_size, heads, kv_heads, width, window or 0)
        places = (*(t.data_ptr() for t in pools), None if sinks is None else sinks.data_ptr(), *(t.data_ptr() for t in where))
        return Attention(*places, scratch, *sizes, scale, softcap or 0.0)

    def paged_attention(self, qkv: Triple, attention: Attention) -> Tensor:
        """qkv: q [N, heads, D], k and v [N, kv_heads, D]; each may be parts of longer rows.

        Write k and v into their slots; then each row of q attends over its own table up to its position, within the window -> [N, heads, D].
        """
        q, k, v = qkv
        rows, heads, width = q.shape
        q, k, v = (t if t.stride()[1:] == (width, 1) else t.contiguous() for t in (q, k, v))
        if k.stride(0) != v.stride(0):
            k, v = k.contiguous(), v.contiguous()
        out, inputs = torch.empty(rows, heads, width), (q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), k.stride(0))
        self._attend(ctypes.byref(attention), 0, rows, *inputs, out.data_ptr(), 0, torch.get_num_threads())
        return out

    def sample(self, logits: Tensor, temperature: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """One token of each row from softmax(logits / temperature), logits [B, V], temperature [B] (0: the most probable), noise [B] float64 in
        [0, 1) -> (tokens [B], log-probs [B]; at temperature 1 where it is 0)."""
        rows, vocabulary = logits.shape
        tokens, logp = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        threads = torch.get_num_threads()
        inputs = (logits.data_ptr(), logits.stride(0), rows, vocabulary, temperature.data_ptr(), noise.data_ptr())
        self._sample(*inputs, tokens.data_ptr(), logp.data_ptr(), self._room(threads * vocabulary), threads)
        return tokens, logp

    def _room(self, floats: int) -> int:
        if len(self._scratch.floats) < floats:
            self._scratch.floats = torch.empty(2 * floats)
        return self._scratch.floats.data_ptr()


def _typed(function: Callable[..., Any], *types: type, result: type | None = None) -> Callable[..., Any]:
    function.argtypes, function.restype = types, result  # type: ignore[attr-defined]
    return function


@cache
def cpu_kernels() -> CPUKernels | None:
    """The compiled kernels, if `compiled` has them."""
    library = compiled(SOURCE)
    return None if library is None else CPUKernels(library)


def compiled(source: Path) -> ctypes.CDLL | None:
    """A C file of kernels, behind `kernels.h`; None where there is no working C compiler (Windows counts as that), or SIXFOLD_KERNELS=torch. Compiles
    once a machine.

    Raises ValueError for another value of SIXFOLD_KERNELS.
    """
    choice = os.environ.get("SIXFOLD_KERNELS", "")
    if choice not in ("", "torch"):
        raise ValueError(f"SIXFOLD_KERNELS = '{choice}': unset it for the compiled kernels, or 'torch' for PyTorch's operations alone")
    if choice or os.name != "posix":
        return None
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    compilers = dict.fromkeys(shutil.which(name) for name in names if name)
    return next((library for compiler in compilers if compiler and (library := _library(compiler, source))), None)


def _library(compiler: str, source: Path) -> ctypes.CDLL | None:
    """The library as this compiler makes it, kept in the user's cache folder; None if it fails."""
    name = f"{source.stem}-{_key(compiler, source)}.so"
    for folder in _folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.getuid():
                continue  # somebody else's: what lies there is not ours to run
            if not (folder / name).exists() or not (folder / name).read_bytes().endswith(_WHOLE):
                _compile(compiler, source, folder / name)
            return ctypes.CDLL(str(folder / name))
        except OSError:  # not writable, or nothing that lies there may be executed
            continue
        except subprocess.SubprocessError:  # elsewhere it would fail again
            return None
    return None


def _folders() -> Iterator[Path]:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(home):  # a user without a home folder keeps the "~"
        yield Path(home) / "sixfold"
    yield Path(tempfile.gettempdir()) / f"sixfold-{os.getuid()}"


def _key(compiler: str, source: Path) -> str:
    """Of the source, the compiler and the CPU: a home folder may be shared by machines, and "native" means another thing on each."""
    cpu = Path("/proc/cpuinfo")
    text = cpu.read_text().split("\n\n")[0] if cpu.exists() else platform.processor()
    traits = [line for line in text.splitlines() if line.startswith(("flags", "model name", "Features"))]
    parts = [HEADER.read_text(), source.read_text(), compiler, *FLAGS, platform.platform(), *traits]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(compiler: str, source: Path, target: Path) -> None:
    """With OpenMP where compiler and torch have the same one, else for one thread. The file appears whole. Raises SubprocessError or OSError."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made, library = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
        compiling = [compiler, *FLAGS, "-include", str(HEADER), "-c", str(source), "-o", str(made)]
        # Linked without -fopenmp: the OpenMP that torch has loaded serves both. Two of them would wait for each other's spinning threads.
        linking = [compiler, "-shared", str(made), "-o", str(library), "-lm"]
        try:
            _build([*compiling, "-fopenmp"], linking)
        except (subprocess.CalledProcessError, OSError):
            _build(compiling, linking)
        with library.open("ab") as file:  # added to, not written anew: it is loaded
            file.write(_WHOLE)  # loading a file that lost its end would end the process
        library.replace(target)


def _build(compiling: list[str], linking: list[str]) -> None:
    """Raises SubprocessError; OSError if a symbol is not to be had."""
    for command in (compiling, linking):
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMPILE_S, check=True)
    ctypes.CDLL(linking[linking.index("-o") + 1])
