"""Load or make the policy: a causal LM with Sixfold's attention, its tokenizer and its limits."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from ..errors import UserError, one_line
from ..kernels.norms import fuse_norms
from ..recipe.adapter_folder import Base, base_of, check_base, folder_hash, is_adapter
from ..recipe.hub_names import not_found, offline_switch
from ..recipe.schema import ModelConfig
from ..sizing.model_files import read_config, regular_file
from .attention import NAME, register
from .chat_template import set_template
from .device import prepare_device
from .lora import make_adapter, read_files
from .merge import merge_into
from .nf4 import round_to_nf4
from .scratch import scratch_model, scratch_tokenizer
from .split_check import check_split
from .stop_tokens import model_turn_end, recipe_turn_end, save_turn_end
from .trained_lora import TrainedLora, add_lora, lower_base
from .turn_end import TurnEnd

TOKENIZER_FILES = {"tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"}
"""A model folder has at least one of them."""
_PLACEHOLDER = re.compile(r"image|audio|video|vision|speech", re.IGNORECASE)


_HOW_LOADED = ("is_local", "local_files_only")
"""Arguments of `from_pretrained` that transformers saves with a tokenizer."""


@dataclass(frozen=True)
class Policy:
    """A model with its tokenizer.

    Attributes:
        tokenizer: its tokenizer, with the chat template that the recipe chose.
        context: longest sequence in tokens.
        stop_token_ids: ids of the tokens that end a completion.
        vocabulary_hash: `vocabulary_hash` of the tokenizer.
        hub_commits: hub id -> loaded commit; empty for a folder.
        notes: messages about the model for the user.
        own_ends: ends of a completion before the recipe changed them; None if unknown.
        lora: the trained adapter, which is inside `model`. None: all weights are trained.
        merges: an adapter on `model` that is saved merged into it. None: there is none.
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
    lora: TrainedLora | None = None
    merges: TrainedLora | None = None

    @property
    def plain(self) -> PreTrainedModel:
        """The model without a trained adapter. All its weights are shared with `model`."""
        return self.lora.base if self.lora else self.model

    def with_lora(self, config: ModelConfig, origin: Base, seed: int) -> Policy:
        """The same policy with an adapter. Only the adapter is trained.

        Args:
            config: settings of the adapter. If its `path` is the folder of a saved adapter, the
                saved weights are loaded.
            origin: where the model was loaded from.

        Raises:
            UserError: as `add_lora`.
        """
        lower_base(self.model, config.lora.base)
        lora = add_lora(self.model, config.lora, origin, seed, config.path)
        return replace(self, model=lora.model, lora=lora)

    def stopping_at(
        self, tokens: Sequence[str], strings: Sequence[str], own: TurnEnd | None = None
    ) -> Policy:
        """The same policy with other ends of a completion.

        The model's generation settings change too, so a saved model stops at the same ends.

        Args:
            tokens: end tokens, spelled as in the vocabulary. `auto` stands for the policy's own
                ends, including its stop strings.
            own: replaces the policy's own ends. Needed for a run's checkpoint, whose ends include
                those that the recipe added.

        Raises:
            UserError: the tokenizer does not have one of the tokens.
        """
        own = own or TurnEnd(self.stop_token_ids, self.stop_strings)
        ends = recipe_turn_end(own, self.tokenizer, tokens, strings)
        save_turn_end(self.model.generation_config, ends, self.tokenizer)
        return replace(self, stop_token_ids=ends.tokens, stop_strings=ends.strings, own_ends=own)

    def weights(self) -> dict[str, Tensor]:
        """The tensors that `save` writes, by name: live ones, or merged from them."""
        if self.merges:
            return dict(self.merges.merged())
        return dict(self.lora.weights() if self.lora else self.model.state_dict())

    def save(self, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write model and tokenizer in Hugging Face format, or the adapter in PEFT's.

        `AutoModelForCausalLM.from_pretrained(folder)` loads it.

        Args:
            weights: tensors to write, by the names in `weights()`. None: the current weights.
        """
        if self.lora:
            self.lora.save(folder, weights)
        else:
            # A copy: transformers removes tied weights from it.
            written = dict(self.weights() if weights is None else weights)
            self.model.save_pretrained(folder, state_dict=written)
        for name in _HOW_LOADED:  # a resumed run would write other files
            self.tokenizer.init_kwargs.pop(name, None)
        self.tokenizer.save_pretrained(folder)


def use_own_kernels(model: PreTrainedModel) -> None:
    """Make a model use the attention and the norms of `attention` and `kernels`."""
    register()
    model.set_attn_implementation(NAME)
    fuse_norms(model)


def load_policy(
    config: ModelConfig,
    *,
    seed: int,
    device: str,
    setting: str = "model.path",
    dtype: torch.dtype = torch.float32,
    texts: Iterable[str] | None = None,
) -> Policy:
    """Load the model that the recipe names, in evaluation mode.

    If the path is the folder of an adapter, the adapter is merged into its base. If the recipe
    trains an adapter, only the base is loaded; `Policy.with_lora` adds the adapter.

    Args:
        seed: seed of the weights, for a model made from scratch.
        setting: name of the setting that holds the path, for error messages.
        dtype: dtype of the weights. Training needs float32.
        texts: training documents, for a model made from scratch whose tokenizer is trained.

    Raises:
        UserError: the model cannot be loaded or is not supported.
    """
    register()
    disable_progress_bar()  # transformers draws one per file, over the run's own display
    model, tokenizer = (
        from_disk(config.path, setting, config.revision, merge=not config.lora.rank)
        if config.path
        else scratch_model(config.scratch, seed, texts)
    )
    lowered = bool(config.path and config.lora.rank and config.lora.base != "float32")
    check_vocabulary(model, tokenizer, f"{setting} = '{config.path}'")
    set_template(tokenizer, config.chat_template, config.template_args)
    use_own_kernels(model)
    prepare_device(device)
    # The check compares in float32. A model for a smaller dtype is checked on the CPU: its float32
    # weights may not fit on the GPU.
    small = lowered or dtype != torch.float32
    model = model.to("cpu" if small else device).eval()  # type: ignore[arg-type]
    context = check_split(model)
    if lowered:
        lower_base(model, config.lora.base)
        model = model.to(device)  # type: ignore[arg-type]
    if dtype != torch.float32:
        model = _with_weights_in(model, dtype).to(device)  # type: ignore[arg-type]
    ends = model_turn_end(model.generation_config, tokenizer)
    check_ends(model, ends, f"{setting} = '{config.path}'")
    save_turn_end(model.generation_config, ends, tokenizer)
    with _refusals(
        f"{setting} = '{config.path}': its generation_config.json is not valid", config.path
    ):
        # transformers refuses to save it otherwise: at the first checkpoint.
        if model.generation_config is not None:
            model.generation_config.validate(strict=True)
    commits = hub_commits(config.path, config.revision)
    notes = (context.note,) if context.note else ()
    return Policy(
        model,
        tokenizer,
        context.tokens,
        ends.tokens,
        vocabulary_hash(tokenizer),
        ends.strings,
        commits,
        notes,
        ends,
    )


def _with_weights_in(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model with its parameters in `dtype`, without gradients.

    Buffers keep their dtype: the angles of rotary embeddings need float32.
    """
    for p in model.parameters():
        p.requires_grad_(False).data = p.data.to(dtype)
    model.config.dtype = dtype
    return model


def load_tokenizer(config: ModelConfig) -> tuple[PreTrainedTokenizerBase, GenerationConfig | None]:
    """Load the tokenizer and the generation settings of `load_policy`, without the model.

    Returns:
        The tokenizer with its chat template, and the generation settings. They are None for a model
        made from scratch.

    Raises:
        UserError: the tokenizer cannot be loaded, or the chat template cannot be used.
    """
    tokenizer: PreTrainedTokenizerBase
    settings = None
    if not config.path:
        tokenizer = scratch_tokenizer(config.scratch)
    else:
        _check_folder(config.path, "model.path", config.revision)
        with _refusals(
            f"model.path = '{config.path}': its tokenizer cannot be loaded", config.path
        ):
            pinned = config.revision or "main"
            tokenizer = AutoTokenizer.from_pretrained(
                config.path, revision=pinned, trust_remote_code=False
            )
            settings = _generation_settings(config.path, pinned)
    set_template(tokenizer, config.chat_template, config.template_args)
    return tokenizer, settings


def _generation_settings(path: str, revision: str) -> GenerationConfig:
    """The model's generation settings, from generation_config.json or else from config.json."""
    try:
        return GenerationConfig.from_pretrained(path, revision=revision)
    except OSError:
        return GenerationConfig.from_model_config(
            AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
        )


@contextmanager
def _refusals(failure: str, path: str) -> Iterator[None]:
    """Turn the errors of libraries that read a model's files into a UserError "FAILURE (reason)".

    They raise errors of every kind for values that they do not expect. Errors for lack of memory
    stay as they are.
    """
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except BaseException as error:
        # A panic of tokenizers' Rust code is not an Exception.
        panic = type(error).__name__ == "PanicException"
        if "can't allocate memory" in str(error) or not (panic or isinstance(error, Exception)):
            raise
        switch = "" if Path(path).exists() else offline_switch("models")
        why = f": it is no folder here, and {switch} forbids to ask the hub" if switch else ""
        raise UserError(f"{failure}{why} ({one_line(error)})") from error


def from_disk(
    path: str, setting: str = "model.path", revision: str = "", *, merge: bool = True
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer from a folder or the hub.

    For the folder of an adapter, the base that it names is loaded.

    Args:
        path: model folder, folder of an adapter, or hub id.
        setting: name of the setting that holds the path, for error messages.
        revision: branch, tag or commit of a hub id; empty for the newest.
        merge: for the folder of an adapter: merge the adapter into the base.

    Returns:
        The model with float32 weights, and its tokenizer.

    Raises:
        UserError: the model cannot be loaded.
    """
    if not is_adapter(path):
        return _from_disk(path, setting, revision)
    if revision:
        _check_folder(path, setting, revision)
    base = base_of(path, setting)
    check_base(base, f"{setting} = '{path}'")
    named = f"base model of {setting} '{path}'"
    model, tokenizer = _from_disk(base.path, named, base.revision)
    with _refusals(f"{setting} = '{path}': its tokenizer cannot be loaded", path):
        if any((Path(path) / name).is_file() for name in TOKENIZER_FILES):
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        if (Path(path) / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(path)
    if merge and base.rounded:
        round_to_nf4(model)
    if merge:
        merge_into(model, make_adapter(model, *read_files(path), f"adapter '{path}'"))
    return model, tokenizer


def origin_of(path: str, revision: str) -> Base:
    """Location and hash of the model that an adapter will be trained on.

    Call this after the model was loaded: the commit of a hub id is known only then.

    Args:
        path: model folder or hub id. For the folder of an adapter, its base is returned.
        revision: branch, tag or commit of a hub id; empty for the newest.
    """
    if is_adapter(path):
        base = base_of(path, "model.path")
        if base.sha256:
            return base
        path, revision = base.path, base.revision
    folder = Path(path).expanduser()
    if folder.is_dir():
        return Base(str(folder.resolve()), "", folder_hash(folder))
    return Base(path, hub_commits(path, revision).get(path, revision))


def _from_disk(
    path: str, setting: str, revision: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer from a model folder or the hub. See `from_disk`.

    Only safetensors weights are read, and no remote code is run. Dropout is disabled: with dropout,
    the trainer's log-probs would differ from the sampler's.
    """
    _check_folder(path, setting, revision)
    pinned = revision or "main"
    with _refusals(f"{setting} = '{path}': cannot be loaded as a causal LM with tokenizer", path):
        config = AutoConfig.from_pretrained(path, revision=pinned, trust_remote_code=False)
        if classes := [n for n in config.architectures or () if n.endswith("Classification")]:
            raise UserError(
                f"{setting} = '{path}' is a reward model or a classifier ({classes[0]}), which"
                " writes no text. Name a language model; a reward model belongs into"
                " environment.rewards"
            )
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
            ignore_mismatched_sizes=True,  # mismatches are refused below, with the weight's name
        )
        model, found = loaded
        tokenizer = AutoTokenizer.from_pretrained(path, revision=pinned, trust_remote_code=False)
    wrong = sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])})
    if wrong:  # transformers would continue with random values for these weights
        raise UserError(
            f"{setting} = '{path}': {len(wrong)} weights are missing or do not have the shape"
            f" that config.json gives. The first: '{wrong[0]}'. Use a complete model folder"
        )
    return model, tokenizer


def hub_commits(path: str, revision: str) -> dict[str, str]:
    """Hub id -> commit of a model that was just loaded. Empty for a folder.

    The commit is the name of the cache folder that holds the model's files.
    """
    if not path or Path(path).exists():
        return {}
    found = try_to_load_from_cache(path, "config.json", revision=revision or "main")
    return {path: Path(found).parent.name} if isinstance(found, str) else {}


def _check_folder(path: str, setting: str, revision: str = "") -> None:
    """Raise UserError for a path that cannot hold a model. A possible hub id passes."""
    folder = Path(path)
    if not folder.exists():
        if reason := not_found(path, "models"):
            raise UserError(f"{setting} = '{path}': {reason}")
        return
    if revision:
        raise UserError(
            f"model.revision = '{revision}' applies to hub models only, but '{path}' is a local"
            " folder. Leave it empty"
        )
    if not folder.is_dir():
        raise UserError(f"{setting} = '{folder}' is a file. Give the folder that has config.json")
    names = {regular_file(p).name for p in folder.iterdir()}
    if "config.json" not in names:
        raise UserError(
            f"{setting} = '{folder}' has no config.json. Give a model folder (found"
            f" {sorted(names)[:5]})"
        )
    if not any(n.endswith(".safetensors") for n in names):
        pickled = sorted(n for n in names if n.endswith((".bin", ".pt", ".pth")))
        why = (
            f"it has only pickle weights {pickled}, which can run code. Convert them to safetensors"
            if pickled
            else "it has no weights (*.safetensors). Give a complete model folder"
        )
        raise UserError(f"{setting} = '{folder}': {why}")
    if not names & TOKENIZER_FILES:
        raise UserError(
            f"{setting} = '{folder}' has no tokenizer files (tokenizer.json). Save the tokenizer"
            " in the same folder"
        )
    read_config(folder)


def check_vocabulary(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, where: str
) -> None:
    """Raise UserError for tokens that have no embedding in the model.

    Tokens that no prompt contains are ignored. Gemma 3's text models have one more token than
    embeddings, <image_soft_token>. transformers gives every Qwen2 tokenizer an unknown token,
    <|endoftext|>.

    Args:
        where: start of the error message.
    """
    embedding: Any = model.get_input_embeddings()
    rows = embedding.weight.shape[0]
    beyond = sorted((i, token) for token, i in tokenizer.get_vocab().items() if i >= rows)
    beyond = [
        (i, token)
        for i, token in beyond
        if i != tokenizer.unk_token_id and not _PLACEHOLDER.search(token)
    ]
    if beyond:
        raise UserError(
            f"{where}: {len(beyond)} tokens of the tokenizer have no embedding in the model,"
            f" which has {rows} (the first: {beyond[0][1]!r}, id {beyond[0][0]}). Use the model's"
            " own tokenizer, or enlarge the model with resize_token_embeddings and save it"
        )


def check_ends(model: PreTrainedModel, ends: TurnEnd, where: str) -> None:
    """Raise UserError for an end token that the model does not have.

    Args:
        where: start of the error message.
    """
    embedding: Any = model.get_input_embeddings()
    rows = embedding.weight.shape[0]
    if beyond := [token for token in ends.tokens if token >= rows]:
        raise UserError(
            f"{where}: eos_token_id = {beyond[0]} is not a token: the model has {rows}. Correct"
            " generation_config.json or config.json"
        )


def vocabulary_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the map from token to id. Equal hashes mean equal vocabularies."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[
        :16
    ]
