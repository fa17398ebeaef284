"""Call formats: how the chat templates of model families write tool calls.

The format of a model is derived from its chat template: a conversation with a known call is
rendered, and the format that reads the call back is chosen. Several families use the same marks:
of two formats, the one of which more text is found wins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..model.chat_template import PROBE, PROBE_TOOL, TemplateRefusal, render
from ..types import ToolCall
from .block_format import BlockFormat
from .function_text import read_functions
from .harmony import HARMONY
from .json_calls import (
    inside_json,
    read_deepseek,
    read_fenced,
    read_json_call,
    read_json_calls,
    read_kimi,
    read_mistral,
)
from .tagged_calls import (
    open_tags,
    read_arg_pairs,
    read_functions_in_line,
    read_functions_in_tags,
    read_invokes,
)
from .tool_calls import CallFormat

HERMES = BlockFormat("Hermes", "<tool_call>", "</tool_call>", read_json_call, inside_json)
"""Format of Hermes, Qwen2.5 and Qwen3, and of models made from scratch."""

FORMATS: tuple[CallFormat, ...] = (
    HERMES,
    BlockFormat(
        "Qwen3-Coder", "<tool_call>", "</tool_call>", read_functions_in_tags,
        open_tags("function", "parameter"), elements=("<function=", "<parameter="),
    ),
    BlockFormat(
        "GLM", "<tool_call>", "</tool_call>", read_arg_pairs, open_tags("arg_value"),
        elements=("<arg_key>", "<arg_value>"),
    ),
    BlockFormat(
        "Seed", "<seed:tool_call>", "</seed:tool_call>", read_functions_in_line,
        open_tags("function", "parameter"),
    ),
    BlockFormat("Mistral", "[TOOL_CALLS]", "", read_mistral, inside_json),
    BlockFormat(
        "DeepSeek", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", read_deepseek, inside_json,
        wrappers=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    BlockFormat(
        "DeepSeek-V3.2", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", read_invokes,
        open_tags("｜DSML｜invoke", "｜DSML｜parameter"),
    ),
    BlockFormat(
        "MiniMax-M2", "<minimax:tool_call>", "</minimax:tool_call>", read_invokes,
        open_tags("invoke", "parameter"),
    ),
    BlockFormat("MiniMax-M1", "<tool_calls>", "</tool_calls>", read_json_calls, inside_json),
    BlockFormat(
        "Kimi-K2", "<|tool_call_begin|>", "<|tool_call_end|>", read_kimi, inside_json,
        wrappers=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    BlockFormat("Phi-4", "<|tool_call|>", "<|/tool_call|>", read_json_calls, inside_json),
    BlockFormat("Granite", "<|tool_call|>", "", read_json_calls, inside_json),
    BlockFormat(
        "Command", "<|START_ACTION|>", "<|END_ACTION|>", read_json_calls, inside_json
    ),
    BlockFormat("Command-R", "Action:", "", read_fenced, elements=("```json",)),
    BlockFormat("Nemotron", "<TOOLCALL>", "</TOOLCALL>", read_json_calls, inside_json),
    BlockFormat("FunctionGemma", "<start_function_call>", "<end_function_call>",
        read_functions("<escape>")),
    BlockFormat("Gemma-4", "<|tool_call>", "<tool_call|>", read_functions('<|"|>')),
    HARMONY,
    BlockFormat("Llama", "<|python_tag|>", "", read_json_calls, inside_json, bare=True),
)  # fmt: skip
"""All formats. If two have the same evidence, the first is chosen."""

_CALL = ToolCall(PROBE_TOOL["function"]["name"], '{"alpha": "value 2047"}')


def find_format(tokenizer: PreTrainedTokenizerBase) -> CallFormat | None:
    """The format in which the chat template of a model writes calls.

    If the template does not render earlier calls, its source is searched for the marks of formats.

    Returns:
        None if the template has none of the known formats.
    """
    for arguments in (json.loads(_CALL.arguments), _CALL.arguments):
        text = _rendered_call(tokenizer, arguments)
        if readers := [one for one in FORMATS if text and _reads(one, text)]:
            return max(readers, key=lambda one: _evidence(one, text))
        if _CALL.name in text:
            return None
    source = tokenizer.get_chat_template(tools=[PROBE_TOOL])
    named = [one for one in FORMATS if all(mark in source for mark in one.needed)]
    return max(named, key=lambda one: _evidence(one, source), default=None)


def _evidence(one: CallFormat, text: str) -> tuple[int, int]:
    """How much a text speaks for a format: characters found of its marks, minus those missing."""
    found = sum(len(mark) for mark in one.evidence if mark in text)
    return found, found - sum(map(len, one.evidence))


def _reads(one: CallFormat, text: str) -> bool:
    """True if a format reads the known call from a rendered turn."""
    parser = one.parser((PROBE_TOOL,))
    pieces = parser.push(text) + parser.finish()
    calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
    return [(call.name, json.loads(call.arguments)) for call in calls] == [
        (_CALL.name, json.loads(_CALL.arguments))
    ]


def _rendered_call(tokenizer: PreTrainedTokenizerBase, arguments: Any) -> str:
    """The assistant's turn with a known call, as the template writes it.

    Args:
        tokenizer: tokenizer with the template.
        arguments: arguments of the call. Some templates need an object, others JSON text.

    Returns:
        "" if the template refuses the conversation.
    """
    function = {"name": _CALL.name, "arguments": arguments}
    call = {"id": "call00000", "type": "function", "function": function}
    question = {"role": "user", "content": PROBE}
    turn: Mapping[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        prompt = render(tokenizer, [question], tools=(PROBE_TOOL,))
        whole = render(tokenizer, [question, turn], tools=(PROBE_TOOL,), generation=False)
    except TemplateRefusal:
        return ""
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    # The start of a turn may differ, for example by an empty thought. The text before the question
    # is not searched: it may show an example of a call.
    return whole.rpartition(PROBE)[2]
