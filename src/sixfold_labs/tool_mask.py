"""The mask of a trajectory with tool results: only tokens that the policy sampled are trained."""

from __future__ import annotations

from sixfold.pages.lab import Breaking, Control, Lab, Outcome, Table
from sixfold.types import OBSERVATION, PROMPT, SAMPLED, Trajectory, Turn

from .controls import SOURCE

PARTS = (
    (PROMPT, "<123+456+789>"),
    (SAMPLED, "let me compute c(123+456+789)#"),
    (OBSERVATION, "=1368#"),
    (SAMPLED, "the answer is 1368#"),
)
ANSWER = 1368
NAMES = {PROMPT: "prompt", SAMPLED: "policy", OBSERVATION: "tool"}


def example() -> Trajectory:
    """The episode as a trajectory of the library; one token per character."""
    provenance = "".join(letter * len(text) for letter, text in PARTS)
    length = len(provenance)
    turns, start = [], 0
    for letter, text in PARTS:
        if letter == SAMPLED:
            turns.append(Turn(start, start + len(text)))
        start += len(text)
    return Trajectory(
        task_id="sum",
        sample=0,
        tokens=[ord(character) for _, text in PARTS for character in text],
        provenance=provenance,
        logp=[0.0] * length,
        version=[0 if letter == SAMPLED else -1 for letter in provenance],
        turns=tuple(turns),
    )


def parts_of_episode(source: str) -> list[tuple[str, str, int]]:
    """(letter of the origin, text, tokens) of each part of the episode."""
    if source == "library":
        from .calculator_episode import played_parts

        replies = (PARTS[1][1].removesuffix("#"), PARTS[3][1].removesuffix("#"))
        return played_parts(PARTS[0][1], replies, ANSWER)
    letters, parts, start = example().provenance, [], 0
    for _, text in PARTS:
        parts.append((letters[start], text, len(text)))
        start += len(text)
    return parts


def tool_mask(*, mask: bool, source: str) -> Outcome:
    """Count the tokens that enter the loss."""
    parts = parts_of_episode(source)
    tokens = {name: sum(n for at, _, n in parts if at == name) for name in NAMES}
    trained = {SAMPLED} if mask else {SAMPLED, OBSERVATION}
    wrong = 0 if mask else tokens[OBSERVATION]
    return Outcome(
        values={
            "tokens_scored": sum(tokens[name] for name in trained),
            "prompt_tokens": tokens[PROMPT],
            "policy_tokens": tokens[SAMPLED],
            "tool_tokens": tokens[OBSERVATION],
            "tool_tokens_scored": wrong,
            "expected_learning": "imitates tool output" if wrong else "learns to use the tool",
        },
        tables=(
            Table(
                "Episode",
                ("from", "text", "tokens", "in the loss"),
                [(NAMES[at], text, n, at in trained) for at, text, n in parts],
            ),
        ),
        lines=(
            ("The tool's tokens are trained as if the policy had chosen them.",) if wrong else ()
        ),
    )


TOOL_MASK = Lab(
    name="tool-mask",
    title="Tool results in a trajectory: masked, or trained by mistake",
    about=(
        "An episode of two turns with a calculator, one token per character. It is a"
        " sixfold.types.Trajectory: the origin of each token (prompt, policy, tool) is recorded"
        " when the token appears, and the mask of the loss is read from it. With the library as"
        " source, sixfold plays the episode with its calculator. There a call ends at its bracket,"
        " and the last reply with the end-of-sequence token, so the policy has one token less."
    ),
    controls=(Control("mask", True, "leave tool tokens out of the loss"), SOURCE),
    run=tool_mask,
    breaking=Breaking(
        breaks={"mask": False},
        safe={"mask": True},
        why="Without the mask the policy learns to write tool results itself.",
        failed=lambda outcome: outcome.values["tool_tokens_scored"] != 0,
    ),
)

LABS = (TOOL_MASK,)
