"""Examples of preference training: tokens of pairs, limits of length, order, and counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from sixfold.data.comparisons import Comparison
from sixfold.data.task_set import TaskSet
from sixfold.errors import UserError
from sixfold.model.scratch import character_tokenizer
from sixfold.recipe.schema import ComparisonsConfig
from sixfold.renderer.conversation import Encoded, Example
from sixfold.renderer.renderer import Renderer
from sixfold.stages import preference_examples
from sixfold.stages.examples import Examples
from sixfold.stages.preference_examples import PreferenceExamples
from sixfold.types import Message, Trajectory
from tests.models.families import BY_NAME, make_tokenizer

LETTERS = character_tokenizer("abcdefgh?")
LETTERS.chat_template = None


def renderer() -> Renderer:
    """One token per character, no chat template."""
    return Renderer(LETTERS, [LETTERS.eos_token_id])


def compared(name: str, prompt: str, *texts: str, grades: tuple[float, ...] = ()) -> Comparison:
    """Completions in falling order of preference, unless grades are given."""
    falling = tuple(float(-k) for k in range(len(texts)))
    return Comparison(name, prompt, completions=texts, grades=grades or falling)


def made(
    train: list[Comparison],
    heldout: list[Comparison] | None = None,
    *,
    context: int = 50,
    overlong: str = "error",
    weights: dict[str, float] | None = None,
    examples_per_step: int = 8,
    **config: Any,
) -> PreferenceExamples:
    found = TaskSet([*train], [*(heldout or [])], weights=weights or {})
    return PreferenceExamples(
        found,
        renderer(),
        ComparisonsConfig(**config),
        examples_per_step=examples_per_step,
        context=context,
        overlong=overlong,
        seed=3,
    )


def said(one: Trajectory) -> str:
    """The completion as text. A dot stands for the end token."""
    tokens = one.tokens[one.prompt_length :]
    ended = tokens[-1] == LETTERS.eos_token_id
    return str(LETTERS.decode(tokens[:-1] if ended else tokens)) + "." * ended


def told(examples: PreferenceExamples) -> dict[str, list[str]]:
    return {
        group.task.id: [said(one) for one in group.trajectories] for group in examples.groups(1)
    }


REASONS = {
    "overlong": "more than",
    "equal": "same tokens",
    "equal_after_cut": "equal up to",
    "duplicate": "tokens of an earlier",
}


def counted(examples: PreferenceExamples) -> dict[str, int]:
    """What is left out by reason, as the notes say it."""
    return {
        kind: int(note.split()[0])
        for kind, why in REASONS.items()
        for note in examples.notes
        if why in note
    }


def test_completions_follow_one_prompt_and_end_their_turn() -> None:
    examples: Examples = made([compared("t", "ab?", "c", "de", "f", grades=(1.0, 0.0, 2.5))])
    (group,) = examples.groups(1)
    tokens = [LETTERS.convert_tokens_to_ids([*text]) for text in ("ab?c", "ab?de", "ab?f")]
    assert [one.tokens for one in group.trajectories] == [
        [*text, LETTERS.eos_token_id] for text in tokens
    ]
    assert [one.provenance for one in group.trajectories] == ["pppss", "pppsss", "pppss"]
    assert group.rewards == [1.0, 0.0, 2.5]
    assert [one.sample for one in group.trajectories] == [0, 1, 2]
    assert {one.finish_reason for one in group.trajectories} == {"stop"}
    assert (examples.heldout_bytes, examples.notes[0][:40]) == (
        0,
        "8 comparisons per step are asked for, bu",
    )


def test_a_prompt_whose_tokens_depend_on_the_completion_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with a tokenizer that merges the end of the prompt with the completion."""

    def merged(renderer: Renderer, task: Any, train_on: str) -> Encoded:
        start = 2 if task.trace == "c" else 3
        return Encoded([Example([1, 2, 3, 4], ((start, 4),))])

    monkeypatch.setattr(preference_examples, "encode_conversation", merged)
    with pytest.raises(UserError, match=r"task t: the tokens of the prompt depend.*chat_template"):
        made([compared("t", "ab?", "c", "d")])


def test_messages_need_a_template() -> None:
    reply = Message(role="assistant", content="c")
    with pytest.raises(UserError, match=r"task t.*chat template"):
        made([replace(compared("t", "", reply, "d"), prompt=(Message(role="user", content="a"),))])  # type: ignore[arg-type]


LONG = [
    compared("fits", "ab?", "c", "d"),  # 3 prompt tokens and 2
    compared("one side", "ab?", "cccc", "d"),  # 3 and 5
    compared("after", "ab?", "aaab", "aaac"),  # equal up to the limit of 3 + 3
    compared("list", "ab?", "aaaa", "aaab", "b"),  # the first two are equal up to it
    compared("prompt", "abcdefgh?", "c", "d"),
]


def test_longer_comparisons_are_refused_or_left_out() -> None:
    message = r"task one side: the prompt has 3 tokens.* 8, but only 6 fit.*overlong.*truncate"
    with pytest.raises(UserError, match=message):
        made(LONG, max_tokens=6)
    examples = made(LONG, max_tokens=6, overlong="drop")
    assert (told(examples), counted(examples)) == ({"fits": ["c.", "d."]}, {"overlong": 4})
    assert "4 of 5 training comparisons are left out: they have more than 6" in examples.notes[0]
    assert examples.cut_frac == 0.0


def test_a_cut_keeps_the_start_and_never_hides_the_difference() -> None:
    with pytest.raises(UserError, match="task prompt: the prompt has 9 tokens"):
        made(LONG, max_tokens=6, truncate=True)
    examples = made(LONG, max_tokens=6, truncate=True, overlong="drop")
    assert told(examples) == {
        "fits": ["c.", "d."],
        "one side": ["ccc", "d."],
        "list": ["aaa", "b."],
    }
    assert counted(examples) == {"overlong": 1, "equal_after_cut": 1, "duplicate": 1}
    reasons = {
        said(one): one.finish_reason for group in examples.groups(1) for one in group.trajectories
    }
    assert reasons == {"c.": "stop", "d.": "stop", "ccc": "length", "aaa": "length", "b.": "stop"}
    assert examples.cut_frac == 2 / 3
    assert sum("66.7% of the training pairs" in note for note in examples.notes) == 1


def test_the_share_of_cut_pairs_counts_pairs() -> None:
    """Five pairs of four completions, of which the third is cut."""
    task = compared("t", "ab?", "a", "b", "cccc", "d", grades=(2.0, 1.0, 1.0, 0.0))
    assert made([task], max_tokens=6, truncate=True).cut_frac == 2 / 5
    liked = [compared("a", "ab?", "c"), compared("b", "ab?", "dddd", grades=(1.0,))]
    assert made(liked, max_tokens=6, truncate=True).cut_frac == 1 / 2


def test_completions_with_the_same_tokens_are_no_pair() -> None:
    """A template may write different texts alike."""
    same = compared("same", "ab?", "c", "c")
    examples = made([same, compared("t", "ab?", "c", "d", "c", grades=(2.0, 0.0, 1.0))])
    assert (told(examples), counted(examples)) == (
        {"t": ["c.", "d."]},
        {"equal": 1, "duplicate": 1},
    )
    (group,) = examples.everything()
    assert group.rewards == [1.5, 0.0]
    with pytest.raises(UserError, match=r"no training comparison is left: 1 of 1.*same tokens"):
        made([same])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_completions_that_a_cut_makes_equal_have_their_mean_grade(order: tuple[int, ...]) -> None:
    """Whichever stands first: the best and the worst of three are equal up to the limit."""
    texts, grades = ("cccca", "d", "ccccb"), (3.0, 2.0, 0.0)
    shuffled = compared(
        "t", "ab?", *(texts[i] for i in order), grades=tuple(grades[i] for i in order)
    )
    (group,) = made([shuffled], max_tokens=6, truncate=True).everything()
    assert {said(t): t.total_reward for t in group.trajectories} == {"ccc": 1.5, "d.": 2.0}


def test_an_epoch_has_every_comparison_once_and_steps_need_no_state() -> None:
    tasks = [compared(f"t{n}", f"{'abcdef'[n]}?", "g", "h") for n in range(6)]
    examples = made(tasks, examples_per_step=2)
    epochs = [
        [group.task.id for step in steps for group in examples.groups(step)]
        for steps in ((1, 2, 3), (4, 5, 6))
    ]
    assert [Counter(epoch) for epoch in epochs] == [Counter(task.id for task in tasks)] * 2
    assert epochs[0] != epochs[1]
    assert examples.steps_per_epoch == 3
    assert made(tasks, examples_per_step=2).groups(5) == examples.groups(5)


def test_held_out_comparisons_are_whole_and_never_trained_on() -> None:
    tasks = [compared(f"t{n}", f"{'abcd'[n]}?", "g", "h", "e") for n in range(4)]
    examples = made(tasks[:3], tasks[3:])
    assert [(g.task.id, len(g.trajectories)) for g in examples.heldout] == [("t3", 3)]
    assert set(told(examples)) == {"t0", "t1", "t2"}


def test_the_fingerprint_is_of_tokens_and_grades() -> None:
    plain = compared("t", "a?", "c", "d")
    prints = [
        made([task]).fingerprint
        for task in (
            plain,
            replace(plain, id="u"),
            compared("t", "b?", "c", "d"),
            compared("t", "a?", "c", "e"),
            compared("t", "a?", "c", "d", grades=(0.0, 1.0)),
        )
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


def test_unpaired_labels_are_told_apart_from_pairs() -> None:
    assert made([compared("t", "a?", "c", grades=(1.0,))]).unpaired
    assert not made([compared("t", "a?", "c", "d")]).unpaired


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (
            {"max_tokens": 51},
            r"comparisons\.max_tokens = 51 is more than the model's context of 50",
        ),
        ({"max_tokens": 4, "overlong": "drop"}, r"no training comparison is left.*more than 4 tok"),
        (
            {"weights": {"x": 1.0, "": 1.0}},
            r"no comparison of 'x' is left.*comparisons\.max_tokens",
        ),
    ],
)
def test_limits_that_leave_nothing(config: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        made([compared("t", "ab?", "c", "d")], **config)


def test_replies_that_are_trained_differently_are_counted() -> None:
    """Qwen 2.5's template shows no thoughts, and data may have an end token of its own."""
    family = BY_NAME["qwen2.5-instruct"]
    tokenizer = make_tokenizer(family)
    ends = tokenizer.convert_tokens_to_ids(list(family.ends))
    thought: Any = {"role": "assistant", "content": "a", "reasoning_content": "h"}
    tasks = [
        compared("texts", "q", "a<|im_end|>", "b<|im_end|>"),
        Comparison("chat", "q", completions=(thought, "b<|im_end|>"), grades=(1.0, 0.0)),
    ]
    tasks[1] = replace(tasks[1], prompt=(Message(role="user", content="q"),))
    examples = PreferenceExamples(
        TaskSet([*tasks], []),
        Renderer(tokenizer, ends),
        ComparisonsConfig(),
        examples_per_step=2,
        context=99,
        overlong="error",
        seed=3,
    )
    hidden, spelled = examples.notes
    assert hidden.startswith("1 replies") and "reasoning_content" in hidden
    assert spelled.startswith("3 replies") and "special tokens" in spelled
