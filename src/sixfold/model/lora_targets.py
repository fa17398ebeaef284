"""Choose the linear modules of a model that get an adapter."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import UserError, nearest
from ..recipe.schema import ALL_LINEAR, LoraConfig
from .lora import linear_sizes, takes_adapter


def target_modules(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Names of the modules that get an adapter.

    `all-linear` leaves out modules whose adapters PEFT or the engine does not support: the head,
    stacked experts, and gates with a single output.

    Raises:
        UserError: a target is unknown or not supported, or the rank is larger than a module.
    """
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    taken = _taken_for_experts(model, list(linear))
    names = [
        n
        for n, m in linear.items()
        if takes_adapter(model, n, m) and n not in taken and _outputs(m) > 1
    ]
    if config.targets != (ALL_LINEAR,):
        for target in config.targets:
            _check_target(model, target, list(linear), names)
        names = [n for n in linear if any(_is_at(n, target) for target in config.targets)]
    if not names:
        raise UserError(
            f"model.lora.targets = {list(config.targets)}: {type(model).__name__} has no linear"
            " modules. Train all weights: model.lora.rank = 0"
        )
    for name in names:
        sizes = linear_sizes(model, name, linear[name], "model.lora.targets")
        if name in taken:
            raise UserError(
                f"model.lora.targets = {list(config.targets)}: PEFT would put an adapter on the"
                f" stacked experts instead of '{name}', which is not supported. Name other modules"
            )
        if config.rank > min(sizes):
            raise UserError(
                f"model.lora.rank = {config.rank} is larger than '{name}', which has"
                f" {sizes[0]} inputs and {sizes[1]} outputs. Use at most {min(sizes)}"
            )
    return names


def _taken_for_experts(model: PreTrainedModel, names: Sequence[str]) -> set[str]:
    """Names that PEFT mistakes for modules of the model's stacked experts.

    In transformers 5 the weights of experts are stacked; in earlier releases each expert had linear
    modules. So PEFT replaces targets such as `mlp.down_proj` by the stacked weights, even if a
    dense layer has a module of this name.
    """
    peft = import_peft()
    convert = importlib.import_module(
        "peft.utils.transformers_weight_conversion"
    ).convert_peft_config_for_transformers
    taken = set()
    for name in names:
        alone = peft.LoraConfig(target_modules=[name])
        try:
            convert(alone, model, None)
        except ValueError:  # a part of fused weights, which PEFT only adapts as a whole
            taken.add(name)
        else:
            if name not in alone.target_modules:
                taken.add(name)
    return taken


def _outputs(layer: nn.Linear | Conv1D) -> int:
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.weight.shape[1])


def _check_target(
    model: PreTrainedModel, target: str, linear: list[str], proposed: list[str]
) -> None:
    """Raise UserError if no linear module has the name."""
    if any(_is_at(name, target) for name in linear):
        return
    known = sorted({name.rpartition(".")[2] for name in proposed})
    others = [m for n, m in model.named_modules() if _is_at(n, target)]
    what = f"is a module of class {type(others[0]).__name__}" if others else "is no module"
    raise UserError(
        f"model.lora.targets: '{target}' {what} of {type(model).__name__}."
        f"{nearest(target, known)} Use some of {', '.join(known)}"
    )


def _is_at(name: str, target: str) -> bool:
    """True if `target` is the name of a module, or the end of it after a dot."""
    return name == target or name.endswith(f".{target}")


def import_peft() -> Any:
    """Import and return the module `peft`.

    Raises:
        UserError: if it is not installed.
    """
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise UserError(
            "model.lora needs PEFT, which is not installed. Install it: pip install"
            " 'sixfold[lora]', or set model.lora.rank = 0"
        ) from error
