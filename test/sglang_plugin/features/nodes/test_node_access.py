# SPDX-License-Identifier: Apache-2.0
"""One rank's side of the page server: it listens where it was told to, over several namespaces, and nowhere else."""

import socket
import threading

import pytest
from test.unit.features.nodes.rig import BLOCK, KEYS, LAYOUT, Node, free_address, until

from banyan.config import Config
from banyan.core import Address
from banyan.features.nodes import nixl_pulls
from banyan.features.nodes.borrower import Borrower
from banyan.features.nodes.rank import node_access
from banyan.features.nodes.rank.node_access import NodeAccess
from banyan.features.nodes.tcp import TcpCarrier
from banyan.layout import MemberSlots
from banyan.telemetry import Counters

OLD, NEW = b"o" * 32, b"w" * 32


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(b"a secret of all nodes")
    path.chmod(0o600)
    return path


def access(node, secret, *, dp_rank=0, **flags):
    config = Config(secret_file=str(secret), host_gb=1.0, **flags)
    return NodeAccess(config, member_slots=MemberSlots(LAYOUT, dp_rank, 0), rank_table=node.rank_table, block=BLOCK)


def is_open(address):
    with socket.socket() as probe:
        return probe.connect_ex((address.host, address.port)) == 0


def test_page_server_when_the_weights_change_then_it_listens_on_and_lends_the_new_namespace(secret):
    node, address = Node(), free_address()
    rank = access(node, secret, listen=str(address))
    assert not is_open(address), "not before it joins"
    assert rank.join(OLD, node.memory) is None
    borrower = Borrower([address], KEYS, namespace=NEW, block=BLOCK, carrier=TcpCarrier())
    until(lambda: borrower.num_listening == 1)
    for namespace in (NEW, OLD, NEW):
        rank.call_in()
        rank.leave()
        rank.join(namespace, node.memory)
    assert rank.state()["page_server"]["address"] == str(address)
    number = borrower.ask(["00" * 32])
    answers = []
    until(lambda: answers.extend(borrower.answers()) or answers)
    assert answers == [(number, None)]
    counters = Counters()
    rank.count(counters)
    assert counters.remote_leases_refused > 0, "the first one asked for other weights"
    borrower.close()
    rank.close()
    assert not is_open(address) and not is_open(Address(address.host, address.port + 1))


def test_rank_when_it_is_not_the_first_or_was_not_told_to_then_it_listens_nowhere(secret):
    node, address = Node(), free_address()
    second = access(node, secret, dp_rank=1, listen=str(address))
    second.join(OLD, node.memory)
    borrowing = access(node, secret, peers=(str(address),))
    assert borrowing.join(OLD, node.memory) is not None
    assert not is_open(address)
    assert borrowing.state() == {
        "nodes": {
            "num_nodes": 1,
            "asked": [str(address)],
            "num_listening": 0,
            "num_lost_pulls": 0,
            "num_foreign_messages": 0,
        }
    }
    for rank in (second, borrowing):
        rank.call_in()
        rank.close()


def test_rank_when_the_address_is_taken_or_the_secret_is_open_then_refused(secret, capsys):
    node, address = Node(), free_address()
    with socket.create_server((address.host, address.port)), pytest.raises(SystemExit):
        access(node, secret, listen=str(address)).join(OLD, node.memory)
    assert "--banyan-listen" in capsys.readouterr().err
    secret.chmod(0o644)
    with pytest.raises(SystemExit):
        access(node, secret, listen=str(address))
    assert "chmod 600" in capsys.readouterr().err


def test_rank_when_it_reads_for_other_nodes_then_a_quarter_of_its_own_part_of_the_arena_at_most(secret):
    node = Node()
    rank = access(node, secret, listen=str(free_address()), store=("a store",))
    rank.join(OLD, node.memory)
    num_own = BLOCK.num_frames(node.memory.num_bytes)
    assert LAYOUT.num_ranks > 1 and num_own // 4 > 1
    assert rank.remote_prefetches.max_pages == num_own // 4
    assert rank.state()["page_server"]["most_read_tokens"] == num_own // 4 * node.rank_table.page_tokens
    rank.call_in()
    rank.close()


class NoProcess:
    """What lends or reads by NIXL, and is never up."""

    is_ready, num_carried, num_started, num_lent = False, 0, 0, 0

    def __init__(self, backend, *memory):
        self.backend = backend
        self.is_closed = False

    def lend(self, memories):
        self.is_closed = False

    def withdraw(self):
        self.is_closed = True

    close = withdraw


def test_rank_when_nixl_carries_then_each_node_has_its_reader_and_the_state_says_whether_it_is_up(
    secret, monkeypatch, caplog
):
    made = []
    for name in ("LentByNixl", "ReadByNixl"):
        monkeypatch.setattr(node_access, name, lambda *asked: made.append(NoProcess(*asked)) or made[-1])
    node, addresses = Node(), [free_address() for _ in range(2)]
    rank = access(node, secret, listen=str(free_address()), peers=tuple(map(str, addresses)), carrier="nixl")
    with caplog.at_level("INFO", logger="banyan"):
        rank.join(OLD, node.memory)
    assert [one.backend for one in made] == ["UCX"] * 3
    assert "lends by NIXL (UCX)" in caplog.text and "other nodes come by NIXL (UCX)" in caplog.text
    state = rank.state()
    assert state["page_server"]["has_nixl"] is False and state["page_server"]["num_lent_by_nixl"] == 0
    assert {name: state["nodes"][name] for name in ("num_nixl_ready", "num_by_nixl", "num_nixl_started")} == {
        "num_nixl_ready": 0,
        "num_by_nixl": 0,
        "num_nixl_started": 0,
    }
    rank.call_in()
    rank.close()
    assert all(one.is_closed for one in made)


def test_rank_when_the_weights_change_while_a_nixl_process_starts_then_it_takes_its_reader_bit_again(
    secret, monkeypatch
):
    """An import of NIXL takes a second, a card's registration several: one update of weights comes before."""
    has_begun, may_go_on = threading.Event(), threading.Event()

    def starts(backend, role):
        has_begun.set()
        may_go_on.wait(10)
        raise OSError("it comes to nothing")

    monkeypatch.setattr(nixl_pulls, "NixlProcess", starts)
    node = Node()
    rank = access(node, secret, listen=str(free_address()), carrier="nixl")
    rank.join(OLD, node.memory)
    assert has_begun.wait(10)
    rank.call_in()
    rank.leave()
    rank.join(NEW, node.memory)
    may_go_on.set()
    rank.close()
