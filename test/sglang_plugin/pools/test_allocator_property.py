# SPDX-License-Identifier: Apache-2.0
"""Any order of calls: a page is in one place, and never handed out while it is read. Sorted free lists too (PD)."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from test.conftest import examples
from test.unit.cache_rig import make_cache
from test.unit.directory.rig import NUM_FRAMES, Rank, frames, keys
from test.unit.transport.fake_gpu import FakeDriver, FakeGpu, torchs_uploads

from banyan._native import RankTable
from banyan.sglang_plugin.pools import allocator as module
from banyan.sglang_plugin.pools import quarantine
from banyan.sglang_plugin.pools.allocator import QuarantiningAllocator
from banyan.sglang_plugin.pools.device_allocator import DeviceAllocator
from banyan.sglang_plugin.pools.readback_order import ReadbackOrder
from banyan.sglang_plugin.pools.reserve import Reserve
from banyan.transport.cuda_ipc.readback import ReadbackLane

PAGE_TOKENS = 4
EVERY_PAGE = set(range(1, NUM_FRAMES))


class AllocatorMachine(RuleBasedStateMachine):
    """The owner allocates, publishes and frees; a peer takes leases and lets them go."""

    allocator_class: type[QuarantiningAllocator]
    need_sort: bool

    def __init__(self):
        super().__init__()
        rank_table = RankTable.create(2)
        self.ranks = [Rank(rank_table, slot) for slot in range(2)]
        self.peers = self.ranks[1].peers
        self.cache = make_cache(self.ranks[0].frame_table, self.ranks[0].peers)
        self.pages = self.allocator_class(
            size=(NUM_FRAMES - 1) * PAGE_TOKENS,
            page_size=PAGE_TOKENS,
            dtype=torch.bfloat16,
            device="cpu",
            kvcache=None,
            need_sort=self.need_sort,
        )
        self.attach()
        self.out: dict[int, torch.Tensor] = {}  # page handed out -> its slots
        self.published: dict[int, int] = {}  # number of the key -> page, withdrawn or not
        self.leases: dict[int, tuple[object, int]] = {}  # number of the key -> lease, page
        self.num_keys = 0

    def attach(self):
        self.pages.attach(self.cache)

    def bring(self):
        """What is on its way comes."""

    def leased(self) -> set[int]:
        return {page for _, page in self.leases.values()}

    def free_now(self) -> set[int]:
        return EVERY_PAGE - set(self.out) - self.leased()

    def take(self, slots: torch.Tensor):
        for page_slots in slots.split(PAGE_TOKENS):
            page = page_slots[0].item() // PAGE_TOKENS
            assert page in EVERY_PAGE
            assert page not in self.out, f"page {page} is handed out twice"
            assert page not in self.leased(), f"page {page} is handed out while a peer reads it"
            self.out[page] = page_slots
            self.published = {number: held for number, held in self.published.items() if held != page}

    @rule(num_pages=st.integers(1, 6))
    def alloc(self, num_pages):
        slots = self.pages.alloc(num_pages * PAGE_TOKENS)
        assert (slots is None) == (num_pages > len(self.free_now()))
        if slots is not None:
            self.take(slots)

    @rule(num_pages=st.integers(1, 4))
    def alloc_extend(self, num_pages):
        tokens = num_pages * PAGE_TOKENS
        zero, length = torch.tensor([0]), torch.tensor([tokens])
        slots = self.pages.alloc_extend(zero, zero, length, length, torch.tensor([-1]), tokens)
        assert (slots is None) == (num_pages > len(self.free_now()))
        if slots is not None:
            self.take(slots)

    @precondition(lambda self: self.out)
    @rule(data=st.data(), group=st.booleans())
    def free(self, data, group):
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.out)), min_size=1, max_size=5, unique=True))
        if group:
            self.pages.free_group_begin()
        for page in chosen[1:]:
            self.pages.free_segment(self.out.pop(page), start_pos=0)
        self.pages.free(self.out.pop(chosen[0]))
        if group:
            self.pages.free_group_end()

    @precondition(lambda self: set(self.out) - set(self.published.values()))
    @rule(data=st.data())
    def publish(self, data):
        page = data.draw(st.sampled_from(sorted(set(self.out) - set(self.published.values()))))
        self.num_keys += 1
        self.cache.publish(frames(page), keys(self.num_keys))
        self.published[self.num_keys] = page

    @precondition(lambda self: set(self.published) - set(self.leases))
    @rule(data=st.data())
    def read(self, data):
        number = data.draw(st.sampled_from(sorted(set(self.published) - set(self.leases))))
        match = self.peers.lookup(keys(number))
        if match.num_pages:
            self.leases[number] = self.peers.lease(match, keys(number)), self.published[number]
        else:
            assert self.published.pop(number) not in self.out

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def let_go(self, data):
        lease, _ = self.leases.pop(data.draw(st.sampled_from(sorted(self.leases))))
        lease.release()

    @rule()
    def step(self):
        self.bring()
        if not self.leases:
            self.pages.wait_for_readers()

    @invariant()
    def every_page_is_in_one_place(self):
        free = self.pages.get_all_free_pages().tolist()
        assert sorted(free) == sorted(EVERY_PAGE - set(self.out))
        assert self.pages.available_size() == len(free) * PAGE_TOKENS

    def teardown(self):
        for lease, _ in self.leases.values():
            lease.release()


class DeviceAllocatorMachine(AllocatorMachine):
    """Numbers of freed pages come when the device runs: at a step, or while an allocation waits."""

    def attach(self):
        self.gpu = FakeGpu()
        lane = ReadbackLane(FakeDriver(self.gpu), stream=5, num_pages=NUM_FRAMES)
        order = ReadbackOrder()
        uploads = torchs_uploads(self.gpu, NUM_FRAMES)
        self.pages.attach_lane(self.cache, lane, uploads, list, Reserve(0), order, order.take)

    def bring(self):
        # The fake checks every address, and these lie in torch's memory.
        for tensor in self.pages._lane.tags():
            self.gpu.memory[tensor.data_ptr()] = bytearray(tensor.nbytes)
        self.gpu.run()


class Clock:
    """Time that passes only while somebody waits."""

    def __init__(self):
        self.now = 0.0
        self.machine = None

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.machine.bring()


@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize(
    ("machine", "allocator"),
    [(AllocatorMachine, QuarantiningAllocator), (DeviceAllocatorMachine, DeviceAllocator)],
    ids=["host", "device"],
)
def test_allocator_when_called_in_any_order_then_no_page_is_twice_or_read(monkeypatch, machine, allocator, need_sort):
    clock = Clock()
    for user in (module, quarantine):
        monkeypatch.setattr(user, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
        monkeypatch.setattr(user, "READER_PATIENCE_S", 3 * quarantine.POLL_S)
    monkeypatch.setattr(quarantine.logger, "error", lambda *_: None)

    def start():
        clock.machine = type("Machine", (machine,), {"allocator_class": allocator, "need_sort": need_sort})()
        return clock.machine

    run_state_machine_as_test(start, settings=settings(max_examples=examples(60), stateful_step_count=40))
