"""Optimizer state as named tensors, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..checkpointable import tensor_form
from ..errors import UserError
from .lean_adamw import LeanAdamW
from .sharded import own_part, place


def optimizer_tensors(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """State of an Adam-like optimizer as flat tensors named `optimizer/exp_avg/NAME` and so on.

    The tensors are the live ones, not copies. A parameter that never had a gradient has no moments:
    only `optimizer/step/NAME` = 0 is recorded. The learning rate and similar values are not state:
    they are derived from the recipe and the step.
    """
    tensors = {}
    for name, parameter in _numbered_parameters(optimizer, model).items():
        for key, value in (optimizer.state.get(parameter) or {"step": torch.zeros(())}).items():
            of_all = value if key == "step" else _of_all_ranks(value, parameter)
            tensors[f"optimizer/{key}/{name}"] = of_all
    return tensors


def _of_all_ranks(part: Tensor, parameter: Tensor) -> Tensor:
    """A state tensor as one of all ranks, if the parameter is sharded and `part` is this rank's.

    Memory is shared with `part`. Its first dimension is sharded as the parameter's.
    """
    if isinstance(part, DTensor) or not isinstance(parameter, DTensor):
        return part
    own = own_part(parameter)
    rows = len(parameter)
    if len(part) != len(own):  # scales of blocks that are not rows: all parts are equally large
        rows = len(part) * parameter.numel() // own.numel()
    form = torch.empty(rows, *part.shape[1:], device="meta")
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=form.shape,
        stride=form.stride(),
    )


def load_optimizer_tensors(
    optimizer: Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]
) -> None:
    """Inverse of `optimizer_tensors`, bit for bit.

    Args:
        tensors: state to copy, as `optimizer_tensors` returned it.

    Raises:
        UserError: if names, shapes or types do not match the model. Nothing has been changed then.
    """
    saved: dict[str, dict[str, Tensor]] = {}
    for flat_name, tensor in tensors.items():
        prefix, key, name = (*flat_name.split("/", 2), "", "")[:3]
        if prefix != "optimizer":
            raise UserError(f"tensor '{flat_name}' is in the checkpoint but not in the run")
        saved.setdefault(name, {})[key] = tensor
    optimized = _numbered_parameters(optimizer, model)
    _require_same_model(saved, {n: _forms(optimizer, p) for n, p in optimized.items()})
    if isinstance(optimizer, LeanAdamW):
        optimizer.state.clear()
        for name, parameter in optimized.items():
            if saved[name]["step"] > 0:
                optimizer.state[parameter] = _fill(
                    optimizer.new_state(parameter), saved[name], parameter
                )
        return
    state_dict, parameters = optimizer.state_dict(), list(optimized.values())
    numbered = {i: saved[name] for i, name in enumerate(optimized) if saved[name]["step"] > 0}
    state_dict["state"] = {
        i: {
            key: (tensor if key == "step" else place(parameters[i], tensor)).clone()
            for key, tensor in state.items()
        }
        for i, state in numbered.items()
    }
    optimizer.load_state_dict(state_dict)


def _numbered_parameters(optimizer: Optimizer, model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by name, in the order in which the optimizer numbers them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def _forms(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Tensors that have the shapes and dtypes of a parameter's state, by name."""
    if isinstance(optimizer, LeanAdamW):
        return optimizer.state_form(parameter)
    return {"step": torch.zeros(()), "exp_avg": parameter, "exp_avg_sq": parameter}


def _fill(
    state: dict[str, Tensor], saved: Mapping[str, Tensor], parameter: Tensor
) -> dict[str, Tensor]:
    """Copy the saved values into a new state. A rank keeps its part. Returns the state."""
    for key, tensor in state.items():
        if key == "step":
            tensor.copy_(saved[key])
        else:
            tensor.copy_(own_part(place(_of_all_ranks(tensor, parameter), saved[key])))
    return state


def _require_same_model(
    saved: Mapping[str, Mapping[str, Tensor]], forms: Mapping[str, Mapping[str, Tensor]]
) -> None:
    for name, own in forms.items():
        for key, tensor in saved.get(name, {}).items():
            if key not in own:
                continue  # the state of another optimizer: reported below
            if (tensor.shape, tensor.dtype) != (own[key].shape, own[key].dtype):
                raise UserError(
                    f"checkpoint is for a different model: {name}"
                    f" {tensor_form(tensor)} vs {tensor_form(own[key])}"
                )
    for name in sorted(saved.keys() ^ forms.keys()):
        where = (
            "in the checkpoint but not in the model"
            if name in saved
            else "in the model but not in the checkpoint"
        )
        raise UserError(f"checkpoint is for a different model: {name} is {where}")
    for name, state in saved.items():
        never_moved = "step" in state and not state["step"] > 0
        if state.keys() != forms[name].keys() and not (never_moved and state.keys() == {"step"}):
            raise UserError(
                f"checkpoint is for a different optimizer: it has {', '.join(sorted(state))} of"
                f" {name}"
            )
