# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest

from banyan.store.location import StoreLocation


def test_location_when_parsed_then_plain_paths_are_files() -> None:
    assert StoreLocation.parse(("/a", "b")) == StoreLocation("file", ("/a", "b"))
    assert StoreLocation.parse(("file:///a", "/b")) == StoreLocation("file", ("/a", "/b"))
    assert str(StoreLocation.parse(("3fs:///mnt/kv",))) == "3fs:///mnt/kv"
    assert StoreLocation.parse(("nixl+posix:///a", "/b")) == StoreLocation("nixl+posix", ("/a", "/b"))


def test_location_when_it_names_a_host_then_options_may_have_commas() -> None:
    # As the flag is cut at its commas.
    parts = "mooncake://master:50051?protocol=rdma&device=mlx5_0,mlx5_1".split(",")
    location = StoreLocation.parse(parts)
    assert (location.scheme, location.paths, location.host) == ("mooncake", (), "master:50051")
    assert location.options == {"protocol": "rdma", "device": "mlx5_0,mlx5_1"}
    assert str(location) == ",".join(parts)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((), "no folder"),
        (("file://a",), "folders are absolute"),
        (("/a", "file:///b"), "one scheme for all"),
        (("file:///a", "b"), "folders are absolute"),
        (("mooncake://master",), "a host and its port"),
        (("mooncake:///folder",), "a host and its port"),
        (("mooncake://master:1?protocol",), "NAME=VALUE"),
        (("nixl:///folder",), "POSIX is served: use"),
        (("nixl:GDS",), r"use nixl\+posix:///folder"),
        (("nixl+gds:///folder",), "POSIX is served: use"),
    ],
)
def test_location_when_it_is_none_then_refused_with_the_way_out(parts: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        StoreLocation.parse(parts)
