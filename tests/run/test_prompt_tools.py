"""One count of a prompt, as the model reads it: with the tools of its environment.

Look-alikes: an environment whose functions depend on the task (OpenEnv and verifiers adapters of
users), and TRL's `environment_factory`, a class or a dictionary of classes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sixfold.data.task_set import TaskSet
from sixfold.environment.episode import Observation
from sixfold.environment.tools.worked import worked_call
from sixfold.errors import UserError
from sixfold.recipe.schema import Recipe
from sixfold.recipe.schema.environment import EnvironmentConfig
from sixfold.recipe.toml import load_recipe
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.player import Limits, Player
from sixfold.rollout.prompt_lengths import fitting_tasks
from sixfold.rollout.worked_episode import Script
from sixfold.run.assemble import assemble
from sixfold.run.fingerprint import tasks_fingerprint
from sixfold.run.inputs import inputs_of
from sixfold.run.prompt_tools import give_tools
from sixfold.run.tool_setup import recipe_episode
from sixfold.types import SamplingParams, Task, Trajectory
from tests.models.families import BY_NAME, make_tokenizer, save_family

TRL = '''
class Short:
    def __init__(self):
        self.reward = 1.0

    def reset(self, **columns):
        return None

    def add(self, a: int, b: int) -> int:
        """Adds.

        Args:
            a: one number.
            b: another number.
        """
        return a + b


class Long(Short):
    def explain(self, text: str) -> str:
        """Explains. %s

        Args:
            text: what to explain.
        """
        return text


FACTORIES = {"short": Short, "long": Long}
''' % ("A long description. " * 20)

FILE = '''
from sixfold.environment.tools.episode import ToolEpisode
from sixfold.environment.tools.tool import tool


def add(a: int, b: int) -> int:
    """Adds two numbers. %s"""
    return a + b


class Methods(ToolEpisode):
    @tool
    def add(self, a: int, b: int) -> int:
        """Adds two numbers. %s"""
        return a + b


class Functions(ToolEpisode):
    def __init__(self, task):
        super().__init__(task, functions=[add])


def made(task):
    return ToolEpisode(task, functions=[add])
''' % (("A long description. " * 20,) * 2)  # fmt: skip

CALL = worked_call("add", {"a": 1, "b": 2})
KINDS = (
    *("env.py:Methods", "env.py:Functions", "env.py:made"),
    *("trl:trl_env.py:Long", "trl:trl_env.py:FACTORIES"),
)


@pytest.fixture
def of() -> Renderer:
    tokenizer = make_tokenizer(BY_NAME["qwen2.5-instruct"])
    return Renderer(tokenizer, tokenizer.convert_tokens_to_ids(["<|im_end|>"]))


def equipped(folder: Path, kind: str) -> tuple[EnvironmentConfig, Any]:
    (folder / "env.py").write_text(FILE)
    (folder / "trl_env.py").write_text(TRL)
    library, file, name = ("", *kind.split(":")) if kind.count(":") == 1 else kind.split(":")
    spec = f"{library}{':' if library else ''}{folder / file}:{name}"
    config = EnvironmentConfig(episode=spec)
    return config, recipe_episode(config, None, ExitStack())


def tasks() -> TaskSet:
    made = [
        Task(f"{n}", f"{n}+2?", answer="3", columns={"environment": ("short", "long")[n % 2]})
        for n in range(6)
    ]
    return TaskSet(made[:4], made[4:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_counted_with_the_tools_that_its_episode_shows(
    of: Renderer, tmp_path: Path, kind: str
) -> None:
    config, made = equipped(tmp_path, kind)
    known = tasks()
    bare = [len(of.encode(task)) for task in known.train]
    give_tools(config, made, known, of)
    for task in (*known.train, *known.heldout):
        seen = asyncio.run(made(task).start())
        assert isinstance(seen, Observation) and seen.tools
        assert of.encode(task) == of.encode_messages(list(seen.messages), seen.tools)
    lengths = [len(of.encode(task)) for task in known.train]
    assert all(length > few + 100 for length, few in zip(lengths, bare, strict=True))
    with pytest.raises(UserError, match=rf"has {max(lengths)} tokens, but only {max(bare)} fit"):
        fitting_tasks(of, [known.train[lengths.index(max(lengths))]], max(bare), "error")
    longest = fitting_tasks(of, known.train, max(lengths), "error").longest
    assert longest == max(lengths)


def play(of: Renderer, make: Any, task: Task, limits: Limits, replies: Sequence[str]) -> Trajectory:
    player = Player(Script(of, replies), of, limits, make)
    done = player.play(task, 0, of.encode(task), SamplingParams(limits.tokens))
    return asyncio.run(done).trajectory


@pytest.mark.parametrize("kind", KINDS)
def test_descriptions_of_tools_take_no_tokens_from_an_episode(
    of: Renderer, tmp_path: Path, kind: str
) -> None:
    """`rollout.max_episode_tokens` counts what follows the prompt, and the prompt has the tools."""
    _, made = equipped(tmp_path, kind)
    task = tasks().train[1]
    whole = play(of, made, task, Limits(10_000, 8), (CALL, "3"))
    assert whole.outcome == "ended"
    needed = len(whole.tokens) - whole.prompt_length - whole.turns[-1].stop + whole.turns[-1].start
    for after, outcome in ((needed + 1, "ended"), (needed, "context")):
        cut = play(of, made, task, Limits(10_000, 8, after=after), (CALL, "3"))
        assert cut.outcome == outcome, (after, len(cut.tokens))


def test_a_run_has_room_for_the_prompt_with_tools_and_the_whole_episode(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(FILE)
    recipe = Recipe.model_validate(
        _nested(
            {
                "model.path": str(save_family(BY_NAME["qwen2.5-instruct"], tmp_path / "model")),
                "run.threads": 1,
                "environment.preflight": 0,
                "rollout.max_new_tokens": 12,
                "data.heldout": 0,
                "data.source": str(_rows(tmp_path)),
                "environment.episode": f"{tmp_path / 'env.py'}:Functions",
                "rollout.max_turns": 3,
                "rollout.max_episode_tokens": 90,
            }
        )
    )
    assembly = assemble(recipe)
    try:
        task = assembly.tasks.train[0]
        seen = asyncio.run(assembly.player.make(task).start())  # type: ignore[attr-defined]
        prompt = assembly.renderer.encode_messages(list(seen.messages), seen.tools)
        assert len(prompt) > 400 and assembly.longest == len(prompt) + 90
        assert assembly.player.limits.after == 90  # type: ignore[attr-defined]
        # What the user sees is what the model reads.
        assert any("A long description." in note for note in assembly.tasks.notes)
    finally:
        assembly.close()
    short = recipe.model_copy(
        update={"data": recipe.data.model_copy(update={"max_prompt_tokens": 300})}
    )
    with pytest.raises(UserError, match=r"the prompt has .* tokens, but only 300 fit"):
        assemble(short)


def test_what_a_dataset_s_tools_column_becomes_is_said(of: Renderer) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    both = TaskSet([Task("a", "1?", tools=(tool,)), Task("b", "2?")], [])
    give_tools(EnvironmentConfig(), None, both, of)
    assert both.train[0].tools == (tool,) and "1 prompts show the functions" in both.notes[0]
    silent = Renderer(make_tokenizer(BY_NAME["r1-distill"]))
    other = TaskSet([Task("a", "1?", tools=(tool,), template_args={"x": 1})], [])
    give_tools(EnvironmentConfig(), None, other, silent)
    assert other.train[0].tools == () and "do not show" in other.notes[0]
    agent = TaskSet([Task("a", "1?", tools=(tool,))], [])
    give_tools(EnvironmentConfig(episode="calculator"), None, agent, of)
    assert agent.train[0].tools == () and "tools of its own" in agent.notes[0]


def _rows(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    rows = [{"question": f"{n}+{n}?", "answer": str(2 * n)} for n in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        into = made
        for section in sections:
            into = into.setdefault(section, {})
        into[name] = value
    return made


def test_the_fingerprint_of_prompts_leaves_out_the_tools_of_the_environment() -> None:
    """Their code has one of its own, and runs from before prompts had these tools resume."""
    flags = ["--data.limit", "30", "--data.heldout", "4", "--model.scratch.layers", "1"]
    assembly = assemble(load_recipe("web_shop", flags))
    try:
        found = inputs_of(assembly, None, None).tasks["training"]["tokens"]
        tasks, encode = assembly.tasks.train, assembly.renderer.encode
        plain = tasks_fingerprint([replace(task, tools=()) for task in tasks], encode)
        assert found == plain["tokens"] != tasks_fingerprint(tasks, encode)["tokens"]
    finally:
        assembly.close()
