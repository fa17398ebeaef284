"""Settings by dotted key, with their descriptions and valid values. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from .schema import PATTERNS, Recipe

# Names of JSON schema, and of pydantic, which uses its own for the bounds of `float | None`.
_BOUNDS = {
    "minimum": ">=",
    "ge": ">=",
    "exclusiveMinimum": ">",
    "gt": ">",
    "maximum": "<=",
    "le": "<=",
    "exclusiveMaximum": "<",
    "lt": "<",
}


@dataclass(frozen=True)
class Knob:
    """One setting, as `--help` shows it.

    Attributes:
        description: one line for `--help`.
        accepts: description of the valid values.
        kind: JSON type of the value.
        item: JSON type of the items of a list. "table" for a list of tables.
        choices: allowed values, or allowed items of a list. Empty if they are not enumerated.
        fields: names allowed in the tables of a list.
        kinds: values of the section's `kind` that have this setting. Empty: all.
    """

    key: str
    default: Any
    description: str
    accepts: str
    kind: str
    item: str = ""
    choices: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()

    @property
    def section(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def purpose(self) -> str:
        """Description, with the kinds that have the setting."""
        return (
            f"kind {', '.join(self.kinds)}: {self.description}"
            if self.kinds
            else (self.description)
        )


@cache
def knobs() -> dict[str, Knob]:
    """Every setting by dotted key, in the order of the schema."""
    schema = Recipe.model_json_schema()

    def walk(node: Mapping[str, Any], prefix: str) -> Iterator[Knob]:
        for name, spec in node["properties"].items():
            if "$ref" in spec:
                yield from walk(
                    schema["$defs"][spec["$ref"].rpartition("/")[2]], f"{prefix}{name}."
                )
            elif "oneOf" in spec:
                yield from _union(schema["$defs"], spec, f"{prefix}{name}.")
            elif reference := spec.get("items", {}).get("$ref"):
                fields = schema["$defs"][reference.rpartition("/")[2]]["properties"]
                words = f"a list of tables with any of {', '.join(fields)}"
                yield Knob(
                    prefix + name,
                    spec["default"],
                    spec["description"],
                    words,
                    "array",
                    "table",
                    fields=tuple(fields),
                )
            else:
                yield _knob(prefix + name, spec)

    return {knob.key: knob for knob in walk(schema, "")}


@cache
def sections() -> frozenset[str]:
    """Dotted names of all sections, including nested ones."""
    parts = (key.split(".") for key in knobs())
    return frozenset(".".join(path[:depth]) for path in parts for depth in range(1, len(path)))


@cache
def kind_knobs() -> dict[str, Knob]:
    """The setting `kind` of every section that has one, by section."""
    kinds = {knob.section for knob in knobs().values() if knob.kinds}
    return {
        knob.section: knob
        for knob in knobs().values()
        if knob.section in kinds and knob.name == "kind"
    }


def _union(models: Mapping[str, Any], spec: Mapping[str, Any], prefix: str) -> Iterator[Knob]:
    """Settings of a section with several kinds: `kind`, then the fields of all kinds.

    Args:
        models: JSON schemas by name.
        spec: JSON schema of the section.
        prefix: dotted key of the section, with a dot.
    """
    fields: dict[str, dict[str, Mapping[str, Any]]] = {}
    choices: list[str] = []
    for variant in spec["oneOf"]:
        properties = dict(models[variant["$ref"].rpartition("/")[2]]["properties"])
        tag = properties.pop("kind")
        kinds = tag.get("enum", [tag.get("const")])
        choices += kinds
        for name, field in properties.items():
            fields.setdefault(name, {}).update(dict.fromkeys(kinds, field))
    kind = {"enum": choices, "type": "string", "default": spec["default"]["kind"]}
    yield _knob(f"{prefix}kind", {**kind, "description": spec["description"]})
    for name, homes in fields.items():
        yield replace(_knob(prefix + name, next(iter(homes.values()))), kinds=tuple(homes))


def _knob(key: str, spec: Mapping[str, Any]) -> Knob:
    # `float | None`: None means "not set" and is never written.
    core = next((s for s in spec.get("anyOf", ()) if s["type"] != "null"), spec)
    item = _item(core)
    return Knob(
        key,
        spec["default"],
        spec["description"],
        _in_words(core),
        core["type"],
        item.get("type", ""),
        tuple((item or core).get("enum", ())),
    )


def _item(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Schema of the items of a list. Empty if the setting is not a list."""
    fixed = spec.get("prefixItems", ())
    return fixed[0] if fixed else spec.get("items", {})


def _in_words(spec: Mapping[str, Any]) -> str:
    """Describe the valid values: `an integer >= 1`, `one of 'a', 'b'`, `a list of texts`."""
    if "enum" in spec:
        return "one of " + ", ".join(f"'{c}'" for c in spec["enum"])
    if spec["type"] == "array":
        item = _item(spec)
        if "enum" in item:
            return "a list out of " + ", ".join(f"'{c}'" for c in item["enum"])
        return f"a list of {_count(spec)}" + _bounded(
            {"string": "texts", "number": "finite numbers"}[item["type"]], item
        )
    return _bounded(
        {
            "integer": "an integer",
            "number": "a finite number",
            "boolean": "true or false",
            "string": "text",
        }[spec["type"]],
        spec,
    )


def _count(spec: Mapping[str, Any]) -> str:
    """Number of items of a list, with a space. Empty if any number is valid."""
    least = spec.get("minItems")
    if least is None:
        return ""
    return f"{least} " if spec.get("maxItems") == least else f"at least {least} "


def _bounded(words: str, spec: Mapping[str, Any]) -> str:
    bounds = [f"{sign} {spec[name]}" for name, sign in _BOUNDS.items() if name in spec]
    if spec.get("minLength") and "pattern" not in spec:
        bounds.append("that is not empty" if words == "text" else "that are not empty")
    if "pattern" in spec:
        bounds.append(PATTERNS[spec["pattern"]])
    return " ".join([words, " and ".join(bounds)]).strip()
