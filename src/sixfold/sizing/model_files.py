"""Files of a model folder, read without trusting their contents. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from .model_size import model_size

_EXCESS = 16
"""A config.json is refused if it describes that many times the numbers that the weights have."""
_CONTEXT = ("max_position_embeddings", "n_positions")
_LONGEST = 2**31 - 1
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_WIDTHS = (
    *("hidden_size", "n_embd", "vocab_size", "intermediate_size", "moe_intermediate_size"),
    *("n_inner", "ffn_dim", "head_dim", "num_attention_heads", "num_key_value_heads", "n_head"),
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
)


@dataclass(frozen=True)
class Stored:
    """Size of the weights in a folder: number of tensors, and of the numbers in them."""

    tensors: int
    numbers: int


def regular_file(path: Path) -> Path:
    """The path, if it is a regular file or does not exist.

    Raises:
        UserError: for a named pipe, a socket or a device: reading it could wait without end.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is not a regular file. Put a copy of the file in its place")
    return path


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UserError: if the file cannot be read, or has no JSON object.
    """
    try:
        content = json.loads(regular_file(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read, it is not a valid JSON file: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object")
    return content


def read_config(
    folder: Path, *, with_weights: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config.json of a model folder, and the part of it that describes the language model.

    Args:
        folder: the model folder.
        with_weights: compare the sizes with those of the weights in the folder.

    Raises:
        UserError: if it cannot be read, or describes a model that its weights cannot be.
    """
    file = folder / "config.json"
    config = read_object(file)
    inner = config if config.get("text_config") is None else config["text_config"]
    if not isinstance(inner, dict):
        raise UserError(f"{file}: text_config must be an object, with sizes")
    _check_sizes(file, config, inner, stored_weights(folder) if with_weights else None)
    return config, inner


def stored_weights(folder: Path) -> Stored | None:
    """Size of the folder's safetensors files, or None if there are none.

    It is read from their headers: 8 bytes of length, then JSON.

    Raises:
        UserError: if a file is incomplete or damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    tensors = numbers = 0
    for path in files:
        try:
            with regular_file(path).open("rb") as stream:
                head = stream.read(8)
                size = int.from_bytes(head, "little")
                if len(head) < 8 or size > path.stat().st_size:
                    raise ValueError("it is cut short")
                header = json.loads(stream.read(size))
            shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
            numbers += sum(math.prod(map(int, shape)) for shape in shapes)
        except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
            raise UserError(
                f"model.path: {path} is not a complete safetensors file. Its header cannot be read:"
                " download or save it again"
            ) from error
        tensors += len(shapes)
    return Stored(tensors, numbers) if files else None


def _check_sizes(
    file: Path, config: Mapping[str, Any], inner: Mapping[str, Any], stored: Stored | None
) -> None:
    """Refuse sizes that are no sizes, and those of a model far larger than the weights.

    transformers would build such a model until memory is used up.

    Args:
        file: the config.json, for the message.
        config: its contents.
        inner: the part that describes the language model.
        stored: size of the weights. None: unknown.
    """
    for name in (*_CONTEXT, *_LAYERS, *_WIDTHS):
        value = inner.get(name)
        if value is None:
            continue
        per_layer = name not in (*_CONTEXT, *_LAYERS)
        if per_layer and isinstance(value, list) and all(type(item) is int for item in value):
            continue  # one width per layer, as in OpenELM and Nemotron
        if type(value) is not int or value < 0:
            raise UserError(
                f"{file}: {name} = {_short(value)} must be a whole number of at least 0"
            )
        if name in _CONTEXT:
            if 0 < value <= _LONGEST:
                continue
            raise UserError(f"{file}: {name} = {_short(value)} must be 1 to {_LONGEST} tokens")
        most = None if stored is None else stored.numbers
        if stored is not None and name in _LAYERS:
            most = _EXCESS * stored.tensors  # each layer has a tensor; some files stack them
        if most is not None and value > most:
            raise UserError(
                f"{file}: {name} = {_short(value)} does not belong to its weights, which have"
                f" {stored.numbers if stored else 0:,} numbers. Restore the model's own file"
            )
    size = model_size(config) or model_size(inner)
    if stored is not None and size is not None and size.parameters > _EXCESS * stored.numbers:
        raise UserError(
            f"{file} describes a model of {size.parameters:,} parameters, but its weights have"
            f" {stored.numbers:,} numbers. Restore the model's own file"
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
