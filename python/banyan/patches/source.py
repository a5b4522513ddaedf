# SPDX-License-Identifier: Apache-2.0
"""A definition in SGLang's source, and the digest of what a patch depends on of it.

``body``: all that the definition says, but for comments and layout. ``signature``: what a caller sees, which is enough
for a hook that only receives: of a function its parameters and how it is called; of a class its fields and the
signatures of its methods.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

WATCHES = ("signature", "body")

_CALLED_AS = ("staticmethod", "classmethod", "property", "contextmanager", "abstractmethod")
"""Decorators that change how a function is called, or whether a subclass has to have it."""


def fingerprint(tree: ast.AST, watches: str = "body") -> str:
    """Digest of what Python source says, the same under every version of Python."""
    said = _said(tree) if watches == "body" else repr(_signature(tree))
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _signature(node: ast.AST) -> object:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        names = [ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list]
        called_as = [name for name in names if name in _CALLED_AS]
        return type(node).__name__, node.name, _parameters(node.args), called_as
    if isinstance(node, ast.ClassDef):
        fields = [ast.unparse(inner.target) for inner in node.body if isinstance(inner, ast.AnnAssign)]
        methods = [
            _signature(inner) for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        return "ClassDef", node.name, fields, methods
    raise LookupError(f"{type(node).__name__} has no signature")


def _parameters(args: ast.arguments) -> object:
    """Names, kinds and which may be left out: types are words, and a hook passes a default on."""
    return (
        [one.arg for one in args.posonlyargs],
        [one.arg for one in args.args],
        len(args.defaults),
        args.vararg is not None,
        [(one.arg, default is not None) for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)],
        args.kwarg is not None,
    )


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
            text += str(value.value)
            continue
        pieces += [repr(text), _said(value)]
        text = ""
    return [*pieces, repr(text)]


def parsed_file(path: Path) -> ast.Module:
    """
    Raises:
        LookupError: when it cannot be read, or is not Python.
    """
    try:
        # As Python reads it, whatever the locale.
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise LookupError(f"{path.name} cannot be read: {error}") from error


def definition(
    target: str, parsed: Callable[[Path], ast.Module] = parsed_file, *, folder: Path | None = None
) -> ast.AST:
    """A function, class or module as a syntax tree, from its file as ``parsed`` gives it: of the package in ``folder``,
    or of the installed one.

    Raises:
        LookupError: when the file or the definition is not there, or cannot be read.
    """
    path, names = _file_of(target, folder)
    found: ast.AST = parsed(path)
    for name in names:
        named = (node for node in getattr(found, "body", []) if getattr(node, "name", None) == name)
        inside = next((node for node in named if not _is_overload(node)), None)
        if inside is None:
            raise LookupError(f"{target}: {name} is not defined in {path.name}")
        found = inside
    return found


def text_of(target: str, *, folder: Path | None = None) -> str:
    """The source of a definition, as it stands in its file; "" where it is not there."""
    try:
        path, _ = _file_of(target, folder)
        found = definition(target, folder=folder)
    except LookupError:
        return ""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    first, last = getattr(found, "lineno", 1), getattr(found, "end_lineno", len(lines))
    return "".join(lines[first - 1 : last])


def _file_of(target: str, folder: Path | None) -> tuple[Path, list[str]]:
    """Where a target is defined, and its names within that file."""
    parts = target.split(".")
    path = _installed(parts[0]) if folder is None else folder / parts[0]
    rest = parts[1:]
    while rest and (path / rest[0]).is_dir():
        path, rest = path / rest[0], rest[1:]
    path = path / f"{rest[0]}.py" if rest else path
    if not rest or not path.is_file():
        raise LookupError(f"{target}: no module file {path.name}")
    return path, rest[1:]


def _installed(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0])


def _is_overload(node: ast.AST) -> bool:
    """Whether a definition only declares types: what runs is another one of the same name."""
    names = [ast.unparse(decorator) for decorator in getattr(node, "decorator_list", [])]
    return any(name.split(".")[-1] == "overload" for name in names)
