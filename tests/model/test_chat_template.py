"""Chat templates: what ends a turn, the settings that change a template, and templates that cannot
be used.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from tests.models.families import BY_NAME, TEMPLATES, make_tokenizer
from transformers import PreTrainedTokenizerFast

from sixfold.errors import UserError
from sixfold.model.chat_template import TemplateRefusal, render, set_template
from sixfold.model.turn_end import TurnEnd, turn_end
from sixfold.renderer.renderer import Renderer, RenderError
from sixfold.renderer.think import continued_block, opened_block

QWEN = make_tokenizer(BY_NAME["qwen3-base"])
END, START, EOS = (
    QWEN.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
)
USER = [{"role": "user", "content": "q"}]
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}"


def with_template(template: Any) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(QWEN)
    tokenizer.chat_template = template
    return tokenizer


def looped(turn: str, after: str = "") -> str:
    return "{% for m in messages %}" + turn + "{% endfor %}" + after


ENDS = {
    "the token after the answer": (looped(TURN + "<|im_end|>\n"), TurnEnd((END,))),
    "the first of two": (looped(TURN + "<|im_end|>\n", "<|endoftext|>"), TurnEnd((END,))),
    "text before the token": (looped(TURN + "\n### End<|im_end|>"), TurnEnd((END,))),
    "content is trimmed": (
        looped("{{ m.content | trim }} {{ '<|im_end|>' if m.role == 'assistant' }}"),
        TurnEnd((END,)),
    ),
    "content is in upper case": (looped("{{ m.content | upper }}<|im_end|>"), TurnEnd((END,))),
    "the last turn is left open": (
        looped(TURN + "{{ '' if loop.last else '<|im_end|>' }}"),
        TurnEnd((END,)),
    ),
    "the next turn's token": (looped(TURN + "\n"), TurnEnd((START,))),
    "another end in the last turn": (
        looped(TURN + "{{ '<|endoftext|>' if loop.last else '<|im_end|>' }}"),
        TurnEnd((EOS,)),
    ),
    "a conversation must end with a question": (
        "{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}"
        + looped(TURN + "<|im_end|>"),
        TurnEnd((END,)),
    ),
    "plain text": (
        (TEMPLATES / "plain-text.jinja").read_text(),
        TurnEnd(strings=("\n\n### User:",)),
    ),
    "plain text that ends every answer": (
        looped("{{ m.role }}: {{ m.content }}\n---\n"),
        TurnEnd(strings=("\n---",)),
    ),
    "nothing between turns": (looped("{{ m.content }}\n"), TurnEnd()),
    "no answers": (
        (
            "{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}{{"
            " messages[0].content }}"
        ),
        TurnEnd(),
    ),
    "answers are not shown": ("{{ messages[0].content }}<|im_end|>", TurnEnd()),
    "no template": (None, TurnEnd()),
}


@pytest.mark.parametrize("case", ENDS)
def test_what_ends_a_turn(case: str) -> None:
    template, expected = ENDS[case]
    assert turn_end(with_template(template)) == expected


def test_added_token_that_is_not_special_ends_a_turn() -> None:
    """As <|im_end|> in some fine-tuned models, and <｜User｜> in DeepSeek's."""
    tokenizer = make_tokenizer(BY_NAME["r1-distill"])
    tokenizer.chat_template = looped("<｜Assistant｜>{{ m.content }}<｜User｜>")
    assert turn_end(tokenizer) == TurnEnd((tokenizer.convert_tokens_to_ids("<｜User｜>"),))


def test_arguments_become_defaults_of_the_template_and_are_put_there_once() -> None:
    tokenizer = with_template(QWEN.chat_template)
    plain = render(tokenizer, USER)
    set_template(tokenizer, "auto", ["enable_thinking=False"])
    assert render(tokenizer, USER) == plain + "<think>\n\n</think>\n\n"
    first = tokenizer.chat_template
    set_template(tokenizer, "auto", ["enable_thinking=False"])  # as after a resume
    assert tokenizer.chat_template == first
    theirs = tokenizer.apply_chat_template(
        USER, tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    assert theirs == plain, "who calls the saved template may still say otherwise"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("x=3", "3"),
        ("x=high", "high"),
        ('x="3"', "3"),
        ("x=", ""),
        ("x=null", "None"),
        ("x=a'b\"{{c}}", "a'b\"{{c}}"),
        ("x=[1, 2]", "[1, 2]"),
    ],
)
def test_values_of_arguments(given: str, shown: str) -> None:
    tokenizer = with_template("{{ messages[0].content }}={{ x }}")
    set_template(tokenizer, "auto", [given])
    assert render(tokenizer, USER) == f"q={shown}"


def test_arguments_reach_macros() -> None:
    tokenizer = make_tokenizer(BY_NAME["gpt-oss"])
    set_template(tokenizer, "auto", ["reasoning_effort=high"])
    assert "Reasoning: high" in render(tokenizer, USER)


def test_which_template(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("mine {{ messages[0].content }}")
    several = {
        "default": "first {{ messages[0].content }}",
        "rag": "second {{ messages[0].content }}",
    }
    for own, choice, expected in [
        ("own {{ messages[0].content }}", "auto", "own q"), ("own", str(file), "mine q"),
        (several, "auto", "first q"), (several, "rag", "second q"),
    ]:  # fmt: skip
        tokenizer = with_template(own)
        set_template(tokenizer, choice, [])
        assert render(tokenizer, USER) == expected
    tokenizer = with_template("own")
    set_template(tokenizer, "none", [])
    assert tokenizer.chat_template is None
    tokenizer = with_template(None)
    set_template(tokenizer, "auto", [])
    assert tokenizer.chat_template is None


TOOL_USE = "{{ 'tools ' ~ (tools | length) }} {{ messages[0].content }}{{ effort }}<|im_end|>"
"""Refuses conversations without tools, as the templates of Hermes-3 and Command R+ do."""
SEVERAL = {"default": "{{ messages[0].content }}{{ effort }}", "tool_use": TOOL_USE}


@pytest.mark.parametrize("as_list", [True, False])
def test_of_several_templates_the_one_of_transformers_renders_also_when_saved(
    as_list: bool, tmp_path: Path
) -> None:
    listed = [{"name": name, "template": one} for name, one in SEVERAL.items()]
    made = PreTrainedTokenizerFast(
        tokenizer_object=QWEN._tokenizer, chat_template=listed if as_list else SEVERAL
    )
    set_template(made, "auto", ["effort=9"])
    set_template(made, "auto", ["effort=9"])  # as after a resume
    made.save_pretrained(tmp_path)
    for tokenizer in (made, PreTrainedTokenizerFast.from_pretrained(tmp_path)):
        assert render(tokenizer, USER) == "q9"
        assert render(tokenizer, USER, tools=[{}]) == "tools 1 q9<|im_end|>"
        assert str(tokenizer.apply_chat_template(USER, tools=[{}], tokenize=False)).endswith(
            "q9<|im_end|>"
        )
    set_template(made, "tool_use", [])
    assert made.chat_template.endswith(TOOL_USE)


def test_a_template_that_needs_tools_renders_them_and_has_an_end() -> None:
    tokenizer = with_template("{{ tools | length }}" + looped(TURN + "<|im_end|>\n"))
    set_template(tokenizer, "auto", [])
    assert turn_end(tokenizer) == TurnEnd((END,))
    renderer = Renderer(tokenizer, [END])
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert (
        renderer.shown(renderer.encode_messages(USER, [tool])) == "1<|im_start|>user\nq<|im_end|>\n"
    )
    with pytest.raises(RenderError, match="refuses these messages"):
        renderer.encode_messages(USER)
    tokenizer.chat_template = looped(TURN)
    with pytest.raises(RenderError, match="does not support tools"):
        Renderer(tokenizer, [END]).encode_messages(USER, [tool])


@pytest.mark.parametrize(
    ("own", "choice", "arguments", "said"),
    [
        ("{% if %}", "auto", [], r"does not parse.*model\.chat_template"),
        ("{{ messages[0].role }}", "auto", [], r"omits the text.*model\.chat_template"),
        (None, "auto", ["enable_thinking=false"], r"model\.template_args"),
        (
            "{{ messages[0].content }}",
            "no/such.jinja",
            [],
            r"model\.chat_template = 'no/such\.jinja'.*'none'",
        ),
        ({"rag": "{{ messages[0].content }}"}, "auto", [], r"model\.chat_template = 'auto'.*'rag'"),
    ],
)
def test_templates_that_cannot_be_used(
    own: Any, choice: str, arguments: list[str], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        set_template(with_template(own), choice, arguments)


@pytest.mark.parametrize(
    "fault",
    [
        "raise_exception('no')",
        "1 // 0",
        "messages[9].content.x",
        "none + 'x'",
        "messages[0].content.split('')",
    ],
)
def test_any_error_of_a_template_is_a_refusal(fault: str) -> None:
    with pytest.raises(TemplateRefusal):
        render(with_template("{{ " + fault + " }}"), USER)


def test_think_blocks_that_a_prompt_leaves_open() -> None:
    assert opened_block("<|im_start|>assistant\n<think>\n") == "<think>\n"
    assert opened_block("[/INST][THINK]") == "[THINK]"
    assert (
        opened_block("use <think> tags<|im_end|>\n<|im_start|>assistant\n")
        == opened_block("<think>\n\n</think>\n\n")
        == ""
    )
    assert continued_block("", "so") == "so"
    assert continued_block("<think>\n", "42") == "\n</think>\n\n42"
    assert continued_block("<think>\n", "<think>\nso\n</think>\n\n42") == "so\n</think>\n\n42"
    assert continued_block("<think>\n", "so\n</think>\n\n42") == "so\n</think>\n\n42"
    assert continued_block("[THINK]", "42") == "\n[/THINK]\n\n42"
