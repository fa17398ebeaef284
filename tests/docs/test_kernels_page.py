"""The catalogue of kernels is up to date, and the code that it names exists."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path

import sixfold

PACKAGE = Path(sixfold.__file__).parent
DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.M)
PLACE = re.compile(r"((?:`\w+`, )*`\w+`) in `([\w/]+\.py)`")


def rows() -> dict[str, list[str]]:
    """Kernel -> limit, win and status, from the page."""
    found = ROW.findall((DOCS / "kernels.md").read_text(encoding="utf-8"))
    return {name: cells for name, *cells in found if name not in ("kernel", "---")}


def test_the_page_is_the_output_of_its_script() -> None:
    spec = importlib.util.spec_from_file_location("make_kernels", DOCS / "make_kernels.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    # A dataclass looks up its module.
    sys.modules["make_kernels"] = script
    spec.loader.exec_module(script)
    assert (DOCS / "kernels.md").read_text(encoding="utf-8") == script.page(), (
        "run: python docs/make_kernels.py > docs/kernels.md"
    )


def test_six_surfaces_have_rows_with_every_cell() -> None:
    page = (DOCS / "kernels.md").read_text(encoding="utf-8")
    surfaces = re.split(r"^## ", page, flags=re.M)[1:]
    assert len(surfaces) == 6
    counts = [len(ROW.findall(surface)) - 1 for surface in surfaces]  # less the heading
    assert min(counts) >= 6 and sum(counts) == len(rows())
    assert all(cell.strip() for cells in rows().values() for cell in cells)


def test_files_define_the_names_of_a_row() -> None:
    named = 0
    for kernel, (*_, status) in rows().items():
        places = PLACE.findall(status)
        word = re.match(r"here: |partly: |not here", status)
        assert word, (kernel, status)
        assert bool(places) is (word[0] != "not here"), (kernel, status)
        assert len(re.findall(r"`[\w/]+\.py`", status)) == len(places), (kernel, status)
        for names, file in places:
            tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
            defined = {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
            missing = set(re.findall(r"`(\w+)`", names)) - defined
            assert not missing, (kernel, file, missing)
            named += 1
    assert named > len(rows()) / 2


def test_the_kernels_of_each_surface_are_listed() -> None:
    """Two of each of the course's surfaces (L25), by words of their names."""
    names = " / ".join(rows())
    for words in (
        *("paged attention", "prefix cache", "speculative", "CUDA graphs"),
        *("recomputed log-probs", "chunked log-probs"),
        *("chunked cross-entropy", "fused k3", "advantages of groups"),
        *("cast in flight", "overlap with the next rollout", "resharding"),
        *("paged allocator", "activations in host memory"),
        *("mask of tool tokens", "branches", "asynchronous tools"),
    ):
        assert words in names
