"""An agent with one tool that uses OpenAI's agents SDK: PROGRAM chat_completions or PROGRAM
responses. Its environment variables contain the base URL and the task.
"""

import asyncio
import json
import os
import sys
import urllib.request

from agents import (
    Agent,
    Runner,
    function_tool,
    set_default_openai_api,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
set_default_openai_client(AsyncOpenAI(), use_for_tracing=False)
set_default_openai_api(sys.argv[1])
task = json.loads(os.environ["SIXFOLD_TASK"])


@function_tool
def add(a: int, b: int) -> str:
    """Add."""
    return str(a + b)


agent = Agent(name="a", model="policy", tools=[add])
done = asyncio.run(Runner.run(agent, task["prompt"]))
reward = {"reward": float(done.final_output == str(task["answer"]))}
headers = {"content-type": "application/json"}
request = urllib.request.Request(
    os.environ["SIXFOLD_REWARD_URL"], json.dumps(reward).encode(), headers
)
urllib.request.urlopen(request).close()
