# SPDX-License-Identifier: Apache-2.0
"""The picture of the page in the documentation, with a server at work:

    python -m benchmark.picture docs/pictures/page.png
    python -m benchmark.picture OUT.png --url http://127.0.0.1:30200/banyan    # of a server that is there already

It starts two ranks with an arena and a store, has chats held with them over common instructions, shows them with
`banyan web`, and takes the picture when the page has some minutes of history.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from banyan.observe.webpage import PATH
from benchmark.model import DEFAULT_TARGET, ensure_model
from benchmark.processor import CPU_ENGINE
from benchmark.servers import Server, ServerSpec, beside, cpu_env, free_port, unwind_on_sigterm, wait_ready

WIDTH, HEIGHT = 1180, 900
FLAGS = (
    *CPU_ENGINE,
    *("--max-total-tokens", "12000", "--context-length", "4096", "--sleep-on-idle"),
    # Each request at the next rank: what the others have must come from them.
    *("--banyan-policy", "round_robin", "--banyan-host-gb", "0.25", "--banyan-store-admit", "second"),
)
NUM_CLIENTS, CHATS_PER_CLIENT, TURNS = 2, 2, 12
WORDS = "river stone harbour road hill market weather boat school house garden winter letter window morning".split()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.picture", description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--url", help="of a page that is there already")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--wait-s", type=float, default=120.0, help="history before the picture is taken")
    asked = parser.parse_args()
    unwind_on_sigterm()
    with contextlib.nullcontext(asked.url) if asked.url else _busy_page() as url:
        _take(url, asked.out, "dark" if asked.dark else "light", asked.wait_s)


def _take(url: str, out: str, scheme: str, wait_s: float) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
        tab.goto(url)
        tab.locator(".branch").first.wait_for(timeout=120_000)
        tab.wait_for_timeout(wait_s * 1000)
        # A fetch as it went: the latest one that has landed.
        tab.locator("#recent tbody tr", has_text="landed").first.click()
        tab.locator("#life .steps").first.wait_for()
        tab.screenshot(path=out, full_page=True)
        browser.close()
    # A page has few colours: a palette makes the file a third as large.
    Image.open(out).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(out, optimize=True)


@contextlib.contextmanager
def _busy_page() -> Iterator[str]:
    """The address of the page of a server that is at work."""
    # The page shows the folder as it was named.
    ensure_model(DEFAULT_TARGET)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder, port = Path(name), free_port()
        flags = (*FLAGS, "--banyan-store", str(folder / "store"))
        server = stack.enter_context(
            Server(ServerSpec("picture", 2, "on", flags, cpu_env(dp=2)), DEFAULT_TARGET, folder)
        )
        wait_ready([server])
        ended = threading.Event()
        clients = [threading.Thread(target=_chat, args=(server.url, number, ended)) for number in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
            stack.callback(client.join)
        stack.callback(ended.set)
        web = [sys.executable, "-m", "banyan.cli", "web", server.url, "--port", str(port)]
        url = f"http://127.0.0.1:{port}{PATH}"
        stack.enter_context(beside(web, folder / "web.log", url))
        yield url


def _chat(url: str, number: int, ended: threading.Event) -> None:
    """Hold chats turn by turn, some side by side, until the end: all with the same instructions, each with a client's
    own rules behind them."""
    drawn = random.Random(number)
    common = "Answer in one short sentence. " + _words(random.Random(-1), 150)
    while not ended.is_set():
        rules = _words(drawn, 60)
        chats = [[{"role": "system", "content": f"{common} {rules}"}] for _ in range(CHATS_PER_CLIENT)]
        for _ in range(TURNS):
            for messages in chats:
                if ended.is_set():
                    return
                messages.append({"role": "user", "content": f"Tell me of {_words(drawn, 40)}."})
                messages.append({"role": "assistant", "content": _answer(url, messages)})


def _answer(url: str, messages: list[dict[str, str]]) -> str:
    body = {"model": "default", "messages": messages, "max_tokens": 16}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def _words(drawn: random.Random, number: int) -> str:
    return " ".join(drawn.choice(WORDS) for _ in range(number))


if __name__ == "__main__":
    main()
