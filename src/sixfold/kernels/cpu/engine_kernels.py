"""The engine's CPU kernels: `kernels.c`, compiled once by the machine's C compiler, called via
ctypes.

`load_library` also compiles the kernels of the model's body (`body.c`).

The kernels exist because a decode step of a small batch takes sixty small operations per layer, and
each costs more to call than to compute. Without a compiler, or with SIXFOLD_KERNELS=torch, the
engine uses PyTorch operations only. The results are then the same up to rounding, but slower.
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
    """Scratch memory of the kernels. One per Python thread: a ctypes call releases the GIL."""

    floats = torch.empty(0)


class Attention(ctypes.Structure):
    """`Attention` in `kernels.h`."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("keys", "values", "sinks", "slots", "table", "positions", "scratch")
    ]
    _fields_ += [
        (name, ctypes.c_int64)
        for name in ("pool", "columns", "block", "heads", "kv_heads", "width", "window", "bfloat16")
    ]
    _fields_ += [(name, ctypes.c_float) for name in ("scale", "softcap")]


class CPUKernels:
    """Typed calls into the compiled library. Tensors are float32 (indices int64), on the CPU.

    Pools of keys and values may be bfloat16.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, integer, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._attend = set_types(
            library.paged_attention,
            pointer,
            *[integer] * 2,
            *[pointer] * 3,
            *[integer] * 2,
            pointer,
            integer,
            threads,
        )
        self.attend = ctypes.cast(library.paged_attention, pointer)
        """Pointer to the C function, of type `Attend`."""
        self._attention_room = set_types(library.attention_room, *[integer] * 4, result=integer)
        self._sample = set_types(library.sample, pointer, *[integer] * 3, *[pointer] * 5, threads)
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
        """Arguments of the C function for one layer.

        The result does not keep any tensor alive. It becomes invalid when this thread asks for a
        larger one, which reallocates the scratch memory.

        Args:
            pools: keys and values of the layer, [kv_heads, blocks, block_size, D] each, both
                float32 or both bfloat16.
            where: slots [N], table [N, M], positions [N].
            heads: number of query heads.
            scale: factor of the scores.
            window: maximum number of keys that a query sees, including its own; None: no limit.
            softcap: scores become softcap * tanh(scores / softcap).
            sinks: [heads] one extra score per head, without a value; contiguous.
        """
        kv_heads, blocks, block_size, width = pools[0].shape
        columns = where[1].shape[1]
        scratch = self._room(
            2
            * torch.get_num_threads()
            * self._attention_room(heads // kv_heads, width, columns, block_size)
        )
        sizes = (
            blocks * block_size * width,
            columns,
            block_size,
            heads,
            kv_heads,
            width,
            window or 0,
            pools[0].dtype is torch.bfloat16,
        )
        places = (
            *(t.data_ptr() for t in pools),
            None if sinks is None else sinks.data_ptr(),
            *(t.data_ptr() for t in where),
        )
        return Attention(*places, scratch, *sizes, scale, softcap or 0.0)

    def paged_attention(self, qkv: Triple, attention: Attention) -> Tensor:
        """Write k and v into their slots, then attend.

        Each row of q attends over its own block table up to its position, within the window.

        Args:
            qkv: q [N, heads, D], k and v [N, kv_heads, D]. Each may be a slice of longer rows.
            attention: arguments of the layer.

        Returns:
            [N, heads, D].
        """
        q, k, v = qkv
        rows, heads, width = q.shape
        q, k, v = (t if t.stride()[1:] == (width, 1) else t.contiguous() for t in (q, k, v))
        if k.stride(0) != v.stride(0):
            k, v = k.contiguous(), v.contiguous()
        out, inputs = (
            torch.empty(rows, heads, width),
            (
                q.data_ptr(),
                k.data_ptr(),
                v.data_ptr(),
                q.stride(0),
                k.stride(0),
            ),
        )
        self._attend(
            ctypes.byref(attention), 0, rows, *inputs, out.data_ptr(), 0, torch.get_num_threads()
        )
        return out

    def sample(self, logits: Tensor, temperature: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Draw one token from softmax(logits / temperature) of each row.

        Args:
            logits: [B, V].
            temperature: [B]; 0 takes the most probable token.
            noise: [B] float64 in [0, 1).

        Returns:
            Tokens [B], and log-probs [B]; at temperature 1 where the temperature is 0.
        """
        rows, vocabulary = logits.shape
        tokens, logp = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        threads = torch.get_num_threads()
        inputs = (
            logits.data_ptr(),
            logits.stride(0),
            rows,
            vocabulary,
            temperature.data_ptr(),
            noise.data_ptr(),
        )
        self._sample(
            *inputs, tokens.data_ptr(), logp.data_ptr(), self._room(threads * vocabulary), threads
        )
        return tokens, logp

    def _room(self, floats: int) -> int:
        if len(self._scratch.floats) < floats:
            self._scratch.floats = torch.empty(2 * floats)
        return self._scratch.floats.data_ptr()


def set_types(
    function: Callable[..., Any], *types: type, result: type | None = None
) -> Callable[..., Any]:
    function.argtypes, function.restype = types, result  # type: ignore[attr-defined]
    return function


@cache
def cpu_kernels() -> CPUKernels | None:
    """The compiled kernels, or None if they are not available."""
    library = load_library(SOURCE)
    return None if library is None else CPUKernels(library)


def load_library(source: Path) -> ctypes.CDLL | None:
    """Compile and load a C file, with `kernels.h` included first. Compiles once per machine.

    Returns:
        None if there is no working C compiler, on Windows, or with SIXFOLD_KERNELS=torch.

    Raises:
        ValueError: if SIXFOLD_KERNELS has any other value.
    """
    choice = os.environ.get("SIXFOLD_KERNELS", "")
    if choice not in ("", "torch"):
        raise ValueError(
            f"SIXFOLD_KERNELS = '{choice}' is not valid. Unset it for the compiled kernels, or"
            " use 'torch' for PyTorch operations only"
        )
    if choice or os.name != "posix":
        return None
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    compilers = dict.fromkeys(shutil.which(name) for name in names if name)
    return next(
        (library for compiler in compilers if compiler and (library := _library(compiler, source))),
        None,
    )


def _library(compiler: str, source: Path) -> ctypes.CDLL | None:
    """Load the library from the user's cache folder, compiling it if needed. None if that fails."""
    name = f"{source.stem}-{_key(compiler, source)}.so"
    for folder in _folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.getuid():
                continue  # owned by another user: loading its files would run that user's code
            if not (folder / name).exists() or not (folder / name).read_bytes().endswith(_WHOLE):
                _compile(compiler, source, folder / name)
            return ctypes.CDLL(str(folder / name))
        except OSError:  # not writable, or mounted noexec
            continue
        except subprocess.SubprocessError:  # compiling would fail in any other folder too
            return None
    return None


def _folders() -> Iterator[Path]:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(home):  # without a home folder, expanduser leaves the "~"
        yield Path(home) / "sixfold"
    yield Path(tempfile.gettempdir()) / f"sixfold-{os.getuid()}"


def _key(compiler: str, source: Path) -> str:
    """Hash of the source, the compiler and the CPU.

    The CPU is part of it because machines may share a home folder, and -march=native differs by
    CPU.
    """
    cpu = Path("/proc/cpuinfo")
    text = cpu.read_text().split("\n\n")[0] if cpu.exists() else platform.processor()
    traits = [
        line for line in text.splitlines() if line.startswith(("flags", "model name", "Features"))
    ]
    parts = [HEADER.read_text(), source.read_text(), compiler, *FLAGS, platform.platform(), *traits]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(compiler: str, source: Path, target: Path) -> None:
    """Compile a C file into a shared library. The target file appears atomically.

    OpenMP is used if the compiler and torch have the same OpenMP library. Otherwise the library
    runs on one thread.

    Raises:
        subprocess.SubprocessError: if compiling or linking fails.
        OSError: if a file cannot be written, or the library cannot be loaded.
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made, library = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
        compiling = [compiler, *FLAGS, "-include", str(HEADER), "-c", str(source), "-o", str(made)]
        # Link without -fopenmp, so that the OpenMP loaded by torch serves both. With two OpenMP
        # libraries, each would wait for the spinning threads of the other.
        linking = [compiler, "-shared", str(made), "-o", str(library), "-lm"]
        try:
            _build([*compiling, "-fopenmp"], linking)
        except (subprocess.CalledProcessError, OSError):
            _build(compiling, linking)
        # Append, do not rewrite: the library is loaded. The mark detects truncated files: loading
        # one would crash the process.
        with library.open("ab") as file:
            file.write(_WHOLE)
        library.replace(target)


def _build(compiling: list[str], linking: list[str]) -> None:
    """Run the compiler and the linker, and load the result to check its symbols.

    Raises:
        subprocess.SubprocessError: if a command fails.
        OSError: if a symbol is missing.
    """
    for command in (compiling, linking):
        subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMPILE_S, check=True
        )
    ctypes.CDLL(linking[linking.index("-o") + 1])
