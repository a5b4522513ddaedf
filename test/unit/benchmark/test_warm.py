# SPDX-License-Identifier: Apache-2.0
"""Forked servers: what is asked of the process that they are forked from, and what its answers mean."""

import subprocess

import pytest

from benchmark.warm import Fork, Nursery


class Answering(Nursery):
    """A nursery whose process answers from a list."""

    def __init__(self, *answers):
        super().__init__()
        self.answers = list(answers)
        self.asked = []

    def ask(self, request):
        self.asked.append(request)
        return self.answers.pop(0)

    def _begin(self, variables):
        return object()


def test_server_when_it_is_started_then_its_flags_and_variables_are_told(tmp_path):
    nursery = Answering({"pid": 7})
    fork = nursery.start({"A": "1"}, ["--dp", "2"], tmp_path / "log")
    assert fork.pid == 7
    assert nursery.asked == [{"arguments": ["--dp", "2"], "variables": {"A": "1"}, "log": str(tmp_path / "log")}]


def test_server_when_its_imports_would_have_read_other_variables_then_it_is_not_started(tmp_path):
    nursery = Answering({"pid": 7})
    nursery.start({"OMP_NUM_THREADS": "1"}, [], tmp_path / "log")
    with pytest.raises(ValueError, match="OMP_NUM_THREADS"):
        nursery.start({"OMP_NUM_THREADS": "2"}, [], tmp_path / "log")


def test_fork_when_it_has_ended_then_its_code_is_remembered():
    fork = Fork(Answering({"returncode": None}, {"returncode": 3}), 7)
    assert fork.poll() is None and fork.wait(1) == 3
    assert fork.poll() == 3, "it is not asked about again"


def test_fork_when_it_does_not_end_in_time_then_the_wait_does():
    with pytest.raises(subprocess.TimeoutExpired):
        Fork(Answering(*({"returncode": None},) * 9), 7).wait(0)
