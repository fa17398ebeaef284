"""Stage kind `online`: rounds of sampling the policy and training on its pairs. No torch.

Each round samples the newest policy, whose completions are graded by the recipe's rewards (a
verifier, a reward model or a judge), and trains on their pairs: iterative DPO, as in Llama 2
(arXiv:2307.09288, section 3.2.3) and arXiv:2404.19733.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UserError
from .distill import without_sections

ONLINE = "online"
ROUNDS = "rounds"
"""Key of the table with the number of rounds."""
DEFAULT_ROUNDS = 3

_BOTH = ("data.overlong", "data.max_prompt_tokens")
"""Settings of [data] that both stages of a round get."""
_TRAINS = ("preference", "comparisons", "reference", "trainer", "checkpoint", "parallel")
"""Sections of the stages that train only."""
_START = ("model.path", "model.revision")
"""Settings of the first round only: later ones go on with the newest policy."""


def online_stages(
    name: str, own: Mapping[str, Any], where: str
) -> list[tuple[str, str, dict[str, Any]]]:
    """The stages, two for each round: (kind, name, settings by dotted key).

    Args:
        name: name of the stage, which the last that trains gets.
        own: settings of its table and flags, with the number of rounds.
        where: place of the table, for messages.

    Raises:
        UserError: if the number of rounds is none.
    """
    rounds = own.get(ROUNDS, DEFAULT_ROUNDS)
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
        raise UserError(f"{where}: rounds = {rounds!r}: expected a whole number from 1")
    for key in ("sample.keep", "sample.draw"):
        if key in own:
            raise UserError(f"{where}: {key} is set by the rounds of kind online. Remove it")
    sampled = without_sections(own, (*_TRAINS, ROUNDS))
    trained = without_sections(own, ("sample", "data", ROUNDS))
    trained |= {key: own[key] for key in _BOTH if key in own}
    found: list[tuple[str, str, dict[str, Any]]] = []
    for number in range(1, rounds + 1):
        pairs = f"{name}-{number}-samples"
        draws = {"sample.keep": "all", **sampled, "sample.draw": number}
        found.append(("sample", pairs, draws))
        stage = name if number == rounds else f"{name}-{number}"
        found.append(("preference", stage, {**trained, "data.source": f"stage:{pairs}"}))
        sampled, trained = (
            {key: value for key, value in part.items() if key not in _START}
            for part in (sampled, trained)
        )
    return found
