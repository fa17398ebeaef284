"""OpenAI's agents SDK through /v1/responses, its default: a run, a stream, and a run that must call
a function.
"""

import asyncio
import json
import sys

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
set_default_openai_client(
    AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none"), use_for_tracing=False
)
called = []


class Answer(BaseModel):
    right: bool


@function_tool
def add(a: bool) -> str:
    """Add."""
    called.append(a)
    return "7"


async def main() -> None:
    short = ModelSettings(temperature=0.0, max_tokens=12)
    plain = Agent(name="a", instructions="be short", model="tiny", model_settings=short)
    whole = await Runner.run(plain, "hi")
    # The limit is high, because the SDK treats a stream that ends at its limit as an error.
    shaped = Agent(
        name="c", model="tiny", model_settings=ModelSettings(max_tokens=150), output_type=Answer
    )
    streamed = Runner.run_streamed(shaped, "hi")
    kinds = [event.type async for event in streamed.stream_events()]
    forced = Agent(
        name="b",
        model="tiny",
        tools=[add],
        model_settings=ModelSettings(tool_choice="add", max_tokens=150),
    )
    after = await Runner.run(forced, "hi")
    print(
        json.dumps(
            {
                "whole": whole.final_output,
                "answer": streamed.final_output.right,
                "kinds": sorted(set(kinds)),
                "called": len(called),
                "outputs": [item.type for item in after.new_items],
            }
        )
    )


asyncio.run(main())
