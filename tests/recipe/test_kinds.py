"""Sections with several kinds: which settings a kind has, and what a flag does to a recipe's."""

from __future__ import annotations

import pytest

from sixfold.errors import UserError
from sixfold.recipe.dump import dump_recipe, flat
from sixfold.recipe.explain import asked_settings
from sixfold.recipe.knobs import kind_knobs, knobs
from sixfold.recipe.python_arguments import python_words, setting_flags
from sixfold.recipe.resume_policy import allowed_changes, settings_of
from sixfold.recipe.schema import CopySyncConfig, DraftSpeculation, Recipe, SharedSyncConfig
from sixfold.recipe.toml import parse_recipe

COPY = '[sync]\nkind = "copy"\nevery = 4'


def refusal(text: str, *flags: str) -> str:
    with pytest.raises(UserError) as caught:
        parse_recipe(text, "x.toml", flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_sections_with_kinds() -> None:
    assert {section: knob.choices for section, knob in kind_knobs().items()} == {
        "engine.preemption": ("none", "recompute", "swap"),
        "engine.speculation": ("none", "ngram", "draft"),
        "rollout.backend": ("engine", "vllm", "sglang", "sixfold"),
        "placement": ("local", "processes", "ray"),
        "sync": ("shared", "copy", "int8", "fp8"),
    }
    assert knobs()["sync.every"].kinds == ("copy", "int8", "fp8")
    assert knobs()["engine.speculation.tokens"].kinds == ("ngram", "draft")
    assert knobs()["run.seed"].kinds == ()


def test_a_kind_has_its_own_fields_in_a_file_and_as_flags() -> None:
    assert parse_recipe(COPY, "x").sync == CopySyncConfig(kind="copy", every=4)
    assert parse_recipe('sync = {kind = "fp8"}', "x").sync == CopySyncConfig(kind="fp8")
    flags = ["--engine.speculation.path", "small", "--engine.speculation.kind=draft"]
    found = parse_recipe("run.seed = 1", "x", flags).engine.speculation
    assert found == DraftSpeculation(path="small", tokens=4)


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        ("[sync]\nevery = 2", [], ["sync.every", "'copy', 'int8' or 'fp8'", "x.toml, line 2"]),
        (
            '[rollout.backend]\nkind = "sglang"\nsleep = true',
            [],
            ["rollout.backend.sleep", "kind 'vllm'", "is 'sglang'", "x.toml, line 3"],
        ),
        (COPY, ["--rollout.backend.url=http://h:1"], ["kind 'sglang'", "(--rollout.backend.url)"]),
        (
            COPY,
            ["--sync.kind=shared", "--sync.every=3"],
            ["sync.every", "is 'shared'", "(--sync.every)"],
        ),
    ],
)
def test_a_field_of_another_kind_is_refused_with_its_kinds(
    text: str, flags: list[str], words: list[str]
) -> None:
    message = refusal(text, *flags)
    assert all(word in message for word in words), message


def test_an_unknown_kind_names_the_nearest() -> None:
    message = refusal('[engine.preemption]\nkind = "swop"')
    assert "engine.preemption.kind" in message and "Did you mean 'swap'?" in message
    assert "x.toml, line 2" in message
    assert "(--sync.kind)" in refusal(COPY, "--sync.kind=copi")
    assert "got 3" in refusal("sync.kind = 3")


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("rollout.backend", "vllm", ["rollout.backend.kind = 'vllm'"]),
        ("rollout.backend", "vllm:/opt/py", ["kind = 'vllm'", "rollout.backend.python"]),
        ("rollout.backend", "sglang:http://h:1", ["kind = 'sglang'", "rollout.backend.url"]),
        ("sync", "int8", ["sync.kind = 'int8'"]),
        ("sync.mode", "int8", ["sync.mode", "sync.kind = 'int8'"]),
        ("engine.preemption", "swap", ["engine.preemption.kind = 'swap'"]),
        ("rollout.vllm.sleep", "true", ["rollout.backend.kind"]),
    ],
)
def test_a_kind_written_as_the_section_itself_is_refused_with_the_right_spelling(
    flag: str, value: str, words: list[str]
) -> None:
    message = refusal("run.seed = 1", f"--{flag}", value)
    assert all(word in message for word in [*words, f"(--{flag.removesuffix('.sleep')})"]), message


def test_a_kind_given_as_a_flag_replaces_the_kind_of_the_file() -> None:
    """Fields that the new kind has are kept. The others are dropped: no flag could unset them."""
    assert parse_recipe(COPY, "x", ["--sync.kind=int8"]).sync == CopySyncConfig(
        kind="int8", every=4
    )
    assert parse_recipe(COPY, "x", ["--sync.kind=shared"]).sync == SharedSyncConfig()
    assert parse_recipe(COPY, "x", ["--sync.kind=copy", "--sync.every=2"]).sync.every == 2
    assert "x.toml, line 3" in refusal('[sync]\nkind = "shared"\nevery = 4')


@pytest.mark.parametrize("kind", ["shared", "copy"])
def test_fields_that_the_files_own_kind_lacks_are_refused_with_any_flag(kind: str) -> None:
    text = '[sync]\nkind = "shared"\nevery = 4'
    if kind == "shared":
        assert "sync.every belongs to" in refusal(text, f"--sync.kind={kind}")
        assert "sync.every belongs to" in refusal("[sync]\nevery = 4", f"--sync.kind={kind}")
    else:
        assert parse_recipe(text, "x", [f"--sync.kind={kind}"]).sync.every == 4


def test_values_of_a_field_are_checked_with_its_own_key() -> None:
    assert refusal('sync = {kind = "fp8", every = 0}') == (
        "sync.every: expected an integer >= 1, got 0 (x.toml, line 1)"
    )
    ngram = "--engine.speculation.kind=ngram"
    assert "engine.speculation.shortest = 9" in refusal(
        "run.seed = 1", ngram, "--engine.speculation.shortest=9"
    )
    assert "engine.speculation.path" in refusal("run.seed = 1", "--engine.speculation.kind=draft")


def test_dumped_settings_are_those_of_the_kind_and_load_back() -> None:
    recipe = parse_recipe(COPY, "x", ["--engine.preemption.kind=swap"])
    text = dump_recipe(recipe)
    assert '[sync]\nkind = "copy"\nevery = 4' in text and "host_tokens = 0" in text
    assert "[rollout.backend]" in text and "tensor_parallel" not in text
    assert parse_recipe(text, "x") == recipe
    assert "sync.every" in flat(recipe) and "sync.every" not in flat(Recipe())


def test_explain_lists_the_kind_and_the_fields_that_differ_from_their_defaults() -> None:
    recipe = parse_recipe(COPY, "x", ["--engine.preemption.kind=swap"])
    assert asked_settings(recipe) == [
        ("engine.preemption.kind", '"swap"', '"none"'),
        ("sync.kind", '"copy"', '"shared"'),
        ("sync.every", "4", "1"),
    ]


def test_python_settings_name_the_kind_by_its_dotted_key() -> None:
    recipe = parse_recipe("run.seed = 1", "x", setting_flags({"sync.kind": "copy"}))
    assert recipe.sync.kind == "copy"
    with pytest.raises(UserError, match=r"'sync\.kind'"):
        setting_flags({"sync": {"kind": "copy"}})
    with pytest.raises(UserError, match=r"settings\['sync\.every'\]"), python_words():
        parse_recipe("run.seed = 1", "x", setting_flags({"sync.every": 2}))


def test_resume_compares_kinds_and_fields() -> None:
    plain, swap = Recipe(), parse_recipe("engine.preemption.kind = 'swap'", "x")
    small = parse_recipe("engine.preemption = {kind = 'swap', host_tokens = 64}", "x")
    assert allowed_changes(settings_of(plain), swap, warming_up=False) == [
        'engine.preemption.kind "none" -> "swap"'
    ]
    assert allowed_changes(settings_of(plain), small, warming_up=False) == [
        'engine.preemption.kind "none" -> "swap"',
        "engine.preemption.host_tokens 0 -> 64",
    ]
    assert allowed_changes(settings_of(small), plain, warming_up=False) == [
        'engine.preemption.kind "swap" -> "none"'
    ]
    with pytest.raises(UserError, match=r"sync\.kind cannot change"):
        allowed_changes(settings_of(plain), parse_recipe(COPY, "x"), warming_up=False)


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        ('[run]\nname = "r"\nseed = 3', ["--run.seed.x=5"], ["run.seed", "expected an integer"]),
        ('run.name = "r"', ["--sync.kind.x=2"], ["sync.kind", "expected one of"]),
        (
            'run.name = "r"',
            ["--run.seed=3", "--run.seed.x=4"],
            ["run.seed", "expected an integer", "--run.seed.x"],
        ),
        (
            'run.name = "r"\n[[data.sources]]\nsource = "arithmetic"',
            ["--data.sources.weight=2"],
            ["data.sources", "expected a list"],
        ),
    ],
)
def test_a_setting_written_as_a_section_is_refused(
    text: str, flags: list[str], words: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        parse_recipe(text, "r.toml", flags)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("section", ["sync", "rollout.backend", "engine.preemption"])
def test_an_empty_section_with_a_kind_has_the_default_kind(section: str) -> None:
    assert parse_recipe(f'run.name = "r"\n[{section}]\n', "r.toml", []) == parse_recipe(
        'run.name = "r"', "r.toml", []
    )
