"""The compiled kernels are a convenience: whatever is wrong with compiler, cache folder or cached
file, the engine runs, and runs right.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from tests.conftest import END, VOCABULARY
from tests.forkserver import CONTEXT
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.engine.kv_cache import DecodeLayout
from sixfold.kernels.cpu import engine_kernels as module
from sixfold.kernels.cpu.engine_kernels import CPUKernels, cpu_kernels
from sixfold.model.causal_lm import CausalLM
from sixfold.types import SamplingParams

COMPILER = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
FAST = ("-O0", "-fPIC")
"""Flags that compile in a moment."""
with_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("SIXFOLD_KERNELS", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(module, "cpu_kernels", cpu_kernels)
    cpu_kernels.cache_clear()
    monkeypatch.setattr(module, "FLAGS", FAST)
    return tmp_path / "cache" / "sixfold"


@pytest.fixture(autouse=True, scope="module")
def forget_afterwards() -> object:
    yield
    cpu_kernels.cache_clear()


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH: cc there is the only compiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def works(kernels: CPUKernels | None) -> bool:
    """One of two equal tokens."""
    if kernels is None:
        return False
    tokens, logp = kernels.sample(
        torch.zeros(1, 2), torch.ones(1), torch.full((1,), 0.7, dtype=torch.float64)
    )
    return int(tokens) == 1 and abs(float(logp) + 0.6931472) < 1e-6


def load_in_another_process(cache: Path) -> Connection:
    """Load the kernels in a new process. It sends True if they work, or ends."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    CONTEXT.Process(target=_load, args=(theirs, cache.parent), daemon=True).start()
    theirs.close()
    return ours


def _load(answer: Connection, cache: Path) -> None:
    os.environ["XDG_CACHE_HOME"] = str(cache)
    os.environ.pop("CC", None)
    module.FLAGS = FAST
    cpu_kernels.cache_clear()
    answer.send(works(cpu_kernels()))


def answers(model: PreTrainedModel) -> list[tuple[list[int], list[float]]]:
    engine = Engine(CausalLM(model), kv_tokens=600, block_size=8)
    for i in range(4):
        prompt = [(5 * i + j + 2) % VOCABULARY for j in range(3 + 7 * i)]
        engine.add(
            str(i),
            prompt,
            SamplingParams(max_tokens=12, temperature=0.8, stop_token_ids=(END,), seed=i),
            [0, 1],
        )
    return sorted((s.tokens, s.logp) for s in engine.run())


@pytest.mark.slow
@with_compiler
def test_it_compiles_once(own_cache: Path, commands: Path) -> None:
    script(
        commands / "cc",
        f"echo x >> {commands}/count\nPATH={os.path.dirname(COMPILER or '')}:/usr/bin:/bin exec"
        f' {COMPILER} "$@"',
    )
    assert works(cpu_kernels())
    (library,) = own_cache.iterdir()
    count = (commands / "count").read_text()
    cpu_kernels.cache_clear()
    assert works(cpu_kernels())
    assert (commands / "count").read_text() == count and list(own_cache.iterdir()) == [library]
    assert own_cache.stat().st_mode & 0o077 == 0


@pytest.mark.slow
@pytest.mark.parametrize("text", [None, "exit 1", "echo nonsense; exit 0", "sleep 60"])
def test_without_a_working_compiler_the_answers_are_the_same(
    text: str | None,
    commands: Path,
    own_cache: Path,
    tiny: Callable[[str], PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_COMPILE_S", 0.3)
    if text is not None:
        script(
            commands / "cc",
            text.replace("sleep", shutil.which("sleep", path="/usr/bin:/bin") or "sleep"),
        )
    assert cpu_kernels() is None
    without = answers(tiny("qwen3"))
    assert not own_cache.exists() or not list(own_cache.iterdir())  # nothing half done is left
    if COMPILER is not None:
        monkeypatch.setenv("PATH", f"{os.path.dirname(COMPILER)}:/usr/bin:/bin")
        monkeypatch.setattr(module, "_COMPILE_S", 60)
        cpu_kernels.cache_clear()
        assert works(cpu_kernels())
        _assert_same(answers(tiny("qwen3")), without)


def _assert_same(
    ours: list[tuple[list[int], list[float]]], theirs: list[tuple[list[int], list[float]]]
) -> None:
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
    for (_, logp), (_, expected) in zip(ours, theirs, strict=True):
        assert logp == pytest.approx(expected, abs=1e-5)


@with_compiler
def test_broken_first_compiler_falls_back_to_the_next(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(commands / "mine", "exit 1")
    monkeypatch.setenv("CC", str(commands / "mine"))
    monkeypatch.setenv("PATH", f"{os.path.dirname(COMPILER or '')}:/usr/bin:/bin")
    assert works(cpu_kernels())


@pytest.mark.slow
@with_compiler
def test_a_compiler_without_openmp_will_do(commands: Path) -> None:
    real = f'PATH={os.path.dirname(COMPILER or "")}:/usr/bin:/bin exec {COMPILER} "$@"'
    script(commands / "cc", f'for a in "$@"; do [ "$a" = -fopenmp ] && exit 1; done\n{real}')
    assert works(cpu_kernels())


@pytest.mark.slow
@with_compiler
@pytest.mark.parametrize("keep", [5000, -1])
def test_a_broken_file_in_the_cache_is_made_anew(keep: int, own_cache: Path) -> None:
    """In a process of its own: half a library can end the one that loads it."""
    assert works(cpu_kernels())
    (library,) = own_cache.iterdir()
    whole = library.read_bytes()
    library.unlink()  # not in place: this process runs it
    library.write_bytes(whole[:keep])
    assert load_in_another_process(own_cache).recv()
    assert len(library.read_bytes()) == len(whole)


@pytest.mark.slow
@with_compiler
def test_a_cache_folder_that_cannot_be_written_leaves_the_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for home in (tmp_path / "file", Path("/proc"), Path("relative")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        cpu_kernels.cache_clear()
        assert works(cpu_kernels())
        folder = tmp_path / f"sixfold-{os.getuid()}"
        assert len(list(folder.iterdir())) == 1
        shutil.rmtree(folder)
    assert not (tmp_path / "relative").exists()


@pytest.mark.slow
@with_compiler
def test_a_user_without_a_home_folder_gets_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert works(cpu_kernels())


@pytest.mark.slow
@with_compiler
def test_libraries_in_another_users_folder_are_not_loaded(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert works(cpu_kernels())
    (library,) = own_cache.iterdir()
    inode = library.stat().st_ino
    monkeypatch.setattr("os.getuid", lambda: 12345)
    cpu_kernels.cache_clear()
    assert cpu_kernels() is None and library.stat().st_ino == inode
    assert not list((tmp_path / "sixfold-12345").iterdir())


@pytest.mark.slow
@with_compiler
def test_processes_that_compile_at_once_all_get_kernels(own_cache: Path) -> None:
    both = [load_in_another_process(own_cache) for _ in range(2)]
    assert all(answer.recv() for answer in both)
    assert [path.suffix for path in own_cache.iterdir()] == [".so"]


def test_kernels_can_be_turned_off(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIXFOLD_KERNELS", "torch")
    assert cpu_kernels() is None and not own_cache.exists()


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIXFOLD_KERNELS", "cuda")
    with pytest.raises(ValueError, match=r"SIXFOLD_KERNELS = 'cuda' .*Unset it .*'torch'"):
        cpu_kernels()


@pytest.mark.nightly
@pytest.mark.slow
def test_nothing_is_compiled_before_there_is_an_engine(own_cache: Path) -> None:
    program = "import sixfold.engine.engine, sixfold.model.causal_lm; print('here')"
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout
        == "here\n"
    )
    assert not own_cache.exists()


@pytest.mark.slow
@with_compiler
def test_two_threads_do_not_share_their_sums(tiny: Callable[[str], PreTrainedModel]) -> None:
    """A call lets other Python threads run: two engines in one process are each as right
    as alone.
    """
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(0))
    noise = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    kernels = cpu_kernels()
    assert kernels is not None
    alone = kernels.sample(logits, torch.ones(64), noise)
    wrong: list[int] = []

    def draw(width: int) -> None:
        expected = (
            kernels.sample(logits[:, :width], torch.ones(64), noise)[0]
            if width < 5000
            else alone[0]
        )
        for _ in range(30):
            if not torch.equal(
                kernels.sample(logits[:, :width], torch.ones(64), noise)[0], expected
            ):
                wrong.append(width)

    threads = [threading.Thread(target=draw, args=(width,)) for width in (5000, 4000, 5000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["compiled", "torch"])
def test_the_engine_uses_what_was_chosen(
    choice: str, tiny: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    reference = DecodeLayout._reference
    monkeypatch.setattr(
        DecodeLayout, "_reference", lambda *args: calls.append("torch") or reference(*args)
    )
    if choice == "torch":
        monkeypatch.setenv("SIXFOLD_KERNELS", "torch")
    elif COMPILER is None:
        pytest.skip("no C compiler")
    answers(tiny("qwen3"))
    assert bool(calls) == (choice == "torch")
