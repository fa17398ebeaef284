"""The judge: asks questions, reads verdicts, remembers them, and keeps to its budget."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...types import Task
from ..answer_part import answer_part
from ..grade import Grade
from .client import JudgeClient, JudgeFailed, Said
from .counts import Counts, Meter, Moments
from .defence import refusal, shown
from .family import family_of
from .local_model import LocalModel
from .prompts import Question
from .reply import Unreadable, read_reply
from .settings import JudgeSettings
from .spending import Cost, Spending, cost_of, estimated_tokens
from .store import AnswerStore

ATTEMPTS = 2
"""Requests per question: a reply that cannot be read is followed by one reminder."""

END_S = 10.0
"""Seconds that requests under way get when a run ends: they are paid for."""

QUESTION_CHARACTERS = 32_000
"""Characters of a question or a reference answer that the judge sees."""


class Judge:
    """One judging model with its cache, budget and counts. Use it in one event loop at a time.

    Args:
        settings: the model and how it is asked.
        share: part of the budgets that this process may use.

    Attributes:
        settings: as given.
        spending: what the judge has cost so far.
        counts: what it has done since `take`.
        lengths: characters of the judged completions against their values, since `take`.

    Raises:
        UserError: if the API key is missing.
    """

    def __init__(self, settings: JudgeSettings, share: float = 1.0) -> None:
        self.settings = settings
        self.spending = Spending(settings, share)
        self.counts = Counts()
        self.lengths = Moments()
        self._local = None if settings.url else LocalModel(settings.model, settings.device)
        self._client = JudgeClient(settings, self._base_url)
        self._store = AnswerStore()
        self._running: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._sent: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def family(self) -> str:
        """Label of the model's family, or "" if it is not known."""
        return self.settings.family or family_of(self.settings.model)

    def start(self) -> None:
        """Start to load a local model, without waiting."""
        if self._local:
            self._local.start()

    def read(self, folder: Path) -> None:
        """Know the answers in a folder, and write nothing there."""
        self._store.read(folder)

    def keep_in(self, folder: Path, name: str = "answers.jsonl") -> None:
        """Use the answers in a folder, and write further ones there.

        Args:
            folder: folder of the answers. It is created.
            name: file of this process.
        """
        self.spending.spent += self._store.keep_in(folder, name)

    async def ask(self, question: Question) -> dict[str, Any]:
        """The fields of the judge's verdict.

        Equal questions are asked once, also if they arrive together.

        Raises:
            JudgeFailed: if the judge gives no verdict.
            BudgetSpent: if the budget is used up.
        """
        self.counts.asked += 1
        key = self._key(question)
        if known := self._store.get(key):
            self.counts.cached += 1
            return known
        while running := self._running.get(key):
            await asyncio.wait([running])
            if not running.cancelled():  # otherwise who asked first does not wait any more
                self.counts.cached += 1
                return running.result()
        self._loop = asyncio.get_running_loop()
        self._running[key] = task = self._loop.create_task(self._asked(key, question))
        task.add_done_callback(lambda _: self._ended(key))
        try:
            # A request that is under way is paid for: its answer is kept also if nobody waits.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if key not in self._sent:
                task.cancel()
            raise
        except JudgeFailed:
            self.counts.failed += 1
            raise

    async def settled(self) -> None:
        """Wait until requests under way have ended, so that their answers are kept."""
        if sent := [self._running[key] for key in self._sent]:
            await asyncio.wait(sent, timeout=END_S)

    def _ended(self, key: str) -> None:
        task = self._running.pop(key)
        self._sent.discard(key)
        if not task.cancelled():
            task.exception()  # who asked may not wait any more

    def refuse(self, text: str, task: Task, known: tuple[str, ...] = ()) -> str:
        """Why the answer in a completion earns nothing without being judged, or "".

        Args:
            text: answer part of the completion.
            task: its task.
            known: texts of the rubric.
        """
        self.counts.judged += 1
        why = refusal(text, task.prompt_text, reference_text(task), known)
        self.counts.refused += bool(why)
        return why

    def shown(self, text: str) -> str:
        """A completion as the judge sees it."""
        return shown(text, self.settings.max_chars)

    def graded(self, value: float, text: str, reason: str) -> Grade:
        """Grade of a judged completion, which counts for `judge/length_corr`.

        Args:
            value: the reward.
            text: answer part of the completion.
            reason: what the judge said.
        """
        self.lengths.add(float(len(text)), value)
        passed = value >= self.settings.solved_at - 1e-9
        return Grade(value, "passed" if passed else "wrong_answer", reason)

    def take(self) -> Meter:
        """Counts since the last call."""
        taken = Meter(self.counts, self.lengths)
        taken.counts.repeated, self._client.repeated = self._client.repeated, 0
        taken.counts.usd_total = self.spending.spent.usd
        taken.counts.calls_total = self.spending.spent.calls
        self.counts, self.lengths = Counts(), Moments()
        return taken

    def close(self) -> None:
        """Keep the answers under way, end a local model, and close the file of answers.

        Call it outside of the judge's event loop. A second call does nothing.
        """
        if self._sent and self._loop and self._loop.is_running():
            waiting = asyncio.run_coroutine_threadsafe(self.settled(), self._loop)
            with suppress(TimeoutError):
                waiting.result(END_S + 1)
        self._store.close()
        if self._local:
            self._local.close()

    async def _asked(self, key: str, question: Question) -> dict[str, Any]:
        """Ask until the reply can be read, and record what each request has cost."""
        problem = ""
        for _ in range(ATTEMPTS):
            nonce = secrets.token_hex(8)
            messages = question.messages(nonce, problem)
            prompt = "".join(message["content"] for message in messages)
            reserved = self.spending.reserve(prompt)
            paid, answer = Cost(), None
            try:
                schema = question.schema_for(nonce) if self._local else question.schema
                said = await self._client.say(messages, schema, lambda: self._sent.add(key))
                paid = self._cost(prompt, said)
            finally:
                self.spending.settle(reserved, paid)
            try:
                found = read_reply(said.content, question, nonce)
                answer = {name: value for name, value in found.items() if name != "nonce"}
            except Unreadable as error:
                self.counts.unreadable += 1
                cut = f"it reached the limit of {self.settings.max_tokens} tokens"
                problem = str(error) if said.complete else cut
            self.counts.pay(paid)
            self._store.add(key, answer, paid)
            if answer is not None:
                return answer
        raise JudgeFailed(
            f"the judge {self.settings.model} gave no verdict: {problem}, {ATTEMPTS} times"
        )

    def _cost(self, prompt: str, said: Said) -> Cost:
        given, made = said.prompt_tokens, said.completion_tokens
        return cost_of(
            self.settings,
            estimated_tokens(prompt) if given is None else given,
            estimated_tokens(said.content) if made is None else made,
        )

    def _key(self, question: Question) -> str:
        """Key of a question: the model, how it is asked, and the prompt without a nonce."""
        settings = self.settings
        asked = (
            settings.model,
            settings.temperature,
            question.messages(""),
            question.schema,
        )
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()

    async def _base_url(self) -> str:
        return await self._local.url() if self._local else self.settings.url


def question_text(task: Task) -> str:
    """The task's prompt as the judge sees it: all messages of a chat."""
    if isinstance(task.prompt, str):
        return shown(task.prompt, QUESTION_CHARACTERS)
    if len(task.prompt) == 1:
        return shown(task.prompt_text, QUESTION_CHARACTERS)
    lines = [f"{message['role']}: {message['content']}" for message in task.prompt]
    return shown("\n".join(lines), QUESTION_CHARACTERS)


def reference_text(task: Task) -> str:
    """The reference answer as text, or several, one per line. "" if the task has none."""
    if task.answer is None:
        return ""
    several = task.answer if isinstance(task.answer, list | tuple) else [task.answer]
    return shown("\nor: ".join(map(str, several)), QUESTION_CHARACTERS)


def answer_text(completion: str) -> str:
    """What is judged of a completion: the text after its last thought."""
    return answer_part(completion)


def failed(error: JudgeFailed) -> Grade:
    """Grade of a completion about which the judge gave no verdict."""
    return Grade(None, "infrastructure_error", str(error))
