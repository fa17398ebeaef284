"""Results of tools after sampled calls equal the template's rendering, for each model family."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tests.models.families import BY_NAME, Family, make_tokenizer

from sixfold.model.chat_template import render
from sixfold.model.scratch import character_tokenizer
from sixfold.renderer.renderer import Renderer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
QUESTION = {"role": "user", "content": "what?"}


def like(name: str, template: str, end: str, *special: str) -> Family:
    return replace(
        BY_NAME[name], template=template, eos=end, special=(end, *special), added=(), pad=None,
        bos=None,
    )  # fmt: skip


FAMILIES: dict[str, Family] = {
    **{name: BY_NAME[name] for name in ("qwen2.5-instruct", "qwen3", "llama-3.2", "mistral")},
    "qwen3-coder": like("qwen2.5-instruct", "qwen3-coder", "<|im_end|>", "<|im_start|>"),
    "mistral-v11": like("qwen2.5-instruct", "mistral-v11", "</s>", "[TOOL_CALLS]", "[ARGS]"),
    "deepseek-v3": like("r1-distill", "deepseek-v3", "<｜end▁of▁sentence｜>"),
    "deepseek-v3.1": like("r1-distill", "deepseek-v3.1", "<｜end▁of▁sentence｜>"),
    "deepseek-v3.2": like("r1-distill", "deepseek-v3.2", "<｜end▁of▁sentence｜>"),
    "glm-4.5": like("qwen2.5-instruct", "glm-4.5", "<|observation|>"),
    "kimi-k2": like("qwen2.5-instruct", "kimi-k2", "<|im_end|>"),
    "minimax-m2": like("qwen2.5-instruct", "minimax-m2", "[e~["),
    "phi4-mini": like("qwen2.5-instruct", "phi4-mini", "<|end|>"),
    "granite": like("qwen2.5-instruct", "granite", "<|end_of_text|>"),
    "seed-oss": replace(
        like("qwen2.5-instruct", "seed-oss", "<seed:eos>", "<seed:bos>"), bos="<seed:bos>"
    ),
    "hermes-3-tool-use": replace(
        like("qwen2.5-instruct", "hermes-3-tool-use", "<|im_end|>", "<|begin_of_text|>"),
        bos="<|begin_of_text|>",
    ),
    "function-gemma": like("qwen2.5-instruct", "function-gemma", "<end_of_turn>"),
    "gemma4": like("qwen2.5-instruct", "gemma4", "<turn|>"),
}
TEXT_ARGUMENTS = ("deepseek-v3", "deepseek-v3.1")
ONE_CALL = ("llama-3.2",)


@cache
def renderer(name: str) -> Renderer:
    if name == "scratch":
        alphabet = "".join(chr(i) for i in range(32, 127)) + "\n"
        made = character_tokenizer(alphabet, ("<tool_call>",))
        return Renderer(made, [made.eos_token_id])
    tokenizer = make_tokenizer(FAMILIES[name])
    return Renderer(tokenizer, [tokenizer.eos_token_id])


def calls(name: str, count: int) -> list[dict[str, Any]]:
    arguments: Any = {"a": 1}
    if name in TEXT_ARGUMENTS:
        arguments = json.dumps(arguments)
    return [
        {
            "id": f"functions.add:{n}" if name == "kimi-k2" else f"call0000{n}",
            "type": "function",
            "function": {"name": "add", "arguments": arguments},
        }
        for n in range(count)
    ]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", [*FAMILIES, "scratch"])
def test_results_follow_sampled_calls_as_the_template_writes_them(name: str, count: int) -> None:
    if name in ONE_CALL and count > 1:
        pytest.skip("this family writes one call per reply")
    made = renderer(name)
    tools = [] if name == "deepseek-v3" else TOOLS  # its template shows none
    turn = {"role": "assistant", "content": "", "tool_calls": calls(name, count)}
    if name == "granite":  # does not render calls, so the policy's own text holds them
        turn["content"] = '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]'
    results = [
        {"role": "tool", "name": "add", "tool_call_id": call["id"], "content": f"result {n}"}
        for n, call in enumerate(turn["tool_calls"])
    ]
    tokens = made.encode_messages([QUESTION], tools)
    prompt = made.shown(tokens)
    whole = render(made.tokenizer, [QUESTION, turn, *results], tools=tools)
    assert whole.startswith(prompt)
    end = made.tokenizer.eos_token
    said = whole[len(prompt) :].partition(end)[0] + end
    reply = made.tokenizer(said, add_special_tokens=False)["input_ids"]
    suffix = made.suffix([QUESTION], reply, results, tools)
    assert made.shown([*tokens, *reply, *suffix.tokens]) == whole
    observed = [t for t, p in zip(suffix.tokens, suffix.provenance, strict=True) if p == "o"]
    assert made.shown(observed) == "".join(one["content"] for one in results)
