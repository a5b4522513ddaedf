# SPDX-License-Identifier: Apache-2.0
"""``banyan cache``: tell a server, or all servers behind a router, what to keep of prompts."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from banyan.cli.engine import Engine, EngineError
from banyan.decoding import printable
from banyan.routing.question import ASKABLE, question

ACTIONS = {
    "pin": "keep its pages for a time in every tier, whoever needs room; or say why not",
    "retain": "keep what there is room for, until a pin needs it",
    "prefetch": "bring its pages from store or other nodes into the arena",
    "demote": "let its pages leave the arena next",
    "release": "keep its pages no longer",
    "ls": "list what is kept",
}
CHAT = "/v1/chat/completions"
LIST = "list"
MEDIA_FIELDS = ("image_data", "audio_data", "video_data")
MEDIA = re.compile("(input_)?(image|audio|video|file|document)(_url)?")
"""Types of parts whose pages are not known by tokens."""


def add_parser(commands: Any) -> None:
    from banyan.cli import DEFAULT_URL

    parser = commands.add_parser(
        "cache", help="tell the cache what to keep: pin, retain, prefetch, demote, release, ls"
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "action", choices=tuple(ACTIONS), help="; ".join(f"{name}: {text}" for name, text in ACTIONS.items())
    )
    parser.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help="the prompt: text, or as JSON the body of a request; -: standard input",
    )
    parser.add_argument(
        "--path",
        choices=(CHAT, *sorted(ASKABLE)),
        default=CHAT,
        help="what a body with messages is for; default %(default)s",
    )
    parser.add_argument("--ttl", type=float, metavar="SECONDS", help="how long to keep it; default 300")
    parser.add_argument("--salt", metavar="SALT", help="cache_salt of the tenant")
    parser.add_argument("--extra-key", metavar="KEY", help="extra_key of the prompt")
    parser.add_argument("--url", default=DEFAULT_URL, help="the server, or the router; default %(default)s")
    parser.add_argument("--api-key-file", type=Path, metavar="PATH", help="the server's key")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(args: argparse.Namespace) -> int:
    try:
        api_key = args.api_key_file.read_text().strip() if args.api_key_file else None
        answer = tell(Engine(args.url, api_key=api_key), args)
        said = [json.dumps(answer)] if args.json else [printable(line) for line in lines(answer)]
    except (EngineError, OSError, ValueError) as error:
        print(f"banyan cache: {error}", file=sys.stderr)
        return 1
    except (KeyError, TypeError) as error:
        print(f"banyan cache: the server is of another release, and answers otherwise: {error!r}", file=sys.stderr)
        return 1
    print("\n".join(said))
    return 0


def tell(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Raises ValueError for a file that is no prompt, OSError for one that cannot be read, EngineError for refusals."""
    command: dict[str, Any] = {"action": LIST if args.action == "ls" else args.action}
    for field, value in (("ttl_s", args.ttl), ("cache_salt", args.salt), ("extra_key", args.extra_key)):
        if value is not None:
            command[field] = value
    if args.action != "ls":
        if args.prompt_file is None:
            raise ValueError(f"{args.action} takes a prompt: name its file with --prompt-file")
        said = sys.stdin.read() if str(args.prompt_file) == "-" else args.prompt_file.read_text()
        command = {**named_by(engine, said, args.path), **command, **prompt_of(engine, said, args.path)}
    return engine.tell_cache(command)


def named_by(engine: Engine, said: str, path: str) -> dict[str, Any]:
    """What a body says of its pages' names beside its tokens.

    Raises:
        ValueError: for one of an adapter, or with media: no command names these.
    """
    body = _body(said) or {}
    if body.get("lora_path") is not None:
        raise ValueError("lora_path: the cache is not told of an adapter's prompts")
    model = str(body.get("model")) if path.startswith("/v1/") else ""
    if ":" in model and model != engine.served_model():
        raise ValueError(f"model {model} names an adapter: the cache is not told of an adapter's prompts")
    media = [name for name in MEDIA_FIELDS if body.get(name) is not None]
    media += [kind for kind in _kinds(body.get("messages", body.get("input"))) if MEDIA.fullmatch(kind)]
    if media:
        raise ValueError(f"{media[0]}: the cache is not told of prompts with more than text in them")
    return {name: body[name] for name in ("cache_salt", "extra_key") if body.get(name) is not None}


def _kinds(turns: object) -> Iterator[str]:
    """The types of a chat's turns, of their parts, and of what tools have found."""
    for one in turns if isinstance(turns, list) else ():
        if isinstance(one, dict):
            yield str(one.get("type"))
            yield from _kinds(one.get("content"))


def prompt_of(engine: Engine, said: str, path: str) -> dict[str, Any]:
    """A prompt as the server takes it: of a chat the tokens that the server makes of it."""
    body = _body(said)
    if body is None:
        return {"text": said}
    if "input_ids" in body:
        return {"input_ids": body["input_ids"]}
    if "messages" not in body and "input" not in body:
        return {"text": body.get("text", body.get("prompt"))}
    asked = body if path == CHAT else question(path, body)
    tokens = engine.tokens(asked)
    if not tokens:
        raise ValueError(f"the server makes no tokens of this for {path}: name with --path what the body is for")
    return {"input_ids": tokens}


def _body(said: str) -> dict[str, Any] | None:
    try:
        body = json.loads(said)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def lines(answer: Mapping[str, Any]) -> list[str]:
    """The answer in words."""
    if answer["action"] == LIST:
        return [
            f"{one['action']:8} {one['key']}  {one['num_tokens']:>9,} tokens, {one['expires_in_s']:,.0f} s left"
            + ("" if one["in_pool"] else ", not in the pools")
            for one in answer["prefixes"]
        ] or ["nothing is kept"]
    words = f"{answer['action']}: {answer['num_tokens']:,} tokens in {answer['num_pages']:,} pages"
    if "num_pages_found" in answer:
        words += f", {answer['num_pages_found']:,} of them found"
    if "num_pages_asked" in answer:
        words += f" of {answer['num_pages_asked']:,}"
    if "num_prefixes" in answer:
        words += f", {answer['num_prefixes']:,} prefixes released"
    return [words]
