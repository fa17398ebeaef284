"""End tokens and stop strings of completions, from the model, its chat template and the recipe."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..errors import UserError, nearest
from .turn_end import TurnEnd, turn_end

AUTO = "auto"
"""Value in `rollout.stop_tokens` that stands for the ends of the model and its chat template."""


def model_turn_end(
    settings: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> TurnEnd:
    """End tokens and stop strings of tokenizer, chat template and generation settings.

    Raises:
        UserError: the generation settings name no tokens or no texts.
    """
    template = turn_end(tokenizer)
    listed = _token_ids(settings.eos_token_id if settings is not None else None)
    found = (tokenizer.eos_token_id, *listed, *template.tokens)
    strings = (*template.strings, *saved_stop_strings(settings))
    return TurnEnd(
        tuple(sorted({int(token) for token in found if token is not None})),
        tuple(dict.fromkeys(strings)),
    )


def saved_stop_strings(settings: GenerationConfig | None) -> tuple[str, ...]:
    """Stop strings that a model's generation settings name.

    Raises:
        UserError: if they are not texts.
    """
    said = settings.stop_strings if settings is not None else None
    strings = (said,) if isinstance(said, str) else said or ()
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise UserError(f"generation_config.json: stop_strings = {said!r} must be texts")
    return tuple(strings)


def recipe_turn_end(
    own: TurnEnd, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str], strings: Sequence[str]
) -> TurnEnd:
    """Ends of a completion according to the settings `rollout.stop_tokens` and `rollout.stop`.

    Args:
        tokenizer: looks up the token ids.
        tokens: `rollout.stop_tokens`, spelled as in the vocabulary. `auto` stands for `own`,
            including its strings.
        strings: `rollout.stop`.

    Raises:
        UserError: the tokenizer does not have one of the tokens.
    """
    base = own if AUTO in tokens else TurnEnd()
    named = [_token_id(tokenizer, token) for token in tokens if token != AUTO]
    return TurnEnd(
        tuple(sorted({*base.tokens, *named})), tuple(dict.fromkeys((*base.strings, *strings)))
    )


def save_turn_end(
    settings: GenerationConfig | None, ends: TurnEnd, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write end tokens and stop strings into a model's generation settings for saving.

    Stop strings of the chat template are left out, because the template is saved too. With stop
    strings in the settings, transformers' `generate` would need the tokenizer as an argument.

    Many models ship sampling values together with do_sample = false. transformers refuses to save
    that combination, so do_sample is set to true, as the values intend.

    Args:
        settings: changed in place. None: nothing happens.
        tokenizer: has the chat template.
    """
    if settings is None:
        return
    if {*ends.tokens} != {*_token_ids(settings.eos_token_id)}:
        settings.eos_token_id = list(ends.tokens)
    template = turn_end(tokenizer).strings
    settings.stop_strings = [text for text in ends.strings if text not in template] or None
    if not settings.do_sample and _samples(settings):
        settings.do_sample = True


def _samples(settings: GenerationConfig) -> bool:
    """True if a setting that only affects sampling differs from its neutral value."""
    values = (
        (settings.temperature, 1.0),
        (settings.top_p, 1.0),
        (settings.typical_p, 1.0),
        (settings.min_p, None),
        (settings.top_k, 50),
    )
    return any(value is not None and value != neutral for value, neutral in values)


def _token_ids(ids: object) -> list[int]:
    """The ids as a list, for one id, several or None."""
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    tokens = [one for one in listed if type(one) is int and one >= 0]
    if len(tokens) < len(listed):
        raise UserError(
            f"generation_config.json or config.json: eos_token_id = {ids!r} must be the id of a"
            " token, or a list of ids"
        )
    return tokens


def _token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    """Id of a token in `rollout.stop_tokens`.

    Raises UserError if the tokenizer does not have it.
    """
    vocabulary = tokenizer.get_vocab()
    if token not in vocabulary:
        hint = nearest(token, [t.content for t in tokenizer.added_tokens_decoder.values()])
        raise UserError(
            f"rollout.stop_tokens: {token!r} is not a token of the tokenizer.{hint} Use"
            " rollout.stop for a text of several tokens"
        )
    return int(vocabulary[token])
