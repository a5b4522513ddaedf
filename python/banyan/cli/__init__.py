# SPDX-License-Identifier: Apache-2.0
"""``banyan``: look at a machine, measure it. Each command is one module, imported when it is called."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from banyan import SGLANG_VERSION, __version__

DEFAULT_URL = "http://127.0.0.1:30000"

SHELLS = ("bash", "zsh", "tcsh")

LABORATORY = {
    "bench": "measure the native core here (banyan-lab)",
    "sim": "simulate clusters that run the shipped policies; check published figures (banyan-lab)",
    "trace": "where one request's time goes, as a file for Perfetto (banyan-lab)",
}
"""Commands of a distribution of its own, which enters their functions as entry points of the group ``COMMANDS``."""

COMMANDS = "banyan.commands"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        importlib.import_module("banyan._native")
    except ImportError as error:
        print(f"banyan: the native core does not load: {error}", file=sys.stderr)
        print("banyan: install the wheel for this system, or make setup in a checkout", file=sys.stderr)
        # 1 of fsck is "repaired".
        return 8 if words[:1] == ["fsck"] else 1
    if words and words[0] in LABORATORY:
        return _run_in_laboratory(words[0], words[1:])
    words, launch = _cut_launch(words)
    args = _parser().parse_args(words)
    args.launch = launch
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)


def _run_in_laboratory(name: str, words: Sequence[str]) -> int:
    for entry in importlib.metadata.entry_points(group=COMMANDS, name=name):
        if importlib.util.find_spec(entry.module.partition(".")[0]) is not None:
            status: int = entry.load()(words)
            return status
    way_out = "pip install build/dist/banyan_lab-*.whl, which `make wheel` makes in a checkout"
    print(f"banyan {name}: not installed: {way_out}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="banyan", description="One prefix cache over all ranks of an SGLang server.")
    parser.add_argument("--version", action="version", version=f"banyan {__version__} for sglang {SGLANG_VERSION}")
    from banyan.cli import size, store, telling
    from banyan.router import settings

    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="say what Banyan can do on this machine, and what it would refuse")
    _add_doctor(doctor)
    store.add_parsers(commands)
    size.add_parser(commands)
    telling.add_parser(commands)
    route = commands.add_parser(
        "route",
        help="one address for several servers, each request where its prefix is",
        fromfile_prefix_chars="@",
        epilog="@FILE stands for the arguments in FILE, one a line; those behind it win.",
    )
    settings.add_flags(route)
    route.set_defaults(run=_route)
    _add_top(commands.add_parser("top", help="watch a running server: hits by source, ranks, store, alerts"))
    _add_web(commands.add_parser("web", help="a page that shows running servers, on 127.0.0.1"))
    explain = commands.add_parser("explain", help="say why a request was fetched or computed, or pages dropped")
    explain.add_argument("rid", help="the request's id (`meta_info.id` of its answer), or: all, or: dropped")
    explain.add_argument("--url", default=DEFAULT_URL, help="the server; default %(default)s")
    explain.add_argument("--json", action="store_true", help="machine-readable")
    _add_api_key(explain)
    explain.set_defaults(run=_explain)
    completion = commands.add_parser("completion", help="print what makes a shell complete these commands")
    completion.add_argument("shell", choices=SHELLS)
    completion.set_defaults(run=_completion)
    for name, purpose in LABORATORY.items():
        commands.add_parser(name, help=purpose)
    return parser


def _add_top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, help="the server; default %(default)s")
    parser.add_argument("--once", action="store_true", help="look once; rates are since the server's start")
    parser.add_argument("--json", action="store_true", help="with --once: machine-readable")
    parser.add_argument("--interval", type=float, default=2.0, metavar="S", help="seconds; default %(default)s")
    _add_api_key(parser)
    parser.set_defaults(run=_top)


def _add_web(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="*", default=[DEFAULT_URL], help=f"the servers; default {DEFAULT_URL}")
    parser.add_argument("--port", type=int, default=30_200, metavar="PORT", help="default %(default)s")
    _add_api_key(parser)
    parser.set_defaults(run=_web)


def _add_api_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--api-key-file", type=Path, metavar="PATH", help="holds the servers' key, where they have one")


def _cut_launch(words: list[str]) -> tuple[list[str], list[str] | None]:
    """The words of ``banyan doctor``, and behind ``--`` those of a server; None where there are none."""
    if words[:1] != ["doctor"] or "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "%(prog)s [-h] [--json] [--drive DIR] [--store URL] [--peer HOST:PORT --secret-file PATH] [--draft MODEL] "
        "[MODEL] [-- LAUNCH ARGUMENTS]"
    )
    parser.epilog = (
        "Behind -- a dry run: what a server started with these arguments would refuse, and what it would set."
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="say of this model: is it shared, what a page weighs")
    parser.add_argument("--draft", metavar="MODEL", help="and of this draft model, whose rows lie behind the model's")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument(
        "--drive",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="measure the drive that a store would use; repeat it. Needs 64 MiB there for a moment",
    )
    parser.add_argument(
        "--store",
        default=(),
        metavar="URL|PATH[,PATH...]",
        type=lambda text: tuple(part for part in text.split(",") if part),
        help="a store as --banyan-store names it: its library, whoever is to answer, its drives",
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="try the path to another node, named by its --banyan-listen: moves some 250 MB; repeat it",
    )
    parser.add_argument("--secret-file", type=Path, metavar="PATH", help="with --peer: as --banyan-secret-file")
    parser.set_defaults(run=_doctor)


def _completion(args: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(_parser(), args.shell))
    return 0


def _route(args: argparse.Namespace) -> int:
    from banyan.router import settings

    try:
        chosen = settings.take_flags(args)
    except (ValueError, OSError) as error:
        print(f"banyan route: {error}", file=sys.stderr)
        return 2
    from banyan.router.run import serve

    return serve(chosen)


def _explain(args: argparse.Namespace) -> int:
    from banyan.cli import explain
    from banyan.cli.engine import Engine, EngineError

    is_of_pages = args.rid == explain.DROPPED
    try:
        engine = Engine(args.url, api_key=_api_key(args), timeout_s=explain.TIMEOUT_S)
        found = explain.drops(engine) if is_of_pages else explain.decisions(engine, args.rid)
        if args.json:
            print(json.dumps(found, indent=2))
        elif is_of_pages:
            print("\n".join(map(explain.drop_sentence, found)) or "no rank has dropped a page to make room")
        else:
            lines = [line for one in found for line in explain.sentences(one)]
            print("\n".join(lines) or "no rank remembers a request that it looked pages up for")
    except (EngineError, OSError) as error:
        print(f"banyan explain: {error}", file=sys.stderr)
        return 1
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        print(f"banyan explain: the server is of another release, and tells it otherwise: {error!r}", file=sys.stderr)
        return 1
    return 0


def _top(args: argparse.Namespace) -> int:
    from rich.console import Console

    from banyan.cli import top
    from banyan.observe import Rates
    from banyan.observe.asking import Unanswered
    from banyan.observe.summary import summary

    if args.json and not args.once:
        print("banyan top: --json: with --once only", file=sys.stderr)
        return 2
    try:
        look = partial(top.look, args.url, _api_key(args))
        if args.once:
            told = summary(Rates(look()))
            if args.json:
                print(json.dumps(told, indent=2))
                return 0
            # A file or a pipe has no width.
            console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
            console.print(top.picture(told))
        else:
            top.watch(look, interval_s=max(0.2, args.interval), console=Console(highlight=False))
    except (Unanswered, OSError) as error:
        print(f"banyan top: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _web(args: argparse.Namespace) -> int:
    from banyan.cli import web

    if not 0 < args.port < 1 << 16:
        print(f"banyan web: --port {args.port}: name one from 1 to 65535", file=sys.stderr)
        return 2
    try:
        return web.serve(args.url, port=args.port, api_key=_api_key(args))
    except OSError as error:
        print(f"banyan web: {error}", file=sys.stderr)
        return 1


def _api_key(args: argparse.Namespace) -> str | None:
    """
    Raises:
        OSError: for a file that cannot be read, or is no text.
    """
    try:
        return None if args.api_key_file is None else args.api_key_file.read_text().strip()
    except UnicodeDecodeError as error:
        raise OSError(f"--api-key-file {args.api_key_file}: name a file with the server's key: {error}") from None


def _doctor(args: argparse.Namespace) -> int:
    from banyan.cli import doctor
    from banyan.cli.doctor_sglang import examine_model

    if args.draft is not None and args.model is None:
        print("banyan doctor: --draft: of which MODEL?", file=sys.stderr)
        return 2
    findings = [] if args.model is None else [examine_model(args.model, args.draft)]
    if args.peer:
        try:
            findings += doctor.examine_peers(args.peer, args.secret_file)
        except (ValueError, OSError) as error:
            print(f"banyan doctor: {error}", file=sys.stderr)
            return 2
    is_all = args.model is None and not args.peer
    if is_all or args.drive or args.store or args.launch is not None:
        findings += doctor.examine(drives=args.drive, store=args.store, launch=args.launch)
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(finding)
    return 0 if all(finding.is_ok for finding in findings) else 1
