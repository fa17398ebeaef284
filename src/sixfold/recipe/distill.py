"""Stage kind `distill`: a stage that samples a teacher, and SFT on what is kept. No torch.

Hinton et al., arXiv:1503.02531; on answers instead of logits: Kim and Rush, arXiv:1606.07947. The
answers become rows of text, so the teacher may have another tokenizer than the student.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UserError

DISTILL = "distill"
TEACHER = "teacher"
"""Key of the table that names the teacher: a folder, a hub id or `stage:NAME`."""

_ANSWERS = ("sample", "data")
"""Sections that decide which answers there are, and nothing else."""
_STUDENT = ("sft", "model", "trainer", "reference", "checkpoint")
"""Sections of the student's training, and of nothing else."""


def distill_stages(
    name: str, own: Mapping[str, Any], teacher: object, where: str
) -> list[tuple[str, str, dict[str, Any]]]:
    """The two stages: (kind, name, settings by dotted key).

    Args:
        name: name of the stage, which the student's gets.
        own: settings of its table and flags.
        teacher: what its table says of the teacher.
        where: place of the table, for messages.

    Raises:
        UserError: if no teacher is named.
    """
    if not isinstance(teacher, str) or not teacher:
        said = "has no teacher" if teacher is None else f"has teacher = {teacher!r}"
        raise UserError(
            f"{where} {said}: name the model whose answers are imitated, teacher = a folder, a hub"
            " id or 'stage:NAME'"
        )
    answers = f"{name}-answers"
    student = {**_without(own, _ANSWERS), "data.source": f"stage:{answers}"}
    return [
        ("sample", answers, {"model.path": teacher, **_without(own, _STUDENT)}),
        ("sft", name, student),
    ]


def _without(own: Mapping[str, Any], sections: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in own.items() if key.partition(".")[0] not in sections}
