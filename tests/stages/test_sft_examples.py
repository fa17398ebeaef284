"""Examples of an SFT stage: which tokens have a loss, their order, and limits of length."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from sixfold.batch import collate
from sixfold.data.task_set import TaskSet
from sixfold.errors import UserError
from sixfold.model.scratch import character_tokenizer
from sixfold.recipe.schema import SftConfig
from sixfold.renderer.renderer import Renderer
from sixfold.stages.examples import Examples
from sixfold.stages.sft_examples import ConversationExamples
from sixfold.trainer.sft import SupervisedLoss
from sixfold.types import Group, Message, Task
from tests.models.families import BY_NAME, make_tokenizer


@cache
def renderer(name: str = "qwen2.5-instruct") -> Renderer:
    family = BY_NAME[name]
    tokenizer = make_tokenizer(family)
    return Renderer(tokenizer, tokenizer.convert_tokens_to_ids(list(family.ends)))


def said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def chat(name: str, *texts: str) -> Task:
    """A conversation of questions and replies in turn."""
    roles = ("user", "assistant") * len(texts)
    return Task(name, tuple(said(role, text) for role, text in zip(roles, texts, strict=False)))


def made(
    train: list[Task],
    heldout: list[Task] | None = None,
    *,
    name: str = "qwen2.5-instruct",
    context: int = 500,
    overlong: str = "error",
    weights: dict[str, float] | None = None,
    **sft: Any,
) -> ConversationExamples:
    tasks = TaskSet(train, heldout or [], weights=weights or {})
    settings = SftConfig(**{"examples_per_step": 2} | sft)
    return ConversationExamples(
        tasks, renderer(name), settings, context=context, overlong=overlong, seed=3
    )


def spans(group: Group, name: str = "qwen2.5-instruct") -> list[str]:
    (one,) = group.trajectories
    return [renderer(name).shown(one.tokens[turn.start : turn.stop]) for turn in one.turns]


def gradient_positions(groups: list[Group]) -> list[list[int]]:
    """Positions of each row whose logits have a gradient in the loss of a step."""
    batch = SupervisedLoss().prepare(collate(groups))
    generator = torch.Generator().manual_seed(0)
    size = (*batch.tokens.shape, len(renderer().tokenizer) + 8)
    logits = torch.randn(size, generator=generator, requires_grad=True)
    logp: Tensor = torch.nn.functional.pad(
        logits[:, :-1].log_softmax(-1).gather(-1, batch.tokens[:, 1:, None])[:, :, 0], (1, 0)
    )
    SupervisedLoss().compute_loss(batch, logp).loss.backward()
    assert logits.grad is not None
    return [row.nonzero().flatten().tolist() for row in logits.grad.abs().sum(-1).bool()]


def test_the_loss_begins_at_the_last_token_of_each_prompt() -> None:
    """The logits at P - 1 predict the first token of a reply of which P tokens come before. Those
    at P - 2 have no gradient, and the last ones with a gradient predict the end of the turn.
    """
    texts = ("ab", "cde", "f", "gh")
    (group,) = made([chat("a", *texts)], examples_per_step=1).groups(1)
    tokenizer = renderer().tokenizer
    expected = []
    for at in (1, 3):
        turns = [dict(m) for m in group.task.prompt[:at]]  # type: ignore[arg-type]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        prompt = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        reply = len(texts[at]) + 1  # characters, and <|im_end|>
        expected += range(prompt - 1, prompt - 1 + reply)
        assert group.trajectories[0].tokens[prompt + reply - 1] == tokenizer.eos_token_id
    assert gradient_positions([group]) == [expected]


def test_the_loss_of_all_tokens_begins_at_the_second() -> None:
    (group,) = made([chat("a", "ab", "c")], examples_per_step=1, train_on="all").groups(1)
    length = len(group.trajectories[0].tokens)
    assert gradient_positions([group]) == [list(range(length - 1))]


def test_the_loss_of_the_last_reply() -> None:
    task = chat("a", "ab", "c", "d", "ef")
    (every,), (last,) = (
        made([task], examples_per_step=1, train_on=which).groups(1)
        for which in ("assistant", "last")
    )
    assert (spans(every), spans(last)) == (["c<|im_end|>", "ef<|im_end|>"], ["ef<|im_end|>"])
    assert last.trajectories[0].tokens == every.trajectories[0].tokens
    assert gradient_positions([last])[0] == gradient_positions([every])[0][-3:]


def test_an_epoch_has_every_conversation_once_and_steps_need_no_state() -> None:
    tasks = [chat(f"t{n}", f"q{n}", f"a{n}") for n in range(6)]
    examples: Examples = made(tasks)
    epochs = [
        [group.task.id for step in steps for group in examples.groups(step)]
        for steps in ((1, 2, 3), (4, 5, 6))
    ]
    assert [Counter(epoch) for epoch in epochs] == [Counter(task.id for task in tasks)] * 2
    assert epochs[0] != epochs[1]
    again = made(tasks)
    assert again.groups(5) == examples.groups(5)
    assert all(len(group.trajectories) == 1 for group in examples.groups(1))


def test_held_out_conversations_are_encoded_and_never_trained_on() -> None:
    tasks = [chat(f"t{n}", f"q{n}", f"a{n}") for n in range(4)]
    examples = made(tasks[:3], tasks[3:], examples_per_step=3)
    assert [group.task.id for group in examples.heldout] == ["t3"]
    assert spans(examples.heldout[0]) == ["a3<|im_end|>"]
    assert {group.task.id for step in (1, 2) for group in examples.groups(step)} == {
        "t0",
        "t1",
        "t2",
    }


def test_sources_are_drawn_by_weight() -> None:
    tasks = [
        replace(chat(f"{source}{n}", "q", "a"), source=source) for source in "ab" for n in range(8)
    ]
    examples = made(tasks, weights={"a": 3.0, "b": 1.0}, examples_per_step=4)
    drawn = Counter(g.task.source for step in range(1, 5) for g in examples.groups(step))
    assert drawn == {"a": 12, "b": 4}


def test_end_tokens_of_the_data_are_said_to_be_text() -> None:
    pair = Task("p", "q", trace="a<|im_end|>")
    examples = made([chat("c", "q", "a<|im_end|>"), pair, chat("d", "q", "<think>a</think>b")])
    (note,) = [note for note in examples.notes if "special tokens" in note]
    assert note.startswith("2 replies of training conversations")


def test_a_conversation_that_the_template_splits_stays_in_one_step() -> None:
    """Qwen3 removes the thoughts of earlier replies."""
    think = "<think>\nh\n</think>\n\n"
    task = chat("a", "q1", think + "x", "q2", think + "y")
    examples = made([task], name="qwen3", examples_per_step=1)
    groups = examples.groups(1)
    assert [spans(group, "qwen3") for group in groups] == [
        [think + "x<|im_end|>"],
        [think + "y<|im_end|>"],
    ]
    shown = renderer("qwen3").shown(groups[1].trajectories[0].tokens)
    assert shown.count("<think>") == 1 and "assistant\nx<|im_end|>" in shown
    assert [group.trajectories[0].sample for group in groups] == [0, 1]
    assert any("1 training conversations are trained as 2 examples" in n for n in examples.notes)
    whole = collate(groups)
    assert whole.mask.sum() == sum(group.sampled_tokens for group in groups)


def test_conversations_that_are_too_long() -> None:
    tasks = [chat("short", "q", "a"), chat("long", "q", "a" * 50)]
    (short,) = made(tasks[:1], examples_per_step=1).groups(1)
    fits = len(short.trajectories[0].tokens)
    for limits in ({"context": fits}, {"max_tokens": fits}):
        with pytest.raises(UserError, match=rf"task long: .* {fits + 49} tokens, but only {fits} "):
            made(tasks, **limits)  # type: ignore[arg-type]
        left = made(tasks, overlong="drop", **limits)  # type: ignore[arg-type]
        assert [group.task.id for group in left.groups(1)] == ["short"]
        assert any("1 of 2 training conversations are left out" in note for note in left.notes)
    with pytest.raises(UserError, match=rf"task short: .* {fits} tokens, but only {fits - 1} fit"):
        made(tasks, max_tokens=fits - 1)
    with pytest.raises(UserError, match=r"no training conversation is left.*sft\.max_tokens"):
        made(tasks[1:], overlong="drop", max_tokens=fits)


def test_a_source_of_which_nothing_is_left() -> None:
    tasks = [
        replace(chat("a", "q", "a"), source="a"),
        replace(chat("b", "q", "a" * 50), source="b"),
    ]
    with pytest.raises(UserError, match=r"data\.sources: no conversation of 'b' is left"):
        made(tasks, weights={"a": 1.0, "b": 1.0}, overlong="drop", max_tokens=60)


def test_contradictions() -> None:
    tasks = [chat("a", "q", "a")]
    with pytest.raises(UserError, match=r"sft\.max_tokens = 600 .*context of 500"):
        made(tasks, max_tokens=600)
    with pytest.raises(UserError, match=r"sft\.tasks = 2.*only 1"):
        made(tasks, tasks=2)
    assert any("sft.examples_per_step = 2" in note for note in made(tasks).notes)
    tokenizer = character_tokenizer("qa")
    tokenizer.chat_template = None
    bare = Renderer(tokenizer)
    with pytest.raises(UserError, match=r"task a .*model\.chat_template = FILE"):
        ConversationExamples(
            TaskSet(tasks, []), bare, SftConfig(), context=9, overlong="drop", seed=0
        )


def test_an_epoch_has_every_conversation_that_fills_a_step() -> None:
    examples = made([chat(f"c{i}", "a", "b" * (i + 1)) for i in range(5)])
    assert examples.steps_per_epoch == 2  # two conversations per step
    seen = [group.task.id for step in (1, 2) for group in examples.groups(step)]
    assert len(set(seen)) == 4
    tasks = [replace(chat(name, "a", "b"), source=name) for name in ("x", "y")]
    assert made(tasks, weights={"x": 1.0, "y": 1.0}).steps_per_epoch == 0
