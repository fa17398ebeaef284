"""verifiers: its client through both APIs, and the error for a context overflow, after which its
harnesses compact a conversation.
"""

import asyncio
import json
import os
import sys

os.environ["KEY"] = "none"
from openai import APIStatusError, OpenAI
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.dialects.responses import ResponsesDialect
from verifiers.v1.harnesses.utils.compaction import is_context_overflow
from verifiers.v1.types import SamplingConfig

url = f"{sys.argv[1]}/v1"


async def main() -> None:
    client = EvalClient(EvalClientConfig(base_url=url, api_key_var="KEY"))
    say = [{"role": "user", "content": "hi"}]
    chat = await client.get_response(
        ChatDialect(),
        {"model": "tiny", "messages": say, "max_tokens": 12, "temperature": 0},
        SamplingConfig(),
    )
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 12, "temperature": 0}
    response = await client.get_response(ResponsesDialect(), body, SamplingConfig())
    await client.close()
    try:
        OpenAI(base_url=url, api_key="none").chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "a" * 5000}]
        )
        overflow = False
    except APIStatusError as error:
        overflow = is_context_overflow(error)
    print(
        json.dumps(
            {
                "chat": chat.message.content,
                "response": response.message.content,
                "overflow": overflow,
            }
        )
    )


asyncio.run(main())
