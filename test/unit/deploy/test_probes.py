# SPDX-License-Identifier: Apache-2.0
"""What a kubelet makes of a container's probes."""

from __future__ import annotations

import http.server
import threading

import pytest
from test.deploy.probes import LIVENESS, READINESS, STARTUP, Watched, ask

PROBES = {STARTUP: {"failureThreshold": 3}, READINESS: {}, LIVENESS: {"failureThreshold": 2}}


def seen(*answers):
    watched = Watched(PROBES)
    for name, has_passed in answers:
        watched.took(name, has_passed)
    return watched


def test_container_when_it_starts_then_only_startup_is_asked_and_afterwards_the_others():
    watched = Watched(PROBES)
    assert [name for name in PROBES if watched.is_due(name)] == [STARTUP]
    watched.took(STARTUP, True)
    assert [name for name in PROBES if watched.is_due(name)] == [READINESS, LIVENESS] and not watched.is_ready


def test_container_when_it_has_no_startup_probe_then_the_others_are_asked_at_once():
    assert Watched({READINESS: {}}).is_due(READINESS)


def test_container_when_it_does_not_start_in_time_then_it_is_restarted():
    assert not seen((STARTUP, False), (STARTUP, False)).must_restart
    watched = seen(*[(STARTUP, False)] * 3)
    assert watched.must_restart and not any(watched.is_due(name) for name in PROBES)


def test_readiness_when_it_fails_then_only_three_times_in_a_row_count_and_one_answer_mends_it():
    ready = (READINESS, True)
    failed = (READINESS, False)
    assert seen(ready, failed, failed).is_ready and not seen(ready, failed, failed, failed).is_ready
    assert seen(ready, failed, failed, ready, failed, failed).is_ready
    assert seen(*[failed] * 9, ready).is_ready and not seen(*[failed] * 9).must_restart


def test_liveness_when_it_fails_in_a_row_then_the_container_is_restarted():
    assert not seen((LIVENESS, False), (LIVENESS, True), (LIVENESS, False)).must_restart
    assert "livenessProbe" in seen((LIVENESS, False), (LIVENESS, False)).must_restart


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(self.path.removeprefix("/")))
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(("status", "expected"), [(200, True), (302, True), (404, False), (503, False)])
def test_probe_when_it_asks_by_http_then_what_is_no_error_passes(status, expected):
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert ask("127.0.0.1", server.server_port, f"/{status}", 5.0) is expected
        server.shutdown()
    assert not ask("127.0.0.1", server.server_port, "/200", 1.0), "nobody listens"
