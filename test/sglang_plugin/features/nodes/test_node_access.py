# SPDX-License-Identifier: Apache-2.0
"""One rank's side of the page server: it listens where it was told to, over several namespaces, and nowhere else."""

import socket

import pytest
from test.unit.features.nodes.rig import BLOCK, KEYS, LAYOUT, Node, free_address, until

from banyan.config import Config
from banyan.core import Address
from banyan.features.nodes.borrower import Borrower
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
        "nodes": {"num_nodes": 1, "asked": [str(address)], "num_listening": 0, "num_lost_pulls": 0}
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
