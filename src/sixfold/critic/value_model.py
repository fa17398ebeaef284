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

from ..model.scalar_head import one_label_without_dropout, scalar_head, with_scalar_head, zero
from ..model.trained_lora import TrainedLora, file_name
from ..trainer.logprobs import PolicyRoot, ScalarRoot, read_states


class PolicyValueHead(nn.Module):
    """A linear value head for the policy's last hidden states. Only the head has parameters."""

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.score = nn.Linear(
            policy.get_output_embeddings().weight.shape[-1], 1, device=policy.device
        )
        zero(self.score)


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
        zero(self.score)

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


def make_value_root(
    policy: PolicyRoot,
    body: Literal["own", "policy"],
    whole: PreTrainedModel | None = None,
    lora: TrainedLora | None = None,
) -> ScalarRoot:
    """The value model that `critic.body` names, as a root.

    Args:
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
        return ScalarRoot(model, scalar_head(model), partial(read_states, model))
    head = PolicyValueHead(policy.model)
    # no_grad: the body gets no gradient from the head.
    return ScalarRoot(head, head.score, torch.no_grad()(policy.states))


def own_value_model(policy: PreTrainedModel) -> PreTrainedModel:
    """Token-classification model of the policy's architecture, with a head of zeros."""
    return with_scalar_head(
        policy, "token", "critic.body = 'own': no value model for {}; use critic.body = 'policy'"
    )


def _head_name(config: PreTrainedConfig) -> str:
    """Name of the head in the token-classification class of an architecture, if there is one."""
    config = one_label_without_dropout(config)
    if type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        return "score"
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = AutoModelForTokenClassification.from_config(config)
    (name,) = [name for name, child in model.named_children() if isinstance(child, nn.Linear)]
    return name
