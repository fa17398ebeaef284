"""Pages with controls at the width of a phone, laid out by Chromium: nothing is cut off."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sixfold.pages.page import page_of, render_controls
from sixfold_labs.catalogue import find
from sixfold_planning.hardware import parse_cluster
from sixfold_planning.page.html import plan_page
from sixfold_planning.page.question import PlanQuestion

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--dump-dom"]
OPTIONS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
OPTIONS += ["--allow-file-access-from-files", "--virtual-time-budget=6000"]
FRAME = """<!doctype html><body><iframe id="f" src="page.html"
style="border:0;width:400px;height:9000px"></iframe><script>
onload = () => setTimeout(() => {
  const page = document.getElementById("f").contentDocument;
  const out = [...page.querySelectorAll("body *")].filter((e) => {
    const box = e.getBoundingClientRect(), held = e.parentElement.closest(".scroll");
    return !held && (box.right > 400.5 || box.left < -0.5);
  });
  const drawn = page.querySelectorAll("#figures svg").length;
  document.title = `drawn ${drawn} out ${out.map((e) => e.tagName + e.id).join(" ")} end`;
}, 2000);
</script>"""


def plan() -> str:
    asked = PlanQuestion("gsm8k", [], parse_cluster("1xL4"), "", None, 0.5, 0.8)
    return render_controls(plan_page(asked), asked.settings)


def lab(name: str) -> str:
    return render_controls(page_of(find(name)), find(name).settings({}))


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("name", ["plan", "kv-sizer", "topology"])
def test_nothing_is_outside_a_page_of_400_pixels(tmp_path: Path, name: str) -> None:
    (tmp_path / "page.html").write_text(plan() if name == "plan" else lab(name))
    (tmp_path / "frame.html").write_text(FRAME)
    command = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={tmp_path}/profile"]
    done = subprocess.run(
        [*command, (tmp_path / "frame.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    found = re.search(r"<title>drawn (\d+) out (.*?) end</title>", done.stdout)
    assert found, done.stderr[-2000:]
    assert int(found[1]) > 0 and found[2] == ""


def test_the_longest_row_of_a_plan_is_not_cut() -> None:
    text = plan()
    assert "limited by memory)" in text and "limited by memor…" not in text
