"""Pictures: every action is where and as long as it should be, everything can be read, and nothing is loaded from
elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megalite.parallel.pipeline.bubble import BubblePlan, compare, plan
from megalite.parallel.pipeline.generator import build
from megalite.parallel.pipeline.schedule import ActionKind
from megalite.parallel.pipeline.simulator import simulate
from megalite.planner.drawing import timeline as drawing

SVG = "{http://www.w3.org/2000/svg}"
WIDEST_DIGIT, MEAN_LETTER = 0.637, 0.6  # of the font's height, in DejaVu Sans, which is a wide font
SIZES = [
    ("1f1b", 4, 8, None),
    ("interleaved", 4, 8, 3),
    ("zb-v", 4, 8, None),
    ("zb-h2", 16, 32, None),
    ("v-half", 16, 32, None),
]


class Read:
    """An SVG as a viewer sees it: bars by their action, with their rank's row, texts with the room that they take."""

    def __init__(self, text: str):
        root = ElementTree.fromstring(text)
        self.width, self.height = (float(value) for value in root.get("viewBox", "").split()[2:])
        self.zoom = float(root.get("width", 0)) / self.width
        self.bars, self.tints = {}, []
        for box in root.iter(f"{SVG}rect"):
            title = box.find(f"{SVG}title")
            if title is not None and (
                match := re.match(r"([FBW])(\d+)\.(\d+): .*rank (\d+); (\S+) to (\S+)", title.text)
            ):
                kind, stage, microbatch, rank, start, end = match.groups()
                x, y, width, height = (float(box.get(name)) for name in ("x", "y", "width", "height"))
                self.bars[kind, int(stage), int(microbatch)] = (
                    x,
                    y,
                    width,
                    height,
                    int(rank),
                    float(start),
                    float(end),
                    box.get("fill"),
                )
            elif title is not None:
                self.tints.append((title.text, float(box.get("x")), float(box.get("width"))))
        self.texts = [
            (
                float(text.get("x")),
                float(text.get("y")),
                text.text,
                float(text.get("font-size")),
                text.get("text-anchor"),
            )
            for text in root.iter(f"{SVG}text")
        ]


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size[0]}-{size[1]}")
def drawn(request) -> tuple[BubblePlan, Read]:
    bubble_plan = plan(*request.param)
    return bubble_plan, Read(drawing.svg(drawing.picture([bubble_plan])))


def test_every_action_is_drawn_in_its_time(drawn):
    bubble_plan, seen = drawn
    spans = {
        (a.kind.value, a.stage, a.microbatch): (rank, s, e)
        for rank, row in enumerate(bubble_plan.timeline.spans)
        for a, s, e in row
    }
    assert seen.bars.keys() == spans.keys()
    assert all(bar[4:7] == pytest.approx(spans[key], rel=1e-5) for key, bar in seen.bars.items())
    x0, x1 = min(bar[0] for bar in seen.bars.values()), max(bar[0] + bar[2] for bar in seen.bars.values())
    scale = (x1 - x0) / bubble_plan.timeline.makespan
    for x, _, width, _, _, start, end, _ in seen.bars.values():
        assert x - x0 == pytest.approx(start * scale, abs=1) and width == pytest.approx((end - start) * scale, abs=1)


def test_ranks_have_rows_of_their_own_and_bars_do_not_overlap(drawn):
    bubble_plan, seen = drawn
    rows = [
        sorted(bar[:4] for bar in seen.bars.values() if bar[4] == rank) for rank in range(bubble_plan.schedule.ranks)
    ]
    for row in rows:
        assert len({bar[1] for bar in row}) == 1
        assert all(left[0] + left[2] <= right[0] + 0.01 for left, right in pairwise(row))
    assert all(upper[0][1] + upper[0][3] < lower[0][1] for upper, lower in pairwise(rows))


def test_passes_and_stages_of_a_rank_differ_in_colour(drawn):
    bubble_plan, seen = drawn
    colours = {}
    for (kind, stage, _), bar in seen.bars.items():
        place = bubble_plan.schedule.stages_of(bar[4]).index(stage)
        assert colours.setdefault((kind, place), bar[7]) == bar[7]
    assert len(set(colours.values())) == len(colours) == bubble_plan.chunks * len(bubble_plan.schedule.passes)


def test_numbers_are_in_their_bars_and_can_be_read(drawn):
    _, seen = drawn
    boxes = [bar[:4] for bar in seen.bars.values()]
    numbers = [text for text in seen.texts if text[4] == "middle" and text[2].isdigit() and text[3] != 10]
    assert len(numbers) > len(boxes) / 2, "most bars have their number at these sizes"
    for x, y, text, size, _ in numbers[::7]:
        (room,) = [width for left, top, width, height in boxes if left < x < left + width and top < y < top + height]
        assert len(text) * WIDEST_DIGIT * size <= room
        assert size * seen.zoom >= 6


def test_labels_are_inside_and_apart(drawn):
    _, seen = drawn
    areas = []
    for x, y, text, size, anchor in seen.texts:
        width = len(text) * MEAN_LETTER * size
        left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
        assert left >= 0 and left + width <= seen.width + 1 and size <= y <= seen.height, text
        if size > 10.5 and anchor != "middle":
            areas.append((left, left + width, y - 0.7 * size, y, text))
    for one, other in combinations(areas, 2):
        assert one[1] <= other[0] or other[1] <= one[0] or one[3] <= other[2] or other[3] <= one[2], (one[4], other[4])


def test_title_and_legend_say_what_is_seen(drawn):
    bubble_plan, seen = drawn
    texts = [text[2] for text in seen.texts]
    joined = "\n".join(texts)
    assert texts[0].startswith(f"{bubble_plan.schedule.name}: {bubble_plan.schedule.ranks} ranks")
    for name in ("bubble_fraction", "bubble_over_ideal", "bubble_rate"):
        assert f"{name} {getattr(bubble_plan.timeline, name):.1%}" in joined.replace("-0.0%", "0.0%")
    for word in (
        "F forward",
        "B backward",
        "warm-up",
        "steady",
        "cool-down",
        "idle",
        "peak",
        *(f"rank {r}" for r in range(4)),
    ):
        assert word in joined
    assert ("W weight gradient" in joined) == bubble_plan.splits
    assert ("first to last stage" in joined) == (bubble_plan.chunks > 1)


def test_phases_of_1f1b():
    """Rank 0 of four waits for the first gradient until 10, and ends its last forward at 22; rank 3 starts its backward
    at once."""
    spans = simulate(build("1f1b", 4, 8)).spans
    assert drawing.phases(spans[0]) == (10, 22)
    assert drawing.phases(spans[3]) == (4, 25)
    assert drawing.phases(simulate(build("gpipe", 4, 8)).spans[0]) == (8, 8)
    assert drawing.phases(simulate(build("1f1b", 4, 8, forward_only=True)).spans[1]) == (9, 9)
    seen = Read(drawing.svg(drawing.picture([plan("1f1b", 4, 8)])))
    names, starts, widths = zip(*seen.tints[:3], strict=True)
    assert names == ("rank 0: warm-up", "rank 0: steady", "rank 0: cool-down")
    assert [width / sum(widths) for width in widths] == pytest.approx([10 / 33, 12 / 33, 11 / 33], abs=1e-3)
    assert starts[1] == pytest.approx(starts[0] + widths[0], abs=0.02)


def test_several_timelines_share_one_scale():
    plans = compare(4, 8)
    text = drawing.svg(drawing.picture(plans))
    assert all(f"{bubble_plan.schedule.name}: 4 ranks" in text for bubble_plan in plans)
    widths = {
        round(float(width), 1) for width in re.findall(r'width="([\d.]+)"[^>]*><title>F\d\.\d: [^;]*; 0 to 1<', text)
    }
    assert len(widths) == 1


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.elements = []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))


def test_the_page_needs_nothing_else_and_tells_every_action():
    bubble_plan = plan("zb-h1", 4, 8)
    page = Tags()
    text = drawing.html(drawing.picture([bubble_plan]))
    page.feed(text)
    tips = [
        attributes["data-tip"] for tag, attributes in page.elements if tag == "rect" and "data-microbatch" in attributes
    ]
    assert len(tips) == 4 * 8 * 3
    assert "F2.0: forward of microbatch 0, stage 2, rank 2; 2 to 3" in tips
    assert not any({"src", "href"} & attributes.keys() for _, attributes in page.elements)
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]
    assert text.count("{") == text.count("}") and "{{" not in text


def test_png_shows_the_same_picture(tmp_path: Path):
    from matplotlib.image import imread

    picture = drawing.picture([plan("zb-v", 2, 4)])
    drawing.write_png(picture, tmp_path / "a.png")
    pixels = imread(tmp_path / "a.png")
    assert pixels.shape[:2] == pytest.approx((2 * picture.height, 2 * picture.width), abs=2)
    for box in [box for box in picture.boxes if box.microbatch is not None][::5]:
        seen = pixels[round(2 * (box.y + 2)), round(2 * (box.x + 2))][:3]  # beside the number
        assert "#" + "".join(f"{round(255 * part):02x}" for part in seen) == box.fill
    corner = pixels[2, 2][:3]
    assert tuple(corner) == (1, 1, 1)


def test_what_can_not_be_drawn_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(drawing.DrawingError, match="at most 50000 actions, got 73728.*json"):
        drawing.picture([plan("zb-h1", 24, 1024)])
    monkeypatch.setattr(drawing, "find_spec", lambda name: None)
    with pytest.raises(drawing.DrawingError, match="requires matplotlib.*svg"):
        drawing.write_png(drawing.picture([plan("1f1b", 2, 2)]), tmp_path / "a.png")


def test_shades_stay_apart_for_many_stages():
    for stages in range(1, 9):
        shades = [drawing.shade(drawing.COLOURS[ActionKind.FORWARD], place, stages) for place in range(stages)]
        assert (
            len(set(shades)) == stages and shades[0] == drawing.COLOURS[ActionKind.FORWARD] and "#ffffff" not in shades
        )
