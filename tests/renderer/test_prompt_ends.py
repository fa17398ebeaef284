"""A prompt does not end with an end token, and only marks end a turn.

Look-alikes of public tokenizers, with the traits that matter: a post-processor `<s> $A </s>` (Llama
with add_eos_token, T5, ByT5) or `[CLS] $A [SEP]` (BERT), and added tokens of white space (Pythia,
Phi-2) or of brackets that are not special (DeepSeek's <|User|>).
"""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerFast

from sixfold.model.scratch import character_tokenizer
from sixfold.model.turn_end import turn_end
from sixfold.renderer.renderer import Renderer
from sixfold.trainer.sft import example
from sixfold.types import Task

BEGIN, END = "<|system|>", "<|end|>"
TURNS = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}"


def tokenizer(form: str, template: str | None = None) -> PreTrainedTokenizerFast:
    made = character_tokenizer("abcdefghij: 0123456789\n|[]USER")
    ids = [(name, made.convert_tokens_to_ids(name)) for name in (BEGIN, END)]
    made.bos_token = BEGIN
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(form, None, ids)
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    ("form", "before"),
    [
        (f"{BEGIN} $A {END}", [BEGIN]),
        (f"$A {END}", []),
        (f"$A {END} {END}", []),
        (f"{BEGIN} $A", [BEGIN]),
        (f"{END} $A {END}", [END]),
        ("$A", []),
    ],
)
def test_a_prompt_keeps_what_comes_before_a_text_and_not_what_comes_after(
    form: str, before: list[str]
) -> None:
    made = tokenizer(form)
    renderer = Renderer(made)
    expected = made.convert_tokens_to_ids([*before, *"abc"])
    task = Task("t", "abc", answer="de")
    assert renderer.encode(task) == renderer.encode_text("abc") == expected
    assert renderer.encode_all([task, Task("u", "ab")])[1] == expected[:-1]
    # The only end token of an example of SFT is the one after its solution.
    (trajectory,) = example(task, renderer.encode(task), renderer.solution(task)).trajectories
    assert trajectory.tokens == [*expected, *made.convert_tokens_to_ids(["d", "e", END])]


def test_an_empty_text_begins_with_the_token_that_begins_a_text() -> None:
    made = tokenizer(f"{BEGIN} $A {END}")
    assert Renderer(made).encode_text("") == [made.bos_token_id]


@pytest.mark.parametrize(
    ("added", "after", "strings", "tokens"),
    [
        (["\n\n", "  "], "\n\n", ("\n\nu:",), []),
        (["\n\n"], "\n\n<|end|>", (), [END]),
        (["hi j"], "hi j", ("hi j",), []),
        (["[USER]"], "[USER]", (), ["[USER]"]),
        ([], "\n<|end|>\n", (), [END]),
    ],
)
def test_white_space_and_words_of_the_vocabulary_end_no_turn(
    added: list[str], after: str, strings: tuple[str, ...], tokens: list[str]
) -> None:
    template = TURNS + "{{ '" + after.replace("\n", "\\n") + "' }}{% endfor %}"
    made = tokenizer("$A", template)
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    found = turn_end(made)
    assert list(found.tokens) == made.convert_tokens_to_ids(tokens)
    assert found.strings == strings
