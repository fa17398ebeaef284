"""Answers by test-time search: the field `search` of a request, or `best_of` with a reward model.

The policy samples in the server's engine, beside all other requests. One reward model, which
`sixfold serve --scorer` loads, scores for all searches.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

from sixfold.errors import UserError
from sixfold.renderer.renderer import Renderer
from sixfold.reward_model.step_scorer import ProcessScorer
from sixfold.rollout.engine_generator import EngineGenerator
from sixfold.rollout.engine_job import Delta, Job
from sixfold.rollout.engine_thread import EngineThread
from sixfold.steps import check_steps, own_ends_of
from sixfold.types import Task
from sixfold_search import Settings, Stepping, search
from sixfold_search.methods import METHODS, Method
from sixfold_search.scorers import OutcomeScorer
from sixfold_search.shared_scorer import SharedScorer
from sixfold_search.task_search import Found

from .api_error import bad_request
from .requests import MAX_TOKENS, Ask, SearchForm


class Searches:
    """Searches in the engine of a server.

    Args:
        engine: the engine's thread.
        renderer: encodes and decodes, for searches only.
        scorer: the reward model, or None.
    """

    def __init__(
        self,
        engine: EngineThread,
        renderer: Renderer,
        scorer: OutcomeScorer | ProcessScorer | None,
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._scorer = scorer
        self._scoring = ThreadPoolExecutor(1, "search-scores")

    def asked(self, ask: Ask) -> SearchForm | None:
        """The search of a request, or None. With a reward model, `best_of` is a search too.

        Raises:
            ApiError: a field does not go with it, or it needs a reward model and there is none.
        """
        form = ask.search
        if form is None and self._scorer and ask.best_of and ask.best_of > 1:
            form = SearchForm(method="best_of_n", n=ask.best_of)
        if form is not None:
            self._check(form, "best_of" if ask.search is None else "search", ask)
        return form

    async def found(self, form: SearchForm, task: Task, job: Job) -> Found:
        """Search for one answer.

        Args:
            form: how.
            task: the prompt as the reward model reads it.
            job: the prompt's tokens, sampling parameters, stop strings and adapter.

        Raises:
            ApiError: the settings do not fit each other.
            QueueFull: too many prompts are waiting.
            GeneratorClosed: the server is stopping, or the engine has failed.
        """
        if len(job.prompts) > 1:
            raise bad_request(f"prompt: {len(job.prompts)} prompts, but a search has one", "prompt")
        if job.record:
            raise bad_request(
                "search: this server records what the policy samples (--record), and a search"
                " chooses among it. Remove search, or start a server without a record",
                "search",
            )
        (prompt,) = job.prompts
        if form.budget is not None and form.budget <= len(prompt):
            raise bad_request(
                f"search.budget = {form.budget}: the prompt alone has {len(prompt)} tokens, which"
                " count. Raise it",
                "search.budget",
            )
        row, longest = METHODS.get(form.method), job.params.max_tokens
        at_once = row is not None and "n" in row.reads and "expand" not in row.reads
        if at_once and (count := form.n or Settings.n) * longest > MAX_TOKENS:
            raise bad_request(
                f"search.n = {count} completions of {longest} tokens exceed {MAX_TOKENS} tokens."
                " Lower it or max_tokens",
                "search.n",
            )
        steps = form.steps
        if isinstance(self._scorer, ProcessScorer):
            steps = steps or self._scorer.ends
        span = {"name": steps, "tokens": form.step_tokens}
        given = {one.name: getattr(form, one.name) for one in fields(Settings)}
        try:
            return await search(
                EngineGenerator(
                    self._engine.engine, self._renderer, thread=self._engine, adapter=job.adapter
                ),
                self._renderer,
                task,
                method=form.method,
                params=job.params,
                settings=Settings(**_set(given)),
                stepping=Stepping(**_set(span)),
                scorer=SharedScorer(self._scorer, self._scoring) if self._scorer else None,
                by_step=self._by_step,
                aggregate=form.aggregate or "min",
                stops=job.stops,
                budget=form.budget,
                prompt=prompt,
            )
        except UserError as error:
            raise bad_request(f"search: {error}", "search") from error

    @property
    def _by_step(self) -> bool:
        return isinstance(self._scorer, ProcessScorer)

    def _check(self, form: SearchForm, field: str, ask: Ask) -> None:
        """Refuse what a search cannot do.

        Args:
            form: the search.
            field: the field of the request that asks for it.
            ask: the request.
        """
        wrong = {
            "n": ask.n > 1,
            "stream": ask.stream,
            "noise": ask.named_noise is not None,
            "echo": ask.scores_prompt,
            "top_logprobs": ask.alternatives > 0,
            "priority": ask.priority != 0,
            "presence_penalty": ask.presence_penalty != 0,
            "frequency_penalty": ask.frequency_penalty != 0,
            "repetition_penalty": ask.repetition_penalty != 1,
            "response_format": not ask.form().is_free,
        }
        if name := next((name for name, is_set in wrong.items() if is_set), None):
            raise bad_request(f"{name} does not go with {field}. Remove one of them", name)
        if row := METHODS.get(form.method):
            self._check_method(form, row)
        if form.steps is not None:
            if own_ends_of(form.steps):
                raise bad_request(
                    "search.steps: a request cannot name a function. Use newline, blank_line,"
                    " sentence, token:TEXT, xml:TAG or every:N",
                    "search.steps",
                )
            try:
                check_steps(form.steps)
            except UserError as error:
                raise bad_request(f"search.steps: {error}", "search.steps") from error

    def _check_method(self, form: SearchForm, row: Method) -> None:
        """Refuse a method that cannot run here, and settings that it does not read."""
        if row.scores != "nothing" and self._scorer is None:
            raise bad_request(
                f"search.method: {form.method} needs a reward model, and the server has none. Start"
                " it with --scorer, or use majority",
                "search.method",
            )
        read = {"method", "budget", *row.reads}
        by_step = self._by_step and row.scores != "nothing"
        if by_step or "expand" in row.reads:
            read |= {"steps", "step_tokens"}
        if by_step:
            read |= {"aggregate"}
        if unread := sorted(form.model_dump(exclude_none=True).keys() - read):
            raise bad_request(
                f"search.{unread[0]} has no effect on {form.method} here. Remove it",
                f"search.{unread[0]}",
            )


def delta_of(found: Found) -> Delta:
    """The chosen completion as a choice of an answer."""
    best = found.best
    start = best.prompt_length
    return Delta(
        0,
        best.text,
        best.tokens[start:],
        best.logp[start:],
        best.version[start:],
        finish_reason=best.finish_reason,
    )


def facts_of(found: Found, method: str, prompt: int) -> dict[str, Any]:
    """Fields of an answer that say how it was found, and the tokens of all completions.

    Args:
        found: what the search has found.
        method: its method.
        prompt: number of tokens of the prompt.
    """
    cost = found.cost
    return {
        "search": {
            "method": method,
            "value": found.value,
            "completions": len(found.candidates),
            "refused_by_scorer": found.refused,
            "recomputed": found.evicted,
        },
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": cost.sampled,
            "total_tokens": prompt + cost.sampled,
            "prefilled_tokens": cost.prefilled,
            "scorer_tokens": cost.scored,
        },
    }


def _set(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}
