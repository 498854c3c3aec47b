"""A real browser opens report.html: the curves are drawn, in light and dark, without a network."""

import json
import math
import random
import re
import shutil
import struct
import subprocess
import tempfile
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ndtrain.plan.plan import BatchPlan, ParallelPlan, Plan
from ndtrain.recipe.schema import Recipe
from ndtrain.report.events import EvalDone, RunEnded, RunStarted, SamplesDone, StepDone
from ndtrain.report.reporters import build_reporters
from ndtrain.report.run_directory import RunDirectory

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium (apt-get install chromium)"),
]

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1100,1400",
)
SCHEMES = {"light": 1, "dark": 0}


def record_run(path: Path) -> RunDirectory:
    """A run of 200 steps on eight ranks, as training would record it."""
    run = RunDirectory(path)
    run.create()
    recipe = Recipe.model_validate(
        {"base_model": "acme/tiny-1b", "learning_rate": 1e-4, "datasets": [{"path": "a/faq"}]}
    )
    parallel = ParallelPlan(dp_replicate=2, dp_shard=2, tp=2)
    run.write_resolved(recipe, {"learning_rate": "r.yaml:2:1"})
    memory = {"weights": 2**31, "optimizer": 2**32, "activations": 2**30}
    run.write_plan(Plan(parallel, BatchPlan(1, 2, 4), None), extra={"memory": memory})
    run.write_data({"rows": 999, "trained_tokens": 123_456})
    noise = random.Random(0)
    mesh = {"dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 2}
    with Path("/dev/null").open("w") as nowhere:
        reporter = build_reporters(run, recipe, stream=nowhere)
        reporter.write(RunStarted(str(path), 0, 200, 100, mesh, "cpu", 10**6, 10**6))
        reporter.write(EvalDone(0, 3.0, 100))
        for step in range(1, 201):
            loss = 1 + 2 * math.exp(-step / 50) + noise.gauss(0, 0.08)
            speed = 5000 + noise.gauss(0, 100)
            reporter.write(
                StepDone(
                    step=step,
                    epoch=step / 100,
                    loss=loss,
                    grad_norm=loss / 3 + noise.gauss(0, 0.05),
                    lr=1e-4 * min(step / 20, 0.5 + 0.5 * math.cos(math.pi * step / 200)),
                    tokens=1000,
                    seen_tokens=1000 * step,
                    step_seconds=0.2,
                    tokens_per_second=speed,
                    tokens_per_second_per_device=speed / 8,
                    tflops_per_device=None,
                    mfu=None,
                    memory_gib=6.5,
                )
            )
            if step % 50 == 0:
                reporter.write(EvalDone(step, 1.1 + 1.9 * math.exp(-step / 55), 100))
                reporter.write(SamplesDone(step, {"What is tp?": f"An axis, said at {step}."}))
        reporter.write(RunEnded("finished", 200, 0))
        reporter.close()
    return run


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    return record_run(tmp_path_factory.mktemp("browser") / "tiny-1b-faq").report_html


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder behind a proxy, so that no request of the browser leaves this machine."""
    folder = tmp_path / "site"
    folder.mkdir()

    class Proxy(SimpleHTTPRequestHandler):
        def translate_path(self, path: str) -> str:
            return str(folder / Path(path).name)

        def do_CONNECT(self) -> None:
            self.send_error(502)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield folder, f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def requests_of_page(site: tuple[Path, str], text: str) -> tuple[str, list[str]]:
    """The page as the browser ends up with it, and the addresses that it asked for."""
    folder, proxy = site
    (folder / "page.html").write_text(text, encoding="utf-8")
    log = folder / "net.json"
    shown = browse(
        "http://report.test/page.html",
        f"--proxy-server={proxy}",
        "--proxy-bypass-list=<-loopback>",
        f"--log-net-log={log}",
        "--dump-dom",
    )
    logged = [event.get("params") or {} for event in json.loads(log.read_text())["events"]]
    # Services of the browser itself have no origin.
    asked = [one["url"] for one in logged if one.get("initiator") == "http://report.test"]
    return shown, asked


def browse(address: str, *flags: str) -> str:
    assert BROWSER is not None
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [BROWSER, *FLAGS, f"--user-data-dir={profile}", *flags, address],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    return done.stdout


def read_png(path: Path) -> tuple[int, int, bytes]:
    """Width, height and RGB bytes of an 8-bit PNG that is not interlaced."""
    data = path.read_bytes()
    place, packed, header = 8, b"", b""
    while place < len(data):
        size, kind = struct.unpack(">I4s", data[place : place + 8])
        content = data[place + 8 : place + 8 + size]
        header = content if kind == b"IHDR" else header
        packed += content if kind == b"IDAT" else b""
        place += size + 12
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    assert (depth, interlaced) == (8, 0)
    channels = {2: 3, 6: 4}[colour]
    raw, stride = zlib.decompress(packed), width * channels
    before, pixels = bytearray(stride), bytearray()
    for row in range(height):
        start = row * (stride + 1)
        line = bytearray(raw[start + 1 : start + 1 + stride])
        unfilter(raw[start], line, before, channels)
        before = line
        for channel in range(0, stride, channels):
            pixels += line[channel : channel + 3]
    return width, height, bytes(pixels)


def unfilter(kind: int, line: bytearray, above: bytearray, channels: int) -> None:
    for place in range(len(line)):
        left = line[place - channels] if place >= channels else 0
        corner = above[place - channels] if place >= channels else 0
        guess = 0
        if kind == 1:
            guess = left
        elif kind == 2:
            guess = above[place]
        elif kind == 3:
            guess = (left + above[place]) // 2
        elif kind == 4:
            guess = min(
                (left, above[place], corner),
                key=lambda value: abs(left + above[place] - corner - value),
            )
        line[place] = (line[place] + guess) % 256


def colours(path: Path) -> Counter[str]:
    _, _, pixels = read_png(path)
    return Counter(pixels[place : place + 3].hex() for place in range(0, len(pixels), 3))


def test_the_page_asks_for_nothing_and_is_whole(site, page):
    shown, asked = requests_of_page(site, page.read_text())
    assert asked == []
    assert shown.count("<polyline") >= 7
    assert "said at 200" in shown


def test_a_page_that_asks_would_be_noticed(site, page):
    asking = page.read_text().replace("</body>", '<img src="http://other.test/x.png"></body>')
    open_to_all = re.sub(r"<meta http-equiv[^>]*>", "", asking)
    assert requests_of_page(site, open_to_all)[1] == ["http://other.test/x.png"]
    # And the page's own policy would have stopped it.
    assert requests_of_page(site, asking)[1] == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_curves_are_drawn_in_light_and_dark(scheme, page, tmp_path):
    picture = tmp_path / f"{scheme}.png"
    browse(
        page.as_uri(),
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        f"--screenshot={picture}",
    )
    seen = colours(picture)
    grounds, curve, held_out = {
        "light": ({"f4f3ee", "fcfcfb"}, "2a78d6", "e0602a"),
        "dark": ({"111110", "1a1a19"}, "5598e7", "f08a5a"),
    }[scheme]
    assert {colour for colour, _ in seen.most_common(2)} == grounds
    # More than the keys and dots: a line over most of the page's width, in each colour.
    assert seen[curve] > 500
    assert seen[held_out] > 500


def test_each_curve_is_inside_its_frame_as_the_browser_lays_it_out(page, tmp_path):
    probe = tmp_path / "probe.html"
    script = """<script>
    const frames = [...document.querySelectorAll("svg.chart")].map((chart) => {
      const box = chart.getBoundingClientRect();
      return [...chart.querySelectorAll("polyline")].every((line) => {
        const inner = line.getBoundingClientRect();
        return inner.width > box.width / 2 && inner.left >= box.left && inner.right <= box.right
          && inner.top >= box.top && inner.bottom <= box.bottom;
      });
    });
    document.title = JSON.stringify(frames);
    </script></body>"""
    probe.write_text(page.read_text().replace("</body>", script))
    shown = browse(probe.as_uri(), "--dump-dom")
    title = shown.split("<title>")[1].split("</title>")[0]
    assert title == "[true,true,true,true,true]"
