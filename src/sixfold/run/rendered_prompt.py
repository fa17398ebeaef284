"""Show the first prompt with its special tokens, and the tokens and strings that end a completion.

It is printed at the start of a run and by `sixfold explain --render`. It reveals a wrong chat
template before training.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..data.sources import load_tasks
from ..model.loading import load_tokenizer
from ..model.stop_tokens import model_turn_end, recipe_turn_end
from ..recipe.schema import Recipe
from ..renderer.renderer import Renderer
from ..renderer.task_prompt import PLAIN_TEXT
from ..types import Task
from .recipe_environment import task_rewards

SHOWN_CHARACTERS = 1200


def rendering(
    renderer: Renderer,
    tasks: Sequence[Task],
    stop_tokens: Sequence[int],
    stop_strings: Sequence[str],
) -> list[str]:
    """Describe the first task's prompt and the ends of a completion.

    Args:
        renderer: encodes prompts.
        tasks: tasks of the run.
        stop_tokens: tokens that end a completion.
        stop_strings: strings that end a completion.

    Returns:
        Lines for the user. Empty without tasks.
    """
    if not tasks:
        return []
    ids = renderer.encode(tasks[0])
    lines = [
        f"first prompt as the model reads it ({len(ids)} tokens, task"
        f" {tasks[0].id}):\n{_middle_out(renderer.shown(ids))}"
    ]
    if not renderer.has_template:
        lines.append(PLAIN_TEXT)
    if tasks[0].prefill:
        lines.append(
            f"every reply begins with {tasks[0].prefill!r}, which is not trained on: rewards get"
            f" {renderer.opened(ids) or tasks[0].prefill!r} before the completion"
        )
    elif opened := renderer.opened(ids):
        lines.append(
            f"the prompt opens a think block ({opened.strip()}): rewards get this tag before the"
            " completion"
        )
    ends = [renderer.piece(token) for token in stop_tokens] + [repr(text) for text in stop_strings]
    if ends:
        lines.append(f"a completion ends at {', '.join(ends)}, or after rollout.max_new_tokens")
    else:
        lines.append(
            "the model's configuration names no end token, so every completion has"
            " rollout.max_new_tokens tokens: set rollout.stop_tokens or rollout.stop"
        )
    return lines


def render_recipe(recipe: Recipe) -> list[str]:
    """Lines of `rendering` for a recipe. Loads the tokenizer and the tasks, but not the model.

    Raises:
        UserError: if the tokenizer or the tasks cannot be loaded, or the template refuses the first
            prompt.
    """
    tokenizer, settings = load_tokenizer(recipe.model)
    ends = recipe_turn_end(
        model_turn_end(settings, tokenizer),
        tokenizer,
        recipe.rollout.stop_tokens,
        recipe.rollout.stop,
    )
    rewards = task_rewards(recipe.environment, recipe.eval.strict)
    tasks = load_tasks(recipe.data, seed=recipe.run.seed, rewards=rewards)
    return rendering(Renderer(tokenizer, ends.tokens), tasks.train, ends.tokens, ends.strings)


def _middle_out(text: str) -> str:
    """Shorten a long text in the middle: the end of a prompt matters as much as its start."""
    half = SHOWN_CHARACTERS // 2
    return (
        text
        if len(text) <= SHOWN_CHARACTERS
        else f"{text[:half]} ... ({len(text) - 2 * half} characters) ... {text[-half:]}"
    )
