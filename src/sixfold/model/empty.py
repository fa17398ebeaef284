"""A model of the same architecture as another one, from its configuration alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from .attention import NAME, register


@dataclass(frozen=True)
class Architecture:
    """What a process needs to build a model with the same parameters.

    Attributes:
        config: its configuration in Hugging Face format.
        parameters: names of its parameters, in order.
    """

    name: str
    config: dict[str, Any]
    parameters: list[str]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Architecture:
        config = json.loads(model.config.to_json_string(use_diff=False))
        name = type(model).__name__.removeprefix("FSDP")  # `fully_shard` changes the class
        return cls(name, config, [name for name, _ in model.named_parameters()])

    def build(self, remedy: str) -> PreTrainedModel:
        """The model with random weights, frozen.

        Args:
            remedy: what to set if that is not possible, for the message.

        Raises:
            ValueError: if its class or its parameters are others.
        """
        register()
        config = AutoConfig.for_model(**self.config)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        names = [name for name, _ in model.named_parameters()]
        if type(model).__name__ != self.name or names != self.parameters:
            raise ValueError(f"{self.name} cannot be built from its configuration: set {remedy}")
        model.set_attn_implementation(NAME)
        return model.requires_grad_(False).eval()


@torch.no_grad()
def copy_buffers(model: PreTrainedModel, buffers: Mapping[str, Tensor]) -> None:
    """Overwrite the buffers of a model, such as rotary frequencies, that are given by name."""
    for name, buffer in model.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])
