"""Schemas of tools, from signatures, annotations and docstrings."""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from sixfold.environment.tools.observation import ToolError
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


def test_sphinx_docstrings_and_missing_docstrings() -> None:
    def sphinx(a: int) -> None:
        """Do it.

        :param int a: the number
        :returns: nothing
        """

    def bare(a: int) -> None: ...

    made = dict(Tool(sphinx).description)["function"]
    assert made["description"] == "Do it."
    assert made["parameters"]["properties"]["a"]["description"] == "the number"
    assert dict(Tool(bare).description)["function"]["description"] == ""


def untyped(a, b: int): ...  # type: ignore[no-untyped-def]


def spread(*a: int) -> None: ...


def keywords(**a: int) -> None: ...


def position(a: int, /) -> None: ...


def unknown(a: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def odd(a: Tool) -> None: ...


def default(a: str = object()) -> None: ...  # type: ignore[assignment]


@pytest.mark.parametrize("function", [untyped, spread, keywords, position, unknown, odd, default])
def test_a_function_without_a_schema_is_refused_and_named(function: Any) -> None:
    with pytest.raises(UserError) as refused:
        _ = Tool(function).description
    words = str(refused.value)
    assert repr(function.__name__) in words
    assert "'a'" in words or "annotation" in words


@pytest.mark.parametrize("more", [{"name": "two words"}, {"timeout_s": 0}, {"timeout_s": -1.0}])
def test_invalid_names_and_limits_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        Tool(spread, **more)
