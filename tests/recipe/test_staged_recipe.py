"""`[[stages]]`: how stages resolve, and what is refused when a recipe is read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sixfold.errors import UserError
from sixfold.recipe.dump import flat
from sixfold.recipe.explain import explain
from sixfold.recipe.find import shipped_recipes
from sixfold.recipe.plan import make_plan
from sixfold.recipe.read_stages import unread
from sixfold.recipe.stages import StagedRecipe
from sixfold.recipe.toml import load_recipe, load_staged, parse_recipe, parse_staged

TEXT = """\
[run]
name = "p"
steps = 7

[model.scratch]
hidden_size = 32
head_dim = 8

[trainer]
learning_rate = 1e-5

[[stages]]
kind = "sft"
name = "direct"
sft.steps = 10

[[stages]]
kind = "sft"
name = "worked"
model = "stage:direct"
[stages.sft]
steps = 20
learning_rate = 1e-4
[stages.data.arithmetic]
terms = 3

[[stages]]
kind = "rl"
reference.path = "stage:direct"
"""


def staged(text: str = TEXT, *flags: str) -> StagedRecipe:
    return parse_staged(text, "p.toml", flags)


def refused(text: str, *flags: str) -> str:
    with pytest.raises(UserError) as error:
        staged(text, *flags)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_stage_is_the_recipe_with_its_own_settings() -> None:
    direct, worked, rl = staged().stages
    assert [(s.kind, s.name) for s in (direct, worked, rl)] == [
        ("sft", "direct"),
        ("sft", "worked"),
        ("rl", "rl"),
    ]
    base = flat(staged().base)
    changed = {key: v for key, v in flat(worked.recipe).items() if v != base[key]}
    assert changed == {
        "model.path": "stage:direct",
        "run.steps": 20,  # the number of steps of every kind; SFT before RL is a stage of its own
        "sft.learning_rate": 1e-4,
        "data.arithmetic.terms": 3,
    }
    assert direct.recipe.run.steps == 10 and rl.recipe.run.steps == 7
    assert all(stage.recipe.sft.steps == 0 for stage in (direct, worked, rl))


def test_a_stage_goes_on_with_the_newest_model_unless_it_names_one() -> None:
    direct, worked, rl = staged().stages
    assert direct.inputs == []
    assert worked.inputs == [("model.path", "direct")]
    assert rl.inputs == [("model.path", "worked"), ("reference.path", "direct")]
    anew = staged(TEXT + 'model.path = ""\n').stages[2]
    assert anew.inputs == [("reference.path", "direct")]


def test_bound_recipes_have_paths_in_place_of_names() -> None:
    rl = staged().stages[2].bound({"worked": "/w", "direct": "/d"})
    assert (rl.model.path, rl.reference.path) == ("/w", "/d")


def test_a_recipe_is_written_and_read_again() -> None:
    once = staged(TEXT, "--run.seed", "4", "--stages.worked.sft.steps", "21")
    assert staged(once.dump()) == once
    assert once.stages[1].recipe.run.steps == 21 and once.stages[0].recipe.run.seed == 4


def test_a_flag_reaches_every_stage_or_one() -> None:
    direct, worked, rl = staged(
        TEXT, "--trainer.grad_clip=0.5", "--stages.rl.trainer.learning_rate", "3e-6"
    ).stages
    assert {s.recipe.trainer.grad_clip for s in (direct, worked, rl)} == {0.5}
    assert (direct.recipe.trainer.learning_rate, rl.recipe.trainer.learning_rate) == (1e-5, 3e-6)


def test_one_stage_stands_for_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.toml").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("p.toml:rl")
    assert recipe.model.path == "" and recipe.model.scratch.hidden_size == 32
    with pytest.raises(UserError, match=r"stages direct, worked, rl: name one .* p\.toml:rl"):
        load_recipe("p.toml")
    with pytest.raises(UserError, match=r"no stage 'workd'\. Did you mean 'worked'\?"):
        load_recipe("p.toml:workd")
    (tmp_path / "plain.toml").write_text('run.name = "x"')
    with pytest.raises(
        UserError, match=r"plain\.toml has no stage 'rl'\. It has no \[\[stages\]\]"
    ):
        load_recipe("plain.toml:rl")
    with pytest.raises(UserError, match="stages"):
        parse_recipe(TEXT, "p.toml")


def test_epochs_take_the_place_of_the_steps_of_an_sft_stage_alone() -> None:
    text = TEXT.replace("sft.steps = 10", "sft.steps = 0").replace(
        "[trainer]", "[sft]\nepochs = 3\n[trainer]"
    )
    direct, worked, rl = staged(text, "--stages.worked.sft.epochs", "0").stages
    found = [
        (s.recipe.run.steps, s.recipe.sft.steps, s.recipe.sft.epochs) for s in (direct, worked, rl)
    ]
    assert found == [(0, 0, 3), (20, 0, 0), (7, 0, 0)]
    assert "after 3 passes over the examples" in explain(make_plan(direct.recipe))


HEAD = 'run.name = "p"\n'
SFT = '[[stages]]\nkind = "sft"\nsft.steps = 3\n'

REFUSED = {
    "no kind": (HEAD + "[[stages]]\n", "entry 1 has no kind. Kinds are .* line 2"),
    "unknown kind": (HEAD + '[[stages]]\nkind = "stf"', "'stf'. Did you mean 'sft'.* line 3"),
    "kind is a number": (HEAD + "[[stages]]\nkind = 3", "unknown kind 3"),
    "kind is a list": (HEAD + '[[stages]]\nkind = ["sft"]', "unknown kind"),
    "stages is text": (HEAD + 'stages = "sft"', r"expected tables \[\[stages\]\]"),
    "stages is a table": (HEAD + '[stages]\nkind = "sft"', r"expected tables \[\[stages\]\]"),
    "stages is empty": (HEAD + "stages = []", r"expected tables \[\[stages\]\]"),
    "two of one name": (HEAD + SFT + SFT, "two stages have the name 'sft'.* line 5"),
    "bad name": (HEAD + SFT + 'name = "a/b"', "name = 'a/b'; expected letters"),
    "empty name": (HEAD + SFT + 'name = ""', "name = ''; expected letters"),
    "steps and epochs": (
        HEAD + SFT + "sft.epochs = 2",
        "sft.steps = 3 and sft.epochs = 2 both say .* Set one of them to 0",
    ),
    "neither steps nor epochs": (
        HEAD + '[[stages]]\nkind = "sft"',
        "sft.steps is 0, so .* e.g. sft.steps = 100 or sft.epochs = 2",
    ),
    "misspelt setting": (HEAD + SFT + "trainer.lr = 1", "trainer.learning_rate.* line 5"),
    "misspelt section": (HEAD + SFT + "trainr.learning_rate = 1.0", "unknown key 'trainr"),
    "wrong value": (
        HEAD + SFT + "trainer.grad_clip = -1.0",
        "trainer.grad_clip: expected .* got -1.0 .p.toml, line 5",
    ),
    "a rate of RL": (
        HEAD + SFT + "trainer.learning_rate = 1.0",
        "trainer.learning_rate has no effect.* Set sft.learning_rate",
    ),
    "no steps": (HEAD + '[[stages]]\nkind = "sft"', "stage 'sft': sft.steps is 0"),
    "end that a stage has not": (
        HEAD + SFT + "sft.stop_at_accuracy = 0.5",
        "stage 'sft': sft.stop_at_accuracy .* Set run.target_accuracy in the stage",
    ),
    "steps of another kind": (
        HEAD + SFT + "run.steps = 3",
        "counts the steps of RL. Set sft.steps",
    ),
    "section of another kind": (
        HEAD + SFT + '[[stages]]\nkind = "rl"\nsft.steps = 4',
        "stage 'rl': sft.steps belongs to stages of kind sft, and this one is of kind rl",
    ),
    "its own name for the run": (HEAD + SFT + 'run.name = "q"', "run.name belongs to the whole"),
    "its own folder": (HEAD + SFT + 'run.dir = "q"', "run.dir belongs to the whole"),
    "stage within a stage": (HEAD + SFT + "stages = []", "unknown key 'stages'"),
    "later stage": (
        HEAD + SFT + 'model = "stage:rl"\n[[stages]]\nkind = "rl"',
        "stage 'sft': model.path = 'stage:rl': no earlier stage .* It is the first stage",
    ),
    "itself": (HEAD + SFT + 'model = "stage:sft"', "cannot use its own artifact"),
    "cycle": (
        HEAD + SFT + 'name = "a"\nmodel = "stage:b"\n' + SFT + 'name = "b"\nmodel = "stage:a"',
        "stage 'a': model.path = 'stage:b': no earlier stage",
    ),
    "misspelt stage": (
        HEAD + SFT + '[[stages]]\nkind = "rl"\nmodel = "stage:stf"',
        "no earlier stage has this name. Did you mean 'sft'",
    ),
    "model as data": (
        HEAD + SFT + '[[stages]]\nkind = "rl"\ndata.source = "stage:sft"',
        "that stage makes a model, and this setting takes a dataset",
    ),
    "stage where none fits": (
        HEAD + SFT + '[[stages]]\nkind = "rl"\nlog.project = "stage:sft"',
        "log.project = 'stage:sft': this setting cannot name a stage",
    ),
    "settings that contradict each other in one stage": (
        HEAD + SFT + "environment.weights = [1.0, 2.0]",
        "environment.weights has 2 entries .*stage 'sft'",
    ),
    "range of terms without a sum": (
        HEAD + SFT + "data.arithmetic.min_terms = 3",
        "data.arithmetic.min_terms = 3 must be 2 to data.arithmetic.terms = 2, .*stage 'sft'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_stages_are_refused_when_the_recipe_is_read(case: str) -> None:
    text, said = REFUSED[case]
    assert re.search(said, refused(text)), refused(text)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--stages.stf.sft.steps=3", "no such stage. Did you mean 'sft'"),
        ("--stages=3", "stages"),
        ("--stages.sft.trainer.lr=3", "trainer.learning_rate"),
        ("--sft.steps=4", r"stage 'sft' sets sft.steps itself .* --stages.sft.sft.steps"),
        ("--stages.sft.sft.steps=many", "sft.steps: expected an integer"),
    ],
)
def test_wrong_flags_for_stages_are_refused(flag: str, said: str) -> None:
    assert re.search(said, refused(HEAD + SFT, flag)), refused(HEAD + SFT, flag)


def test_flags_of_a_stage_need_stages() -> None:
    assert "stages" in refused(HEAD, "--stages.sft.sft.steps=3")


EVALUATED = """\
run.name = "p"
data.source = "SOURCE"

[[stages]]
kind = "pretrain"
pretrain.steps = 1

[[stages]]
kind = "sft"
name = "chat"
sft.steps = 1
data.source = "chat.jsonl"
"""
SAMPLED = """\
[[stages]]
kind = "sample"
data.source = "sums.jsonl"

[[stages]]
kind = "sft"
name = "again"
sft.steps = 1
data.source = "stage:sample"
"""


def test_other_rows_are_evaluated_on_the_tasks_of_the_recipe_if_it_has_some() -> None:
    texts = staged(EVALUATED.replace("SOURCE", "corpus.txt"))
    assert [texts.evaluated_on(stage) for stage in texts.stages] == [None, None]
    with pytest.raises(UserError, match=r"p.toml, stage 'chat': neither .* sixfold eval RECIPE"):
        texts.evaluation("chat", "p.toml", {})
    tasks = staged(EVALUATED.replace("SOURCE", "sums.jsonl") + SAMPLED)
    found = {stage.name: tasks.evaluated_on(stage) for stage in tasks.stages}
    assert found["chat"] == found["again"] == found["sample"] == tasks.base.data
    assert found["pretrain"] is None  # it trains on those rows as texts
    recipe = tasks.evaluation("again", "p.toml", {})
    assert recipe.data == tasks.base.data and recipe.data.trace_field == ""
    own = staged(EVALUATED.replace("SOURCE", "sums.jsonl") + SAMPLED + "data.heldout = 3\n")
    data = own.evaluated_on(own.stages[-1])
    assert data and (data.source, data.heldout) == ("stage:sample", 3)


UNREAD = """\
[run]
patience = 2
[trainer]
learning_rate = 1e-3
[rollout]
samples_per_prompt = 3
[comparisons]
pairs = "extremes"
"""
LAST = {
    kind: f'[[stages]]\nkind = "{kind}"\n{kind}.steps = 2\ndata.source = "a"\n'
    for kind in ("preference", "reward_model")
} | {kind: f'[[stages]]\nkind = "{kind}"\n' for kind in ("rl", "sample")}


@pytest.mark.parametrize(
    ("kinds", "settings"),
    [
        (["preference"], ["trainer.learning_rate", "algorithm.beta"]),
        (["reward_model"], ["run.patience", "trainer.learning_rate", "algorithm.beta"]),
        (["preference", "reward_model"], ["trainer.learning_rate", "algorithm.beta"]),
        (["reward_model", "rl"], []),
        (["sample", "preference"], ["trainer.learning_rate", "algorithm.beta"]),
        (["sample", "reward_model"], ["run.patience", "trainer.learning_rate", "algorithm.beta"]),
    ],
)
def test_settings_that_no_stage_reads_are_named(kinds: list[str], settings: list[str]) -> None:
    whole = parse_staged(
        UNREAD + "".join(LAST[kind] for kind in kinds), "p.toml", ["--algorithm.beta", "0.1"]
    )
    notes = unread(whole)
    assert sorted(note.split()[3].rstrip(":") for note in notes) == sorted(settings)
    if settings:
        own = f"Set {kinds[-1]}.learning_rate"
        assert any(note.endswith(own) for note in notes)


def test_the_shipped_recipes_set_nothing_that_no_stage_reads() -> None:
    assert not any(unread(load_staged(name)) for name in shipped_recipes())


DISTILLED = """\
[model]
path = "student"
revision = "abc"
[model.lora]
rank = 4

[[stages]]
kind = "distill"
name = "small"
teacher = "big"
data.arithmetic.terms = 3
rollout.temperature = 0.5
sample.samples = 6
sft.steps = 9
"""


def test_distillation_samples_the_teacher_and_trains_the_student_on_what_is_kept() -> None:
    answers, small = staged(DISTILLED).stages
    assert [(s.kind, s.name) for s in (answers, small)] == [
        ("sample", "small-answers"),
        ("sft", "small"),
    ]
    assert (answers.recipe.model.path, answers.recipe.model.revision) == ("big", "")
    assert (small.recipe.model.path, small.recipe.model.revision) == ("student", "abc")
    assert answers.recipe.sample.samples == 6 and answers.recipe.data.arithmetic.terms == 3
    assert answers.recipe.rollout.temperature == small.recipe.rollout.temperature == 0.5
    assert small.inputs == [("data.source", "small-answers")] and small.recipe.run.steps == 9
    assert staged(staged(DISTILLED).dump()) == staged(DISTILLED)


def test_the_teacher_has_a_model_section_of_its_own() -> None:
    """Nothing of the student's reaches it, and what fits holds for both."""
    answers, small = staged(
        DISTILLED.replace(
            'teacher = "big"',
            'teacher.path = "big"\nteacher.revision = "v2"\ndata.overlong = "drop"',
        ),
        "--model.chat_template=none",
    ).stages
    assert answers.recipe.model.revision == "v2" and answers.recipe.model.lora.rank == 0
    assert answers.recipe.model.chat_template == "auto" != small.recipe.model.chat_template
    assert {s.recipe.data.overlong for s in (answers, small)} == {"drop"}
    wrong = DISTILLED.replace('teacher = "big"', 'teacher.pathh = "big"')
    assert "model.path" in refused(wrong) and "line 10" in refused(wrong)


def test_a_flag_of_all_stages_says_what_happens_to_long_rows_of_a_sampled_dataset() -> None:
    assert {
        stage.recipe.data.overlong for stage in staged(DISTILLED, "--data.overlong", "drop").stages
    } == {"drop"}


@pytest.mark.parametrize(
    ("sources", "form"),
    [
        ('[{source = "g.jsonl", prefill = "<think>"}]', "continued"),
        ('[{source = "g.jsonl", prompt_form = "rendered"}]', "rendered"),
        ('[{source = "g.jsonl"}, {source = "h.jsonl", prefill = ""}]', "messages"),
    ],
)
def test_a_sampled_dataset_has_the_form_of_its_sources(sources: str, form: str) -> None:
    text = f"""
[[stages]]
kind = "sample"
data.sources = {sources}
[[stages]]
kind = "sft"
data.source = "stage:sample"
sft.steps = 1
"""
    assert staged(text).stages[1].recipe.data.prompt_form == form
    mixed = text.replace("}]", '}, {source = "i.jsonl", prefill = "Yes"}]')
    if form != "continued":
        assert "have several forms (continued, " in refused(mixed)


def test_held_out_tasks_are_those_of_the_recipe_for_a_mixture_with_sampled_rows() -> None:
    text = """
[data]
source = "gsm.jsonl"
[[stages]]
kind = "sample"
[[stages]]
kind = "sft"
data.sources = [{source = "gsm.jsonl"}, {source = "stage:sample", trace_field = "completion"}]
data.trace_field = "solution"
sft.steps = 1
"""
    recipe = staged(text)
    assert recipe.evaluated_on(recipe.stages[1]) == recipe.base.data


def test_a_stage_with_a_source_of_its_own_has_nothing_of_the_recipes_source() -> None:
    text = """
[data]
source = "openai/gsm8k"
subset = "main"
heldout_split = "test"
[[stages]]
kind = "sft"
data.source = "chats.jsonl"
sft.steps = 1
[[stages]]
kind = "rl"
data.sources = [{source = "a.jsonl"}, {source = "b.jsonl"}]
"""
    chats, mixed = (stage.recipe.data for stage in staged(text).stages)
    assert (chats.subset, chats.heldout_split) == ("", "")
    assert mixed.names == ["a.jsonl", "b.jsonl"]
    given = staged(
        text.replace('"chats.jsonl"', '"chats.jsonl"\ndata.heldout_split = "more.jsonl"')
    )
    assert given.stages[0].recipe.data.heldout_split == "more.jsonl"


def test_the_default_data_is_evaluated_on_if_a_stage_reads_it() -> None:
    text = """
[[stages]]
kind = "sample"
[[stages]]
kind = "sft"
data.source = "stage:sample"
sft.steps = 1
"""
    recipe = staged(text)
    assert recipe.evaluated_on(recipe.stages[1]) == recipe.base.data
    own = staged(text.replace('kind = "sample"', 'kind = "sample"\ndata.source = "own.jsonl"'))
    assert own.evaluated_on(own.stages[1]) is None


def test_a_stage_has_no_seed_of_its_own_and_trains_on_all_tokens_of_conversations_alone() -> None:
    assert "run.seed belongs to the whole run" in refused(TEXT + "run.seed = 3\n")
    text = '[[stages]]\nkind = "sft"\nsft.steps = 1\nsft.train_on = "all"\n'
    assert "is for conversations" in refused(text)
    assert staged(text + 'data.source = "chats.jsonl"\n')


def test_a_flag_reaches_the_part_of_a_distillation_that_has_it() -> None:
    answers, small = staged(
        DISTILLED, "--stages.small.sample.samples=3", "--stages.small.sft.steps=2"
    ).stages
    assert answers.recipe.sample.samples == 3 and small.recipe.run.steps == 2


def test_a_distillation_that_cannot_be_is_refused() -> None:
    without = DISTILLED.replace('teacher = "big"\n', "")
    assert "p.toml, line 7, stage 'small' has no teacher: name the model" in refused(without)
    assert "teacher = 3: expected a folder, a hub id, 'stage:NAME', or a table" in refused(
        DISTILLED.replace('"big"', "3")
    )
    assert "no earlier stage has this name" in refused(DISTILLED.replace("big", "stage:bag"))
    assert "'small-answers' is the name of another stage, and of a part of 'small'" in refused(
        DISTILLED + '[[stages]]\nkind = "sft"\nname = "small-answers"\nsft.steps = 1\n'
    )
    assert "unknown key 'teacher'" in refused(DISTILLED.replace("distill", "sft"))


@pytest.mark.parametrize("flag", ["--data.split=test", "--data.revision=abc", "--model.revision=v"])
def test_a_flag_about_the_recipes_source_is_of_no_other_source(flag: str) -> None:
    """Then a resume, which reads the written recipe, has the settings of the first start."""
    text = """
data.source = "a/b"
model.path = "m"
[[stages]]
kind = "sft"
data.source = "c/d"
model.path = "n"
sft.steps = 1
"""
    once = staged(text, flag)
    assert once.stages[0].recipe.data.split == "train" and once.stages[0].recipe.data.revision == ""
    assert once.stages[0].recipe.model.revision == "" and staged(once.dump()) == once


def test_a_flag_names_another_teacher() -> None:
    other = staged(DISTILLED, "--stages.small.teacher=other")
    assert other.stages[0].recipe.model.path == "other" and staged(other.dump()) == other


def test_a_sampled_dataset_among_sources_is_read_as_it_was_written() -> None:
    text = """
data.source = "g.jsonl"
data.prompt_suffix = " Think."
[[stages]]
kind = "sample"
[[stages]]
kind = "sft"
data.sources = [{source = "stage:sample", weight = 2}, {source = "o.jsonl"}]
data.trace_field = "solution"
sft.steps = 1
"""
    once = staged(text)
    sampled, other = once.stages[1].recipe.data.sources
    assert (sampled.prompt_suffix, sampled.trace_field, sampled.weight) == ("", "completion", 2)
    assert (other.prompt_suffix, other.trace_field) == (None, None)
    assert staged(once.dump()) == once
