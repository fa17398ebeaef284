"""LoRA adapters that are trained (Hu et al. 2021, arXiv:2106.09685).

There are two modules on the same base weights. PEFT puts the adapter into one of them, which is
trained. The other stays as it was loaded, for the engine and the reference. So the weights of the
base exist once. The adapter's settings and files are PEFT's: PEFT, vLLM and transformers load them.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import UserError
from ..recipe.adapter_folder import BASE, CONFIG, WEIGHTS, Base, is_adapter, trained_on
from ..recipe.dump import toml_literal
from ..recipe.schema import LoraConfig
from .lora import LoraAdapter, make_adapter, read_files
from .lora_targets import import_peft, target_modules
from .merge import MergedWeights
from .nf4 import Nf4Linear, store_in_nf4
from .shared_module import shared_copy

NAME = "default"
"""Name of the adapter inside PEFT's modules."""
PREFIX = "base_model.model."
"""Prefix of the names of weights in PEFT's files."""


@dataclass(frozen=True)
class TrainedLora:
    """A trained adapter and its base.

    Attributes:
        model: the module that contains the adapter. Only the adapter requires gradients.
        base: the module without the adapter. All its parameters are shared with `model`.
        layers: name of a linear module -> PEFT's module that replaces it in `model`.
        origin: where the base was loaded from.
    """

    model: PreTrainedModel
    base: PreTrainedModel
    layers: Mapping[str, Any]
    config: LoraConfig
    origin: Base
    peft_config: Any

    def weights(self) -> dict[str, nn.Parameter]:
        """Trained parameters, by their names in PEFT's files."""
        return {file_name(name): p for name, p in self.model.named_parameters() if is_lora(name)}

    def adds_nothing(self) -> bool:
        """True while the adapter changes no output: before the first update, B is 0.

        Always False for DoRA, whose rescaling is not checked.

        If the matrices are sharded, all ranks must call this at the same time.
        """
        ups = [_whole(layer.lora_B[NAME].weight) for layer in self.layers.values()]
        return not self.config.dora and not any(bool(up.any()) for up in ups)

    @torch.no_grad()
    def adapter(self) -> LoraAdapter:
        """The current matrices of the adapter. `up` is a scaled copy, `down` the live parameter.

        If the matrices are sharded, all ranks must call this at the same time.
        """
        scale = self.config.scale
        layers, magnitudes = {}, {}
        for name, layer in self.layers.items():
            down, up = _whole(layer.lora_A[NAME].weight), _whole(layer.lora_B[NAME].weight)
            layers[name] = (down, up * scale)
            if self.config.dora:
                magnitudes[name] = _whole(layer.lora_magnitude_vector[NAME].weight)
        return LoraAdapter(layers, magnitudes)

    @torch.no_grad()
    def copied(self) -> TrainedLora:
        """Make a copy of the current adapter, in another module on the same base weights.

        The copy is whole on each rank. If the adapter is sharded, all ranks must call this.
        """
        other = add_lora(self.base, self.config, self.origin, seed=0)
        own = self.weights()
        for name, p in other.weights().items():
            p.copy_(_whole(own[name]))
        return other

    def merged(self) -> MergedWeights:
        return MergedWeights(self.base, self.adapter())

    def save(
        self,
        folder: Path,
        weights: Mapping[str, Tensor] | None = None,
        changes: Mapping[str, object] | None = None,
    ) -> None:
        """Write the adapter in PEFT's format, and `base.json`.

        Args:
            weights: tensors to write, by the names in `weights()`. None: the current weights.
            changes: PEFT settings that replace those of the adapter of a causal LM.
        """
        run = folder.resolve().parents[min(2, len(folder.resolve().parents) - 1)]
        inside = self.origin.sha256 and Path(self.origin.path).is_relative_to(run)
        beside = os.path.relpath(self.origin.path, folder) if inside else ""
        config = self.peft_config.to_dict() | {
            "base_model_name_or_path": self.origin.path,
            "revision": self.origin.revision or None,
            "inference_mode": True,
            **(changes or {}),
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=2, default=sorted) + "\n")
        tensors = {name: p.detach().contiguous() for name, p in (weights or self.weights()).items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        self.model.generation_config.save_pretrained(folder)
        rounded = "nf4" if self.config.base == "nf4" else ""
        base = {"path": beside, "sha256": self.origin.sha256, "rounded": rounded}
        (folder / BASE).write_text(json.dumps(base, indent=2) + "\n")


def _whole(p: nn.Parameter) -> Tensor:
    """The values of a parameter, gathered from all ranks if it is sharded."""
    return p.full_tensor().detach() if isinstance(p, DTensor) else p.detach()


def is_lora(name: str) -> bool:
    return f".{NAME}" in name and ".lora_" in name


def file_name(name: str) -> str:
    """Name of an adapter's parameter in PEFT's files."""
    plain = name.replace(f".{NAME}", "")
    # In earlier releases of PEFT a magnitude was a parameter, not a module. Files keep that name.
    return PREFIX + (plain.removesuffix(".weight") if "magnitude" in plain else plain)


def add_lora(
    model: PreTrainedModel, config: LoraConfig, origin: Base, seed: int, path: str = ""
) -> TrainedLora:
    """Make a second module on the weights of the model, and put an adapter into it.

    The adapter is new, or a saved one. A new adapter leaves the outputs unchanged.

    Args:
        model: the model without an adapter. It is frozen and becomes the base.
        origin: where the model was loaded from.
        path: folder of a saved adapter, whose weights are loaded. Any other path is ignored.

    Raises:
        UserError: PEFT is not installed, or a target or the saved adapter does not fit the model.
    """
    peft = import_peft()
    names = target_modules(model, config)
    model.requires_grad_(False)
    peft_config = peft.LoraConfig(
        r=config.rank,
        lora_alpha=int(config.alpha) if config.alpha.is_integer() else config.alpha,
        # Full names: by short names PEFT would also adapt stacked experts, which engines do not.
        target_modules=names,
        use_rslora=config.rslora,
        use_dora=config.dora,
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=isinstance(model.get_submodule(names[0]), Conv1D),
        task_type="CAUSAL_LM",
    )
    trained = shared_copy(model)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns about tied embeddings, which get no adapter
        torch.manual_seed(seed % 2**63)
        peft.inject_adapter_in_model(peft_config, trained, NAME)
    trained.eval()
    for name, p in trained.named_parameters():
        p.requires_grad_(is_lora(name))
        if is_lora(name):
            p.data = p.data.float()  # PEFT gives adapters the dtype of the base
    layers = {name: trained.get_submodule(name) for name in names}
    made = {n.partition(".lora_")[0] for n, _ in trained.named_parameters() if is_lora(n)}
    if made != layers.keys():
        raise UserError(
            f"model.lora.targets = {list(config.targets)}: PEFT also puts adapters on"
            f" {min(made ^ layers.keys())}, which is not supported. Name other modules"
        )
    lora = TrainedLora(trained, model, layers, config, origin, peft_config)
    if path and is_adapter(path):
        _load(lora, path)
    return lora


def check_adapter(model: PreTrainedModel, config: LoraConfig) -> None:
    """Check that `add_lora` can put a new adapter into the model later.

    Raises:
        UserError: PEFT is not installed, or a target or the rank does not fit the model.
    """
    import_peft()
    target_modules(model, config)


@torch.no_grad()
def _load(lora: TrainedLora, path: str) -> None:
    """Copy the weights of a saved adapter into the trained one.

    Raises:
        UserError: the saved adapter has other settings than the recipe, or does not fit the model.
    """
    saved, tensors = read_files(path)
    make_adapter(lora.base, saved, tensors, f"adapter '{path}'")  # checks it
    config = lora.config
    asked = {
        "rank": (saved["r"], config.rank),
        "alpha": (saved["lora_alpha"], config.alpha),
        "rslora": (bool(saved.get("use_rslora")), config.rslora),
        "dora": (bool(saved.get("use_dora")), config.dora),
    }
    for name, (theirs, ours) in asked.items():
        if theirs != ours:
            own_value, value = toml_literal(ours), toml_literal(theirs)
            raise UserError(
                f"model.lora.{name} = {own_value}, but the adapter '{path}' has {value}. Set it to"
                f" {value}, or use model.lora.rank = 0 to train the merged weights"
            )
    rounded = trained_on(path)
    if rounded is not None and (config.base == "nf4") != (rounded == "nf4"):
        theirs = f"rounded to '{rounded}'" if rounded else "that was not rounded"
        raise UserError(
            f"model.lora.base = '{config.base}', but the adapter '{path}' was trained on a base"
            f" {theirs}. Use the base that it was trained on, or model.lora.rank = 0 to train the"
            " merged weights"
        )
    own = lora.weights()
    if other := sorted(own.keys() ^ tensors.keys()):
        where = "only in the adapter" if other[0] in tensors else "not in the adapter"
        raise UserError(
            f"model.lora.targets = {list(config.targets)} do not fit the adapter '{path}':"
            f" {other[0]} is {where}. Name the modules that the adapter has"
        )
    for name, p in own.items():
        p.copy_(tensors[name])


def lower_linears(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Store the weights of all linear modules in `dtype`, in place.

    This includes the output head, unless it is tied to the embedding. Embeddings and norms keep
    their dtype. Under autocast to `dtype` no bit of a result changes, because autocast would cast
    the same weights.
    """
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for weight in _linear_weights(model):
        if id(weight) not in tied:
            weight.data = weight.data.to(dtype)


def lower_base(model: PreTrainedModel, base: str) -> None:
    """Store a frozen base in the precision `model.lora.base`, in place.

    Raises:
        UserError: if its linear modules cannot be stored in NF4.
    """
    if base == "nf4":
        store_in_nf4(model)
    if base != "float32":
        lower_linears(model, torch.bfloat16)


def _linear_weights(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D) and not isinstance(module, Nf4Linear):
            yield module.weight  # type: ignore[misc]
