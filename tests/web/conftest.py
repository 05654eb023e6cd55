"""A server on loopback and a Chromium in front of it; every page is watched for errors and foreign requests."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, sync_playwright

from cutaway.serve import make_app
from cutaway.serve.models import Models

Open = Callable[..., Page]
Serving = Callable[..., AbstractContextManager[str]]


def chromium() -> str:
    """Debian's Chromium, or the one that CUTAWAY_CHROMIUM names."""
    named = os.environ.get("CUTAWAY_CHROMIUM")
    found = named or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not found:
        pytest.skip("no Chromium here, which these tests drive: apt-get install chromium, or set CUTAWAY_CHROMIUM")
    return found


@contextmanager
def served(model: str, **settings: object) -> Iterator[str]:
    """The address of a server in a thread of its own."""
    app = make_app(Models([model]), default=model, **settings)  # type: ignore[arg-type]
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def serving() -> Serving:
    """What starts a server for a model: `with serving("toy") as address`."""
    return served


WORDS = ["the", "cat", "sat", "on", "a", "mat", "because", "it", "was", "tired", "and", "ran"]


def word_model(folder: Path, config: Any, kind: str = "AutoModelForCausalLM") -> str:
    """A tiny model of this transformers configuration with random weights, whose tokens are words; its folder."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    made = getattr(transformers, kind).from_config(config)
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    made.eval().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["?", *WORDS])}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A mixture of experts: 8 of them, 2 for each token."""
    from transformers import MixtralConfig

    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 64}
    config = MixtralConfig(vocab_size=len(WORDS) + 1, bos_token_id=None, eos_token_id=None, **sizes, **more)
    return word_model(tmp_path_factory.mktemp("models") / "mixture", config)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served("toy", longest=40) as at:
        yield at


@pytest.fixture
def visit(browser: Browser, address: str) -> Iterator[Open]:
    """Opens a place of the page and waits until it is drawn. At the end nothing may have gone wrong in it."""
    pages: list[Page] = []
    faults: list[str] = []

    def opened(place: str = "", width: int = 1280, height: int = 900, at: str = address, **context: object) -> Page:
        page = browser.new_page(viewport={"width": width, "height": height}, **context)  # type: ignore[arg-type]
        pages.append(page)
        page.on("console", lambda m: faults.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith((at, "data:", "blob:")) else faults.append(r.url))
        page.goto(at + (f"#{place}" if place else ""))
        page.get_by_role("heading", name="Next token").or_(page.get_by_role("alert")).first.wait_for()
        return page

    opened.faults = faults  # type: ignore[attr-defined]
    yield opened
    for page in pages:
        page.close()
    assert faults == []
