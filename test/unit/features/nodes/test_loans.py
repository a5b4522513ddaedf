# SPDX-License-Identifier: Apache-2.0
from banyan.features.nodes.loans import TERM_S, Loans


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


def test_loan_when_it_is_not_read_for_a_term_then_it_runs_out_and_its_lease_is_released_once():
    clock = Clock()
    loans, lease = Loans(max_pages=10, clock=clock), FakeLease()
    token = loans.lend(lease, None).token
    clock.now_s = TERM_S - 1
    assert loans.expire() == 0 and loans.find(token) is not None, "reading renews it"
    clock.now_s += TERM_S - 1
    assert loans.expire() == 0
    clock.now_s += 1
    assert loans.expire() == 1 and loans.find(token) is None
    loans.give_back(token)
    loans.call_in()
    assert (lease.num_released, loans.num_pages, loans.num_loans) == (1, 0, 0)


def test_loans_when_pages_are_lent_then_only_so_many_at_once():
    loans = Loans(max_pages=3, clock=Clock())
    first = loans.lend(FakeLease(2), None)
    assert not loans.has_room(2) and loans.has_room(1)
    loans.give_back(first.token)
    assert loans.has_room(3)


def test_loans_when_called_in_then_every_lease_is_released():
    loans, leases = Loans(max_pages=10, clock=Clock()), [FakeLease(), FakeLease()]
    tokens = [loans.lend(lease, None).token for lease in leases]
    assert len(set(tokens)) == 2
    loans.call_in()
    assert [lease.num_released for lease in leases] == [1, 1] and loans.find(tokens[0]) is None


def test_room_when_it_is_reserved_then_others_do_not_get_it():
    loans = Loans(max_pages=3, clock=Clock())
    assert loans.reserve(2) and not loans.reserve(2) and not loans.has_room(2) and loans.has_room(1)
    loans.unreserve(2)
    assert loans.reserve(3)
