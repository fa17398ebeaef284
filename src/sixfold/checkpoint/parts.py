"""Checkpoints of several ranks: every rank writes whole tensors, and rank 0 publishes.

    model/model-00001-of-00002.safetensors     weights, with model.safetensors.index.json
    trainer-00001-of-00002.safetensors         tensors of the components

An adapter is small: rank 0 writes it as one file in PEFT's format.

Sharded tensors are gathered one at a time when they are saved, and each becomes part of one file.
So any number of ranks can load the files, and `model/` is an ordinary Hugging Face folder. Ranks
write into a hidden folder beside the checkpoints. After the gathering, no step needs another rank,
so a thread can write the files.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ..errors import UserError, one_line
from ..files.durable import disk_errors, faultpoint, fsync_path
from ..ranks import Ranks, together
from ..trainer.sharded import own_part, whole_at
from .manifest import is_intact
from .payload import part_name, safetensors_disk_errors
from .publication import parts_folder

INDEX = "model.safetensors.index.json"


class Parts:
    """Writes this rank's part of one checkpoint.

    Args:
        seconds: longest wait of rank 0 for the parts of the other ranks.
        adapter: prefix of the tensors that rank 0 writes elsewhere. Empty: there are none, and the
            ranks write the policy's weights.
    """

    def __init__(self, path: Path, ranks: Ranks, seconds: float, adapter: str = "") -> None:
        self._path = path
        self._folder = parts_folder(path)
        self._ranks = ranks
        self._seconds = seconds
        self._adapter = adapter
        self._kinds = ("trainer",) if adapter else ("model", "trainer")

    def open(self) -> bool:
        """Make the folder for the parts. All ranks must call this.

        Returns:
            False if an intact checkpoint exists already.

        Raises:
            UserError: if the disk refuses the folder.
        """
        found: list[bool] = []

        def make() -> None:
            found.append(self._path.is_dir() and is_intact(self._path))
            if not found[0]:
                with disk_errors(f"cannot save checkpoint {self._path}"):
                    shutil.rmtree(self._folder, ignore_errors=True)
                    self._folder.parent.mkdir(exist_ok=True)
                    self._folder.mkdir()

        together(self._ranks, make if self._ranks.rank == 0 else lambda: None)
        return not any(self._ranks.gather(bool(found and found[0])))

    def share_out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather all tensors, and keep host copies of those that this rank writes.

        All ranks must call this. The copies share no memory with the live tensors.

        Args:
            tensors: tensors by name, with the same names in the same order on all ranks. Each is
                sharded, or equal on all ranks.
        """
        shared = {n: t for n, t in tensors.items() if not self._of_adapter(n)}
        owners, share = _owners(shared, self._ranks.size), {}
        for name, tensor in tensors.items():
            full = whole_at(tensor.detach(), owners.get(name, 0))
            if full is not None:
                live = own_part(tensor).data_ptr()
                copied = full.cpu()
                share[name] = copied.clone() if copied.data_ptr() == live else copied
        return share

    @contextmanager
    def written(
        self, model: PreTrainedModel, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
    ) -> Iterator[None]:
        """Context in which this rank's part is on the disk.

        At its end, rank 0 deletes the folder of the parts.

        Args:
            model: the policy. Its architecture decides the names of weights in the file.
            weights: weights of the policy that this rank writes. Ignored for an adapter.
            tensors: tensors of the components that this rank writes.

        Raises:
            UserError: if the disk refuses the part. After any error, rank 0 raises an error too.
        """
        try:
            files = {"trainer": tensors}
            if not self._adapter:
                named = revert_weight_conversion(model, dict(weights)) if weights else {}
                files = {"model": named, **files}
            with disk_errors(f"cannot save checkpoint {self._path}"):
                for kind, content in files.items():
                    self._write(kind, content)
            yield
        except Exception as error:
            text = str(error) if isinstance(error, UserError) else one_line(error)
            told = self._folder / f"failed-{self._ranks.rank}"
            with suppress(OSError):  # by rename, so that rank 0 reads all of it
                told.with_name(f".{told.name}").write_text(text)
                os.rename(told.with_name(f".{told.name}"), told)
            raise
        finally:
            if self._ranks.rank == 0:
                shutil.rmtree(self._folder, ignore_errors=True)

    def collect(self, model_folder: Path) -> None:
        """Move the parts of all ranks into the checkpoint, and write the index. Only for rank 0.

        Args:
            model_folder: folder `model` of the checkpoint.

        Raises:
            UserError: if a rank has failed, or has not written its part in time.
        """
        until = time.monotonic() + self._seconds
        ranks = range(self._ranks.size)
        names = {kind: [self._name(kind, r) for r in ranks] for kind in self._kinds}
        while missing := [r for r in ranks if not (self._folder / names["trainer"][r]).is_file()]:
            for rank in ranks:
                if (self._folder / f"failed-{rank}").is_file():
                    text = (self._folder / f"failed-{rank}").read_text()
                    raise UserError(f"rank {rank}: {text}")
            if time.monotonic() > until:
                raise UserError(
                    f"cannot save checkpoint {self._path}: rank {missing[0]} did not write its part"
                    f" within {self._seconds:g} s. All ranks need the same disk (run.dir)"
                )
            time.sleep(0.02)
        for kind in self._kinds:
            target = model_folder if kind == "model" else model_folder.parent
            for name in names[kind]:
                os.rename(self._folder / name, target / name)
                faultpoint("checkpoint.part")
        if "model" in names:
            _write_index(model_folder, names["model"])

    def _of_adapter(self, name: str) -> bool:
        return bool(self._adapter) and name.startswith(self._adapter)

    def _write(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a file. It appears under its name only when it is complete on the disk."""
        path = self._folder / self._name(kind, self._ranks.rank)
        hidden = path.with_name(f".{path.name}")
        with safetensors_disk_errors():
            contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(contiguous, hidden, metadata={"format": "pt"})
        faultpoint("checkpoint.part")
        fsync_path(hidden)
        os.rename(hidden, path)
        faultpoint("checkpoint.part")

    def _name(self, kind: str, rank: int) -> str:
        return part_name(kind, rank, self._ranks.size)


def _owners(tensors: Mapping[str, Tensor], size: int) -> dict[str, int]:
    """Rank that writes each tensor, so that all ranks write about as many bytes.

    Tensors are assigned from the largest to the smallest, each to the rank with the fewest bytes so
    far. All ranks compute the same result, because sizes are those of whole tensors.
    """
    loads, owners = [0] * size, {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += tensors[name].nbytes
    return owners


def _write_index(folder: Path, files: list[str]) -> None:
    """Write the index with the file of each weight, from which transformers loads."""
    where: dict[str, str] = {}
    for file in files:
        with safe_open(folder / file, framework="pt") as opened:
            where |= dict.fromkeys(opened.keys(), file)
    total = sum((folder / file).stat().st_size for file in files)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
