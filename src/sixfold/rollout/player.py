"""Play one episode: environment and policy alternate until the environment or a limit ends it.

If the environment fails, only its episode ends. The trajectory is kept without a reward, with its
outcome and the error.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from ..environment.episode import Action, Closing, End, Episode, MakeEpisode, Observation
from ..errors import UserError, one_line
from ..renderer.renderer import Renderer, RenderError
from ..renderer.tool_calls import CallFormat, read_reply
from ..timeline import Timeline
from ..types import PROMPT, FinishReason, Outcome, Reward, SamplingParams, Task, Trajectory
from ..user_code import own_copy
from .branches import Trunk
from .environment_fault import (
    EnvironmentFault,
    check_observation,
    check_start,
    checked_end,
    checked_turn,
    in_time,
    made_episode,
)
from .generator import ALONE, Generator, Peers, Sampled, SampleKey
from .meter import Meter, meter_of
from .transcript import Transcript, observation_text

CLOSE_S = 30.0
"""Seconds that an episode may take to close if its steps have no limit."""


@dataclass(frozen=True)
class Limits:
    """Limits of an episode.

    Attributes:
        tokens: longest sequence in tokens, including the prompt.
        turns: maximum number of replies.
        step_s: time limit of one step of the environment in seconds. None: no limit.
        after: most tokens after the prompt, whatever its length. None: no such limit.
    """

    tokens: int
    turns: int = 1
    step_s: float | None = None
    after: int | None = None


@dataclass(frozen=True)
class Played:
    """A finished episode.

    Attributes:
        trajectory: its tokens. The reward is set if the environment gave one.
        error: how the environment failed, in one line. "" if it did not.
        peers: episodes of the same request to the generator. Only for episodes of one turn.
        more: further trajectories of the episode. They get the reward of `trajectory`.
        later: computes the reward after the episode, see `End.later`.
    """

    trajectory: Trajectory
    error: str = ""
    peers: Peers = ALONE
    more: tuple[Trajectory, ...] = ()
    later: Callable[[], Awaitable[Any]] | None = None


class Plays(Protocol):
    """Plays episodes with one generator."""

    @property
    def generator(self) -> Generator:
        """Samples the replies."""
        ...

    @property
    def renderer(self) -> Renderer:
        """Converts messages to tokens, and tokens to text."""
        ...

    @property
    def meter(self) -> Meter:
        """Measures the generator."""
        ...

    @property
    def timeline(self) -> Timeline:
        """Keeps when groups were played and scored."""
        ...

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
        ...


class OneTurn:
    """Episode of one reply to the task's prompt, which reward functions score."""

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
        limits: limits that end an episode before its environment does.
        make: makes the episode of a task.
        stops: strings that end a reply, besides those of an observation.
        environment: name of the environment, recorded in trajectories. "" for one turn.
        meter: measures the generator.
        timeline: keeps when replies were sampled and the environment worked.
    """

    generator: Generator
    renderer: Renderer
    limits: Limits
    make: MakeEpisode = OneTurn
    stops: tuple[str, ...] = ()
    environment: str = ""
    timeline: Timeline = field(default_factory=Timeline)
    meter: Meter = field(init=False)

    def __post_init__(self) -> None:
        self.meter = meter_of(self.generator)

    async def play(
        self,
        task: Task,
        sample: int,
        prompt: Sequence[int],
        params: SamplingParams,
        trunk: Trunk[_EpisodeState] | None = None,
    ) -> Played:
        """Play one episode.

        Args:
            task: the task.
            sample: index of the sample within the task.
            prompt: token ids of the task's prompt.
            params: sampling parameters of each reply.
            trunk: the samples that share their first turns with this one. None: no branches.
        """
        if trunk is None:
            return await self._play_to_end(_EpisodeState(self, task, sample, list(prompt), params))
        state = await trunk.join(sample)
        try:
            return await self._play_to_end(
                state or _EpisodeState(self, task, sample, list(prompt), params, trunk)
            )
        finally:
            trunk.leave()

    async def _play_to_end(self, state: _EpisodeState) -> Played:
        error = ""
        try:
            await state.run()
        except EnvironmentFault as fault:
            state.outcome, state.reward = fault.outcome, None
            error = f"environment {self.environment}: {fault}" if self.environment else str(fault)
        finally:
            await state.close()
        return Played(state.trajectory(), error, state.peers, later=state.later)


@dataclass
class _EpisodeState:
    """State of one episode while it is played.

    Attributes:
        player: plays it.
        task: the task.
        sample: index of the sample.
        prompt: token ids of the first prompt: that of the task until `start` returns another.
        params: sampling parameters of each reply.
        trunk: samples that wait for a copy of this episode at its branch, or None.
        branch: as in `Trajectory`.
        episode: the environment's episode. None before it is made.
        seen: the latest observation.
        outcome: how the episode ended.
        reward: final reward, if the environment gave one.
        transcript: tokens, text and turns so far.
        conversation: messages before the policy's current turn.
        tools: descriptions of the functions that the policy may call.
        calls: format of the policy's tool calls. None without tools.
        turn: index of the first token of the policy's current turn. Text observations extend it.
        peers: as in `Played`.
        events: recorded facts.
        began: time of the start, in seconds since the epoch.
        later: as in `Played`.
    """

    player: Player
    task: Task
    sample: int
    prompt: list[int]
    params: SamplingParams
    trunk: Trunk[_EpisodeState] | None = None
    branch: tuple[int, int] | None = None
    episode: Episode | None = None
    seen: Observation = field(default_factory=Observation)
    outcome: Outcome = "ended"
    reward: Reward | None = None
    transcript: Transcript = field(default_factory=Transcript)
    conversation: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    calls: CallFormat | None = None
    turn: int = 0
    peers: Peers = ALONE
    events: list[dict[str, Any]] = field(default_factory=list)
    began: float = field(default_factory=time.time)
    later: Callable[[], Awaitable[Any]] | None = None

    async def run(self) -> None:
        """Alternate observations and replies until the episode ends.

        Raises:
            EnvironmentFault: if the environment fails.
        """
        if self.episode is None:
            limits = self.player.limits
            self.episode = made_episode(self.player.make, self.task, limits.step_s)
            self.seen = await self._ask("start", self.episode.start, Observation)
            self._begin(self.seen)
        while True:
            if self.trunk and self.trunk.parts(len(self.transcript.turns), self.seen.branch):
                self.trunk.split(self._copy)
            action, rest = await self._reply(self.seen.stops)
            answer: Observation | End = await self._ask(
                "step", partial(self.episode.step, action), Observation, End
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
            self.seen = answer

    def _copy(self, sample: int) -> _EpisodeState:
        """Copy of the episode so far, which continues as another sample.

        Raises:
            EnvironmentFault: the environment cannot be copied.
        """
        try:
            episode = copy.deepcopy(self.episode)
        except Exception as error:  # boundary: a failed environment is data
            raise EnvironmentFault(
                f"the episode cannot be copied for a branch ({one_line(error)}): give its class"
                " `__deepcopy__`, or set rollout.branches = 1"
            ) from error
        return replace(
            self,
            sample=sample,
            trunk=None,
            branch=(self.sample, len(self.transcript.tokens)),
            episode=episode,
            transcript=copy.deepcopy(self.transcript),
            events=[*self.events],
        )

    async def close(self) -> None:
        """Close the environment's episode. A failure is recorded as an event."""
        if not isinstance(self.episode, Closing):
            return
        try:
            await in_time(self.episode.close, self.player.limits.step_s or CLOSE_S, "close")
        # Boundary: the episode is over, and its reward stands.
        except Exception as error:  # noqa: BLE001
            self.events.append({"kind": "close_failed", "error": one_line(error)})

    def trajectory(self) -> Trajectory:
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
            opened=self.player.renderer.opened(self.prompt) or self.task.prefill,
            environment=self.player.environment,
            events=tuple(self.events),
            started=self.began,
            ended=time.time(),
            branch=self.branch,
        )

    async def _ask(self, name: str, call: Callable[[], Awaitable[Any]], *kinds: type[Any]) -> Any:
        """Answer of the environment.

        Args:
            name: name of the method, for messages.
            call: calls `start`, or `step` with an action.
            kinds: accepted types of the answer.

        Raises:
            EnvironmentFault: the environment raised an error, took too long, or returned a
                malformed answer.
        """
        player = self.player
        label = f"{name} {self.task.id} #{self.sample}"
        try:
            with player.timeline.checking(label) if player.environment else nullcontext():
                given = await in_time(call, player.limits.step_s, name)
        except EnvironmentFault:
            raise
        except Exception as error:  # boundary: a failed environment is data
            raise EnvironmentFault(one_line(error)) from error
        if not isinstance(given, kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise EnvironmentFault(f"`{name}` returned {type(given).__name__}, not {names}")
        if isinstance(given, Observation):
            check_observation(given)
            # The environment may go on with its lists of messages.
            messages, tools = own_copy((tuple(given.messages), tuple(given.tools)))
            return replace(given, messages=messages, tools=tools)
        return given

    def _begin(self, seen: Observation) -> None:
        """Write the first prompt.

        Raises:
            EnvironmentFault: the prompt cannot be rendered, or leaves no room for a reply.
            UserError: there are tools, but the format of the model's tool calls is not known.
        """
        renderer, said, prompt = self.player.renderer, seen.messages or seen.text, self.prompt
        self.conversation = seen.messages or ({"role": "user", "content": seen.text},)
        self.tools = seen.tools
        self.calls = renderer.call_format if self.tools else None
        most = self.player.limits.tokens
        check_start(renderer.least_tokens(observation_text(self.conversation)), most, "at least ")
        try:
            if not (said == self.task.prompt and isinstance(self.episode, OneTurn)):
                prompt = renderer.encode_episode(self.task, said, self.tools)
        except (RenderError, UserError) as error:
            raise EnvironmentFault(one_line(error)) from error
        check_start(len(prompt), most)
        self.prompt = prompt
        self.transcript.write(self.prompt, PROMPT * len(self.prompt))
        self.turn = len(self.prompt)
        self._record(seen.events)

    def _room(self, length: int) -> int:
        """Tokens that may follow a sequence of this length."""
        limits = self.player.limits
        most = limits.tokens
        if limits.after is not None:
            most = min(most, len(self.prompt) + limits.after)
        return most - length

    async def _reply(self, stops: Sequence[str]) -> tuple[Action, str]:
        """Sample one reply and write it to the transcript.

        Args:
            stops: strings that end the reply, besides those of the player.

        Returns:
            The action, and the text of the reply after the action's text: the stop string, and
            the characters of the last token after it.
        """
        player, tokens, params = self.player, list(self.transcript.tokens), self.params
        room = self._room(len(tokens))
        every = tuple(dict.fromkeys((*player.stops, *stops)))
        sampled = await player.generator.generate(
            tokens,
            params if room >= params.max_tokens else replace(params, max_tokens=room),
            SampleKey(self.task.id, self.sample, origin=len(self.prompt)),
            stops=every,
            # Episodes with more turns come first. Their keys and values are still in the cache,
            # and are freed when the episode ends.
            priority=len(self.transcript.turns),
        )
        whole = player.renderer.decode(sampled.tokens)
        text = whole if sampled.text is None else sampled.text
        rest = whole[len(text) :]
        found = [stop for stop in every if rest.startswith(stop)]
        player.meter.count(len(tokens), sampled)
        record_reply(player.timeline, self.task.id, self.sample, sampled)
        if player.limits.turns == 1:  # otherwise the episode continues after the reply
            self.peers = sampled.peers
        self.transcript.reply(sampled, text)
        return self._action(text, sampled.finish_reason, min(found, key=len, default="")), rest

    def _action(self, text: str, reason: FinishReason, stopped_by: str) -> Action:
        if self.calls is None:
            return Action(text, reason, stopped_by)
        opened = self.player.renderer.opened(self.transcript.tokens[: self.turn])
        read = read_reply(self.calls.parser(self.tools, opened), text)
        return Action(text, reason, stopped_by, read.calls, read.malformed, read.content)

    def _note(self, answer: Observation | End) -> None:
        """Record the reward, tool errors and events of the last reply."""
        before = len(self.events)
        self._record(answer.events)
        reward, failed_calls = checked_turn(answer)
        self.transcript.credit(reward, failed_calls, len(self.events) - before)

    def _record(self, events: Sequence[Mapping[str, Any]]) -> None:
        try:
            self.events += [json.loads(json.dumps(dict(e), allow_nan=False)) for e in events]
        except (TypeError, ValueError, RecursionError) as error:
            raise EnvironmentFault(f"an event is not JSON: {one_line(error)}") from error

    def _end(self, end: End) -> None:
        self.reward = checked_end(end, self.transcript.provenance)
        self.later = end.later
        reason = self.transcript.turns[-1].finish_reason
        self.outcome = reason if end.outcome == "ended" and reason != "stop" else end.outcome

    def _cut(self, outcome: Outcome) -> None:
        """End the episode at a limit. Its reward is the sum of the rewards of its turns."""
        self.outcome, self.reward = outcome, Reward(0.0)

    def _observe(self, seen: Observation, rest: str) -> bool:
        """Write an observation after the last reply.

        Args:
            seen: the observation.
            rest: text of the reply after the action's text, see `_reply`.

        Returns:
            False if no reply fits after the observation, which is then not written.
        """
        tokens, renderer = self.transcript.tokens, self.player.renderer
        said = tokens[self.turn :]
        text = seen.text or observation_text(seen.messages)
        # Tokenizing a text of some megabytes would block all episodes for seconds.
        if self._room(len(tokens) + renderer.least_tokens(text)) < 1:
            return False
        try:
            suffix = (
                renderer.suffix_text(said, seen.text)
                if seen.text
                else renderer.suffix(
                    self.conversation, said, seen.messages, self.tools, self.task.template_args
                )
            )
        except RenderError as error:
            raise EnvironmentFault(one_line(error)) from error
        if self._room(len(tokens) + len(suffix.tokens)) < 1:
            return False
        self.transcript.write(suffix.tokens, suffix.provenance, rest + text)
        if seen.messages:
            self.conversation, self.turn = suffix.conversation, len(tokens)
        return True


def record_reply(timeline: Timeline, task: str, sample: int, reply: Sampled) -> None:
    """Add the span of a reply, from its admission to its last token."""
    if reply.started:
        name, ended = f"{task} #{sample}", reply.started + reply.seconds
        timeline.add(f"sampler {reply.sampler}", name, reply.started, ended, len(reply.tokens))
