"""Fence doctest examples in Markdown, so that they are highlighted as code."""

import re

from markdown.preprocessors import Preprocessor

FENCE = re.compile(r"\s*(`{3,}|~{3,})")
PROMPT = re.compile(r"(\s*)>>>( |$)")


class FenceDoctests(Preprocessor):
    """Fences each example, whose `>>>` Markdown would read as three quotations."""

    def run(self, lines: list[str]) -> list[str]:
        return fence_doctests(lines)


def fence_doctests(lines: list[str]) -> list[str]:
    """Fence each doctest: from its prompt to the blank line that ends it.

    >>> fence_doctests(["Twice:", "", ">>> 2 * 3", "6", "", "And so on."])
    ['Twice:', '', '```pycon', '>>> 2 * 3', '6', '```', '', 'And so on.']
    """
    fenced: list[str] = []
    fence = ""  # the closing line of a fence that the author opened
    indent: str | None = None  # the indentation of the open example
    for line in lines:
        if indent is not None and not line.strip():
            fenced.append(f"{indent}```")
            indent = None
        elif indent is None and (match := FENCE.match(line)):
            if not fence:
                fence = match[1]
            elif line.strip().startswith(fence):
                fence = ""
        elif indent is None and not fence and (match := PROMPT.match(line)):
            indent = match[1]
            fenced.append(f"{indent}```pycon")
        fenced.append(line)
    return fenced if indent is None else [*fenced, f"{indent}```"]
