"""Convert prompts of requests to tokens, in threads beside the event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
from anyio.to_thread import run_sync

from sixfold.renderer.renderer import Renderer, RenderError

from .api_error import bad_request
from .requests import Limits

LONG_TEXT = 1 << 16
"""Prompts with at least this many characters use a second renderer, so short ones do not wait."""


class PromptEncoder:
    """Encodes prompts, one short and one long prompt at a time.

    Args:
        long: renderer for prompts of at least LONG_TEXT characters.
    """

    def __init__(self, short: Renderer, long: Renderer, limits: Limits) -> None:
        self._limits = limits
        # Renderers are not thread-safe: a limiter lets one thread at a time use each of them.
        self._lanes = [(renderer, anyio.CapacityLimiter(1)) for renderer in (short, long)]

    async def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation.

        Raises:
            ApiError: the conversation is too long, there is no template, it refuses the messages,
                or it does not support tools.
        """

        self._limits.check_chat(messages, self._lanes[0][0])
        size = sum(len(message["content"]) for message in messages)
        return await self._run(lambda renderer: renderer.encode_messages(messages, tools), size)

    async def text(self, prompt: str) -> list[int]:
        """Token ids of a prompt without a template.

        Raises:
            ApiError: the prompt is too long, or has no tokens.
        """
        self._limits.check_length(len(prompt), "prompt")
        tokens = await self._run(lambda renderer: renderer.encode_text(prompt), len(prompt))
        if not tokens:
            raise bad_request(
                "prompt is empty. Give at least one token for the model to continue", "prompt"
            )
        return tokens

    async def _run(self, encode: Callable[[Renderer], list[int]], characters: int) -> list[int]:
        """Encode in another thread, after the prompts that are already waiting."""
        renderer, limiter = self._lanes[characters >= LONG_TEXT]
        try:
            return await run_sync(encode, renderer, limiter=limiter)
        except RenderError as error:
            raise bad_request(str(error), error.part) from error
