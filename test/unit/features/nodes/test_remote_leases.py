# SPDX-License-Identifier: Apache-2.0
from banyan.features.nodes.borrower import TURN_S
from banyan.features.nodes.remote_leases import MAX_REMOTE_LEASES, TERM_S, RemoteLeases
from banyan.features.nodes.tcp import MOST_S


class FakeLease:
    def __init__(self, num_pages=2):
        self.num_pages = num_pages
        self.num_released = 0

    def release(self):
        self.num_released += 1


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def test_remote_lease_when_it_is_not_read_for_a_term_then_it_runs_out_and_its_lease_is_released_once():
    clock = Clock()
    remote_leases, lease = RemoteLeases(max_pages=10, clock=clock), FakeLease()
    token = remote_leases.lend(lease, None).token
    clock.now_s = TERM_S - 1
    remote_leases.expire()
    assert remote_leases.find(token) is not None, "reading renews it"
    clock.now_s += TERM_S - 1
    remote_leases.expire()
    assert remote_leases.num_remote_leases == 1
    clock.now_s += 1
    remote_leases.expire()
    assert remote_leases.num_remote_leases == 0 and remote_leases.find(token) is None
    remote_leases.give_back(token)
    remote_leases.call_in()
    assert (lease.num_released, remote_leases.num_pages, remote_leases.num_remote_leases) == (1, 0, 0)


def test_remote_lease_when_a_pull_by_nixl_has_waited_for_its_turn_and_is_slow_then_it_lasts_as_long():
    clock = Clock()
    remote_leases, lease = RemoteLeases(max_pages=10, clock=clock), FakeLease()
    remote_leases.lend(lease, None)
    clock.now_s = TURN_S + MOST_S
    remote_leases.expire()
    assert lease.num_released == 0 and clock.now_s < TERM_S


def test_remote_leases_when_pages_are_lent_then_only_so_many_at_once():
    remote_leases = RemoteLeases(max_pages=3, clock=Clock())
    first = remote_leases.lend(FakeLease(2), None)
    assert remote_leases.num_to_lend == 1
    remote_leases.give_back(first.token)
    assert remote_leases.num_to_lend == 3


def test_remote_leases_when_as_many_are_out_as_may_have_a_connection_then_no_more_is_promised():
    remote_leases = RemoteLeases(max_pages=1000, clock=Clock())
    tokens = [remote_leases.lend(FakeLease(1), None).token for _ in range(MAX_REMOTE_LEASES)]
    remote_leases.lend(FakeLease(0), None)
    assert remote_leases.is_full and remote_leases.num_to_lend == 0
    remote_leases.give_back(tokens[0])
    assert not remote_leases.is_full and remote_leases.num_to_lend == 1001 - MAX_REMOTE_LEASES


def test_remote_leases_when_called_in_then_every_lease_is_released():
    remote_leases, leases = RemoteLeases(max_pages=10, clock=Clock()), [FakeLease(), FakeLease()]
    tokens = [remote_leases.lend(lease, None).token for lease in leases]
    assert len(set(tokens)) == 2
    remote_leases.call_in()
    assert [lease.num_released for lease in leases] == [1, 1] and remote_leases.find(tokens[0]) is None


def test_room_when_it_is_reserved_then_others_do_not_get_it():
    remote_leases = RemoteLeases(max_pages=3, clock=Clock())
    assert remote_leases.reserve(2) and not remote_leases.reserve(2) and remote_leases.num_to_lend == 1
    remote_leases.unreserve(2)
    assert remote_leases.reserve(3)
