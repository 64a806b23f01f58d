"""The pages as a person sees them: a report, a comparison and a live page, wide and narrow, light and dark.

MEGALITE_PICTURES=DIR keeps a picture of each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from megalite.monitoring.report import live
from megalite.monitoring.report.live import LivePage, LiveServer
from megalite.monitoring.report.page import page
from megalite.monitoring.report.run import read_all
from tests.monitoring.browser import PROGRAM, Browser, browser
from tests.monitoring.test_report import write_run

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium")

SIZES, SCHEMES = ((1280, 800), (400, 800)), ("light", "dark")
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
CURVES = (
    "[...document.querySelectorAll('.chart canvas')].filter(each => each.getBoundingClientRect().width > 200).length"
)
CHART = "[...document.querySelectorAll('.chart')].find(each => each.querySelector('h3').textContent === %s)"
LIGHT = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0] > 127"


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened_browser:
        yield opened_browser


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The address of each kind of page."""
    place = tmp_path_factory.mktemp("runs")
    runs = (
        write_run(place / "a-run-with-quite-a-long-name-as-people-give-them", pp=2),
        write_run(place / "other", lr=6e-4),
    )
    files = {"report": runs[:1], "comparison": runs, "mixture": [write_run(place / "mixture", experts=8)]}
    for name, directories in files.items():
        (place / f"{name}.html").write_text(page(read_all(directories)))
    with pytest.MonkeyPatch.context() as patch, LiveServer(LivePage(runs[1])) as server:
        patch.setattr(live, "REFRESH_S", 0.0)
        patch.setattr(live, "SHARE", 1e9)
        Thread(target=server.serve_forever, daemon=True).start()
        yield {name: (place / f"{name}.html").as_uri() for name in files} | {
            "live": server.url,
            "directory": str(runs[1]),
        }
        server.shutdown()


@pytest.mark.parametrize("kind, charts", [("report", 8), ("comparison", 11), ("mixture", 9), ("live", 7)])
def test_a_page_fits_its_window_and_has_its_curves(kind: str, charts: int, opened: Browser, addresses: dict[str, str]):
    for width, height in SIZES:
        for scheme in SCHEMES:
            opened.open(addresses[kind], width, height, dark=scheme == "dark")
            assert opened.run(OVERFLOW) == 0, f"{width} px, {scheme}: the page is wider than its window"
            assert opened.run(CURVES) >= charts and opened.run(LIGHT) == (scheme == "light")
            assert opened.problems == []
            if place := os.environ.get("MEGALITE_PICTURES"):
                opened.picture(Path(place, f"{kind}-{width}-{scheme}.png"))


def chart(title: str) -> str:
    return CHART % json.dumps(title)


def point(opened: Browser, title: str, share: float) -> str:
    """The legend of a chart with the pointer at a share of its width; the values are those under it."""
    opened.run(f"{chart(title)}.scrollIntoView()")
    x, y, width, height = opened.run(
        "(box => [box.x, box.y, box.width, "
        f"box.height])({chart(title)}.querySelector('.u-over').getBoundingClientRect())"
    )
    opened.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + share * width, y=y + 0.5 * height)
    legend = f"{chart(title)}.querySelector('.u-legend').textContent"
    return str(
        opened.run(f"new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done({legend}))))")
    )


def test_values_are_under_the_pointer_and_steps_are_whole(opened: Browser, addresses: dict[str, str]):
    opened.open(addresses["report"], 1280, 800, dark=False)
    assert point(opened, "Loss", 19.2 / 39) == "step20training4validation4.125", "of steps 1 to 40"
    assert point(opened, "Loss", 30.1 / 39) == "step31training3.45validation4.125", "the last validation before"
    assert "highest" not in opened.run(f"{chart('Loss')}.innerText")
    splits = opened.run("[...document.querySelectorAll('.chart')].flatMap(each => each.plot.axes[0]._splits)")
    assert splits and all(value == int(value) for value in splits), "no half steps"


def test_dragging_zooms_and_choices_outlive_a_refresh(opened: Browser, addresses: dict[str, str]):
    opened.open(addresses["live"], 1280, 800, dark=False)
    x, y, width = opened.run(
        "(box => [box.x, box.y + 50, "
        f"box.width])({chart('Gradient norm')}.querySelector('.u-over').getBoundingClientRect())"
    )
    opened.run(f"scrollTo(0, {y} - 300)")
    y = opened.run(f"{chart('Gradient norm')}.querySelector('.u-over').getBoundingClientRect().y + 50")
    for kind, at in (
        ("mouseMoved", 0.25),
        ("mousePressed", 0.25),
        ("mouseMoved", 0.4),
        ("mouseMoved", 0.5),
        ("mouseReleased", 0.5),
    ):
        opened.call(
            "Input.dispatchMouseEvent", type=kind, x=x + at * width, y=y, button="left", buttons=1, clickCount=1
        )
    scale = f"(({{min, max}}) => [min, max])({chart('Gradient norm')}.plot.scales.x)"
    low, high = opened.run(scale)
    first, last = 1, opened.run(f"{chart('Gradient norm')}.plot.data[0].at(-1)")
    assert first + 0.2 * (last - first) < low < high < first + 0.6 * (last - first)
    opened.run(f"{chart('Gradient norm')}.querySelector('button').click()")
    opened.run("(async () => { main.dataset.tag = ''; await refresh(); })()")
    assert (
        opened.run(scale) == [low, high]
        and opened.run(f"{chart('Gradient norm')}.querySelector('button').ariaPressed") == "false"
    )
    opened.run(
        f"{chart('Gradient norm')}.querySelector('.u-over').dispatchEvent(new MouseEvent('dblclick', {{bubbles: "
        f"true}}))"
    )
    assert opened.run(f"new Promise(done => setTimeout(() => done({scale}), 50))") == [first, last]
    assert opened.problems == []


def test_a_live_page_is_refreshed_where_its_reader_is(opened: Browser, addresses: dict[str, str]):
    opened.open(addresses["live"], 400, 800, dark=False)
    opened.run("document.querySelector('details').open = true; scrollTo(0, 1500)")
    place = opened.run("scrollY")
    metrics = Path(addresses["directory"], "metrics.jsonl")
    line = {
        "step": 41,
        "loss": 2.7654,
        "tokens": 100,
        "step_time_s": 41.5,
        "tokens_per_second": 1.0,
        "grad_norm": 1.0,
        "lr": 6e-4,
    }
    metrics.write_text(metrics.read_text().rpartition("\n")[0] + f"\n{json.dumps(line)}\n")
    opened.run("(async () => { while (!main.textContent.includes('2.7654')) await refresh(); })()")
    assert opened.run("[scrollY, document.querySelector('details').open]") == [place, True] and place == 1500
    assert opened.problems == []
