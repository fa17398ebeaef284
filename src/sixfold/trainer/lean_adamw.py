"""AdamW with less memory: bfloat16 weights, 8-bit moments, state in host memory.

The arithmetic is that of `torch.optim.AdamW`, in float32. Only what is stored between updates
differs. A parameter is updated in slices, so temporary float32 tensors stay small:

1. Fetch a slice: its master weights if there are any, else the weights themselves, and its moments.
2. Update it by PyTorch's fused AdamW.
3. Store it: moments in 8 bits or float32, weights rounded to the parameter's dtype.

The 8-bit moments are those of torchao (`OptimState8bit`; Dettmers et al. 2021, arXiv:2110.02861):
blocks of 256 numbers with one scale each. As in torchao, parameters of fewer than 4,096 numbers,
or whose size is not a multiple of 256, keep float32 moments. Unlike torchao, a second moment is
never rounded to 0: the update is divided by its root and would be huge.

Of a sharded parameter, each rank updates its own part. Blocks end where the parts end, so the codes
and scales do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim.adamw import adamw

from ..seeds import STEP_BYTES, seed_number
from .sharded import own_part

SLICE = 1 << 22
"""How many numbers of a parameter are updated at once (17 MB in float32). A multiple of BLOCK."""
BLOCK = 256
LEAST_IN_8_BITS = 4096
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StateForm:
    """Form and place of the optimizer state between updates.

    Attributes:
        master: float32 copies of weights that are not float32. False: such weights are rounded
            stochastically.
        eight_bit: store moments in 8 bits.
        on_host: keep the state in host memory, and compute updates there.
    """

    master: bool = True
    eight_bit: bool = False
    on_host: bool = False


class LeanAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101) whose state has a given form.

    State of a parameter, created by its first update:

      step                          number of updates; on the host
      master                        float32 weights
      exp_avg, exp_avg_sq           float32 moments, or
      exp_avg_codes, exp_avg_scale, exp_avg_sq_codes, exp_avg_sq_scale
                                    moments in 8 bits: a code per number, a scale per block

    It is that of the part which this rank holds, if the parameter is sharded.

    Args:
        form: what is stored, and where.
        seed: seed of stochastic rounding. The noise depends on it, the step and the parameter.
        betas: decay of the two moments.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        form: StateForm,
        seed: int,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, settings)
        self.form = form
        self.seed = seed

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if not self.state[parameter]:
                        self.state[parameter] = self.new_state(parameter)
                    self._update(parameter, group, index)
                index += 1

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """State of this rank's part of a parameter before the first update."""
        state = self._zeros(parameter, own_part(parameter))
        if "master" in state:
            state["master"].copy_(own_part(parameter))
        return state

    def state_form(self, parameter: Tensor) -> dict[str, Tensor]:
        """Shapes and dtypes of the state of a whole parameter, as tensors without data."""
        return self._zeros(parameter, torch.empty(parameter.shape, device="meta"))

    def _zeros(self, parameter: Tensor, part: Tensor) -> dict[str, Tensor]:
        """State of zeros for a part of a parameter. A part without data has state without data."""
        on_host = self.form.on_host and not part.is_meta
        target = torch.device("cpu") if on_host else part.device
        pinned = parameter.is_cuda and target.type == "cpu"

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=target, pin_memory=pinned)

        state = {"step": torch.zeros((), device="meta" if part.is_meta else "cpu")}
        if self.form.master and parameter.dtype != torch.float32:
            state["master"] = zeros(*part.shape)
        if not self.form.eight_bit or not has_blocks(parameter):
            return state | {name: zeros(*part.shape) for name in MOMENTS}
        row = _row(parameter)
        # By rows if possible: the scales are then sharded as the parameter is.
        scales = (part.numel() // BLOCK,) if row % BLOCK else (len(part), row // BLOCK)
        for name in MOMENTS:
            state[f"{name}_codes"] = zeros(*part.shape, dtype=torch.uint8)
            state[f"{name}_scale"] = zeros(*scales)
        return state

    def reset(self) -> None:
        """Zero all moments and step counts in place. Master weights stay."""
        for state in self.state.values():
            for name, tensor in state.items():
                if name != "master":
                    tensor.zero_()

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], index: int) -> None:
        state, own = self.state[parameter], own_part(parameter.detach())
        weights, gradient = own.reshape(-1), own_part(parameter.grad).reshape(-1)  # type: ignore[arg-type]
        for start in range(0, len(weights), SLICE):
            at = slice(start, start + SLICE)
            work = _Slice(state, weights[at], at)
            work.update(gradient[at], group)
            weights[at] = self._round_to(
                work.weight, parameter.dtype, int(state["step"]), index, at
            )
        if not own.is_contiguous():  # `weights` is then a copy
            own.copy_(weights.view_as(own))
        state["step"] += 1

    def _round_to(
        self, weight: Tensor, dtype: torch.dtype, step: int, index: int, at: slice
    ) -> Tensor:
        """Round float32 weights to the parameter's dtype.

        Args:
            weight: [N] weights of one slice.
            step: updates before this one.
            index: number of the parameter.
        """
        if dtype != torch.bfloat16 or self.form.master:
            return weight.to(dtype)
        key = seed_number(f"{self.seed}\x00{step}\x00{index}\x00{at.start}", STEP_BYTES)
        return round_stochastically(weight, key)


def has_blocks(parameter: Tensor) -> bool:
    """True if a parameter can have moments in 8 bits."""
    return parameter.numel() >= LEAST_IN_8_BITS and parameter.numel() % BLOCK == 0


def blocks_cross_ranks(parameter: Tensor) -> bool:
    """True if a block of 8-bit moments would belong to the parts of two ranks."""
    if not isinstance(parameter, DTensor) or not has_blocks(parameter):
        return False
    mesh, placements = parameter.device_mesh, parameter.placements
    parts = next((mesh.size(i) for i, p in enumerate(placements) if isinstance(p, Shard)), 1)
    if parts == 1 or _row(parameter) % BLOCK == 0:
        return False
    return len(parameter) % parts > 0 or parameter.numel() // parts % BLOCK > 0


def _row(parameter: Tensor) -> int:
    """Numbers of one entry of the first dimension, along which a parameter is sharded."""
    return parameter.numel() // len(parameter)


class _Slice:
    """One slice of a parameter and of its state, as float32 tensors on the device of the update.

    Args:
        state: state of the whole parameter, with flat indices.
        weights: [N] numbers of the parameter in the slice.
        at: flat indices of the slice.
    """

    def __init__(self, state: dict[str, Tensor], weights: Tensor, at: slice) -> None:
        self._step = state["step"]
        parts = {
            name: tensor.view(-1)[_scales(at) if name.endswith("_scale") else at]
            for name, tensor in state.items()
            if name != "step"
        }
        self._quantised = {
            name: _torchao_tensor(parts[f"{name}_codes"], parts[f"{name}_scale"], name == "exp_avg")
            for name in MOMENTS
            if f"{name}_codes" in parts
        }
        moments = [
            self._quantised[name].dequantize() if name in self._quantised else parts[name]
            for name in MOMENTS
        ]
        self._moments: list[Tensor] = moments
        master = parts.get("master")
        self.weight = weights.to(moments[0].device, torch.float32) if master is None else master

    def update(self, gradient: Tensor, group: dict[str, Any]) -> None:
        """Apply AdamW to `weight`, and store the moments."""
        device = self.weight.device
        first, second = self._moments
        adamw(
            [self.weight],
            [gradient.to(device, torch.float32)],
            [first],
            [second],
            [],
            [self._step.to(device, copy=True)],  # the update adds 1, once per slice
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for name, moment in zip(MOMENTS, self._moments, strict=True):
            if name in self._quantised:
                self._quantised[name].copy_(moment)
        if "exp_avg_sq" in self._quantised:
            # Never 0: the update would be huge where the first moment is not 0.
            self._quantised["exp_avg_sq"].codes.clamp_min_(1)


def round_stochastically(weight: Tensor, key: int) -> Tensor:
    """Round float32 to bfloat16, up or down at random. The expectation is the unrounded value.

    A random integer below 2^16 is added to the bits of each number, and the lower 16 bits are cut
    off. The integer is a hash of the key and the index, so it is the same on every device.

    Args:
        weight: [N] float32.
        key: seed of the random integers, 56 bits.

    Returns:
        [N] bfloat16.
    """
    index = torch.arange(len(weight), device=weight.device)
    noise = _hash_words(_hash_words(index + (key & _WORD)) ^ (key >> 24)).bitwise_and_(0xFFFF)
    bits = weight.view(torch.int32) + noise.to(torch.int32)
    return bits.bitwise_and_(-(1 << 16)).view(torch.float32).to(torch.bfloat16)


_WORD = (1 << 32) - 1


def _hash_words(x: Tensor) -> Tensor:
    """Hash of int64 words of 32 bits. The factor is below 2^27, so no product overflows."""
    for _ in range(2):
        x = ((x ^ (x >> 16)) & _WORD).mul_(0x45D9F3B).bitwise_and_(_WORD)
    return x ^ (x >> 16)


def _scales(at: slice) -> slice:
    return slice(at.start // BLOCK, at.stop // BLOCK)


def _torchao_tensor(codes: Tensor, scale: Tensor, signed: bool) -> Any:
    """Tensor of torchao on the given codes and scales. Writing to it changes them.

    Args:
        codes: [N] uint8.
        scale: [N / BLOCK] float32.
        signed: whether the numbers have a sign.
    """
    form, values = _torchao()
    return form(codes, scale, values(signed, codes.device), signed, torch.float32)


@cache
def _torchao() -> tuple[Any, Any]:
    """Class of 8-bit state, and a function that returns the values of its codes."""
    from torchao.optim.quant_utils import create_dynamic_map
    from torchao.optim.subclass_8bit import OptimState8bit

    @cache
    def values(signed: bool, device: torch.device) -> Tensor:
        return torch.tensor(create_dynamic_map(signed=signed), device=device)

    return OptimState8bit, values
