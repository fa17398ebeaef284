"""Whether a replay has the weights of the recorded run."""

from __future__ import annotations

from ..errors import UserError
from ..files.folder import RunFolder


def replay_verdict(recorded: RunFolder, replay: RunFolder) -> str:
    """One line about the weights of the newest checkpoint that both runs have.

    Raises:
        UserError: if they differ.
    """
    ours, theirs = (
        {folder.name: folder / "model" for folder in run.checkpoints.glob("step-*")}
        for run in (replay, recorded)
    )
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        return f"{recorded.path} and {replay.path} have no checkpoint of the same step to compare"
    files = {file.name for file in theirs[both[-1]].glob("*.safetensors")}
    for name in sorted(files):
        if (ours[both[-1]] / name).read_bytes() != (theirs[both[-1]] / name).read_bytes():
            raise UserError(
                f"the replay took the same groups and tokens, but {name} of {both[-1]} differs from"
                f" that of {recorded.path}: another machine or number of threads, or heads so small"
                " that their sums depend on the batch (docs/engine.md, Same seed, same tokens)"
            )
    return f"replayed: {both[-1]} has the weights of {recorded.path}, bit for bit"
