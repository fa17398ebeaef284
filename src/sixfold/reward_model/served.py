"""Reward models that servers score with, over HTTP.

`sixfold serve REWARD_MODEL` gets a whole task in one request, POST /v1/rewards, and gives the
rewards of a reward model in the run. vLLM gets POST /classify: for a prompt that is a plain text,
all texts of the task in one request; for a chat, one conversation each, which it renders by the
chat template of the model. It gives the score of the head, without its activation.

The end token of a completion is missing in whole texts: only the tokenizer of the policy knows how
it is spelled. In conversations the template of the server ends the turn.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..http_client import LONGEST_WAIT_S, HttpClient, NoReply, Patience, Reply, request_again
from ..recipe.schema import RewardScoringConfig
from ..recipe.schema.backend import KEY_VARIABLE
from .asked import Asked

EXACT = "reward_model"
"""Key of a model in /v1/models that Sixfold's server of a reward model sets: hash of its folder."""
MAX_BYTES = 1 << 24
"""Maximum size of an answer."""
CONNECTIONS = 16
"""Most requests to one server at a time."""
MAX_IDS = 100_000
"""Most token ids in one request, unless a single completion has more. A server refuses large ones.
"""
_SHOWN_BYTES = 300
_Ask = Callable[[dict[str, Any]], Coroutine[Any, Any, list[float]]]
_BEGINNING = r"(<[^<>\s]+>|\[\w+\])*\s*"
"""Names of special tokens, such as <s>, <|begin_of_text|> and [CLS]."""


class Refused(NoReply):
    """A server refuses a request, such as one with a text beyond its model's context."""


class ServedModels:
    """Client of the servers of reward models.

    Args:
        urls: their addresses.
        config: the recipe's [environment.reward_model] section.
    """

    def __init__(self, urls: Sequence[str], config: RewardScoringConfig) -> None:
        self._servers = [ServedModel(url, config) for url in urls]

    async def rewards(self, asked: Asked) -> list[Tensor]:
        """[K] rewards by each model, float64. Raises as `ServedModel.rewards`."""
        found = await asyncio.gather(*(server.rewards(asked) for server in self._servers))
        return [torch.tensor(values, dtype=torch.float64) for values in found]


class ServedModel:
    """Client of one server.

    Args:
        url: its address.
        config: the recipe's [environment.reward_model] section.
    """

    def __init__(self, url: str, config: RewardScoringConfig) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        # The waits of all attempts. A server may ask for longer ones: they end the request.
        longest = (config.retries + 1) * (config.timeout_s + LONGEST_WAIT_S)
        self._patience = Patience(config.retries, config.timeout_s, longest)
        self._http = HttpClient(MAX_BYTES)
        key = os.environ.get(KEY_VARIABLE, "").strip()
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {key}"} if key else {}
        self._model: dict[str, Any] | None = None
        self._works = False
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def model(self) -> dict[str, Any]:
        """Entry of the served model in /v1/models.

        Raises:
            UserError: if no server answers, or it serves a policy.
        """
        if self._model is None:
            try:
                answer = await self._ask("GET", "/v1/models", {})
            except NoReply as error:
                raise UserError(
                    f"environment.rewards: {error}. Start a server of a reward model: sixfold serve"
                    " FOLDER"
                ) from error
            try:
                found = answer["data"][0]
                _ = found["id"]
            except (KeyError, IndexError, TypeError) as error:
                raise self._wrong("lists no model at /v1/models") from error
            if found.get("owned_by") == "sixfold" and EXACT not in found:
                raise self._wrong(f"serves '{found['id']}', which is no reward model")
            self._model = found
        return self._model

    async def identity(self) -> str:
        """Address, and id and hash of the model as far as the server names them."""
        model = await self.model()
        return f"{self._url} {model['id']} {model.get(EXACT, '')}"

    async def rewards(self, asked: Asked) -> list[float]:
        """K rewards. A completion that does not fit the model's context has NaN, if others fit.

        Raises:
            UserError: if no server answers, if its model is no reward model, or if it does not
                answer with a number for each completion.
            NoReply: if the server, which has answered before, fails.
        """
        model = await self.model()
        if EXACT in model:
            bodies = [{"model": model["id"], **asdict(part)} for part in _parts(asked)]
            return await self._together(self._exact, bodies)
        plain = {"model": model["id"], "use_activation": False, "activation": False}
        if not _is_plain(asked):
            chats = [self._chat(asked, index) for index in range(len(asked.completions))]
            return await self._together(self._classified, [plain | chat for chat in chats])
        texts = [f"{asked.prompt}{text}" for text in asked.completions]
        try:
            return await self._classified(plain | {"input": texts})
        except Refused:  # perhaps because of one text
            alone = [plain | {"input": [text]} for text in texts]
            return await self._together(self._classified, alone)

    async def _together(self, ask: _Ask, bodies: Sequence[dict[str, Any]]) -> list[float]:
        """Rewards of requests, of which the server may refuse some: NaN.

        Raises:
            Refused: if it refuses all.
        """
        parts = await asyncio.gather(*map(ask, bodies), return_exceptions=True)
        refused = [part for part in parts if isinstance(part, Refused)]
        if len(refused) == len(parts):
            raise refused[0]
        found: list[float] = []
        for body, part in zip(bodies, parts, strict=True):
            if isinstance(part, BaseException):
                if not isinstance(part, Refused):
                    raise part
                part = [math.nan] * _count(body)
            found += part
        return found

    async def _exact(self, body: dict[str, Any]) -> list[float]:
        answer = await self._ask("POST", "/v1/rewards", body)
        return self._numbers(answer, "rewards", _count(body))

    async def _classified(self, body: dict[str, Any]) -> list[float]:
        return self._scores(await self._ask("POST", "/classify", body), _count(body))

    def _chat(self, asked: Asked, index: int) -> dict[str, Any]:
        """One completion as a conversation. The turn of one that has not ended stays open."""
        said, begun = asked.prompt, asked.task.prefill
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        reply = {"role": "assistant", "content": begun + asked.completions[index]}
        return {
            "messages": [*(messages[:-1] if begun else messages), reply],
            "add_generation_prompt": False,
            "continue_final_message": not asked.ended[index],
        }

    def _scores(self, answer: Any, count: int) -> list[float]:
        """Scores in an answer of /classify. Of two labels, the second minus the first."""
        try:
            rows = sorted(answer["data"], key=lambda row: int(row["index"]))
            labels = [[float(p) for p in row["probs"]] for row in rows]
            found = [row[0] if len(row) == 1 else row[1] - row[0] for row in labels]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._wrong("does not answer /classify with data[].probs") from error
        if any(len(row) > 2 for row in labels):
            raise self._wrong("serves a classifier with more than two labels")
        return self._numbers({"rewards": found}, "rewards", count)

    def _numbers(self, answer: Any, key: str, count: int) -> list[float]:
        found = answer.get(key) if isinstance(answer, dict) else None
        if (
            not isinstance(found, list)
            or len(found) != count
            or not all(
                value is None or (isinstance(value, int | float) and math.isfinite(value))
                for value in found
            )
        ):
            size = f"{len(found)} rewards" if isinstance(found, list) else "no rewards"
            raise self._wrong(f"answered with {size} for {count} completions, or not with numbers")
        return [math.nan if value is None else float(value) for value in found]

    async def _ask(self, method: str, path: str, body: dict[str, Any]) -> Any:
        """The parsed answer.

        Raises:
            UserError: if the server rejects the request, before it has ever given a reward.
            NoReply: if it fails.
        """
        async with self._slot():
            reply = await request_again(
                self._http,
                method,
                self._url + path,
                json.dumps(body).encode() if body else b"",
                self._headers,
                server=f"the server of a reward model at {self._url}",
                patience=self._patience,
                refusal=self._refusal,
            )
        if reply.status != 200:
            text = self._refusal(reply)
            # Once it works, a scored text itself may cause a refusal, and must not end the run.
            if reply.status in (401, 403, 404, 405) and not self._works:
                raise UserError(
                    f"environment.rewards: {text}. {path} needs a reward model, and a key in"
                    f" {KEY_VARIABLE} if the server has one"
                )
            raise Refused(text) if reply.status in (400, 413, 422) else NoReply(text)
        self._works = self._works or method == "POST"
        try:
            return json.loads(reply.body)
        except ValueError as error:
            raise self._wrong(f"does not answer {path} with JSON") from error

    def _refusal(self, reply: Reply) -> str:
        said = " ".join(reply.body[:_SHOWN_BYTES].decode(errors="replace").split())
        return f"the server at {self._url} answered with status {reply.status}: {said}"

    def _wrong(self, what: str) -> UserError:
        return UserError(
            f"environment.rewards: the server at {self._url} {what}. Give the address of a"
            " server of a reward model, such as sixfold serve FOLDER"
        )

    def _slot(self) -> asyncio.Semaphore:
        """Limits the number of concurrent requests in the running event loop."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(CONNECTIONS)
        return self._slots[1]


def _count(body: Mapping[str, Any]) -> int:
    """Number of completions of a request. One with messages has one."""
    return len(body.get("completions") or body.get("input") or ["messages"])


def _is_plain(asked: Asked) -> bool:
    """True if the policy reads the prompt as it is, after the tokens that begin every text."""
    said, read = asked.prompt, asked.rendered_prompt
    if not isinstance(said, str) or not read.endswith(said):
        return False
    return re.fullmatch(_BEGINNING, read.removesuffix(said)) is not None


def _parts(asked: Asked) -> list[Asked]:
    """The completions in parts of at most `MAX_IDS` token ids."""
    groups: list[list[int]] = []
    size = 0
    for index, ids in enumerate(asked.completion_ids):
        size += len(ids)
        if not groups or size > MAX_IDS:
            groups.append([])
            size = len(asked.prompt_ids) + len(ids)
        groups[-1].append(index)
    return [
        replace(
            asked,
            completions=[asked.completions[i] for i in group],
            completion_ids=[asked.completion_ids[i] for i in group],
            ended=[asked.ended[i] for i in group],
        )
        for group in groups
    ]
