"""Load a model for sampling only (`generate` and `serve`), and choose its device and dtype.

Nothing is trained here, so the weights themselves are cast and no float32 copy is kept.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..checkpoint.model_source import model_folder
from ..errors import UserError
from ..files.folder import model_stage
from ..model.device import resolve_device
from ..model.loading import Policy, load_policy
from ..recipe.schema import ModelConfig
from ..renderer.task_prompt import PLAIN_TEXT
from ..sizing.model_files import read_object

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
    plain = () if policy.tokenizer.chat_template else (PLAIN_TEXT,)
    for note in (*policy.notes, *plain):
        print(f"note: {note}", file=sys.stderr, flush=True)
    return policy


def load_draft(
    path: str, policy: Policy, precision: str, longest: int, setting: str
) -> PreTrainedModel:
    """Draft model on the policy's device.

    Args:
        path: a run, a checkpoint, a model folder or a hub id.
        policy: the model that checks the proposed tokens.
        precision: float32 or bfloat16.
        longest: longest sequence, in tokens.
        setting: the user's name for the path, for error messages.

    Raises:
        UserError: if it cannot be loaded, or its vocabulary differs, or its context is too short.
    """
    draft = load_for_sampling(path, str(policy.model.device), precision, setting)
    same_size = (
        draft.model.config.get_text_config().vocab_size
        == policy.model.config.get_text_config().vocab_size
    )
    if not same_size or draft.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise UserError(
            f"{setting} = '{path}': its vocabulary differs from the model's. Use a draft model with"
            " the same tokenizer"
        )
    if draft.context < longest:
        raise UserError(
            f"{setting} = '{path}': its context of {draft.context} tokens is shorter than the"
            f" longest sequence, {longest} tokens. Use another draft model"
        )
    return draft.model.requires_grad_(False)


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
    # a run, or runs/NAME/checkpoints/step-N
    for place in (model_stage(Path(path)), *Path(path).absolute().parents[:2]):
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
        return read_object(Path(folder) / "config.json")
    except (OSError, ValueError, UserError):
        return {}
