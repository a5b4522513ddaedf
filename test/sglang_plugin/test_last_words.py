# SPDX-License-Identifier: Apache-2.0
"""A process that cannot start has the main process say why, as its last line."""

import json
import logging
import multiprocessing
import os
import select
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import uvicorn
from uvicorn.supervisors import Multiprocess

from banyan.sglang_plugin import last_words, runtime

ERRORS = {"refused": runtime.Refused("--flag: no: yes"), "failed": ValueError("two\nlines " + "x" * 9000)}
NUM_OTHERS = 3
FORKING = multiprocessing.get_context("fork")


class Scheduler:
    def __init__(self, error):
        self.error = error


def begin(process, server_args):
    raise process.error


def start(ear, error, all_are_there):
    all_are_there.wait()
    arguments = SimpleNamespace(**{runtime.BOOKKEEPING: {"ear": ear}})
    last_words.around_init(begin, Scheduler(error), arguments)


def serve(kind, log):
    """A main process with others, none of which starts."""
    sys.stderr = open(log, "w")  # noqa: SIM115 - it ends with this process
    ear = last_words.listen()
    assert last_words.listen() == ear
    all_are_there = FORKING.Barrier(NUM_OTHERS)
    for _ in range(NUM_OTHERS):
        FORKING.Process(target=start, args=(ear, ERRORS[kind], all_are_there)).start()
    time.sleep(60)


@pytest.mark.parametrize(
    ("kind", "status", "line"),
    [
        ("refused", 2, "banyan: refused: --flag: no: yes"),
        ("failed", 1, "banyan: SGLang's Scheduler does not start (its traceback is above): ValueError: two lines xxx"),
    ],
)
def test_main_process_when_another_one_cannot_start_then_its_reason_is_the_last_line_and_all_end(
    kind, status, line, tmp_path, monkeypatch
):
    monkeypatch.setattr(last_words, "_ear", None)
    main = FORKING.Process(target=serve, args=(kind, str(tmp_path / "log")))
    main.start()
    main.join(60)
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert main.exitcode == status and last.startswith(line) and len(last) < 3000


@pytest.mark.parametrize("character", ["x", '"', "\n", "\u8bed", "\U0001f600", "\ud800"])
def test_words_when_they_are_long_then_a_pipe_takes_them_in_one_piece(character):
    words = last_words._words("banyan: " + character * 9000, 1)
    assert len(words.encode()) <= select.PIPE_BUF and words.index("\n") == len(words) - 1
    said = json.loads(words)
    assert said["status"] == 1 and said["line"].startswith("banyan: " + character * 200)


def test_process_when_nobody_listens_then_its_error_goes_on(tmp_path):
    for carried in (None, {"ear": str(tmp_path / "nowhere" / "ear")}):
        arguments = SimpleNamespace(**{runtime.BOOKKEEPING: carried})
        with pytest.raises(ValueError, match="no"):
            last_words.around_init(begin, Scheduler(ValueError("no")), arguments)


def end():
    """As another process of the server tells its main process."""
    os.kill(os.getppid(), signal.SIGQUIT)


def supervise(log, worker, *words):
    """A main process with several HTTP workers, one of which does this."""
    sys.stderr = open(log, "w")  # noqa: SIM115 - it ends with this process
    logging.basicConfig(force=True, stream=sys.stderr)
    last_words.hear_of_ends()
    workers = Multiprocess(uvicorn.Config("none:app"), [])
    workers.processes_num = 0
    FORKING.Process(target=worker, args=words).start()
    workers.run()


def status_of(log, worker, *words):
    """With which such a server ends."""
    main = FORKING.Process(target=supervise, args=(str(log), worker, *words))
    main.start()
    main.join(20)
    main.kill()
    main.join()
    return main.exitcode


def test_server_when_it_has_several_http_workers_and_a_process_of_it_ends_then_it_ends_too(tmp_path):
    assert status_of(tmp_path / "log", end) == last_words.FAILED
    assert "a process of this server has ended" in (tmp_path / "log").read_text()


def test_server_when_an_http_worker_is_not_to_start_then_it_ends_with_an_error(tmp_path):
    status = status_of(tmp_path / "log", last_words.end_from_worker, "banyan: refused: a worker")
    assert status == last_words.FAILED
    assert "banyan: refused: a worker" in (tmp_path / "log").read_text().splitlines()
