"""Settings of speculative decoding: who proposes tokens, and how many."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from .base import Section, knob

TOKENS = "tokens proposed per sequence and step"


class NoSpeculation(Section):
    """One token per sequence and step."""

    kind: Literal["none"] = "none"


class NgramSpeculation(Section):
    """Propose tokens that followed the same n-gram earlier in the sequence."""

    kind: Literal["ngram"] = "ngram"
    tokens: int = knob(4, TOKENS, ge=1)
    shortest: int = knob(2, "smallest n of the n-grams", ge=1)
    longest: int = knob(4, "largest n of the n-grams", ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> NgramSpeculation:
        if self.shortest > self.longest:
            raise ValueError(
                f"engine.speculation.shortest = {self.shortest} is above"
                f" engine.speculation.longest = {self.longest}: lower it"
            )
        return self


class DraftSpeculation(Section):
    """Propose tokens that a smaller model with the same tokenizer samples."""

    kind: Literal["draft"] = "draft"
    tokens: int = knob(4, TOKENS, ge=1)
    path: str = knob("", "draft model: a run, a checkpoint, a model folder or a hub id")

    @model_validator(mode="after")
    def _named(self) -> DraftSpeculation:
        if not self.path:
            raise ValueError(
                "engine.speculation.path is empty: name the draft model of kind 'draft'"
            )
        return self


Speculation = NoSpeculation | NgramSpeculation | DraftSpeculation
