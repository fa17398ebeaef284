"""Settings of the policy's model."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .base import Assignment, Real, Section, knob

ALL_LINEAR = "all-linear"
"""Target that stands for every linear module except the output head."""


class ScratchConfig(Section):
    """Sizes of a model made from scratch, whose tokens are characters and words."""

    architecture: Literal["qwen3", "minigpt"] = knob(
        "qwen3",
        "qwen3, or minigpt: a plain GPT with learned positions, whose kv_heads, head_dim and"
        " intermediate_size follow from heads and hidden_size",
    )
    alphabet: str = knob(
        "0123456789+-*/=()<>#;:,.? abcdefghijklmnopqrstuvwxyz\n", "characters of the tokenizer"
    )
    words: tuple[Annotated[str, Field(min_length=2)], ...] = knob(
        (),
        "texts of several characters that are one token each, the longest first; with any, the"
        " chat template has tools (the Hermes form)",
    )
    tokenizer: Literal["characters", "trained"] = knob(
        "characters",
        "characters (of `alphabet`, and `words`), or trained: byte-level BPE, trained on the"
        " training documents of the first pretraining stage",
    )
    vocabulary: int = knob(
        512, "tokens of a trained tokenizer: 256 bytes, 6 special tokens, and merges", ge=262
    )
    hidden_size: int = knob(128, "width of the residual stream", ge=8)
    layers: int = knob(4, "number of decoder layers", ge=1)
    heads: int = knob(4, "number of query heads", ge=1)
    kv_heads: int = knob(2, "number of key-value heads", ge=1)
    head_dim: int = knob(32, "numbers per head", ge=2)
    intermediate_size: int = knob(384, "width of the MLP", ge=8)
    context: int = knob(512, "longest sequence in tokens, prompt and completion together", ge=8)
    initializer_range: Real = knob(
        0.02,
        "standard deviation of the initial weights; models with few layers and a short context"
        " learn to copy from the context in fewer steps with 0.05",
        gt=0,
        le=1,
    )
    rope_theta: Real = knob(
        10_000.0,
        "base of the rotary position embedding: its longest wavelength is at most 2 pi times the"
        " base, in tokens; use a smaller base if the context is much shorter",
        gt=1,
        le=1e9,
    )

    @model_validator(mode="after")
    def _distinct(self) -> ScratchConfig:
        """Refuse words that are given twice or contain a special token."""
        for word in self.words:
            if self.words.count(word) > 1:
                raise ValueError(f"model.scratch.words: {word!r} is given twice. Remove one")
            if special := re.search(r"<\|\w+\|>", word):
                raise ValueError(
                    f"model.scratch.words: {word!r} contains {special[0]!r}, which has the form of"
                    " a special token. Remove it"
                )
        return self

    @model_validator(mode="after")
    def _of_one_tokenizer(self) -> ScratchConfig:
        """Refuse settings of the tokenizer that is not made."""
        fields = type(self).model_fields
        trained = self.tokenizer == "trained"
        for name in ("alphabet", "words") if trained else ("vocabulary",):
            if getattr(self, name) != fields[name].default:
                raise ValueError(
                    f"model.scratch.{name} has no effect with model.scratch.tokenizer ="
                    f" '{self.tokenizer}'. Remove it, or set model.scratch.tokenizer ="
                    f" '{'characters' if trained else 'trained'}'"
                )
        return self

    @model_validator(mode="after")
    def _fits_minigpt(self) -> ScratchConfig:
        """Refuse sizes that a MiniGPT does not have. Defaults stand for what it has."""
        if self.architecture != "minigpt":
            return self
        if self.hidden_size % self.heads:
            raise ValueError(
                f"model.scratch.hidden_size = {self.hidden_size} must be a multiple of heads ="
                f" {self.heads} with architecture minigpt"
            )
        has = {
            "kv_heads": (self.heads, "as many as heads"),
            "head_dim": (self.hidden_size // self.heads, "hidden_size / heads"),
            "intermediate_size": (4 * self.hidden_size, "4 * hidden_size"),
        }
        for name, (value, rule) in has.items():
            given = getattr(self, name)
            if given not in (value, type(self).model_fields[name].default):
                raise ValueError(
                    f"model.scratch.{name} = {given}: with architecture minigpt it is {value}"
                    f" ({rule}). Remove it"
                )
        if self.rope_theta != type(self).model_fields["rope_theta"].default:
            raise ValueError(
                f"model.scratch.rope_theta = {self.rope_theta} has no effect with architecture"
                " minigpt, which learns its positions. Remove it"
            )
        return self

    def fields(self, vocabulary: int) -> dict[str, Any]:
        """Sizes of the model as in config.json.

        Args:
            vocabulary: tokens of its tokenizer.
        """
        fields = {
            "vocab_size": vocabulary,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": self.context,
            "initializer_range": self.initializer_range,
            "tie_word_embeddings": True,
        }
        if self.architecture == "minigpt":
            return {**fields, "intermediate_size": 4 * self.hidden_size}
        return {
            **fields,
            "intermediate_size": self.intermediate_size,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
        }


class LoraConfig(Section):
    """A LoRA adapter that is trained instead of the model's own weights."""

    rank: int = knob(0, "rank of the adapter's matrices; 0 trains all weights", ge=0)
    alpha: Real = knob(32.0, "the adapter's product is scaled by alpha / rank", gt=0, le=1_000_000)
    targets: tuple[Annotated[str, Field(min_length=1)], ...] = knob(
        (ALL_LINEAR,),
        "names of the linear modules that get an adapter, e.g. q_proj; all-linear: every one"
        " except the output head, experts, routers and gates",
        min_length=1,
    )
    rslora: bool = knob(False, "scale by alpha / sqrt(rank) instead (rank-stabilised LoRA)")
    dora: bool = knob(
        False, "also train the length of each row of the weights (DoRA); needs sync.kind = copy"
    )
    base: Literal["float32", "bfloat16", "nf4"] = knob(
        "float32",
        "precision of the frozen linear modules; nf4 takes 4.25 bits per number; bfloat16 and nf4"
        " need run.precision = bfloat16",
    )

    @property
    def scale(self) -> float:
        """Factor of B A x, the product that the adapter adds to a module's output."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @model_validator(mode="after")
    def _used(self) -> LoraConfig:
        """Refuse adapter settings if the rank is 0, and targets that contradict each other."""
        fields = type(self).model_fields
        given: dict[str, Any] = {
            name: value
            for name, field in fields.items()
            if (value := getattr(self, name)) != field.default
        }
        if not self.rank and given:
            name, value = next(iter(given.items()))
            raise ValueError(
                f"model.lora.{name} = {value!r} has no effect with model.lora.rank = 0. Set a rank,"
                " such as 16, or remove it"
            )
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            raise ValueError(
                f"model.lora.targets = {list(self.targets)} names '{ALL_LINEAR}' and other modules."
                f" Give '{ALL_LINEAR}' alone, or the names of modules"
            )
        return self


class ModelConfig(Section):
    """The policy: a Hugging Face causal LM, loaded or made from scratch."""

    path: str = knob("", "model folder or hub id (empty: create a model from [model.scratch])")
    revision: str = knob("", "branch, tag or commit of a hub model (empty: the newest)")
    chat_template: str = knob(
        "auto",
        "chat template: auto (the tokenizer's own), none (plain text prompts), a Jinja"
        " file, or the name of a template if the tokenizer has several",
        min_length=1,
    )
    template_args: tuple[Assignment, ...] = knob(
        (),
        "variables of the chat template, e.g. enable_thinking=false; they are saved with the model",
    )
    scratch: ScratchConfig = ScratchConfig()
    lora: LoraConfig = LoraConfig()
