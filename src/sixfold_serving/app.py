"""The HTTP application: routes, body limits, streams, and aborts when a client disconnects."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from anyio.to_thread import run_sync
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from sixfold.engine.weights import NamedTensors
from sixfold.errors import UserError
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.engine_job import Delta, Job
from sixfold.rollout.engine_thread import EngineThread, QueueFull, VersionNotGreater
from sixfold.rollout.generator import GeneratorClosed
from sixfold.types import Task

from .api_error import ApiError, bad_request
from .bounds import shortened
from .chat_ask import ChatAsk
from .encoding import PromptEncoder
from .exchange import Exchange, failure, noise_key, unavailable
from .form import check_form
from .gate import Gate
from .hosts import AllowedHosts
from .metrics import Metrics
from .record import Recorder
from .replies import ChatReply, Reply, TextReply, shown_reply
from .requests import (
    MAX_CHOICES,
    MAX_VERSIONS_AHEAD,
    Ask,
    Limits,
    SearchForm,
    TextAsk,
    WeightsAsk,
    parse_ask,
)
from .responses_ask import parse_responses
from .responses_reply import ResponsesReply
from .search import Searches, delta_of, facts_of
from .sessions import RewardAsk, Sessions, SessionTurn
from .structured import Grammars
from .transport import ERROR_HANDLERS, Bodies, server_sent, unless_gone

log = logging.getLogger("sixfold_serving")

CLOSE_SECONDS = 30.0
"""Longest wait for the engine's last step when the server stops."""


@dataclass(frozen=True)
class Served:
    """The served model and the server's settings.

    Args:
        renderer: shows tokens in answers. Used only by the event loop's thread.
        encoders: renderers for short and for long prompts, used by other threads.
        grammars: compiles grammars for constrained decoding.
        limits: limits that requests are checked against.
        searches: answers requests by search.
        stop_token_ids: ids of the tokens that end a completion.
        key: the API key, or "" for none.
        hosts: allowed names in the Host header, or None to allow all.
        adapters: names of the LoRA adapters. A request may use one as its model.
        read_weights: loads the weights at a path. None: weights cannot be changed.
        turn_ends: stop strings for chats, if the chat template marks turns with plain text.
        recorder: records completions; None for no record.
        sessions: sessions, if the server records completions; otherwise None.
    """

    name: str
    engine: EngineThread
    renderer: Renderer
    encoders: tuple[Renderer, Renderer]
    grammars: Grammars
    limits: Limits
    searches: Searches
    stop_token_ids: tuple[int, ...]
    key: str = ""
    hosts: AllowedHosts | None = None
    adapters: tuple[str, ...] = ()
    read_weights: Callable[[str], NamedTensors] | None = None
    stop_strings: tuple[str, ...] = ()
    turn_ends: tuple[str, ...] = ()
    recorder: Recorder | None = None
    sessions: Sessions | None = None


def make_app(served: Served) -> ASGIApp:
    """Make the ASGI application. It ends the engine's thread and the record with the event loop."""
    endpoints = Endpoints(served)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        if not await run_sync(served.engine.close, CLOSE_SECONDS):
            log.error("the engine's last step did not end within %g s", CLOSE_SECONDS)
        if served.recorder is not None:
            served.recorder.close()

    changing = (
        [Route("/v1/weights", endpoints.weights, methods=["POST"])]
        if served.read_weights is not None
        else []
    )
    of_sessions = _session_routes(endpoints) if served.sessions is not None else []
    app = Starlette(
        routes=[
            *changing,
            *of_sessions,
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/completions", endpoints.text, methods=["POST"]),
            Route("/v1/responses", endpoints.responses, methods=["POST"]),
            Route("/v1/models", endpoints.models),
            Route("/v1/models/", endpoints.models),
            Route("/v1/models/{model:path}", endpoints.model),
            Route("/", endpoints.root),
            Route("/health", endpoints.health),
            Route("/metrics", endpoints.metrics),
        ],
        exception_handlers=ERROR_HANDLERS,
        lifespan=lifespan,
    )
    paths = {route.path for route in app.routes if isinstance(route, Route)}
    return Gate(app, paths, served.key, served.hosts, endpoints.counts.answers)


def _session_routes(endpoints: Endpoints) -> list[Route]:
    """Routes of sessions: the API under the name of a session, and its reward."""
    session = "/sessions/{session}"
    return [
        Route("/sessions", endpoints.new_session, methods=["POST"]),
        Route(f"{session}/reward", endpoints.reward, methods=["POST"]),
        Route(f"{session}/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route(f"{session}/v1/completions", endpoints.text, methods=["POST"]),
        Route(f"{session}/v1/responses", endpoints.responses, methods=["POST"]),
        Route(f"{session}/v1/models", endpoints.models),
    ]


class Endpoints:
    """Handlers of the routes."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.counts = Metrics(served.engine)
        self._bodies = Bodies()
        self._created = int(time.time())
        # One update at a time: each needs memory for another copy of the weights.
        self._updating = asyncio.Lock()
        self._encoder = PromptEncoder(*served.encoders, served.limits)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        ask = parse_ask(ChatAsk, await self._bodies.json(request))
        form = self.served.searches.asked(ask)
        exchange = await self._chat_exchange("chatcmpl", ask, _session(request))
        reply = ChatReply(exchange, ask, self.served.renderer)
        if form is not None:
            messages: Any = tuple(ask.shown_messages())
            task = Task(exchange.job.names[0], messages, tools=tuple(ask.shown_tools()))
            return await self._searched(request, exchange, reply, form, task)
        return await self._answer(request, exchange, reply)

    async def responses(self, request: Request) -> Response:
        """POST /v1/responses."""
        asked, ask = parse_responses(await self._bodies.json(request))
        try:
            exchange = await self._chat_exchange("resp", ask, _session(request))
        except ApiError as error:
            error.param = "input" if error.param == ask.prompt_field else error.param
            raise
        reply = ResponsesReply(exchange, ask, self.served.renderer, asked)
        return await self._answer(request, exchange, reply)

    async def text(self, request: Request) -> Response:
        """POST /v1/completions."""
        ask = parse_ask(TextAsk, await self._bodies.json(request))
        self._check_model(ask.model)
        given = ask.prompts()
        form = self.served.searches.asked(ask)
        if len(given) * ask.samples > MAX_CHOICES:
            field = "best_of" if ask.best_of else "n"
            raise bad_request(
                f"{field}: {len(given)} prompts x {field} = {ask.samples} exceeds {MAX_CHOICES}"
                f" completions. Lower {field} or send fewer prompts",
                field,
            )
        asked = {"endpoint": "text", "prompt": ask.prompt}
        name, sessions = _session(request), self.served.sessions
        if name and sessions:
            if len(given) > 1:
                raise bad_request(
                    f"prompt: {len(given)} prompts, but a request of a session may have only one."
                    " Send one prompt per request",
                    "prompt",
                )
            turn = await sessions.plain(name, ask, given[0])
            exchange = await self._session_exchange("cmpl", ask, turn, asked)
        else:
            prompts = [await self._tokens(prompt) for prompt in given]
            exchange = await self._exchange("cmpl", ask, prompts, asked)
        texts = (
            [p if isinstance(p, str) else self.served.renderer.shown(p) for p in given]
            if ask.echo or form
            else []
        )
        reply = TextReply(exchange, ask, self.served.renderer, texts if ask.echo else [])
        if form is not None:
            task = Task(exchange.job.names[0], texts[0])
            return await self._searched(request, exchange, reply, form, task)
        return await self._answer(request, exchange, reply)

    async def new_session(self, request: Request) -> Response:
        """POST /sessions: make a session and answer with its base URL."""
        assert self.served.sessions is not None
        name = self.served.sessions.create()
        url = f"{request.base_url}sessions/{name}"
        return JSONResponse({"id": name, "base_url": f"{url}/v1", "reward_url": f"{url}/reward"})

    async def reward(self, request: Request) -> Response:
        """POST /sessions/NAME/reward: record the reward of a session and end the session."""
        assert self.served.sessions is not None
        ask = check_form(RewardAsk, await self._bodies.json(request))
        self.served.sessions.reward(_session(request), ask)
        return JSONResponse({"object": "reward", "reward": ask.reward})

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self._names]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        name = request.path_params["model"]
        self._check_model(name)
        return JSONResponse(self._card(name))

    async def weights(self, request: Request) -> Response:
        """POST /v1/weights: replace the model's weights while requests are running."""
        assert self.served.read_weights is not None
        ask = check_form(WeightsAsk, await self._bodies.json(request))
        async with self._updating:
            try:
                self._check_version(ask.version)
                tensors = await run_sync(self.served.read_weights, ask.path)
                running = await asyncio.wrap_future(self.served.engine.load(tensors, ask.version))
            except GeneratorClosed as error:
                raise unavailable(error) from error
            except VersionNotGreater as error:
                log.warning("weights were not loaded: %s", error)
                raise ApiError(409, str(error), param="version") from error
            except (UserError, ValueError) as error:
                log.warning("weights of version %d were not loaded: %s", ask.version, error)
                raise bad_request(str(error), "path") from error
        return JSONResponse({"object": "weights", "version": ask.version, "in_flight": running})

    async def root(self, request: Request) -> Response:
        """GET /: a short description, for a user who opens the address in a browser."""
        return JSONResponse(
            {"server": "sixfold", "models": list(self._names), "base_url": f"{request.base_url}v1"}
        )

    async def health(self, request: Request) -> Response:
        """GET /health: 200 unless the engine has failed, then 503."""
        failed = self.served.engine.failure is not None
        return JSONResponse(
            {
                "status": "failed" if failed else "ok",
                "weight_version": self.served.engine.engine.version,
            },
            status_code=503 if failed else 200,
        )

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(generate_latest(self.counts), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @property
    def _names(self) -> tuple[str, ...]:
        return (self.served.name, *self.served.adapters)

    def _check_model(self, model: str) -> None:
        if model not in self._names:
            there = ", ".join(f"'{name}'" for name in self._names)
            are = "are" if self.served.adapters else "is"
            raise ApiError(
                404,
                f"the model '{shortened(model)}' does not exist here; {there} {are} served",
                param="model",
                code="model_not_found",
            )

    def _card(self, name: str) -> dict[str, Any]:
        owner = {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "sixfold",
            "max_model_len": self.served.limits.context,
        }
        return owner | ({"parent": self.served.name} if name != self.served.name else {})

    def _check_version(self, version: int) -> None:
        furthest = self.served.engine.engine.version + MAX_VERSIONS_AHEAD
        if version > furthest:  # a huge version would block every later update
            raise bad_request(
                f"version: the weights have version {furthest - MAX_VERSIONS_AHEAD}, so the next"
                f" version must be at most {furthest}",
                "version",
            )

    async def _tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return await self._encoder.text(prompt)
        self.served.limits.check_token_ids(prompt, "prompt")
        return prompt

    async def _chat_exchange(self, kind: str, ask: ChatAsk, session: str) -> Exchange:
        """Exchange for a chat.

        Args:
            kind: prefix of its id.
            session: name of its session, or "".
        """
        self._check_model(ask.model)
        messages, tools = ask.shown_messages(), ask.shown_tools()
        asked = {"endpoint": "chat", "prompt": messages, "tools": tools}
        if not (session and self.served.sessions):
            prompt = await self._encoder.chat(messages, tools)
            return await self._exchange(kind, ask, [prompt], asked)
        turn = await self.served.sessions.chat(session, ask, messages, tools)
        exchange = await self._session_exchange(kind, ask, turn, asked)

        def shown(whole: Delta) -> dict[str, Any]:
            reply = ChatReply(exchange, ask, self.served.renderer)
            return shown_reply(reply.whole([whole])["choices"][0]["message"])

        exchange.shown = shown
        return exchange

    async def _session_exchange(
        self, kind: str, ask: Ask, turn: SessionTurn, asked: dict[str, Any]
    ) -> Exchange:
        """Exchange for a request of a session. The arguments are those of `_exchange`."""
        try:
            exchange = await self._exchange(kind, ask, [turn.prompt.tokens], asked | turn.recorded)
        except BaseException:
            await turn.give_up()
            raise
        exchange.turn = turn
        return exchange

    async def _exchange(
        self, kind: str, ask: Ask, prompts: list[list[int]], asked: dict[str, Any]
    ) -> Exchange:
        max_tokens = self.served.limits.max_tokens(ask, max(map(len, prompts)))
        noise, served = ask.named_noise, self.served
        ends = served.stop_token_ids if noise is None else ()
        params = ask.sampling(max_tokens, ends, secrets.randbits(63))
        name = f"{kind}-{secrets.token_hex(12)}"
        asked |= {"model": ask.model, "n": ask.n, "stop": ask.stops, "metadata": ask.metadata}
        adapter = ask.model if ask.model in served.adapters else None
        stops = (
            *ask.stops,
            *(served.stop_strings if noise is None else ()),
            *(served.turn_ends if isinstance(ask, ChatAsk) else ()),
        )
        form = ask.form()
        asked["trainable"] = form.is_free and not params.reads_history
        constraint = (
            None
            if form.is_free
            else await run_sync(served.grammars.compile, form, limiter=self._bodies.limiter)
        )
        task_id = ask.metadata.get("task_id", name)
        asked = {"exchange": name, "created": time.time(), "seed": params.seed, **asked}
        recorder, inbox = served.recorder, asyncio.Queue[Delta | Exception]()
        job = Job(
            [noise_key(prompt) for prompt in prompts] if noise is None else [noise.name],
            prompts,
            params,
            range(ask.samples) if noise is None else [noise.sample],
            inbox.put_nowait,
            stops,
            ask.stream,
            decoded=True,
            origin=None if noise is None else noise.origin,
            adapter=adapter,
            constraint=constraint,
            scored=ask.scores_prompt,
            priority=ask.priority,
            record=None if recorder is None else partial(recorder.record, task_id, asked),
        )
        return Exchange(name, job, inbox, asked["created"])

    async def _answer(self, request: Request, exchange: Exchange, reply: Reply) -> Response:
        try:
            exchange.submit(self.served.engine)
        except ApiError:
            await exchange.give_up()
            raise
        if exchange.job.stream:
            return JobStream(self._events(exchange, reply), exchange, self.served.engine)
        try:
            answers = await unless_gone(request, exchange.answers())
        finally:
            self.served.engine.abort(exchange.job)
            await exchange.give_up()
        self._answered(exchange)
        return JSONResponse(reply.whole(answers))

    async def _searched(
        self, request: Request, exchange: Exchange, reply: Reply, form: SearchForm, task: Task
    ) -> Response:
        """Answer of a search.

        Args:
            exchange: the request with its job, which is not submitted: the search submits its own.
            task: the prompt as the reward model reads it.
        """
        job = exchange.job
        try:
            found = await unless_gone(request, self.served.searches.found(form, task, job))
        except (GeneratorClosed, QueueFull, ValueError) as error:
            raise failure(error) from error
        self._answered(exchange)
        body = reply.whole([delta_of(found)])
        return JSONResponse(body | facts_of(found, form.method, len(job.prompts[0])))

    async def _events(self, exchange: Exchange, reply: Reply) -> AsyncIterator[str]:
        for chunk in reply.opening():
            yield server_sent(chunk)
        try:
            async for delta in exchange.deltas():
                for chunk in reply.chunks(delta):
                    yield server_sent(chunk)
        except ApiError as error:  # the HTTP status is already sent: report it in the stream
            yield server_sent(reply.failed(error.body))
        else:
            self._answered(exchange)
            for chunk in reply.closing():
                yield server_sent(chunk)
        if reply.last_event:
            yield reply.last_event

    def _answered(self, exchange: Exchange) -> None:
        self.counts.seconds += time.time() - exchange.created
        self.counts.generations += 1


class JobStream(StreamingResponse):
    """Server-sent events of a job. The job is aborted when the sending ends for any reason."""

    def __init__(
        self, events: AsyncIterator[str], exchange: Exchange, engine: EngineThread
    ) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._exchange = exchange
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, then abort the job."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._engine.abort(self._exchange.job)
            await self._exchange.give_up()


def _session(request: Request) -> str:
    """Name of the request's session, or ""."""
    return str(request.path_params.get("session", ""))
