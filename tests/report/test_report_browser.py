"""The report in a real browser: no request, nothing that axe finds, phone and paper, and 192 blocks."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mainstem.audit import AuditResult
from mainstem.report import make_report, to_json, write_html

playwright = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"),
    "--host-resolver-rules=MAP * ~NOTFOUND",
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the twin towers, 96 blocks each."""
    audit = importlib.import_module("mainstem.audit")
    configs = [
        audit.AuditConfig(model=name, text="sotu-held-out", tokens=256, window=128)
        for name in ("tower96", "tower96_no_residual")
    ]
    audits = [json.loads(to_json(audit.run_audit(config))) for config in configs]
    return write_html(make_report(audits), tmp_path_factory.mktemp("twins") / "report.html")


def opened(browser: Any, path: Path, **context: Any) -> tuple[Any, list[str]]:
    """Open a page, and note what it asks for and what the browser complains of."""
    page = browser.new_context(**context).new_page()
    noted: list[str] = []
    page.on("request", lambda request: noted.append(request.url))
    page.on("console", lambda message: noted.append(message.text))
    page.on("pageerror", lambda error: noted.append(str(error)))
    page.goto(path.as_uri())
    return page, [url for url in noted if not url.startswith("data:image/png")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_asked_for_and_axe_finds_nothing(browser: Any, twins: Path, scheme: str) -> None:
    page, noted = opened(browser, twins, color_scheme=scheme)
    assert noted == [twins.as_uri()]
    found = axe.Axe().run(page).response
    assert found["passes"]
    assert [violation["id"] for violation in found["violations"]] == []
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 28)"}[scheme]


def test_without_javascript(browser: Any, twins: Path) -> None:
    page, _ = opened(browser, twins, java_script_enabled=False)
    assert page.locator("svg").count() > 20
    assert page.get_by_role("heading", name="How does the stream grow?").is_visible()
    page.locator("#growth summary").click()
    assert page.locator("#growth table").is_visible()


def test_on_a_phone(browser: Any, twins: Path) -> None:
    page, _ = opened(browser, twins, viewport={"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    boxes = [svg.bounding_box() for svg in page.locator("svg").all()]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 390 for box in boxes)


def test_paper_is_light_and_its_letters_can_be_read(browser: Any, twins: Path) -> None:
    page, _ = opened(browser, twins, color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    points = page.evaluate(
        "[...document.querySelectorAll('main svg text')].filter(t => t.getClientRects().length).map("
        "t => parseFloat(getComputedStyle(t).fontSize) * t.getScreenCTM().a * 0.75)"
    )
    assert len(points) > 100
    assert min(points) >= 7


def test_text_stays_inside_its_chart(browser: Any, twins: Path) -> None:
    page, _ = opened(browser, twins, viewport={"width": 1100, "height": 900})
    outside = page.evaluate(
        "[...document.querySelectorAll('svg text')].filter(t => {"
        "const a = t.getBoundingClientRect(), b = t.ownerSVGElement.getBoundingClientRect();"
        "return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1"
        "}).map(t => t.textContent)"
    )
    assert outside == []


def test_192_blocks(browser: Any, llama: AuditResult, tmp_path: Path) -> None:
    audit = json.loads(to_json(llama))
    audit["blocks"] = [{**audit["blocks"][i % 3], "block": i} for i in range(192)]
    audit["angular_distance"]["distances"] = [[(n + i) / 400 for i in range(192 - n)] for n in range(192)]
    path = write_html(make_report([audit, audit]), tmp_path / "report.html")
    assert path.stat().st_size <= 1_000_000
    page, _ = opened(browser, path)
    assert page.evaluate("performance.getEntriesByType('navigation')[0].domComplete") <= 3000
