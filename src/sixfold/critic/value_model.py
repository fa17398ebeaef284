"""Value models: V of the state before a token, run on packed rows. There are three kinds:

  own       transformers' token-classification class of the policy's architecture, with one label:
            a copy of the policy's body under a value head
  adapter   a LoRA adapter of its own on the policy's frozen base, under a value head. The weights
            of the base exist once. `critic.body = "own"` gives this form if the policy has an
            adapter
  policy    a value head alone, on the policy's last hidden states. The body gets no gradient from
            it, so it cannot change the policy.

All heads start at zero: before the first update every value is exactly 0, and advantages are those
without a critic. The value of token t is read where its log-prob is read, at the hidden state of
t - 1: a baseline for a token must not have seen that token.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..errors import UserError
from ..model.attention import NAME
from ..model.trained_lora import TrainedLora, file_name
from ..trainer.logprobs import PolicyRoot, ScalarRoot, read_states


class PolicyValueHead(nn.Module):
    """A linear value head for the policy's last hidden states. Only the head has parameters."""

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.score = nn.Linear(
            policy.get_output_embeddings().weight.shape[-1], 1, device=policy.device
        )
        _zero(self.score)


class AdapterValueModel(nn.Module):
    """A value head on a body with an adapter of its own. Only head and adapter are trained.

    Args:
        lora: the adapter, which nothing else trains, and its frozen base.
    """

    def __init__(self, lora: TrainedLora) -> None:
        super().__init__()
        self.lora = lora
        self.body = lora.model
        width = lora.base.get_output_embeddings().weight.shape[-1]
        self.score = nn.Linear(width, 1, device=lora.base.device)
        _zero(self.score)

    def save(self, folder: Path, trained: Mapping[str, Tensor]) -> None:
        """Write adapter and head in PEFT's format, for a token-classification model of the base.

        Args:
            folder: is made if it does not exist.
            trained: whole tensors of the trained parameters, by their names in this module.
        """
        head = _head_name(self.body.config)
        inside = {n.removeprefix("body."): t for n, t in trained.items()}
        weights = {
            file_name(n.replace("score", head, 1) if n.startswith("score") else n): t
            for n, t in inside.items()
        }
        folder.mkdir(exist_ok=True)
        task = {"task_type": "TOKEN_CLS", "modules_to_save": [head]}
        self.lora.save(folder, weights, task)


ValueModel = PreTrainedModel | AdapterValueModel | PolicyValueHead
"""A token-classification model with one label, a body with an adapter, or a head on the policy."""


def make_value_root(
    policy: PolicyRoot,
    body: Literal["own", "policy"],
    whole: PreTrainedModel | None = None,
    lora: TrainedLora | None = None,
) -> ScalarRoot:
    """The value model that `critic.body` names, as a root.

    Args:
        policy: the policy.
        body: "own" or "policy".
        whole: the policy in one piece, if `policy` is sharded.
        lora: the policy's adapter. "own" copies it. None: all weights of the policy are trained.

    Raises:
        UserError: for "own" without an adapter, if transformers has no suitable class for the
            policy's architecture.
    """
    if body == "own" and lora is not None:
        adapted = AdapterValueModel(lora.copied())
        return ScalarRoot(adapted, adapted.score, partial(read_states, adapted.body))
    if body == "own":
        model = own_value_model(whole or policy.model)
        return ScalarRoot(model, value_head(model), partial(read_states, model))
    head = PolicyValueHead(policy.model)
    # no_grad: the body gets no gradient from the head.
    return ScalarRoot(head, head.score, torch.no_grad()(policy.states))


def value_head(model: ValueModel) -> nn.Linear:
    """The head: the only linear layer beside the body.

    It is called `score` in most token-classification classes and `classifier` in GPT-2 and related
    models.
    """
    (head,) = [child for child in model.children() if isinstance(child, nn.Linear)]
    return head


def own_value_model(policy: PreTrainedModel) -> PreTrainedModel:
    """Token-classification model of the policy's architecture.

    Its body weights are copied, its head is zero, and it runs in evaluation mode with Sixfold's
    attention function.
    """
    config = _one_value_without_dropout(policy.config)
    if type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        raise _unsupported_error(policy, "transformers has no token-classification class for it")
    # The random weights are all overwritten, so the run's random state must not advance.
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForTokenClassification.from_config(
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
        raise _unsupported_error(
            policy, f"{type(model).__name__} is not the same body under one linear head"
        )
    model.base_model.load_state_dict(policy.base_model.state_dict())
    _zero(value_head(model))
    return model.to(policy.device).eval()


def _one_value_without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """Copy of the policy's configuration with one label and every dropout 0."""
    config = copy.deepcopy(config)
    config.num_labels = 1
    for key, value in vars(config).items():
        if key.endswith(("dropout", "pdrop")) and isinstance(value, float):
            setattr(config, key, 0.0)
    # Set it even where the configuration lacks it: token-classification classes default a missing
    # value to 0.1, and values of one state would then vary.
    config.classifier_dropout = 0.0
    return config


def _head_name(config: PreTrainedConfig) -> str:
    """Name of the head in the token-classification class of an architecture, if there is one."""
    config = _one_value_without_dropout(config)
    if type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        return "score"
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = AutoModelForTokenClassification.from_config(config)
    (name,) = [name for name, child in model.named_children() if isinstance(child, nn.Linear)]
    return name


def _unsupported_error(policy: PreTrainedModel, why: str) -> UserError:
    return UserError(
        f"critic.body = 'own': no value model for {type(policy).__name__} ({why}); use critic.body"
        " = 'policy'"
    )


@torch.no_grad()
def _zero(head: nn.Linear) -> None:
    for p in head.parameters():
        p.zero_()
