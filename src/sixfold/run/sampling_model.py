"""Load a model for sampling only (`generate` and `serve`), and choose its device and dtype.

Nothing is trained here, so the weights themselves are cast and no float32 copy is kept.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import torch

from ..checkpoint.model_source import model_folder
from ..model.device import resolve_device
from ..model.loading import Policy, load_policy
from ..recipe.schema import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_for_sampling(path: str, device: str, precision: str, setting: str) -> Policy:
    """Load a policy that is only sampled from. Prints notes about it, such as a shorter context.

    Args:
        path: a run, a checkpoint, a model folder or a hub id.
        device: auto, cpu, cuda or cuda:N.
        precision: auto, float32 or bfloat16.
        setting: the user's name for the model, for error messages.

    Raises:
        UserError: if the device does not exist, or the model cannot be loaded.
    """
    folder, place = model_folder(path, setting), resolve_device(device, "--device")
    dtype = sampling_dtype(precision, place, stored_precision(path, folder))
    policy = load_policy(
        ModelConfig(path=folder), seed=0, device=place, setting=setting, dtype=dtype
    )
    for note in policy.notes:
        print(f"note: {note}", file=sys.stderr, flush=True)
    return policy


def sampling_dtype(asked: str, device: str, stored: str) -> torch.dtype:
    """Dtype for a precision.

    `auto` is bfloat16 on a GPU for a model that was trained or saved in 16 bits, and float32
    otherwise.

    Args:
        asked: auto, float32 or bfloat16.
        device: cpu, cuda or cuda:N.
        stored: result of `stored_precision`.
    """
    if asked != "auto":
        return DTYPES[asked]
    return (
        torch.bfloat16 if device != "cpu" and stored in ("bfloat16", "float16") else torch.float32
    )


def stored_precision(path: str, folder: str) -> str:
    """Precision of the model's run, otherwise the dtype in its config.json, otherwise "".

    Args:
        path: the user's argument.
        folder: folder of the model's files, or a hub id.
    """
    for place in (
        Path(path),
        *Path(path).absolute().parents[:2],
    ):  # a run, or runs/NAME/checkpoints/step-N
        if (place / "recipe.toml").is_file():
            run = tomllib.loads((place / "recipe.toml").read_text(encoding="utf-8")).get("run", {})
            return str(run.get("precision", "float32"))
    config = _config(folder)
    return str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")


def _config(folder: str) -> dict[str, object]:
    """config.json of a folder or hub id.

    Empty if it cannot be read. Loading the model reports the error later.
    """
    try:
        if not Path(folder).is_dir():
            from transformers import PretrainedConfig

            return dict(PretrainedConfig.get_config_dict(folder)[0])
        return dict(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
