"""Stage kind `distill`: a stage that samples a teacher, and SFT on what is kept. No torch.

Hinton et al., arXiv:1503.02531; on answers instead of logits: Kim and Rush, arXiv:1606.07947. The
answers become rows of text, so the teacher may have another tokenizer than the student.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UserError
from .knobs import knobs

DISTILL = "distill"
TEACHER = "teacher"
"""Key of the table with the teacher: a folder, a hub id, `stage:NAME`, or a table like [model]."""

_ANSWERS = ("sample", "data")
"""Sections of the sampling stage only."""
_BOTH = ("data.overlong", "data.max_prompt_tokens")
"""Settings of [data] that both stages get."""
_STUDENT = ("sft", "model", "trainer", "reference", "checkpoint")
"""Sections of the SFT stage only."""


def distill_stages(
    name: str, own: Mapping[str, Any], where: str
) -> list[tuple[str, str, dict[str, Any]]]:
    """The two stages: (kind, name, settings by dotted key).

    The recipe's [model] is the student. The teacher takes no setting from it.

    Args:
        own: settings of its table and flags, with those of the teacher as `teacher.KEY`.
        where: place of the table, for messages.

    Raises:
        UserError: if no teacher is named.
    """
    models = [knob for knob in knobs().values() if f"{knob.key}.".startswith("model.")]
    teacher = {knob.key: knob.default for knob in models}
    teacher |= {
        f"model{key.removeprefix(TEACHER)}": value
        for key, value in own.items()
        if key.startswith(f"{TEACHER}.")
    }
    if not teacher["model.path"]:
        raise UserError(
            f"{where} has no teacher: name the model whose answers are imitated, teacher = a"
            " folder, a hub id or 'stage:NAME'"
        )
    answers = f"{name}-answers"
    student = without_sections(own, (*_ANSWERS, TEACHER))
    student |= {key: own[key] for key in _BOTH if key in own}
    return [
        ("sample", answers, {**without_sections(own, (*_STUDENT, TEACHER)), **teacher}),
        ("sft", name, {**student, "data.source": f"stage:{answers}"}),
    ]


def without_sections(own: Mapping[str, Any], sections: tuple[str, ...]) -> dict[str, Any]:
    """The settings, by dotted key, that stand in other sections."""
    return {key: value for key, value in own.items() if key.partition(".")[0] not in sections}
