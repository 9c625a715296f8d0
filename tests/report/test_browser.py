"""The page in a real browser: the system's Chromium, opened from a file."""

import re
import shutil
from functools import cache

import numpy as np
import pytest

from mesascope.experiments.lab import SCALES
from mesascope.report import write_page
from tests.report.outcomes import outcomes

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)"
)


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("report")
    return write_page(outcomes(), folder / "index.html", scale=SCALES["released"], differences=[]).as_uri()


@pytest.fixture(scope="module")
def pages():
    """By width and color scheme; opening one takes longer than most tests."""
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)

        @cache
        def page(width: int, scheme: str):
            size = {"width": width, "height": 900}
            page = browser.new_page(viewport=size, color_scheme=scheme, reduced_motion="reduce")
            page.set_default_timeout(20_000)
            return page

        yield page
        browser.close()


@pytest.fixture
def visit(pages, address):
    """Opens the page; afterwards, nothing may have been complained about or asked of anyone."""
    visited, complaints, requests = [], [], []
    listeners = {
        "console": lambda message: complaints.append(message.text),
        "pageerror": lambda error: complaints.append(str(error)),
        "request": lambda request: requests.append(request.url),
    }

    def visit(width: int = 1280, scheme: str = "light", fragment: str = ""):
        page = pages(width, scheme)
        for event, listener in listeners.items():
            page.on(event, listener)
        visited.append(page)
        page.goto(address + fragment)
        return page

    yield visit
    for page in visited:
        page.evaluate("localStorage.clear()")
        page.emulate_media(media="screen")
        page.goto("about:blank")
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
    assert complaints == []
    elsewhere = [url for url in requests if url.partition("#")[0] != address and not url.startswith("data:")]
    assert elsewhere == []


def plot_of(page, figure: str, panel: int):
    plot = page.locator(f"#{figure}-{panel} .plot")
    plot.scroll_into_view_if_needed()
    plot.locator("svg").wait_for()
    return plot


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"-?\d+\.?\d*", text.replace("−", "-"))]


def test_all_panels_are_drawn(visit):
    page = visit()
    for i in range(3):
        plot_of(page, "fig4", i)
        plot_of(page, "fig3", i)
    assert page.locator("#fig4-1 .curve").count() == 5
    assert page.locator("#fig1-0 img").evaluate("image => image.naturalWidth") > 0
    # Not a number: the mean has a gap, and so does the band.
    assert page.locator("#fig4-2 path.line").get_attribute("d").count("M") == 2
    assert page.locator("#fig4-2 path.band").count() == 2


def test_filters(visit):
    page = visit()
    shown = page.locator("tbody.claim:visible")
    ids = lambda: [row.get_attribute("id").removeprefix("claim-") for row in shown.all()]  # noqa: E731
    assert len(ids()) == 5
    page.get_by_role("button", name="fail").click()
    assert ids() == ["fig4a-2", "fig4c-1"]
    assert page.locator("#shown").inner_text() == "2"
    page.locator("#filter-text").fill("interpolating FIG4A")
    assert ids() == ["fig4a-2"]
    page.get_by_role("button", name="all 5").click()
    page.locator("#filter-text").fill("")
    page.locator("#filter-figure").select_option("fig3")
    assert ids() == ["fig3a-1"]
    page.get_by_role("button", name=re.compile("^hold")).click()
    assert ids() == []
    assert page.get_by_text("No claim is like that.").is_visible()
    # A sign beside a panel leads to its claim, whatever the filters.
    page.locator("#fig4-0 .sign").first.click()
    page.locator("#claim-fig4a-1").wait_for()
    assert len(ids()) == 5


def test_rows_lead_to_their_figure(visit):
    page = visit()
    page.locator("#claim-fig3a-1 th a").click()
    assert page.url.endswith("#fig3")
    page.wait_for_function("Math.abs(document.querySelector('#fig3').getBoundingClientRect().top) < 120")


def test_hovering_shows_values(visit):
    page = visit()
    lines = outcomes()[2].panels[1].lines
    plot = plot_of(page, "fig4", 1)
    assert plot.locator(".tip").is_hidden()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.1 * box["height"])
    title = page.locator("#fig4-1 .key .at").inner_text()
    assert title.startswith("context length ")
    at = int(title.split()[-1]) - 1
    assert 20 <= at <= 30
    for line, row in zip(lines, page.locator("#fig4-1 .key tbody tr").all(), strict=True):
        (mean,) = numbers(row.locator(".y").inner_text())
        np.testing.assert_allclose(mean, line.y[:, at].mean(), rtol=2e-3)
        if len(line.y) > 1:
            ends = [float(end) for end in row.locator(".range").inner_text().split("–")]
            np.testing.assert_allclose(ends, [line.y[:, at].min(), line.y[:, at].max()], rtol=1e-2)
    # The pointer is high up: the highest curve is the nearest.
    tip = plot.locator(".tip").inner_text()
    assert "1 layers" in tip
    np.testing.assert_allclose(numbers(tip.split("\n")[1])[0], lines[0].y[:, at].mean(), rtol=2e-3)
    assert "over 5 seeds" in tip
    page.mouse.move(0, 0)
    assert plot.locator(".tip").is_hidden()
    assert page.locator("#fig4-1 .key .at").inner_text() == "at the end"


def test_values_can_be_read_with_keys(visit):
    page = visit()
    plot = plot_of(page, "fig4", 1)
    plot.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    said = page.locator("#fig4-1 output").inner_text()
    assert said.startswith("2 layers: ")
    assert "at context length 2," in said
    np.testing.assert_allclose(numbers(said)[1], outcomes()[2].panels[1].lines[1].y[:, 1].mean(), rtol=2e-3)
    page.keyboard.press("Escape")
    assert plot.locator(".tip").is_hidden()


def test_curves_can_be_hidden(visit):
    page = visit()
    plot = plot_of(page, "fig4", 2)
    button = page.locator("#fig4-2 .key button")
    button.focus()
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "false"
    assert plot.locator(".curve").count() == 0
    button.click()
    assert plot.locator(".curve").count() == 1


def test_single_seeds(visit):
    page = visit()
    plot = plot_of(page, "fig4", 1)
    assert (plot.locator(".band").count(), plot.locator(".thin").count()) == (4, 0)
    page.locator("#fig4").get_by_role("button", name="each one").click()
    assert (plot.locator(".band").count(), plot.locator(".thin").count()) == (0, 20)


def test_variants(visit):
    page = visit()
    plot = plot_of(page, "fig4", 0)
    rows = page.locator("#fig4-0 .key tbody tr:visible")
    assert (plot.locator(".curve").count(), rows.count()) == (4, 4)
    before = numbers(rows.first.locator(".y").inner_text())[0]
    page.locator("#fig4").get_by_role("button", name="as written").click()
    # Its twin has gone, what is the same for both has stayed.
    assert (plot.locator(".curve").count(), rows.count()) == (4, 4)
    assert "as written" in rows.first.inner_text()
    assert numbers(rows.first.locator(".y").inner_text())[0] > 1.1 * before
    page.locator("#fig4").get_by_role("button", name="both").click()
    assert (plot.locator(".curve").count(), rows.count()) == (5, 5)


def corner(page, panel: str) -> list[int]:
    """The color of the first cell."""
    script = "canvas => [...canvas.getContext('2d').getImageData(0, 0, 1, 1).data]"
    return page.locator(f"{panel} .plot canvas").evaluate(script)


def test_maps_have_a_slider(visit):
    page = visit()
    maps = outcomes()[1].panels[1].maps
    plot_of(page, "fig3", 1)
    slider = page.locator("#fig3-1 input[type=range]")
    which = page.locator("#fig3-1 .which output")
    assert which.inner_text() == "10"  # as given, not as sorted
    assert corner(page, "#fig3-1") == pytest.approx([0x67, 0, 0x1F, 255], abs=8)
    slider.focus()
    page.keyboard.press("End")
    assert which.inner_text() == "1"
    assert slider.get_attribute("aria-valuetext") == "1"
    own = corner(page, "#fig3-1")
    page.locator("#fig3-1").get_by_label("one color scale for all").check()
    # One tenth of the common scale is pale; on its own scale it was full red.
    assert corner(page, "#fig3-1")[1] > own[1] + 80
    page.locator("#fig3-1 .thumbs canvas").nth(1).click()
    assert which.inner_text() == "2"
    assert slider.input_value() == "1"
    assert list(maps) == ["10", "2", "1"]


def test_maps_show_values(visit):
    page = visit()
    plot = plot_of(page, "fig3", 0)
    canvas = plot.locator("canvas").bounding_box()
    page.mouse.move(canvas["x"] + canvas["width"] * 2.5 / 20, canvas["y"] + canvas["height"] * 4.5 / 20)
    value, where = plot.locator(".tip").inner_text().split("\n")
    assert where == "query 4, key 2"
    assert float(value) == pytest.approx(np.exp(-2), rel=5e-3)  # maps have three digits
    page.mouse.move(0, 0)
    assert plot.locator(".tip").is_hidden()
    wide = plot_of(page, "fig3", 2)
    wide.focus()
    for key in ["ArrowRight"] * 4 + ["ArrowDown"]:
        page.keyboard.press(key)
    assert wide.locator(".tip").inner_text().split("\n") == ["–", "head 1, time 3"]  # not a number


def test_light_and_dark(visit):
    background = "getComputedStyle(document.body).backgroundColor"
    page = visit(scheme="dark")
    dark = page.evaluate(background)
    page.get_by_role("button", name="light or dark page").click()
    light = page.evaluate(background)
    assert sum(map(int, re.findall(r"\d+", dark))) < 100 < 700 < sum(map(int, re.findall(r"\d+", light)))
    page.reload()
    assert page.evaluate(background) == light  # remembered
    assert visit(scheme="light").evaluate(background) == light


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_nothing_sticks_out_or_moves(visit, width, scheme):
    page = visit(width, scheme)
    page.evaluate(
        "window.shifts = []; new PerformanceObserver(list => shifts.push(...list.getEntries().map(e => e.value)))"
        ".observe({type: 'layout-shift', buffered: true})"
    )
    for figure in ("fig3", "fig4"):
        for panel in range(3):
            plot_of(page, figure, panel)
    page.locator("details").first.evaluate("node => node.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    out = """() => [...document.querySelectorAll("main *")].filter(node => {
        const box = node.getBoundingClientRect();
        const inside = box.right <= innerWidth + .5 && box.left >= -.5;
        return box.width && !inside && !node.closest(".scroll, .hidden, pre, svg");
    }).map(node => node.outerHTML.slice(0, 80))"""
    assert page.evaluate(out) == []
    assert page.evaluate("shifts.reduce((a, b) => a + b, 0)") < 0.01


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(visit, scheme):
    """Contrast of at least 4.5, as WCAG asks for (level AA)."""
    page = visit(scheme=scheme)
    script = """selector => {
        const paint = color => {
            const context = Object.assign(document.createElement("canvas"), {width: 1, height: 1}).getContext("2d");
            context.fillStyle = color; context.fillRect(0, 0, 1, 1);
            return [...context.getImageData(0, 0, 1, 1).data];
        };
        const node = document.querySelector(selector);
        let back = node;
        while (paint(getComputedStyle(back).backgroundColor)[3] < 255) back = back.parentElement;
        return [paint(getComputedStyle(node).color), paint(getComputedStyle(back).backgroundColor)];
    }"""

    def luminance(color):
        part = np.array(color[:3]) / 255
        return np.where(part <= 0.03928, part / 12.92, ((part + 0.055) / 1.055) ** 2.4) @ [
            0.2126,
            0.7152,
            0.0722,
        ]

    for selector in (
        "body", ".note", ".verdict.holds", ".verdict.fails", ".verdict.untested", ".tag.origin", ".claims a",
        ".choice button[aria-pressed=true]", ".choice button[aria-pressed=false]", ".jump a", ".interval",
        ".command code",
    ):  # fmt: skip
        low, high = sorted(luminance(color) for color in page.evaluate(script, selector))
        assert (high + 0.05) / (low + 0.05) >= 4.5, selector


def test_prints_with_every_panel(visit):
    page = visit()
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator(".plot").count() == page.locator(".plot:has(svg)").count() == 6
    assert page.locator("nav.bar").is_hidden()
    assert page.locator(".filters").is_hidden()


def test_links_open_what_is_folded(visit):
    page = visit(fragment="#model-released-softmax-7")
    assert page.locator("#model-released-softmax-7").evaluate("node => node.open") is True
    assert "Softmax" in page.locator("#model-released-softmax-7 pre").inner_text()
