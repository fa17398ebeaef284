"""Checks a body against a form (a pydantic model), and says in OpenAI's words what is wrong first."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import nearest
from .api_error import ApiError, bad_request
from .bounds import shortened

FormT = TypeVar("FormT", bound=BaseModel)

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""No guesses: "4" is not 4, and a field that nobody knows is a mistake."""

UNIONS = {
    "stop": "a text of 1 to 1000 characters, or a list of at most 16 of them",
    "tool_choice": "'auto', 'none', 'required', or an object that names a function",
    "input": "a text, or a list of messages, function calls and their outputs",
}
"""Fields of several forms, for which pydantic would complain of each form in turn."""


def check_form(form: type[FormT], given: Mapping[str, Any]) -> FormT:
    """The body as an instance of the form.

    Raises:
        ApiError: names the first field that is wrong.
    """
    unknown = next((key for key in given if key not in form.model_fields), None)
    if unknown is not None:
        raise unknown_parameter(unknown, form.model_fields)
    try:
        return form.model_validate(given)
    except ValidationError as error:
        raise _first(error, form) from error


def unknown_parameter(param: str, known: Mapping[str, Any] | set[str]) -> ApiError:
    """A 400 for a field that nobody knows, with the nearest known name."""
    last = param.rpartition(".")[2]
    hint = nearest(last, sorted(known)) if len(last) <= 64 else ""
    return bad_request(f"unknown parameter '{shortened(param)}'.{hint}", shortened(param), "unknown_parameter")


def _first(error: ValidationError, form: type[BaseModel]) -> ApiError:
    """pydantic's complaint about the first wrong field. Of several for one field, which are those of
    the branches of a union, the deepest: that branch fits best."""
    errors = error.errors(include_url=False, include_input=False)
    field = str(errors[0]["loc"][0])
    if field in UNIONS and errors[0]["type"] != "missing" and len(errors[0]["loc"]) < 4:
        return bad_request(f"{field}: expected {UNIONS[field]}", field, "invalid_value")
    found = max((e for e in errors if e["loc"][0] == field), key=lambda e: len(e["loc"]))
    param, named = "", _names(form)
    for step in found["loc"]:
        if isinstance(step, int):
            param += f"[{step}]"
        elif step in named or found["type"] == "extra_forbidden":  # pydantic names the branches of a union too
            param += f".{step}" if param else step
    if found["type"] == "extra_forbidden":
        return unknown_parameter(param, named)
    if found["type"] == "missing":
        return bad_request(f"missing parameter '{param}'", param, "missing_required_parameter")
    return bad_request(f"{param}: {found['msg'].removeprefix('Value error, ')}", param, "invalid_value")


def _names(form: type[BaseModel]) -> set[str]:
    """The fields of a form and of the forms in it."""
    found: set[str] = set()
    for name, field in form.model_fields.items():
        found |= {name, field.alias or name}
        for part in _forms(field.annotation):
            found |= _names(part)
    return found


def _forms(annotation: Any) -> list[type[BaseModel]]:
    """The forms that an annotation mentions."""
    if isinstance(annotation, type) and not isinstance(annotation, UnionType) and not get_args(annotation):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [form for part in get_args(annotation) for form in _forms(part)]
