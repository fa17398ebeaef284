"""Search for the solution of one task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sixfold.errors import UserError, nearest
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.generator import Generator
from sixfold.step_scorer import StepScorer
from sixfold.types import SamplingParams, Task, Trajectory

from .aggregate import AGGREGATES
from .methods import METHODS
from .settings import Settings
from .steps import Stepping
from .tree import Cost, Tree


@dataclass(frozen=True)
class Found:
    """Result of a search.

    Attributes:
        best: the chosen completion.
        value: its value. None if the method scores nothing.
        candidates: all completions among which the method chose, as episodes of one turn.
        cost: model tokens of the search.
        refused: number of texts that the scorer refused. They have the score 0.
        evicted: True if the engine's KV cache had no room for all prefixes, so that some were
            computed again.
    """

    best: Trajectory
    value: float | None
    candidates: tuple[Trajectory, ...]
    cost: Cost
    refused: int = 0
    evicted: bool = False

    @property
    def text(self) -> str:
        """The chosen completion as text."""
        return self.best.text

    def chose(self, candidate: Trajectory) -> bool:
        """True if this candidate has the tokens of the chosen completion."""
        return candidate.tokens == self.best.tokens


async def search(
    generator: Generator,
    renderer: Renderer,
    task: Task,
    *,
    method: str,
    params: SamplingParams,
    settings: Settings | None = None,
    stepping: Stepping | None = None,
    scorer: StepScorer | None = None,
    by_step: bool = True,
    aggregate: str = "min",
    stops: Sequence[str] = (),
    budget: int | None = None,
    prompt: Sequence[int] | None = None,
) -> Found:
    """Search for the best completion of a task's prompt.

    The result depends on the weights and the arguments only, as long as the generator's results do.

    Args:
        generator: samples the policy.
        renderer: encodes the prompt and decodes completions.
        task: has the prompt.
        method: name of the method (`METHODS`).
        params: sampling parameters. `max_tokens` bounds a completion, `seed` names the noise.
        settings: settings of the method. None: the defaults.
        stepping: where steps end. None: at newlines.
        scorer: scores completions, or their steps. Needed by methods that score.
        by_step: False if the scorer scores completions as a whole, as outcome reward models do.
        aggregate: makes one value of the scores of steps (`AGGREGATES`).
        stops: strings that end a completion.
        budget: most model tokens: prefilled and sampled by the policy, and computed by the
            scorer's model. None: `settings.n` decides.
        prompt: token ids of the prompt. None: as the renderer encodes the task.

    Raises:
        UserError: for an unknown name, a missing scorer, or settings that do not fit each other.
    """
    row = METHODS.get(method)
    if row is None:
        raise UserError(
            f"unknown method '{method}'.{nearest(method, [*METHODS])} Methods: {', '.join(METHODS)}"
        )
    if aggregate not in AGGREGATES:
        raise UserError(
            f"unknown aggregate '{aggregate}'.{nearest(aggregate, [*AGGREGATES])} Use one of"
            f" {', '.join(AGGREGATES)}"
        )
    if row.scores != "nothing" and scorer is None:
        raise UserError(f"the method {method} needs a scorer")
    if row.scores == "steps" and not by_step:
        raise UserError(
            f"the method {method} needs a score of each step. An outcome reward model scores whole"
            " completions: give a process reward model"
        )
    settings, stepping = settings or Settings(), stepping or Stepping()
    row.check(settings, params.max_tokens)
    row.check_texts(settings, renderer)
    tree = Tree(
        generator,
        renderer,
        task,
        params,
        step=stepping.span,
        steps=stepping.steps(renderer),
        aggregate=AGGREGATES[aggregate],
        scorer=None if row.scores == "nothing" else scorer,
        by_step=by_step,
        stops=stops,
        budget=budget,
        prompt=prompt,
    )
    outcome = await row.run(tree, settings)
    return Found(
        tree.trajectory(outcome.best),
        tree.value(outcome.best) if outcome.best.scores else None,
        tuple(tree.trajectory(one, number) for number, one in enumerate(outcome.candidates)),
        tree.cost,
        tree.refused,
        tree.evicted,
    )
