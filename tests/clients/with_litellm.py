"""litellm: a chat, a stream, a text, and the error for a prompt that is too long."""

import json
import sys

import litellm

where = {"api_base": f"{sys.argv[1]}/v1", "api_key": "none"}
say = [{"role": "user", "content": "hi"}]
chat = litellm.completion(model="openai/tiny", messages=say, max_tokens=12, temperature=0, **where)
stream = litellm.completion(
    model="openai/tiny", messages=say, max_tokens=12, temperature=0, stream=True, **where
)
text = litellm.text_completion(
    model="text-completion-openai/tiny", prompt="hi", max_tokens=12, temperature=0, **where
)
try:
    litellm.completion(
        model="openai/tiny", messages=[{"role": "user", "content": "a" * 5000}], **where
    )
    overflow = ""
except litellm.ContextWindowExceededError:
    overflow = "recognised"
print(
    json.dumps(
        {
            "chat": chat.choices[0].message.content,
            "stream": "".join(chunk.choices[0].delta.content or "" for chunk in stream),
            "text": text.choices[0].text,
            "overflow": overflow,
        }
    )
)
