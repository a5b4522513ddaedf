# SPDX-License-Identifier: Apache-2.0
"""Which stores there are, and what is refused of them. What they do is in test/native/test_store_contract.py."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from banyan.core import Address
from banyan.features.stores import mooncake
from banyan.features.stores.nixl_files import FOLDER
from banyan.ports import PageStore
from banyan.store import backends
from banyan.store.backends import Space, look, open_store
from banyan.store.location import StoreLocation

SPACE = Space(quota_bytes=8 << 20, share_bytes=4 << 20, floor_bytes=0)


def opened(url: str) -> PageStore:
    location = StoreLocation.parse(url.split(","))
    return open_store(location, namespace=b"n" * 32, layer_bytes=(4096,), space=SPACE)


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def looked_at(url: str) -> str:
    return look(StoreLocation.parse((url,)))


@pytest.mark.parametrize("act", [opened, looked_at])
@pytest.mark.parametrize("url", ["s3:///bucket", "hf3fs:///mnt/3fs/kv", "nfs:///x"])
def test_store_when_nobody_has_its_scheme_then_the_schemes_are_said(act, url: str) -> None:
    with pytest.raises(ValueError, match=r"use one of 3fs, file, mooncake, nixl\+posix"):
        act(url)


def test_hf3fs_when_the_path_is_on_another_file_system_then_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on no mounted 3FS"):
        opened(f"3fs://{tmp_path}")


def test_hf3fs_when_mounted_then_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"hf3fs.cluster {tmp_path} fuse.hf3fs rw 0 0\n")
    monkeypatch.setattr(backends, "MOUNTS", mounts)
    assert "mounted 3FS" in looked_at(f"3fs://{tmp_path / 'kv'}")


def test_files_when_locks_there_reach_no_other_node_then_a_look_says_by_which_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"server:/kv {tmp_path} nfs rw,nolock,local_lock=all 0 0\n")
    monkeypatch.setattr(backends, "MOUNTS", mounts)
    assert "is mounted with nolock" in looked_at(f"{tmp_path / 'kv'}")


@pytest.mark.parametrize("act", [opened, looked_at])
def test_mooncake_when_no_master_answers_then_how_to_start_one(act, closed_port: int) -> None:
    with pytest.raises(OSError, match=f"no Mooncake master answers at 127.0.0.1:{closed_port}.*mooncake_master"):
        act(f"mooncake://127.0.0.1:{closed_port}")


@pytest.mark.parametrize(
    ("url", "library", "way_out"),
    [
        ("mooncake://127.0.0.1:1", "mooncake.store", "libibverbs1"),
        ("nixl+posix:///nowhere", "nixl._api", "or name the folder as file://"),
    ],
)
def test_store_when_its_library_is_not_there_then_how_to_get_it(
    url: str, library: str, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError, match=f"pip install.*{way_out}"):
        looked_at(url)


@pytest.mark.parametrize("act", [opened, looked_at])
@pytest.mark.parametrize("below", [".", FOLDER])
def test_nixl_when_others_may_write_a_folder_of_it_then_refused_by_a_look_as_well(
    act, below: str, tmp_path: Path
) -> None:
    (tmp_path / "kv" / FOLDER).mkdir(parents=True, mode=0o700)
    (tmp_path / "kv" / below).chmod(0o777)
    with pytest.raises(ValueError, match=r"--banyan-store.*others may write it.*chmod go-w"):
        act(f"nixl+posix://{tmp_path / 'kv'}")


def test_look_when_there_is_nothing_to_say_then_nothing() -> None:
    assert looked_at("/kv") == ""
    assert "POSIX" in looked_at("nixl+posix:///kv")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"segment": "4"}, "unknown field `segment`: use metadata, segment_gb, buffer_mb"),
        ({"segment_gb": "much"}, "Expected `float`, got `str` - at `\\$.segment_gb`"),
        ({"segment_gb": "-1"}, "`float` >= 0.0 - at `\\$.segment_gb`"),
        ({"segment_gb": "inf"}, "`float` <= 1048576.0 - at `\\$.segment_gb`"),
        ({"buffer_mb": "9999999999999"}, "`int` <= 1048576 - at `\\$.buffer_mb`"),
    ],
)
def test_mooncake_when_an_option_is_wrong_then_which(options: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        mooncake.MooncakeOptions.parse(options)


def test_mooncake_when_its_master_is_gone_then_what_is_to_be_removed_does_not_count_as_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may come back, with all of it."""
    codes = iter([0, mooncake.NO_ANSWER])
    client = SimpleNamespace(
        setup=lambda *args: 0,
        register_buffer=lambda *args: 0,
        unregister_buffer=lambda address: 0,
        batch_put_from_multi_buffers=lambda names, *args: [0] * len(names),
        batch_remove=lambda names, by_force: [next(codes)] * len(names),
    )
    monkeypatch.setattr(mooncake, "load_library", lambda: lambda: client)
    monkeypatch.setattr(mooncake, "own_host", lambda master: "127.0.0.1")
    values = mooncake.MooncakeValues(Address("127.0.0.1", 1), mooncake.MooncakeOptions(), value_bytes=8)
    with pytest.raises(OSError, match=r"master at .* does not answer"):
        values.remove(["a", "b"])
    assert values.remove([]) == 0


def test_mooncake_when_options_are_given_then_taken() -> None:
    taken = mooncake.MooncakeOptions.parse({"segment_gb": "0.5", "protocol": "rdma", "device": "mlx5_0,mlx5_1"})
    assert (taken.segment_gb, taken.protocol, taken.device, taken.metadata) == (
        0.5,
        "rdma",
        "mlx5_0,mlx5_1",
        "P2PHANDSHAKE",
    )
