"""How quick the live page is, in a real browser on a real server: every bar beside what was measured.

    python benchmarks/page.py                 # SmolLM2-135M and the toy; two minutes
    python benchmarks/page.py --only keys,long --json

A keystroke counts from the event to the frame that shows the attention of the new text. A frame is the time between
two in which the page could draw; in the prompt of 2,000 tokens, which is this repository's own documentation, they are
watched while it is pasted, scrolled, searched, typed in and looked at. It needs Chromium (CUTAWAY_CHROMIUM names
another) and playwright. It measures; it never fails on a time.
"""

import argparse
import gzip
import json
import os
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from playwright.sync_api import Browser, Page, sync_playwright

from server import serving

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "src" / "cutaway" / "serve" / "static"
MODEL = "smollm2-135m"
TWELVE = "When Mary and John went to the store, John gave"  # 12 tokens with what is typed
TOY_WORDS = ["dragon", "drinks", "potion", "wizard", "mixes", "glowing", "troll", "smashes", "fire", "dragon", "drinks"]
FIELD = "Prompt: the text that the model reads"

# Notes the moment after the frame in which a canvas was drawn anew, and every gap between two frames.
WATCH = """
window.watched = {flow: [], inspector: [], gaps: [], doing: "opening"};
const clear = CanvasRenderingContext2D.prototype.clearRect;
CanvasRenderingContext2D.prototype.clearRect = function (...at) {
  const where = this.canvas.closest(".flow") ? "flow" : this.canvas.closest(".inspector") ? "inspector" : null;
  if (where) requestAnimationFrame(() => {
    const channel = new MessageChannel();
    channel.port1.onmessage = () => window.watched[where].push(performance.now());
    channel.port2.postMessage(0);
  });
  return clear.apply(this, at);
};
let last = 0;
requestAnimationFrame(function frame(now) {
  if (last) window.watched.gaps.push([window.watched.doing, now - last]);
  last = now;
  requestAnimationFrame(frame);
});
"""
# Types a text, and waits for the frame that shows its attention.
TYPE = """async ([label, text]) => {
  const field = document.querySelector(`textarea[aria-label="${label}"]`);
  window.watched.flow.length = 0;
  const begun = performance.now();
  field.value = text;
  field.dispatchEvent(new InputEvent("input", {bubbles: true}));
  while (window.watched.flow.length === 0) await new Promise((go) => setTimeout(go, 1));
  return window.watched.flow[0] - begun;
}"""
SLIDE = """async (temperature) => {
  const slider = document.querySelector('input[aria-label="temperature"]');
  const begun = performance.now();
  slider.value = temperature;
  slider.dispatchEvent(new Event("input", {bubbles: true}));
  await new Promise((go) => requestAnimationFrame(() => {
    const channel = new MessageChannel();
    channel.port1.onmessage = go;
    channel.port2.postMessage(0);
  }));
  return performance.now() - begun;
}"""


@dataclass
class Bar:
    """One thing that was measured: its median, smallest and largest, and what it should stay below."""

    name: str
    unit: str
    below: float | None
    median: float
    smallest: float
    largest: float


def bar(name: str, unit: str, below: float | None, values: list[float]) -> Bar:
    return Bar(name, unit, below, statistics.median(values), min(values), max(values))


class Bench:
    """A browser in front of a server."""

    def __init__(self, browser: Browser, port: int) -> None:
        self._browser, self._at = browser, f"http://127.0.0.1:{port}/"

    @contextmanager
    def page(self, model: str, text: str, more: str = "", **context: Any) -> Iterator[Page]:
        page = self._browser.new_page(viewport={"width": 1440, "height": 1000}, bypass_csp=True, **context)
        page.add_init_script(WATCH)
        page.goto(f"{self._at}#m={model}&p={quote(text)}{more}")
        page.locator(".outcome").wait_for(timeout=120_000)
        page.wait_for_function(f"document.querySelector('header select').value === '{model}'")
        settled(page)
        try:
            yield page
        finally:
            page.close()

    def first_paint(self) -> Iterator[Bar]:
        paints, drawn = [], []
        for _ in range(5):
            with self.page("toy", "<BOS> dragon drinks") as page:
                entry = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
                paints.append(float(page.evaluate(entry)))
                drawn.append(float(page.evaluate("watched.flow[0]")))
        yield bar("first paint", "ms", 1000, paints)
        yield bar("first numbers drawn (toy)", "ms", None, drawn)

    def keys(self) -> Iterator[Bar]:
        for model, below, texts in (
            (MODEL, 250.0, [f"{TWELVE} {'abcdefghijkl'[: i + 1]}" for i in range(12)]),
            ("toy", 50.0, [f"<BOS> {' '.join(TOY_WORDS[: 10 + i % 2])}" for i in range(12)]),
        ):
            with self.page(model, texts[-1]) as page:
                took = []
                for text in texts:
                    took.append(float(page.evaluate(TYPE, [FIELD, text])))
                    settled(page)
                yield bar(f"keystroke to attention, 12 tokens ({model})", "ms", below, took[2:])

    def temperature(self) -> Iterator[Bar]:
        with self.page(MODEL, TWELVE) as page:
            took = [float(page.evaluate(SLIDE, 0.2 + 0.1 * i)) for i in range(20)]
            yield bar("temperature", "ms", 30, took[2:])

    def atlas(self) -> Iterator[Bar]:
        text = " ".join(f"{i}" for i in range(40))
        with self.page(MODEL, text, "&v=heads") as page:
            picture = page.locator(".picture[data-received='270']")
            picture.wait_for(timeout=60_000)
            took = []
            for sort in ("previous token", "by layer") * 5:
                page.get_by_role("button", name=sort, exact=True).click()
                page.wait_for_timeout(60)
                took.append(float(picture.get_attribute("data-took") or "nan"))
            yield bar("atlas of 30 × 9 heads", "ms", 20, took)

    def step(self) -> Iterator[Bar]:
        with self.page(MODEL, documentation(200 * 4)) as page:
            tokens = int(page.locator(".note").inner_text().split()[0])
            took = []
            for _ in range(6):
                page.evaluate("watched.flow.length = 0")
                begun = page.evaluate("performance.now()")
                page.get_by_role("button", name="Step", exact=True).click()
                page.wait_for_function("watched.flow.length > 0")
                took.append(float(page.evaluate("watched.flow[0]")) - float(begun))
                settled(page)
            yield bar(f"step after {tokens} tokens", "ms", None, took[1:])

    def long(self) -> Iterator[Bar]:
        with self.page(MODEL, "The capital of France is") as page:
            tasks = Tasks(page)
            _paste(page)
            nodes = []
            for doing, work in DOING.items():
                page.evaluate("doing => { watched.doing = doing; }", doing)
                work(page)
                settled(page)
                page.wait_for_timeout(400)
                nodes.append(float(page.evaluate("document.querySelectorAll('*').length")))
            gaps: list[tuple[str, float]] = page.evaluate("watched.gaps")
            for doing in ("pasting", *DOING):
                yield bar(
                    f"2,000 tokens, longest frame while {doing}", "ms", 200, [max(g for d, g in gaps if d == doing)]
                )
            yield bar("2,000 tokens, elements in the page", "", None, nodes)
            tasks.stop()
            yield bar("2,000 tokens, processor time of the ten longest tasks", "ms", 200, tasks.longest(10))
            page.evaluate("watched.doing = 'filled in'")
            page.get_by_label(FIELD).fill(page.get_by_label(FIELD).input_value()[::-1])
            settled(page)
            page.wait_for_timeout(400)
            filled = [gap for doing, gap in page.evaluate("watched.gaps") if doing == "filled in"]
            # No person does it so: Chromium types what a program puts in, and lays out line after line.
            yield bar("2,000 tokens, longest frame while a program fills them in", "ms", None, [max(filled)])


class Tasks:
    """The tasks of the page's thread and the processor time of each: what other programs take of it counts for none."""

    def __init__(self, page: Page) -> None:
        self._page, self._events, self._complete = page, list[dict](), False
        self._session = page.context.new_cdp_session(page)
        self._session.on("Tracing.dataCollected", lambda part: self._events.extend(part["value"]))
        self._session.on("Tracing.tracingComplete", lambda _: setattr(self, "_complete", True))
        what = {"includedCategories": ["devtools.timeline", "disabled-by-default-devtools.timeline"]}
        self._session.send("Tracing.start", {"transferMode": "ReportEvents", "traceConfig": what})

    def stop(self) -> None:
        self._session.send("Tracing.end")
        while not self._complete:
            self._page.wait_for_timeout(50)

    def longest(self, count: int) -> list[float]:
        """Milliseconds of the longest tasks of the thread that runs the page's scripts."""
        threads = Counter((event["pid"], event["tid"]) for event in self._events if event["name"] == "RunTask")
        scripts = Counter((event["pid"], event["tid"]) for event in self._events if event["name"] == "FunctionCall")
        thread = (scripts or threads).most_common(1)[0][0]
        took = (
            event.get("tdur", event.get("dur", 0)) / 1000
            for event in self._events
            if event["name"] == "RunTask" and (event["pid"], event["tid"]) == thread
        )
        return sorted(took, reverse=True)[:count]


def settled(page: Page) -> None:
    """Waits until no pass is under way."""
    page.locator(".stream-panel[aria-busy='false']").wait_for(timeout=120_000)


def documentation(characters: int) -> str:
    """Real text: this repository's own."""
    pages = (ROOT / "docs" / name for name in ("ARCHITECTURE.md", "SERVER.md", "EDITS.md"))
    return "".join(page.read_text(encoding="utf-8") for page in pages)[:characters]


def _paste(page: Page) -> None:
    """The longest beginning of the documentation that is at most 2,000 tokens."""
    page.evaluate("watched.doing = 'pasting'")
    from cutaway import load

    tokenizer = load(MODEL).tokenizer
    text = tokenizer.decode(tokenizer.encode(documentation(12_000))[:2000])
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.evaluate("text => navigator.clipboard.writeText(text)", text)
    page.get_by_label(FIELD).focus()
    page.keyboard.press("ControlOrMeta+A")
    page.keyboard.press("ControlOrMeta+V")  # as people do
    page.locator(".note", has_text="2000 tokens").wait_for(timeout=120_000)
    settled(page)
    page.wait_for_timeout(1500)


def _scroll(page: Page) -> None:
    for selector in (".prompt.panel", ".inspector .scroller"):
        page.locator(selector).hover()
        for turn in range(16):
            page.mouse.wheel(0, 300 if turn < 8 else -300)
            page.wait_for_timeout(40)


def _layers(page: Page) -> None:
    for _ in range(3):
        page.get_by_label("Next layer").click()
        page.wait_for_timeout(900)


def _heads(page: Page) -> None:
    for _ in range(4):
        page.get_by_label("Next head").click()
        page.wait_for_timeout(500)


def _point(page: Page) -> None:
    for selector in (".flow canvas", ".inspector canvas"):
        page.locator(selector).first.scroll_into_view_if_needed()
        box = page.locator(selector).first.bounding_box() or {"x": 0, "y": 0, "width": 1, "height": 1}
        for i in range(30):
            page.mouse.move(box["x"] + box["width"] * (i + 0.5) / 30, box["y"] + box["height"] * (0.3 + 0.4 * (i % 2)))
            page.wait_for_timeout(25)


def _look_at_all(page: Page) -> None:
    page.get_by_role("tab", name="All heads").click()
    page.wait_for_timeout(4000)


def _search(page: Page) -> None:
    page.get_by_label("Find a token").press_sequentially("the", delay=60)
    for _ in range(5):
        page.get_by_label("Find a token").press("Enter")
        page.wait_for_timeout(200)
    page.get_by_role("tab", name="One layer").click()


def _write(page: Page) -> None:
    page.get_by_label(FIELD).focus()
    page.keyboard.press("Control+End")
    page.keyboard.type(" and so on", delay=120)
    page.wait_for_timeout(2500)


def _steps(page: Page) -> None:
    for _ in range(3):
        page.get_by_role("button", name="Step", exact=True).click()
        page.wait_for_timeout(700)
        settled(page)


DOING: dict[str, Callable[[Page], None]] = {
    "scrolling": _scroll,
    "changing the layer": _layers,
    "changing the head": _heads,
    "pointing": _point,
    "showing all heads": _look_at_all,
    "searching": _search,
    "typing": _write,
    "stepping": _steps,
}
GROUPS = ("paint", "keys", "temperature", "atlas", "step", "long", "bundle")


def bundle() -> Bar:
    files = [path for path in BUILT.rglob("*") if path.is_file() and path.suffix != ".woff2"]
    return bar(
        "bundle without fonts, gzipped", "kB", 400, [sum(len(gzip.compress(f.read_bytes())) for f in files) / 1000]
    )


def measured(groups: set[str]) -> Iterator[Bar]:
    """Every bar of these groups, one after another."""
    named = os.environ.get("CUTAWAY_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if named is None:
        raise SystemExit("There is no Chromium here: apt-get install chromium, or set CUTAWAY_CHROMIUM.")
    if "bundle" in groups:
        yield bundle()
    with serving("--model", MODEL) as (_, port), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=named, args=["--no-sandbox"])
        bench = Bench(browser, port)
        every = [bench.first_paint, bench.keys, bench.temperature, bench.atlas, bench.step, bench.long]
        for group, measure in zip(GROUPS, every, strict=False):
            if group in groups:
                yield from measure()
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="GROUPS", help=f"some of {', '.join(GROUPS)}, with commas between")
    parser.add_argument("--json", action="store_true", help="for programs")
    settings = parser.parse_args()
    groups = set(settings.only.split(",")) if settings.only else set(GROUPS)
    if not groups <= set(GROUPS):
        parser.error(f"--only takes {', '.join(GROUPS)}, not {', '.join(sorted(groups - set(GROUPS)))}")
    found = []
    if not settings.json:
        print(f"{'':<58}{'median':>9}{'least':>9}{'most':>9}{'bar':>9}")
    for one in measured(groups):
        found.append(one)
        if not settings.json:
            limit = "" if one.below is None else f"{one.below:>8,.0f}{'' if one.median < one.below else ' !'}"
            numbers = "".join(f"{value:>9,.1f}" for value in (one.median, one.smallest, one.largest))
            print(f"{one.name:<58}{numbers}{limit:>9} {one.unit}", flush=True)
    if settings.json:
        json.dump([asdict(one) for one in found], sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
