"""Names of tests as SWE-bench publishes them, and the functions that they mean.

- pytest: `tests/test_a.py::test_x`, `tests/test_a.py::TestA::test_x`
- pytest with parameters: `tests/test_a.py::test_x[1-two words]`, also cut at the space
- Django: `test_x (admin.tests.TestA)` or `test_x (admin.tests.TestA.test_x)`
- Django, for a test with a docstring: its first line
- SymPy: a bare `test_x`

A test with parameters stands for all of its parameters. Bare names and docstrings are looked up in
the files that the test patch changes, then in all others.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence

from .task_tests import TestsError

_UNITTEST = re.compile(r"(?P<test>\w+) \((?P<place>[\w.]+)\)")
_CHANGED = re.compile(r"^\+\+\+ b/(.+?)\t?$", re.MULTILINE)


class TestNames:
    """The tests of a repository, by any of their names.

    Args:
        files: path to text of the repository, after the test patch.
    """

    __test__ = False

    def __init__(self, files: Mapping[str, str], test_patch: str) -> None:
        changed = _CHANGED.findall(test_patch)
        python = [path for path in files if path.endswith(".py")]
        self._files = files
        self._paths = [*(p for p in changed if p in files), *(p for p in python if "test" in p)]
        self._defined: dict[str, list[tuple[str, str]]] = {}

    def resolved(self, name: str) -> str:
        """The test as `path.py::test_name` or `path.py::Class::test_name`.

        Raises:
            TestsError: if there is no such test.
        """
        path, colons, inner = name.partition("[")[0].partition("::")
        if colons:
            return self._in_file(name, path, inner)
        if match := _UNITTEST.match(name):
            return self._in_module(name, match["test"], match["place"].split("."))
        for path in self._paths:
            for test, line in self._tests(path):
                if name.partition("[")[0] == test.rpartition("::")[2] or name == line:
                    return f"{path}::{test}"
        raise TestsError(f"the test {name!r} is in no test file. {_FORMS}")

    def _in_file(self, name: str, path: str, inner: str) -> str:
        if path not in self._files:
            raise TestsError(f"the file of the test {name!r} does not exist")
        if inner not in [test for test, _ in self._tests(path)]:
            raise TestsError(f"the test {name!r} does not exist. {_FORMS}")
        return f"{path}::{inner}"

    def _in_module(self, name: str, test: str, place: Sequence[str]) -> str:
        """The test of a module whose package may be below a folder, such as `tests`."""
        *module, kind = place[:-1] if place[-1] == test else place
        ending = f"/{'/'.join(module)}.py"
        for path in sorted(self._files, key=len):
            if f"/{path}".endswith(ending) and f"{kind}::{test}" in dict(self._tests(path)):
                return f"{path}::{kind}::{test}"
        raise TestsError(f"the test {name!r} does not exist: no file has {kind}.{test}. {_FORMS}")

    def _tests(self, path: str) -> list[tuple[str, str]]:
        """Functions and methods of a file, each with the first line of its docstring."""
        if path not in self._defined:
            try:
                tree = ast.parse(self._files[path])
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                tree = ast.Module([], [])
            self._defined[path] = [
                (f"{prefix}{node.name}", (ast.get_docstring(node) or "").partition("\n")[0])
                for prefix, body in _bodies(tree)
                for node in body
                if isinstance(node, ast.FunctionDef)
            ]
        return self._defined[path]


_FORMS = (
    "Names are path.py::test_name, path.py::Class::test_name, 'test_name (module.Class)', a bare"
    " test_name, or the first line of a docstring"
)


def _bodies(tree: ast.Module) -> list[tuple[str, list[ast.stmt]]]:
    """Statements of a module and of its classes, with the prefix of their names."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return [("", tree.body), *((f"{node.name}::", node.body) for node in classes)]
