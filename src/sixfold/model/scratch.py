"""A small model made from scratch, with a character tokenizer and a chat template.

The architecture is Qwen3 and the weights are random.
"""

from __future__ import annotations

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ..errors import UserError
from ..recipe.schema import ScratchConfig

SPECIAL = ("<|pad|>", "<|end|>", "<|unknown|>", "<|user|>", "<|assistant|>", "<|system|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% if m['role'] =="
    " 'assistant' %}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{%"
    " endif %}"
)


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Tokenizer with one token per character of `alphabet`. Other characters become <|unknown|>.

    Raises:
        UserError: the alphabet is empty or has repeated characters.
    """
    repeated = sorted({c for c in alphabet if alphabet.count(c) > 1})
    if repeated or not alphabet:
        problem = f"has repeated characters: {repeated}" if repeated else "is empty"
        raise UserError(f"model.scratch.alphabet {problem}. List every character once")
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unknown|>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|system|>"],
        chat_template=CHAT_TEMPLATE,
    )


def scratch_model(
    sizes: ScratchConfig, seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A Qwen3 model with random float32 weights drawn from `seed`, and its tokenizer."""
    tokenizer = character_tokenizer(sizes.alphabet)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=sizes.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**63)
        model = Qwen3ForCausalLM(config)
    return model, tokenizer
