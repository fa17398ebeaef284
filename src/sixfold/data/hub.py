"""Datasets that the `datasets` library reads: folders and the hub.

The library is imported only here, when it is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from ..environment.registry import SOURCES
from ..errors import UserError, nearest
from ..recipe.hub_names import not_found, offline_switch
from ..recipe.schema import DataConfig
from .files import Row, Unread, draw, unread_table

_BATCH = 1000
"""Rows that `unread_split` has in memory at once."""

_ADDRESS = re.compile(r"hf://datasets/[^@]+@([0-9a-f]{40})/")


def read_dataset(
    data: DataConfig, splits: list[str], seed: int
) -> tuple[dict[str, list[Row]], str]:
    """Rows of the named splits of a dataset.

    Args:
        data: names the source: a folder (written by `save_to_disk`, or with data files) or a hub
            id.
        seed: draws the rows of `data.split` if `data.limit` is set.

    Returns:
        Split name to rows, and the commit of a hub dataset (empty if unknown).

    Raises:
        UserError: if the source cannot be loaded, or lacks a split.
    """
    dataset = _load(data)
    limits = {split: data.limit if split == data.split else 0 for split in splits}
    read = {split: _rows(dataset, split, data, limits[split], seed) for split in splits}
    return read, _commit(dataset[splits[0]].info)


def _rows(
    dataset: Mapping[str, Any], split: str, data: DataConfig, limit: int, seed: int
) -> list[Row]:
    _check_split(dataset, split, data)
    # A folder may have been saved to return numpy arrays or tensors.
    rows = dataset[split].with_format(None)
    numbers = draw(range(len(rows)), limit, seed)
    rows = rows.select(numbers) if limit else rows
    return [
        Row(f"{data.source} ({split}), row {n + 1}", dict(fields), n, padded=True)
        for n, fields in zip(numbers, rows, strict=True)
    ]


def unread_split(data: DataConfig) -> tuple[Iterator[Unread], str]:
    """The rows of `data.split`, which are not in memory, and a name of their content.

    Args:
        data: names the source, as for `read_dataset`.

    Returns:
        The rows, and the commit of a hub dataset. If it is unknown, the fingerprint of `datasets`.

    Raises:
        UserError: if the source cannot be loaded, or lacks the split.
    """
    dataset = _load(data)
    _check_split(dataset, data.split, data)
    split = dataset[data.split]
    return _unread(split, f"{data.source} ({data.split})"), (
        _commit(split.info) or str(split._fingerprint)
    )


def _unread(split: Any, name: str) -> Iterator[Unread]:
    numbers = count()
    for table in split.with_format("arrow").iter(_BATCH):
        yield from unread_table(table, "{}, row {}".format, name, numbers)


def _check_split(dataset: Mapping[str, Any], split: str, data: DataConfig) -> None:
    if split not in dataset:
        raise UserError(
            f"dataset {data.source!r} has no split {split!r}; it has"
            f" {', '.join(dataset)}.{nearest(split, list(dataset))}"
        )


def _commit(info: Any) -> str:
    """The commit in the download addresses of a split's files: hf://datasets/ID@COMMIT/FILE."""
    found = (_ADDRESS.match(address) for address in info.download_checksums or ())
    return next((match[1] for match in found if match), "")


def _load(data: DataConfig) -> Mapping[str, Any]:
    """Split name -> rows."""
    folder = Path(data.source)
    if not folder.exists() and (reason := not_found(data.source, "datasets")):
        raise UserError(f"data.source = {data.source!r}: {reason}")
    if folder.exists() and data.revision:
        raise UserError(
            f"data.revision = {data.revision!r} pins a hub dataset, and {data.source!r} is a folder"
            " here: leave it empty"
        )
    import datasets

    try:
        if (folder / "dataset_dict.json").is_file():
            return datasets.load_from_disk(data.source)
        if (folder / "state.json").is_file():
            return {data.split: datasets.load_from_disk(data.source)}
        return datasets.load_dataset(
            data.source, data.subset or None, revision=data.revision or None
        )
    except RuntimeError as error:
        # `datasets` does not run a repository's code, and raises this error if the code is needed.
        if "script" not in str(error):
            raise UserError(_unloadable(data, folder, error)) from error
        raise UserError(
            f"dataset {data.source!r} requires executing repository code; not supported"
        ) from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        # Unreachable, unknown, gated or malformed: the user can fix all of these.
        raise UserError(_unloadable(data, folder, error)) from error


def _unloadable(data: DataConfig, folder: Path, error: Exception) -> str:
    lines = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {lines[0].rstrip('.') if lines else 'no reason given'}"
    if folder.is_dir():
        return f"cannot load the dataset folder {data.source!r}: {reason}"
    hint = nearest(data.source, list(list(SOURCES)))
    switch = offline_switch("datasets")
    offline = f", {switch} forbids to ask the hub" if switch else ""
    pinned = f" at revision {data.revision!r}" if data.revision else ""
    return (
        f"cannot load dataset {data.source!r}{pinned}: no such folder in {Path.cwd()}{offline},"
        f" and the hub gave {reason}.{hint}"
    )
