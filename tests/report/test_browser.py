"""The pages in a browser, as wide as a desk and a phone: nothing sticks out, every picture is drawn."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kvmap import report
from tests.report.rows import write_run
from tests.report.test_study import write_job

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = {"desk": 1280, "phone": 390}
SCHEMES = {"light": 1, "dark": 0}
# A window cannot be as narrow as a phone; a frame in it can, and is a viewport of its own.
FRAME = """<style>body {{ margin: 0 }} iframe {{ border: 0; display: block }}</style>
<iframe id="page" src="{address}" width="{width}" height="{height}"></iframe><pre id="found"></pre>
<script>
page.onload = () => {{
  const inner = page.contentDocument, root = inner.documentElement;
  const outside = [...inner.querySelectorAll("body *")].filter(
    (element) => element.getBoundingClientRect().right > {width} + 1 && !element.closest(".scroll"));
  found.textContent = JSON.stringify({{
    width: root.scrollWidth,
    height: root.scrollHeight,
    outside: outside.map((element) => element.tagName + " " + element.className),
    pictures: [...inner.images].map((image) => [image.complete, image.naturalWidth]),
    scrolling: [...inner.querySelectorAll(".scroll")].filter(
      (box) => box.scrollWidth > box.clientWidth).length,
    paper: getComputedStyle(inner.body).backgroundColor,
  }});
}};
</script>
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: install Debian's package `chromium`"),
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    run = write_run(tmp_path_factory.mktemp("run") / "run", diagnosed=True)
    study = tmp_path_factory.mktemp("study")
    for number, top_k in enumerate((1, 8)):
        write_job(study / str(number), top_k, 0)
    for path in (run, study):
        assert report.main([str(path)]) == 0
    return {"run": run / "report.html", "study": study / "report.html"}


def browse(
    page: Path, folder: Path, width: int, dark: int, height: int = 2000
) -> tuple[dict[str, Any], Path]:
    """What the browser finds on the page, and a picture of its top."""
    assert CHROMIUM is not None
    frame, picture = folder / "frame.html", folder / "page.png"
    frame.write_text(FRAME.format(address=page.as_uri(), width=width, height=height))
    common = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--allow-file-access-from-files",
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={max(width, 500)},{height}",
        f"--blink-settings=preferredColorScheme={dark}",
    ]
    for last in (["--dump-dom"], [f"--screenshot={picture}"]):
        done = subprocess.run(
            [*common, *last, frame.as_uri()], capture_output=True, text=True, timeout=90, check=True
        )
        if last == ["--dump-dom"]:
            text = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert text is not None
    found: dict[str, Any] = json.loads(html.unescape(text.group(1)))
    return found, picture


@pytest.mark.parametrize("name", ["run", "study"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_fits_its_window_in_both_schemes(
    name: str, width: str, scheme: str, pages: dict[str, Path], tmp_path: Path
) -> None:
    found, picture = browse(pages[name], tmp_path, WIDTHS[width], SCHEMES[scheme])
    assert found["width"] == WIDTHS[width]
    assert found["outside"] == []
    assert found["height"] > 1500
    assert len(found["pictures"]) == {"run": 9, "study": 1}[name]
    assert all(complete and drawn > 0 for complete, drawn in found["pictures"])
    assert width == "desk" or found["scrolling"] > 0  # wide tables do, inside their own box
    assert found["paper"] == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
    colours = Image.open(picture).convert("RGB").getcolors(maxcolors=1 << 24)
    assert colours is not None
    assert len(colours) > 20
