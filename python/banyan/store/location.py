# SPDX-License-Identifier: Apache-2.0
"""What ``--banyan-store`` names: a URL, or folders alone, which are files on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from urllib.parse import parse_qsl

from banyan.config import Config
from banyan.feature_list import store_schemes

FILE = "file"
HF3FS = "3fs"


def asked_scheme(config: Config) -> str:
    """The scheme of the store that a server names, where that has to be asked what it holds."""
    location = StoreLocation.parse(config.store) if config.store else None
    return location.scheme if location is not None and location.must_be_asked else ""


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """A backend, and where it is.

    Attributes:
        paths: its folders, in the order in which pages are striped over them.
        host: HOST:PORT of a store that is reached by a network.
        options: what stands behind the question mark of such a one.
    """

    scheme: str
    paths: tuple[str, ...] = ()
    host: str = ""
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def parse(cls, parts: Sequence[str]) -> StoreLocation:
        """Of ``("/a", "/b")``, ``("scheme:///a", "/b")`` or ``("scheme://host:port?name=value",)``: the list that
        commas separate. A scheme counts for all.

        Raises:
            ValueError: for a host or options where folders are wanted, a scheme behind the first part, or nothing.
        """
        if not parts:
            raise ValueError("no folder is named")
        scheme, separator, first = parts[0].partition("://")
        schemes = store_schemes()
        for name, one in schemes.items():
            if parts[0].startswith(one.near) and not (separator and scheme == name):
                raise ValueError(f"{parts[0]}: {one.near_line}")
        if separator and scheme in schemes and schemes[scheme].is_hosted:
            return cls._hosted(scheme, ",".join((first, *parts[1:])))
        if not separator:
            scheme, first = FILE, parts[0]
        paths = (first, *parts[1:])
        for path in paths:
            if path.startswith("~"):
                raise ValueError(f"{path}: only a shell knows whose home ~ is: write the path out")
            if "://" in path:
                raise ValueError(f"{path}: one scheme for all folders, before the first of them")
            if separator and not path.startswith("/"):
                raise ValueError(f"{scheme}://{path}: folders are absolute here, as in {scheme}:///folder")
        return cls(scheme, paths)

    @property
    def must_be_asked(self) -> bool:
        """Whether what the store holds is known only when it is asked."""
        one = store_schemes().get(self.scheme)
        return one is not None and one.must_be_asked

    @classmethod
    def _hosted(cls, scheme: str, rest: str) -> StoreLocation:
        host, _, query = rest.partition("?")
        if not host.rpartition(":")[2].isdecimal():
            raise ValueError(f"{scheme}://{rest}: a host and its port are wanted, as in {scheme}://host:50051")
        try:
            options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True)) if query else {}
        except ValueError:
            raise ValueError(f"{scheme}://{rest}: options are NAME=VALUE, joined with &") from None
        return cls(scheme, host=host, options=MappingProxyType(options))

    def __str__(self) -> str:
        query = "&".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.scheme}://{self.host}{','.join(self.paths)}{'?' if query else ''}{query}"
