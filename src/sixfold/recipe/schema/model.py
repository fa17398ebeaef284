"""Settings of the policy's model."""

from __future__ import annotations

from .base import Assignment, Section, knob


class ScratchConfig(Section):
    """Sizes of a model made from scratch (Qwen3 architecture, character tokenizer)."""

    alphabet: str = knob(
        "0123456789+-*/=()<>#;:,.? abcdefghijklmnopqrstuvwxyz\n", "characters of the tokenizer"
    )
    hidden_size: int = knob(128, "width of the residual stream", ge=8)
    layers: int = knob(4, "number of decoder layers", ge=1)
    heads: int = knob(4, "number of query heads", ge=1)
    kv_heads: int = knob(2, "number of key-value heads", ge=1)
    head_dim: int = knob(32, "numbers per head", ge=2)
    intermediate_size: int = knob(384, "width of the MLP", ge=8)
    context: int = knob(512, "longest sequence in tokens, prompt and completion together", ge=8)


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
