"""The random Qwen3 that the speed benchmarks run, and the FLOPs that a forward pass of it needs.

**FLOPs needed** are what the mathematics asks for, whatever a program does. One pass is

    2 * (weights of all projections) a token through the layers, 2 * hidden * vocabulary a token
    that predicts a token, 4 * layers * heads * head_dim * (positions attended to, itself included)
    a token of attention

which `torch.utils.flop_counter` gives too, to the last digit, once its full square of attention is
exchanged for the causal half.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

EOS = 1  # ids 0 and 1 are <pad> and <eos>; every other id n is the word "wn"


@dataclass(frozen=True)
class Shape:
    """Sizes of the Qwen3 model that all sides load."""

    vocabulary: int
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 704

    @property
    def projections(self) -> int:
        """Weights that every token is multiplied with: attention and MLP of all layers."""
        return (
            self.layers
            * self.hidden
            * (2 * self.head_dim * (self.heads + self.kv_heads) + 3 * self.intermediate)
        )

    @property
    def kv_numbers(self) -> int:
        """Numbers that a KV cache holds of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def forward_flops(shape: Shape, start: int, stop: int, predictions: int) -> int:
    """FLOPs of a forward pass over positions [start, stop) of one sequence, `predictions` of which
    go on to the vocabulary.
    """
    tokens = stop - start
    attended = (stop * (stop + 1) - start * (start + 1)) // 2
    return (
        2 * shape.projections * tokens
        + 2 * shape.hidden * shape.vocabulary * predictions
        + 4 * shape.layers * shape.heads * shape.head_dim * attended
    )


def make_model(shape: Shape, folder: Path, mixing: float = 1.0) -> None:
    """Save a random Qwen3 of this shape and its tokenizer (one word, one token) for all sides to
    load.

    mixing: factor on what every layer adds to the residual stream. At 1 a greedy continuation
    repeats its last token, whatever stood before.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    vocabulary = {"<pad>": 0, "<eos>": EOS} | {f"w{i}": i for i in range(2, shape.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    ).save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data.mul_(mixing)
    # With tied embeddings a token predicts itself at about exp(5) times the others' odds; a small
    # last norm makes the logits near-uniform.
    torch.nn.init.constant_(model.model.norm.weight, 0.05)
    model.save_pretrained(folder)
