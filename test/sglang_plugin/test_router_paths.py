# SPDX-License-Identifier: Apache-2.0
"""The router's table of paths against the routes of the installed SGLang: one of a new release is noticed here."""

from __future__ import annotations

from collections import defaultdict

from sglang.srt.entrypoints.http_server import app
from starlette.routing import Match

from banyan.router.paths import ROWS
from banyan.routing.cache_path import CACHE_PATH
from banyan.routing.question import ASKABLE

OPTIONAL = {"/dumper/{method}", CACHE_PATH}
"""SGLang has them only where its environment asks for them, or a server runs Banyan."""


def routes():
    """Methods by path; HEAD comes with GET."""
    methods = defaultdict(set)
    included = [
        inner for route in app.routes for inner in getattr(route, "original_router", route).__dict__.get("routes", ())
    ]
    for route in (*app.routes, *included):
        if hasattr(route, "path"):
            methods[route.path] |= (getattr(route, "methods", None) or set()) - {"HEAD"}
    return dict(methods)


def test_table_when_held_against_sglang_then_every_route_of_it_is_a_row_with_its_methods():
    rows = {row.path: set(row.methods) for row in ROWS if row.path not in OPTIONAL}
    found = routes()
    assert found == rows


def test_paths_when_a_router_asks_about_them_then_sglang_serves_them():
    for path in ASKABLE:
        scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        assert any(route.matches(scope)[0] is Match.FULL for route in app.routes)
