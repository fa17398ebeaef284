"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685) for the engine.

This file reads PEFT's files and adds an adapter's output to a Hugging Face module.

Forward hooks add the output. They are on the module only during a forward pass with adapters, so a
forward pass without adapters costs nothing extra. The trainer may share the module and never sees
the hooks. No other thread may run the module during such a forward pass, as during any engine step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import UserError, nearest
from ..recipe.adapter_folder import trained_on
from .base import LayerAdditions
from .nf4 import Nf4Linear

KEY = re.compile(
    r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>A\.weight|B\.weight|magnitude_vector)"
)

READ = {"peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "init_lora_weights"}
NO_MATTER = {
    *(
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "runtime_config",
    ),
    # The names of the weights already show which modules have an adapter.
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("lora_dropout", "fan_in_fan_out", "eva_config", "megatron_core", "qalora_group_size"),
}
"""PEFT settings that do not affect a forward pass with given weights.

Every other setting must be off: it would change the result.
"""
UNCHANGED_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base model unchanged.

The others subtract the adapter's initial product from the base weights.
"""


LARGEST_ALPHA = 1e6
"""Largest accepted `lora_alpha`. Larger values are a mistake: float32 products would overflow."""


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """Matrices of one LoRA adapter.

    Attributes:
        layers: name of a linear module -> (down [r, in], up [out, r]). up @ (down @ x) is added to
            the module's output. `up` contains the scale.
        magnitudes: name of a module -> length [out] of each row of its merged weight (DoRA,
            arXiv:2402.09353). Empty for plain LoRA. An engine cannot add such an adapter: merge it.
    """

    layers: Mapping[str, tuple[Tensor, Tensor]]
    magnitudes: Mapping[str, Tensor] = field(default_factory=dict)


def read_adapter(path: str, model: PreTrainedModel) -> LoraAdapter:
    """Load an adapter folder in PEFT's format, for an engine that adds it to `model`.

    Raises:
        UserError: the adapter cannot be read, is not supported or does not fit the model.
    """
    config, tensors = read_files(path)
    if rounded := trained_on(path):
        raise UserError(
            f"adapter '{path}' was trained on a base rounded to '{rounded}', so it does not fit"
            f" the base itself. Merge it: sixfold export {path} OUT --merge"
        )
    if config.get("use_dora"):
        raise UserError(
            f"adapter '{path}': use_dora = True is not supported beside other adapters. Merge it"
            f" into its base: sixfold export {path} OUT --merge"
        )
    return make_adapter(model, config, tensors, f"adapter '{path}'")


def read_files(path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Contents of adapter_config.json and adapter_model.safetensors.

    Raises:
        UserError: a file is missing or cannot be read.
    """
    folder, where = Path(path).expanduser(), f"adapter '{path}'"
    missing = [
        name
        for name in ("adapter_config.json", "adapter_model.safetensors")
        if not (folder / name).is_file()
    ]
    if missing:
        raise UserError(
            f"{where} has no {missing[0]}"
            f"{'' if folder.is_dir() else ' (there is no such folder)'}. Give a folder saved by"
            " PEFT with safetensors (pickle files can run code and are not read)"
        )
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(
            f"{where} cannot be read: {error}. Restore the folder, or save the adapter again"
        ) from error
    if not isinstance(config, dict):
        raise UserError(f"{where}: adapter_config.json must be a JSON object")
    return config, tensors


def make_adapter(
    model: PreTrainedModel, config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str
) -> LoraAdapter:
    """Make an adapter for `model` from the contents of PEFT's files.

    Args:
        tensors: weights by their names in adapter_model.safetensors.
        where: start of the error messages, for example "adapter 'PATH'".

    Raises:
        UserError: the adapter is not supported or does not fit the model.
    """
    rank, scale = _rank_and_scale(config, where)
    sides: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        found = KEY.fullmatch(key)
        if found is None or (found["side"][0] == "m" and not config.get("use_dora")):
            raise UserError(
                f"{where}: '{key}' is not supported. Use an adapter with only lora_A and lora_B"
                " of linear layers"
            )
        sides.setdefault(found["layer"], {})[found["side"][0]] = tensor
    if not sides:
        raise UserError(f"{where} has no weights. Save the adapter again")
    modules = dict(model.named_modules())
    layers, magnitudes = {}, {}
    for name, pair in sides.items():
        if name not in modules:
            raise UserError(
                f"{where}: the model has no layer '{name}'.{nearest(name, list(modules))}"
            )
        weight = linear_sizes(model, name, modules[name], where)
        wanted = {"A": [rank, weight[0]], "B": [weight[1], rank]}
        if config.get("use_dora"):
            wanted["m"] = [weight[1]]
        for side, shape in wanted.items():
            _check_side(
                f"{where}: lora_{_PARTS.get(side, side)} of '{name}'", pair.get(side), shape
            )
        like = modules[name].weight
        down, up = (
            pair["A"].to(like.device, like.dtype),
            (pair["B"].float() * scale).to(like.device, like.dtype),
        )  # type: ignore[arg-type]
        layers[name] = (down, up)
        if "m" in wanted:
            magnitudes[name] = pair["m"].to(like.device)  # type: ignore[arg-type]
    return LoraAdapter(layers, magnitudes)


def _rank_and_scale(config: Mapping[str, Any], where: str) -> tuple[int, float]:
    if config.get("peft_type") != "LORA":
        raise UserError(
            f"{where}: peft_type = {config.get('peft_type')} is not supported. Use LORA"
        )
    for key, value in config.items():
        if key not in READ | NO_MATTER and value and value != "none":
            raise UserError(
                f"{where}: {key} = {value!r} is not supported. Use plain LoRA on linear layers"
            )
    begun = config.get("init_lora_weights")
    if begun not in UNCHANGED_BASE:
        raise UserError(
            f"{where}: init_lora_weights = {begun!r} also changes the base model. Convert it to"
            " plain LoRA with PEFT's save_pretrained"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    # `isinstance(True, int)` holds in Python, and its JSON reader accepts NaN and Infinity.
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise UserError(
            f"{where}: adapter_config.json has r = {rank!r}, but r must be an integer of at least 1"
        )
    if (
        not isinstance(alpha, int | float)
        or isinstance(alpha, bool)
        or not abs(alpha) <= LARGEST_ALPHA
    ):
        raise UserError(
            f"{where}: adapter_config.json has lora_alpha = {alpha!r}, but lora_alpha must be a"
            " finite number"
        )
    return rank, alpha / rank**0.5 if config.get("use_rslora") else alpha / rank


_PARTS = {"m": "magnitude_vector"}


def _check_side(what: str, given: Tensor | None, shape: list[int]) -> None:
    """Check one tensor of an adapter."""
    if given is None:
        raise UserError(f"{what} is missing. Restore the folder, or save the adapter again")
    if list(given.shape) != shape:
        raise UserError(
            f"{what} has shape {list(given.shape)}, but the model and r need {shape}. Use the model"
            " that the adapter was trained on"
        )
    if not bool(given.isfinite().all()):
        raise UserError(
            f"{what} has values that are not finite. Use an earlier checkpoint of the adapter"
        )


def takes_adapter(model: PreTrainedModel, name: str, layer: nn.Module) -> bool:
    """True for a linear layer outside the experts that is not the output head.

    The routers of some models are subclasses of a linear layer, but return several tensors. They
    do not count as linear layers.
    """
    return (
        type(layer).forward in (nn.Linear.forward, Conv1D.forward, Nf4Linear.forward)
        and layer is not model.get_output_embeddings()
        and "experts" not in name.split(".")
    )


def linear_sizes(
    model: PreTrainedModel, name: str, layer: nn.Module, where: str
) -> tuple[int, int]:
    """Sizes (inputs, outputs) of a layer.

    Args:
        where: start of the error message: the setting or the adapter.

    Raises:
        UserError: if adapters on the layer are not supported.
    """
    if not takes_adapter(model, name, layer) or not isinstance(layer, nn.Linear | Conv1D):
        raise UserError(
            f"{where}: an adapter on '{name}' ({type(layer).__name__}) is not supported. Use"
            " linear layers of attention and MLP only"
        )
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    inputs, outputs = layer.weight.shape
    return inputs, outputs


@contextmanager
def added(model: nn.Module, additions: LayerAdditions) -> Iterator[None]:
    """Context in which the outputs of the model's layers include the additions."""

    def add(name: str, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        additions.add(name, inputs[0].flatten(0, -2), output.view(-1, output.shape[-1]))

    handles = [
        model.get_submodule(name).register_forward_hook(partial(add, name))
        for name in additions.layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
