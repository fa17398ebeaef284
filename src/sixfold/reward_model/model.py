"""Make, save and load reward models: transformers' sequence classifiers with one label."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..errors import UserError, one_line
from ..model.loading import Policy, use_own_kernels
from ..model.scalar_head import check_causal, scalar_head, with_scalar_head
from ..model.split_check import context_of
from ..model.stop_tokens import model_turn_end
from ..model.trained_lora import TrainedLora
from ..trainer.logprobs import ScalarRoot, read_states
from .calibration import Calibration
from .rows import Head

HEAD = "reward_head"
"""Key of config.json: "last" or "mean"."""


@dataclass(frozen=True)
class RewardModel:
    """A reward model with its tokenizer.

    Attributes:
        model: the sequence classifier, in evaluation mode with Sixfold's attention.
        tokenizer: its tokenizer.
        stop_token_ids: ids of the tokens that end a completion.
        head: where the score is read.
        context: longest sequence in tokens.
        pad: token that is not read at the end of a completion, as transformers does not. None for
            Sixfold's own models, whose scores do not depend on a pad token.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    head: Head
    context: int
    pad: int | None = None

    @property
    def calibration(self) -> Calibration:
        return Calibration.of(self.model.config)


def scalar_root(model: PreTrainedModel, language: PreTrainedModel | None = None) -> ScalarRoot:
    """The root of a reward model, by which it is trained and scores.

    Args:
        model: the reward model.
        language: as for `ScalarRoot`.
    """
    return ScalarRoot(model, scalar_head(model), partial(read_states, model), language)


def reward_model_of(
    policy: Policy, whole: PreTrainedModel, head: Head, *, same_body: bool = False
) -> PreTrainedModel:
    """A reward model with the body of a policy and a head of zeros.

    Args:
        policy: the policy with its tokenizer.
        whole: its model in one piece.
        head: where the score is read.
        same_body: the body is that of `whole` itself, not a copy.

    Raises:
        UserError: if transformers has no sequence classifier of the policy's architecture.
    """
    refusal = "model.path: no reward model for {}"
    model = with_scalar_head(whole, "sequence", refusal, same_body=same_body)
    config: Any = model.config
    setattr(config, HEAD, head)
    # transformers reads the score at the last token that is not the pad token. If completions can
    # end with that token, it would be read too early. None: transformers refuses padded batches.
    pad, ends = policy.tokenizer.pad_token_id, model_turn_end(None, policy.tokenizer).tokens
    config.get_text_config().pad_token_id = None if pad in ends else pad
    return model


def adapted_reward_model(policy: Policy, head: Head) -> TrainedLora:
    """A reward model with a copy of the policy's adapter, on the same base weights.

    Args:
        policy: the policy with an adapter.
        head: where the score is read.

    Returns:
        The reward model, whose adapter and head are trained, and its base with the same head.

    Raises:
        UserError: as `reward_model_of`.
    """
    assert policy.lora is not None
    lora = policy.lora.copied()
    model, base = (
        reward_model_of(policy, each, head, same_body=True) for each in (lora.model, lora.base)
    )
    names = {child: name for name, child in base.named_children()}
    setattr(base, names[scalar_head(base)], scalar_head(model))
    return replace(lora, model=model, base=base)


def load_reward_model(
    path: str, device: str, dtype: torch.dtype = torch.float32, setting: str = "reward model"
) -> RewardModel:
    """Load a sequence classifier with one or two labels from a folder or the hub.

    Of two labels, the score is the logit of the second minus that of the first.

    Args:
        path: model folder or hub id.
        device: device of the model.
        dtype: dtype of the body's weights.
        setting: name of the setting that holds the path, for error messages.

    Raises:
        UserError: if there is no such model, or it is no reward model.
    """
    where = f"{setting} = '{path}'"
    try:
        config: Any = AutoConfig.from_pretrained(path, trust_remote_code=False)
        check_is_reward_model(config.architectures or (), where)
        Calibration.of(config)
        if (own := getattr(config, HEAD, None)) not in (None, *get_args(Head)):
            raise ValueError(f"{HEAD} of its config.json must be last or mean, got {own!r:.60}")
        for key, value in vars(config).items():
            if key.endswith(("dropout", "pdrop")) and isinstance(value, float):
                setattr(config, key, 0.0)
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            path,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{where}: cannot be loaded as a reward model ({one_line(error)})"
        ) from error
    model, found = loaded
    if found["missing_keys"]:
        raise UserError(f"{where}: the weight '{sorted(found['missing_keys'])[0]}' is missing")
    _one_label(model, where)
    check_causal(model.eval(), where)
    use_own_kernels(model)
    for p in model.base_model.parameters():  # buffers keep float32: the angles of rotary embeddings
        p.data = p.data.to(dtype)
    ends = model_turn_end(None, tokenizer)
    return RewardModel(
        model.to(device).eval().requires_grad_(False),
        tokenizer,
        ends.tokens,
        own or "last",
        context_of(model),
        None if own else config.get_text_config().pad_token_id,
    )


def check_is_reward_model(architectures: Any, where: str) -> None:
    """Raise UserError if these classes of a config.json are of no sequence classifier."""
    if not any(str(name).endswith("ForSequenceClassification") for name in architectures):
        raise UserError(
            f"{where} is no reward model: its config.json names"
            f" {', '.join(map(str, architectures)) or 'no class'}, not a class"
            " ...ForSequenceClassification. Name the result of a stage of kind reward_model, or a"
            " sequence classifier"
        )


@torch.no_grad()
def _one_label(model: PreTrainedModel, where: str) -> None:
    """Make a head with two labels one of their difference.

    Raises:
        UserError: if it has more labels, or more than a linear layer on the body.
    """
    linear = [(n, child) for n, child in model.named_children() if isinstance(child, nn.Linear)]
    if len(linear) != 1:
        raise UserError(f"{where}: {type(model).__name__} is not a body under one linear head")
    name, head = linear[0]
    if head.out_features == 1:
        return
    if head.out_features > 2:
        raise UserError(f"{where} has {head.out_features} labels: a reward model has one or two")
    one = nn.Linear(head.in_features, 1, bias=head.bias is not None)
    one.weight.copy_(head.weight[1:] - head.weight[:1])
    if head.bias is not None:
        one.bias.copy_(head.bias[1:] - head.bias[:1])
    setattr(model, name, one)
    cast(Any, model.config).num_labels = 1


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Parameters of a saved reward model by name."""
    saved = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    return dict(saved.named_parameters())
