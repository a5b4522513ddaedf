# SPDX-License-Identifier: Apache-2.0
"""The picture of the page in the documentation: ``python scripts/picture.py http://127.0.0.1:30200/banyan OUT.png``.

Open it on a server that is at work: it waits for a minute of history.
"""

from __future__ import annotations

import argparse
import shutil

from PIL import Image
from playwright.sync_api import sync_playwright

WIDTH, HEIGHT = 1180, 900


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("out")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--wait-s", type=float, default=60.0)
    asked = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        scheme = "dark" if asked.dark else "light"
        tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
        tab.goto(asked.url)
        tab.locator(".branch").first.wait_for()
        tab.wait_for_timeout(asked.wait_s * 1000)
        tab.screenshot(path=asked.out, full_page=True)
        browser.close()
    # A page has few colours: a palette makes the file a third as large.
    Image.open(asked.out).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(asked.out, optimize=True)


if __name__ == "__main__":
    main()
