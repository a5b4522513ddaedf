# SPDX-License-Identifier: Apache-2.0
"""The patch queue: one file for each place where Banyan touches SGLang.

A file says where (``target``), how (``kind``), with what (``hook``), why, and when it can go. ``fingerprint`` is the
digest of the upstream source that the patch was written against. The queue is read without importing SGLang, so a
changed source is found before anything of it runs.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HOOKED_KINDS = ("before", "after", "around", "register")
"""The first three are hooks around ``target``; "register" is called once in the process and adds to a registry."""

CONSEQUENCES = ("pass", "stop")
"""What a hook's failure means: SGLang goes on without it; or the process first stops to share, since what the hook was
to do keeps wrong pages from being shared."""

KINDS = (*HOOKED_KINDS, "subclass", "call")
"""The last two are upstream sources that Banyan inherits from or calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One seam. ``processes`` names where it must take: main, controller, scheduler."""

    name: str
    target: str
    kind: str
    processes: tuple[str, ...]
    why: str
    remove_when: str
    fingerprint: str
    hook: str | None = None
    on_failure: str = "pass"

    def __post_init__(self) -> None:
        if self.on_failure not in CONSEQUENCES:
            raise ValueError(f"patch {self.name}: on_failure {self.on_failure!r} is none of {', '.join(CONSEQUENCES)}")
        if self.kind not in KINDS:
            raise ValueError(f"patch {self.name}: kind {self.kind!r} is none of {', '.join(KINDS)}")
        if (self.hook is None) == (self.kind in HOOKED_KINDS):
            raise ValueError(f"patch {self.name}: kind {self.kind} and hook {self.hook} do not go together")


def load_queue(folder: Path | None = None) -> list[Patch]:
    """All patches, in the order of their file names.

    Raises:
        ValueError: for a file that is not a patch.
    """
    folder = folder or Path(__file__).parent
    queue = []
    for path in sorted(folder.glob("*.toml")):
        fields = tomllib.loads(path.read_text())
        try:
            queue.append(Patch(name=path.stem, **{**fields, "processes": tuple(fields["processes"])}))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path.name} is not a patch: {error}") from error
    return queue


def fingerprint(tree: ast.AST) -> str:
    """Digest of what Python source says, blind to comments and layout, and the same under every version of Python."""
    return hashlib.sha256(_said(tree).encode()).hexdigest()[:16]


def _said(node: object) -> str:
    """A syntax tree as text. What is empty is left out: newer versions of Python have fields that older ones lack."""
    if isinstance(node, ast.JoinedStr):
        return f"JoinedStr({', '.join(_pieces(node))})"
    if isinstance(node, ast.AST):
        fields = [f"{name}={_said(value)}" for name, value in ast.iter_fields(node) if value not in (None, [])]
        return f"{type(node).__name__}({', '.join(fields)})"
    if isinstance(node, list):
        return f"[{', '.join(map(_said, node))}]"
    return repr(node)


def _pieces(string: ast.JoinedStr) -> list[str]:
    """The parts of an f-string. Some versions of Python leave neighbouring constants apart that others join."""
    pieces: list[str] = []
    text = ""
    for value in string.values:
        if isinstance(value, ast.Constant):
            text += value.value
            continue
        pieces += [repr(text), _said(value)]
        text = ""
    return [*pieces, repr(text)]


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def upstream_definition(
    target: str, parsed: Callable[[Path], ast.Module] = _parsed, *, folder: Path | None = None
) -> ast.AST:
    """A function, class or module as a syntax tree, from its file as ``parsed`` gives it: of the package in ``folder``,
    or of the installed one.

    Raises:
        LookupError: when the file or the definition is not there.
    """
    parts = target.split(".")
    path = _installed(parts[0]) if folder is None else folder / parts[0]
    rest = parts[1:]
    while rest and (path / rest[0]).is_dir():
        path, rest = path / rest[0], rest[1:]
    path = path / f"{rest[0]}.py" if rest else path
    if not rest or not path.is_file():
        raise LookupError(f"{target}: no module file {path.name}")
    found: ast.AST = parsed(path)
    for name in rest[1:]:
        named = (node for node in getattr(found, "body", []) if getattr(node, "name", None) == name)
        inside = next((node for node in named if not _is_overload(node)), None)
        if inside is None:
            raise LookupError(f"{target}: {name} is not defined in {path.name}")
        found = inside
    return found


def _installed(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0])


def _is_overload(node: ast.AST) -> bool:
    """Whether a definition only declares types: what runs is another one of the same name."""
    names = [ast.unparse(decorator) for decorator in getattr(node, "decorator_list", [])]
    return any(name.split(".")[-1] == "overload" for name in names)


def changed(queue: list[Patch], folder: Path | None = None) -> list[str]:
    """One line for each patch whose upstream source is not the one it was written against; in ``folder``, or as it is
    installed."""
    lines = []
    # Several patches have their targets in one file, and the longest takes half a second to parse.
    parsed = functools.cache(_parsed)
    for patch in queue:
        try:
            actual = fingerprint(upstream_definition(patch.target, parsed, folder=folder))
        except LookupError as error:
            lines.append(f"patch {patch.name}: {error}")
            continue
        if actual != patch.fingerprint:
            lines.append(f"patch {patch.name}: {patch.target} has changed ({patch.fingerprint} -> {actual})")
    return lines
