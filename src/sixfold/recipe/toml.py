"""Convert recipes between text and `Recipe`: TOML and `--dotted.flags`. No torch.

Every mistake is a UserError of one line. It says what is wrong, where (file and line, or flag), and
how to fix it. `_check_keys` checks keys before pydantic checks values, so a misspelt name is never
reported as a bad value.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ..errors import UserError, nearest
from .schema import PATTERNS, Recipe
from .toml_lines import key_lines, line_of, syntax_error

_MAX_BYTES = 1 << 20
_SECRET = re.compile(
    r"(^|[_-])(token|api[_-]?key|secret|password|passwd|credentials?)$", re.IGNORECASE
)
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
        key: dotted key.
        default: default value.
        description: one line for `--help`.
        accepts: description of the valid values.
        kind: JSON type of the value.
        item: JSON type of the items of a list. "table" for a list of tables.
        choices: allowed values, or allowed items of a list. Empty if they are not enumerated.
        fields: names allowed in the tables of a list.
    """

    key: str
    default: Any
    description: str
    accepts: str
    kind: str
    item: str = ""
    choices: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()

    @property
    def section(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]


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
        item, count = _item(spec), f"{spec['minItems']} " if "minItems" in spec else ""
        if "enum" in item:
            return "a list out of " + ", ".join(f"'{c}'" for c in item["enum"])
        return f"a list of {count}" + _bounded(
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


def _bounded(words: str, spec: Mapping[str, Any]) -> str:
    bounds = [f"{sign} {spec[name]}" for name, sign in _BOUNDS.items() if name in spec]
    if "pattern" in spec:
        bounds.append(PATTERNS[spec["pattern"]])
    return " ".join([words, " and ".join(bounds)]).strip()


def shipped_recipes() -> dict[str, Path]:
    """Recipes known by name.

    They are those in ./recipes, and those of the checkout or the installed package.
    """
    checkout = Path(__file__).parents[3] / "recipes"
    if checkout.is_dir():
        found = sorted(checkout.glob("*.toml"))
    else:
        installed = importlib.metadata.files("sixfold") or []
        found = [
            Path(str(f.locate())) for f in installed if f.match("share/sixfold/recipes/*.toml")
        ]
    return {path.stem: path for path in [*found, *sorted(Path("recipes").glob("*.toml"))]}


def find_recipe(path_or_name: str) -> Path:
    """File of a recipe that is given by path or name.

    Raises:
        UserError: if there is none.
    """
    path = Path(path_or_name).expanduser()
    if path.suffix == ".toml" or path.name != path_or_name or path.is_file():
        return path
    shipped = shipped_recipes()
    if path_or_name in shipped:
        return shipped[path_or_name]
    if path.exists():
        return path  # a folder or a device: reading it raises an error with the reason
    known = ", ".join(sorted(shipped))
    hint = nearest(path_or_name, list(shipped))
    raise UserError(
        f"no recipe named '{path_or_name}'.{hint} Shipped: {known}; or give the path of a .toml"
        " file"
    )


def load_recipe(path_or_name: str, flags: Sequence[str] = ()) -> Recipe:
    """Read a recipe, apply `--dotted.key value` flags, and check everything.

    Args:
        path_or_name: path of a TOML file, or name of a shipped recipe.
        flags: command-line flags, which take precedence over the file.

    Raises:
        UserError: for any mistake.
    """
    path = find_recipe(path_or_name)
    return parse_recipe(_read(path), str(path), flags)


def parse_recipe(text: str, where: str, flags: Sequence[str] = ()) -> Recipe:
    """Like `load_recipe`, for TOML text in memory.

    Args:
        text: the TOML text.
        where: name of the text in error messages.
        flags: command-line flags, which take precedence over the text.

    Raises:
        UserError: for any mistake.
    """
    try:
        asked = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # ValueError: also raised for an integer with too many digits.
        raise UserError(syntax_error(text, where, error)) from error
    if not asked:
        raise UserError(f'{where} is empty; the smallest recipe is one line: run.name = "my-run"')
    lines = key_lines(text)

    def place(key: str) -> str:
        line = line_of(key, lines)
        return f"{where}, line {line}" if line else where

    given = _parse_flags(flags)
    flagged: dict[str, Any] = {}
    _check_keys(asked, place)
    for key, value in given.items():
        _put(flagged, key, value)
    _check_keys(flagged, lambda key: f"--{key}")
    for key, value in given.items():
        _put(asked, key, value)
    return _validate(asked, where, lambda key: f"--{key}" if key in given else place(key))


def _read(path: Path) -> str:
    try:
        if path.is_dir():
            raise UserError(f"{path} is a folder; a recipe is a .toml file")
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a regular file; a recipe is a .toml file")
        with path.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise UserError(f"recipe not found: {path}") from error
    except OSError as error:
        raise UserError(f"recipe {path} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise UserError(f"{path} is larger than 1 MiB; a recipe is a short TOML file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not a UTF-8 TOML file (byte {error.start} is not text)"
        ) from error
    if "\0" in text:
        raise UserError(
            f"{path} is not a UTF-8 TOML file (it holds a zero byte: binary, or UTF-16)"
        )
    return text


def _parse_flags(flags: Sequence[str]) -> dict[str, Any]:
    """Parse `--a.b value` and `--a.b=value` into values by dotted key."""
    given: dict[str, Any] = {}
    rest = iter(flags)
    for flag in rest:
        if not flag.startswith("--") or flag == "--":
            raise UserError(
                f"unexpected argument '{flag}'; settings are written --section.key value"
            )
        key, equals, raw = flag[2:].partition("=")
        value = raw if equals else next(rest, None)
        if value is None or (not equals and value.startswith("--")):
            wanted = f": {knobs()[key].accepts}" if key in knobs() else ""
            raise UserError(
                f"--{key} needs a value{wanted} (one that starts with -- is written --{key}=VALUE)"
            )
        if key in given:
            raise UserError(f"--{key} is given twice")
        given[key] = _flag_value(key, value)
    return given


def _flag_value(key: str, raw: str) -> Any:
    """Parse the text of a flag into a TOML value.

    Strings need no quotes, and lists may be separated by commas. Anything else is TOML.
    """
    if any("\ud800" <= c <= "\udfff" for c in raw):  # Python passes invalid UTF-8 this way
        raise UserError(f"--{key}: the value is not valid UTF-8")
    knob = knobs().get(key)
    value = _toml_value(raw)
    if knob is None:
        return value
    if knob.kind == "string":
        return value if isinstance(value, str) else raw
    if knob.kind == "number" and isinstance(value, str):
        return _number(value)
    if knob.kind == "array" and not isinstance(value, list):
        items = [item.strip() for item in raw.split(",")] if raw.strip() else []
        return [_number(item) for item in items] if knob.item == "number" else items
    return value


def _number(raw: str) -> float | str:
    """Parse a number, including .1 and 5., which TOML does not allow.

    Text that is not a number is returned unchanged and refused later.
    """
    try:
        return float(raw)
    except ValueError:
        return raw


def _toml_value(raw: str) -> Any:
    """Parse `raw` as one TOML value. If that fails, return `raw` itself."""
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):
        return raw
    # A line break in `raw` could add a second key.
    return parsed["value"] if len(parsed) == 1 else raw


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *path, name = key.split(".")
    for part in path:
        branch = tree.setdefault(part, {})
        tree = (
            branch if isinstance(branch, dict) else {}
        )  # `--a 1 --a.b 2`: `a` is refused by _check_keys
    tree[name] = value


def _check_keys(tree: Mapping[str, Any], place: Callable[[str], str], prefix: str = "") -> None:
    """Check that every leaf is a setting and every table a section.

    Values are not shown in these errors, because a misplaced key may be a secret.

    Raises:
        UserError: with the nearest valid name.
    """
    for name, value in tree.items():
        key = prefix + name
        if key in sections():
            if not isinstance(value, dict):
                example = next(k for k in knobs() if k.startswith(key + "."))
                raise UserError(
                    f"'{key}' is a section, not a setting; set what is in it, e.g. {example}"
                    f" ({place(key)})"
                )
            _check_keys(value, place, key + ".")
        elif key not in knobs():
            raise UserError(f"{_unknown_key(key, value)} ({place(key)})")
        elif knobs()[key].fields and isinstance(value, list):
            _check_tables(knobs()[key], value, place)


def _check_tables(knob: Knob, tables: Sequence[Any], place: Callable[[str], str]) -> None:
    """Check that each item of a list of tables is a table with known names.

    Raises:
        UserError: if it is not.
    """
    for number, table in enumerate(tables, start=1):
        if not isinstance(table, dict):
            raise UserError(
                f"{knob.key}: entry {number} is {_shown(table)}, want a table such as"
                f" [[{knob.key}]] ({place(knob.key)})"
            )
        for name in table:
            if name not in knob.fields:
                raise UserError(
                    f"unknown key '{name}' in {knob.key}, entry"
                    f" {number}.{nearest(name, list(knob.fields))} ({place(f'{knob.key}.{name}')})"
                )


def _unknown_key(key: str, value: Any) -> str:
    """Error message for an unknown key."""
    name = key.rpartition(".")[2]
    if isinstance(value, str) and _SECRET.search(name):
        variable = name.upper().replace("-", "_")
        return (
            f"'{key}' looks like a secret: none is kept in a recipe (value not shown); set the"
            f" environment variable {variable}"
        )
    homes = [knob for knob in knobs().values() if knob.name == name]
    if homes:
        return f"'{key}' belongs under " + " or ".join(
            f"'{knob.section}' ({knob.key})" for knob in homes
        )
    takers = [
        knob.key
        for knob in knobs().values()
        if name in knob.choices and knob.section == key.rpartition(".")[0]
    ]
    if takers:
        return f"unknown key '{key}': '{name}' is a value of {takers[0]}"
    # Compare names without their section: a long shared prefix would make all keys look similar.
    everywhere = {knob.name: knob.key for knob in reversed(list(knobs().values()))}
    siblings = {
        child.rpartition(".")[2]: child
        for child in [*knobs(), *sections()]
        if child.rpartition(".")[0] == key.rpartition(".")[0]
    }
    near = [
        names[n] for names in (siblings, everywhere) for n in get_close_matches(name, names, n=1)
    ]
    return f"unknown key '{key}'." + (f" Did you mean '{near[0]}'?" if near else "")


def _validate(asked: Mapping[str, Any], where: str, place: Callable[[str], str]) -> Recipe:
    try:
        # JSON mode is strict about types, but accepts a list as a tuple and an integer as a number.
        # TOML dates have no JSON form. They are passed as a table, which every setting refuses.
        return Recipe.model_validate_json(
            json.dumps(asked, default=lambda date: {"date": str(date)})
        )
    except ValidationError as invalid:
        error = invalid.errors(include_url=False)[0]
        key = ".".join(str(part) for part in error["loc"] if isinstance(part, str))
        if error["type"] == "unsupported":  # raised by a validator of this setting
            raise UserError(
                f"{key} = '{error['input']}': {error['msg']} ({place(key)})"
            ) from invalid
        if key in knobs():
            raise UserError(f"{_bad_value(knobs()[key], asked)} ({place(key)})") from invalid
        parent, _, name = key.rpartition(".")
        if parent in knobs():  # a field of a list of tables
            number = next(part for part in error["loc"] if isinstance(part, int)) + 1
            raise UserError(
                f"{parent}, entry {number}: {name}: {_said_of_field(error)} ({place(key)})"
            ) from invalid
        raise UserError(f"{error['msg'].removeprefix('Value error, ')} ({where})") from invalid


def _said_of_field(error: Any) -> str:
    """Pydantic's message about a field in a list of tables, with the refused value."""
    message = error["msg"][0].lower() + error["msg"][1:]
    return message if error["type"] == "missing" else f"{message}, got {_shown(error['input'])}"


def _bad_value(knob: Knob, asked: Mapping[str, Any]) -> str:
    value: Any = asked
    for part in knob.key.split("."):
        value = value[part]
    wrong = [
        item
        for item in (value if isinstance(value, list) else [value])
        if isinstance(item, str) and item not in knob.choices
    ]
    near = nearest(wrong[0], list(knob.choices)) if wrong else ""
    return f"{knob.key}: expected {knob.accepts}, got {_shown(value)}{near and '.' + near}"


def _shown(value: Any) -> str:
    """A value in one short line."""
    if isinstance(value, dict):
        return "a table"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def flat(recipe: Recipe) -> dict[str, Any]:
    """Every value by dotted key, in the order of the schema.

    The tables of a list contain only values that differ from their defaults.
    """

    def walk(section: BaseModel, prefix: str) -> Iterator[tuple[str, Any]]:
        for name in type(section).model_fields:
            value = getattr(section, name)
            if isinstance(value, BaseModel):
                yield from walk(value, f"{prefix}{name}.")
            elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
                yield (
                    prefix + name,
                    tuple(table.model_dump(exclude_defaults=True) for table in value),
                )
            else:
                yield prefix + name, value

    return dict(walk(recipe, ""))


def dump_recipe(recipe: Recipe, *, comments: bool = False) -> str:
    """TOML that loads back to an equal Recipe. Settings that are None are left out.

    Args:
        recipe: recipe to write.
        comments: write each setting's description above it.
    """
    values = flat(recipe)
    tables: dict[str, list[str]] = {}
    for knob in knobs().values():
        if values[knob.key] is None:
            continue
        lines = tables.setdefault(knob.section, [f"[{knob.section}]"])
        if comments:
            lines.append(f"# {knob.description}")
        lines.append(f"{knob.name} = {toml_literal(values[knob.key])}")
    return "\n\n".join("\n".join(lines) for lines in tables.values()) + "\n"


def toml_literal(value: Any) -> str:
    """Value of a setting in TOML syntax."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace(
            "\x7f", "\\u007f"
        )  # JSON leaves DEL bare, TOML forbids it
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_literal(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_literal(item)}" for key, item in value.items()) + "}"
    return repr(value)
