"""The endpoint for agents: an OpenAI-compatible server of a generator, with a base URL per session.

It listens on a loopback address, in the event loop of the run. The id in a session's base URL is
random, so other programs cannot guess it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from sixfold.renderer.renderer import Renderer, RenderError
from sixfold.rollout.conversations import Prompt
from sixfold.rollout.engine_job import Delta, Job
from sixfold.rollout.generator import Generator
from sixfold.rollout.meter import Meter
from sixfold.rollout.player import record_reply
from sixfold.timeline import Timeline
from sixfold.types import SamplingParams

from ..api_error import ApiError, bad_request
from ..chat_ask import ChatAsk
from ..connections import BoundedHeaders, Interruptible, listener
from ..exchange import Exchange
from ..form import check_form
from ..gate import Gate
from ..hosts import AllowedHosts
from ..replies import ChatReply, Reply, TextReply, shown_reply
from ..requests import Ask, Limits, TextAsk, parse_ask
from ..responses_ask import parse_responses
from ..responses_reply import ResponsesReply
from ..sessions import RewardAsk
from ..transport import ERROR_HANDLERS, Bodies, server_sent, unless_gone
from .command import HOST
from .requests import Settings, unforced
from .session import RewardRefused, Session

IDLE_SECONDS = 3600
"""Time for which an agent may keep a connection open without requests."""
MODEL = "policy"
"""Name of the policy in `/models`. Requests may use any name for it."""


class _Server(uvicorn.Server):
    """Server that does not install signal handlers: the run handles signals itself."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Endpoint:
    """Serves the sessions of agents. The server starts when the first session is opened.

    Args:
        renderer: converts messages to tokens, and tokens to text.
        stops: stop strings in addition to those of a request.
        limits: limits that requests are checked against.
        meter: counts the replies.
        timeline: keeps when they were sampled.
    """

    def __init__(
        self,
        generator: Generator,
        renderer: Renderer,
        stops: tuple[str, ...],
        limits: Limits,
        meter: Meter,
        timeline: Timeline,
    ) -> None:
        self.generator = generator
        self.renderer = renderer
        self.stops = stops
        self.limits = limits
        self.meter = meter
        self.timeline = timeline
        self.settings = Settings(limits)
        self._sessions: dict[str, Session] = {}
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._port = 0

    async def open(self, session: Session) -> str:
        """Open a session. Returns its address, which is the base URL without "/v1"."""
        await self._start()
        self._sessions[session.id] = session
        return f"http://{HOST}:{self._port}/sessions/{session.id}"

    async def end(self, session: Session) -> None:
        """End a session: running requests are cancelled, later ones are refused."""
        del self._sessions[session.id]
        await session.close()

    async def close(self) -> None:
        """Stop the server."""
        server, self._server = self._server, None
        if server is not None and self._serving is not None:
            server.should_exit = server.force_exit = True
            await asyncio.wait({self._serving}, timeout=5)

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        serving = self._serving
        if serving is not None and not serving.done() and serving.get_loop() is loop:
            return
        listening = listener(HOST, 0)
        self._port = listening.getsockname()[1]
        config = uvicorn.Config(
            self._app(),
            http=BoundedHeaders,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,  # a signal in that layer would be lost, see `Interruptible`
            timeout_keep_alive=IDLE_SECONDS,
        )
        self._server = _Server(config)
        # No await up to here: a second session must find the task and not start a second server.
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.001)
        if self._serving.done():
            self._serving.result()

    def _app(self) -> ASGIApp:
        handlers = _Handlers(self, self._sessions)
        session = "/sessions/{session}"
        app = Starlette(
            routes=[
                Route(f"{session}/v1/chat/completions", handlers.chat, methods=["POST"]),
                Route(f"{session}/v1/completions", handlers.text, methods=["POST"]),
                Route(f"{session}/v1/responses", handlers.responses, methods=["POST"]),
                Route(f"{session}/v1/models", handlers.models),
                Route(f"{session}/v1/models/{{model:path}}", handlers.model),
                Route(f"{session}/reward", handlers.reward, methods=["POST"]),
            ],
            exception_handlers=ERROR_HANDLERS,
        )
        return Interruptible(Gate(app, frozenset(), "", AllowedHosts(), Counter()))


@dataclass(eq=False)
class _Turn:
    """One request for a reply.

    Attributes:
        prompt: the prompt that the policy continues.
        done: True once the reply was written to the session, or the request was given up.
    """

    endpoint: Endpoint
    session: Session
    ask: Ask
    prompt: Prompt
    params: SamplingParams
    done: bool = False

    def exchange(self, kind: str) -> Exchange:
        """The request as an `Exchange`, which the server's reply formats need.

        Its id is a hash of the prompt and the seed. A random id would make runs differ, because
        templates may show ids of tool calls to the policy.
        """
        key, params = self.prompt.key, self.params
        words = repr((params.seed, key, self.prompt.tokens))
        name = f"{kind}-{blake2b(words.encode(), digest_size=12).hexdigest()}"
        inbox = asyncio.Queue[Delta | Exception]()
        job = Job(
            [key.name],
            [self.prompt.tokens],
            params,
            [0],
            inbox.put_nowait,
            self.ask.stops,
            self.ask.stream,
            decoded=True,
        )
        return Exchange(name, job, inbox, time.time())

    async def sample(self) -> Delta:
        """Sample the reply and write it to the session.

        Raises:
            ApiError: the session has ended, the prompt does not fit, or the generator has failed.
        """
        endpoint, session, prompt = self.endpoint, self.session, self.prompt
        call = asyncio.ensure_future(
            endpoint.generator.generate(
                prompt.tokens,
                self.params,
                prompt.key,
                stops=tuple(dict.fromkeys((*endpoint.stops, *self.ask.stops))),
                # As in the player: episodes with more turns go first.
                priority=self.ask.priority or len(prompt.conversation.marks),
            )
        )
        session.running.add(call)
        session.latest = call
        session.ask()
        try:
            sampled = await call
        except asyncio.CancelledError:
            self.give_up()
            session.left = session.left or session.latest is call
            task = asyncio.current_task()
            if session.ended and task is not None and not task.cancelling():
                raise _ended() from None
            raise
        except ValueError as error:  # the request does not fit into the engine
            self.give_up()
            raise bad_request(str(error), "max_tokens") from error
        except Exception as error:
            self.give_up()
            if not session.failure.done():
                session.failure.set_exception(error)
            raise ApiError(503, "the policy's engine has failed") from error
        finally:
            session.running.discard(call)
            session.answered()
        endpoint.meter.count(len(prompt.tokens), sampled)
        record_reply(endpoint.timeline, prompt.key.name, prompt.key.sample, sampled)
        text = sampled.text
        if text is None:
            text = endpoint.renderer.decode(sampled.tokens, self.params.stop_token_ids)
        delta = Delta(
            0,
            text,
            sampled.tokens,
            sampled.logp,
            sampled.version,
            finish_reason=sampled.finish_reason,
            stopped=sampled.text is not None,
        )
        self.done = True
        session.conversations.reply(prompt, sampled, text, self._message(delta))
        session.left = session.left and session.latest is not call
        session.limit = None
        return delta

    def give_up(self) -> None:
        """Remove the request from its session, unless its reply was written."""
        if not self.done:
            self.done = True
            self.session.replies -= 1
            self.session.conversations.drop(self.prompt)

    def _message(self, delta: Delta) -> dict[str, object]:
        """The reply as a message, as the client sends it back in later requests."""
        if not isinstance(self.ask, ChatAsk):
            return {}
        reply = ChatReply(self.exchange("chatcmpl"), self.ask, self.endpoint.renderer)
        return shown_reply(reply.whole([delta])["choices"][0]["message"])


class _Handlers:
    """Handlers of the routes.

    Args:
        sessions: open sessions by id.
    """

    def __init__(self, endpoint: Endpoint, sessions: dict[str, Session]) -> None:
        self._endpoint = endpoint
        self._sessions = sessions
        self._bodies = Bodies()

    async def chat(self, request: Request) -> Response:
        """POST chat/completions."""
        session = self._session(request)
        asked = parse_ask(ChatAsk, await self._bodies.json(request))
        turn, ask = self._chat_turn(session, asked)
        reply = ChatReply(turn.exchange("chatcmpl"), ask, self._endpoint.renderer)
        return await _answer(request, turn, reply)

    async def responses(self, request: Request) -> Response:
        """POST responses."""
        session = self._session(request)
        asked, as_chat = parse_responses(await self._bodies.json(request))
        try:
            turn, ask = self._chat_turn(session, as_chat)
        except ApiError as error:
            error.param = "input" if error.param == as_chat.prompt_field else error.param
            raise
        renderer = self._endpoint.renderer
        reply = ResponsesReply(turn.exchange("resp"), ask, renderer, asked)
        return await _answer(request, turn, reply)

    async def text(self, request: Request) -> Response:
        """POST completions."""
        session = self._session(request)
        ask = parse_ask(TextAsk, await self._bodies.json(request))
        (given, *_) = ask.prompts()
        if isinstance(given, str):
            self._endpoint.limits.check_length(len(given), "prompt")
        else:
            self._endpoint.limits.check_token_ids(given, "prompt")
        turn = self._turn(session, ask, lambda: session.conversations.plain(given))
        reply = TextReply(turn.exchange("cmpl"), ask, self._endpoint.renderer)
        return await _answer(request, turn, reply)

    async def models(self, request: Request) -> Response:
        """GET models."""
        return JSONResponse({"object": "list", "data": [_card(self._session(request), MODEL)]})

    async def model(self, request: Request) -> Response:
        """GET models/NAME. Every name stands for the policy."""
        return JSONResponse(_card(self._session(request), request.path_params["model"]))

    async def reward(self, request: Request) -> Response:
        """POST reward."""
        session = self._session(request)
        ask = check_form(RewardAsk, await self._bodies.json(request))
        self._session(request)  # the session may have ended while the body arrived
        try:
            session.post(ask.reward, ask.parts)
        except RewardRefused as error:
            status = 409 if session.reward else 400
            raise ApiError(status, str(error), param="reward") from error
        return JSONResponse({"object": "reward", "reward": ask.reward})

    def _session(self, request: Request) -> Session:
        session = self._sessions.get(request.path_params["session"])
        if session is None or session.ended:
            raise _ended()
        return session

    def _chat_turn(self, session: Session, asked: ChatAsk) -> tuple[_Turn, ChatAsk]:
        """Begin a turn of a chat. Returns the turn, and the request without forced tools."""
        self._endpoint.settings.check(asked, session.params)
        ask = unforced(asked)
        messages, tools = ask.shown_messages(), ask.shown_tools()
        self._endpoint.limits.check_chat(messages, self._endpoint.renderer)
        turn = self._turn(session, ask, lambda: session.conversations.chat(messages, tools))
        return turn, ask

    def _turn(self, session: Session, ask: Ask, make: Callable[[], Prompt]) -> _Turn:
        """Begin a turn of the policy.

        Raises:
            ApiError: the request is wrong, or a limit of the episode is reached.
        """
        settings, most = self._endpoint.settings, session.limits
        settings.check(ask, session.params)
        if session.replies >= most.turns:
            session.limit = "turns"
            raise bad_request(
                f"the episode has had its {most.turns} replies (rollout.max_turns)",
                code="max_turns",
            )
        try:
            prompt = make()
        except RenderError as error:
            raise bad_request(str(error), error.part) from error
        room = most.tokens - len(prompt.tokens)
        if room < 1:
            session.conversations.drop(prompt)
            session.limit = "context"
            tokens = f"your messages have {len(prompt.tokens)} tokens"
            raise self._endpoint.limits.overflow(tokens, ask.prompt_field)
        session.replies += 1
        params = settings.params(ask, session.params, room)
        return _Turn(self._endpoint, session, ask, prompt, params)


async def _answer(request: Request, turn: _Turn, reply: Reply) -> Response:
    if turn.ask.stream:
        return _TurnStream(turn, reply)
    try:
        delta = await unless_gone(request, turn.sample())
    finally:
        # If the client disconnects at once, `sample` never starts and cannot give up the request.
        # Not at once: a `sample` that has started must handle its own cancellation first.
        asyncio.get_running_loop().call_soon(turn.give_up)
    return JSONResponse(reply.whole([delta]))


class _TurnStream(StreamingResponse):
    """Server-sent events of a turn. Sampling is cancelled if the events cannot be sent any more."""

    def __init__(self, turn: _Turn, reply: Reply) -> None:
        super().__init__(
            self._events(turn, reply),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )
        self._turn = turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Give up the request if its reply was not sampled."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._turn.give_up()

    async def _events(self, turn: _Turn, reply: Reply) -> AsyncIterator[str]:
        for chunk in reply.opening():
            yield server_sent(chunk)
        try:
            delta = await turn.sample()
        except ApiError as error:  # the HTTP status is already sent: report it in the stream
            yield server_sent(reply.failed(error.body))
        else:
            for chunk in (*reply.chunks(delta), *reply.closing()):
                yield server_sent(chunk)
        if reply.last_event:
            yield reply.last_event


def _card(session: Session, name: str) -> dict[str, object]:
    """Description of the policy as a model in OpenAI's format."""
    card = {"id": name, "object": "model", "created": int(session.began)}
    return card | {"owned_by": "sixfold", "max_model_len": session.limits.tokens}


def _ended() -> ApiError:
    return ApiError(410, "the session has ended, or never existed", code="session_ended")
