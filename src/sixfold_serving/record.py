"""Record of completions as trajectories, and of the rewards of sessions, as JSON lines.

With a record, the completions of an agent that only knows a base_url can be used for training. The
line of a completion is `Trajectory.to_record()` plus fields of the request. The engine's thread
writes it, and passes it to the operating system before the client sees the answer. The event loop
writes the rewards of sessions.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sixfold.engine.sequence import Sequence
from sixfold.errors import UserError
from sixfold.files.appended import AppendedFile
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.engine_job import RecordError
from sixfold.types import OBSERVATION, FinishReason, Kept, Reward, Trajectory

log = logging.getLogger("sixfold_serving")


class Recorder:
    """Appends lines to `FOLDER/exchanges-TIME-PID.jsonl`, one file per server process.

    Args:
        folder: is created if it does not exist.
        renderer: reads prompts. Used only by the engine's thread.

    Raises:
        UserError: the folder or the file cannot be written.
    """

    def __init__(self, folder: Path, renderer: Renderer) -> None:
        self._renderer = renderer
        self.path = folder / f"exchanges-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--record {folder}: cannot be written ({error.strerror})") from error
        self._file = AppendedFile(self.path, log.warning)

    def record(
        self,
        task_id: str,
        asked: Mapping[str, Any],
        choice: int,
        sequence: Sequence,
        text: str,
        reason: FinishReason,
    ) -> None:
        """Append a completion as a trajectory.

        Args:
            asked: further fields of the line.
            choice: index of the choice in its request.
            text: the text that the client receives.
            reason: why it ended.

        Raises:
            RecordError: the line cannot be written: the disk is full, or a log-prob is NaN or
                infinite.
        """
        prompt = sequence.request.prompt
        trajectory = Trajectory.one_turn(
            task_id,
            choice,
            prompt,
            sequence.tokens[len(prompt) :],
            sequence.logp,
            sequence.version,
            reason,
            text=text,
            seconds=sequence.seconds,
            kept=sequence.kept or None,
            opened=self._renderer.opened(prompt),
        )
        try:
            self.write(trajectory, asked)
        except (OSError, UserError, ValueError) as error:
            log.error("an exchange could not be written to the record: %s", error)
            raise RecordError(str(error)) from error

    def write(self, trajectory: Trajectory, asked: Mapping[str, Any]) -> None:
        """Append one line.

        Args:
            asked: further fields of the line.

        Raises:
            UserError: the file cannot be written.
            ValueError: a number is NaN or infinite.
        """
        line = json.dumps(trajectory.to_record() | dict(asked), allow_nan=False)
        self._file.append(line.encode() + b"\n")

    def reward(self, session: str, value: float, parts: Mapping[str, float]) -> None:
        """Append the reward of a session. Any thread may call this.

        Args:
            parts: named components of the reward.

        Raises:
            UserError: the file cannot be written.
            ValueError: a number is NaN or infinite.
        """
        line = {"session": session, "reward": value, "parts": dict(parts)}
        self._file.append(json.dumps(line, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Write everything to the disk and close the file."""
        self._file.append(b"", to_disk=True)
        self._file.close()


def read_trajectories(path: Path) -> list[Trajectory]:
    """Read the trajectories of a record that can be used for training.

    If a request of a session continues an earlier one, both are joined to one trajectory. All
    trajectories of a session have the reward of the session. Requests without a session are
    trajectories without a reward.

    Three kinds of lines are left out:

    - Aborted completions: the client disconnected before they had ended.
    - Completions with penalties or a grammar: the trainer cannot compute log-probs under that
      sampling distribution.
    - An incomplete last line, if the server was killed.
    """
    lines = path.read_bytes().split(b"\n")[:-1]
    records = [json.loads(line) for line in lines]
    rewards = {r["session"]: r for r in records if "tokens" not in r}
    found: list[Trajectory] = []
    sessions: dict[str, list[int]] = {}  # name -> indices in `found`
    for record in records:
        if "tokens" not in record or not record.get("trainable", True):
            continue
        trajectory = Trajectory.from_record(record)
        if trajectory.finish_reason == "aborted":
            continue
        places = sessions.setdefault(record["session"], []) if "session" in record else []
        before = next((i for i in places if _continues(trajectory, found[i])), None)
        if before is not None:
            found[before] = _joined(found[before], trajectory, record["suffix"])
            continue
        places.append(len(found))
        found.append(trajectory)
    for name, places in sessions.items():
        if name in rewards:
            given = Reward(rewards[name]["reward"], rewards[name]["parts"])
            for place in places:
                found[place].reward = given
    return found


def _continues(later: Trajectory, earlier: Trajectory) -> bool:
    """True if a request can be joined to an earlier one.

    Its prompt must begin with all tokens of the earlier one. Either both or none of them must have
    used truncated sampling.
    """
    length = len(earlier.tokens)
    starts = later.prompt_length >= length and later.tokens[:length] == earlier.tokens
    return starts and bool(later.kept) == bool(earlier.kept)


def _joined(earlier: Trajectory, later: Trajectory, suffix: str) -> Trajectory:
    """Join two requests to one trajectory.

    Args:
        earlier: the first request.
        suffix: provenance of the tokens between the two replies.
    """
    start, stop = len(earlier.tokens), later.prompt_length
    between = suffix if len(suffix) == stop - start else OBSERVATION * (stop - start)
    kept = None
    if earlier.kept and later.kept:
        pairs = zip(vars(earlier.kept).values(), vars(later.kept).values(), strict=True)
        kept = Kept(*(a + b for a, b in pairs))
    return replace(
        earlier,
        tokens=later.tokens,
        provenance=earlier.provenance + between + later.provenance[stop:],
        logp=earlier.logp + later.logp[start:],
        version=earlier.version + later.version[start:],
        turns=earlier.turns + later.turns,
        outcome=later.outcome,
        text=f"{earlier.text}\n{later.text}",
        kept=kept,
        graded=later.graded_text,
    )
