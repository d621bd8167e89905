"""The report of a sweep: what it holds, that it needs nothing else, and how a real browser shows it."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from sweep_folder import make_sweep

from megnorm.scaling.report import write_report
from megnorm.scaling.results import read_results

FIGURES = 8  # optimum, two laws, residuals, four sizes


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    make_sweep(folder)
    write_report(folder / "sweep", "chinchilla", None, 25)
    return folder / "sweep"


def test_it_holds_figures_runs_and_cost(report: Path) -> None:
    text = (report / "report.html").read_text()
    assert text.count("<svg") == FIGURES == len(list((report / "figures").glob("*.png")))
    assert all(name in text for name in ("a_200_pre", "d_800_hybrid_star", "hybrid_star minus pre", "IsoFLOP"))
    assert "$0.05" in text  # 24 runs of 36 s at $0.20 an hour
    assert json.loads((report / "fit.json").read_text())["runs"] == 24


def test_it_needs_nothing_from_elsewhere(report: Path) -> None:
    text = (report / "report.html").read_text()
    assert not re.search(r"https?:|<script|<link|@import|src=", text)
    assert "prefers-color-scheme: dark" in text and not re.search(r'style="[^"]*#(2f6fd0|22272e)', text)


def test_results_are_read_back(report: Path) -> None:
    assert len(read_results(report / "results.json")[0]) == 24


def test_without_a_fit_it_says_why(tmp_path: Path) -> None:
    make_sweep(tmp_path, budgets=(200, 400))
    write_report(tmp_path / "sweep", "chinchilla", None, 25)
    text = (tmp_path / "sweep" / "report.html").read_text()
    assert "2 numbers of tokens can&#x27;t carry" in text and text.count("<svg") == 4
    assert not (tmp_path / "sweep" / "fit.json").exists()


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# The page in a frame as wide as a phone or a desk; what it looks like goes into the title of the outer page.
FRAME = """<!doctype html><title>waiting</title><body><script>
const errors = [], frame = document.createElement("iframe");
addEventListener("error", event => errors.push(event.message));
frame.style.cssText = "width:WIDTHpx;height:900px;border:0";
frame.onload = () => {
  const page = frame.contentDocument, look = frame.contentWindow.getComputedStyle(page.body);
  const boxes = [...page.querySelectorAll("figure svg")].map(svg => svg.getBoundingClientRect());
  const dots = [...page.querySelectorAll("figure svg")].map(svg => svg.querySelectorAll("path").length);
  document.title = JSON.stringify({errors, back: look.backgroundColor, ink: look.color,
    wide: page.documentElement.scrollWidth, widths: boxes.map(box => box.width), heights: boxes.map(box => box.height),
    dots, loaded: frame.contentWindow.performance.getEntriesByType("resource").length});
};
frame.srcdoc = TEXT;
document.body.append(frame);
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1280, False)])
def test_a_browser_shows_it(report: Path, tmp_path: Path, width: int, dark: bool) -> None:
    text = json.dumps((report / "report.html").read_text()).replace("</", "<\\/")
    (tmp_path / "frame.html").write_text(FRAME.replace("WIDTH", str(width)).replace("TEXT", text))
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=10000",
        f"--user-data-dir={tmp_path / 'profile'}",
        *scheme,
        "--dump-dom",
        f"file://{tmp_path / 'frame.html'}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    seen = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", done.stdout).group(1)))
    assert seen["errors"] == [] and seen["loaded"] == 0
    assert seen["wide"] <= width, "the page must not scroll sideways"
    assert len(seen["widths"]) == FIGURES and min(seen["widths"]) > 300 and min(seen["heights"]) > 200
    assert min(seen["dots"]) > 5
    assert (seen["back"] == "rgb(20, 23, 28)") == dark and seen["ink"] != seen["back"]
