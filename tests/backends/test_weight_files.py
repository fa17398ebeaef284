"""The file that passes weights to samplers: one tensor at a time is read and written."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from sixfold.backends import vllm_worker, weight_files
from sixfold.backends.weight_deltas import SealedReader, WeightFiles
from sixfold.backends.weight_files import (
    FileForm,
    abandoned_folders,
    check_folder,
    streamed_file,
    weights_folder,
)

SHAPES: tuple[tuple[int, ...], ...] = ((3, 5), (), (0, 4), (7,), (2, 3, 4), (1,) * 12)


class Computed(Mapping[str, Tensor]):
    """Weights that are computed when they are read.

    Attributes:
        read: names that have been read.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights = weights
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        return self._weights[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def made() -> dict[str, Tensor]:
    names = (f'layer.{i}.\u00fc"\\' * (i + 1) for i in range(len(SHAPES)))
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    weights = {n: torch.randn(s).to(kinds[len(s) % 3]) for n, s in zip(names, SHAPES, strict=True)}
    return weights | {"transposed": torch.randn(4, 6).T}


def test_the_file_has_every_tensor_in_float32() -> None:
    weights = made()
    computed = Computed(weights)
    with streamed_file(1 << 12, computed, 3) as path:
        found = load_file(path)
        with safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt"
    assert not Path(path).exists()
    assert list(found) != [] and found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor.float()) and found[name].shape == tensor.shape
    assert computed.read == list(weights)


def test_folders_of_killed_processes_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of living ones are not. A killed process would leave a model's size in memory."""
    monkeypatch.setattr(weight_files, "_memory", lambda size: str(tmp_path))
    reading, go = os.pipe()
    pids = []
    for _ in range(2):
        pid = os.fork()
        if not pid:
            with weights_folder({"a": torch.ones(6)}, 3, torch.float32, in_memory=True):
                os.write(go, b"x")
                time.sleep(60)
            os._exit(0)
        pids.append(pid)
        assert select.select([reading], [], [], 60)[0] and os.read(reading, 1) == b"x"
    assert len(list(tmp_path.iterdir())) == 2 and not list(abandoned_folders(tmp_path))
    os.kill(pids[0], signal.SIGKILL)
    os.waitpid(pids[0], 0)
    (left,) = abandoned_folders(tmp_path)
    with streamed_file(1 << 12, {"a": torch.ones(6)}, 4) as path:
        assert not left.exists() and len(list(tmp_path.iterdir())) == 2
        assert Path(path).is_file() and not list(abandoned_folders(tmp_path))
    os.kill(pids[1], signal.SIGKILL)
    os.waitpid(pids[1], 0)


def test_where_files_have_no_locks_no_folder_counts_as_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: Any, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(weight_files, "_memory", lambda size: str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(weight_files.fcntl, "flock", refuse)
        with streamed_file(1 << 12, {"a": torch.ones(6)}, 4) as path:
            patch.undo()
            assert Path(path).is_file() and not list(abandoned_folders(tmp_path))


def test_a_file_for_vllm_has_its_dtype_and_every_name_of_a_tied_tensor() -> None:
    """Its worker finds the checksums right."""
    weights = {"embed": torch.randn(5, 4), "norm": torch.randn(3)}

    def parts(name: str, tensor: Tensor) -> dict[str, Tensor]:
        names = ["model.embed", "head"] if name == "embed" else [name]
        return dict.fromkeys(names, tensor)

    computed, form = Computed(weights), FileForm(("model.embed", "head", "norm"), 43, parts)
    with streamed_file(1 << 12, computed, 3, dtype=torch.bfloat16, form=form) as path:
        check_folder(Path(path).parent, 3)
        found = load_file(path)
        vllm_worker._check_sums(path, found)
        with pytest.raises(ValueError, match="'head' differs from its checksum"):
            vllm_worker._check_sums(path, found | {"head": found["head"] + 1})
    assert computed.read == list(weights)
    half = {name: tensor.bfloat16() for name, tensor in weights.items()}
    expected = {"model.embed": half["embed"], "head": half["embed"], "norm": half["norm"]}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_all_tensors_are_read_if_the_disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks gather them at the same moments, and would wait for ever."""
    computed = Computed(made())

    def full(tensors: Iterator[Any], *given: Any) -> None:
        next(tensors)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_files, "_stream", full)
    with pytest.raises(OSError, match="No space"), streamed_file(1 << 12, computed, 3):
        pass
    assert computed.read == list(made())


def test_a_folder_that_is_torn_or_of_another_version_is_refused() -> None:
    with weights_folder({"a": torch.ones(6)}, 3, torch.float32) as (folder, _):
        check_folder(folder, 3)
        with pytest.raises(ValueError, match="version 4 were announced, but 3 arrived"):
            check_folder(folder, 4)
        path = folder / weight_files.MODEL_FILE
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(ValueError, match="version 3 are torn"):
            check_folder(folder, 3)
        path.unlink()
        with pytest.raises(ValueError, match="version 3 are torn"):
            check_folder(folder, 3)


def test_files_of_changes_give_the_weights_of_every_version() -> None:
    """To a reader of all, to one that starts late, and to one that missed a refused version."""
    rng, shapes = random.Random(0), {name: (8, 4) for name in "abcdef"}
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    files, always, seldom = WeightFiles(1 << 12, 3), SealedReader(), SealedReader()
    used, sizes, paths = ExitStack(), list[int](), list[Path]()
    for version in range(1, 13):
        changed = rng.sample("abcdef", 2)
        weights = weights | {name: weights[name] + 1 for name in changed}
        if version % 5 == 0:  # a process refuses the weights: the next file repeats them
            with suppress(RuntimeError), files.publish(weights, version) as path:
                always.read(path, version)
                raise RuntimeError("refused")
            continue
        with ExitStack() as published:
            path = published.enter_context(files.publish(weights, version))
            readers = [always, SealedReader()] + [seldom] * (version % 3 == 0)
            for found in [reader.read(path, version) for reader in readers]:
                assert found.keys() == weights.keys()
                assert all(found[name].equal(weights[name]) for name in weights)
            used.close()
            used.callback(published.pop_all().close)
        sizes.append(len(load_file(path)))
        paths.append(Path(path))
        assert 1 <= sum(file.exists() for file in paths) <= 3
    assert sizes == [6, 2, 2, 6, 6, 2, 6, 2, 6, 6]
    used.close()
    assert not any(file.exists() for file in paths)


def test_a_damaged_earlier_file_is_refused() -> None:
    weights = {"a": torch.ones(4), "b": torch.ones(4)}
    files, reader = WeightFiles(1 << 12, 3), SealedReader()
    with (
        files.publish(weights, 1) as first,
        files.publish(weights | {"b": torch.zeros(4)}, 2) as two,
    ):
        assert reader.read(first, 1)["b"].sum() == 4
        data = bytearray(Path(first).read_bytes())
        data[-20] ^= 1
        damaged = Path(first).with_name("damaged")
        damaged.write_bytes(data)
        Path(first).unlink()
        damaged.rename(first)
        with pytest.raises(ValueError, match="version 1 are torn or altered"):
            SealedReader().read(two, 2)
        with pytest.raises(ValueError, match="version 3 were announced, but 2 arrived"):
            reader.read(two, 3)
        assert reader.read(two, 2)["b"].sum() == 0
        Path(first).unlink()
        with pytest.raises(ValueError, match="version 1 are torn or altered"):
            SealedReader().read(two, 2)
