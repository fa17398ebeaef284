"""GPUs of a process that a run starts."""

from __future__ import annotations

from ..errors import UserError


def visible_devices(devices: str, policy: str, visible: str | None, setting: str) -> str | None:
    """CUDA_VISIBLE_DEVICES of a process; None to leave it unchanged.

    Args:
        devices: GPU numbers as this process counts them; empty for the GPU of the policy.
        policy: device of the policy: cpu, cuda or cuda:N.
        visible: CUDA_VISIBLE_DEVICES of this process, which renumbers GPUs; None if it is not set.
        setting: what lists the devices, for error messages.

    Raises:
        UserError: this process has no GPU with one of the numbers.
    """
    number = policy.partition(":")[2]
    wanted = devices or number
    if not wanted:
        return None
    if visible is None:
        return wanted
    there = [name.strip() for name in visible.split(",") if name.strip()]
    try:
        return ",".join(there[int(n)] for n in wanted.split(","))
    except IndexError:
        raise UserError(
            f"{setting} = '{devices}': with CUDA_VISIBLE_DEVICES = '{visible}' there are"
            f" {len(there)} GPUs, numbered from 0. Use their numbers"
        ) from None
