"""Weight files of which some are whole, and the others have only the tensors that changed.

A frozen layer, or one that an adapter does not touch, is then written and checked once in many
versions. All files since the last whole one are kept, so that a process that is started later reads
them in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import Tensor

from .weight_files import WHOLE, Before, open_sealed, sealed_sums, streamed_file


class WeightFiles:
    """Publishes weights as files. `publish` is a `Publish` of `samplers.py`.

    Args:
        size: bytes of all tensors.
        whole_every: number of files from a whole one to the next. 1: all are whole.
    """

    def __init__(self, size: int, whole_every: int) -> None:
        self._size = size
        self._whole_every = whole_every
        self._files: dict[str, ExitStack] = {}
        self._last = WHOLE  # the files that make up the last weights, and their checksums
        self._open = 0

    @contextmanager
    def publish(self, weights: Mapping[str, Tensor], version: int) -> Iterator[str]:
        """Path of a file for `SealedReader`, as long as these weights or later ones are in use.

        If the block raises, the weights were refused: the next file repeats what this one has.
        """
        earlier = self._last
        before = earlier if 0 < len(earlier.files) < self._whole_every else WHOLE
        file = ExitStack()
        path = file.enter_context(streamed_file(self._size, weights, version, before))
        self._files[path] = file
        self._open += 1
        self._last = Before((*before.files, (path, version)), sealed_sums(path))
        try:
            yield path
        except BaseException:
            self._last = Before(earlier.files, {})
            raise
        finally:
            self._open -= 1
            used = {name for name, _ in self._last.files} if self._open else set()
            for name in self._files.keys() - used:
                self._files.pop(name).close()
            if not self._open:
                self._last = WHOLE


class SealedReader:
    """Reads files of `WeightFiles`, and keeps what later ones do not repeat.

    The kept tensors are pages of the files, which all processes of a machine share.
    """

    def __init__(self) -> None:
        self._path = ""
        self._tensors: dict[str, Tensor] = {}
        self._sums: Mapping[str, str] = {}

    def read(self, path: str, version: int) -> dict[str, Tensor]:
        """All weights of a version.

        Raises:
            ValueError: if this or an earlier file is torn or altered, or has another version. The
                next call goes on from the weights that were read before.
        """
        found = open_sealed(path, version)
        tensors, sums = dict[str, Tensor](), dict[str, str]()
        if found.before and found.before[-1][0] == self._path:
            tensors, sums = {**self._tensors}, {**self._sums}
        else:
            for file, number in found.before:
                earlier = open_sealed(file, number)
                tensors |= earlier.tensors
                sums |= {name: earlier.sums[name] for name in earlier.tensors}
        tensors |= found.tensors
        sums |= {name: found.sums[name] for name in found.tensors}
        if sums != found.sums:
            raise ValueError(f"the weights of version {version} do not fit those before")
        self._path, self._tensors, self._sums = path, tensors, sums
        return tensors
