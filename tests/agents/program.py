"""An agent that does not import Sixfold: the `openai` client, two turns, and a reward."""

import json
import os
import urllib.request
import zlib

from openai import OpenAI

client = OpenAI()
task = json.loads(os.environ["SIXFOLD_TASK"])
messages = [{"role": "user", "content": task["prompt"]}]
for question in ("again", None):
    reply = client.chat.completions.create(model="gpt-4o", messages=messages, temperature=0.3)
    messages += [reply.choices[0].message, {"role": "user", "content": question}]
text = reply.choices[0].message.content
differs = zlib.crc32(text.encode()) % 1000 / 1000
reward = {"reward": differs, "parts": {"ones": text.count("1")}}
request = urllib.request.Request(
    os.environ["SIXFOLD_REWARD_URL"],
    json.dumps(reward).encode(),
    {"content-type": "application/json"},
)
urllib.request.urlopen(request).close()
