"""The picture of the live page in the README: `python docs/page_picture.py` (needs the test extra and a Chromium).

It serves the real model on a free port, opens one place of the page in Chromium at twice the usual density and saves
what is seen. CUTAWAY_CHROMIUM names the browser where it is not found by itself.
"""

import base64
import os
import shutil
import struct
import sys
import threading
import time
import zlib
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import uvicorn
from playwright.sync_api import Page, sync_playwright

from cutaway.serve import make_app
from cutaway.serve.models import Models

MODEL = "smollm2-135m"
TEXT = "When Mary and John went to the store, John gave a drink to"
# Layer 24, head 4: from "to" it looks back at " Mary", the name that was said once only, with 81 % of its weight.
PLACE = {"m": MODEL, "p": TEXT, "l": 24, "h": 4, "t": 13, "at": "layers.24.attn.dots", "c": "13.1"}
WIDTH, HEIGHT = 1340, 1130
MOST_BYTES = 500_000


def main(target: Path) -> None:
    """Save the picture."""
    server = uvicorn.Server(uvicorn.Config(make_app(Models([MODEL]), default=MODEL), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    browser_path = os.environ.get("CUTAWAY_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        sys.exit("There is no Chromium here; set CUTAWAY_CHROMIUM.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=2, color_scheme="light", bypass_csp=True
        )
        page.goto(f"http://127.0.0.1:{port}/#{urlencode(PLACE)}")
        _settled(page)
        pixels = _pixels(page, page.screenshot(full_page=True))
        browser.close()
    server.should_exit = True
    thread.join(10)
    target.write_bytes(_png(pixels))
    if target.stat().st_size > MOST_BYTES:
        sys.exit(f"{target} has {target.stat().st_size:,} bytes; it should have {MOST_BYTES:,} at most.")
    print(f"{target}: {target.stat().st_size:,} bytes")


def _settled(page: Page) -> None:
    """Waits until the real model has answered and its formulas are set."""
    page.locator(".rows .piece", has_text="·Mary").first.wait_for(timeout=120_000)
    page.locator(".cell .value").wait_for()
    page.locator(".formula .katex").first.wait_for()
    page.evaluate("document.fonts.ready")
    page.wait_for_timeout(700)


def _pixels(page: Page, png: bytes) -> np.ndarray:
    """The picture as `[height, width, 3]`, unpacked by the browser, which can."""
    width, height, data = page.evaluate(
        """async (png) => {
            const bitmap = await createImageBitmap(await (await fetch("data:image/png;base64," + png)).blob());
            const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
            const context = canvas.getContext("2d");
            context.drawImage(bitmap, 0, 0);
            const { data } = context.getImageData(0, 0, bitmap.width, bitmap.height);
            let text = "";
            for (let i = 0; i < data.length; i += 32768) text += String.fromCharCode(...data.subarray(i, i + 32768));
            return [bitmap.width, bitmap.height, btoa(text)];
        }""",
        base64.b64encode(png).decode(),
    )
    return np.frombuffer(base64.b64decode(data), np.uint8).reshape(height, width, 4)[:, :, :3]


def _png(pixels: np.ndarray) -> bytes:
    """An indexed PNG: the 256 commonest colours, each other one as the nearest of them."""
    height, width, _ = pixels.shape
    seen, index, counts = np.unique(pixels.reshape(-1, 3) & 0xFC, axis=0, return_inverse=True, return_counts=True)
    kept = seen[np.argsort(-counts, kind="stable")[:256]].astype(np.int32)
    nearest = np.concatenate([
        ((part[:, None].astype(np.int32) - kept) ** 2).sum(-1).argmin(1) for part in np.array_split(seen, 64)
    ]).astype(np.uint8)  # fmt: skip
    rows = np.zeros((height, width + 1), np.uint8)  # each begins with its filter: none
    rows[:, 1:] = nearest[index].reshape(height, width)
    colours = (kept | kept >> 6).astype(np.uint8)  # white is 255 again, not 252
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", colours.tobytes()),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    ]
    told = (struct.pack(">I", len(d)) + kind + d + struct.pack(">I", zlib.crc32(kind + d)) for kind, d in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(told)


if __name__ == "__main__":
    main(Path(__file__).parent / "page.png")
