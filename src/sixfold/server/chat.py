"""Convert chat messages and tools to prompt tokens with the tokenizer's chat template.

Only the template writes special tokens. A special token spelled in a message, a tool's result or a
tool's description stays text (`rollout/renderer/special_texts.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..model.chat_template import TemplateRefusal, render
from ..rollout.renderer.special_texts import SpecialTexts
from .api_error import bad_request


class ChatCodec:
    """Encodes prompts of requests. Not thread-safe, because fast tokenizers are not."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._special = SpecialTexts(tokenizer)

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> list[int]:
        """Token ids of a conversation, up to the start of the assistant's turn.

        Raises:
            ApiError: there is no template, it refuses the messages, or it does not support tools.
        """
        if not self.tokenizer.chat_template:
            raise bad_request("the model has no chat template: use /v1/completions", "messages")
        text = self._render(messages, tools)
        if tools and text == self._render(messages, ()):
            raise bad_request("the model's chat template has no place for tools", "tools")
        return self._known(self._special.encode_rendered([text])[0], "messages")

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a prompt without a template, with the tokens that the tokenizer adds."""
        return self._known(self._special.encode_bare([text])[0], "prompt")

    def _render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        try:
            return render(
                self.tokenizer, self._marked(list(messages)), tools=self._marked(list(tools))
            )
        except TemplateRefusal as refusal:
            raise bad_request(
                f"the model's chat template refuses these messages: {refusal}", "messages"
            ) from refusal

    def _marked(self, value: Any) -> Any:
        """Apply `SpecialTexts.mark` to all texts in a JSON value."""
        if isinstance(value, str):
            return self._special.mark(value)
        if isinstance(value, list):
            return [self._marked(item) for item in value]
        return (
            {self._special.mark(key): self._marked(item) for key, item in value.items()}
            if isinstance(value, dict)
            else value
        )

    def _known(self, ids: list[int], param: str) -> list[int]:
        if self._special.misses(ids):
            raise bad_request(f"{param} has characters that the model's tokenizer lacks", param)
        return ids
