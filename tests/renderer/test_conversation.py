"""Training examples of conversations: every reply follows the prompt that sampling gives it.

The oracles call the chat template and the tokenizer directly.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
from tests.models.families import TEMPLATES
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sixfold.errors import UserError
from sixfold.model.stop_tokens import model_turn_end
from sixfold.renderer.conversation import Encoded, encode_conversation
from sixfold.renderer.renderer import Renderer
from sixfold.renderer.special_texts import SpecialTexts
from sixfold.renderer.tool_calls import read_reply
from sixfold.types import Message, Task

NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
EOS = {
    "qwen2.5": "<|im_end|>", "llama3.2": "<|eot_id|>", "gemma2": "<eos>", "gemma3": "<eos>",
    "smollm2": "<|im_end|>", "phi3": "<|endoftext|>", "gpt-oss": "<|return|>",
    "gemma4": "<eos>", "function-gemma": "<eos>", "phi4-mini": "<|endoftext|>",
    "granite": "<|end_of_text|>", "minimax-m2": "[e~[", "seed-oss": "<seed:eos>",
    "hermes-3-tool-use": "<|im_end|>", "kimi-k2": "[EOS]", "qwen3-coder": "<|im_end|>",
    "command-r-plus-tool-use": "<|END_OF_TURN_TOKEN|>", "glm-4.5": "<|endoftext|>",
    "qwen3": "<|im_end|>", "qwen3-thinking": "<|im_end|>", "plain-text": "<eos>",
} | dict.fromkeys(
    ("deepseek-v3", "deepseek-v3.1", "deepseek-v3.2", "r1-distill"), "<｜end▁of▁sentence｜>"
) | dict.fromkeys(("mistral", "mistral-v7", "mistral-v11"), "</s>")  # fmt: skip
MORE_ENDS = {"gpt-oss": ("<|call|>",), "glm-4.5": ("<|user|>", "<|observation|>")}
"""End tokens that only the generation settings of the family name."""
MARK = re.compile(
    r"<\|[^|<>\n]+\|>|<｜[^｜\n]+｜>|\[/?[A-Z_]+\]|<(?:start|end)_of_turn>|<\|?turn\|?>|\]~[bs]\]"
    r"|\[e~\[|<seed:[be]os>|</?s>|<(?:bos|eos|sop)>|\[gMASK\]"
)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
        },
    },
}


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose merges cross the borders of turns, with the template's marks."""
    text = (TEMPLATES / f"{name}.jinja").read_text()
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(["\n\n\n\n user assistant answer question: \n\nUser: "] * 4, trainer)
    marks = {*MARK.findall(text), EOS[name]} - {"[/THINK]", "[THINK]"}
    if name == "glm-4.5":  # its marks have the names of roles
        marks |= {"<|user|>", "<|observation|>"}
    made.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in sorted(marks)])
    made.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    bos = next((m for m in ("<bos>", "<s>", "<｜begin▁of▁sentence｜>") if m in marks), EOS[name])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=text, eos_token=EOS[name], bos_token=bos
    )


@cache
def renderer(name: str) -> Renderer:
    ends = model_turn_end(None, tokenizer(name)).tokens
    more = [tokenizer(name).convert_tokens_to_ids(end) for end in MORE_ENDS.get(name, ())]
    return Renderer(tokenizer(name), [*ends, *more])


def said(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}  # type: ignore[typeddict-item]


def call(name: str, at: int) -> list[dict[str, Any]]:
    arguments: Any = {"a": at}
    if name in ("deepseek-v3", "deepseek-v3.1", "r1-distill"):
        arguments = json.dumps(arguments)
    identity = f"functions.add:{at}" if name == "kimi-k2" else f"call0000{at}"
    function = {"name": "add", "arguments": arguments}
    return [{"id": identity, "type": "function", "function": function}]


def conversation(name: str, kind: str) -> tuple[Message, ...]:
    if kind == "tools":
        known = {"name": "add", "tool_call_id": call(name, 0)[0]["id"]}
        return (
            said("user", "question 0"),
            said("assistant", "", tool_calls=call(name, 0)),
            said("tool", "answer tool", **known),
            said("assistant", "answer 1"),
            said("user", "question 2"),
            said("assistant", "answer 3"),
        )
    thought = "<think>\nreason {}\n</think>\n\n" if kind == "thoughts" else ""
    turns = [
        one
        for at in (0, 2, 4)
        for one in (
            said("user", f"question {at}"),
            said("assistant", thought.format(at) + f"answer {at + 1}\n\n- last"),
        )
    ]
    return tuple([said("system", "be good"), *turns] if kind == "system" else turns)


def whole(name: str, messages: Any, generation: bool, tools: Any = None) -> str:
    return str(
        tokenizer(name).apply_chat_template(
            [dict(m) for m in messages],
            tokenize=False,
            add_generation_prompt=generation,
            tools=tools,
        )
    )


def ids(name: str, text: str) -> list[int]:
    return list(tokenizer(name)(text, add_special_tokens=False)["input_ids"])


def encode(name: str, kind: str, train_on: Any = "assistant") -> Encoded:
    tools = (ADD,) if kind == "tools" or name.endswith("tool-use") else ()
    task = Task("t", conversation(name, kind), tools=tools)
    return encode_conversation(renderer(name), task, train_on)


REFUSED = {  # kinds of conversations that a template refuses, or whose calls it does not show
    "tools": {
        *("command-r-plus-tool-use", "deepseek-v3", "gemma2", "gemma3", "granite", "mistral-v7"),
        *("phi3", "plain-text", "r1-distill", "smollm2"),
    },
    "system": {"gemma2"},
}
WHOLE = {  # templates that keep earlier replies as they were sampled: one example
    "plain": {*NAMES} - {"command-r-plus-tool-use", "gpt-oss", "llama3.2", "plain-text", "qwen3"}
    - {"qwen3-thinking", "r1-distill"},
    "thoughts": {*NAMES} - {"command-r-plus-tool-use", "gpt-oss", "plain-text", "qwen3"}
    - {"qwen3-thinking", "r1-distill"},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["plain", "system", "thoughts", "tools"])
def test_every_reply_is_trained_once_after_the_prompt_that_sampling_gives_it(kind: str) -> None:
    for name in NAMES:
        if name in REFUSED.get(kind, ()):
            with pytest.raises(UserError, match=r"task t: .*model\.chat_template"):
                encode(name, kind)
            continue
        tools = [ADD] if kind == "tools" or name.endswith("tool-use") else None
        messages = conversation(name, kind)
        replies = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        found = [(e.tokens, *span) for e in encode(name, kind).examples for span in e.spans]
        assert len(found) == len(replies), name
        for (tokens, start, stop), at in zip(found, replies, strict=True):
            assert tokens[:start] == ids(name, whole(name, messages[:at], True, tools)), (name, at)
            # It ends with the first token at which sampling stops.
            ends = [i for i in range(start, stop) if tokens[i] in renderer(name).stop_token_ids]
            assert ends == [stop - 1], (name, at)
            text = renderer(name).shown(tokens[start:stop])
            content = messages[at]["content"].rpartition("</think>")[2].strip()
            assert text.count(content or "add") >= 1
            assert "question" not in text and "answer tool" not in text
            assert kind != "thoughts" or f"reason {at - 1}" in text, name


def test_calls_of_trained_replies_are_read_back_by_the_parser_of_samples() -> None:
    for name in sorted({*NAMES} - REFUSED["tools"]):
        example = encode(name, "tools").examples[0]
        start, stop = example.spans[0]
        text = renderer(name).decode(example.tokens[start : stop - 1])
        opened = renderer(name).opened(example.tokens[:start])
        if name == "gpt-oss":
            text = renderer(name).decode(example.tokens[start:stop])
        made = read_reply(renderer(name).call_format.parser([ADD], opened), text)
        assert [(c.name, json.loads(c.arguments)) for c in made.calls] == [("add", {"a": 0})], name


@pytest.mark.parametrize("kind", ["plain", "thoughts"])
def test_a_conversation_is_split_exactly_where_its_history_is_rewritten(kind: str) -> None:
    """One example equals the whole conversation as transformers renders it, up to its last end."""
    for name in NAMES:
        encoded = encode(name, kind)
        tools = [ADD] if name.endswith("tool-use") else None
        assert (len(encoded.examples) == 1) == (name in WHOLE[kind]), name
        if len(encoded.examples) > 1:
            continue
        tokens = encoded.examples[0].tokens
        text = renderer(name).shown(tokens)
        rendered = whole(name, conversation(name, kind), False, tools)
        assert tokens[:-1] == ids(name, rendered)[: len(tokens) - 1], name
        assert rendered.startswith(text) or name == "glm-4.5", name


def test_texts_that_look_like_marks_of_the_template_end_no_reply() -> None:
    for name in NAMES:
        if name == "command-r-plus-tool-use" or name.endswith("tool-use"):
            continue
        for text in (
            "|",
            ">",
            "end",
            "assistant",
            "<|im_end|> no end",
            "</s>",
            "<|user|>hi",
            "\u00e9 ",
        ):
            messages = [said("user", "question"), said("assistant", text)] * 2
            encoded = encode_conversation(renderer(name), Task("t", tuple(messages)), "assistant")
            for example in encoded.examples:
                for start, stop in example.spans:
                    ends = [t in renderer(name).stop_token_ids for t in example.tokens[start:stop]]
                    assert ends == [False] * (stop - start - 1) + [True], (name, text)
                    reply = renderer(name).decode(example.tokens[start:stop])
                    assert reply.strip().endswith(text.strip()), (name, text)
                    assert "question" not in reply


def test_a_reply_that_the_next_message_repeats_ends_where_it_ends() -> None:
    """GLM ends a reply with the mark of the next message."""
    turns = (said("user", "q"), said("assistant", "hi"), said("user", "hi"), said("assistant", "x"))
    encoded = encode_conversation(renderer("glm-4.5"), Task("t", turns), "assistant")
    (example,) = encoded.examples
    said_ = [renderer("glm-4.5").shown(example.tokens[a:b]) for a, b in example.spans]
    assert said_ == [f"\n<think></think>\n{text}<|user|>" for text in ("hi", "x")]


def test_mistral_shows_the_system_message_only_in_the_last_question() -> None:
    encoded = encode("mistral", "system")
    texts = [renderer("mistral").shown(example.tokens) for example in encoded.examples]
    assert [text.count("be good") for text in texts] == [1, 1, 1]
    assert all(f"[/INST] answer {n}\n\n- last</s>" in texts[n // 2] for n in (1, 3, 5))
    assert encoded.rewritten == 0


@pytest.mark.parametrize(
    ("name", "text", "hidden"),
    [
        ("qwen3-thinking", "because\n</think>\n\nyes<|im_end|>", 0),  # the prompt opens a block
        ("r1-distill", "because\n</think>\n\nyes<｜end▁of▁sentence｜>", 0),
        ("qwen2.5", "yes<|im_end|>", 1),
    ],
)
def test_reasoning_in_a_field_of_its_own(name: str, text: str, hidden: int) -> None:
    turns = (said("user", "q"), said("assistant", "yes", reasoning_content="because"))
    encoded = encode_conversation(renderer(name), Task("t", turns), "assistant")
    ((example,), ((start, stop),)) = encoded.examples, encoded.examples[0].spans
    assert renderer(name).shown(example.tokens[start:stop]) == text
    assert encoded.hidden == hidden


def test_what_is_trained() -> None:
    name = "qwen2.5"
    every = encode(name, "system").examples[0]
    last = encode(name, "system", "last").examples[0]
    whole_ = encode(name, "system", "all").examples[0]
    assert len(every.spans) == 3
    assert every.tokens == last.tokens == whole_.tokens
    assert last.spans == every.spans[-1:] and whole_.spans == ((1, len(every.tokens)),)
    messages = [{**m} for m in conversation(name, "system")]
    messages[2]["weight"] = 0
    weighed = encode_conversation(renderer(name), Task("t", tuple(messages)), "assistant")  # type: ignore[arg-type]
    assert weighed.examples[0].tokens == every.tokens
    assert weighed.examples[0].spans == every.spans[1:]


def test_a_pair_of_texts_needs_no_template() -> None:
    bare = Renderer(tokenizer("qwen2.5"))
    bare = bare.copy()
    bare.tokenizer.chat_template = None
    task = Task("t", "question: ", trace="answer 1")
    (example,) = encode_conversation(bare, task, "assistant").examples
    start, stop = example.spans[0]
    assert bare.shown(example.tokens) == "question: answer 1<|im_end|>"
    assert bare.shown(example.tokens[start:stop]) == "answer 1<|im_end|>"
    with pytest.raises(UserError, match=r"task t .*model\.chat_template = FILE"):
        encode_conversation(bare, Task("t", conversation("qwen2.5", "plain")), "assistant")


def test_a_pair_of_texts_is_the_conversation_of_one_question() -> None:
    for name in NAMES:
        if name == "command-r-plus-tool-use" or name.endswith("tool-use"):
            continue
        turns = (said("user", "question"), said("assistant", "answer"))
        pair = encode_conversation(renderer(name), Task("t", "question", trace="answer"), "last")
        chat = encode_conversation(renderer(name), Task("t", turns), "last")
        assert pair.examples == chat.examples, name


def test_a_text_that_was_encoded_before_has_the_same_tokens() -> None:
    """Also if the caller has changed the list that it was given."""
    special = SpecialTexts(tokenizer("qwen2.5"))
    texts = ["<|im_start|>user\n", "<|im_start|>user\nhello"]
    fresh = SpecialTexts(tokenizer("qwen2.5")).encode_rendered(texts)
    special.encode_rendered(texts[:1])[0].append(-1)
    assert special.encode_rendered(texts) == fresh
    special.encode_rendered(texts)[0].append(-1)
    assert special.encode_rendered(texts) == fresh
    assert special.encode_rendered(texts[::-1]) == fresh[::-1]
