# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser: Debian's Chromium, driven by Playwright. `make setup` installs both."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
import time

import pytest
import uvicorn
from playwright.sync_api import expect, sync_playwright
from test.unit.observe.fake_banyan import FakeBanyan

from banyan.cli import web

# As long as a tab waits: what is expected of it has a limit of its own, which a busy machine reaches.
expect.set_options(timeout=60_000)

BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


@contextlib.contextmanager
def served(app):
    """An application on a port of its own, in a thread; its URL."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
        # Signals are the test runner's.
        server.capture_signals = contextlib.nullcontext
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        deadline = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline, "the application did not start"
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)


@pytest.fixture(scope="module")
def browser():
    """One for a module: while Playwright is there, its event loop keeps other tests from starting one."""
    found = [path for name in BROWSERS if (path := shutil.which(name))]
    assert found, f"no browser: `make setup` installs Debian's; or install one of {', '.join(BROWSERS)}"
    with sync_playwright() as playwright:
        # No sandbox: containers do not let it make its name spaces, and it sees this test's pages only.
        started = playwright.chromium.launch(executable_path=found[0], args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def server():
    """A server with Banyan that has served for a while."""
    made = FakeBanyan()
    for _ in range(20):
        made.step()
    return made


@pytest.fixture
def show(browser):
    """Opens the page of some servers in a tab. What the tab complains of fails the test."""
    with contextlib.ExitStack() as stack:
        complaints = []

        def opened(*servers, width=1280, scheme="light"):
            urls = [stack.enter_context(served(one.app())) for one in servers]
            url = stack.enter_context(served(web.build(urls)))
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
            stack.callback(context.close)
            tab = context.new_page()
            tab.set_default_timeout(60_000)
            tab.on("pageerror", lambda error: complaints.append(str(error)))
            tab.on("console", lambda said: said.type == "error" and complaints.append(said.text))
            tab.on("request", lambda asked: asked.url.startswith((url, "data:")) or complaints.append(asked.url))
            tab.goto(url)
            # No wait for expressions: the page lets nobody evaluate any.
            tab.wait_for_selector("body[data-drawn], .alert", state="attached")
            return tab

        yield opened
        assert complaints == []
