"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685) for the engine: PEFT's files, and how a Hugging Face module adds an adapter's part.

The additions are made by hooks that are on the module only while such a forward runs: without adapters there is nothing to pay, and the trainer, who
may share the module, never meets them. Nobody else may run the module meanwhile, as nobody may anyway while a step computes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import UserError, nearest
from .base import LayerAdditions

KEY = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")

READ = {"peft_type", "r", "lora_alpha", "use_rslora", "init_lora_weights"}
NO_MATTER = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "runtime_config"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),  # the weights' names say it
    *("lora_dropout", "fan_in_fan_out", "eva_config", "megatron_core", "qalora_group_size"),
}
"""Settings of PEFT that change nothing in a forward of given weights. Any other must be off: it would change what is computed."""
UNCHANGED_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to begin that leave the base as it is. The others subtract from it what the adapter begins with."""


LARGEST_ALPHA = 1e6
"""Beyond this a float32 product overflows long before an adapter could be meant so."""


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """layers: name of a linear module -> (down [r, in], up [out, r] with the scale in it): the module's output grows by up @ (down @ x)."""

    layers: Mapping[str, tuple[Tensor, Tensor]]


def read_adapter(path: str, model: PreTrainedModel) -> LoraAdapter:
    """An adapter folder as PEFT saves it, made ready for `model`. Raises UserError for what cannot be read, is not supported or does not fit."""
    folder, where = Path(path).expanduser(), f"adapter '{path}'"
    missing = [name for name in ("adapter_config.json", "adapter_model.safetensors") if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{where} has no {missing[0]}: give a folder that PEFT saved (safetensors; pickle files can run code and are not read)")
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{where} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{where}: adapter_config.json does not hold an object")
    return make_adapter(model, config, tensors, where)


def make_adapter(model: PreTrainedModel, config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> LoraAdapter:
    """The same from PEFT's settings and weights, by the names that its files have. where: begins the error messages."""
    rank, scale = _rank_and_scale(config, where)
    sides: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        found = KEY.fullmatch(key)
        if found is None:
            raise UserError(f"{where}: '{key}' is not supported; only the two matrices of linear layers are (lora_A and lora_B)")
        sides.setdefault(found["layer"], {})[found["side"]] = tensor
    if not sides:
        raise UserError(f"{where} holds no weights")
    modules = dict(model.named_modules())
    layers = {}
    for name, pair in sides.items():
        if name not in modules:
            raise UserError(f"{where}: the model has no layer '{name}'.{nearest(name, list(modules))}")
        weight = _weight(model, name, modules[name], where)
        wanted = {"A": [rank, weight[0]], "B": [weight[1], rank]}
        for side, shape in wanted.items():
            if side not in pair or list(pair[side].shape) != shape or not bool(pair[side].isfinite().all()):
                given = list(pair[side].shape) if side in pair else "missing"
                raise UserError(f"{where}: lora_{side} of '{name}' is {given}; a finite {shape} is needed")
        like = modules[name].weight
        down, up = pair["A"].to(like.device, like.dtype), (pair["B"].float() * scale).to(like.device, like.dtype)  # type: ignore[arg-type]
        layers[name] = (down, up)
    return LoraAdapter(layers)


def _rank_and_scale(config: Mapping[str, Any], where: str) -> tuple[int, float]:
    if config.get("peft_type") != "LORA":
        raise UserError(f"{where} is of the kind {config.get('peft_type')}, not LORA")
    for key, value in config.items():
        if key not in READ | NO_MATTER and value and value != "none":
            raise UserError(f"{where}: {key} = {value!r} is not supported; plain LoRA on linear layers is")
    begun = config.get("init_lora_weights")
    if begun not in UNCHANGED_BASE:
        raise UserError(f"{where}: init_lora_weights = {begun!r} changes the base model too; convert it to plain LoRA (PEFT's save_pretrained can)")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    # JSON has true and false, and Python's reader takes NaN and Infinity too.
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise UserError(f"{where}: adapter_config.json has r = {rank!r}; a whole number of at least 1 is needed")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= LARGEST_ALPHA:
        raise UserError(f"{where}: adapter_config.json has lora_alpha = {alpha!r}; a finite number is needed")
    return rank, alpha / rank**0.5 if config.get("use_rslora") else alpha / rank


def _weight(model: PreTrainedModel, name: str, layer: nn.Module, where: str) -> tuple[int, int]:
    """(inputs, outputs) of a layer that can be added to."""
    if layer is model.get_output_embeddings() or "experts" in name.split(".") or not isinstance(layer, nn.Linear | Conv1D):
        raise UserError(f"{where}: '{name}' ({type(layer).__name__}) is not supported; linear layers of attention and MLP are")
    outputs, inputs = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.T.shape
    return inputs, outputs


@contextmanager
def added(model: nn.Module, additions: LayerAdditions) -> Iterator[None]:
    """While it lasts, the model's layers give what they give and the additions."""

    def add(name: str, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        additions.add(name, inputs[0].flatten(0, -2), output.view(-1, output.shape[-1]))

    handles = [model.get_submodule(name).register_forward_hook(partial(add, name)) for name in additions.layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
