"""inspect-ai: one evaluation of one sample through its OpenAI-compatible provider."""

import json
import os
import sys

os.environ |= {"LOCAL_BASE_URL": f"{sys.argv[1]}/v1", "LOCAL_API_KEY": "none"}
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

task = Task(dataset=[Sample(input="hi", target="zzzz")], solver=generate(), scorer=includes())
(log,) = eval(
    task,
    model="openai-api/local/tiny",
    max_tokens=12,
    temperature=0.0,
    display="none",
    log_dir=sys.argv[2],
)
samples = log.samples or []
print(
    json.dumps(
        {
            "status": log.status,
            "error": str(log.error),
            "text": samples[0].output.completion if samples else "",
        }
    )
)
