"""Suffixes after a sampled reply: equal to the template's own rendering, or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.families import BY_NAME, Family, make_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sixfold.errors import UserError
from sixfold.model.chat_template import render
from sixfold.model.scratch import character_tokenizer
from sixfold.renderer.renderer import Renderer, RenderError

Messages = list[dict[str, Any]]

FAMILIES: dict[str, Family] = {
    **BY_NAME,
    "mistral-v7": replace(
        BY_NAME["mistral"],
        template="mistral-v7",
        special=(*BY_NAME["mistral"].special, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    ),
    "deepseek-v3": replace(BY_NAME["r1-distill"], template="deepseek-v3"),
}
END = {
    "qwen2.5-base": "<|im_end|>",
    "qwen2.5-instruct": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3-thinking": "<|im_end|>",
    "llama-3.2": "<|eot_id|>",
    "gemma-2": "<end_of_turn>",
    "gemma-3": "<end_of_turn>",
    "mistral": "</s>",
    "mistral-v7": "</s>",
    "r1-distill": "<｜end▁of▁sentence｜>",
    "deepseek-v3": "<｜end▁of▁sentence｜>",
    "smollm2": "<|im_end|>",
    "phi-3": "<|end|>",
    "gpt-oss": "<|return|>",
}
LEAD = {"mistral": " ", "gpt-oss": "<|channel|>final<|message|>"}
"""What the policy must sample before its reply to match the template."""

TOOLS: Messages = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@cache
def family(name: str) -> Renderer:
    tokenizer = make_tokenizer(FAMILIES[name])
    return Renderer(tokenizer, tokenizer.convert_tokens_to_ids(list(FAMILIES[name].ends)))


def messages(roles: str, text: str = "a b") -> Messages:
    """Messages from letters: s(ystem), u(ser), a(ssistant), t(ool)."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    extra = {"tool": {"name": "add", "tool_call_id": "abcdefghi"}}
    return [
        {"role": names[role], "content": f"{text}{at}", **extra.get(names[role], {})}
        for at, role in enumerate(roles)
    ]


def whole(renderer: Renderer, conversation: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """The conversation up to the next turn, as transformers renders it."""
    return str(
        renderer.tokenizer.apply_chat_template(
            [dict(m) for m in conversation], tokenize=False, add_generation_prompt=True, **options
        )
    )


def ids(renderer: Renderer, text: str, before: str = "") -> list[int]:
    """Token ids of a text that the policy samples after `before`."""
    return [
        *renderer.tokenizer(before + text, add_special_tokens=False)["input_ids"][
            len(renderer.tokenizer(before, add_special_tokens=False)["input_ids"]) :
        ]
    ]


def play(name: str, first: Messages, turns: Sequence[tuple[str, Messages]]) -> str:
    """Play a conversation of replies and new messages. Returns all tokens as text.

    The result of each suffix is compared with the whole conversation as the template renders it.
    """
    renderer, end = family(name), END[name]
    tokens, conversation = renderer.encode_messages(first), tuple(first)
    for text, new in turns:
        reply = ids(renderer, LEAD.get(name, "") + text + end, renderer.shown(tokens))
        suffix = renderer.suffix(conversation, reply, new)
        said = renderer.opened(tokens) + text
        plain = [*conversation, {"role": "assistant", "content": said}, *new]
        tokens = [*tokens, *reply, *suffix.tokens]
        conversation = suffix.conversation
        assert len(suffix.provenance) == len(suffix.tokens)
        assert tokens == ids(renderer, whole(renderer, plain))
    return renderer.shown(tokens)


WORKS = {  # family: accepted sequences; the first letters are the prompt, one group per reply
    "qwen2.5-instruct": "u/u su/u u/t u/tt u/tu u/su u/u/u su/t/u/t",
    "qwen3": "u/u su/u u/t u/tt u/su u/u/u su/t/t u/t/u",
    "qwen3-thinking": "u/u u/t",  # thoughts that did not end
    "llama-3.2": "u/u su/u u/t u/tt u/su u/u/u su/t/u/t",
    "gemma-3": "u/u su/u u/u/u",
    "mistral": "u/u u/t u/tt u/u/u u/t",
    "mistral-v7": "u/u su/u u/su u/u/u",
    "deepseek-v3": "u/u su/u u/t u/tt u/u/u su/t/u/t",
    "r1-distill": "u/u",  # a thought that did not end
}
REFUSED = {
    "gemma-3": "u/t u/uu u/su",  # the roles must alternate
    "mistral": "su/u u/uu u/su",  # the system message moves into the last user message
    "mistral-v7": "u/t",
    "deepseek-v3": "u/su",  # all system messages go to the front
    "r1-distill": "u/su",
    "gpt-oss": "u/u su/u u/su",  # an earlier reply ends with another token
}


def cases(table: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(name, case) for name, text in table.items() for case in text.split()]


def turns(case: str) -> tuple[Messages, list[tuple[str, Messages]]]:
    first, *following = case.split("/")
    return messages(first), [(f"r{n}", messages(new, "c ")) for n, new in enumerate(following)]


@pytest.mark.parametrize(("name", "case"), cases(WORKS))
def test_a_suffix_equals_the_rendering_of_the_whole_conversation(name: str, case: str) -> None:
    play(name, *turns(case))


@pytest.mark.parametrize(("name", "case"), cases(REFUSED))
def test_templates_that_cannot_continue_are_refused_and_named(name: str, case: str) -> None:
    family(name).tokenizer.name_or_path = f"org/{name}"
    with pytest.raises(UserError, match=rf"model\.chat_template.*org/{name}.*FILE"):
        play(name, *turns(case))


THOUGHT = "<think>\nhm\n</think>\n\n42"


def test_thoughts_stay_where_the_template_keeps_them() -> None:
    """Qwen3 keeps the thoughts of a reply until the next user message."""
    text = play("qwen3", messages("u"), [(THOUGHT, messages("t")), (THOUGHT, messages("tt"))])
    assert text.count("hm") == 2
    opened = THOUGHT.removeprefix("<think>\n")
    assert play("qwen3-thinking", messages("u"), [(opened, messages("t"))]).count("hm") == 1


def played(
    renderer: Renderer, end: str, replies: Sequence[tuple[str, str]], tools: Messages
) -> str:
    """Play a conversation whose template changes thoughts. Returns all tokens as text.

    Every reply ends with "42". What follows it is compared with the template's own rendering of the
    whole conversation.
    """
    conversation: Sequence[Mapping[str, Any]] = messages("u")
    text = renderer.shown(renderer.encode_messages(conversation, tools))
    for said, roles in replies:
        new = messages(roles, "c ")
        suffix = renderer.suffix(conversation, ids(renderer, said + end), new, tools)
        turn = {"role": "assistant", "content": said}
        plain = whole(renderer, [*conversation, turn, *new], tools=tools or None)
        text += said + end + renderer.shown(suffix.tokens)
        assert text.endswith("42" + plain.rpartition("42")[2])
        conversation = suffix.conversation
    return text


@pytest.mark.parametrize(
    ("name", "replies"),
    [
        ("qwen3", [(THOUGHT, "u"), ("42", "u"), (THOUGHT, "u")]),
        ("qwen3", [(THOUGHT, "t"), ("42", "u"), (THOUGHT, "t")]),
        ("qwen3-thinking", [("hm\n</think>\n\n42", "u"), ("hm 42", "u")]),
        ("r1-distill", [("hm</think>42", "u"), ("hm</think>42", "u")]),
        ("r1-distill", [("hm</think>42", "t")]),
    ],
)
def test_a_conversation_keeps_the_thoughts_that_the_template_removes(
    name: str, replies: list[tuple[str, str]]
) -> None:
    text = played(family(name), END[name], replies, [])
    assert text.count("hm") == sum("hm" in said for said, _ in replies)


CHANGES = {
    # Qwen3 without thinking: an empty thought in the prompt, none in history.
    "prompt": "{{ m.content }}|<think>\n\n</think>\n\n",
    # GLM-4.5 and Qwen3.5: an empty thought in history, none in the prompt.
    "history": "<think></think>{{ m.content }}|",
    # GLM-4.7: the prompt opens a thought, history has only a closing tag.
    "closing": "</think>{{ m.content }}|<think>",
    # Gemma 4: as Qwen3, with other tags.
    "channel": "{{ m.content }}|<|channel>thought\n<channel|>",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("said", ["42", "<think>\nhm\n</think>\n\n42"])
def test_thoughts_that_a_template_adds_are_not_put_before_what_was_sampled(
    change: str, said: str
) -> None:
    history, prompt = CHANGES[change].split("|", 1)
    tokenizer = make_tokenizer(BY_NAME["qwen3"])
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% set m = {'content': m.content.split('</think>')[-1]} %}" + history
        + "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + prompt + "{% endif %}"
    )  # fmt: skip
    renderer = Renderer(tokenizer, tokenizer.convert_tokens_to_ids(["<|im_end|>"]))
    said = said.removeprefix("<think>\n") if renderer.opened(ids(renderer, prompt)) else said
    text = played(renderer, "<|im_end|>", [(said, "u"), (said, "tt")], [])
    assert text.count("<|im_start|>assistant\n" + prompt + said + "<|im_end|>") == 2


def gpt_oss_call(thought: str) -> str:
    return (
        f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant to=functions.add"
        "<|channel|>commentary json<|message|>{}<|call|>"
    )


def test_results_of_tools_where_the_template_needs_a_call() -> None:
    """gpt-oss: the suffix follows the sampled call, twice."""
    renderer, conversation, history = family("gpt-oss"), tuple(messages("u")), messages("u")
    tokens = renderer.encode_messages(conversation, TOOLS)
    for turn in range(2):
        reply = ids(renderer, gpt_oss_call(f"hm{turn}"))
        new = messages("t", f"<|end|>{turn}")
        suffix = renderer.suffix(conversation, reply, new, TOOLS)
        tokens, conversation = [*tokens, *reply, *suffix.tokens], suffix.conversation
        call = {"type": "function", "function": {"name": "add", "arguments": {}}}
        history += [
            {"role": "assistant", "content": f"hm{turn}", "tool_calls": [call]},
            *new,
        ]
    assert renderer.shown(tokens) == whole(renderer, history, tools=TOOLS)
    end = renderer.tokenizer.convert_tokens_to_ids("<|end|>")
    # system, tools, user; per turn: thought and result. Those that the results spell are text.
    assert tokens.count(end) == 3 + 2 * 2


@pytest.mark.parametrize("name", ["qwen2.5-instruct", "qwen3", "llama-3.2", "mistral"])
def test_lists_of_tools_stay_at_the_front(name: str) -> None:
    renderer = family(name)
    conversation, new = messages("u"), messages("t")
    reply = ids(renderer, LEAD.get(name, "") + "r" + END[name])
    suffix = renderer.suffix(conversation, reply, new, TOOLS)
    turn = {"role": "assistant", "content": "r"}
    tokens = [*renderer.encode_messages(conversation, TOOLS), *reply, *suffix.tokens]
    assert renderer.shown(tokens) == whole(renderer, [*conversation, turn, *new], tools=TOOLS)


def test_a_list_of_tools_that_moves_is_refused() -> None:
    """Mistral puts the tools before the last user message."""
    reply = ids(family("mistral"), " r</s>")
    with pytest.raises(UserError, match=r"model\.chat_template"):
        family("mistral").suffix(messages("u"), reply, messages("u", "c"), TOOLS)


def test_provenance_marks_the_content_of_new_messages() -> None:
    renderer = family("qwen2.5-instruct")
    new = [
        {"role": "tool", "content": "user"},
        {"role": "tool", "content": ""},
        {"role": "user", "content": "<|im_end|>tool"},
    ]
    suffix = renderer.suffix(messages("u"), ids(renderer, "r<|im_end|>"), new)
    text = "".join(
        f"[{renderer.piece(token)}]" if letter == "o" else renderer.piece(token)
        for token, letter in zip(suffix.tokens, suffix.provenance, strict=True)
    ).replace("][", "")
    assert text == (
        "\n<|im_start|>user\n<tool_response>\n[user]\n</tool_response>\n<tool_response>\n"
        "\n</tool_response><|im_end|>\n<|im_start|>user\n[<|im_end|>tool]<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ends = renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert suffix.tokens.count(ends) == 2, "the one that the message spells stays text"


def test_content_that_a_template_writes_as_json_is_an_observation() -> None:
    renderer = family("llama-3.2")
    new = [{"role": "tool", "content": 'say "x"'}]
    suffix = renderer.suffix(messages("u"), ids(renderer, "r<|eot_id|>"), new)
    said = [t for t, letter in zip(suffix.tokens, suffix.provenance, strict=True) if letter == "o"]
    assert renderer.shown(said) == r"say \"x\""


def test_an_equal_suffix_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(FAMILIES["qwen3"])
    renderer = Renderer(tokenizer, tokenizer.convert_tokens_to_ids(["<|im_end|>"]))
    rendered: list[Any] = []

    def counted(*args: Any, **options: Any) -> str:
        rendered.append(args)
        return render(*args, **options)

    monkeypatch.setattr("sixfold.renderer.suffix.render", counted)
    ended, cut = ids(renderer, "a b<|im_end|>"), ids(renderer, "a b")
    first = renderer.suffix(messages("u"), ended, messages("t"))
    expected, count = list(first.tokens), len(rendered)
    first.tokens.clear()
    again = renderer.suffix(messages("u"), ended, messages("t"))
    assert (again.tokens, len(rendered)) == (expected, count)
    assert again.conversation == first.conversation
    for conversation, reply, new, tools in (
        (messages("su"), ended, messages("t"), []),
        (messages("u"), cut, messages("t"), []),
        (messages("u"), ended, messages("t", "b a"), []),
        (messages("u"), ended, messages("t"), TOOLS),
    ):
        count = len(rendered)
        renderer.suffix(conversation, reply, new, tools)
        assert len(rendered) > count


@pytest.mark.parametrize("end", ["", "<|endoftext|>"])
def test_a_turn_that_did_not_end_is_ended(end: str) -> None:
    """By a stop string, by the token limit, or by another end token than the template's."""
    renderer = family("qwen2.5-base")
    suffix = renderer.suffix(messages("u"), ids(renderer, "r)" + end), messages("u", "q"))
    assert renderer.shown(suffix.tokens) == (
        "<|im_end|>\n<|im_start|>user\nq0<|im_end|>\n<|im_start|>assistant\n"
    )
    assert suffix.provenance[0] == "t"


def test_an_end_of_turn_in_plain_text_is_not_repeated() -> None:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyzAU# :\n0")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '### ' + m.role.capitalize() + ':\n' + m.content + '\n\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
    )
    renderer = Renderer(tokenizer)
    for said, missing in (("r", "\n\n### User:"), ("r\n\n### User:", "")):
        suffix = renderer.suffix(messages("u"), ids(renderer, said), messages("u", "q"))
        assert renderer.shown(suffix.tokens) == missing + "\nq0\n\n### Assistant:\n"
        assert suffix.conversation[1] == {"role": "assistant", "content": "r"}


def test_invalid_observations_are_refused() -> None:
    renderer = family("qwen2.5-instruct")
    reply = ids(renderer, "r<|im_end|>")
    with pytest.raises(RenderError):
        renderer.suffix(messages("u"), reply, messages("a"))
    with pytest.raises(RenderError):
        renderer.suffix_text(reply, "more")
    bare = Renderer(character_tokenizer("abu r"))
    bare.tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"model\.chat_template"):
        bare.suffix(messages("u"), [7], messages("u"))
    with pytest.raises(RenderError):
        bare.suffix_text([7], "\u00a7")


@pytest.mark.parametrize("name", ["qwen3", "gemma-3", "mistral", "phi-3"])
@pytest.mark.parametrize("said", ["", "c(1+2)", "x "])
def test_text_continues_a_turn_exactly(name: str, said: str) -> None:
    renderer = family(name)
    reply = ids(renderer, said)
    end = FAMILIES[name].eos
    suffix = renderer.suffix_text(reply, f"=3#{end} y")
    assert renderer.tokenizer.convert_tokens_to_ids(end) not in suffix.tokens
    assert set(suffix.provenance) == {"o"}
    if said:
        assert renderer.shown([*reply, *suffix.tokens]) == renderer.shown(reply) + f"=3#{end} y"


@cache
def trained(name: str) -> Renderer:
    """A family's template on a tokenizer that merges characters and words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["user\n\nassistant\n", "hello ) there\n\n", "a\n\nb c"] * 9, trainer
    )
    like = make_tokenizer(FAMILIES[name])
    tokenizer.add_special_tokens([t for t in like.added_tokens_decoder.values() if t.special])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=like.chat_template,
        eos_token=like.eos_token,
        bos_token=like.bos_token,
    )
    return Renderer(made, made.convert_tokens_to_ids(list(FAMILIES[name].ends)))


TEXT = st.text(alphabet="ab \n)<>|\u00e9user\u4f60", max_size=12) | st.sampled_from(
    ["<|im_end|>", "</s>", "<|eot_id|>user", "<end_of_turn>", "<tool_response>"]
)
CONTINUES = (
    "qwen2.5-base",
    "qwen3",
    "llama-3.2",
    "gemma-3",
    "mistral-v7",
    "deepseek-v3",
    "smollm2",
)


def test_an_empty_message_that_the_template_writes_elsewhere_is_refused() -> None:
    """DeepSeek's template writes system messages at the top, where an empty one changes nothing."""
    renderer = family("deepseek-v3")
    prompt = ({"role": "user", "content": ""},)
    reply = [renderer.tokenizer.convert_tokens_to_ids(END["deepseek-v3"])]
    new = [{"role": "system", "content": ""}, {"role": "user", "content": ""}]
    with pytest.raises(UserError, match="renders the earlier turns differently"):
        renderer.suffix(prompt, reply, new)
    assert renderer.suffix(prompt, reply, new[1:]).tokens


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(data=st.data(), name=st.sampled_from(CONTINUES), merges=st.booleans())
def test_any_conversation_is_rendered_as_the_template_does_or_refused(
    data: st.DataObject, name: str, merges: bool
) -> None:
    # Mistral's tokenizer adds a space before a special token that is spelled as text.
    renderer = trained(name) if merges or name == "mistral-v7" else family(name)
    first = messages(data.draw(st.sampled_from(["u", "su"])), data.draw(TEXT))
    conversation: tuple[Mapping[str, Any], ...] = tuple(first)
    tokens, sampled = renderer.encode_messages(first), []
    history = list(first)
    for _ in range(data.draw(st.integers(1, 3))):
        text = data.draw(TEXT).strip()
        end = renderer.tokenizer.convert_tokens_to_ids(END[name])
        reply = [*renderer.suffix_text(tokens, text).tokens, end]
        roles = data.draw(st.sampled_from(["u", "u", "t", "tt", "tu", "uu", "su"]))
        new = [m | {"content": data.draw(TEXT)} for m in messages(roles)]
        try:
            suffix = renderer.suffix(conversation, reply, new)
        except UserError as error:
            assert "model.chat_template" in str(error)
            assert roles != "u" or history[0]["role"] == "system" or name == "r1-distill"
            return
        history += [{"role": "assistant", "content": text}, *new]
        start = len(tokens)
        tokens = [*tokens, *reply, *suffix.tokens]
        sampled.append((start, reply))
        conversation = suffix.conversation
        assert renderer.shown(tokens) == whole(renderer, history)
        assert len(suffix.provenance) == len(suffix.tokens) and set(suffix.provenance) <= {*"to"}
    assert all(tokens[at : at + len(reply)] == reply for at, reply in sampled)
