"""The addresses of the project, in the metadata of both of its distributions.

They are taken from the environment: `SITE_URL` is where the site is published, and
`REPO_URL` the repository. Without them the metadata names none.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# The target of a link or an image, if it is a file of the repository.
RELATIVE = re.compile(r"(!?)(\[[^\]]*\])\((?!https?://)([^)]+)\)")


class Addresses(MetadataHookInterface):
    """Sets `urls` and `readme`, which `pyproject.toml` declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the `[project]` table."""
        site = os.environ.get("SITE_URL", "")
        repository = os.environ.get("REPO_URL", "").rstrip("/")
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["urls"] = urls(site, repository)
        text = absolute(readme, repository) if repository else readme
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def urls(site: str, repository: str) -> dict[str, str]:
    """The links that an index shows beside the description."""
    found = {"Documentation": site} if site else {}
    if repository:
        found |= {
            "Repository": repository,
            "Issues": f"{repository}/issues",
            "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        }
    return found


def absolute(readme: str, repository: str) -> str:
    """The README with absolute links: an index does not have the other files.

    A repository's `raw` pages serve images, and send text as plain text.
    """

    def link(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        kind = "raw" if image else "blob"
        return f"{image}{text}({repository}/{kind}/main/{target})"

    return RELATIVE.sub(link, readme)
