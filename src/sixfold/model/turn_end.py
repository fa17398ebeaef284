"""End of the assistant's turn, found by rendering the chat template.

In a base model with a chat template, the end-of-sequence token often differs from the token that
ends a turn (Qwen2.5: <|endoftext|> and <|im_end|>). If sampling only stopped at the former, the
model would write further turns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from .chat_template import PROBE, PROBE_TOOL, TemplateRefusal, render

_ANSWER, _NEXT = "4071829360", "6392817405"
_BRACKETS = re.compile(r"\s*[<\[{|].*[>\]}|]\s*", re.DOTALL)
"""Texts of added tokens that are marks, although the tokenizer does not call them special."""


@dataclass(frozen=True)
class TurnEnd:
    """Ends of the assistant's turn.

    Attributes:
        tokens: ids of the tokens that end a turn.
        strings: texts that end a turn, for templates that mark turns with plain text.
    """

    tokens: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()


def turn_end(tokenizer: PreTrainedTokenizerBase) -> TurnEnd:
    """The end of a turn that the chat template writes after an answer.

    An answer at the end of the conversation is tried first. gpt-oss ends it with <|return|>, but an
    earlier answer with <|end|>. That token also ends a thought and must not stop sampling. Some
    templates leave the last answer open: then the first special token of the next turn ends it. If
    there is no such token, the text in its place is the end.

    Returns:
        Empty ends if there is no template, or if the template refuses answers.
    """
    if not tokenizer.chat_template:
        return TurnEnd()
    asked = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": _ANSWER}]
    last = _after_answer(tokenizer, asked)
    between, found, _ = _after_answer(
        tokenizer, [*asked, {"role": "user", "content": _NEXT}]
    ).partition(_NEXT)
    for text in (last, between if found else ""):
        if (token := first_added_token(tokenizer, text)) is not None:
            return TurnEnd(tokens=(token,))
    text = last.rstrip() or (between.rstrip() if found else "")
    return TurnEnd(strings=(text,) if text.strip() else ())


def first_added_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """Id of the first added token in `text` that can mark a turn, or None.

    White space and ordinary words are added to many vocabularies (Pythia, Phi-2: runs of spaces).
    They mark nothing. If several tokens match at one place, the longest.
    """
    found = [
        (at, -len(t.content), i)
        for i, t in tokenizer.added_tokens_decoder.items()
        if (t.special or _BRACKETS.fullmatch(t.content)) and t.content.strip()
        if (at := text.find(t.content)) >= 0
    ]
    return min(found)[2] if found else None


def _after_answer(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """Text after the answer in the rendered conversation; empty if the template refuses it.

    A template for conversations with tools may refuse those without.
    """
    for tools in ((), (PROBE_TOOL,)):
        try:
            text = render(tokenizer, messages, tools=tools, generation=False)
        except TemplateRefusal:
            continue
        return text.rpartition(_ANSWER)[2] if _ANSWER in text else ""
    return ""
