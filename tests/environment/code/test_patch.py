"""Patches in git's format."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sixfold_environments.code.patch import PatchError, apply_patch

FILES = {"a.py": "one\ntwo\nthree\nfour\nfive\n", "pkg/b.py": "x = 1\n", "empty.txt": ""}


def change(path: str, before: str, after: str) -> str:
    return f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-{before}\n+{after}\n"


def test_the_result_is_that_of_git(tmp_path: Path) -> None:
    """Modified, added, deleted, renamed and moved lines in one patch that git made."""

    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    def write(files: dict[str, str]) -> None:
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_text(text)

    before = {
        "a.py": "".join(f"line {i}\n" for i in range(40)),
        "gone.py": "bye\n",
        "old.py": "1\n2\n3\n4\n5\n",
        "end.py": "no newline",
        "pkg/b.py": "x = 1\n",
    }
    after = {
        "a.py": before["a.py"].replace("line 3\n", "").replace("line 30", "LINE 30\nmore"),
        "new.py": "hello\nworld\n",
        "moved/new.py": "1\n2\n3\n4\nfive\n",
        "pkg/b.py": "x = 1\ny = 2\n",
        "end.py": "no newline",
    }
    git("init", "-q")
    write(before)
    git("add", "-A")
    git("commit", "-qm", "a")
    for path in before:
        (tmp_path / path).unlink()
    write(after)
    git("add", "-A")
    assert apply_patch(before, git("diff", "--cached", "-M")) == after


def test_a_hunk_may_have_moved() -> None:
    patch = "--- a/a.py\n+++ b/a.py\n@@ -1,2 +1,2 @@\n four\n-five\n+FIVE\n"
    assert apply_patch(FILES, patch)["a.py"] == "one\ntwo\nthree\nfour\nFIVE\n"


@pytest.mark.parametrize(
    ("patch", "problem"),
    [
        ("", "changes no file"),
        ("just text", "changes no file"),
        (change("pkg/b.py", "x = 2", "x = 3"), "does not match"),
        (change("none.py", "x = 1", "x = 2"), "does not exist"),
        (change("pkg/b.py", "x = 1", "x = 1"), "changes nothing"),
        ("--- a/pkg/b.py\n+++ b/pkg/b.py\n@@ -1,3 +1,3 @@\n-x = 1\n", "cut off"),
        ("--- a/pkg/b.py\n+++ b/pkg/b.py\n@@ -1 +1 @@\n-x = 1\n?\n", "begins with"),
        ("@@ -1 +1 @@\n-x = 1\n+x = 2\n", "without a file"),
        ("--- /dev/null\n+++ b/a.py\n@@ -0,0 +1 @@\n+new\n", "exists"),
        ("--- /dev/null\n+++ b/../evil.py\n@@ -0,0 +1 @@\n+new\n", "inside"),
        ("--- /dev/null\n+++ /etc/evil\n@@ -0,0 +1 @@\n+new\n", "inside"),
        ("--- /dev/null\n+++ b/.git/hooks/x\n@@ -0,0 +1 @@\n+new\n", "inside"),
        ("--- /dev/null\n+++ b/a//b\n@@ -0,0 +1 @@\n+new\n", "inside"),
        ('--- /dev/null\n+++ "b/a\\tb"\n@@ -0,0 +1 @@\n+new\n', "inside"),
        (
            "diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+x\n",
            "symbolic link",
        ),
        ("diff --git a/s b/s\nnew file mode 160000\n", "submodule"),
        ("diff --git a/x b/x\nindex 1..2 120000\n", "symbolic link"),
        ("diff --git a/x b/x\nGIT binary patch\nliteral 3\n", "binary"),
        ("Binary files a/x and b/x differ\n", "binary"),
        ("diff --git a/a.py b/z\nrename from a.py\nrename to ../z\n", "inside"),
        ("diff --git a/a.py b/pkg/b.py\nrename from a.py\nrename to pkg/b.py\n", "exists"),
        ("--- a/a.py\n@@ -1 +1 @@\n", "without"),
    ],
)
def test_bad_patches_are_refused(patch: str, problem: str) -> None:
    with pytest.raises(PatchError, match=problem):
        apply_patch(FILES, patch)
