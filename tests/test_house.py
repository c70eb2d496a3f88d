"""The rules of the house, on every file that it holds."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from headnotes import cli
from sidenotes import split
from sidenotes.grammar import last_line

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src"
SOURCES = sorted(SRC.rglob("*.py"))
# Each has its page; the renderer of the pages has none.
MODULES = [p for p in SOURCES if p.stem != "__init__" and "sidenotes" not in p.parts]
LESSONS = sorted((ROOT / "docs").glob("*/*.py"))

# Which packages each package may import beside itself, and which libraries beside torch
# and the standard library.
PACKAGES = {
    "headnotes": set[str](),
    "attention_laws": set[str](),
    "attention_bench": {"headnotes"},
    "sidenotes": set[str](),
}
LIBRARIES = {
    "headnotes/integrations/transformers": {"transformers"},
    "headnotes/plots": {"matplotlib"},
    "headnotes/models/dates": {"babel"},
    "headnotes/models/training": {"labml", "safetensors"},
    "headnotes/parallel/training": {"labml"},
    "attention_laws/pytest_plugin": {"pytest"},
    "attention_bench/implementations": {"transformers", "x_transformers"},
    "attention_bench/decoders": {"transformers", "x_transformers"},
    "attention_bench/decoding": {"transformers", "x_transformers"},
}
# The command line starts the checker and the benchmark, which know nothing of it.
COMMANDS = {"headnotes/cli": {"attention_laws", "attention_bench"}}

# The modules and folders of `headnotes`, from the top: each may import what stands in a
# row below its own, and nothing else.
LEVELS = [
    {"cli", "__init__"},
    {"parallel"},
    {"compare", "exercises", "models"},
    {"convert", "integrations"},
    {"architectures"},
    {"fast"},
    {"variants", "implementations"},
    {"masks", "plots", "positions"},
    {"checks", "mha"},
]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports(path: Path) -> Iterator[str]:
    """Dotted names of all that a file imports, also inside of functions."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: write the whole name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def nav_pages(entry: object) -> Iterator[str]:
    """All pages of the navigation."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for value in entry.values():
            yield from nav_pages(value)
    elif isinstance(entry, list):
        for value in entry:
            yield from nav_pages(value)


@pytest.fixture(scope="module")
def nav() -> set[str]:
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("", lambda *_: None)  # !ENV and !!python/name
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    return set(nav_pages(config["nav"]))


def test_the_page_and_the_plain_copy_agree_on_what_is_a_note() -> None:
    # Neither package may import the other, so each says it for itself.
    assert split.PRAGMA.pattern == cli.PRAGMA.pattern


def module_of(path: Path) -> str:
    return path.relative_to(SRC).with_suffix("").as_posix()


@pytest.mark.slow
def test_packages_import_only_what_they_may() -> None:
    faults = []
    for path in SOURCES:
        name = module_of(path)
        package = name.partition("/")[0]
        allowed = {package, *PACKAGES[package], *COMMANDS.get(name, ())}
        if package != "sidenotes":
            allowed |= {"torch", *sys.stdlib_module_names, *LIBRARIES.get(name, ())}
        for imported in imports(path):
            top = imported.split(".")[0]
            # The renderer may use any library, but none of our other packages.
            ours = top in {*PACKAGES, "torch"} or package != "sidenotes"
            if top not in allowed and ours:
                faults.append(f"{name}: {imported}")
    assert faults == []


def test_arrows_point_down_only() -> None:
    faults = []
    for path in sorted(SRC.glob("headnotes/**/*.py")):
        own = module_of(path).split("/")[1]
        level = next(i for i, row in enumerate(LEVELS) if own in row)
        below = {own}.union(*LEVELS[level + 1 :])
        for imported in imports(path):
            package, *rest = imported.split(".")
            if package == "headnotes" and rest and rest[0] not in below:
                faults.append(f"{module_of(path)}: {imported}")
    assert faults == []


def test_every_module_has_its_test_and_its_place(nav: set[str]) -> None:
    faults = []
    for path in MODULES:
        inside = module_of(path).removeprefix("headnotes/")
        # The solutions of exercises have one test for all of them.
        inside_tests = re.sub(r"/solutions/\w+$", "/solutions", inside)
        folder, _, name = f"/{inside_tests}".rpartition("/")
        if not (ROOT / f"tests{folder}/test_{name}.py").is_file():
            faults.append(f"tests{folder}/test_{name}.py is missing")
        if f"source/{inside}.md" not in nav:
            faults.append(f"source/{inside}.md is missing in the `nav` of mkdocs.yml")
    assert faults == []


def test_every_lesson_has_its_place(nav: set[str]) -> None:
    pages = {f"{path.parent.name}/{path.stem}" for path in LESSONS}
    assert pages - {page.rpartition(".")[0] for page in nav} == set()


def test_no_lesson_prints_documentation() -> None:
    # A stored lesson is used again when only comments and docstrings have changed.
    for path in LESSONS:
        text = path.read_text(encoding="utf-8")
        found = {word for word in ("help(", "__doc__", "inspect") if word in text}
        assert found == set(), name_of(path)


def test_code_that_a_page_quotes_is_the_code() -> None:
    core = (SRC / "headnotes" / "mha.py").read_text(encoding="utf-8")
    quoted = re.findall(r'`einsum\("([^"]+)"\)`', (ROOT / "docs/index.py").read_text())
    assert len(quoted) == 2
    assert all(f'torch.einsum("{equation}",' in core for equation in quoted)


def test_every_module_has_a_title_and_names_its_source() -> None:
    faults = []
    for path in MODULES:
        module = next(x for x in nodes_of(path) if isinstance(x, ast.Module))
        text = ast.get_docstring(module) or ""
        if not text.startswith("# "):
            faults.append(f"{name_of(path)}: the first line is the title of the page")
        if "\nSource: " not in text:
            faults.append(f"{name_of(path)}: no paragraph begins with `Source: `")
    assert faults == []


def test_functions_stay_short() -> None:
    faults = []
    for path in SOURCES:
        long = [
            node
            for node in nodes_of(path)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and last_line(node) - node.lineno >= 60
        ]
        # Notes make a function easier to read, not harder: only its code is counted.
        sections = split.split(split.read(path), path) if long else []
        code = {n for section in sections for n in section.code_lines}
        for node in long:
            if len(code.intersection(range(node.lineno, last_line(node) + 1))) > 60:
                faults.append(f"{name_of(path)}:{node.lineno}: {node.name}")
    assert faults == []


@pytest.mark.slow
def test_importing_every_module_loads_torch_and_nothing_heavier() -> None:
    names = [
        ".".join(p.relative_to(ROOT / "src").with_suffix("").parts) for p in MODULES
    ]
    program = f"import sys, {', '.join(names)}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in result.stdout.split()}
    assert "torch" in loaded
    heavy = {"mkdocs", "matplotlib", "labml", "triton", "markdown", "sidenotes"}
    assert not loaded & heavy
