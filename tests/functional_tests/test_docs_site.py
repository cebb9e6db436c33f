"""The built documentation in a browser: it loads nothing from other hosts, is legible, and its links lead somewhere."""

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urldefrag

import pytest

from tests.ranks import ROOT

pytest.importorskip("playwright.sync_api", reason="needs playwright")
from playwright.sync_api import Browser, Page, sync_playwright  # noqa: E402

CHROMIUM = shutil.which("chromium")
# The first test builds the site. Limits are generous, because other tests may use all cores.
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium"), pytest.mark.timeout(900)]
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}

# Of a page: links and anchors, images without a picture, whether a comment shows as text, and code that is cut off.
LOOK = """() => ({
    links: [...document.querySelectorAll("a[href]")].map(a => a.href),
    ids: [...document.querySelectorAll("[id]")].map(e => e.id),
    broken: [...document.images].filter(i => !i.complete || i.naturalWidth === 0).map(i => i.src),
    hidden: [...document.querySelectorAll("article p")].some(e => e.textContent.startsWith("<!--")),
    cut: [...document.querySelectorAll("article :is(.language-python, .language-bash, .language-diff) pre > code")]
        .filter(e => e.scrollWidth > e.clientWidth).map(e => e.textContent.trim().split("\\n")[0]),
})"""
# A text, the first block that is its ground, and the size of the text in pixels.
COLORS = """selector => {
    const text = document.querySelector(selector)
    let ground = text
    while (getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)") ground = ground.parentElement
    const numbers = color => {
        const pixel = Object.assign(document.createElement("canvas"), {width: 1, height: 1}).getContext("2d")
        pixel.fillStyle = getComputedStyle(ground).backgroundColor
        pixel.fillRect(0, 0, 1, 1)
        pixel.fillStyle = color
        pixel.fillRect(0, 0, 1, 1)
        return [...pixel.getImageData(0, 0, 1, 1).data].slice(0, 3)
    }
    const style = getComputedStyle(text)
    return [numbers(style.color), numbers(getComputedStyle(ground).backgroundColor), parseFloat(style.fontSize)]
}"""

# Of a picture: texts that leave it, dark ones that lie on a colored box, and the size of the smallest on a phone.
TEXTS = """() => {
    const svg = document.documentElement, width = svg.viewBox.baseVal.width
    const boxes = [...svg.querySelectorAll("rect")].slice(1).map(e => e.getBBox()).filter(b => b.height > 8)
    const texts = [...svg.querySelectorAll("text")].map(e => ({box: e.getBBox(), element: e}))
    const near = (at, size, other, length, slack) => at + slack < other + length && other < at + size - slack
    const on = (a, b) => near(a.x, a.width, b.x, b.width, 0) && near(a.y, a.height, b.y, b.height, 4)
    const dark = e => e.getAttribute("fill") !== "white"
    const wrong = texts.filter(t => t.box.x < 0 || t.box.x + t.box.width > width
        || dark(t.element) && boxes.some(b => on(t.box, b))
        || texts.some(other => other !== t && on(t.box, other.box)))
    const sizes = texts.map(t => parseFloat(getComputedStyle(t.element).fontSize) * 358 / width)
    return [wrong.map(t => t.element.textContent), Math.min(...sizes)]
}"""


class Site(NamedTuple):
    """The site, served on this machine.

    Attributes:
        folder: Its files.
        address: Its address, with a slash at the end.
        browser: A browser without a window.
    """

    folder: Path
    address: str
    browser: Browser

    def pages(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*.html"))


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    command = [Path(sys.executable).parent / "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stdout + built.stderr
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield Site(folder, f"http://127.0.0.1:{server.server_port}/", browser)
        browser.close()
    server.shutdown()


def opened(site: Site, page: str = "index.html", scheme: Any = "light") -> tuple[Page, list[str]]:
    """A page, and what goes wrong on it from now on."""
    tab = site.browser.new_page(viewport=DESKTOP, color_scheme=scheme)
    tab.set_default_timeout(120_000)
    problems: list[str] = []
    tab.on(
        "request", lambda r: None if r.url.startswith((site.address, "data:")) else problems.append(f"loads {r.url}")
    )
    tab.on("response", lambda r: None if r.status < 400 else problems.append(f"{r.status}: {r.url}"))
    tab.on("console", lambda m: problems.append(f"console: {m.text}") if m.type == "error" else None)
    tab.on("pageerror", lambda error: problems.append(f"error: {error}"))
    tab.goto(site.address + page)
    return tab, problems


def test_every_page(site: Site) -> None:
    """Pages load from this host alone, with all pictures; links have targets; nothing is wider than a phone."""
    tab, problems = opened(site)
    found: dict[str, dict[str, Any]] = {}
    for page in site.pages():
        before = len(problems)
        tab.set_viewport_size(DESKTOP)
        tab.goto(site.address + page, wait_until="load")
        found[page] = tab.evaluate(LOOK)
        problems += [f"no picture: {image}" for image in found[page]["broken"]]
        problems += ["a comment shows"] if found[page]["hidden"] else []
        problems += [f"code is cut off on a desktop: {code}" for code in found[page]["cut"]]
        tab.set_viewport_size(PHONE)
        width = tab.evaluate("document.documentElement.scrollWidth")
        problems += [f"is {width} pixels wide on a phone"] if width > PHONE["width"] else []
        problems[before:] = [f"{page}: {problem}" for problem in problems[before:]]
    for page, seen in found.items():
        for link in {link for link in seen["links"] if link.startswith(site.address)}:
            address, anchor = urldefrag(link.removeprefix(site.address))
            target = "index.html" if address in ("", ".") else address
            if not (site.folder / target).is_file():
                problems.append(f"{page}: dead link: {link}")
            elif anchor and target in found and anchor not in found[target]["ids"]:
                problems.append(f"{page}: no such anchor: {link}")
    tab.close()
    assert len(found) > 20
    assert not problems, "\n".join(problems)


def test_pictures_are_legible(site: Site) -> None:
    """A phone shows a picture as wide as its screen; no text leaves it or lies on something else."""
    tab, _ = opened(site)
    drawn = sorted(path.name for path in (site.folder / "images").glob("*.svg"))
    assert len(drawn) >= 9
    for name in drawn:
        tab.goto(f"{site.address}images/{name}")
        wrong, size = tab.evaluate(TEXTS)
        # The one that matplotlib draws has outlines in place of texts.
        assert name == "memory_by_strategy.svg" or (wrong == [] and size > 9), (name, wrong, size)
    tab.set_viewport_size(PHONE)
    tab.goto(f"{site.address}guide/strategies.html")
    widths = tab.evaluate("[...document.querySelectorAll('article img')].map(i => i.getBoundingClientRect().width)")
    assert all(300 < width < PHONE["width"] for width in widths) and len(widths) == 2, widths
    tab.goto(f"{site.address}trace.html")
    assert tab.evaluate("document.querySelector('article img').getBoundingClientRect().width") == 900
    assert tab.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    tab.close()


def test_tables_fit_a_phone(site: Site) -> None:
    """Columns of numbers are as narrow as their numbers, an empty head takes no line, and names break at their dots."""
    tab, _ = opened(site, "performance.html")
    tab.set_viewport_size(PHONE)
    wide = "[...document.querySelectorAll('.md-typeset__scrollwrap')].map(e => e.scrollWidth > e.clientWidth)"
    assert set(tab.evaluate(wide)) == {False}
    tab.goto(f"{site.address}frameworks/huggingface.html")
    empty = "[...document.querySelectorAll('thead')].filter(e => !e.textContent.trim()).map(e => e.offsetHeight)"
    assert set(tab.evaluate(empty)) == {0}
    assert tab.locator("td code:has(wbr)").count() > 10
    tab.close()


def test_docstrings_are_rendered(site: Site) -> None:
    for page in (site.folder / "reference").glob("*.html"):
        text = page.read_text()
        left = re.findall(r":\w+:`.*|``.*|.*\b(?:Args|Returns|Raises|Attributes):\s*\n.*", text)
        assert not left, (page.name, left)
    assert "The model. It stays accessible as" in (site.folder / "reference/sharding.html").read_text()


def test_search(site: Site) -> None:
    tab, problems = opened(site)
    box = tab.get_by_role("textbox", name="Search")
    box.fill("reduce-scatter")
    # The page reads the query when a key is released, which fill() does not do, or once when the index is loaded.
    box.press("End")
    result = tab.locator(".md-search-result__link").first
    result.wait_for()
    assert "reduce" in result.inner_text().lower()
    with tab.expect_navigation():
        result.click()
    assert "reduce-scatter" in tab.locator("article").inner_text().lower() and problems == []
    tab.close()


def test_navigation(site: Site) -> None:
    tab, problems = opened(site)
    tab.locator(".md-tabs").get_by_role("link", name="Reference").click()
    tab.wait_for_url("**/reference/index.html")
    tab.locator(".md-sidebar--primary").get_by_role("link", name="Settings").click()
    tab.wait_for_url("**/reference/settings.html")
    tab.get_by_role("link", name="MixedPrecisionPolicy").first.click()
    assert tab.locator("h1").inner_text().startswith("Settings") and "#" in tab.url
    # On a phone, behind a button.
    tab.set_viewport_size(PHONE)
    tab.locator(".md-header__button[for=__drawer]").click()
    tab.locator(".md-sidebar--primary").locator("a[href='checkpoint.html']").click()
    tab.wait_for_url("**/checkpoint.html")
    assert problems == []
    tab.close()


def luminance(color: list[int]) -> float:
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(text: list[int], ground: list[int]) -> float:
    """As WCAG 2 defines it, which asks for 4.5."""
    low, high = sorted((luminance(text), luminance(ground)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible(site: Site, scheme: str) -> None:
    tab, _ = opened(site, "checkpoints.html", scheme)
    tab.set_viewport_size(PHONE)
    smallest = {"article p": 14, "article h2": 18, "article td": 12, "article code": 11, "article pre code": 12}
    grounds = set()
    for selector, size in smallest.items():
        text, ground, found = tab.evaluate(COLORS, selector)
        assert contrast(text, ground) >= 4.5 and found >= size, (selector, text, ground, found)
        grounds.add(luminance(ground) > 0.5)
    assert grounds == {scheme == "light"}
    tab.close()


def test_the_contrast_of_colors() -> None:
    assert contrast([0, 0, 0], [255, 255, 255]) == pytest.approx(21)
    assert contrast([118, 118, 118], [255, 255, 255]) == pytest.approx(4.54, abs=0.01)
