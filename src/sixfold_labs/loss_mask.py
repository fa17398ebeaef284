"""Which positions of a fine-tuning example are trained."""

from __future__ import annotations

from sixfold.pages.lab import Breaking, Control, Lab, Outcome, Table, Value

IGNORED = -100
"""Target that the cross-entropy skips."""
USER, ASSISTANT, END = "<", ">", "#"


def example(word: str) -> tuple[str, str]:
    """Prompt and response of the task "reverse the word"."""
    return f"{USER}{word}{ASSISTANT}", f"{word[::-1]}{END}"


def targets(prompt: str, response: str, masked: bool) -> list[str | int]:
    """Target of every input position: the next character, or IGNORED.

    Position P - 1 holds the last prompt character and predicts the first response character. It is
    trained, so only the P - 1 positions before it are ignored.

    Args:
        masked: ignore the targets that belong to the prompt.

    Returns:
        [P + R - 1] targets.
    """
    following: list[str | int] = list((prompt + response)[1:])
    ignored = len(prompt) - 1 if masked else 0
    return [IGNORED] * ignored + following[ignored:]


def loss_mask(*, word: str, mask_prompt: bool) -> Outcome:
    """Targets of one example."""
    prompt, response = example(word)
    wanted = targets(prompt, response, mask_prompt)
    trained = [i for i, target in enumerate(wanted) if target != IGNORED]
    rows: list[list[Value]] = [
        [i, character, str(target), "ignored" if target == IGNORED else "trained"]
        for i, (character, target) in enumerate(zip((prompt + response)[:-1], wanted, strict=True))
    ]
    return Outcome(
        values={
            "text": prompt + response,
            "trained_positions": trained,
            "ignored_positions": [i for i in range(len(wanted)) if i not in trained],
            "trained_prompt_characters": sum(i < len(prompt) - 1 for i in trained),
            "first_trained_prediction": str(wanted[trained[0]]),
        },
        tables=(Table("Positions", ("position", "input", "target", "loss"), rows),),
    )


LOSS_MASK = Lab(
    name="loss-mask",
    title="Fine-tuning targets: the prompt is ignored, its last position is not",
    about=(
        "An example is <word>reversed#. The target of a position is the next character. With the"
        " prompt masked, targets 0 to P - 2 of a prompt of P characters are -100 and the"
        " cross-entropy skips them. Target P - 1 is the first character of the response: masking P"
        " positions would lose it."
    ),
    controls=(
        Control("word", "hello", "word to reverse", choices=("hello", "cat", "banana", "post")),
        Control("mask_prompt", True, "ignore the prompt"),
    ),
    run=loss_mask,
    breaking=Breaking(
        breaks={"mask_prompt": False},
        safe={"mask_prompt": True},
        why="The model is trained to predict the word of the prompt, which it cannot know.",
        failed=lambda outcome: outcome.number("trained_prompt_characters") > 0,
    ),
)

LABS = (LOSS_MASK,)
