# SPDX-License-Identifier: Apache-2.0
"""Property tests judge answers, not how fast a shared machine gives them. `--hypothesis-profile=long` looks longer.
Other tests may have a server that answers what they tell it to."""

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.register_profile("long", deadline=None, max_examples=20_000)
settings.load_profile("no deadline")

# For `make fuzz EXAMPLES=...`, which names it on the command line.
settings.register_profile("fuzz", deadline=None, max_examples=int(os.environ.get("EXAMPLES", "1000")))
USUAL_EXAMPLES = 100


def examples(usual: int) -> int:
    """How many examples a test draws that usually draws so many: more under a profile that has more."""
    return usual * settings.default.max_examples // USUAL_EXAMPLES


@pytest.fixture
def served():
    """The address of a server, what it answers by path, and what was sent to it."""
    answers, sent = {}, []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(None)

        def do_POST(self):
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def answer(self, body):
            sent.append((self.path, body))
            status, text = answers.get(self.path, (404, "no such path"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", answers, sent
    server.shutdown()
    thread.join()
    server.server_close()
