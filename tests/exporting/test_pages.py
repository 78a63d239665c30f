"""The pages of export, explain and profile: by their geometry, and by a browser's pixels where there is one."""

from __future__ import annotations

import functools
import itertools
import re
import shutil
import struct
import subprocess
import xml.etree.ElementTree as xml
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fusegrad
from fusegrad.benchmarks import functions as f
from fusegrad.runtime.profile.report import as_html
from fusegrad.runtime.report.page.charts import _dots
from fusegrad.runtime.report.page.graph_svg import CHAR
from fusegrad.runtime.report.page.html import table
from fusegrad.runtime.report.page.listing import CHARACTER, ROOM
from fusegrad.runtime.report.terminal import is_number

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
SVG = "{http://www.w3.org/2000/svg}"
WINDOW = 1280


class SixtyNodes(torch.autograd.Function):
    """Norms and gates one after the other, with products between: several kernels, edges over many rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> Any:
        h = x * torch.sigmoid(y)
        for i in range(4):
            centred = h - h.mean(-1, keepdim=True)
            rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
            h = torch.tanh(centred * rstd * weight) + x * (i + 1)
            h = h @ h.softmax(-1) if i == 1 else h
        ctx.save_for_backward(x, y, weight, h)
        return h

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, y, weight, h = ctx.saved_tensors
        s = torch.sigmoid(y)
        t = grad * (1 - h.tanh() ** 2)
        return t * s * weight, (t * x * s * (1 - s)).cumsum(-1), (t * h).sum(0)


class GatedResidualNormalisationWithANameThatIsLongerThanAnyLabel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, the_first_argument_of_this_function: Any, the_residual_that_is_added_to_it: Any) -> Any:
        reciprocal_of_the_standard_deviation = torch.rsqrt(the_first_argument_of_this_function.square().mean(-1, True))
        sum_of_the_normalised_argument_and_the_residual = (
            the_first_argument_of_this_function * reciprocal_of_the_standard_deviation
            + torch.nn.functional.silu(the_residual_that_is_added_to_it) * 1.23456789
        )
        ctx.save_for_backward(reciprocal_of_the_standard_deviation)
        return sum_of_the_normalised_argument_and_the_residual

    @staticmethod
    def backward(ctx: Any, gradient_of_the_output_of_this_function: torch.Tensor) -> Any:
        (scale,) = ctx.saved_tensors
        return gradient_of_the_output_of_this_function * scale, gradient_of_the_output_of_this_function


CASES: dict[str, tuple[Any, ...]] = {
    "small": (f.SwiGLU, "f32[64,64]", "f32[64,64]"),
    "sixty": (SixtyNodes, "f32[64,64]", "f32[64,64]", "f32[64]"),
    "long": (GatedResidualNormalisationWithANameThatIsLongerThanAnyLabel, "f32[64,64]", "f32[64,64]"),
}


@functools.cache
def exported(case: str) -> str:
    return fusegrad.export(*CASES[case], format="html")


@functools.cache
def profiled(case: str) -> str:
    return as_html(fusegrad.profile(*CASES[case], baselines=("eager",), seconds=0.01))


@pytest.fixture(params=CASES)
def page(request: pytest.FixtureRequest) -> str:
    return exported(request.param)


# ------------------------------------------------------------------ geometry
def drawings(text: str) -> list[xml.Element]:
    return [xml.fromstring(f"<svg{part.split('</svg>')[0]}</svg>") for part in text.split("<svg")[1:]]


def boxes(drawing: xml.Element) -> Iterator[tuple[tuple[float, float, float, float], list[str]]]:
    """left, top, right, bottom of each node's box, and its lines of text."""
    for group in drawing.iter(f"{SVG}g"):
        rect = group.find(f"{SVG}rect")
        if group.find(f"{SVG}title") is not None and rect is not None:
            x, y, width, height = (float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
            yield (x, y, x + width, y + height), [t.text or "" for t in group.iter(f"{SVG}text")]


def test_boxes_hold_their_text_and_stand_apart(page: str) -> None:
    drawing = drawings(page)[-2]
    _, _, width, height = map(float, drawing.attrib["viewBox"].split())
    found = list(boxes(drawing))
    assert len(found) >= 10
    for (left, top, right, bottom), lines in found:
        assert 0 <= left and right <= width and 0 <= top and bottom <= height
        assert max(map(len, lines)) * CHAR <= right - left
    for (a, _), (b, _) in itertools.combinations(found, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_a_listing_fits_the_page_and_its_columns_stand_apart(page: str) -> None:
    listing = drawings(page)[-1]
    width = float(listing.attrib["width"])
    assert width <= ROOM
    rows: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for part, group in enumerate(listing.findall(f"{SVG}g")):
        for text in group.findall(f"{SVG}text"):
            shown = (text[0].tail if len(text) else text.text) or ""
            x = float(text.attrib["x"])
            rows.setdefault((part, text.attrib["y"]), []).append((x, x + len(shown) * CHARACTER))
    for cells in rows.values():
        assert max(end for _, end in cells) <= width
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(cells)))


def test_what_is_cut_is_a_tooltip() -> None:
    page = exported("long")
    listing = drawings(page)[-1]
    cut = [(t[0].tail, t[0].text) for t in listing.iter(f"{SVG}text") if len(t)]
    assert cut and all("…" in (shown or "") and "…" not in (whole or "") for shown, whole in cut)
    labels = [lines[0] for _, lines in boxes(drawings(page)[-2])]
    assert any("…" in label and label.endswith(" = rsqrt") for label in labels), "the operation of a long name stays"


def test_pages_ask_for_nothing_and_their_links_lead_somewhere() -> None:
    for text in (*map(exported, CASES), *map(profiled, ("sixty", "long"))):
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)
        assert "<script" not in text and "<link" not in text and "@import" not in text
        assert 'name="color-scheme" content="light dark"' in text
        for target in re.findall(r'href="#([^"]+)"', text):
            assert f'id="{target}"' in text


@pytest.mark.parametrize("case", ["sixty", "long"])
def test_numbers_of_dots_do_not_lie_on_each_other(case: str) -> None:
    roof = drawings(profiled(case))[1]
    labels = [t for t in roof.iter(f"{SVG}text") if "fill" not in t.attrib]
    spans = sorted((float(t.attrib["x"]), len(t.text or "") * 7) for t in labels)
    assert labels and all(a + wide / 2 <= b - other / 2 for (a, wide), (b, other) in itertools.pairwise(spans))


def test_a_crowd_of_dots_shares_its_labels() -> None:
    crowd = [(100 + 9.0 * i**1.3, 80.0 - i, 1 + i * 7 % 12) for i in range(12)]
    texts = re.findall(r'<text x="([\d.]+)" [^>]*>([^<]*)</text>', "".join(_dots(crowd, ["k"] * 12)))
    spans = [(float(x), len(shown) * 7) for x, shown in texts]
    assert 1 < len(spans) < 12
    assert all(a + wide / 2 <= b - other / 2 for (a, wide), (b, other) in itertools.pairwise(spans))
    assert "3-7, 10" in "".join(_dots([(50.0, 9.0, n) for n in (10, 3, 4, 5, 6, 7)], ["k"] * 12))


def test_tables_put_numbers_to_the_right() -> None:
    assert is_number("1,234.5") and not is_number("a1") and not is_number("")
    shown = table(["name", "n", "nothing"], [["a", "1,024"], ["b", "7"]])
    assert shown.count("<td class=number>") == 2 and "nothing" not in shown


# ------------------------------------------------------------------ pixels
def pixels(png: bytes) -> np.ndarray:
    """height x width x 3 of an 8-bit RGB PNG (ISO 15948, the five row filters)."""
    chunks, at = {}, 8
    while at < len(png):
        (size,), kind = struct.unpack(">I", png[at : at + 4]), png[at + 4 : at + 8]
        chunks[kind] = chunks.get(kind, b"") + png[at + 8 : at + 8 + size]
        at += 12 + size
    width, height, depth, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert (depth, colour) in ((8, 2), (8, 6))
    each = 3 if colour == 2 else 4
    raw = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + width * each)
    rows = [np.zeros(width * each, np.uint8)]
    for line in raw:
        rows.append(unfiltered(int(line[0]), line[1:], rows[-1], each))
    return np.stack(rows[1:]).reshape(height, width, each)[..., :3]


def unfiltered(kind: int, line: np.ndarray, above: np.ndarray, each: int) -> np.ndarray:
    if kind in (0, 2):
        return line + above if kind else line
    if kind == 1:
        return np.cumsum(line.reshape(-1, each), axis=0, dtype=np.uint8).reshape(-1)
    row, over = bytearray(line.tobytes()), above.tobytes()
    for i, value in enumerate(row):
        a, b, c = (row[i - each], over[i], over[i - each]) if i >= each else (0, over[i], 0)
        row[i] = (value + ((a + b) // 2 if kind == 3 else paeth(a, b, c))) & 255
    return np.frombuffer(bytes(row), np.uint8)


def paeth(a: int, b: int, c: int) -> int:
    near, over, both = abs(b - c), abs(a - c), abs(a + b - 2 * c)
    return a if near <= over and near <= both else b if over <= both else c


def screenshot(text: str, folder: Path, dark: bool = False, width: int = WINDOW) -> np.ndarray:
    """A page as the browser shows it in a window 1900 pixels high."""
    if BROWSER is None:
        pytest.skip(f"no browser on PATH (one of {', '.join(BROWSERS)})")
    page, shot = folder / "page.html", folder / "shot.png"
    page.write_text(text, encoding="utf-8")
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--user-data-dir={folder / 'user'}",
        f"--screenshot={shot}", f"--window-size={width},1900", page.as_uri(),
    ]  # fmt: skip
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    return pixels(shot.read_bytes())


def assert_readable_and_whole(shown: np.ndarray, dark: bool, width: int) -> None:
    if dark:
        shown = 255 - shown
    light, ink = shown.min(-1) > 200, shown.max(-1) < 110
    assert shown.shape[1] == width
    assert light.mean() > 0.8, "most of a page is paper"
    assert 0.002 < ink.mean() < 0.15, "some of it is ink"
    margin = 18 if width == WINDOW else 10
    assert np.ptp(shown[:, -margin:].reshape(-1, 3), axis=0).max() == 0, "nothing reaches the window's right edge"


LOOKS = [(dark, width) for dark in (False, True) for width in (WINDOW, 500)]


@pytest.mark.parametrize(("dark", "width"), LOOKS)
@pytest.mark.parametrize("case", ["sixty", "long"])
def test_an_export_in_a_browser(case: str, dark: bool, width: int, tmp_path: Path) -> None:
    assert_readable_and_whole(screenshot(exported(case), tmp_path, dark, width), dark, width)


@pytest.mark.parametrize(("dark", "width"), LOOKS)
def test_a_profile_in_a_browser(dark: bool, width: int, tmp_path: Path) -> None:
    assert_readable_and_whole(screenshot(profiled("long"), tmp_path, dark, width), dark, width)


def test_explain_and_export_are_one_page() -> None:
    assert fusegrad.explain(*CASES["small"]).to_html() == exported("small")
    notebook = fusegrad.explain(*CASES["small"])._repr_html_()
    body = exported("small").split("<body", 1)[1]
    headings = re.findall(r"<h2[^>]*>([^<]*)</h2>", body)
    assert headings and re.findall(r"<h2[^>]*>([^<]*)</h2>", notebook) == headings
