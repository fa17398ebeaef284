"""Settings of a sample stage: which completions become rows of a dataset, and what is mixed in."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from .base import Real, Section, knob

STAGE = "stage:"
"""Start of a source that is the dataset of an earlier sample stage."""


class MixConfig(Section):
    """Other rows in the dataset of a sample stage: an entry of [[sample.mix]]."""

    source: str = Field(
        description="a .jsonl file with the columns prompt and completion, or stage:NAME for the"
        " dataset of an earlier sample stage"
    )
    weight: Real = knob(1.0, "number of rows, relative to the rows that sampling has kept", gt=0)

    @property
    def stage(self) -> str:
        """Name of the stage whose dataset is mixed in, or "" for a file."""
        return self.source.removeprefix(STAGE) if self.source.startswith(STAGE) else ""


class SampleSearchConfig(Section):
    """Search in place of independent samples. The completions that it chooses become rows."""

    method: str = knob(
        "",
        'method of `sixfold search`, with n = `sample.samples`. "": independent samples',
    )
    scorer: str = knob(
        "",
        "reward model that scores completions or their steps: stage:NAME, a folder or a hub id;"
        " POLICY,REFERENCE, an implicit one; or verifier, the recipe's own. Needed by methods that"
        " score",
    )
    budget: int = knob(0, "most model tokens of the search of one task (0: no limit)", ge=0)
    steps: str = knob(
        "",
        'where steps end, as prm.ends. "": where the scorer\'s steps end, else at newlines',
    )

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> SampleSearchConfig:
        """Refuse settings of a search without a method."""
        for name in () if self.method else ("scorer", "budget", "steps"):
            if getattr(self, name):
                raise ValueError(f"sample.search.{name} has no effect without sample.search.method")
        return self


class SampleConfig(Section):
    """Rejection sampling: several completions per task, of which some become a dataset."""

    samples: int = knob(8, "completions per task", ge=1)
    tasks: int = knob(0, "number of tasks sampled, drawn at random (0: all)", ge=0)
    draw: int = knob(
        0, "number of the draw: another one draws other tasks, and other completions", ge=0
    )
    keep: Literal["solved", "reward", "best", "all"] = knob(
        "solved",
        "completions that are kept: solved (those that the verifier accepts), reward (those with a"
        " reward of at least `threshold`), best (of each task, the one with the highest reward), or"
        " all (good and bad ones, to compare them in preference training)",
    )
    threshold: Real = knob(1.0, "lowest reward that is kept; needs keep = 'reward'")
    per_task: int = knob(
        0,
        "maximum number of completions kept per task, those with the highest rewards (0: all)",
        ge=0,
    )
    deduplicate: bool = knob(
        True, "keep one of a task's completions that differ only in white space"
    )
    min_rows: int = knob(1, "the stage fails if it keeps fewer completions", ge=1)
    label_steps: int = knob(
        0,
        "continuations sampled after each step of every kept completion; the share of them that is"
        " solved labels the step, for a stage of kind prm (0: none)",
        ge=0,
    )
    label_ends: str = knob(
        "newline",
        "where the labelled steps end, as prm.ends; needs label_steps > 0 or labels = 'outcome'",
    )
    labels: Literal["soft", "hard", "bisect", "outcome"] = knob(
        "soft",
        "label of a step: soft (the share), hard (1 if any continuation is solved), or bisect (the"
        " first step after which none is, found by bisection), which need label_steps > 0; or"
        " outcome (1 if the completion itself is solved; needs keep = 'all' and deduplicate ="
        " false)",
    )
    ngram: int = knob(3, "length of the n-grams of the diversity metric", ge=1, le=8)
    mix: tuple[MixConfig, ...] = knob(
        (), "other data in the dataset, one table [[sample.mix]] each"
    )
    search: SampleSearchConfig = SampleSearchConfig()

    @property
    def labelled(self) -> bool:
        """True if steps get labels."""
        return self.label_steps > 0 or self.labels == "outcome"

    @property
    def labelled_by(self) -> str:
        """The setting that labels steps, with its value, for error messages."""
        if self.labels == "outcome":
            return "sample.labels = 'outcome'"
        return f"sample.label_steps = {self.label_steps}"

    @model_validator(mode="after")
    def _mixed_sources_are_known(self) -> SampleConfig:
        """Refuse a source that is neither a file nor a stage."""
        for mix in self.mix:
            if not (mix.stage or mix.source.endswith(".jsonl")):
                raise ValueError(
                    f"sample.mix: the source '{mix.source}' is neither a .jsonl file nor stage:NAME"
                )
        return self

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> SampleConfig:
        """Refuse settings that the kind of selection does not read."""
        if self.keep != "reward" and self.threshold != type(self).model_fields["threshold"].default:
            raise ValueError(
                f"sample.threshold has no effect with sample.keep = '{self.keep}'. Leave it out, or"
                " set sample.keep = 'reward'"
            )
        for name in () if self.labelled else ("label_ends", "labels"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"sample.{name} has no effect with sample.label_steps = 0. Set label_steps, or"
                    " leave it out"
                )
        if self.labelled and self.mix:
            raise ValueError(
                f"sample.mix has no effect with {self.labelled_by}: the rows that it mixes in have"
                " no labels of steps. Leave one of them out"
            )
        kept = {"best": "one completion per task", "all": "the bad completions too"}
        if self.keep in kept and self.per_task > (self.keep == "best"):
            raise ValueError(
                f"sample.per_task = {self.per_task}, but sample.keep = '{self.keep}' keeps"
                f" {kept[self.keep]}. Leave it out, or set sample.keep = 'reward'"
            )
        return self

    @model_validator(mode="after")
    def _outcomes_are_not_selected(self) -> SampleConfig:
        """Refuse a choice among completions whose outcomes are labels: it would bias them."""
        if self.labels != "outcome":
            return self
        if self.label_steps:
            raise ValueError(
                f"sample.label_steps = {self.label_steps} has no effect with sample.labels ="
                " 'outcome', which samples no continuations. Leave it out, or choose other labels"
            )
        if self.keep != "all" or self.deduplicate:
            raise ValueError(
                "sample.labels = 'outcome' counts how many completions are solved, so all of them"
                " must be kept. Set sample.keep = 'all' and sample.deduplicate = false"
            )
        return self
