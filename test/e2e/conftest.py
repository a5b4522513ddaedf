# SPDX-License-Identifier: Apache-2.0
"""Two real servers for all end-to-end tests: Banyan on, and plain stock beside it. Started once, side by side."""

from __future__ import annotations

import ctypes
import gc
import json
import random
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

from banyan.planner import Action
from benchmark.engine import plan_hints
from benchmark.modes import models
from benchmark.processor import CPU_ENGINE
from benchmark.servers import Server, ServerSpec, cpu_env, wait_ready
from benchmark.warm import ForkedServer

WHOLE, NUM_LAYERS = Path("build/models/smollm2-135m-instruct"), 6
MODEL = models.FOLDER / f"{WHOLE.name}-{NUM_LAYERS}"
"""Six of 30 layers: a quarter of the time, and what it says next is as far in front of the second best."""
CPU = (
    *cpu_env(dp=2),
    # A page outside of allocator, tree and requests ends the server: leaks cannot pass.
    ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1"),
)
POOL_TOKENS = 4000
LEAST_FREE_BYTES = 3 << 30
"""A store leaves 1 GiB of its file system free, and those here have a segment or two."""
ARGS = (*CPU_ENGINE, "--max-total-tokens", str(POOL_TOKENS), "--context-length", "4096", "--sleep-on-idle")
# What is found is moved: what the planner has learnt from other tests is not these tests' business.
MOVE = plan_hints(Action.MOVE)


class Client:
    """Talks to one server with token ids, greedily."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.server_model = MODEL

    def generate(self, ids, *, rank=None, num_tokens=12):
        """``(output ids, meta_info)``."""
        body = self.body(ids, num_tokens=num_tokens)
        if rank is not None:
            body["routed_dp_rank"] = rank
        answer = self.post("/generate", body)
        return answer["output_ids"], answer["meta_info"]

    @staticmethod
    def body(ids, *, num_tokens=12):
        """What ``generate`` sends."""
        return {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True},
            "kv_hints": MOVE,
        }

    def first_token(self, ids, *, rank=None):
        """``(id, log probability)`` of the first output token: it depends on the KV of the whole prompt and, unlike
        later tokens, not on who else is being decoded (a matrix times one row and times several rows may round
        differently in torch).
        """
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": -1,
            "kv_hints": MOVE,
        }
        if rank is not None:
            body["routed_dp_rank"] = rank
        log_probability, token, _ = self.post("/generate", body)["meta_info"]["output_token_logprobs"][0]
        return token, log_probability

    def post(self, path, body, *, timeout_s=120, headers=None):
        headers = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.server.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            text = response.read().decode()
        return json.loads(text) if text.startswith(("{", "[")) else text

    def get(self, path):
        with urllib.request.urlopen(self.server.url + path, timeout=60) as response:
            return response.read().decode()

    def ranks(self):
        """Banyan's part of /server_info, by rank."""
        states = json.loads(self.get("/server_info"))["internal_states"]
        return {state["banyan"]["dp_rank"]: state["banyan"] for state in states}

    def wait_for_a_step(self):
        """Return when each rank has made a whole step: what it does behind an answer is done, and without requests it
        is at rest. Ranks tell their state where a step begins, so that one lies between two looks.
        """
        for _ in range(2):
            self.ranks()

    def num_tokens_at(self, rank):
        """Of the requests that a rank has taken in and not ended, as far as it has told."""
        loads = json.loads(self.get("/v1/loads?include=core"))["loads"]
        return sum(load["num_total_tokens"] for load in loads if load["dp_rank"] == rank)

    def total(self, counter):
        return sum(rank[counter] for rank in self.ranks().values())


class Dozing(Client):
    """Sleeps while it is not asked: the dispatcher of stock SGLang spins, and would keep a core from all others."""

    @contextmanager
    def awake(self):
        self.server.awake()
        try:
            yield
        finally:
            self.server.asleep()

    def post(self, path, body, *, timeout_s=120):
        with self.awake():
            return super().post(path, body, timeout_s=timeout_s)


def until(
    condition: Callable[[], object], *, timeout_s: float = 60, told: Callable[[], object] = lambda: "timed out"
) -> None:
    """Wait until it holds: what servers do after they have answered. ``told``: what to say where it does not."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, told()
        time.sleep(0.2)


WITH_SHARED_SERVERS = ("test_dispatch.py", "test_observe.py", "test_planner.py", "test_sharing.py", "test_tenants.py")

_AWAKE: list[Server] = []
"""The one with Banyan, once both are up."""


_LOGS: list[Path] = []
"""Below which servers write them."""

LATELY_S, NUM_LAST_LINES = 60.0, 8


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that fails where nobody looks on says what its servers have said last."""
    report = yield
    if report.failed:
        late_s = time.time() - LATELY_S
        logs = [log for folder in _LOGS for log in sorted(folder.rglob("*.log")) if log.stat().st_mtime >= late_s]
        for log in logs:
            lines = log.read_text(errors="replace").splitlines()[-NUM_LAST_LINES:]
            report.sections.append((f"last lines of {log.name}", "\n".join(line[:300] for line in lines)))
    return report


@pytest.fixture(scope="session", autouse=True)
def _room(tmp_path_factory):
    """Servers take nearly all of a small machine's memory: what the tests before have left goes back. And a store that
    finds little room does not grow: said here, and not by each test that waits for one."""
    _LOGS.append(tmp_path_factory.getbasetemp())
    assert models.ensure_front(WHOLE, NUM_LAYERS) == MODEL
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
    assert free_bytes > LEAST_FREE_BYTES, f"{free_bytes >> 20} MiB are free in {tempfile.gettempdir()}: set TMPDIR"


@pytest.fixture(scope="module")
def alone():
    """A module with a server of its own has the machine for itself."""
    for server in _AWAKE:
        server.asleep()
    yield
    for server in _AWAKE:
        server.awake()


def pytest_collection_modifyitems(items):
    """Tests with servers of their own come first: beside the two shared ones, memory would not do for them."""
    items.sort(key=lambda item: "_servers" in item.fixturenames)
    assert {item.path.name for item in items if "_servers" in item.fixturenames} <= {*WITH_SHARED_SERVERS}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Where two processes run tests, one has all of a module, and one all that share servers."""

    class ByServers(LoadFileScheduling):
        def _split_scope(self, nodeid):
            module = super()._split_scope(nodeid)
            return "shared servers" if Path(module).name in WITH_SHARED_SERVERS else module

    return ByServers(config, log)


@pytest.fixture(scope="session")
def _servers(tmp_path_factory):
    logs = tmp_path_factory.mktemp("servers")
    on = ForkedServer(ServerSpec("banyan", 2, "on", (*ARGS, "--enable-metrics"), CPU), MODEL, logs)
    stock = ForkedServer(ServerSpec("stock", 2, "stock", (*ARGS, "--page-size", "16"), CPU), MODEL, logs)
    with on, stock:
        wait_ready([on, stock])
        stock.asleep()
        _AWAKE.append(on)
        yield Client(on), Dozing(stock)
        _AWAKE.clear()
        stock.awake()


@pytest.fixture
def banyan(_servers):
    client = _servers[0]
    client.post("/flush_cache?timeout=30", {})
    return client


@pytest.fixture
def stock(_servers):
    return _servers[1]


WORDS = (
    "the river carries cold water past old stone houses while children count boats and their parents talk about "
    "weather harvest markets schools and the long road that leads over green hills to a quiet town by the sea"
).split()


@pytest.fixture(scope="session")
def prompt():
    """Makes prompts of ``num_tokens`` tokens of plain text: the same name gives the same prompt.

    Text, because a model that is sure of its next word says the same word after a last bit has been rounded otherwise.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(MODEL))

    def make(name, num_tokens):
        rng = random.Random(str(name))
        text = f"Story {name}. " + " ".join(rng.choice(WORDS) for _ in range(num_tokens))
        return tokenizer.encode(text)[:num_tokens]

    return make
