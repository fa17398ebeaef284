"""MiniGPT: a plain GPT with pre-norm blocks and learned positions, for models from scratch.

The blocks are those of GPT-2 (Radford et al. 2019) without biases in the attention. Nothing scales
the initial weights of the residual path. Importing this file makes the architecture known to
transformers' Auto classes, so a saved model is loaded like any other.

Parameters for V tokens, T positions, L blocks of width d, with an MLP of width 4 d:
V d + T d + L (12 d^2 + 9 d) + 2 d. The head is the token embedding.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Cache,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class MiniGPTConfig(PretrainedConfig):
    """Sizes of a MiniGPT, by the names of most configurations in transformers.

    Attributes:
        vocab_size: tokens of the vocabulary.
        hidden_size: width of the residual stream, a multiple of the heads.
        num_hidden_layers: blocks.
        num_attention_heads: heads of each block.
        intermediate_size: width of the MLP.
        max_position_embeddings: longest sequence, in tokens.
        initializer_range: standard deviation of the initial weights.
        tie_word_embeddings: the head is the token embedding.
    """

    model_type = "minigpt"
    vocab_size: int = 29
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    intermediate_size: int = 512
    max_position_embeddings: int = 11
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention in plain PyTorch: softmax(q k^T scaling) v.

    Args:
        query: [B, H, T, D].
        key: [B, H, S, D]. The queries are those of the last T of the S positions.
        value: [B, H, S, D].
        attention_mask: 0 at keys that are padding, [B, S]; None if there is none.
        scaling: factor of the scores.

    Returns:
        Output [B, T, H, D], and None for the attention weights.
    """
    queries, keys = query.shape[2], key.shape[2]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    if attention_mask is not None:
        seen = seen & attention_mask[:, None, None, :].bool()
    scores = (query @ key.mT * scaling).masked_fill(~seen, torch.finfo(query.dtype).min)
    return (scores.softmax(-1) @ value).transpose(1, 2), None


class MiniGPTAttention(nn.Module):
    """Causal attention of all heads. One matrix makes queries, keys and values; no biases."""

    def __init__(self, config: MiniGPTConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer
        self.heads = config.num_attention_heads
        self.scaling = (config.hidden_size // self.heads) ** -0.5
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
        **more: Any,
    ) -> Tensor:
        """Hidden states [B, T, d] -> [B, T, d]. `more` goes to the attention function."""
        # [B, T, 3 d] -> three of [B, heads, T, head size]
        parts = self.qkv(hidden).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        kind = self.config._attn_implementation
        # transformers searches this file for this call, and else refuses another attention
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(kind, eager_attention)
        mixed, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, **more)
        return self.out(mixed.flatten(2))


class MiniGPTMLP(nn.Module):
    """Two matrices with biases, and GELU between them."""

    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(hidden)))


class MiniGPTBlock(GradientCheckpointingLayer):
    """A pre-norm block: x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, config: MiniGPTConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.hidden_size)
        self.attn = MiniGPTAttention(config, layer)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.mlp = MiniGPTMLP(config)

    def forward(self, hidden: Tensor, **more: Any) -> Tensor:
        hidden = hidden + self.attn(self.attn_norm(hidden), **more)
        return hidden + self.mlp(self.mlp_norm(hidden))


class MiniGPTPreTrainedModel(PreTrainedModel):
    """What body and model with head have in common for transformers."""

    config_class = MiniGPTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_attention_backend = True


class MiniGPTModel(MiniGPTPreTrainedModel):
    """The body: embeddings, blocks, and the last layer norm."""

    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(
            MiniGPTBlock(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.tokens = value  # type: ignore[assignment]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **more: Any,
    ) -> BaseModelOutputWithPast:
        """Run the body.

        Args:
            input_ids: [B, T].
            attention_mask: 0 at padding, [B, S] with the S - T tokens in the cache; None for none.
            position_ids: [B, T] or [1, T]; None: the positions after those in the cache.
            past_key_values: keys and values of earlier tokens, which gets those of these tokens.
            use_cache: ignored: a cache is used if there is one.
            output_hidden_states: also return what each block reads, and the last hidden states.
            more: for the attention function, such as `layout`.

        Returns:
            Hidden states [B, T, d], and the cache.
        """
        if position_ids is None:
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(past, past + input_ids.shape[1], device=input_ids.device)
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        read: list[Tensor] = []
        for layer in self.layers:
            if output_hidden_states:
                read.append(hidden)
            hidden = layer(
                hidden, attention_mask=attention_mask, past_key_values=past_key_values, **more
            )
        hidden = self.norm(hidden)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=past_key_values,
            hidden_states=(*read, hidden) if output_hidden_states else None,
        )


class MiniGPTForCausalLM(MiniGPTPreTrainedModel, GenerationMixin):
    """Body and head. The head is the token embedding."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.tokens.weight"}  # type: ignore[misc]

    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__(config)
        self.model = MiniGPTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    # transformers' generate() counts positions past padding only if it sees `position_ids` here
    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, **more: Any
    ) -> CausalLMOutputWithPast:
        """Tokens [B, T] -> logits [B, T, V]. The arguments are those of the body."""
        output = self.model(input_ids, position_ids=position_ids, **more)
        return CausalLMOutputWithPast(
            logits=self.lm_head(output.last_hidden_state),
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
        )


class MiniGPTForTokenClassification(GenericForTokenClassification, MiniGPTPreTrainedModel):
    """The body under a linear head, for value models."""


class MiniGPTForSequenceClassification(GenericForSequenceClassification, MiniGPTPreTrainedModel):
    """The body under a linear head, for reward models."""


AutoConfig.register("minigpt", MiniGPTConfig)
AutoModel.register(MiniGPTConfig, MiniGPTModel)
AutoModelForCausalLM.register(MiniGPTConfig, MiniGPTForCausalLM)
AutoModelForTokenClassification.register(MiniGPTConfig, MiniGPTForTokenClassification)
AutoModelForSequenceClassification.register(MiniGPTConfig, MiniGPTForSequenceClassification)
