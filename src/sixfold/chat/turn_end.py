"""Where the assistant's turn ends, read off the chat template.

A base model with a chat template often has another end-of-sequence token than the one that ends a turn
(Qwen2.5: <|endoftext|> and <|im_end|>). Sampling that waits for the former invents further turns.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from .template import PROBE, TemplateRefusal, render

_ANSWER, _NEXT = "4071829360", "6392817405"


@dataclass(frozen=True)
class TurnEnd:
    """What ends the assistant's turn.

    tokens: ids of tokens. strings: texts, of templates that mark turns by plain text.
    """

    tokens: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()


def turn_end(tokenizer: PreTrainedTokenizerBase) -> TurnEnd:
    """What the template writes after an answer. Empty if there is no template, or if it refuses answers.

    An answer that ends the conversation comes first: gpt-oss ends it with <|return|>, but an earlier one with
    <|end|>, which also ends a thought and must not stop sampling. Some templates leave the last answer open:
    then the first token of the next turn ends it. Where there is no such token, the text in its place does.
    """
    if not tokenizer.chat_template:
        return TurnEnd()
    asked = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": _ANSWER}]
    last = _after_answer(tokenizer, asked)
    between, found, _ = _after_answer(tokenizer, [*asked, {"role": "user", "content": _NEXT}]).partition(_NEXT)
    for text in (last, between if found else ""):
        if (token := first_added_token(tokenizer, text)) is not None:
            return TurnEnd(tokens=(token,))
    text = last.rstrip() or (between.rstrip() if found else "")
    return TurnEnd(strings=(text,) if text.strip() else ())


def first_added_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """Id of the first token in `text` that is not ordinary text, or None. Of several at one place the longest counts."""
    found = [(at, -len(t.content), i) for i, t in tokenizer.added_tokens_decoder.items() if (at := text.find(t.content)) >= 0]
    return min(found)[2] if found else None


def _after_answer(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """What follows the answer in the rendered conversation."""
    try:
        text = render(tokenizer, messages, generation=False)
    except TemplateRefusal:
        return ""
    return text.rpartition(_ANSWER)[2] if _ANSWER in text else ""
