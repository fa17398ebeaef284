"""JSON schemas of tool arguments: does a value fit, and which schema has an argument?

References (`$ref` to a place in the schema itself), `allOf`, `anyOf`, `oneOf`, lists of types,
`nullable`, `enum`, `const`, `items` and `properties` are followed. Other keywords, such as
`pattern`, allow everything. A part of a schema that has no meaning allows everything too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int, float), "number": (int, float), "boolean": (bool,),
    "array": (list,), "object": (dict,), "null": (type(None),),
}  # fmt: skip
_OTHER_NAMES = {
    "str": "string", "text": "string", "int": "integer", "float": "number", "double": "number",
    "bool": "boolean", "list": "array", "tuple": "array", "dict": "object", "none": "null",
}  # fmt: skip
"""Names of types in data sets that were not written as JSON schemas."""

_MAX_DEPTH, _MAX_STEPS = 32, 10_000
"""Limits of one look into a schema, which may refer to itself. Beyond them everything fits."""


def fits(value: Any, schema: Any, root: Any = None, *, type_only: bool = False) -> bool:
    """True if a schema allows a JSON value.

    Args:
        value: the value.
        schema: the schema, or a part of `root`.
        root: the whole schema, in which references are looked up. None: `schema` is the whole.
        type_only: True if any other value of the same type will do as well.
    """
    return _Look(schema if root is None else root, type_only).fits(value, schema, 0)


def argument_schema(schema: Any, name: str) -> Any:
    """The part of a schema that describes an argument. {} if it does not name the argument."""
    found = _Look(schema, False).argument(schema, name, 0)
    return {} if found is None else found


class _Look:
    """One look into a schema.

    Args:
        root: the whole schema.
        type_only: values count only by their type.
    """

    def __init__(self, root: Any, type_only: bool) -> None:
        self._root = root
        self._type_only = type_only
        self._steps = 0

    def fits(self, value: Any, schema: Any, depth: int) -> bool:
        self._steps += 1
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or self._steps > _MAX_STEPS:
            return schema is not False
        if value is None and schema.get("nullable") is True:
            return True
        if not self._is_listed(value, schema):
            return False
        depth += 1
        parts: Sequence[Any] = (*self._target(schema), *_list(schema, "allOf"))
        if not all(self.fits(value, part, depth) for part in parts):
            return False
        for key in ("anyOf", "oneOf"):
            parts = _list(schema, key)
            if parts and not any(self.fits(value, part, depth) for part in parts):
                return False
        if self._type_only:
            return True
        if isinstance(value, list):
            first = _list(schema, "prefixItems")
            items = [*first, *[schema.get("items", {})] * (len(value) - len(first))]
            pairs = list(zip(value, items, strict=False))
        elif isinstance(value, dict):
            if any(key not in list(value) for key in _list(schema, "required")):
                return False
            known, other = _mapping(schema, "properties"), schema.get("additionalProperties", {})
            pairs = [(entry, known.get(key, other)) for key, entry in value.items()]
        else:
            pairs = []
        return all(self.fits(entry, part, depth) for entry, part in pairs)

    def argument(self, schema: Any, name: str, depth: int) -> Any:
        """Schema of a property, or None if the schema does not name it."""
        self._steps += 1
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or self._steps > _MAX_STEPS:
            return None
        every = [_mapping(schema, "properties").get(name)] + [
            self.argument(part, name, depth + 1)
            for part in (*self._target(schema), *_list(schema, "allOf"))
        ]
        some = [
            self.argument(part, name, depth + 1)
            for part in (*_list(schema, "anyOf"), *_list(schema, "oneOf"))
        ]
        if choices := [one for one in some if one is not None]:
            every.append({"anyOf": choices})
        if found := [one for one in every if one is not None]:
            return {"allOf": found}
        others = schema.get("additionalProperties")
        return others if isinstance(others, Mapping) else None

    def _is_listed(self, value: Any, schema: Mapping[str, Any]) -> bool:
        """True if `enum`, `const` and `type` allow a value."""
        names = schema.get("type")
        types = [names] if isinstance(names, str) else _list(schema, "type")
        listed = [schema["const"]] if "const" in schema else _list(schema, "enum")
        if self._type_only:
            same = not listed or any(_same_type(value, one) for one in listed)
        else:
            same = not listed or json_key(value) in map(json_key, listed)
        return same and (not types or any(is_a(value, name) for name in types))

    def _target(self, schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The part that a schema refers to. Empty if it refers to none in this schema."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return []
        found = self._root
        for key in reference[1:].split("/")[1:]:
            found = _mapping(found, key.replace("~1", "/").replace("~0", "~"))
        return [found]


def is_a(value: Any, name: Any) -> bool:
    """True if a JSON value has a type. A boolean is not a number, and 3.0 is an integer."""
    name = str(name).lower()
    name = _OTHER_NAMES.get(name, name)
    if isinstance(value, bool) or name == "boolean":
        return isinstance(value, bool) and _TYPES.get(name, (bool,)) == (bool,)
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(name, (object,)))


def json_key(value: Any) -> str:
    """Text that is equal for equal JSON values: 1 and 1.0 are, 1, true and "1" are not."""
    return json.dumps(_plain(value), sort_keys=True)


def _same_type(value: Any, other: Any) -> bool:
    return type(value) is type(other) or (is_a(value, "number") and is_a(other, "number"))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _list(schema: Mapping[str, Any], key: str) -> Sequence[Any]:
    found = schema.get(key)
    return found if isinstance(found, list | tuple) else ()


def _mapping(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = schema.get(key)
    return found if isinstance(found, Mapping) else {}
