"""Examples of preference training: each is a prompt with its graded completions."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from ..controller.stream import task_stream
from ..data.comparison_forms import Kind
from ..data.comparisons import Comparison
from ..data.task_set import TaskSet
from ..errors import UserError
from ..recipe.schema import ComparisonsConfig
from ..renderer.conversation import encode_conversation, reply_notes
from ..renderer.renderer import Renderer
from ..types import Group, Message, Reward, Task, Trajectory


@dataclass(frozen=True)
class _Completion:
    """Tokens of a completion, its grade, and whether its end was cut."""

    tokens: array[int]
    grade: float
    cut: bool


@dataclass(frozen=True)
class _Stored:
    """Tokens of a comparison. The prompt is the same for all completions."""

    prompt: array[int]
    completions: tuple[_Completion, ...]


class PreferenceExamples:
    """Comparisons, shuffled by seed in every epoch. Fulfils `stages.examples.Examples`.

    A completion is preferred to another of its group exactly if its reward is larger. All
    comparisons are encoded at the start, so that one that is too long ends the run before the first
    step.

    Args:
        comparisons: from `data.comparisons`.
        renderer: with the tokenizer of the policy.
        config: the recipe's [comparisons] section.
        examples_per_step: comparisons per step.
        context: longest sequence of the model, in tokens.
        overlong: `data.overlong`: "error", or "drop" to leave out longer comparisons.
        seed: seed of the order.

    Attributes:
        heldout: held-out comparisons.
        notes: messages for the user.
        fingerprint: hash of the tokens and grades of all comparisons that are trained.
        heldout_bytes: 0.
        steps_per_epoch: steps of a pass over the comparisons. 0 if sources are drawn by weight.
        sampled: True if some comparison says which weights sampled it.
        unpaired: True if some group has one completion, whose reward says whether it is liked.
        ranked: True if some group has more than two completions.
        cut_frac: share of the training pairs with a side whose end was cut (of completions, if
            there are no pairs).

    Raises:
        UserError: a comparison cannot be encoded or is too long, or none is left.
    """

    heldout_bytes = 0

    def __init__(
        self,
        comparisons: TaskSet,
        renderer: Renderer,
        config: ComparisonsConfig,
        *,
        examples_per_step: int,
        context: int,
        overlong: str,
        seed: int,
    ) -> None:
        if config.max_tokens > context:
            raise UserError(
                f"comparisons.max_tokens = {config.max_tokens} is more than the model's context of"
                f" {context} tokens: lower it, or set 0"
            )
        self.notes = list(comparisons.notes)
        self._renderer, self._cuts, self._overlong = renderer, config.truncate, overlong
        self._limit = config.max_tokens or context
        self._stored = self._encode(comparisons.train, "training")
        heldout = self._encode(comparisons.heldout, "held-out")
        self.heldout: Sequence[Group] = [
            _group(task, heldout[task.id]) for task in comparisons.heldout if task.id in heldout
        ]
        kept = [task for task in comparisons.train if task.id in self._stored]
        for name in comparisons.weights.keys() - {task.source for task in kept}:
            raise UserError(
                f"data.sources: no comparison of {name!r} is left to train on, see the limit of"
                f" {self._limit} tokens. Raise comparisons.max_tokens, or leave the source out"
            )
        if len(kept) < examples_per_step and not comparisons.weights:
            self.notes.append(
                f"{examples_per_step} comparisons per step are asked for, but there are only"
                f" {len(kept)}: every step trains on all of them"
            )
        self.sampled = any(isinstance(task, Comparison) and task.model for task in kept)
        self.unpaired = any(len(one.completions) == 1 for one in self._stored.values())
        self.ranked = any(len(one.completions) > 2 for one in self._stored.values())
        self.cut_frac = _cut_frac(self._stored.values())
        digest = hashlib.sha256()
        for one in self._stored.values():
            digest.update(one.prompt.tobytes())
            for completion in one.completions:
                digest.update(completion.tokens.tobytes() + repr(completion.grade).encode())
        self.fingerprint = digest.hexdigest()
        self._kept = kept
        self._stream = task_stream(kept, examples_per_step, seed, comparisons.weights)
        self.steps_per_epoch = self._stream.steps_per_epoch

    def groups(self, step: int) -> list[Group]:
        """Comparisons of a step, counted from 1. They depend on the seed and the step alone."""
        return [_group(task, self._stored[task.id]) for task in self._stream(step)]

    def everything(self) -> Iterator[Group]:
        """All comparisons that are trained, each once."""
        return (_group(task, self._stored[task.id]) for task in self._kept)

    def _encode(self, tasks: Sequence[Task], which: str) -> Mapping[str, _Stored]:
        """Tokens by id of the comparison. Notes what is left out."""
        made: dict[str, _Stored] = {}
        counts: Counter[Kind] = Counter()
        changed: Counter[str] = Counter()
        for task in tasks:
            assert isinstance(task, Comparison)
            whole = self._tokens(task, changed)
            fitting = self._fitted(task, whole)
            if fitting is None:
                counts["overlong"] += 1
                continue
            distinct = _distinct(fitting)
            if len(whole.completions) > 1 and len({c.grade for c in distinct.completions}) < 2:
                counts["equal" if fitting is whole else "equal_after_cut"] += 1
                continue
            counts["duplicate"] += len(fitting.completions) - len(distinct.completions)
            made[task.id] = distinct
        limit = f"{self._limit} tokens (comparisons.max_tokens, or the model's context)"
        whys: dict[Kind, str] = {
            "overlong": f"they have more than {limit}",
            "equal": "their completions have the same tokens",
            "equal_after_cut": f"their completions are equal up to the limit of {limit}. Raise it",
        }
        notes = [
            f"{counts[kind]} of {len(tasks)} {which} comparisons are left out: {why}"
            for kind, why in whys.items()
            if counts[kind]
        ]
        if tasks and not made:
            raise UserError(f"no {which} comparison is left: {notes[0]}")
        if counts["duplicate"]:
            notes.append(
                f"{counts['duplicate']} completions of {which} comparisons are left out: they have"
                " the tokens of an earlier one of their prompt"
            )
        if share := _cut_frac(made.values()):
            notes.append(
                f"{share:.1%} of the {which} pairs have a completion whose end is cut at {limit}"
            )
        self.notes += notes + reply_notes(changed, f"{which} comparisons")
        return made

    def _tokens(self, task: Comparison, changed: Counter[str]) -> _Stored:
        """Tokens of a comparison. Each completion follows the prompt that sampling gives it.

        Args:
            task: the comparison.
            changed: its counts for `reply_notes` are added.

        Raises:
            UserError: it cannot be encoded, or the tokens of its prompt depend on the completion.
        """
        prompts, found = [], []
        for reply, grade in zip(task.completions, task.grades, strict=True):
            encoded = encode_conversation(self._renderer, _answered(task, reply), "last")
            changed.update(encoded.changed)
            (example,) = encoded.examples
            ((start, stop),) = example.spans
            prompts.append(example.tokens[:start])
            found.append(_Completion(array("i", example.tokens[start:stop]), grade, cut=False))
        if any(prompt != prompts[0] for prompt in prompts):
            raise UserError(
                f"task {task.id}: the tokens of the prompt depend on the completion. Use another"
                " template (model.chat_template = FILE)"
            )
        return _Stored(array("i", prompts[0]), tuple(found))

    def _fitted(self, task: Comparison, stored: _Stored) -> _Stored | None:
        """The comparison, perhaps with completions cut at their end. None: it is left out.

        Raises:
            UserError: it is too long, and neither cut nor left out.
        """
        longest = len(stored.prompt) + max(len(one.tokens) for one in stored.completions)
        room = self._limit - len(stored.prompt)
        if longest <= self._limit:
            return stored
        if self._cuts and room > 0:
            cut = [
                replace(one, tokens=one.tokens[:room], cut=len(one.tokens) > room)
                for one in stored.completions
            ]
            return replace(stored, completions=tuple(cut))
        if self._overlong == "drop":
            return None
        raise UserError(
            f"task {task.id}: the prompt has {len(stored.prompt)} tokens, with its longest"
            f" completion {longest}, but only {self._limit} fit (comparisons.max_tokens, or the"
            " model's context). Set data.overlong = 'drop' to leave out such comparisons"
            + ("" if room <= 0 else ", or comparisons.truncate = true to cut their completions")
        )


def _answered(task: Comparison, reply: str | Message) -> Task:
    """The task with one of its completions, as SFT reads it."""
    if isinstance(reply, str):
        return replace(task, trace=reply)
    return replace(task, prompt=(*task.prompt, reply))


def _distinct(stored: _Stored) -> _Stored:
    """The comparison with the first of completions that have the same tokens, at their mean grade.

    Completions may differ only in what `comparisons.truncate` has cut.
    """
    equal: dict[bytes, list[_Completion]] = {}
    for one in stored.completions:
        equal.setdefault(one.tokens.tobytes(), []).append(one)
    found = [replace(same[0], grade=fmean(c.grade for c in same)) for same in equal.values()]
    return replace(stored, completions=tuple(found))


def _cut_frac(stored: Iterable[_Stored]) -> float:
    """Share of pairs with a side that was cut, or of completions if there are no pairs."""
    cut = [
        better.cut or worse.cut
        for one in stored
        for better in one.completions
        for worse in one.completions
        if better.grade > worse.grade or len(one.completions) == 1
    ]
    return sum(cut) / len(cut) if cut else 0.0


def _group(task: Task, stored: _Stored) -> Group:
    """The comparison as episodes of one turn. Completions have the provenance of sampled ones."""
    return Group(
        task,
        [
            Trajectory.one_turn(
                task.id,
                number,
                stored.prompt.tolist(),
                one.tokens.tolist(),
                [0.0] * len(one.tokens),
                [-1] * len(one.tokens),
                "length" if one.cut else "stop",
                reward=Reward(one.grade),
            )
            for number, one in enumerate(stored.completions)
        ],
    )
