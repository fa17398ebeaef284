"""The LoRA adapter that a run trains, in words: its settings, and how many parameters it has."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..recipe.adapter_folder import WEIGHTS, base_of
from .numbers import percent

_LONGEST_HEADER = 1 << 27
"""Largest header that is read, in bytes. A larger one is not a header."""


def adapter_of(run: Path, recipe: Mapping[str, Any]) -> str:
    """The adapter that a run trains, in words. Empty if the run trains all weights.

    Args:
        recipe: its recipe, parsed. A part that is not of the expected type is left out.
    """
    lora = table(table(recipe, "model"), "lora")
    rank = lora.get("rank")
    if not (isinstance(rank, int) and rank > 0):
        return ""
    kind = "DoRA" if lora.get("dora") is True else "LoRA"
    text = f"{kind}, rank {rank}"
    if isinstance(alpha := lora.get("alpha"), int | float):
        text += f", alpha {alpha:g}"
    if lora.get("rslora") is True:
        text += " (rank-stabilised)"
    if isinstance(targets := lora.get("targets"), list):
        text += f", on {', '.join(map(str, targets))}"
    if isinstance(precision := lora.get("base"), str) and precision:
        text += f"; frozen base in {precision}"
    file = newest_adapter(run)
    trained = parameters_of(file) if file else None
    if not file or not trained:
        return text
    text += f"; {trained:,} trained parameters"
    base = base_parameters(file.parent)
    return text + (f" ({percent(trained / base, 2)} of {base:,} in the base)" if base else "")


def newest_adapter(run: Path) -> Path | None:
    """Weights of the adapter in the newest checkpoint of a run. None if there is none."""
    # Names sort by age: SFT before RL, then by step.
    found = sorted(run.glob(f"checkpoints/s*-*/model/{WEIGHTS}"))
    return found[-1] if found else None


def parameters_of(file: Path) -> int | None:
    """Number of parameters in a safetensors file, from its header. None if it cannot be read."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            raw = stream.read(size) if size <= _LONGEST_HEADER else b""
        header = json.loads(raw)
        header.pop("__metadata__", None)
        return sum(math.prod(tensor["shape"]) for tensor in header.values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def base_parameters(adapter: Path) -> int | None:
    """Parameters of the base of an adapter. None if the base is not in a folder of this machine."""
    try:
        folder = Path(base_of(str(adapter), "the adapter").path).expanduser()
    except UserError:
        return None
    counts = [parameters_of(file) for file in folder.glob("*.safetensors")]
    return sum(filter(None, counts)) if all(counts) else None


def table(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table of a record. Empty if it is missing or no table."""
    value = record.get(name)
    return value if isinstance(value, Mapping) else {}
