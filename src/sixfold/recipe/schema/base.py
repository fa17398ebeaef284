"""Base class and value types that all sections of a recipe share."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError


def _finite(x: float) -> float:
    if not math.isfinite(x):
        raise ValueError("must be finite")
    return x


def device_name(name: str) -> str:
    """Return the name if it is a supported device.

    Raises:
        ValueError: if it is not a device, or if there are no kernels for it.
    """
    if re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name):
        return name
    if name.startswith("cuda"):
        raise PydanticCustomError("unsupported", "write cuda, or cuda:N for GPU number N")
    if name.split(":")[0] in ("mps", "xpu", "hpu", "npu", "xla", "tpu"):
        raise PydanticCustomError(
            "unsupported", "not supported; use cpu, or cuda on a machine with such a GPU"
        )
    raise ValueError("no device")


Real = Annotated[float, AfterValidator(_finite)]
Device = Annotated[
    str,
    AfterValidator(device_name),
    WithJsonSchema({"type": "string", "enum": ["auto", "cpu", "cuda"]}),
]
"""auto, cpu, cuda, or cuda:N."""
Decay = Annotated[Real, Field(ge=0, lt=1)]
StopText = Annotated[str, Field(min_length=1)]
NAME, ASSIGNMENT, DEVICES = (
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
    r"^[A-Za-z_][A-Za-z0-9_]*=",
    r"^(\d+(,\d+)*)?$",
)
PATTERNS = {
    NAME: "of letters, digits, '.', '_' and '-' that starts with a letter or digit",
    ASSIGNMENT: "of the form NAME=VALUE",
    DEVICES: "of numbers, separated by commas",
}
"""Descriptions of the text patterns, for error messages and `--help`."""
Assignment = Annotated[str, Field(pattern=ASSIGNMENT)]


def knob(default: Any, description: str, **bounds: Any) -> Any:
    """Define a setting.

    Args:
        default: default value.
        description: one line for `--help`.
        bounds: constraints of `pydantic.Field`.
    """
    return Field(default, description=description, **bounds)


class Section(BaseModel):
    """Base of all sections: immutable, strict about types, refuses unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
