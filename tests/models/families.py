"""Look-alikes of model families: the family's tokenizer structure, special tokens, chat template
and generation settings on a tiny model.

The weights follow a script. The embedding of each token points at the next one, so after a prompt
the model says the family's script and then invents more. Nearly all samples follow it; the rest
give training something to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"
HIDDEN = 64
QUESTION = "6*7?"


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        template: file of the chat template.
        architecture: model type of transformers.
        special: special tokens, in the family's order.
        eos: end-of-sequence token of the tokenizer.
        generation: generation settings; token texts stand for ids.
        ends: tokens at which a completion must end.
        script: tokens that the model says after a prompt. The last ends the turn.
        text: what a reward must read.
        goes_on: what a base model says after its turn.
        vocabulary: bytes (byte-level BPE), or gemma, mistral, phi (SentencePiece).
        added: added tokens that are not special.
        bos: beginning-of-sequence token.
        pad: padding token.
        rows: embeddings beyond the last token; negative: tokens without one.
        sizes: of the architecture.
    """

    name: str
    template: str
    architecture: str
    special: tuple[str, ...]
    eos: str
    generation: Mapping[str, Any]
    ends: tuple[str, ...]
    script: tuple[str, ...]
    text: str
    goes_on: str = "<|im_start|>"
    vocabulary: str = "bytes"
    added: tuple[str, ...] = ()
    bos: str | None = None
    pad: str | None = None
    rows: int = 8
    sizes: Mapping[str, Any] = field(default_factory=dict)


_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN_ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_QWEN_INSTRUCT = {
    "eos_token_id": ["<|im_end|>", "<|endoftext|>"],
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
}
_GEMMA = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
_LLAMA = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|finetune_right_pad_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
)
_R1 = ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>")
_PHI = ("<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>")
_GPT_OSS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)
_THOUGHT = ("h", "m", "</think>", "4", "2")

FAMILIES = (
    Family(
        "qwen2.5-base", "qwen2.5", "qwen2", _QWEN, "<|endoftext|>", {"eos_token_id": "<|endoftext|>", "max_new_tokens": 2048},
        ends=("<|endoftext|>", "<|im_end|>"), script=("4", "2", "<|im_end|>"), text="42", added=_QWEN_ADDED[:2], pad="<|endoftext|>",
    ),
    Family(
        "qwen2.5-instruct", "qwen2.5", "qwen2", _QWEN, "<|im_end|>", _QWEN_INSTRUCT,
        ends=("<|endoftext|>", "<|im_end|>"), script=("4", "2", "<|im_end|>"), text="42", added=_QWEN_ADDED[:2], pad="<|endoftext|>",
    ),
    Family(
        "qwen3-base", "qwen3", "qwen3", _QWEN, "<|endoftext|>", {"eos_token_id": "<|endoftext|>"},
        ends=("<|endoftext|>", "<|im_end|>"), script=("<think>", "h", "</think>", "4", "2", "<|im_end|>"), text="<think>h</think>42",
        added=_QWEN_ADDED, pad="<|endoftext|>",
    ),
    Family(
        "qwen3", "qwen3", "qwen3", _QWEN, "<|im_end|>", _QWEN_INSTRUCT,
        ends=("<|endoftext|>", "<|im_end|>"), script=("<think>", "h", "</think>", "4", "2", "<|im_end|>"), text="<think>h</think>42",
        added=_QWEN_ADDED, pad="<|endoftext|>",
    ),
    Family(
        "qwen3-thinking", "qwen3-thinking", "qwen3", _QWEN, "<|im_end|>", _QWEN_INSTRUCT,
        ends=("<|endoftext|>", "<|im_end|>"), script=(*_THOUGHT, "<|im_end|>"), text="<think>\nhm</think>42", added=_QWEN_ADDED, pad="<|endoftext|>",
    ),
    Family(
        "llama-3.2", "llama3.2", "llama", _LLAMA, "<|eot_id|>",
        {"eos_token_id": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], "do_sample": True, "temperature": 0.6, "top_p": 0.9},
        ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), script=("4", "2", "<|eot_id|>"), text="42", goes_on="<|start_header_id|>",
        bos="<|begin_of_text|>", pad="<|finetune_right_pad_id|>",
    ),
    Family(
        "gemma-2", "gemma2", "gemma2", _GEMMA, "<eos>", {"eos_token_id": ["<eos>", "<end_of_turn>"], "cache_implementation": "hybrid"},
        ends=("<eos>", "<end_of_turn>"), script=("4", "2", "<end_of_turn>"), text="42", goes_on="<start_of_turn>", vocabulary="gemma",
        bos="<bos>", pad="<pad>", sizes={"sliding_window": 8, "query_pre_attn_scalar": 16},
    ),
    Family(
        "gemma-3", "gemma3", "gemma3_text", (*_GEMMA, "<image_soft_token>"), "<eos>",
        {"eos_token_id": ["<eos>", "<end_of_turn>"], "do_sample": True, "top_k": 64, "top_p": 0.95},
        ends=("<eos>", "<end_of_turn>"), script=("4", "2", "<end_of_turn>"), text="42", goes_on="<start_of_turn>", vocabulary="gemma",
        bos="<bos>", pad="<pad>", rows=-1, sizes={"sliding_window": 8, "query_pre_attn_scalar": 16},
    ),
    Family(
        "mistral", "mistral", "mistral", ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"), "</s>", {"eos_token_id": "</s>"},
        ends=("</s>",), script=("[TOOL_CALLS]", "4", "2", "</s>"), text="[TOOL_CALLS]42", goes_on="[INST]", vocabulary="mistral", bos="<s>",
    ),
    Family(
        "r1-distill", "r1-distill", "qwen2", _R1, "<｜end▁of▁sentence｜>",
        {"eos_token_id": "<｜end▁of▁sentence｜>", "do_sample": True, "temperature": 0.6, "top_p": 0.95},
        ends=("<｜end▁of▁sentence｜>",), script=(*_THOUGHT, "<｜end▁of▁sentence｜>"), text="<think>\nhm</think>42", goes_on="<｜User｜>",
        added=("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"), bos="<｜begin▁of▁sentence｜>", pad="<｜end▁of▁sentence｜>",
    ),
    Family(
        "smollm2", "smollm2", "llama", _QWEN, "<|im_end|>", {"eos_token_id": "<|im_end|>"},
        ends=("<|im_end|>",), script=("4", "2", "<|im_end|>"), text="42", bos="<|im_start|>", pad="<|im_end|>",
    ),
    Family(
        "phi-3", "phi3", "phi3", _PHI, "<|endoftext|>", {"eos_token_id": ["<|endoftext|>", "<|assistant|>", "<|end|>"]},
        ends=("<|endoftext|>", "<|assistant|>", "<|end|>"), script=("4", "2", "<|end|>"), text="42", goes_on="<|user|>", vocabulary="phi",
        pad="<|endoftext|>",
    ),
    Family(
        "gpt-oss", "gpt-oss", "gpt_oss", _GPT_OSS, "<|return|>",
        {"eos_token_id": ["<|return|>", "<|endoftext|>", "<|call|>"], "do_sample": True},
        ends=("<|endoftext|>", "<|return|>", "<|call|>"), script=("<|channel|>", *"final", "<|message|>", "4", "2", "<|return|>"),
        text="<|channel|>final<|message|>42", goes_on="<|end|>", bos="<|startoftext|>", pad="<|endoftext|>",
        sizes={
            "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
)  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES}


def make_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """The family's tokenizer over single characters."""
    tokenizer = _byte_level() if family.vocabulary == "bytes" else _sentencepiece(family.vocabulary)
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False, rstrip=family.vocabulary == "phi")
            for token in family.special
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in family.added]
    )
    names = {"eos_token": family.eos, "bos_token": family.bos, "pad_token": family.pad}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=(TEMPLATES / f"{family.template}.jinja").read_text(),
        model_max_length=4096,
        **{name: token for name, token in names.items() if token},
    )


def save_family(family: Family, folder: Path) -> Path:
    """Write model, tokenizer and generation settings as the hub has them. Gives the folder."""
    tokenizer = make_tokenizer(family)
    tokenizer.save_pretrained(folder)
    ids = {
        token: tokenizer.convert_tokens_to_ids(token) for token in (*family.special, *family.added)
    }
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    last = tokenizer(prompt, add_special_tokens=False)["input_ids"][-1]
    script = [
        tokenizer.convert_tokens_to_ids(token)
        for token in (*family.script, family.goes_on, "9", "9")
    ]
    assert None not in script
    config = AutoConfig.for_model(
        family.architecture, vocab_size=len(tokenizer) + family.rows, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, tie_word_embeddings=False,
        bos_token_id=ids.get(family.bos or ""), eos_token_id=ids[family.eos], pad_token_id=ids.get(family.pad or ""), **family.sizes,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        _follow_script(model, [last, *script])
    generation = {
        name: _ids(value, ids) if name == "eos_token_id" else value
        for name, value in family.generation.items()
    }
    model.generation_config = GenerationConfig(**generation)
    model.save_pretrained(folder)
    return folder


def _follow_script(model: Any, chain: list[int]) -> None:
    """Weights under which each token of the chain is followed by the next one nine times of ten."""
    with torch.no_grad():
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.normal_()
        head.normal_(0, 0.02)
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                parameter.normal_(0, 0.01)
            elif name.endswith(".sinks"):
                parameter.normal_(0, 1.5)
        for before, after in dict(pairwise(chain)).items():
            head[after] += embedding[before] / embedding[before].norm()


def _ids(value: str | list[str], ids: Mapping[str, int]) -> int | list[int]:
    return ids[value] if isinstance(value, str) else [ids[token] for token in value]


def _byte_level() -> Tokenizer:
    """As in Qwen, Llama 3, SmolLM2 and gpt-oss."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(kind: str) -> Tokenizer:
    """As in Gemma; in Mistral, with a space before the first word; in Phi-3, with one before every
    piece of text.
    """
    printable = [chr(i) for i in range(33, 127)]
    vocabulary = {
        token: i
        for i, token in enumerate([*(f"<0x{i:02X}>" for i in range(256)), "▁", "\n", *printable])
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "mistral":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        replaced = normalizers.Replace(" ", "▁")
        tokenizer.normalizer = (
            normalizers.Sequence([normalizers.Prepend("▁"), replaced])
            if kind == "phi"
            else replaced
        )
    tokenizer.decoder = decoders.Sequence(
        steps if kind == "gemma" else [*steps, decoders.Strip(" ", 1, 0)]
    )
    return tokenizer
