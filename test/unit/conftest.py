# SPDX-License-Identifier: Apache-2.0
"""A server that answers what a test tells it to."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest


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
