"""Load the draft model of speculative decoding, and check that it fits the policy."""

from __future__ import annotations

from transformers import PreTrainedModel

from ..errors import UserError
from ..model.loading import Policy
from .sampling_model import load_for_sampling


def load_draft(
    path: str, policy: Policy, precision: str, longest: int, setting: str
) -> PreTrainedModel:
    """Draft model on the policy's device.

    Args:
        path: a run, a checkpoint, a model folder or a hub id.
        policy: the model that checks the proposed tokens.
        precision: float32 or bfloat16.
        longest: longest sequence, in tokens.
        setting: the user's name for the path, for error messages.

    Raises:
        UserError: if it cannot be loaded, or its vocabulary differs, or its context is too short.
    """
    draft = load_for_sampling(path, str(policy.model.device), precision, setting)
    same_size = (
        draft.model.config.get_text_config().vocab_size
        == policy.model.config.get_text_config().vocab_size
    )
    if not same_size or draft.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise UserError(
            f"{setting} = '{path}': its vocabulary differs from the model's. Use a draft model with"
            " the same tokenizer"
        )
    if draft.context < longest:
        raise UserError(
            f"{setting} = '{path}': its context of {draft.context} tokens is shorter than the"
            f" longest sequence, {longest} tokens. Use another draft model"
        )
    return draft.model.requires_grad_(False)
