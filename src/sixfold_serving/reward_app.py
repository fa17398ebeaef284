"""The HTTP application of a reward model.

POST /classify has vLLM's form, POST /get_reward OpenRLHF's, and POST /v1/rewards scores the
completions of a task as a run does that has the reward model itself.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import anyio
import torch
from anyio.to_thread import run_sync
from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from sixfold.errors import UserError
from sixfold.reward_model.asked import Asked
from sixfold.reward_model.reward import rewards_of
from sixfold.reward_model.scorer import Scorer
from sixfold.reward_model.served import EXACT
from sixfold.types import Task

from .api_error import ApiError, bad_request
from .bounds import shortened
from .form import STRICT, check_form
from .gate import Gate
from .hosts import AllowedHosts
from .transport import ERROR_HANDLERS, Bodies


class RewardsForm(BaseModel):
    """Body of POST /v1/rewards: `Asked`."""

    model_config = STRICT
    model: str
    prompt: str | list[dict[str, Any]]
    completions: list[str] = Field(min_length=1)
    completion_ids: list[list[int]]
    prompt_ids: list[int] = Field(min_length=1)
    rendered_prompt: str
    ended: list[bool]


_QUICK = Field(fail_fast=True)
_Ids = Annotated[list[int], _QUICK]


class ClassifyForm(BaseModel):
    """Body of POST /classify: vLLM's, of a text, token ids, lists of them, or a conversation."""

    model_config = STRICT
    model: str = ""
    input: str | Annotated[list[str], _QUICK] | _Ids | Annotated[list[_Ids], _QUICK] | None = None
    messages: list[dict[str, Any]] | None = None
    use_activation: bool = True
    activation: bool = True
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    user: str = ""


class QueryForm(BaseModel):
    """Body of POST /get_reward: OpenRLHF's."""

    model_config = STRICT
    query: list[str] = Field(min_length=1)
    prompts: list[str] | None = None
    labels: list[Any] | None = None


@dataclass(frozen=True)
class ServedReward:
    """The served reward model and the server's settings.

    Attributes:
        scorer: scores completions. One request at a time.
        identity: hash of the model's folder.
        key: the API key, or "" for none.
        hosts: allowed names in the Host header, or None to allow all.
    """

    name: str
    scorer: Scorer
    identity: str
    key: str = ""
    hosts: AllowedHosts | None = None


def make_reward_app(served: ServedReward) -> ASGIApp:
    """Make the ASGI application."""
    endpoints = RewardEndpoints(served)
    app = Starlette(
        routes=[
            Route("/classify", endpoints.classify, methods=["POST"]),
            Route("/get_reward", endpoints.query, methods=["POST"]),
            Route("/v1/rewards", endpoints.rewards, methods=["POST"]),
            Route("/v1/models", endpoints.models),
            Route("/health", endpoints.health),
        ],
        exception_handlers=ERROR_HANDLERS,
    )
    paths = {route.path for route in app.routes if isinstance(route, Route)}
    return Gate(app, paths, served.key, served.hosts, Counter())


class RewardEndpoints:
    """Handlers of the routes."""

    def __init__(self, served: ServedReward) -> None:
        self.served = served
        self._bodies = Bodies()
        self._created = int(time.time())
        self._one = anyio.CapacityLimiter(1)

    async def rewards(self, request: Request) -> Response:
        """POST /v1/rewards."""
        form = check_form(RewardsForm, await self._bodies.json(request))
        self._check_model(form.model)
        asked = Asked(**form.model_dump(exclude={"model"}))
        count = len(asked.completions)
        if (len(asked.completion_ids), len(asked.ended)) != (count, count):
            raise bad_request(
                f"completion_ids and ended need one entry for each of {count} completions",
                "completion_ids",
            )
        if min(map(min, (asked.prompt_ids, *filter(None, asked.completion_ids)))) < 0:
            raise bad_request("token ids are not negative", "completion_ids")
        if not isinstance(asked.prompt, str):
            _check_messages(asked.prompt, "prompt")
        found = await self._scored(partial(rewards_of, self.served.scorer, asked), partly=True)
        return JSONResponse({"object": "list", "model": self.served.name, "rewards": found})

    async def classify(self, request: Request) -> Response:
        """POST /classify. Rewards, or with the activation their sigmoids, as vLLM gives them."""
        form = check_form(ClassifyForm, await self._bodies.json(request))
        self._check_model(form.model or self.served.name)
        if (form.input is None) == (form.messages is None):
            raise bad_request("give either input or messages", "input")
        if form.add_generation_prompt:
            raise bad_request(
                "add_generation_prompt would open another turn after the reply, which is scored",
                "add_generation_prompt",
            )
        if form.messages is not None:
            found = await self._scored(partial(self._conversation, form))
        else:
            found = await self._scored(partial(self._whole, "input", _each(form.input)))
        if form.use_activation and form.activation:
            found = torch.tensor(found, dtype=torch.float64).sigmoid().tolist()
        rows = [
            {"index": index, "label": "LABEL_0", "probs": [value], "num_classes": 1}
            for index, value in enumerate(found)
        ]
        return JSONResponse(
            {
                "id": f"classify-{time.time_ns()}",
                "object": "list",
                "created": int(time.time()),
                "model": self.served.name,
                "data": rows,
            }
        )

    async def query(self, request: Request) -> Response:
        """POST /get_reward. A query is a prompt with its completion."""
        form = check_form(QueryForm, await self._bodies.json(request))
        prompts = form.prompts
        if prompts is not None and len(prompts) != len(form.query):
            raise bad_request(f"prompts: {len(prompts)} for {len(form.query)} queries", "prompts")
        found = await self._scored(partial(self._whole, "query", form.query, prompts))
        return JSONResponse({"rewards": found, "scores": found})

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        card = {
            "id": self.served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "sixfold",
            "max_model_len": self.served.scorer.context,
            EXACT: self.served.identity,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def health(self, request: Request) -> Response:
        """GET /health: 200."""
        return JSONResponse({"status": "ok"})

    def _check_model(self, model: str) -> None:
        if model != self.served.name:
            raise ApiError(
                404,
                f"the model '{shortened(model)}' does not exist here; '{self.served.name}' is"
                " served",
                param="model",
                code="model_not_found",
            )

    async def _scored(
        self, work: Callable[[], torch.Tensor], partly: bool = False
    ) -> list[float | None]:
        """Rewards, computed in a thread, one request after the other.

        Args:
            work: computes them.
            partly: give None for a completion without a finite reward, unless none has one.
        """
        try:
            found = list((await run_sync(work, limiter=self._one)).tolist())
        except UserError as error:
            raise bad_request(str(error)) from error
        if partly and any(map(math.isfinite, found)):
            return [value if math.isfinite(value) else None for value in found]
        for index, value in enumerate(found):
            if not math.isfinite(value):  # no status after which clients ask again
                raise ApiError(422, f"the reward of completion {index} is {value}")
        return found

    def _conversation(self, form: ClassifyForm) -> torch.Tensor:
        messages: Any = form.messages
        _check_messages(messages, "messages")
        if messages[-1]["role"] != "assistant" or len(messages) < 2:
            raise bad_request(
                "the last message must be the assistant's reply, which is scored", "messages"
            )
        task, text = Task("scored", tuple(messages[:-1])), str(messages[-1]["content"])
        ended = not form.continue_final_message
        scorer = self.served.scorer
        return scorer.rewards(*scorer.encoded(task, [text], [ended]))

    def _whole(
        self,
        field: str,
        texts: Sequence[str | list[int]],
        prompts: Sequence[str] | None = None,
    ) -> torch.Tensor:
        """Rewards of texts or token ids. Without its prompt, a text begins after its first token.

        Args:
            field: name of the texts in the request.
            texts: prompts with their completions.

        Raises:
            ApiError: if the model needs to know where the completion begins, or there is none.
        """
        scorer, found = self.served.scorer, []
        if prompts is None and scorer.reads_completions:
            raise bad_request(
                "this reward model averages over the completion, or counts its tokens: send"
                " messages, or the prompts beside the queries",
                field,
            )
        for index, text in enumerate(texts):
            prompt = "" if prompts is None else prompts[index]
            if isinstance(text, str) and not text.startswith(prompt):
                raise bad_request(f"query {index} does not begin with its prompt", "prompts")
            if not text[len(prompt) :] or (prompts is not None and not prompt):
                raise bad_request(f"{field} {index} has an empty prompt or completion", field)
            ids, start = text if isinstance(text, list) else scorer.spelled(text), 1
            if isinstance(text, str) and prompt:
                before = scorer.spelled(prompt)
                ids = [*before, *scorer.renderer.plain(text[len(prompt) :], special=True)]
                start = len(before)
            if len(ids) <= start or not 0 <= min(ids) <= max(ids) < scorer.vocabulary:
                raise bad_request(f"{field} {index} is too short, or has unknown token ids", field)
            found.append(scorer.rewards(ids[:start], [ids[start:]]))
        return torch.cat(found)


def _check_messages(messages: Sequence[dict[str, Any]], field: str) -> None:
    """Raise ApiError if a message is not a role with a text."""
    texts = [isinstance(m.get(key), str) for m in messages for key in ("role", "content")]
    if not (texts and all(texts)):
        raise bad_request("every message needs a role, and its text as content", field)


def _each(given: Any) -> list[str | list[int]]:
    """A list of texts or of token ids from one or several of them."""
    one = isinstance(given, str) or (given and isinstance(given[0], int))
    found: list[str | list[int]] = [given] if one else list(given)
    if not found:
        raise bad_request("input is empty", "input")
    return found
