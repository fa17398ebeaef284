"""Schemas of tools, from signatures, annotations and docstrings."""

from __future__ import annotations

import enum
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import pytest
import typing_extensions
from pydantic import BaseModel, Field

from sixfold.environment.tools.observation import ToolError
from sixfold.environment.tools.signature import read_docstring
from sixfold.environment.tools.tool import Tool, tool
from sixfold.errors import UserError


class Place(BaseModel):
    """A place."""

    title: str
    floor: int = 0


class Size(enum.Enum):
    SMALL = "s"
    LARGE = "l"


@tool(name="find_it")
def find(
    place: Place,
    schema: list[int],
    size: Size = Size.SMALL,
    count: Annotated[int, Field(ge=1)] = 1,
    kind: Literal["a", "b"] | None = None,
    *,
    model_config: dict[str, Any] | None = None,
) -> str:
    """Find a thing.

    It may take long.

    Args:
        place: where to look,
            and on which floor.
        schema (list of int): numbers.
        count: how many: at least one.

    Returns:
        The thing.
    """
    return f"{place.title}/{place.floor} {schema} {size.name} {count} {kind} {model_config}"


def test_the_description_has_the_format_of_openai() -> None:
    made = dict(find.description)
    assert made["type"] == "function"
    function = made["function"]
    assert function["name"] == "find_it"
    assert function["description"] == "Find a thing.\n\nIt may take long."
    parameters = function["parameters"]
    assert parameters["type"] == "object" and parameters["required"] == ["place", "schema"]
    shown = parameters["properties"]
    assert list(shown) == ["place", "schema", "size", "count", "kind", "model_config"]
    assert shown["schema"] == {
        "description": "numbers.", "items": {"type": "integer"}, "type": "array",
    }  # fmt: skip
    assert shown["place"]["description"] == "where to look, and on which floor."
    assert (shown["count"]["minimum"], shown["count"]["default"]) == (1, 1)
    place = parameters["$defs"]["Place"]
    assert list(place["properties"]) == ["title", "floor"], "a property may be named title"
    assert "title" not in place


def test_values_are_python_objects_and_the_function_fills_in_defaults() -> None:
    values = find.values('{"place": {"title": "x"}, "schema": [1], "size": "l"}')
    assert find(**values) == "x/0 [1] LARGE 1 None None"


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ('{"place": {"title": "x"}, "schema": ["1"]}', "wrong_argument"),
        ('{"place": {}, "schema": []}', "wrong_argument"),
        ('{"place": {"title": "x"}, "schema": [], "size": "m"}', "wrong_argument"),
        ('{"place": {"title": "x"}, "schema": [], "count": 0}', "wrong_argument"),
        ('{"place": {"title": "x"}}', "missing_argument"),
        ('{"place": {"title": "x"}, "schema": [], "argument0": 1}', "unknown_argument"),
        ("null", "bad_json"),
        ("", "missing_argument"),
        ('{"a": "\\ud800"}', "bad_json"),
        ("[" * 100_000, "bad_json"),
    ],
)
def test_invalid_arguments_give_an_error_of_one_line(arguments: str, kind: str) -> None:
    with pytest.raises(ToolError) as error:
        find.values(arguments)
    assert error.value.kind == kind
    assert "\n" not in str(error.value) and len(str(error.value)) <= 300


def google(a: int, b: str = "") -> None:
    """Do it.

    It may take long.

    Args:
        a (int): the number:
            at least one.
        b: a text.

    Returns:
        nothing

    Raises:
        if the number is 0
    """


def numpy(a: int, b: str = "") -> None:
    """Do it.

    It may take long.

    Parameters
    ----------
    a : int
        the number:
        at least one.
    b : str, optional
        a text.

    Returns
    -------
    None
    """


def sphinx(a: int, b: str = "") -> None:
    """Do it.

    It may take long.

    :param int a: the number:
        at least one.
    :param b: a text.
    :type b: str
    :returns: nothing
    """


@pytest.mark.parametrize("function", [google, numpy, sphinx])
def test_the_styles_of_docstrings(function: Callable[..., Any]) -> None:
    made = dict(Tool(function).description)["function"]
    assert made["description"] == "Do it.\n\nIt may take long."
    properties = made["parameters"]["properties"]
    assert properties["a"]["description"] == "the number: at least one."
    assert properties["b"]["description"] == "a text."


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Do it: now.\nAnd well.\n\n    code(a)\n\nNote that a: b.",
        "Do it.\n\nArgs:\n    the number",  # no argument is named: shown to the policy as it is
        "Do it.\n:\n    :\nAnd well.",
    ],
)
def test_a_docstring_without_described_arguments_is_the_description(text: str) -> None:
    assert read_docstring(text) == (text, {})


def test_a_missing_docstring_is_an_empty_description() -> None:
    def bare(a: int) -> None: ...

    function = dict(Tool(bare).description)["function"]
    assert function["description"] == ""
    assert "description" not in function["parameters"]["properties"]["a"]


def test_an_object_and_a_class_are_tools_by_their_call() -> None:
    class Adder:
        """Add."""

        def __call__(self, a: int) -> int:
            return a + 1

    class Pair:
        """A pair."""

        def __init__(self, a: int) -> None: ...

    for given, what in ((Adder(), "Add."), (Pair, "A pair.")):
        function = dict(Tool(given).description)["function"]
        assert function["description"] == what
        assert function["parameters"]["required"] == ["a"]


def untyped(a, b: int): ...  # type: ignore[no-untyped-def]


def spread(*a: int) -> None: ...


def keywords(**a: int) -> None: ...


def position(a: int, /) -> None: ...


def unknown(a: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def odd(a: Tool) -> None: ...


def default(a: str = object()) -> None: ...  # type: ignore[assignment]


def default_of_another_type(a: int = "3") -> None: ...  # type: ignore[assignment]


def default_outside(a: Literal["x", "y"] = "z") -> None: ...  # type: ignore[assignment]


def default_below(a: Annotated[int, Field(ge=1)] = 0) -> None: ...


def default_without_json(a: float = math.nan) -> None: ...


def calls_back(a: Callable[[], int]) -> None: ...


class Cup(TypedDict):
    size: int


def typed_dict(a: Cup) -> None: ...


@pytest.mark.parametrize(
    "function",
    [
        untyped,
        spread,
        keywords,
        position,
        unknown,
        odd,
        default,
        default_of_another_type,
        default_outside,
        default_below,
        default_without_json,
        calls_back,
        max,
    ],
)
def test_a_function_without_a_schema_is_refused_and_named(function: Any) -> None:
    with pytest.raises(UserError) as refused:
        _ = Tool(function).description
    words = str(refused.value)
    assert repr(function.__name__) in words
    assert "'a'" in words or "annotation" in words
    assert ("its default" in words) == function.__name__.startswith("default_")


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="pydantic reads this class from 3.12 on")
def test_a_typed_dict_of_typing_is_refused_with_the_class_to_use() -> None:
    with pytest.raises(UserError, match=r"typing_extensions\.TypedDict"):
        _ = Tool(typed_dict).description


class Point(NamedTuple):
    x: int
    y: int = 2


@dataclass(frozen=True)
class Box:
    size: int
    colour: str = "red"


class Mug(typing_extensions.TypedDict):
    size: int


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@pytest.mark.parametrize(
    ("kind", "default", "schema", "given", "value"),
    [
        (int | None, None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None, None),
        (int, None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 3, 3),
        (int | str, ..., {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "3", "3"),
        (Literal["x", 1], "x", {"enum": ["x", 1]}, 1, 1),
        (Annotated[int, Field(description="d")], 1, {"description": "d", "type": "integer"}, 2, 2),
        (Annotated[int, "words"], ..., {"type": "integer"}, 2, 2),
        (Box, Box(1), {"$ref": "#/$defs/Box"}, {"size": 2}, Box(2)),
        (Mug, ..., {"$ref": "#/$defs/Mug"}, {"size": 2}, {"size": 2}),
        (Point, Point(1), {"$ref": "#/$defs/Point"}, [3], Point(3, 2)),
        (Level, Level.LOW, {"$ref": "#/$defs/Level"}, 2, Level.HIGH),
        (float, 1, {"type": "number"}, 2, 2.0),
        (dict[str, float], {}, {"type": "object"}, {"a": 1}, {"a": 1.0}),
        (list[int], (), {"type": "array", "items": {"type": "integer"}}, [1], [1]),
        (set[int], {1}, {"type": "array", "uniqueItems": True}, [2], {2}),
        (date, date(2026, 1, 2), {"format": "date"}, "2026-11-23", date(2026, 11, 23)),
        (Any, ..., {}, [None], [None]),
    ],
)
def test_annotations_become_schemas_and_arguments_python_values(
    kind: Any, default: Any, schema: dict[str, Any], given: Any, value: Any
) -> None:
    def function(a: Any) -> None: ...

    function.__annotations__["a"] = kind
    function.__defaults__ = None if default is ... else (default,)
    made = Tool(function)
    parameters = dict(made.description)["function"]["parameters"]
    shown = parameters["properties"]["a"]
    assert {key: shown.get(key) for key in schema} == schema
    assert (
        ("default" in shown) == (default is not ...) == ("a" not in parameters.get("required", ()))
    )
    json.dumps(parameters, allow_nan=False)
    assert made.values(json.dumps({"a": given})) == {"a": value}


@pytest.mark.parametrize("more", [{"name": "two words"}, {"timeout_s": 0}, {"timeout_s": -1.0}])
def test_invalid_names_and_limits_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        Tool(spread, **more)
