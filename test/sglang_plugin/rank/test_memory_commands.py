# SPDX-License-Identifier: Apache-2.0
"""Commands that give a rank's memory away and take it again: none of them ends the rank, whenever it comes.

SGLang's own functions run here, on a rank that is stood in for.
"""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from sglang.srt.managers.scheduler_components import weight_updater
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from test.sglang_plugin.rank.hooked import hooked
from test.sglang_plugin.rank.test_weights import UPDATER

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import memory_commands
from banyan.sglang_plugin.rank.memory_commands import BUSY, is_out


class Rank:
    """One rank's updater, and what has become of its memory."""

    def __init__(self):
        self.is_idle, self.moves = True, []
        scheduler = SimpleNamespace(_engine_paused=False, disaggregation_mode=None)
        updater = object.__new__(SchedulerWeightUpdaterManager)
        model = torch.nn.Linear(1, 1)
        updater.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        updater.memory_saver_adapter = SimpleNamespace(pause=self._moved("out"), resume=self._moved("in"))
        updater.flush_cache = lambda: self.moves.append("flush")
        updater.is_fully_idle = lambda ignore_waiting: self.is_idle
        updater.scheduler, updater.offload_tags, updater.tp_cpu_group = scheduler, set(), None
        scheduler.weight_updater = updater
        scheduler.continue_generation = lambda command: self._generate("continue", command)
        self.scheduler = scheduler

    def _moved(self, where):
        return lambda tag: self.moves.append((where, tag))

    def _generate(self, what, command):
        def obey(scheduler, command):
            scheduler._engine_paused = what == "pause"

        hooked(f"sglang.srt.managers.scheduler.Scheduler.{what}_generation", obey)(self.scheduler, command)

    def pause(self):
        self._generate("pause", PauseGenerationReqInput(mode="retract"))

    def go_on(self):
        self._generate("continue", ContinueGenerationReqInput())

    def release(self, tags=None):
        command = ReleaseMemoryOccupationReqInput(tags=tags)
        original = SchedulerWeightUpdaterManager.release_memory_occupation
        return hooked(UPDATER + "release_memory_occupation", original)(self.scheduler.weight_updater, command)

    def resume(self, tags=None):
        command = ResumeMemoryOccupationReqInput(tags=tags)
        original = SchedulerWeightUpdaterManager.resume_memory_occupation
        return hooked(UPDATER + "resume_memory_occupation", original)(self.scheduler.weight_updater, command)


@pytest.fixture
def rank(monkeypatch):
    saver = SimpleNamespace(features=SimpleNamespace(enable_memory_saver=True, enable_weights_cpu_backup=True))
    monkeypatch.setattr(memory_commands, "get_exec", lambda: saver)
    monkeypatch.setattr(runtime, "config", lambda: SimpleNamespace(shares=False))
    monkeypatch.setattr(memory_commands, "are_commanded_apart", lambda: False)
    monkeypatch.setattr(weight_updater.torch.distributed, "get_world_size", lambda group: 1)
    monkeypatch.setattr(weight_updater.torch.distributed, "barrier", lambda group: None)
    monkeypatch.setattr(weight_updater.torch, "get_device_module", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(SchedulerWeightUpdaterManager, "_assert_weight_cache_inactive", lambda updater, what: None)
    return Rank()


def test_memory_when_a_rank_has_requests_then_it_stays_and_the_rank_says_so_and_goes_on(rank):
    rank.is_idle = False
    assert rank.release().rid == BUSY and "\n" not in BUSY
    assert rank.moves == [] and not is_out(rank.scheduler)
    rank.is_idle = True
    assert rank.release().rid is None
    assert {move[1] for move in rank.moves if move[0] == "out"} == set(GPU_MEMORY_ALL_TYPES)


@pytest.mark.parametrize("tags", [None, [], ["kv_cache"], ["weights", "cuda_graph"], ["others"]])
def test_memory_when_it_is_taken_that_was_not_given_then_nothing_happens_and_the_rank_goes_on(rank, tags):
    rank.resume(tags)
    rank.release(["cuda_graph"])
    rank.moves.clear()
    rank.resume([*(tags or []), "cuda_graph", "cuda_graph"])
    rank.resume()
    assert rank.moves == [("in", "cuda_graph")]


def test_memory_when_it_is_given_twice_then_it_goes_and_comes_once(rank):
    rank.release(["kv_cache", "kv_cache"])
    rank.release()
    assert sorted(move[1] for move in rank.moves if move[0] == "out") == sorted(GPU_MEMORY_ALL_TYPES)
    rank.resume()
    rank.resume()
    assert sorted(move[1] for move in rank.moves if move[0] == "in") == sorted(GPU_MEMORY_ALL_TYPES)


@pytest.mark.parametrize("tag", ["kv_cache", "weights"])
def test_request_when_memory_is_out_then_it_is_not_computed_unless_it_waits(rank, tag):
    rank.release([tag])
    assert is_out(rank.scheduler)
    rank.scheduler._engine_paused = True
    assert not is_out(rank.scheduler)
    rank.scheduler._engine_paused = False
    rank.resume([tag])
    assert not is_out(rank.scheduler)


def test_generation_when_it_is_to_go_on_while_memory_is_out_then_it_goes_on_when_that_is_back(rank):
    rank.pause()
    rank.release(["weights", "kv_cache"])
    rank.go_on()
    assert rank.scheduler._engine_paused and is_out(rank.scheduler)
    rank.resume(["weights"])
    assert rank.scheduler._engine_paused and is_out(rank.scheduler)
    rank.resume(["kv_cache"])
    assert not rank.scheduler._engine_paused and not is_out(rank.scheduler)


def test_generation_when_it_is_paused_again_while_memory_is_out_then_it_stays_so(rank):
    rank.pause()
    rank.release()
    rank.go_on()
    rank.pause()
    assert not is_out(rank.scheduler)
    rank.resume()
    assert rank.scheduler._engine_paused
    rank.go_on()
    assert not rank.scheduler._engine_paused


def test_request_when_memory_is_out_in_name_only_then_it_is_computed(rank):
    memory_commands.get_exec().features.enable_memory_saver = False
    rank.release()
    assert not is_out(rank.scheduler)


def test_memory_when_a_rank_that_steps_together_has_requests_then_this_one_refuses_too(rank, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda verdict, op, group: verdict.zero_())
    assert rank.release().rid == BUSY and rank.moves == []


def test_memory_when_commands_reach_ranks_in_different_steps_then_none_waits_for_another(rank, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", None)
    monkeypatch.setattr(memory_commands, "are_commanded_apart", lambda: True)
    assert rank.release().rid is None
