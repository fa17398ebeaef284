"""An episode with the real calculator, played with prepared replies. Imports torch."""

from __future__ import annotations

from itertools import groupby

from sixfold.environment.calculator import Calculator
from sixfold.event_loop import EventLoop
from sixfold.model.scratch import character_tokenizer
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.player import Limits, Player
from sixfold.rollout.worked_episode import Script, worked_episodes
from sixfold.types import Task

ALPHABET = "0123456789+-*/=()<>#;:,.? abcdefghijklmnopqrstuvwxyz\n"


def played_parts(prompt: str, replies: tuple[str, ...], answer: int) -> list[tuple[str, str, int]]:
    """Play the episode, and split it where the origin of the tokens changes.

    Args:
        replies: replies of the policy. A call ends with its bracket.

    Returns:
        (letter of `Trajectory.provenance`, text, tokens) of each part.
    """
    tokenizer = character_tokenizer(ALPHABET)
    renderer = Renderer(tokenizer, (tokenizer.eos_token_id,))
    player = Player(Script(renderer, ()), renderer, Limits(tokens=256, turns=4), make=Calculator)
    loop = EventLoop()
    try:
        (played,) = loop.run(
            worked_episodes(player, [Task("sum", prompt, str(answer), trace=replies)])
        )
    finally:
        loop.close()
    origins = zip(played.provenance, played.tokens, strict=True)
    parts = []
    for letter, run in groupby(origins, key=lambda pair: pair[0]):
        ids = [token for _, token in run]
        parts.append((letter, renderer.shown(ids), len(ids)))
    return parts
