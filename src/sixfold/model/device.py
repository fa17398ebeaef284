"""Which device a model lives on, and what PyTorch may do there."""

from __future__ import annotations

import torch

from ..errors import UserError


def resolve_device(asked: str, setting: str) -> str:
    """The device to use, which is also made the current one.

    Args:
        asked: auto, cpu, cuda or cuda:N.
        setting: what the user calls it, for the error messages.

    Returns:
        "cpu", "cuda" or "cuda:N".

    Raises:
        UserError: a GPU is asked for that is not there.
    """
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        flag = setting if setting.startswith("--") else f"--{setting}"
        raise UserError(f"{setting} = '{asked}': no CUDA device found; use {flag} cpu, or auto")
    kind, _, number = asked.partition(":")
    if not number:
        return "cuda"
    count = torch.cuda.device_count()
    if int(number) >= count:
        there = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise UserError(f"{setting} = '{asked}': this machine has {there}")
    torch.cuda.set_device(int(number))  # for what asks for "cuda" and names no number
    return f"{kind}:{int(number)}"


def prepare_device(device: str, precision: str | None = None) -> None:
    """Set what PyTorch may do on a GPU. Does nothing for the CPU.

    Args:
        device: where models will live.
        precision: of forward passes. With "bfloat16", the products that remain in float32 may use TF32, whose 10 bits of mantissa are more than
            bfloat16's 7. With "float32" they keep all 23 bits. None: leave this as it is.
    """
    if torch.device(device).type != "cuda":
        return
    # On Hopper, PyTorch prefers cuDNN's attention, which builds a plan of 50 ms for every new shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if precision is not None:
        torch.set_float32_matmul_precision("high" if precision == "bfloat16" else "highest")


def free_memory(device: torch.device) -> tuple[int, int] | None:
    """(free, total) bytes of a GPU; None for other devices.

    What PyTorch's allocator holds and does not use counts as free.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + idle, total
