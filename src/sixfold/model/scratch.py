"""A small model made from scratch, with a tokenizer of its own and a chat template.

The architecture is Qwen3 or MiniGPT, and the weights are random.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3ForCausalLM

from ..errors import UserError
from ..recipe.schema import ScratchConfig
from .minigpt import MiniGPTForCausalLM

_CLASSES: dict[str, Any] = {"qwen3": Qwen3ForCausalLM, "minigpt": MiniGPTForCausalLM}
"""Architecture -> class of the model."""

SPECIAL = ("<|pad|>", "<|end|>", "<|unknown|>", "<|user|>", "<|assistant|>", "<|system|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% if m['role'] =="
    " 'assistant' %}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{%"
    " endif %}"
)

TOOL = "<|tool|>"
"""Special token before the names of the tools, and before each result."""
TOOL_TEMPLATE = (
    "{% if tools %}<|tool|>{% for t in tools %}{{ t.function.name }}"
    "{% if not loop.last %} {% endif %}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ '<tool_call>' + ({'name': c.function.name,"
    " 'arguments': c.function.arguments} | tojson) + '</tool_call>' }}{% endfor %}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Chat template with tools. It shows their names only, because each character is a token."""


def character_tokenizer(alphabet: str, words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Tokenizer with one token per word and per character of `alphabet`.

    A text is split into the longest words that it begins with, and into characters. Other
    characters become <|unknown|>. With words, the chat template has tools.

    Raises:
        UserError: the alphabet is empty or has repeated characters.
    """
    repeated = sorted({c for c in alphabet if alphabet.count(c) > 1})
    if repeated or not alphabet:
        problem = f"has repeated characters: {repeated}" if repeated else "is empty"
        raise UserError(f"model.scratch.alphabet {problem}. List every character once")
    more = (*words, TOOL) if words else ()
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *alphabet, *more))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    longest_first = [re.escape(word) for word in sorted(words, key=len, reverse=True)]
    pattern = Regex("|".join([*longest_first, "[\\s\\S]"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return _with_chat(tokenizer, tools=bool(words))


def trained_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE tokenizer. The same texts in any order give the same tokenizer.

    Args:
        vocabulary: number of tokens: the special tokens, 256 bytes, and merges.

    Raises:
        UserError: the texts have too few different words for so many tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[*SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (made := tokenizer.get_vocab_size()) < vocabulary:
        raise UserError(
            f"model.scratch.vocabulary = {vocabulary}, but the training documents give only"
            f" {made} tokens. Set it to at most {made}, or use more text"
        )
    return _with_chat(tokenizer, tools=False)


def scratch_tokenizer(
    sizes: ScratchConfig, texts: Iterable[str] | None = None
) -> PreTrainedTokenizerFast:
    """The tokenizer that the settings ask for.

    Args:
        texts: training documents, on which a trained tokenizer is trained. None: there are none.

    Raises:
        UserError: the settings, or the texts of a trained tokenizer, do not give a tokenizer.
    """
    if sizes.tokenizer == "characters":
        return character_tokenizer(sizes.alphabet, sizes.words)
    if texts is None:
        raise UserError(
            "model.scratch.tokenizer = 'trained', but there are no documents to train it on: begin"
            " with a stage of kind 'pretrain', or set model.scratch.tokenizer = 'characters'"
        )
    return trained_tokenizer(texts, sizes.vocabulary)


def _with_chat(tokenizer: Tokenizer, *, tools: bool) -> PreTrainedTokenizerFast:
    """The tokenizer with the special tokens and the chat template of models made from scratch."""
    special = (*SPECIAL, TOOL) if tools else SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unknown|>",
        additional_special_tokens=[*special[3:]],
        chat_template=TOOL_TEMPLATE if tools else CHAT_TEMPLATE,
    )


def scratch_model(
    sizes: ScratchConfig, seed: int, texts: Iterable[str] | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A model with random float32 weights, and its tokenizer.

    Args:
        texts: as for `scratch_tokenizer`.

    Raises:
        UserError: as `scratch_tokenizer`.
    """
    tokenizer = scratch_tokenizer(sizes, texts)
    made = _CLASSES[sizes.architecture]
    config = made.config_class(
        **sizes.fields(len(tokenizer)),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**63)
        model = made(config)
    return model, tokenizer
