"""How long does `sixfold data` take, and how much memory, by the number of rows?

    python benchmarks/curation_scale.py                       # 10,000, 100,000 and 1,000,000 rows
    python benchmarks/curation_scale.py --rows 10000 --format parquet
    python benchmarks/curation_scale.py --copies 100          # as DAPO-Math: each prompt 100 times
    python benchmarks/curation_scale.py --near 0.1            # a tenth repeats a row but for a word
    python benchmarks/curation_scale.py --stages duplicates licence

The rows are made: word problems of about 300 characters, in the form of DAPO-Math or GSM8K. Each
size runs in a process of its own. Seconds are CPU seconds of this process; memory is its peak.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

WORDS = (
    *("apples", "bread", "train", "garden", "window", "letter", "river", "market", "teacher"),
    *("silver", "engine", "paper", "mountain", "candle", "basket", "winter", "orange", "violin"),
    *("bridge", "harbour", "cotton", "copper", "ladder", "meadow"),
)


def rows(count: int, copies: int, near: float) -> Iterator[dict[str, object]]:
    """Rows in the form of DAPO-Math.

    Args:
        count: number of rows.
        copies: rows of each prompt.
        near: share of the rows that have the prompt of an earlier row with another word.
    """
    for number in range(count):
        prompt = number // copies
        change = random.Random(-1 - number)
        is_near = number > 0 and change.random() < near
        if is_near:
            prompt = change.randrange(number) // copies
        draw = random.Random(prompt)
        chosen = draw.choices(WORDS, k=36)
        if is_near:
            chosen[change.randrange(36)] = change.choice(WORDS)
        words = " ".join(chosen)
        first, second = draw.randrange(1000), draw.randrange(1000)
        text = f"Problem {prompt}: {words}. There are {first} of one and {second} of the other. How"
        yield {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"{text} many are there together?"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(first + second), "style": "rule"},
            "extra_info": {"index": f"{prompt:012x}"},
        }


def write_rows(path: Path, made: Iterator[dict[str, object]]) -> None:
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in made)
        return
    import pyarrow
    from pyarrow import parquet

    writer = None
    while batch := list(islice(made, 10_000)):
        table = pyarrow.Table.from_pylist(batch)
        writer = writer or parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer:
        writer.close()


def measure(folder: Path, count: int, given: argparse.Namespace) -> dict[str, float]:
    data, recipe = folder / f"rows.{given.format}", folder / "scale.toml"
    write_rows(data, rows(count, given.copies, given.near))
    stages = "".join(f'[[stages]]\nkind = "{kind}"\n' for kind in given.stages)
    recipe.write_text(
        f'name = "scale"\nout = "{folder}/out"\nformat = "{given.format}"\n[[sources]]\n'
        f'label = "dapo"\ndata = "{data}"\norigin = "public"\nlicence = "apache-2.0"\n{stages}'
    )
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "sixfold", "data", str(recipe)])
    _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"sixfold data ended with status {status}")
    return {
        "rows": count,
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "wall_s": round(time.perf_counter() - start, 1),
        "peak_mb": round(used.ru_maxrss / 1024),
        "us_per_row": round((used.ru_utime + used.ru_stime) / count * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--copies", type=int, default=1, help="rows of each prompt")
    parser.add_argument("--near", type=float, default=0.0, help="share of near duplicates")
    parser.add_argument("--format", choices=["jsonl", "parquet"], default="jsonl")
    parser.add_argument("--stages", nargs="*", default=["duplicates"], help="kinds of stages")
    given = parser.parse_args()
    for count in given.rows:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(Path(folder), count, given)), flush=True)


if __name__ == "__main__":
    main()
