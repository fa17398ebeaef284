"""Plays one episode: environment and policy in turn, until the environment or a limit ends it.

A failure of the environment ends its episode only. The trajectory is kept with its outcome, and the
error says why it has no reward.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, get_args

from ..environment.episode import (
    Action,
    End,
    Episode,
    MakeEpisode,
    Observation,
    final_reward,
    turn_reward,
)
from ..errors import UserError, one_line
from ..types import PROMPT, Outcome, Reward, SamplingParams, Task, Trajectory
from .generator import ALONE, Generator, Peers, SampleKey
from .meter import Meter, meter_of
from .renderer.renderer import Renderer, RenderError
from .transcript import Transcript

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Limits of an episode that its environment does not end.

    Attributes:
        tokens: longest sequence, including the prompt.
        turns: most replies.
        step_s: seconds that the environment may take for one step. None: any time.
    """

    tokens: int
    turns: int = 1
    step_s: float | None = None


@dataclass(frozen=True)
class Played:
    """A finished episode.

    Attributes:
        trajectory: its tokens. The reward is set if the environment gave one.
        error: how the environment failed, in one line, or "".
        peers: episodes whose replies were sampled as one request. Only for episodes of one turn.
    """

    trajectory: Trajectory
    error: str = ""
    peers: Peers = ALONE


class EnvironmentFault(Exception):
    """The environment failed. The message says how, in one line.

    Attributes:
        outcome: outcome of the episode.
    """

    def __init__(self, message: str, outcome: Outcome = "error") -> None:
        super().__init__(message)
        self.outcome = outcome


class OneTurn:
    """Episode of a task that is only a prompt. Reward functions score the reply."""

    def __init__(self, task: Task) -> None:
        self._prompt = task.prompt

    async def start(self) -> Observation:
        """The task's prompt."""
        if isinstance(self._prompt, str):
            return Observation(text=self._prompt)
        return Observation(messages=self._prompt)

    async def step(self, action: Action) -> End:
        """Any reply ends the episode."""
        return End()


@dataclass
class Player:
    """Plays episodes with one generator.

    Attributes:
        generator: samples the replies.
        renderer: converts messages to tokens, and tokens to text.
        limits: what ends an episode that the environment does not end.
        make: makes the episode of a task.
        stops: strings that end a reply, besides those of an observation.
        environment: name of the environment, which trajectories record. "" for one turn.
        meter: measures the generator.
    """

    generator: Generator
    renderer: Renderer
    limits: Limits
    make: MakeEpisode = OneTurn
    stops: tuple[str, ...] = ()
    environment: str = ""
    meter: Meter = field(init=False)

    def __post_init__(self) -> None:
        self.meter = meter_of(self.generator)

    async def play(
        self, task: Task, sample: int, prompt: Sequence[int], params: SamplingParams
    ) -> Played:
        """Play one episode.

        Args:
            task: the task.
            sample: index of the sample within the task.
            prompt: token ids of the task's prompt.
            params: sampling parameters of each reply.
        """
        course = _Course(self, task, sample, list(prompt), params)
        error = ""
        try:
            await course.run()
        except EnvironmentFault as fault:
            course.outcome, course.reward = fault.outcome, None
            error = f"environment {self.environment}: {fault}" if self.environment else str(fault)
        return Played(course.trajectory(), error, course.peers)


@dataclass
class _Course:
    """One episode while it is played.

    Attributes:
        prompt: tokens of the first prompt. Before `start` has answered, those of the task.
        conversation: messages before the policy's current turn.
        tools: descriptions of the functions that the policy may call.
        turn: index of the first token of the policy's current turn. Text of the environment may
            continue it.
        peers: as in `Played`.
    """

    player: Player
    task: Task
    sample: int
    prompt: list[int]
    params: SamplingParams
    outcome: Outcome = "ended"
    reward: Reward | None = None
    transcript: Transcript = field(default_factory=Transcript)
    conversation: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    turn: int = 0
    peers: Peers = ALONE
    events: list[dict[str, Any]] = field(default_factory=list)
    began: float = field(default_factory=time.time)

    async def run(self) -> None:
        """Alternate observations and replies until the episode ends.

        Raises:
            EnvironmentFault: if the environment fails.
        """
        episode = self._made()
        seen: Observation = await self._ask(episode.start, Observation)
        self._begin(seen)
        while True:
            action, rest = await self._reply(seen.stops)
            answer: Observation | End = await self._ask(
                partial(episode.step, action), Observation, End
            )
            self._note(answer)
            if isinstance(answer, End):
                self._end(answer)
                return
            if len(self.transcript.turns) >= self.player.limits.turns:
                self._cut("turns")
                return
            if not self._observe(answer, rest):
                self._cut("context")
                return
            seen = answer

    def trajectory(self) -> Trajectory:
        """The episode so far."""
        if not self.transcript.tokens:  # the environment failed before the first reply
            self.transcript.write(self.prompt, PROMPT * len(self.prompt))
        done = self.transcript
        return Trajectory(
            task_id=self.task.id,
            sample=self.sample,
            tokens=done.tokens,
            provenance=done.provenance,
            logp=done.logp,
            version=done.version,
            turns=tuple(done.turns),
            outcome=self.outcome,
            text=done.text,
            reward=self.reward,
            kept=done.kept or None,
            routes=done.routes,
            opened=self.player.renderer.opened(self.prompt),
            environment=self.player.environment,
            events=tuple(self.events),
            started=self.began,
            ended=time.time(),
        )

    def _made(self) -> Episode:
        try:
            return self.player.make(self.task)
        except Exception as error:  # boundary: a failed environment is data
            raise EnvironmentFault(one_line(error)) from error

    async def _ask(self, call: Callable[[], Awaitable[Any]], *kinds: type[Any]) -> Any:
        """Answer of the environment.

        Args:
            call: `start`, or `step` with its action.
            kinds: accepted types of the answer.

        Raises:
            EnvironmentFault: if it raises, takes too long, or its answer is malformed.
        """
        limit, answer = self.player.limits.step_s, _called(call)
        try:
            given = await (answer if limit is None else _in_time(answer, limit))
        except EnvironmentFault:
            raise
        except Exception as error:  # boundary: a failed environment is data
            raise EnvironmentFault(one_line(error)) from error
        if not isinstance(given, kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise EnvironmentFault(f"the environment returned {type(given).__name__}, not {names}")
        if isinstance(given, Observation):
            _check_observation(given)
        return given

    def _begin(self, seen: Observation) -> None:
        """Write the first prompt."""
        renderer, said, prompt = self.player.renderer, seen.messages or seen.text, self.prompt
        self.conversation = seen.messages or ({"role": "user", "content": seen.text},)
        self.tools = seen.tools
        # A task's prompt has no other fields, such as the calls of an earlier turn.
        beyond_task = self.tools or any(set(m) - {"role", "content"} for m in seen.messages)
        try:
            if beyond_task:
                prompt = renderer.encode_messages(self.conversation, self.tools)
            elif said != self.task.prompt:
                prompt = renderer.encode(replace(self.task, prompt=said))
        except (RenderError, UserError) as error:
            raise EnvironmentFault(one_line(error)) from error
        if self._room(len(prompt)) < 1:
            raise EnvironmentFault(
                f"the first observation has {len(prompt)} tokens, which leaves no room for a reply"
                f" in {self.player.limits.tokens} tokens: raise rollout.max_episode_tokens",
                "context",
            )
        self.prompt = prompt
        self.transcript.write(self.prompt, PROMPT * len(self.prompt))
        self.turn = len(self.prompt)
        self._record(seen.events)

    def _room(self, length: int) -> int:
        """Tokens that may follow a sequence of this length."""
        return self.player.limits.tokens - length

    async def _reply(self, stops: Sequence[str]) -> tuple[Action, str]:
        """Sample one reply and write it.

        Returns:
            The action, and the text of the reply behind the action's text: the stop string, and
            what the last token has beyond it.
        """
        player, tokens, params = self.player, list(self.transcript.tokens), self.params
        room = self._room(len(tokens))
        every = tuple(dict.fromkeys((*player.stops, *stops)))
        sampled = await player.generator.generate(
            tokens,
            params if room >= params.max_tokens else replace(params, max_tokens=room),
            SampleKey(self.task.id, self.sample, origin=len(self.prompt)),
            stops=every,
        )
        whole = player.renderer.decode(sampled.tokens)
        text = whole if sampled.text is None else sampled.text
        rest = whole[len(text) :]
        found = [stop for stop in every if rest.startswith(stop)]
        player.meter.count(len(tokens), sampled)
        if player.limits.turns == 1:  # otherwise an episode goes on after a reply has ended
            self.peers = sampled.peers
        self.transcript.reply(sampled, text)
        return Action(text, sampled.finish_reason, min(found, key=len, default="")), rest

    def _note(self, answer: Observation | End) -> None:
        """Record what the answer says about the last reply."""
        try:
            self.transcript.credit(turn_reward(answer), int(answer.tool_errors))
        except (TypeError, ValueError) as error:
            raise EnvironmentFault(one_line(error)) from error
        self._record(answer.events)

    def _record(self, events: Sequence[Mapping[str, Any]]) -> None:
        try:
            self.events += [json.loads(json.dumps(dict(e), allow_nan=False)) for e in events]
        except (TypeError, ValueError) as error:
            raise EnvironmentFault(f"an event is not JSON: {error}") from error

    def _end(self, end: End) -> None:
        if end.outcome not in get_args(Outcome):
            raise EnvironmentFault(
                f"End.outcome = {end.outcome!r} is none of {', '.join(get_args(Outcome))}"
            )
        try:
            self.reward = final_reward(end)
        except (TypeError, ValueError) as error:
            raise EnvironmentFault(one_line(error)) from error
        if self.reward is not None and self.reward.value is None:
            raise EnvironmentFault(
                self.reward.error or "End.reward has no value",
                "error" if end.outcome == "ended" else end.outcome,
            )
        reason = self.transcript.turns[-1].finish_reason
        self.outcome = reason if end.outcome == "ended" and reason != "stop" else end.outcome

    def _cut(self, outcome: Outcome) -> None:
        """End at a limit. The environment gave no final reward, so only those of turns count."""
        self.outcome, self.reward = outcome, Reward(0.0)

    def _observe(self, seen: Observation, rest: str) -> bool:
        """Write an observation after the last reply.

        Args:
            seen: the observation.
            rest: text of the reply behind the action's text.

        Returns:
            False if no reply would fit after it. It is then not written.
        """
        tokens, renderer = self.transcript.tokens, self.player.renderer
        said = tokens[self.turn :]
        try:
            suffix = (
                renderer.suffix_text(said, seen.text)
                if seen.text
                else renderer.suffix(self.conversation, said, seen.messages, self.tools)
            )
        except RenderError as error:
            raise EnvironmentFault(one_line(error)) from error
        if self._room(len(tokens) + len(suffix.tokens)) < 1:
            return False
        lines = [seen.text] if seen.text else ["", *(m["content"] for m in seen.messages), ""]
        self.transcript.write(suffix.tokens, suffix.provenance, rest + "\n".join(lines))
        if seen.messages:
            self.conversation, self.turn = suffix.conversation, len(tokens)
        return True


def _check_observation(seen: Observation) -> None:
    """Raise EnvironmentFault unless the fields of an observation have the documented types."""
    if bool(seen.messages) == bool(seen.text):
        raise EnvironmentFault("an Observation needs messages or text, and not both")
    if not isinstance(seen.text, str):
        raise EnvironmentFault(f"Observation.text is of type {type(seen.text).__name__}, not str")
    if not isinstance(seen.messages, Sequence) or not all(map(_is_message, seen.messages)):
        raise EnvironmentFault("Observation.messages: a message needs a role and a content, as str")
    if isinstance(seen.stops, str) or not all(isinstance(s, str) and s for s in seen.stops):
        raise EnvironmentFault("Observation.stops must be a tuple of strings that are not empty")


def _is_message(given: object) -> bool:
    return isinstance(given, Mapping) and all(
        isinstance(given.get(name), str) for name in ("role", "content")
    )


async def _called(call: Callable[[], Awaitable[T]]) -> T:
    """Result of the call. A `sys.exit` in it counts as a failure of the environment."""
    try:
        return await call()
    except SystemExit as error:
        raise EnvironmentFault(one_line(error)) from error


async def _in_time(answer: Awaitable[T], limit: float) -> T:
    """Result of an awaitable.

    Raises:
        EnvironmentFault: after `limit` seconds. The awaitable is then cancelled, and not waited
            for: it may ignore that.
    """
    task = asyncio.ensure_future(answer)
    try:
        done, _ = await asyncio.wait((task,), timeout=limit)
    finally:
        task.cancel()
    if not done:
        raise EnvironmentFault(
            f"a step took longer than environment.timeout_s = {limit:g} s", "timeout"
        )
    if task.cancelled():
        raise EnvironmentFault("the environment cancelled itself")
    return task.result()
