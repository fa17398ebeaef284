"""Read the action of an OpenEnv environment from a reply, by the JSON schema of its actions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sixfold.environment.answer_part import answer_part

from .actions import MalformedAction, chosen, tagged_part

CALL = {"tool_name", "arguments"}
"""Fields of the action that calls a tool of an environment."""

_UNIONS = ("anyOf", "oneOf", "allOf")
_DEEPEST = 8


@dataclass(frozen=True)
class ActionSchema:
    """Schema of the actions of an environment.

    Attributes:
        schema: the JSON schema, of type "object".
    """

    schema: Mapping[str, Any]

    @cached_property
    def _properties(self) -> dict[str, Any]:
        given = self.schema.get("properties", {})
        return {
            name: self._resolve_references(one) for name, one in given.items() if name != "metadata"
        }

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Fields that the policy writes, with their schemas. Constants are not among them."""
        return {name: one for name, one in self._properties.items() if "const" not in one}

    @property
    def is_call(self) -> bool:
        """True if the actions call tools, which the environment lists itself."""
        return not self.fields or set(self.fields) == CALL

    @property
    def expected(self) -> dict[str, Any]:
        """Description of an action for the policy: the values or the type of each field."""
        return {name: one.get("enum") or _type(one) for name, one in self.fields.items()}

    def payload(self, reply: str) -> dict[str, Any]:
        """The action of a reply.

        If an action has a single field of text, the reply is its value. If its single field has
        listed values, the reply must name one. Otherwise the reply must be a JSON object with the
        fields. For a single field of another type, its JSON value is enough.

        Raises:
            MalformedAction: the reply is not JSON, names no or several values, or has other fields
                than an action.
        """
        text = answer_part(reply).strip()
        only = next(iter(self.fields.items())) if len(self.fields) == 1 else None
        if only and only[1].get("type") == "string" and "enum" not in only[1]:
            return {**self._constants, only[0]: text}
        try:
            given = json.loads(tagged_part(text))
        except (ValueError, RecursionError) as error:
            if not only or "enum" not in only[1]:
                raise MalformedAction("the reply is not JSON") from error
            names = {value: value for value in only[1]["enum"] if isinstance(value, str)}
            given = chosen(text, names, [v for v in only[1]["enum"] if isinstance(v, int)])
        if not isinstance(given, dict):
            if not only:
                raise MalformedAction("the reply is not a JSON object")
            given = {only[0]: given}
        return self._check_fields(given)

    def _check_fields(self, given: Mapping[str, Any]) -> dict[str, Any]:
        unknown = [name for name in given if name not in self._properties]
        missing = [
            name
            for name in self.schema.get("required", ())
            if name in self.fields and name not in given
        ]
        if unknown or missing:
            what = f"has no field {missing[0]!r}" if missing else f"has a field {unknown[0]!r}"
            raise MalformedAction(f"the action {what}")
        listed = {name: one["enum"] for name, one in self.fields.items() if "enum" in one}
        return {
            **self._constants,
            **{k: _option(k, v, listed[k]) if k in listed else v for k, v in given.items()},
        }

    @property
    def _constants(self) -> dict[str, Any]:
        return {name: one["const"] for name, one in self._properties.items() if "const" in one}

    def _resolve_references(self, field: Mapping[str, Any]) -> Mapping[str, Any]:
        """The schema of a field without references, and that of its value if it may be null."""
        for _ in range(_DEEPEST):  # references may form a circle
            options = [o for key in _UNIONS for o in field.get(key, ()) if o.get("type") != "null"]
            if "$ref" in field:
                name = str(field["$ref"]).rpartition("/")[2]
                field = self.schema.get("$defs", {}).get(name, {})
            elif len(options) == 1:
                field = options[0]
        return field


def _type(field: Mapping[str, Any]) -> str:
    options = [o for key in _UNIONS for o in field.get(key, ())]
    return str(field.get("type") or " or ".join(map(_type, options)) or "any")


def _option(name: str, given: Any, options: list[Any]) -> Any:
    """The listed value that is given. Capitals do not matter."""
    same = [one for one in options if one == given and type(one) is type(given)]
    same = same or [one for one in options if str(one).casefold() == str(given).casefold()]
    if len(same) != 1 and not (given is None and not same):
        raise MalformedAction(f"the field {name!r} is none of {', '.join(map(str, options))}")
    return same[0] if same else given
