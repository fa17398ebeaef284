"""Schema of a function's arguments, and validation of a call's arguments, with pydantic."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, get_type_hints

from docstring_parser import ParseError, numpydoc, rest
from docstring_parser.google import GoogleParser, Section, SectionType
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import PydanticJsonSchemaWarning

from ...errors import UserError
from .observation import ErrorKind, ToolError

_KINDS: dict[str, ErrorKind] = {
    "missing": "missing_argument",
    "extra_forbidden": "unknown_argument",
    "json_invalid": "bad_json",
    "json_type": "bad_json",
    "model_type": "bad_json",
    "model_attributes_type": "bad_json",
}

_ARGUMENTS = ("Args", "Arguments", "Parameters", "Params")
_OTHERS = ("Returns", "Return", "Yields", "Raises", "Example", "Examples", "Note", "Notes")
_GOOGLE = GoogleParser(
    [Section(title, "param", SectionType.MULTIPLE) for title in _ARGUMENTS]
    # SINGULAR: the contents are not read, so any form is allowed.
    + [Section(title, title, SectionType.SINGULAR) for title in _OTHERS]
)


class Signature:
    """Arguments of a tool.

    Types are strict: the text "3" is not an integer.

    Args:
        function: the function. Every parameter needs an annotation.
        is_method: True if the first parameter is the object, and not an argument.

    Attributes:
        description: the docstring without its sections.
        schema: JSON schema of the arguments, of type "object".

    Raises:
        UserError: no schema can be derived.
    """

    def __init__(self, function: Callable[..., Any], name: str, is_method: bool) -> None:
        self._name = name
        self.description, documented = read_docstring(inspect.getdoc(function) or "")
        fields = self._fields(function, is_method, documented)
        self._names = {f"argument{at}": key for at, key in enumerate(fields)}
        self._model = self._made(fields)
        self.schema = self._json_schema(self._model)

    def values(self, arguments: str) -> dict[str, Any]:
        """Arguments of a call as Python values.

        Raises:
            ToolError: they do not fit the schema.
        """
        try:
            checked = self._model.model_validate_json(arguments or "{}", strict=True)
        except ValidationError as error:
            raise _refusal(error) from error
        except (ValueError, RecursionError) as error:
            raise ToolError(f"the arguments cannot be read: {error}"[:300], "bad_json") from error
        given = checked.model_fields_set
        return {name: getattr(checked, at) for at, name in self._names.items() if at in given}

    def _fields(
        self, function: Callable[..., Any], is_method: bool, documented: Mapping[str, str]
    ) -> dict[str, tuple[Any, Any]]:
        """Type and field of each parameter, by name."""
        try:
            parameters = list(inspect.signature(function).parameters.values())
            called = function if inspect.isroutine(function) else type(function).__call__
            hints = get_type_hints(called, include_extras=True)
        except (TypeError, ValueError, NameError, AttributeError) as error:
            raise UserError(
                f"tool {self._name!r}: its signature cannot be read ({error}). Give every parameter"
                " an annotation that exists in the module"
            ) from error
        fields: dict[str, tuple[Any, Any]] = {}
        for parameter in parameters[is_method:]:
            name = parameter.name
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise self._unfit(name, "calls give arguments by name", "Use an ordinary parameter")
            if parameter.annotation is parameter.empty:
                raise self._unfit(name, "it has no annotation", f"Write {name}: TYPE")
            default = ... if parameter.default is parameter.empty else parameter.default
            # `a: int = None` means `a: int | None = None`, as in older code.
            hint = hints.get(name, parameter.annotation)  # of a class: from its `__init__`
            hint = hint if default is not None else hint | None
            # An explicit None would replace the description of `Annotated[..., Field(...)]`.
            described: dict[str, Any] = (
                {"description": documented[name]} if name in documented else {}
            )
            # The field is renamed: a name such as "schema" would hide a method of the model.
            fields[name] = (hint, Field(default, alias=name, **described))
        return fields

    def _made(self, fields: Mapping[str, tuple[Any, Any]]) -> type[BaseModel]:
        """The model of all arguments. Each is tried alone first, so that an error can name it."""
        for name, field in fields.items():
            try:
                model = _model({name: field})
                schema = self._json_schema(model)
            except (PydanticUserError, PydanticJsonSchemaWarning, TypeError, ValueError) as error:
                reason = str(error).splitlines()[0]
                raise self._unfit(
                    name,
                    f"its annotation or default has no JSON schema ({reason})",
                    "Use str, int, float, bool, Literal, list, dict, or a pydantic model",
                ) from error
            self._check_default(name, model, schema["properties"][name])
        return _model(fields)

    def _check_default(self, name: str, model: type[BaseModel], shown: Mapping[str, Any]) -> None:
        """Refuse a default that the schema shows to the policy, but does not allow.

        Args:
            model: the model of this parameter alone.
        """
        if "default" not in shown:
            return
        try:
            given = json.dumps({name: shown["default"]}, allow_nan=False)
            model.model_validate_json(given, strict=True)
        except ValueError as error:
            raise self._unfit(
                name,
                f"its default {shown['default']!r} does not fit its annotation",
                "Correct one of them",
            ) from error

    @staticmethod
    def _json_schema(model: type[BaseModel]) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PydanticJsonSchemaWarning)
            schema = _untitled(model.model_json_schema(by_alias=True))
        del schema["additionalProperties"]
        return schema

    def _unfit(self, parameter: str, problem: str, remedy: str) -> UserError:
        return UserError(
            f"tool {self._name!r}: no schema can be derived for its parameter {parameter!r}:"
            f" {problem}. {remedy}"
        )


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Read a docstring in Google's, NumPy's or Sphinx's style: the one with the most sections.

    Args:
        text: a docstring without indentation.

    Returns:
        The description of the function, and the descriptions of its arguments by name.
    """
    read = []
    for parse in (rest.parse, _GOOGLE.parse, numpydoc.parse):
        with suppress(ParseError, IndexError):  # IndexError: of a line with only a colon
            read.append(parse(text))
    if not read:
        return text, {}
    best = max(read, key=lambda found: len(found.meta))
    arguments = {
        found.arg_name.strip("* "): " ".join((found.description or "").split())
        for found in best.params
    }
    return (best.description or "").strip(), arguments


def _model(fields: Mapping[str, tuple[Any, Any]]) -> type[BaseModel]:
    members: dict[str, Any] = {f"argument{at}": field for at, field in enumerate(fields.values())}
    config = ConfigDict(extra="forbid", allow_inf_nan=False)
    return create_model("Arguments", __config__=config, **members)


def _untitled(schema: Any) -> Any:
    """The schema without the titles that pydantic adds. They only repeat the names."""
    if isinstance(schema, list):
        return [_untitled(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    names = ("properties", "$defs")
    return {
        key: {name: _untitled(one) for name, one in value.items()}
        if key in names
        else value
        if key in ("default", "enum", "const", "examples")
        else _untitled(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }


def _refusal(error: ValidationError) -> ToolError:
    """Error for the first problem of the arguments, in one line."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    kind = _KINDS.get(first["type"], "wrong_argument")
    where = ".".join(map(str, first["loc"]))[:60]
    if kind == "bad_json":
        return ToolError(f"the arguments are not a JSON object: {first['msg']}"[:300], kind)
    words = {
        "missing_argument": f"the argument {where!r} is missing",
        "unknown_argument": f"there is no argument {where!r}",
    }
    if len(first["loc"]) > 1:
        kind = "wrong_argument"
    return ToolError(words.get(kind, f"the argument {where!r}: {first['msg']}")[:300], kind)
