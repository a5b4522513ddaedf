# SPDX-License-Identifier: Apache-2.0
"""Ranks that step together (attention data parallelism): what goes wrong at one rank holds nobody up for long.

Every copy of this server takes two seconds, in which all ranks stand still. The server dies in the last test. All of
it once more with drafts, where a step is several forwards and prompts and decodes do not meet in one, and with sliding
windows, of which there are two pools.
"""

import signal
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test.e2e.conftest import Client
from test.e2e.late_copies.late import plugin

from banyan.layout import cacheable_tokens
from benchmark.modes import asking, models
from benchmark.modes.asking import LOGIT_TOLERANCE
from benchmark.modes.rows import EAGLE_OF_ITSELF, FEW_STATES, IN_PYTHON
from benchmark.processes import ProcessSession, send
from benchmark.servers import ServerSpec, cpu_env, wait_ready
from benchmark.warm import ForkedServer

pytestmark = pytest.mark.e2e
PAGE = 16
COPY_S = 2.0
NUM_TRIES = 3
WITHIN_S = 45.0
"""More than a busy machine needs for 40 tokens, less than the 60 s after which a rank in want of pages gives up."""
FLAGS = (
    *("--device", "cpu", "--tp", "2", "--attn-dp-size", "2", "--max-total-tokens", "8000", "--context-length", "2048"),
    *("--sleep-on-idle", "--banyan-plan", "move"),
)


KINDS = {
    "plain": (models.MOE, (), PAGE, 0),
    "drafts": (models.MLA_MTP, EAGLE_OF_ITSELF, PAGE, 1),
    "windows": (models.WINDOW, (), PAGE, 0),
    "states": (models.STATE, FEW_STATES, models.STATE_TOKENS, 0),
}
"""Model, flags, what lengths of a prefix are multiples of, and tokens behind a page on which its key depends."""


class InStep(Client):
    """Asks both ranks, and gives up when the cause is ``WITHIN_S`` ago."""

    def __init__(self, server, unit_tokens, tokens_ahead):
        super().__init__(server)
        self._unit_tokens = unit_tokens
        self._tokens_ahead = tokens_ahead

    def whole_pages(self, ids):
        """Tokens of a prompt that a peer may have."""
        return cacheable_tokens(len(ids), self._unit_tokens, self._tokens_ahead)

    def ask(self, ids, rank, num_tokens=4):
        """``(tokens, log probability of the first, tokens from a peer)``."""
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            "routed_dp_rank": rank,
        }
        answer = asking.answer_of(self.post("/generate", body, timeout_s=WITHIN_S))
        return answer.said, answer.first_log_probability, answer.cached.get("peer", 0)

    def leases_after_flush(self):
        """Pages that a reader still has pinned when all pages have been withdrawn."""
        deadline_s = time.monotonic() + WITHIN_S
        while True:
            try:
                self.post("/flush_cache?timeout=30", {})
                return self.total("num_quarantined_pages")
            except urllib.error.HTTPError:
                # A request is still at work.
                assert time.monotonic() < deadline_s, "a rank does not come to rest"
                time.sleep(0.2)


@pytest.fixture(scope="module", params=KINDS)
def in_step(request, alone, tmp_path_factory):
    shape, flags, unit_tokens, tokens_ahead = KINDS[request.param]
    folder = tmp_path_factory.mktemp("lockstep")
    env = (
        *cpu_env(dp=2),
        ("SGLANG_NCCL_SO_PATH", "/nonexistent"),
        ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1"),
        *IN_PYTHON,
        *plugin(folder / "late", delay_s=COPY_S),
    )
    spec = ServerSpec("in-step", 1, "on", (*FLAGS, *flags), env)
    with ForkedServer(spec, models.ensure(shape), folder) as server:
        wait_ready([server])
        yield InStep(server, unit_tokens, tokens_ahead)


@pytest.fixture(scope="module")
def asked():
    return iter(asking.prompts(8 * len(KINDS)))


def test_answer_when_the_other_rank_is_idle_then_it_comes_and_its_tokens_are_right(in_step, asked):
    ids = next(asked)
    computed, _, _ = in_step.ask(ids, 0)
    fetched, _, from_peer = in_step.ask(ids, 1)
    assert fetched == computed and from_peer == in_step.whole_pages(ids)


def test_decode_when_a_copy_of_the_other_rank_is_slow_then_both_are_answered(in_step, asked):
    ids, other = next(asked), next(asked)
    _, log_probability, _ = in_step.ask(ids, 0)
    alone, _, _ = in_step.ask(other, 0, num_tokens=40)
    with ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(in_step.ask, other, 0, num_tokens=40)
        _, fetched, from_peer = in_step.ask(ids, 1)
        tokens, _, _ = decoding.result(WITHIN_S)
    assert len(tokens) == len(alone) == 40
    assert from_peer > 0 and fetched == pytest.approx(log_probability, abs=LOGIT_TOLERANCE)


def test_request_when_its_client_leaves_while_it_fetches_then_nobody_hangs_and_no_lease_is_left(in_step, asked):
    ids, other = next(asked), next(asked)
    computed, _, _ = in_step.ask(ids, 0)
    expected, _, _ = in_step.ask(other, 0)
    body = {"input_ids": ids, "routed_dp_rank": 1, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    before = in_step.ranks()[1]["fetches"]
    # A server that is held up finds the client gone when it reads the request, and drops it.
    for _ in range(NUM_TRIES):
        # However late the copy begins, it has not ended by then.
        with pytest.raises((TimeoutError, urllib.error.URLError)) as left:
            in_step.post("/generate", body, timeout_s=0.9 * COPY_S)
        assert not isinstance(left.value, urllib.error.HTTPError), left.value
        assert in_step.ask(other, 0)[0] == expected
        if in_step.ranks()[1]["fetches"] > before:
            break
    assert in_step.ranks()[1]["fetches"] == before + 1, "it was gone before it could fetch"
    assert in_step.ask(ids, 1)[0] == computed
    assert in_step.leases_after_flush() == 0
    assert in_step.ask(ids, 1)[0] == computed


def test_server_when_a_rank_is_killed_while_it_fetches_then_it_ends_with_a_line(in_step, asked):
    ids, other = next(asked), next(asked)
    in_step.ask(ids, 0)

    def until_the_end(ids, rank):
        with pytest.raises(OSError) as ended:
            in_step.ask(ids, rank, num_tokens=400)
        assert not isinstance(ended.value, urllib.error.HTTPError), ended.value

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(until_the_end, *one) for one in ((ids, 1), (other, 0))]
        time.sleep(COPY_S / 2)
        killed_s = time.monotonic()
        send(_schedulers(in_step.server)[-1], signal.SIGKILL)
        while in_step.server.is_running():
            assert time.monotonic() < killed_s + WITHIN_S, "the others wait for the rank that was killed"
            time.sleep(0.1)
        for one in waiting:
            one.result(WITHIN_S)
    # Upstream ends the whole server: the ranks that are left have lost a partner of every collective.
    assert "one child failed" in in_step.server.log_path.read_text(errors="replace")


def _schedulers(server):
    """Ids of the ranks' processes."""
    pids = ProcessSession(server.pid).pids()
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in pids}
    return [pid for pid, title in titles.items() if "scheduler" in title]
