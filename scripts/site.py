# SPDX-License-Identifier: Apache-2.0
"""What ``mkdocs build`` does beside its own work: links that leave ``docs/`` must name a file of the repository.

On the site such a link becomes the file's path, since there is no page to go to.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>(?:\.\./)+[^)#\s]+)(?:#[^)]*)?\)")
# mkdocs counts the warnings of loggers below its own, and a strict build ends with them.
log = logging.getLogger("mkdocs.hooks.site")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page with links out of the documentation as paths."""
    return followed(markdown, DOCS / page.file.src_uri, log.warning)


def followed(markdown: str, page: Path, warn: Callable[..., None]) -> str:
    """``markdown`` of the page at ``page``; ``warn`` is told of each target that is not there."""

    def path_of(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(page.parent / link["target"]))
        if target.is_relative_to(DOCS):
            return link[0]
        if not target.exists():
            warn("%s: a link to %s, which is not there", page.name, link["target"])
            return link[0]
        path = str(target.relative_to(ROOT))
        return f"`{path}`" if link["text"].strip("`") in path else f"{link['text']} (`{path}`)"

    return LINK.sub(path_of, markdown)
