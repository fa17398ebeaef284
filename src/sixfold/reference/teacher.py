"""A teacher: another model whose log-probs of the policy's samples are distilled into the policy.

It scores like any `FrozenReference`.
"""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import UserError
from ..model.loading import Policy, load_policy
from ..recipe.schema import ModelConfig

SETTING = "reference.path"


def load_teacher(path: str, policy: Policy, longest: int) -> PreTrainedModel:
    """Load the teacher on the policy's device, for `FrozenReference(..., copy=False)`.

    Args:
        path: a folder or a hub id.
        longest: length in tokens of the longest sequence to score.

    Raises:
        UserError: if the model cannot be loaded, if its context is shorter than `longest` tokens,
            if its vocabulary differs from the policy's, or if it has fewer token ids than the
            policy.
    """
    teacher = load_policy(
        ModelConfig(path=path), seed=0, device=str(policy.model.device), setting=SETTING
    )
    where = f"{SETTING} = '{path}'"
    if teacher.vocabulary_hash != policy.vocabulary_hash:
        raise UserError(
            f"{where}: its tokenizer is not the policy's:"
            f" {_difference(teacher.tokenizer, policy.tokenizer)}"
        )
    theirs, ours = (m.config.get_text_config().vocab_size for m in (teacher.model, policy.model))
    # The policy can sample ids that pad its vocabulary, for which the teacher would have no row.
    if theirs < ours:
        raise UserError(
            f"{where}: the teacher has {theirs} token ids, the policy {ours}. Use a teacher with"
            " at least as many"
        )
    if teacher.context < longest:
        raise UserError(
            f"{where}: its context of {teacher.context} tokens is too short for sequences of up to"
            f" {longest}; lower rollout.max_new_tokens"
        )
    return teacher.model


def _difference(teacher: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase) -> str:
    """Differences between two vocabularies in words, with the first example of each."""
    theirs, ours = teacher.get_vocab(), policy.get_vocab()
    moved = sorted((i, token) for token, i in ours.items() if theirs.get(token, i) != i)
    missing = sorted((i, token) for token, i in ours.items() if token not in theirs)
    more = len(theirs.keys() - ours.keys())
    parts = []
    if moved:
        i, token = moved[0]
        parts.append(
            f"{len(moved)} tokens have other ids, for example {token!r}: {i} in the policy's,"
            f" {theirs[token]} in the teacher's"
        )
    if missing:
        parts.append(
            f"{len(missing)} tokens of the policy are unknown to the teacher, for example"
            f" {missing[0][1]!r}"
        )
    if more:
        parts.append(f"{more} tokens of the teacher are unknown to the policy")
    return "; ".join(parts)
