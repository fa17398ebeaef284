"""The judge: asks questions, reads and caches verdicts, and stays within its budget."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from sixfold.environment.answer_part import answer_part
from sixfold.environment.grade import Grade
from sixfold.types import Task

from .client import JudgeClient, JudgeFailed, JudgeReply
from .counts import Counts, Meter, Moments
from .defence import refusal, shown
from .family import family_of
from .local_model import LocalModel
from .prompts import Messages, Question
from .reply import Unreadable, read_reply
from .settings import JudgeSettings
from .spending import Cost, Spending, cost_of, estimated_tokens
from .store import AnswerStore

ATTEMPTS = 2
"""Maximum requests per question. After an unreadable reply, the judge is reminded once."""

END_S = 10.0
"""Seconds to wait for running requests when a run ends: they cost money in any case."""

QUESTION_CHARACTERS = 32_000
"""Maximum characters of a question or a reference answer that the judge sees."""


class Judge:
    """A judging model with its cache, budget and counts. Use it in one event loop at a time.

    Args:
        share: part of the budgets that this process may use.

    Attributes:
        spending: cost so far.
        counts: counts since the last `take`.
        lengths: length and value of each judged completion since the last `take`.

    Raises:
        UserError: if the API key is missing or invalid.
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
        """Start to load a local model, without waiting for it."""
        if self._local:
            self._local.start()

    def read(self, folder: Path) -> None:
        """Read the answers in a folder. Nothing is written there."""
        self._store.read(folder)

    def keep_in(self, folder: Path, name: str = "answers.jsonl") -> None:
        """Read the answers in a folder, and write new ones there.

        Args:
            name: file of this process.
        """
        self.spending.spent += self._store.keep_in(folder, name)

    async def ask(self, question: Question) -> dict[str, Any]:
        """Ask a question. Equal questions are asked once, even if they arrive at the same time.

        Returns:
            The fields of the judge's reply, without the nonce.

        Raises:
            JudgeFailed: if the judge gives no verdict.
            BudgetSpent: if the budget is used up.
        """
        self.counts.asked += 1
        try:
            return await self._answer(question)
        except JudgeFailed:
            self.counts.failed += 1
            raise

    async def settled(self) -> None:
        """Wait until the requests that were sent have ended, so that their answers are stored."""
        if sent := [self._running[key] for key in self._sent]:
            await asyncio.wait(sent, timeout=END_S)

    def refuse(self, text: str, task: Task, known: tuple[str, ...] = ()) -> str:
        """Check whether an answer is refused without asking the judge.

        Args:
            text: answer part of the completion.
            known: texts of the criteria or principles.

        Returns:
            The reason of the refusal, or "" if the judge must be asked.
        """
        self.counts.judged += 1
        why = refusal(text, task.prompt_text, reference_text(task), known)
        self.counts.refused += bool(why)
        return why

    def shown(self, text: str) -> str:
        """A completion, cleaned and shortened for the judge (`defence.shown`)."""
        return shown(text, self.settings.max_chars)

    def graded(self, value: float, text: str, reason: str) -> Grade:
        """Grade of a judged completion. It is counted in `judge/length_corr`.

        Args:
            text: answer part of the completion.
        """
        self.lengths.add(float(len(text)), value)
        passed = value >= self.settings.solved_at - 1e-9
        return Grade(value, "passed" if passed else "wrong_answer", reason)

    def take(self) -> Meter:
        """Return the counts since the last call, and reset them."""
        taken = Meter(self.counts, self.lengths)
        taken.counts.repeated, self._client.repeated = self._client.repeated, 0
        taken.counts.usd_total = self.spending.spent.usd
        taken.counts.calls_total = self.spending.spent.calls
        self.counts, self.lengths = Counts(), Moments()
        return taken

    def close(self) -> None:
        """Wait for running requests, close the file of answers, and end a local model.

        Call this outside the judge's event loop. A second call does nothing.
        """
        if self._sent and self._loop and self._loop.is_running():
            waiting = asyncio.run_coroutine_threadsafe(self.settled(), self._loop)
            with suppress(TimeoutError):
                waiting.result(END_S + 1)
        self._store.close()
        if self._local:
            self._local.close()

    async def _answer(self, question: Question) -> dict[str, Any]:
        """The stored answer to a question, or that of a request which equal questions share."""
        key = self._key(question)
        if known := self._store.get(key):
            self.counts.cached += 1
            return known
        while running := self._running.get(key):
            await asyncio.wait([running])
            if not running.cancelled():  # it is cancelled if its own caller was cancelled
                answer = running.result()
                self.counts.cached += 1
                return answer
        self._loop = asyncio.get_running_loop()
        self._running[key] = task = self._loop.create_task(self._ask_until_readable(key, question))
        task.add_done_callback(lambda _: self._forget(key))
        try:
            # A sent request costs money: store its answer even if the caller is cancelled.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if key not in self._sent:
                task.cancel()
            raise

    def _forget(self, key: str) -> None:
        """Forget the task of a question."""
        task = self._running.pop(key)
        self._sent.discard(key)
        if not task.cancelled():
            task.exception()  # mark it as retrieved: the caller may have been cancelled

    async def _ask_until_readable(self, key: str, question: Question) -> dict[str, Any]:
        """Ask until a reply can be read. Every reply is stored with its cost."""
        problem = ""
        for _ in range(ATTEMPTS):
            nonce = secrets.token_hex(8)
            answer: dict[str, Any] | None = None
            messages = question.messages(nonce, problem)
            schema = question.schema_for(nonce) if self._local else question.schema
            said, paid = await self._sent_request(key, messages, schema)
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

    async def _sent_request(
        self, key: str, messages: Messages, schema: dict[str, Any]
    ) -> tuple[JudgeReply, Cost]:
        """Send one request within the budget. Returns the reply and its cost."""
        prompt = "".join(message["content"] for message in messages)
        reserved = paid = Cost()

        def sending() -> None:
            # Not earlier: questions that wait for a slot must not use up the budget.
            nonlocal reserved
            reserved = self.spending.reserve(prompt)
            self._sent.add(key)

        try:
            said = await self._client.say(messages, schema, sending)
            paid = self._cost(prompt, said)
        finally:
            self.spending.settle(reserved, paid)
        return said, paid

    def _cost(self, prompt: str, said: JudgeReply) -> Cost:
        given, made = said.prompt_tokens, said.completion_tokens
        return cost_of(
            self.settings,
            estimated_tokens(prompt) if given is None else given,
            estimated_tokens(said.content) if made is None else made,
        )

    def _key(self, question: Question) -> str:
        """Hash of the model, the temperature, the prompt without nonce, and the reply's schema."""
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
    """The task's prompt for the judge. A chat is shown with all messages and their roles."""
    if isinstance(task.prompt, str):
        return shown(task.prompt, QUESTION_CHARACTERS)
    if len(task.prompt) == 1:
        return shown(task.prompt_text, QUESTION_CHARACTERS)
    lines = [f"{message['role']}: {message['content']}" for message in task.prompt]
    return shown("\n".join(lines), QUESTION_CHARACTERS)


def reference_text(task: Task) -> str:
    """The task's reference answer as text. Several are separated by "or: ". "" without one."""
    if task.answer is None:
        return ""
    several = task.answer if isinstance(task.answer, list | tuple) else [task.answer]
    return shown("\nor: ".join(map(str, several)), QUESTION_CHARACTERS)


def answer_text(completion: str) -> str:
    """The judged part of a completion: the text after its last thought."""
    return answer_part(completion)


def failed(error: JudgeFailed) -> Grade:
    """Grade of a completion without a verdict: a failed check."""
    return Grade(None, "infrastructure_error", str(error))
