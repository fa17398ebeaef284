"""The base class of clients of the stand-in."""

from __future__ import annotations

from typing import Any


class Client:
    def __init__(self, client: Any) -> None:
        self.client = client

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **more: Any
    ) -> Any:
        from verifiers import Error, ModelError

        try:
            messages, extra = await self.to_native_prompt(prompt)  # type: ignore[attr-defined]
            named = [await self.to_native_tool(tool) for tool in tools or ()]  # type: ignore[attr-defined]
            native = await self.get_native_response(  # type: ignore[attr-defined]
                messages, model, sampling_args, named or None, **extra, **more
            )
            await self.raise_from_native_response(native)  # type: ignore[attr-defined]
            return await self.from_native_response(native)  # type: ignore[attr-defined]
        except Error:
            raise
        except Exception as error:
            raise ModelError from error
