"""Which device: names are checked when the recipe is read, numbers when the model is loaded."""

from __future__ import annotations

import pytest
import torch

from sixfold.errors import UserError
from sixfold.model.device import free_memory, prepare_device, resolve_device
from sixfold.recipe.toml import parse_recipe


def asked(name: str) -> str:
    return parse_recipe('run.name = "x"', "x.toml", [f"--run.device={name}"]).run.device


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:1", "cuda:12"])
def test_names(name: str) -> None:
    assert asked(name) == name


@pytest.mark.parametrize("name", ["mps", "mps:0", "xpu", "tpu"])
def test_devices_without_kernels_are_refused_by_name(name: str) -> None:
    with pytest.raises(UserError, match=rf"run\.device = '{name}': not supported; use cpu"):
        asked(name)


@pytest.mark.parametrize("name", ["gpu", "CUDA", ""])
def test_what_is_no_device(name: str) -> None:
    with pytest.raises(UserError, match=r"run\.device: expected one of 'auto', 'cpu', 'cuda'"):
        asked(name)


@pytest.mark.parametrize("name", ["cuda:", "cuda:-1", "cuda:x", "cuda:1 ", "cuda1"])
def test_lines_that_are_not_gpus_are_skipped(name: str) -> None:
    with pytest.raises(UserError, match=r"run\.device = .*cuda:N"):
        asked(name)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


def test_a_gpu_by_number_becomes_the_current_one(two_gpus: list[int]) -> None:
    assert [resolve_device(name, "run.device") for name in ("auto", "cuda", "cpu")] == [
        "cuda",
        "cuda",
        "cpu",
    ]
    assert two_gpus == []
    assert resolve_device("cuda:1", "run.device") == "cuda:1"
    assert two_gpus == [1]
    with pytest.raises(UserError, match=r"--device = 'cuda:2': this machine has cuda:0 to cuda:1"):
        resolve_device("cuda:2", "--device")


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7"])
def test_without_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto", "run.device") == "cpu"
    with pytest.raises(
        UserError, match=rf"run\.device = '{name}': no CUDA device.*Use --run.device cpu"
    ):
        resolve_device(name, "run.device")


def test_free_memory_counts_what_the_allocator_holds_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_memory(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    assert free_memory(torch.device("cuda:1")) == (40, 100)


def test_cudnn_attention_is_off_on_a_gpu_and_tf32_follows_the_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing changes for the CPU, nor TF32 where no precision is given."""
    seen: list[object] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", seen.append)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", seen.append)
    prepare_device("cpu", "bfloat16")
    assert seen == []
    for precision, expected in (
        ("bfloat16", [False, "high"]),
        ("float32", [False, "highest"]),
        (None, [False]),
    ):
        prepare_device("cuda:1", precision)
        assert seen == expected
        seen.clear()
