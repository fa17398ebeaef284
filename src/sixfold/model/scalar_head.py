"""A model with one linear head of one output: the body of a causal LM under transformers' class for
token or for sequence classification.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..errors import UserError
from .attention import NAME

Reading = Literal["token", "sequence"]
"""What transformers' class gives a number to: each token, or a whole sequence."""

_CLASSES: dict[str, tuple[Any, Any]] = {
    "token": (MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoModelForTokenClassification),
    "sequence": (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification),
}


def with_scalar_head(
    policy: PreTrainedModel, reading: Reading, refusal: str, *, same_body: bool = False
) -> PreTrainedModel:
    """Model with the architecture of a causal LM, in transformers' classification class.

    Its body weights are copied, its head is zero, and it runs in evaluation mode with Sixfold's
    attention function.

    Args:
        refusal: what is refused if there is no such class, and the remedy, around "{}" for why.
        same_body: the body is that of the policy itself, not a copy.

    Raises:
        UserError: if transformers has no suitable class for the architecture.
    """
    config = one_label_without_dropout(policy.config)
    known, make = _CLASSES[reading]
    said = f"{type(policy).__name__} ({{}})"
    if type(config) not in known:
        why = f"transformers has no {reading}-classification class for it"
        raise UserError(refusal.format(said.format(why)))
    # The random weights are all overwritten, so the run's random state must not advance.
    where = torch.device("meta") if same_body else nullcontext()
    with torch.random.fork_rng(devices=[]), where:
        model: PreTrainedModel = make.from_config(
            config,
            # At least float32: bfloat16 cannot represent small differences between values.
            dtype=torch.promote_types(policy.dtype, torch.float32),
            attn_implementation=NAME,
        )
    between = [
        child
        for child in model.children()
        if child is not model.base_model and not isinstance(child, nn.Dropout)
    ]
    if type(model.base_model) is not type(policy.base_model) or [
        type(child) for child in between
    ] != [nn.Linear]:
        why = f"{type(model).__name__} is not the same body under one linear head"
        raise UserError(refusal.format(said.format(why)))
    if same_body:
        setattr(model, model.base_model_prefix, policy.base_model)
        scalar_head(model).to_empty(device=policy.device)
    else:
        model.base_model.load_state_dict(policy.base_model.state_dict())
    zero(scalar_head(model))
    return model.to(policy.device).eval()  # type: ignore[arg-type]


def scalar_head(model: nn.Module) -> nn.Linear:
    """The head: the only linear layer beside the body.

    It is called `score` in most classes and `classifier` in the token classification of GPT-2 and
    related models.
    """
    (head,) = [child for child in model.children() if isinstance(child, nn.Linear)]
    return head


@torch.no_grad()
def check_causal(model: PreTrainedModel, where: str) -> None:
    """Refuse a model in which a token changes the hidden states of those before it.

    Sixfold computes tokens from left to right, so it would give such a model other scores.

    Args:
        model: with transformers' own attention.
        where: name of the model, for error messages.

    Raises:
        UserError: if it is no causal decoder.
    """
    body: Any = model.base_model
    last = model.get_input_embeddings().weight.shape[0] - 1  # type: ignore[union-attr]
    ids = torch.tensor([[0, 1, 0, last], [0, 1, 0, last - 1]], device=model.device)
    one, other = body(input_ids=ids).last_hidden_state[:, :3]
    if not one.isfinite().all():
        raise UserError(f"{where}: its weights are not finite")
    if not torch.allclose(one, other, rtol=1e-3, atol=1e-4):
        raise UserError(
            f"{where}: {type(model).__name__} is no causal decoder: tokens read those after them."
            " Sixfold scores with decoders alone, such as LlamaForSequenceClassification"
        )


def one_label_without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """Copy of a causal LM's configuration with one label and every dropout 0."""
    config = copy.deepcopy(config)
    config.num_labels = 1
    for key, value in vars(config).items():
        if key.endswith(("dropout", "pdrop")) and isinstance(value, float):
            setattr(config, key, 0.0)
    # Set it even where the configuration lacks it: token-classification classes default a missing
    # value to 0.1, and values of one state would then vary.
    config.classifier_dropout = 0.0
    return config


@torch.no_grad()
def zero(head: nn.Linear) -> None:
    """Set a head to zero, so that every output is exactly 0."""
    for p in head.parameters():
        p.zero_()
