"""Chat messages, tools included, to prompt tokens through the tokenizer's own template.

Special tokens come from the template alone: what a message, a tool's result or a tool's description
spells stays text (`rollout/special_texts.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..chat.template import TemplateRefusal, render
from ..rollout.special_texts import SpecialTexts
from .api_error import bad_request


class ChatCodec:
    """Encodes what a request asks.

    Not safe to use from two threads at once: a fast tokenizer is not.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._special = SpecialTexts(tokenizer)

    def encode_chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn.

        Raises ApiError for what the template cannot render.
        """
        if not self.tokenizer.chat_template:
            raise bad_request("the model has no chat template: use /v1/completions", "messages")
        text = self._render(messages, tools)
        if tools and text == self._render(messages, ()):
            raise bad_request("the model's chat template has no place for tools", "tools")
        return self._known(self._special.encode_rendered([text])[0], "messages")

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a bare prompt, with the tokens that the tokenizer itself puts around a text."""
        return self._known(self._special.encode_bare([text])[0], "prompt")

    def _render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        try:
            return render(self.tokenizer, self._marked(list(messages)), tools=self._marked(list(tools)))
        except TemplateRefusal as refusal:
            raise bad_request(f"the model's chat template refuses these messages: {refusal}", "messages") from refusal

    def _marked(self, value: Any) -> Any:
        """The value with every text in it marked."""
        if isinstance(value, str):
            return self._special.mark(value)
        if isinstance(value, list):
            return [self._marked(item) for item in value]
        return {self._special.mark(key): self._marked(item) for key, item in value.items()} if isinstance(value, dict) else value

    def _known(self, ids: list[int], param: str) -> list[int]:
        if self._special.misses(ids):
            raise bad_request(f"{param} has characters that the model's tokenizer lacks", param)
        return ids
