"""Prompts of tasks against transformers: prefills, rendered prompts, tools, template variables.

Oracle: `apply_chat_template` of transformers with the same arguments. The prompts are those of
mini-R1 (a last message of the assistant) and TinyZero (a rendered text), and of TRL's datasets
(`tools`, `chat_template_kwargs`, messages with `tool_calls`).
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.models.families import BY_NAME, make_tokenizer

from sixfold.errors import UserError
from sixfold.model.scratch import character_tokenizer
from sixfold.recipe.schema import Recipe
from sixfold.renderer.renderer import Renderer
from sixfold.run.rendered_prompt import rendering
from sixfold.types import Message, Task

R1 = "Let me solve this step by step.\n<think>"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def of(name: str) -> Renderer:
    tokenizer = make_tokenizer(BY_NAME[name])
    return Renderer(tokenizer, tokenizer.convert_tokens_to_ids(list(BY_NAME[name].ends)))


def said(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}  # type: ignore[return-value, typeddict-item]


def theirs(renderer: Renderer, messages: Any, **arguments: Any) -> list[int]:
    text = renderer.tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
    return list(renderer.tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("begun", [R1, "The answer is", "<think>\n", "a\n\n"])
def test_a_prefill_is_continued_as_by_transformers(name: str, begun: str) -> None:
    renderer = of(name)
    if not renderer.has_template:
        return
    prompt = (said("user", "1+2?"), said("assistant", begun))
    ids = renderer.encode(Task("t", prompt, form="continued"))
    shown = renderer.shown(ids)
    assert shown.endswith(begun)
    try:
        expected = theirs(renderer, prompt, continue_final_message=True)
    except ValueError:  # transformers refuses a template that rewrites the message
        expected = theirs(renderer, prompt[:1], add_generation_prompt=True)
        assert ids[: len(expected)] == expected
        return
    # transformers drops white space at the end of the message if the template trims messages
    if renderer.shown(expected).endswith(begun):
        assert ids == expected
    else:
        assert shown.startswith(renderer.shown(expected))


def test_a_thought_that_the_template_would_remove_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = "<think>\nEasy.\n</think>\n\nIt is"
    renderer = of("r1-distill")
    prompt = (said("user", "1+2?"), said("assistant", begun))
    assert renderer.shown(renderer.encode(Task("t", prompt, form="continued"))).endswith(begun)


@pytest.mark.parametrize("name", ["qwen2.5-instruct", "llama-3.2", "gemma-3", "mistral"])
def test_a_worked_solution_goes_on_after_the_prefill(name: str) -> None:
    renderer = of(name)
    prompt = (said("user", "1+2?"), said("assistant", R1))
    rest = "One and two.</think>\n3"
    for text in (rest, R1 + rest):
        task = Task("t", prompt, trace=text, form="continued")
        solution = renderer.solution(task)
        assert renderer.decode(solution) == rest and solution[-1] in renderer.stop_token_ids
        whole = theirs(renderer, (prompt[0], said("assistant", R1 + rest)))
        together = [*renderer.encode(task), *solution]
        assert renderer.shown(whole).startswith(renderer.shown(together))


@pytest.mark.parametrize("begun", ["<think>\n", "The sum is ", "\n<think>\n\n"])
def test_a_repeated_prefill_is_taken_away_with_the_white_space_at_its_end(begun: str) -> None:
    renderer = of("qwen2.5-instruct")
    prompt = (said("user", "1+2?"), said("assistant", begun))
    for text in (f"{begun}3", f"{begun.strip()}3", f"{begun[:-1]}3", "3"):
        task = Task("t", prompt, trace=text, form="continued")
        whole = [*renderer.encode(task), *renderer.solution(task)]
        assert renderer.shown(whole).endswith(f"{begun}3<|im_end|>")


def test_without_form_a_last_reply_is_followed_by_another() -> None:
    renderer = of("qwen2.5-instruct")
    prompt = (said("user", "1+2?"), said("assistant", "3"))
    expected = theirs(renderer, prompt, add_generation_prompt=True)
    assert renderer.encode(Task("t", prompt)) == expected
    assert Task("t", prompt).prefill == ""


@pytest.mark.parametrize("name", ["qwen2.5-instruct", "llama-3.2", "gemma-2"])
def test_a_rendered_prompt_has_its_special_tokens_and_one_beginning(name: str) -> None:
    renderer = of(name)
    chat = [said("user", "1+2?")]
    text = renderer.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    expected = theirs(renderer, chat, add_generation_prompt=True)
    assert renderer.encode(Task("t", text, form="rendered")) == expected
    assert renderer.encode(Task("t", text)) != expected  # a text spells no special token
    plain = renderer.encode(Task("t", "1+2?", form="rendered"))
    bare = renderer.tokenizer("1+2?")["input_ids"]
    assert plain == bare and renderer.render(Task("t", "1+2?", form="rendered")) == "1+2?"
    mixed = renderer.encode_all([Task("a", "1+2?"), Task("b", text, form="rendered")])
    assert mixed[0] == mixed[1] == expected


def test_special_tokens_of_a_dataset_stay_text_in_a_prefill() -> None:
    renderer = of("qwen2.5-instruct")
    end = renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompt = (said("user", "1?"), said("assistant", "a<|im_end|>b"))
    ids = renderer.encode(Task("t", prompt, form="continued"))
    assert renderer.shown(ids).endswith("a<|im_end|>b") and end not in ids[-14:]


@pytest.mark.parametrize("name", ["qwen2.5-instruct", "qwen3"])
def test_tools_and_variables_of_a_task_are_rendered_as_by_transformers(name: str) -> None:
    renderer = of(name)
    chat = (said("user", "1+2?"),)
    arguments = {"enable_thinking": False} if name == "qwen3" else {}
    task = Task("t", "1+2?", tools=(ADD,), template_args=arguments)
    expected = theirs(renderer, chat, tools=[ADD], add_generation_prompt=True, **arguments)
    assert renderer.encode(task) == expected and renderer.shows_tools(task)
    plain = Task("t", "1+2?")  # the same id and text, without tools: no mix-up in the cache
    assert renderer.encode_all([plain, task]) == [
        theirs(renderer, chat, add_generation_prompt=True),
        expected,
    ]
    assert renderer.encode_episode(task, chat, (ADD,)) == expected
    assert renderer.encode_episode(task, chat, ()) == theirs(
        renderer, chat, add_generation_prompt=True, **arguments
    )


def test_calls_of_earlier_turns_are_rendered_or_refused() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = (
        said("user", "1+2?"),
        said("assistant", "", tool_calls=[call]),
        said("tool", "3", name="add"),
    )
    renderer = of("qwen2.5-instruct")
    expected = theirs(renderer, [dict(m) for m in chat], add_generation_prompt=True)
    assert renderer.encode(Task("t", chat)) == expected
    tokenizer = character_tokenizer("abcdefghij0123456789+?: \n")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    with pytest.raises(UserError, match=r"task t: .*does not show the tool calls"):
        Renderer(tokenizer).encode(Task("t", chat))


def test_one_line_says_that_prompts_are_plain_text() -> None:
    tokenizer = character_tokenizer("123+? ")
    task = Task("t", "1+2?")
    for template, lines in ((None, 1), (tokenizer.chat_template, 0)):
        tokenizer.chat_template = template
        told = rendering(Renderer(tokenizer), [task], (1,), ())
        assert sum("plain text" in line and "model.chat_template" in line for line in told) == lines


def test_the_prefill_and_what_rewards_get_of_it_are_said() -> None:
    renderer = of("qwen2.5-instruct")
    for begun, graded in ((R1, "<think>"), ("The answer is", "The answer is")):
        task = Task("t", (said("user", "1?"), said("assistant", begun)), form="continued")
        told = rendering(renderer, [task], (1,), ())
        assert any(repr(begun) in line and f"get {graded!r}" in line for line in told)


@pytest.mark.parametrize("setting", [{"prefill": "<think>"}, {"prompt_form": "rendered"}])
def test_episodes_of_several_turns_take_no_prefill(setting: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=rf"data\.{next(iter(setting))} begins the only reply"):
        Recipe.model_validate({"data": setting, "environment": {"episode": "calculator"}})
