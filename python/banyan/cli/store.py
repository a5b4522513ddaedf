# SPDX-License-Identifier: Apache-2.0
"""``banyan fsck`` and ``banyan store``: what is in a store, and whether it is right."""

from __future__ import annotations

import argparse
import json
from typing import Any

from banyan._native import store_check, store_remove, store_remove_idle, store_repair, store_survey
from banyan.features.stores import NIXL_POSIX
from banyan.features.stores.nixl_files import survey
from banyan.store.location import FILE, HF3FS, StoreLocation

SHELVED = (FILE, HF3FS)
"""Schemes of the native store, whose files these commands read."""

CLEAN, REPAIRED, UNREPAIRED, REFUSED = 0, 1, 4, 8
"""Exit statuses of fsck, as other file system checkers have them."""


def add_parsers(commands: Any) -> None:
    """Add both commands to the ``banyan`` parser."""
    fsck = commands.add_parser("fsck", help="read and verify every record of a store")
    fsck.add_argument("path", help="the store, as --banyan-store names it: its paths joined with commas")
    fsck.add_argument("--repair", action="store_true", help="withdraw what is bad; shelves in use are only checked")
    fsck.add_argument("--json", action="store_true", help="machine-readable")
    fsck.set_defaults(run=fsck_command)
    store = commands.add_parser("store", help="look at a store, make room in it")
    store.add_argument("what", choices=("ls", "stat", "evict"))
    store.add_argument("path", help="the store, as --banyan-store names it: its paths joined with commas")
    store.add_argument("--shelf", help="evict: the shelf to remove, as ls names it; all that nobody uses if absent")
    store.add_argument("--json", action="store_true", help="machine-readable")
    store.set_defaults(run=store_command)


def fsck_command(args: argparse.Namespace) -> int:
    """Check or repair; the exit status says what was found."""
    examine = store_repair if args.repair else store_check
    try:
        report = examine(paths_of(args.path))
    except (ValueError, OSError) as error:
        return _refuse(error, args)
    findings = report["findings"]
    num_left = sum(not finding["is_repaired"] for finding in findings)
    if args.json:
        print(json.dumps({**report, "is_clean": not findings}, indent=2))
    else:
        for finding in findings:
            place = "" if finding["place"] is None else f", place {finding['place']}"
            mended = " (withdrawn)" if finding["is_repaired"] else ""
            print(f"shelf {finding['shelf']}{place}: {finding['problem']}{mended}")
        print(
            f"{report['num_records']} records on {report['num_shelves']} shelves,"
            f" {report['verified_bytes'] / 1e9:.2f} GB verified, {len(findings)} findings,"
            f" {report['num_orphans']} records without a parent"
        )
    if not findings:
        return CLEAN
    return UNREPAIRED if num_left else REPAIRED


def store_command(args: argparse.Namespace) -> int:
    """``ls`` shelf by shelf, ``stat`` in all, ``evict`` what nobody uses."""
    try:
        result = _asked(args)
    except (ValueError, OSError) as error:
        return _refuse(error, args)
    if args.json:
        print(json.dumps(result, indent=2))
    elif args.what == "ls":
        for shelf in result["shelves"]:
            print(_line(shelf))
    else:
        for name, value in result.items():
            print(f"{name}: {value}")
    # What is told or gone is not all there is: a line for each shelf says why.
    passed_over = result.get("num_unreadable_shelves") or result.get("num_unremoved_shelves")
    return UNREPAIRED if passed_over else CLEAN


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    location = _location(args.path)
    if args.what == "stat" and location.scheme == NIXL_POSIX:
        return survey(location.paths)
    paths = paths_of(args.path)
    if args.what == "evict":
        return _removed(paths, args.shelf)
    return _totals(store_survey(paths)) if args.what == "stat" else store_survey(paths)


def _removed(paths: list[str], shelf: str | None) -> dict[str, Any]:
    if shelf is not None:
        store_remove(paths, shelf)
        return {"removed_shelves": [f"{int(shelf, 16):016x}"], "num_unremoved_shelves": 0}
    removed, num_unremoved = store_remove_idle(paths)
    return {"removed_shelves": removed, "num_unremoved_shelves": num_unremoved}


def _location(text: str) -> StoreLocation:
    return StoreLocation.parse([part for part in text.split(",") if part])


def paths_of(text: str) -> list[str]:
    """The folders of a store with shelves, named as ``--banyan-store`` names them. Raises ValueError."""
    location = _location(text)
    if location.scheme not in SHELVED:
        raise ValueError(
            f"{location.scheme}:// has no shelves: `banyan store` and `banyan fsck` are for file:// and 3fs://; of "
            f"{NIXL_POSIX}:// there is `banyan store stat`, of Mooncake what its master's metrics page tells"
        )
    return list(location.paths)


def _line(shelf: dict[str, Any]) -> str:
    use = "in use" if shelf["is_in_use"] else "idle"
    return (
        f"shelf {shelf['shelf']}  {use:6}  namespace {shelf['namespace'][:12]}  {shelf['num_records']} of"
        f" {shelf['num_places']} places  {shelf['num_segments']} segments  {shelf['used_bytes'] / 1e9:.3f} GB"
    )


def _totals(survey: dict[str, Any]) -> dict[str, Any]:
    shelves = survey["shelves"]
    return {
        "num_records": survey["num_records"],
        "used_bytes": survey["used_bytes"],
        "num_shelves": len(shelves),
        "num_unreadable_shelves": survey["num_unreadable_shelves"],
        "num_shelves_in_use": sum(shelf["is_in_use"] for shelf in shelves),
        "num_places": sum(shelf["num_places"] for shelf in shelves),
        "num_segments": sum(shelf["num_segments"] for shelf in shelves),
        "num_namespaces": len({name for shelf in shelves for name in shelf["records_by_namespace"]}),
    }


def _refuse(error: Exception, args: argparse.Namespace) -> int:
    reason = str(error.args[-1]) if error.args else str(error)
    print(json.dumps({"error": reason}) if args.json else f"banyan: {reason}")
    return REFUSED
