"""Stack bytes a thread of the decode attention kernel, compiled for GPUs that need not be here.

    python benchmarks/gpu/spills.py [--targets 80,90] [--dtypes bfloat16,float32]

A kernel whose registers do not suffice keeps numbers in memory ("spills"), which costs more than
what it saves. The shapes are those of Qwen2.5 0.5B, 1.5B and 7B, Llama 3 8B and Gemma 2 9B; each
is compiled with the warps and the tile that `launch_of` chooses, for one member and for eight.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from sixfold.kernels.triton import attention as kernels

SHAPES = {"0.5B": (7, 64), "1.5B": (6, 128), "7B": (7, 128), "8B": (4, 128), "9B": (2, 256)}
"""Model -> (query heads of a key head, head size)."""
POINTERS = dict.fromkeys(("table", "positions", "members", "begin", "end"), "*i64")
SHORT = {"bfloat16": "*bf16", "float32": "*fp32"}


def stack_bytes(
    target: int, dtype: str, members: int, group: int, d: int
) -> tuple[int, kernels.Launch]:
    """Stack bytes a thread, as ptxas reports them, and what the kernel is launched with."""
    launch = kernels.launch_of(members * group, d, 4 if dtype == "float32" else 2)
    constants = dict(
        MEMBERS=members,
        GROUP=group,
        ROWS=triton.next_power_of_2(max(16, members * group)),
        D=d,
        WIDTH=triton.next_power_of_2(max(16, d)),
        BLOCK_SIZE=16,
        TILE=launch.tile,
        INT8=False,
        SOFTCAP=False,
        WINDOW=False,
    )
    kernel = kernels._attend
    signature = (
        POINTERS
        | {name: "*fp32" for name in ("key_scales", "value_scales", "out", "lse")}
        | {"scale": "fp32", "softcap": "fp32"}
    )
    signature |= {name: SHORT[dtype] for name in ("q", "keys", "values")}
    types = {
        name: "constexpr" if name in constants else signature.get(name, "i32")
        for name in kernel.arg_names
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=places)
    made = triton.compile(
        source, target=GPUTarget("cuda", target, 32), options={"num_warps": launch.warps}
    )
    return ptxas_stack(made.asm["ptx"], target), launch


def ptxas_stack(ptx: str, target: int) -> int:
    """Bytes of the stack frame, from ptxas' own report."""
    architecture = f"sm_{target}a" if target >= 90 else f"sm_{target}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [
            get_ptxas(target).path,
            "-v",
            f"--gpu-name={architecture}",
            str(path),
            "-o",
            str(path.with_suffix(".cubin")),
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(int(n) for n in re.findall(r"(\d+) bytes stack frame", said))


def main() -> None:
    """Compile and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", default="80,90", help="compute capabilities, by comma")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="of the cache, by comma")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="models, by comma")
    options = parser.parse_args()
    print(
        "| target | dtype | model | members | rows | warps | tile | stack bytes"
        " |\n|---|---|---|---|---|---|---|---|"
    )
    for target in map(int, options.targets.split(",")):
        for dtype in options.dtypes.split(","):
            for name in options.shapes.split(","):
                for members in (1, 8):
                    group, d = SHAPES[name]
                    stack, launch = stack_bytes(target, dtype, members, group, d)
                    rows = triton.next_power_of_2(max(16, members * group))
                    print(
                        f"| sm_{target} | {dtype} | {name} | {members} | {rows} | {launch.warps} |"
                        f" {launch.tile} | {stack} |"
                    )
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
