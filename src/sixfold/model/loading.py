"""The policy, loaded or made: a causal LM with our attention, its tokenizer, and what rollout must know of both."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from ..config import ModelConfig
from ..errors import UserError
from ..hub_names import not_a_hub_id
from .attention import NAME, register
from .causal_lm import check_split
from .device import prepare_device
from .norms import fuse_norms
from .scratch import scratch_model


@dataclass(frozen=True)
class Policy:
    """A model with its tokenizer. context: longest sequence. stop_token_ids: what ends a completion. vocabulary_hash: of the tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context: int
    stop_token_ids: tuple[int, ...]
    vocabulary_hash: str

    def save(self, folder: Path) -> None:
        """Write model and tokenizer in Hugging Face form; `AutoModelForCausalLM.from_pretrained(folder)` reads it back."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def load_policy(config: ModelConfig, *, seed: int, device: str, setting: str = "model.path") -> Policy:
    """The model that the recipe names, float32, in evaluation mode, on `device`. setting: where it names it, for the error messages.

    Raises UserError for anything that cannot be loaded.
    """
    register()
    disable_progress_bar()  # transformers draws one for every file; ours is the run's
    model, tokenizer = from_disk(config.path, setting, config.revision) if config.path else scratch_model(config.scratch, seed)
    model.set_attn_implementation(NAME)
    fuse_norms(model)
    prepare_device(device)
    model = model.to(device).eval()  # type: ignore[arg-type]
    check_split(model)
    return Policy(model, tokenizer, context_of(model), stop_tokens(model, tokenizer), vocabulary_hash(tokenizer))


def from_disk(path: str, setting: str = "model.path", revision: str = "") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a folder or a hub id. Only safetensors weights, no remote code. Dropout is off: log-probs must be the ones that sampled.

    Args:
        path: model folder or hub id.
        setting: what the path is called in error messages.
        revision: branch, tag or commit of a hub id; empty: the newest.

    Raises:
        UserError: if it cannot be loaded.
    """
    _check_folder(path, setting)
    if revision and Path(path).exists():
        raise UserError(f"model.revision = '{revision}' pins a hub model, and '{path}' is a folder here: leave it empty")
    pinned = revision or "main"
    try:
        config = AutoConfig.from_pretrained(path, revision=pinned, trust_remote_code=False)
        for key in vars(config):
            if key.endswith(("dropout", "pdrop")) and isinstance(getattr(config, key), float):
                setattr(config, key, 0.0)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            revision=pinned,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
        model, found = loaded
        tokenizer = AutoTokenizer.from_pretrained(path, revision=pinned, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{setting} = '{path}': cannot be loaded as a causal LM with tokenizer ({reason})") from error
    wrong = sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])})
    if wrong:  # transformers gives such weights random values and goes on
        raise UserError(f"{setting} = '{path}': {len(wrong)} weights are missing or not of the shape that config.json says, first '{wrong[0]}'")
    return model, tokenizer


def _check_folder(path: str, setting: str) -> None:
    """Refuse a path that cannot hold a model. What may be a hub id ("owner/name") is left to the hub."""
    folder = Path(path)
    if not folder.exists():
        if reason := not_a_hub_id(path):
            raise UserError(f"{setting} = '{path}': {reason}")
        return
    if not folder.is_dir():
        raise UserError(f"{setting} = '{folder}' is a file: give the folder that holds config.json")
    names = {p.name for p in folder.iterdir()}
    if "config.json" not in names:
        raise UserError(f"{setting} = '{folder}' has no config.json: is it a model folder? (found {sorted(names)[:5]})")
    if not any(n.endswith(".safetensors") for n in names):
        pickled = sorted(n for n in names if n.endswith((".bin", ".pt", ".pth")))
        why = f"only pickle weights {pickled}, which can run code; convert them to safetensors" if pickled else "no .safetensors weights"
        raise UserError(f"{setting} = '{folder}': {why}")
    if not names & {"tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"}:
        raise UserError(f"{setting} = '{folder}' has no tokenizer files (tokenizer.json): save the tokenizer beside the model")


def context_of(model: PreTrainedModel) -> int:
    """Longest sequence the model has positions for."""
    settings = model.config.get_text_config().to_dict()
    return int(settings.get("max_position_embeddings") or settings.get("n_positions") or 1 << 20)


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokenizer's end-of-sequence token and those of the model's generation settings (chat models often have two)."""
    generation = model.generation_config
    listed = generation.eos_token_id if generation is not None else None
    more = listed if isinstance(listed, list) else [listed]
    return tuple(sorted({int(t) for t in (tokenizer.eos_token_id, *more) if t is not None}))


def vocabulary_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of token -> id: two tokenizers with the same one mean the same by every token."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]
