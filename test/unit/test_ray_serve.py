# SPDX-License-Identifier: Apache-2.0
"""What the deployments of examples/ray_serve.py do without Ray around them; test/e2e/test_ray.py runs them in it."""

import asyncio
import contextlib
import http.server
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="requirements/ray.txt is not installed")
from examples import ray_serve

ROOT = Path(__file__).parents[2]
FRONT, SERVER = ray_serve.Front.func_or_class, ray_serve.Server.func_or_class
DRAINS = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
"""A server that answers on after SIGTERM."""
REPLICA = f"""
import subprocess, sys, time
from examples.ray_serve import _end_with_replica
server = subprocess.Popen([sys.executable, "-c", {DRAINS!r}], stdout=subprocess.PIPE, preexec_fn=_end_with_replica)
server.stdout.readline()
print(server.pid, flush=True)
time.sleep(60)
"""


def test_replica_when_its_server_answers_on_after_sigterm_then_it_is_killed_before_ray_kills_the_replica(monkeypatch):
    monkeypatch.setattr(ray_serve, "STOP_S", 3.0)
    command = [sys.executable, "-c", DRAINS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    process.stdout.readline()
    began_s = time.monotonic()
    SERVER._stop(SimpleNamespace(_process=process))
    assert process.returncode == -signal.SIGKILL and time.monotonic() - began_s < ray_serve.STOP_S


def test_replica_when_ray_ends_it_without_a_word_then_its_server_does_not_answer_on():
    replica = subprocess.Popen([sys.executable, "-c", REPLICA], stdout=subprocess.PIPE, cwd=ROOT)
    server = Path("/proc", replica.stdout.readline().decode().strip())
    assert (server / "exe").exists()
    replica.kill()
    replica.wait()
    until_s = time.monotonic() + 10
    while (server / "exe").exists() and time.monotonic() < until_s:
        time.sleep(0.05)
    # Whoever adopts it may take a while to notice: there is no program in it any more.
    assert not (server / "exe").exists()


@contextlib.contextmanager
def answering(**answers):
    """A replica whose server answers these paths, with a status and a body."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            status, body = answers.get(self.path[1:], (404, b""))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        yield SimpleNamespace(_process=SimpleNamespace(poll=lambda: None), _url=url)
        server.shutdown()


def test_replica_when_a_rank_of_its_server_stands_still_then_it_is_replaced():
    """Also by SGLang's own 503: of a server of one rank nothing else says so."""
    with answering(health_ranks=(503, b""), health=(200, b"")) as replica:
        with pytest.raises(RuntimeError, match="stands still"):
            asyncio.run(SERVER.check_health(replica))


def test_replica_when_its_server_does_not_connect_then_it_is_replaced():
    with answering() as replica:
        pass
    with pytest.raises(RuntimeError, match="says nothing"):
        asyncio.run(SERVER.check_health(replica))


@pytest.mark.parametrize("status", [200, 503])
def test_replica_when_its_server_tells_nothing_of_ranks_then_sglangs_health_is_asked(status):
    with answering(health=(status, b"")) as replica:
        assert ray_serve._is_up(replica._url) == (status == 200)


def handle(says):
    return SimpleNamespace(url=SimpleNamespace(remote=says))


def up(url):
    async def says():
        return url

    return handle(says)


async def _never():
    await asyncio.Event().wait()


LOST = handle(_never)
"""On a node that is gone: Ray waits for another one."""


def front(servers, urls):
    return SimpleNamespace(_servers=servers, _urls=urls, _policy="lmetric")


@pytest.fixture
def built(monkeypatch):
    """The servers of each router that is built."""
    seen = []
    monkeypatch.setattr(ray_serve, "build", lambda settings: (seen.append(settings.servers), None))
    monkeypatch.setattr(ray_serve, "ASKED_S", 0.2)
    return seen


async def begin(replica):
    await asyncio.wait_for(FRONT.__serve_build_asgi_app__(replica), 5)


def test_router_when_one_server_is_lost_then_it_begins_with_the_others(built):
    asyncio.run(begin(front([LOST, up("http://b:1")], {})))
    assert built == [("http://b:1",)]


def test_router_when_no_server_is_up_yet_then_it_waits_between_questions(built, monkeypatch):
    """A call that fails at once would leave the loop no time for others."""
    asked = []

    async def starting():
        asked.append(None)
        raise ConnectionError

    monkeypatch.setattr(ray_serve, "POLL_S", 0.2)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(FRONT.__serve_build_asgi_app__(front([handle(starting)], {})), 0.5))
    assert len(asked) <= 3 and not built


def test_router_when_no_server_is_up_but_their_host_is_given_then_it_begins_with_all(built, monkeypatch):
    monkeypatch.setattr(ray_serve.Front, "bind", lambda *bound: bound)
    servers, urls, _ = ray_serve.app({"arguments": "--model-path M", "servers": "2", "gpus": "0"})
    assert len(servers) == 2
    asyncio.run(begin(front([LOST, LOST], urls)))
    assert built == [("http://127.0.0.1:30000", "http://127.0.0.1:30300")]


@pytest.mark.parametrize("url", ["http://c:1", "http://a:1"], ids=["elsewhere", "where it was"])
def test_router_when_a_server_comes_up_then_it_is_begun_anew_where_it_does_not_know_it(built, url):
    known = {1: "http://b:1"} | ({0: "http://a:1"} if url == "http://a:1" else {})
    asked = FRONT.check_health(front([up(url), up("http://b:1"), LOST], known))
    if url == "http://a:1":
        asyncio.run(asked)
    else:
        with pytest.raises(RuntimeError, match=url):
            asyncio.run(asked)
