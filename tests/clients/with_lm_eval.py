"""lm-eval's client for completions: log-probs of prompts (multiple choice), and greedy texts."""

import json
import sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

PAIRS = [("the sum of 1 and 2 is", " 3"), ("the sum of 1 and 2 is", " 4, or so"), ("a", "b")]
lm = LocalCompletionsAPI(
    model="tiny",
    base_url=f"{sys.argv[1]}/v1/completions",
    tokenizer=sys.argv[2],
    tokenizer_backend="huggingface",
    batch_size=2,
    max_length=2048,
)
scored = lm.loglikelihood(
    [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0) for pair in PAIRS]
)
greedy = lm.generate_until(
    [
        Instance(
            request_type="generate_until",
            doc={},
            arguments=("hi", {"until": ["zzzz"], "max_gen_toks": 12, "temperature": 0.0}),
            idx=0,
        )
    ]
)
print(json.dumps({"pairs": PAIRS, "scored": scored, "greedy": greedy}))
