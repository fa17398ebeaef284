"""The `openai` client: chats, streams, tools, responses, errors."""

import json
import sys

from openai import BadRequestError, NotFoundError, OpenAI

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
say = [{"role": "user", "content": "hi"}]
whole = client.chat.completions.create(model="tiny", messages=say, max_tokens=12, temperature=0)
stream = client.chat.completions.create(
    model="tiny", messages=say, max_tokens=12, temperature=0, stream=True
)
response = client.responses.create(model="tiny", input="hi", max_output_tokens=12, temperature=0)
events = [
    event.type
    for event in client.responses.create(
        model="tiny", input="hi", max_output_tokens=12, temperature=0, stream=True
    )
]
errors = []
for ask in (
    lambda: client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a" * 5000}]
    ),
    lambda: client.chat.completions.create(model="other", messages=say),
):
    try:
        ask()
    except (BadRequestError, NotFoundError) as error:
        errors.append(error.code)
print(
    json.dumps(
        {
            "models": [model.id for model in client.models.list()],
            "whole": whole.choices[0].message.content,
            "stream": "".join(chunk.choices[0].delta.content or "" for chunk in stream),
            "response": response.output_text,
            "events": [events[0], events[-1]],
            "errors": errors,
        }
    )
)
