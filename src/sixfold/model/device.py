"""The device of a model, and PyTorch's settings for it."""

from __future__ import annotations

import torch

from ..errors import UserError


def resolve_device(asked: str, setting: str) -> str:
    """Resolve the requested device. "cuda:N" also becomes PyTorch's current device.

    Args:
        asked: auto, cpu, cuda or cuda:N.
        setting: name of the setting, for error messages.

    Returns:
        "cpu", "cuda" or "cuda:N".

    Raises:
        UserError: the machine does not have the requested GPU.
    """
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        flag = setting if setting.startswith("--") else f"--{setting}"
        raise UserError(f"{setting} = '{asked}': no CUDA device found. Use {flag} cpu, or auto")
    kind, _, number = asked.partition(":")
    if not number:
        return "cuda"
    count = torch.cuda.device_count()
    if int(number) >= count:
        there = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise UserError(f"{setting} = '{asked}': this machine has {there}")
    torch.cuda.set_device(int(number))  # for code that uses "cuda" without a number
    return f"{kind}:{int(number)}"


def prepare_device(device: str, precision: str | None = None) -> None:
    """Set PyTorch's options for a GPU. Does nothing for the CPU.

    Args:
        precision: precision of forward passes. With "bfloat16", matrix products that remain in
            float32 may use TF32, whose 10 mantissa bits exceed bfloat16's 7. With "float32" they
            keep all 23 bits. None: do not change the setting.
    """
    if torch.device(device).type != "cuda":
        return
    # On Hopper, PyTorch prefers cuDNN's attention, which takes 50 ms to plan for every new shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if precision is not None:
        torch.set_float32_matmul_precision("high" if precision == "bfloat16" else "highest")


def free_memory(device: torch.device) -> tuple[int, int] | None:
    """(free, total) bytes of a GPU; None for other devices.

    Memory that PyTorch's allocator has reserved but does not use counts as free.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + idle, total
