# SPDX-License-Identifier: Apache-2.0
import hashlib
from array import array

from banyan._native import SharedBytes, Store
from banyan.features.tenant_share.shared_residency import SharedResidency
from banyan.features.tenant_share.tenant_owners import TenantOwners
from banyan.routing.tenant_secret import SALT_CHARS

ACME, UMBRELLA = "a" * SALT_CHARS, "b" * SALT_CHARS


def test_owner_when_a_client_puts_a_salt_behind_its_tenants_then_it_is_the_same():
    owners = TenantOwners(0.5)
    owners.asked(ACME, ["k1", "k2"])
    owners.asked(f"{ACME}anything", ["k3"])
    owners.asked(UMBRELLA, ["k4"])
    assert [owners.owner_of([key]) for key in ("k1", "k2", "k3", "k4")] == [ACME, ACME, ACME, UMBRELLA]
    assert owners.owner_of(["k2", "unknown"]) == ACME and owners.owner_of(["unknown"]) == owners.owner_of([]) == ""


def test_owner_when_pages_enter_the_tree_then_it_is_by_the_salt_of_their_node():
    owners = TenantOwners(0.5)
    with owners.entering(ACME):
        owners.entered(["k1"])
    owners.entered(["k2"])
    with owners.entering(None):
        owners.entered(["k3"])
    assert [owners.owner_of([key]) for key in ("k1", "k2", "k3")] == [ACME, "", ""]


def test_keys_when_many_have_come_since_then_the_oldest_are_nobodys_and_few_are_remembered():
    owners = TenantOwners(0.5, remembered_keys=10)
    for number in range(40):
        owners.asked(ACME, [f"k{number}"])
        assert all(owners.owner_of([f"k{late}"]) == ACME for late in range(max(0, number - 9), number + 1))
    assert owners.owner_of(["k0"]) == ""
    assert len(owners._lately) + len(owners._before) <= 20


def test_part_when_it_is_made_then_it_knows_whose_pages_come():
    owners = TenantOwners(0.5)
    residency = owners.residency(None, 0, ())
    assert isinstance(residency, SharedResidency) and residency._whose == owners.owner_of


# ---- the store -----------------------------------------------------------------------------------------------------

LAYER_BYTES = (4096,)
NUM_FRAMES = 8


class FakeStore:
    """One that evicts as it likes."""

    def put(self, keys, parent, memory, offsets):
        return ["queued"] * len(keys)


def key(owner, number):
    return hashlib.sha256(f"{owner} {number}".encode()).hexdigest()


def chain(owner, first, num_pages):
    return [key(owner, first + number) for number in range(num_pages)]


def opened(folder, owners):
    store = Store.open(
        [str(folder)],
        bytes(32),
        LAYER_BYTES,
        quota_bytes=1 << 20,
        share_bytes=256 << 10,
        floor_bytes=0,
        segment_bytes=128 << 10,
    )
    owners.opened(store)
    return store


def write(owners, store, salt, keys):
    memory = SharedBytes.create(NUM_FRAMES * sum(LAYER_BYTES), "arena")
    owners.asked(salt, keys)
    offsets = array("q", [frame * sum(LAYER_BYTES) for frame in range(len(keys))])
    assert owners.put(store, keys, None, memory, offsets) == ["queued"] * len(keys)
    store.sync()
    store.completed()


def test_store_when_a_tenant_writes_more_than_it_holds_then_another_finds_its_pages_also_after_a_restart(tmp_path):
    owners = TenantOwners(0.5)
    store = opened(tmp_path, owners)
    mine = chain("acme", 0, 4)
    write(owners, store, ACME, mine)
    for first in range(0, 120, 8):
        write(owners, store, UMBRELLA, chain("umbrella", first, 8))
    assert store.stats()["evicted_pages"] > 50 and store.lookup(mine).num_pages == 4
    store.close()
    owners = TenantOwners(0.5)
    store = opened(tmp_path, owners)
    owners.asked(ACME, mine)
    owners.stored(store, mine, store.lookup(mine).num_pages)
    for first in range(200, 320, 8):
        write(owners, store, UMBRELLA, chain("umbrella", first, 8))
    assert store.lookup(mine).num_pages == 4
    store.close()


def test_store_when_a_restart_has_made_pages_nobodys_and_nobody_asks_for_them_then_they_go_first(tmp_path):
    owners = TenantOwners(0.5)
    store = opened(tmp_path, owners)
    write(owners, store, ACME, chain("acme", 0, 4))
    store.close()
    store = opened(tmp_path, owners)
    for first in range(0, 120, 8):
        write(owners, store, UMBRELLA, chain("umbrella", first, 8))
    assert store.lookup(chain("acme", 0, 4)).num_pages == 0
    store.close()


def test_store_when_it_evicts_as_it_likes_then_pages_go_to_it_all_the_same():
    owners = TenantOwners(0.5)
    owners.opened(FakeStore())
    owners.stored(FakeStore(), ["k"], 1)
    assert owners.put(FakeStore(), ["k"], None, None, None) == ["queued"]
