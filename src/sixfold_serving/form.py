"""Check a body against a form (a pydantic model).

Errors name the first wrong field, as in OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from sixfold.errors import nearest

from .api_error import ApiError, bad_request
from .bounds import shortened

FormT = TypeVar("FormT", bound=BaseModel)

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""No conversions ("4" is not 4), and unknown fields are errors."""

UNIONS = {
    "stop": "a text of 1 to 1000 characters, or a list of at most 16 such texts",
    "tool_choice": "'auto', 'none', 'required', or an object that names a function",
    "input": "a text, or a list of messages, function calls and their outputs",
}
"""Fields that accept several forms, and their error messages.

pydantic would report one error per form.
"""


def check_form(form: type[FormT], given: Mapping[str, Any]) -> FormT:
    """Convert the body to an instance of the form.

    Raises:
        ApiError: a field is wrong. The error names the first one.
    """
    unknown = next((key for key in given if key not in form.model_fields), None)
    if unknown is not None:
        raise unknown_parameter(unknown, form.model_fields)
    try:
        return form.model_validate(given)
    except ValidationError as error:
        raise _first(error, form) from error


def unknown_parameter(param: str, known: Mapping[str, Any] | set[str]) -> ApiError:
    """Error 400 for an unknown field. The message suggests the nearest known name."""
    last = param.rpartition(".")[2]
    hint = nearest(last, sorted(known)) if len(last) <= 64 else ""
    return bad_request(
        f"unknown parameter '{shortened(param)}'.{hint}", shortened(param), "unknown_parameter"
    )


def _first(error: ValidationError, form: type[BaseModel]) -> ApiError:
    """pydantic's error about the first wrong field, as an `ApiError`.

    A union gives one error per branch for the same field. The deepest one is chosen: its branch
    matches the body best.
    """
    errors = error.errors(include_url=False, include_input=False)
    field = str(errors[0]["loc"][0])
    if field in UNIONS and errors[0]["type"] != "missing" and len(errors[0]["loc"]) < 4:
        return bad_request(f"{field}: expected {UNIONS[field]}", field, "invalid_value")
    found = max((e for e in errors if e["loc"][0] == field), key=lambda e: len(e["loc"]))
    param, named = "", _names(form)
    for step in found["loc"]:
        if isinstance(step, int):
            param += f"[{step}]"
        # Skip other steps: pydantic's path also has the names of a union's branches.
        elif step in named or found["type"] == "extra_forbidden":
            param += f".{step}" if param else step
    if found["type"] == "extra_forbidden":
        return unknown_parameter(param, named)
    if found["type"] == "missing":
        return bad_request(f"missing parameter '{param}'", param, "missing_required_parameter")
    return bad_request(
        f"{param}: {found['msg'].removeprefix('Value error, ')}", param, "invalid_value"
    )


def _names(form: type[BaseModel]) -> set[str]:
    """Names of the fields of a form, including nested forms."""
    found: set[str] = set()
    for name, field in form.model_fields.items():
        found |= {name, field.alias or name}
        for part in _forms(field.annotation):
            found |= _names(part)
    return found


def _forms(annotation: Any) -> list[type[BaseModel]]:
    """The forms that appear in a type annotation."""
    if (
        isinstance(annotation, type)
        and not isinstance(annotation, UnionType)
        and not get_args(annotation)
    ):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [form for part in get_args(annotation) for form in _forms(part)]
