"""Examples of an SFT stage: conversations with the loss on the replies of the assistant."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..controller.stream import task_stream
from ..data.task_set import TaskSet, drawn_tasks
from ..errors import UserError
from ..recipe.schema import SftConfig
from ..renderer.conversation import Example, encode_conversation, reply_notes
from ..renderer.renderer import Renderer
from ..types import OBSERVATION, PROMPT, SAMPLED, Group, Reward, Task, Trajectory, Turn


@dataclass(frozen=True)
class _Stored:
    """An example in 4 bytes per token: a list would take about 36."""

    tokens: array[int]
    spans: tuple[tuple[int, int], ...]


class ConversationExamples:
    """Examples of conversations, shuffled by seed in every epoch.

    All conversations are encoded at the start, so that one that is too long or that the template
    refuses ends the run before the first step.

    Args:
        tasks: conversations from `data.conversations`.
        renderer: with the tokenizer of the policy.
        sft: the recipe's [sft] section.
        context: longest sequence of the model, in tokens.
        overlong: `data.overlong`: "error", or "drop" to leave out longer conversations.
        seed: seed of the order.

    Attributes:
        heldout: held-out examples, each a group with one trajectory.
        notes: messages for the user.
        fingerprint: hash of the tokens of all conversations that are trained.
        heldout_bytes: 0.
        steps_per_epoch: steps of a pass over the conversations. 0 if sources are drawn by weight.

    Raises:
        UserError: a conversation cannot be encoded or is too long, or none is left.
    """

    heldout_bytes = 0

    def __init__(
        self,
        tasks: TaskSet,
        renderer: Renderer,
        sft: SftConfig,
        *,
        context: int,
        overlong: str,
        seed: int,
    ) -> None:
        if sft.max_tokens > context:
            raise UserError(
                f"sft.max_tokens = {sft.max_tokens} is more than the model's context of {context}"
                " tokens: lower it, or set 0"
            )
        if sft.tasks > len(tasks.train):
            raise UserError(
                f"sft.tasks = {sft.tasks}, but there are only {len(tasks.train)} conversations to"
                " train on: lower it, or set 0 for all"
            )
        self.notes = list(tasks.notes)
        self._renderer, self._sft = renderer, sft
        self._limit, self._overlong = sft.max_tokens or context, overlong
        chosen = drawn_tasks(tasks.train, sft.tasks, seed)
        self._stored = self._encode(chosen, "training")
        heldout = self._encode(tasks.heldout, "held-out")
        self.heldout: Sequence[Group] = [
            group
            for task in tasks.heldout
            if task.id in heldout
            for group in _groups(task, heldout[task.id])
        ]
        kept = [task for task in chosen if task.id in self._stored]
        for name in tasks.weights.keys() - {task.source for task in kept}:
            raise UserError(
                f"data.sources: no conversation of {name!r} is left to train on: all have more than"
                f" {self._limit} tokens. Raise sft.max_tokens, or leave the source out"
            )
        if len(kept) < sft.examples_per_step and not tasks.weights:
            self.notes.append(
                f"sft.examples_per_step = {sft.examples_per_step}, but there are only {len(kept)}"
                " conversations: every step trains on all of them"
            )
        digest = hashlib.sha256()
        for stored in self._stored.values():
            for one in stored:
                digest.update(one.tokens.tobytes() + repr(one.spans).encode())
        self.fingerprint = digest.hexdigest()
        self._stream = task_stream(kept, sft.examples_per_step, seed, tasks.weights)
        self.steps_per_epoch = self._stream.steps_per_epoch

    def groups(self, step: int) -> list[Group]:
        """Examples of a step, counted from 1. They depend on the seed and the step alone.

        A conversation that its template splits gives several groups.
        """
        return [
            group for task in self._stream(step) for group in _groups(task, self._stored[task.id])
        ]

    def _encode(self, tasks: Sequence[Task], which: str) -> Mapping[str, list[_Stored]]:
        """Examples by id of their task. Adds notes about what the template and the limit change."""
        made: dict[str, list[_Stored]] = {}
        changed: Counter[str] = Counter()
        split = parts = 0
        for task in tasks:
            encoded = encode_conversation(self._renderer, task, self._sft.train_on)
            longest = max(len(example.tokens) for example in encoded.examples)
            if longest > self._limit:
                self._refuse(task, longest)
                continue
            made[task.id] = [_store(example) for example in encoded.examples]
            split += len(encoded.examples) > 1
            parts += len(encoded.examples) if len(encoded.examples) > 1 else 0
            changed.update(encoded.changed)
        if tasks and not made:
            raise UserError(
                f"no {which} conversation is left: all {len(tasks)} have more than {self._limit}"
                " tokens. Raise sft.max_tokens, or use a model with a longer context"
            )
        found = {
            f"{len(tasks) - len(made)} of {len(tasks)} {which} conversations are left out: they"
            f" have more than {self._limit} tokens (sft.max_tokens, or the model's context)": len(
                tasks
            )
            - len(made),
            f"{split} {which} conversations are trained as {parts} examples: the chat template"
            " or the tokenizer writes earlier replies differently, and each reply follows the"
            " prompt that sampling gives it": split,
        }
        self.notes += [note for note, count in found.items() if count]
        self.notes += reply_notes(changed, f"{which} conversations")
        return made

    def _refuse(self, task: Task, longest: int) -> None:
        if self._overlong == "error":
            raise UserError(
                f"task {task.id}: the conversation has {longest} tokens, but only {self._limit} fit"
                " (sft.max_tokens, or the model's context). Set data.overlong = 'drop' to leave out"
                " such conversations"
            )


def _store(example: Example) -> _Stored:
    return _Stored(array("i", example.tokens), example.spans)


def _groups(task: Task, examples: Sequence[_Stored]) -> list[Group]:
    return [Group(task, [_trajectory(task, at, one)]) for at, one in enumerate(examples)]


def _trajectory(task: Task, number: int, example: _Stored) -> Trajectory:
    """The example as an episode. Its trained tokens have the provenance of sampled ones.

    Args:
        task: the conversation.
        number: index of the example in the conversation.
        example: tokens and trained spans.
    """
    length = len(example.tokens)
    letters = [PROMPT] * example.spans[0][0]
    letters += [OBSERVATION] * (length - len(letters))
    for start, stop in example.spans:
        letters[start:stop] = SAMPLED * (stop - start)
    return Trajectory(
        task_id=task.id,
        sample=number,
        tokens=example.tokens.tolist(),
        provenance="".join(letters),
        logp=[0.0] * length,
        version=[-1] * length,
        turns=tuple(Turn(start, stop) for start, stop in example.spans),
        reward=Reward(0.0),
    )
