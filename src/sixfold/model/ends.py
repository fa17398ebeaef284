"""What ends a completion: tokens of the model and of its chat template, and what the recipe says."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..chat.turn_end import TurnEnd, turn_end
from ..errors import UserError, nearest

AUTO = "auto"
"""In `rollout.stop_tokens`: what the model and its chat template say."""


def model_ends(settings: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> TurnEnd:
    """End tokens and stop strings of tokenizer, chat template and generation settings."""
    template = turn_end(tokenizer)
    listed = _listed(settings.eos_token_id if settings is not None else None)
    found = (tokenizer.eos_token_id, *listed, *template.tokens)
    strings = (*template.strings, *saved_stop_strings(settings))
    return TurnEnd(tuple(sorted({int(token) for token in found if token is not None})), tuple(dict.fromkeys(strings)))


def saved_stop_strings(settings: GenerationConfig | None) -> tuple[str, ...]:
    """Stop strings that a model's generation settings name."""
    said = settings.stop_strings if settings is not None else None
    return (said,) if isinstance(said, str) else tuple(said or ())


def chosen_ends(own: TurnEnd, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str], strings: Sequence[str]) -> TurnEnd:
    """Ends of a completion by the settings `rollout.stop_tokens` and `rollout.stop`.

    Args:
        own: those of the model.
        tokenizer: knows the tokens.
        tokens: as the tokenizer writes them; `auto` stands for the model's own, strings included.
        strings: texts.

    Raises:
        UserError: the tokenizer has no such token.
    """
    base = own if AUTO in tokens else TurnEnd()
    named = [_token_id(tokenizer, token) for token in tokens if token != AUTO]
    return TurnEnd(tuple(sorted({*base.tokens, *named})), tuple(dict.fromkeys((*base.strings, *strings))))


def keep_ends(settings: GenerationConfig | None, ends: TurnEnd, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write stop tokens and stop strings into a model's generation settings, so that a saved model stops at them.

    Strings that the chat template writes are left out, as the template is saved too: with stop strings in
    its settings, transformers' `generate` must be given the tokenizer.

    Many models ship sampling values beside do_sample = false. transformers refuses to save that: do_sample
    becomes true, which is what the values mean.
    """
    if settings is None:
        return
    if {*ends.tokens} != {*_listed(settings.eos_token_id)}:
        settings.eos_token_id = list(ends.tokens)
    template = turn_end(tokenizer).strings
    settings.stop_strings = [text for text in ends.strings if text not in template] or None
    if not settings.do_sample and _samples(settings):
        settings.do_sample = True


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end a completion by themselves (chat models often have two)."""
    return model_ends(model.generation_config, tokenizer).tokens


def _samples(settings: GenerationConfig) -> bool:
    """True if a value that only matters for sampling is set to something."""
    values = ((settings.temperature, 1.0), (settings.top_p, 1.0), (settings.typical_p, 1.0), (settings.min_p, None), (settings.top_k, 50))
    return any(value is not None and value != neutral for value, neutral in values)


def _listed(ids: int | list[int] | None) -> list[int]:
    """One id, several or none, as a list."""
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    """The id of a token of `rollout.stop_tokens`."""
    vocabulary = tokenizer.get_vocab()
    if token not in vocabulary:
        hint = nearest(token, [t.content for t in tokenizer.added_tokens_decoder.values()])
        raise UserError(f"rollout.stop_tokens: the tokenizer has no token {token!r}.{hint} A text of several tokens belongs in rollout.stop")
    return int(vocabulary[token])
