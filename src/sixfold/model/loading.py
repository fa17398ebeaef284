"""The policy, loaded or made: a causal LM with our attention, its tokenizer, and what rollout must know of both."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from ..chat.template import set_template
from ..chat.turn_end import TurnEnd
from ..errors import UserError
from ..kernels.norms import fuse_norms
from ..recipe.hub_names import not_a_hub_id
from ..recipe.schema import ModelConfig
from .attention import NAME, register
from .device import prepare_device
from .ends import chosen_ends, keep_ends, model_ends
from .scratch import character_tokenizer, scratch_model
from .split_check import check_split

_PLACEHOLDER = re.compile(r"image|audio|video|vision|speech", re.IGNORECASE)


@dataclass(frozen=True)
class Policy:
    """A model with its tokenizer.

    Attributes:
        model: the policy itself.
        tokenizer: with the chat template that the recipe chose.
        context: longest sequence in tokens.
        stop_token_ids: tokens that end a completion.
        vocabulary_hash: of the tokenizer.
        stop_strings: texts that end a completion.
        hub_commits: the commit that was loaded, by hub id; empty for a folder.
        notes: what the user should know of the model.
        own_ends: what ended a completion before the recipe added to it; None: unknown.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context: int
    stop_token_ids: tuple[int, ...]
    vocabulary_hash: str
    stop_strings: tuple[str, ...] = ()
    hub_commits: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    own_ends: TurnEnd | None = None

    def stopping_at(self, tokens: Sequence[str], strings: Sequence[str], own: TurnEnd | None = None) -> Policy:
        """The same policy with other ends of a completion. A saved model stops at the same tokens and strings.

        Args:
            tokens: as the tokenizer writes them; `auto` stands for those that the policy has.
            strings: added to the policy's own, which its files or the chat template name.
            own: stands in for the policy's own: a checkpoint of a run has what the recipe added, too.

        Raises:
            UserError: the tokenizer has no such token.
        """
        own = own or TurnEnd(self.stop_token_ids, self.stop_strings)
        ends = chosen_ends(own, self.tokenizer, tokens, strings)
        keep_ends(self.model.generation_config, ends, self.tokenizer)
        return replace(self, stop_token_ids=ends.tokens, stop_strings=ends.strings, own_ends=own)

    def save(self, folder: Path) -> None:
        """Write model and tokenizer in Hugging Face form; `AutoModelForCausalLM.from_pretrained(folder)` reads it back."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def load_policy(
    config: ModelConfig,
    *,
    seed: int,
    device: str,
    setting: str = "model.path",
    dtype: torch.dtype = torch.float32,
) -> Policy:  # fmt: skip
    """The model that the recipe names, in evaluation mode.

    Args:
        config: names it.
        seed: of the weights of a model that is made from scratch.
        device: where it is put.
        setting: where the user names it, for the error messages.
        dtype: of the weights. Training needs float32.

    Raises:
        UserError: it cannot be loaded.
    """
    register()
    disable_progress_bar()  # transformers draws one for every file; ours is the run's
    model, tokenizer = from_disk(config.path, setting, config.revision) if config.path else scratch_model(config.scratch, seed)
    check_vocabulary(model, tokenizer, f"{setting} = '{config.path}'")
    set_template(tokenizer, config.chat_template, config.template_args)
    model.set_attn_implementation(NAME)
    fuse_norms(model)
    prepare_device(device)
    # The check compares in float32; a model that is to be smaller is checked before it takes a GPU's memory.
    model = model.to(device if dtype == torch.float32 else "cpu").eval()  # type: ignore[arg-type]
    context = check_split(model)
    if dtype != torch.float32:
        model = _with_weights_in(model, dtype).to(device)  # type: ignore[arg-type]
    ends = model_ends(model.generation_config, tokenizer)
    keep_ends(model.generation_config, ends, tokenizer)
    commits = _hub_commits(config.path, config.revision)
    notes = (context.note,) if context.note else ()
    return Policy(model, tokenizer, context.tokens, ends.tokens, vocabulary_hash(tokenizer), ends.strings, commits, notes, ends)


def _with_weights_in(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The same model. Buffers stay as they are: the angles of rotary embeddings need float32."""
    for p in model.parameters():
        p.requires_grad_(False).data = p.data.to(dtype)
    model.config.dtype = dtype
    return model


def load_tokenizer(config: ModelConfig) -> tuple[PreTrainedTokenizerBase, GenerationConfig | None]:
    """The tokenizer that `load_policy` would give, with the model's generation settings, but without the model.

    Raises:
        UserError: the tokenizer cannot be loaded, or the chat template cannot be used.
    """
    tokenizer: PreTrainedTokenizerBase = character_tokenizer(config.scratch.alphabet)
    settings = None
    if config.path:
        _check_folder(config.path, "model.path", config.revision)
        try:
            pinned = config.revision or "main"
            tokenizer = AutoTokenizer.from_pretrained(config.path, revision=pinned, trust_remote_code=False)
            settings = _generation_settings(config.path, pinned)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"model.path = '{config.path}': its tokenizer cannot be loaded ({_reason(error)})") from error
    set_template(tokenizer, config.chat_template, config.template_args)
    return tokenizer, settings


def _generation_settings(path: str, revision: str) -> GenerationConfig:
    """The model's generation settings: of their own file, or of the model's configuration."""
    try:
        return GenerationConfig.from_pretrained(path, revision=revision)
    except OSError:
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False))


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def from_disk(path: str, setting: str = "model.path", revision: str = "") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a folder or a hub id. Only safetensors weights, no remote code. Dropout is off: log-probs must be the ones that sampled.

    Args:
        path: model folder or hub id.
        setting: what the path is called in error messages.
        revision: branch, tag or commit of a hub id; empty: the newest.

    Raises:
        UserError: if it cannot be loaded.
    """
    _check_folder(path, setting, revision)
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
        raise UserError(f"{setting} = '{path}': cannot be loaded as a causal LM with tokenizer ({_reason(error)})") from error
    wrong = sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])})
    if wrong:  # transformers gives such weights random values and goes on
        raise UserError(f"{setting} = '{path}': {len(wrong)} weights are missing or not of the shape that config.json says, first '{wrong[0]}'")
    return model, tokenizer


def _hub_commits(path: str, revision: str) -> dict[str, str]:
    """The commit of a hub model that has just been loaded: the folder of the cache that holds its files."""
    if not path or Path(path).exists():
        return {}
    found = try_to_load_from_cache(path, "config.json", revision=revision or "main")
    return {path: Path(found).parent.name} if isinstance(found, str) else {}


def _check_folder(path: str, setting: str, revision: str = "") -> None:
    """Refuse a path that cannot hold a model. What may be a hub id ("owner/name") is left to the hub."""
    folder = Path(path)
    if not folder.exists():
        if reason := not_a_hub_id(path):
            raise UserError(f"{setting} = '{path}': {reason}")
        return
    if revision:
        raise UserError(f"model.revision = '{revision}' pins a hub model, and '{path}' is here: leave it empty")
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


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Raise UserError for tokens that the model has no embedding for.

    Tokens that no prompt becomes are let pass. Gemma 3's text models have one more token than embeddings,
    <image_soft_token>. transformers gives every Qwen2 tokenizer an unknown token, <|endoftext|>.
    """
    embedding: Any = model.get_input_embeddings()
    rows = embedding.weight.shape[0]
    beyond = sorted((i, token) for token, i in tokenizer.get_vocab().items() if i >= rows)
    beyond = [(i, token) for i, token in beyond if i != tokenizer.unk_token_id and not _PLACEHOLDER.search(token)]
    if beyond:
        raise UserError(
            f"{where}: the tokenizer has {len(beyond)} tokens for which the model has no embedding (it has {rows}), first {beyond[0][1]!r} "
            f"with id {beyond[0][0]}; use the model's own tokenizer, or enlarge the model with resize_token_embeddings and save it"
        )


def vocabulary_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of token -> id: two tokenizers with the same one mean the same by every token."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]
