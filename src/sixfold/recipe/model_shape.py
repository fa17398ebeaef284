"""Sizes of a model before it is loaded, from its settings or its files. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import UserError
from ..sizing.kv_cache import CachedNumbers
from ..sizing.model_files import read_config, read_object, stored_weights
from ..sizing.model_size import ModelSize, cached_numbers, model_size, read_size
from .adapter_folder import loaded_from
from .hub_names import hub_folder
from .schema import ModelConfig, ScratchConfig

SCRATCH_SPECIAL_TOKENS = 6
"""Tokens of the tokenizer in addition to the alphabet, or to bytes and merges.

Equal to the number of `model.scratch.SPECIAL` tokens, which cannot be imported without torch.
"""

_NAMES = {"qwen3": "Qwen3", "minigpt": "MiniGPT"}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model according to its files. None: not known before the model is loaded.

    Attributes:
        origin: description of where the model comes from.
        parameters: number of parameters, tied weights counted once.
        context: longest sequence, in tokens.
        cached: what the KV cache keeps of one token, if `size` is not known.
        unknown: why `size` is not known.
    """

    origin: str
    parameters: int | None = None
    context: int | None = None
    cached: CachedNumbers | None = None
    size: ModelSize | None = None
    unknown: str = ""


def model_shape(model: ModelConfig, setting: str = "model.path") -> ModelShape:
    """Sizes of a model, from its settings or its files. Nothing is loaded or downloaded.

    Args:
        model: where the model is, or its sizes.
        setting: setting that names the model, for error messages.

    Raises:
        UserError: if the settings or the files are invalid.
    """
    if not model.path:
        return _scratch_shape(model.scratch)
    path, revision = loaded_from(model.path, model.revision, setting)
    folder = Path(path).expanduser()
    if folder.is_dir():
        return _local_shape(folder)
    if folder.exists():
        raise UserError(f"{setting}: {folder} is a file; give the folder that holds config.json")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path):
        raise UserError(f"{setting}: no folder {folder}, and '{path}' is not a hub id (owner/name)")
    return _hub_shape(path, revision)


def _scratch_shape(sizes: ScratchConfig) -> ModelShape:
    if sizes.architecture == "qwen3" and sizes.head_dim % 2:
        raise UserError(
            f"model.scratch.head_dim = {sizes.head_dim} is odd, but rotary embeddings rotate"
            " pairs of numbers. Use an even number"
        )
    repeated = sorted({c for c in sizes.alphabet if sizes.alphabet.count(c) > 1})
    if repeated:
        raise UserError(
            f"model.scratch.alphabet has repeated characters: {''.join(repeated)!r}. List every"
            " character once"
        )
    vocabulary = sizes.vocabulary
    if sizes.tokenizer == "characters":
        vocabulary = len(sizes.alphabet) + SCRATCH_SPECIAL_TOKENS
    if sizes.words:
        vocabulary += len(sizes.words) + 1  # and the token of tool results
    size = model_size({"model_type": sizes.architecture, **sizes.fields(vocabulary)})
    assert size is not None
    return ModelShape(
        origin=(
            f"{_NAMES[sizes.architecture]} architecture from scratch: {sizes.layers} layers, width"
            f" {sizes.hidden_size}, {vocabulary} tokens in the vocabulary"
            + (
                f", {size.heads} heads without groups, MLP of width {size.intermediate}"
                if sizes.architecture == "minigpt"
                else ""
            )
        ),
        parameters=size.parameters,
        context=sizes.context,
        size=size,
    )


def _hub_shape(name: str, revision: str) -> ModelShape:
    """Sizes of a model on the hub.

    They are read from its config.json, if an earlier download left it in the hub's cache.
    """
    shape = ModelShape(origin=f"{name} from the hub")
    folder = hub_folder(name, "models")
    try:
        commit = (folder / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    except OSError:
        commit = revision  # a revision may be a commit
    try:
        config = read_object(folder / "snapshots" / commit / "config.json")
    except (UserError, ValueError):
        return shape
    size, unknown = _size_or_reason(config)
    if size is None:
        return replace(shape, unknown=unknown)
    return replace(shape, parameters=size.parameters, size=size)


def _size_or_reason(config: object) -> tuple[ModelSize | None, str]:
    """Sizes of a model, or the reason why they are not known."""
    try:
        return read_size(config), ""
    except UserError as error:
        return None, str(error)


def _local_shape(folder: Path) -> ModelShape:
    if not (folder / "config.json").exists():
        raise UserError(
            f"model.path: {folder} has no config.json. Give a Hugging Face model folder"
        )
    whole, config = read_config(folder, with_weights=False)
    size, unknown = _size_or_reason(whole)
    stored = stored_weights(folder) if size is None else None
    kind = config.get("model_type", "unknown")
    return ModelShape(
        origin=f"{kind} model in {folder}",
        parameters=size.parameters if size else stored.numbers if stored else None,
        context=config.get("max_position_embeddings", config.get("n_positions")),
        cached=cached_numbers(config, padded=True),
        size=size,
        unknown=unknown,
    )
