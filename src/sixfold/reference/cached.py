"""A reference whose log-probs are computed once, before training, and kept on disk.

Training then needs no second model and no second forward pass, and a later run with the same
reference and examples reads the file. It is named by the hash of the weights. A row is found by the
hash of its tokens, so another tokenizer, template or data set never gets wrong log-probs: its rows
are missing, and are computed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from ..batch import Batch, collate
from ..checkpointable import check_names
from ..errors import UserError
from ..files.durable import disk_errors, write_bytes_atomic
from ..ranks import ALONE, Ranks, together
from ..trainer.logprobs import SCORED_TOGETHER
from ..types import Group

FILE = "reference.safetensors"
"""The table in the folder of a run."""


class CachedReference:
    """Log-probs of a frozen model for examples that are known before training.

    Args:
        file: the table of the run.
        folder: folder of tables that runs share. None: none.
        ranks: the ranks of the run. Rank 0 writes.

    Attributes:
        key: hash of the weights and the precision that made the table.
    """

    scorer = None

    def __init__(self, file: Path, folder: Path | None = None, ranks: Ranks = ALONE) -> None:
        self.key = ""
        self._file = file
        self._folder = folder
        self._ranks = ranks
        self._at: dict[bytes, tuple[int, int]] = {}
        self._logp = array("f")

    def fill(
        self, key: str, groups: Sequence[Group], score: Callable[[Batch], Tensor]
    ) -> tuple[int, int]:
        """Make the table: read what an earlier run has computed, and compute the rest.

        Args:
            key: names the reference.
            groups: all examples that will be scored.
            score: log-probs [B, T] of the reference.

        Returns:
            (rows computed, rows read).

        Raises:
            UserError: if a file cannot be read or written.
        """
        self.key = key
        shared = self._folder / f"{key}.safetensors" if self._folder else None
        if shared and (data := self._of_first(shared)):
            self._read(data, shared)
        missing = [group for group in groups if not self._knows(group)]
        read = len(self._at)
        for at in range(0, len(missing), SCORED_TOGETHER):
            batch = collate(missing[at : at + SCORED_TOGETHER], scored=False)
            logp = score(batch).cpu()
            for row, digest in enumerate(row_hashes(batch)):
                if digest in self._at:  # another comparison has the same completion
                    continue
                values = logp[row][batch.mask[row]]
                self._at[digest] = len(self._logp), len(values)
                self._logp.extend(values.tolist())
        together(self._ranks, lambda: self._write(shared if missing else None))
        return len(self._at) - read, read

    def start(self, groups: Sequence[Group]) -> None:
        """Does nothing: everything is computed."""

    def score(self, batch: Batch) -> Batch:
        """The batch with ref_logp [B, T], 0 where mask is False.

        Raises:
            ValueError: if the table lacks a row.
        """
        host = batch.at_host()
        out = torch.zeros(host.tokens.shape)
        for row, digest in enumerate(row_hashes(host)):
            if digest not in self._at:
                name = host.names[row] if host.names else f"row {row}"
                raise ValueError(f"the log-probs of the reference lack {name}")
            at, count = self._at[digest]
            out[row][host.mask[row]] = torch.tensor(self._logp[at : at + count])
        return batch.with_(ref_logp=out.to(batch.tokens.device))

    def tensors(self) -> dict[str, Tensor]:
        """Empty: the table is a file of the run."""
        return {}

    def state(self) -> dict[str, Any]:
        return {"key": self.key}

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Read the table of the run.

        Raises:
            UserError: if it is missing, damaged, or of another reference.
        """
        check_names(self.state(), state, "value")
        data = self._of_first(self._file)
        if data is None:
            raise UserError(
                f"{self._file} is missing: it has the log-probs of the reference, which the run"
                " cannot compute again. Restore it, or start the run over with --overwrite"
            )
        self.key = self._read(data, self._file)
        if self.key != state["key"]:
            raise UserError(
                f"{self._file} belongs to another reference than the checkpoint. Restore it, or"
                " start the run over with --overwrite"
            )

    def reset(self, policy: nn.Module) -> None:
        """Refused: the reference is not in memory.

        Raises:
            ValueError: always.
        """
        raise ValueError("a cached reference cannot be reset")

    def check_apart(self, optimizer: torch.optim.Optimizer) -> None:
        """Does nothing: there are no weights."""

    def close(self) -> None:
        """Does nothing: there is no process to end."""

    def _of_first(self, file: Path) -> bytes | None:
        """Bytes of a file as rank 0 sees it, on all ranks. None if it does not exist."""
        own = file.read_bytes() if not self._ranks.rank and file.is_file() else None
        return self._ranks.gather(own)[0]

    def _write(self, shared: Path | None) -> None:
        """Write the table of the run, and the shared one, on rank 0."""
        if self._ranks.rank:
            return
        table = self._bytes()
        write_bytes_atomic(self._file, table)
        if shared:
            with disk_errors(f"cannot write to preference.cache = '{self._folder}'"):
                shared.parent.mkdir(parents=True, exist_ok=True)
            write_bytes_atomic(shared, table)

    def _knows(self, group: Group) -> bool:
        return all(digest in self._at for digest in row_hashes(collate([group], scored=False)))

    def _bytes(self) -> bytes:
        rows = np.frombuffer(b"".join(self._at), dtype=np.uint8).reshape(len(self._at), -1)
        return save(
            {
                "key": torch.tensor(list(self.key.encode()), dtype=torch.uint8),
                "rows": torch.from_numpy(rows.copy()),
                "counts": torch.tensor([n for _, n in self._at.values()], dtype=torch.int32),
                "logp": torch.tensor(self._logp, dtype=torch.float32),
            }
        )

    def _read(self, data: bytes, file: Path) -> str:
        """Read a table, and return its key. file: where it is, for messages."""
        try:
            table = load(data)
            key, rows, counts, logp = (table[name] for name in ("key", "rows", "counts", "logp"))
            if int(counts.sum()) != len(logp):
                raise KeyError("its log-probs do not belong to its rows")
        except (KeyError, SafetensorError) as error:
            raise UserError(
                f"{file} is damaged ({error}): it has log-probs of the reference. Restore or delete"
                " it"
            ) from error
        self._logp = array("f", logp.tolist())
        self._at, at = {}, 0
        for row, count in zip(rows.numpy(), counts.tolist(), strict=True):
            self._at[row.tobytes()] = at, count
            at += count
        return bytes(key.tolist()).decode()


def row_hashes(host: Batch) -> list[bytes]:
    """Hash of each row's tokens and of which of them are scored. `host` is a batch on the CPU."""
    tokens, mask = host.tokens.numpy(), host.mask.numpy()
    return [
        hashlib.blake2b(
            tokens[b, :length].tobytes() + mask[b, :length].tobytes(), digest_size=16
        ).digest()
        for b, length in enumerate(host.lengths.tolist())
    ]
