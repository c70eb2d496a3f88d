"""The rules of the house, on every file that it holds."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from headnotes import cli
from sidenotes import split

ROOT = Path(__file__).parent.parent
HEADNOTES = ROOT / "src" / "headnotes"
MODULES = sorted(p for p in HEADNOTES.rglob("*.py") if p.stem != "__init__")
SOURCES = sorted((ROOT / "src").rglob("*.py"))
LESSONS = sorted((ROOT / "docs").glob("*/*.py"))

# Who may import whom inside of `headnotes`; what is not named here may import nothing.
# Arrows point down: who compares knows those compared, and never the other way round.
ARROWS = {
    "__init__": {"headnotes", "convert", "fast", "mha", "masks"},
    "cli": {"headnotes", "bench", "laws"},
    "blockwise": {"blocks"},
    "kernels": {"blocks", "blockwise"},
    "fast": {"blocks", "cache", "kernels", "mha"},
    "convert": {"mha", "implementations"},
    "dialects": {"mha", "masks", "implementations"},
    "compare": {"dialects", "convert", "mha", "masks", "implementations"},
    "probes": {"dialects", "convert", "mha", "masks", "implementations"},
}

# The laws serve one another, and need nothing else of the house.
ARROWS |= {f"laws/{p.stem}": {"laws"} for p in (HEADNOTES / "laws").glob("*.py")}

# Who times others knows them all, and is known to none.
TIMED = {"bench", "compare", "convert", "fast", "masks", "mha"}
ARROWS |= {f"bench/{p.stem}": TIMED for p in (HEADNOTES / "bench").glob("*.py")}

# What a module may import beside torch and the standard library, inside of functions.
LIBRARIES = {"laws/fixture": {"pytest"}, "plots": {"matplotlib"}}
LIBRARIES |= {
    "bench/peers": {"transformers", "x_transformers"},
    "bench/decoding": {"transformers", "x_transformers"},
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[str]:
    """Dotted names of all that a file imports, also inside of functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # A module that is copied imports its companions from where it stands.
            assert node.level < 2, f"{path}:{node.lineno}: a distant relative"
            home = "headnotes." * node.level + (node.module or "")
            yield from (
                f"{home}.{alias.name}".replace("..", ".") for alias in node.names
            )


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


def test_the_two_packages_never_import_each_other() -> None:
    for path in SOURCES:
        other = "sidenotes" if HEADNOTES in path.parents else "headnotes"
        assert not [i for i in imports(path) if i.split(".")[0] == other], path


def test_the_page_and_the_plain_copy_agree_on_what_is_a_note() -> None:
    # Neither package may import the other, so each says it for itself.
    assert split.PRAGMA.pattern == cli.PRAGMA.pattern


def test_sidenotes_knows_nothing_of_tensors() -> None:
    for path in (ROOT / "src" / "sidenotes").rglob("*.py"):
        assert not [i for i in imports(path) if i.split(".")[0] == "torch"], path


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_arrows_point_down_only(path: Path) -> None:
    name = path.relative_to(HEADNOTES).with_suffix("").as_posix()
    allowed = ARROWS.get(name, set())
    libraries = {"torch", *sys.stdlib_module_names, *LIBRARIES.get(name, set())}
    for imported in imports(path):
        top, *rest = imported.split(".")
        if top == "headnotes":
            assert (rest[0] if rest else top) in allowed, f"{path}: {imported}"
        else:
            assert top in libraries, f"{path}: {imported}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_has_its_test_its_page_and_its_place(
    path: Path, nav: set[str]
) -> None:
    inside = path.relative_to(HEADNOTES).with_suffix("")
    assert (ROOT / "tests" / inside.parent / f"test_{inside.name}.py").is_file()
    page = ROOT / "docs" / "source" / f"{inside}.md"
    assert page.read_text(encoding="utf-8") == f"::literate {name_of(path)}\n"
    assert f"source/{inside}.md" in nav


@pytest.mark.parametrize("path", LESSONS, ids=name_of)
def test_every_lesson_has_its_place(path: Path, nav: set[str]) -> None:
    assert f"{path.parent.name}/{path.stem}.md" in nav


@pytest.mark.parametrize("path", LESSONS, ids=name_of)
def test_no_lesson_prints_documentation(path: Path) -> None:
    # A stored lesson is used again when only comments and docstrings have changed.
    text = path.read_text(encoding="utf-8")
    assert "help(" not in text
    assert "__doc__" not in text
    assert "inspect" not in text


def test_code_that_a_page_quotes_is_the_code() -> None:
    core = (HEADNOTES / "mha.py").read_text(encoding="utf-8")
    quoted = re.findall(r'`einsum\("([^"]+)"\)`', (ROOT / "docs/index.py").read_text())
    assert len(quoted) == 2
    assert all(f'torch.einsum("{equation}",' in core for equation in quoted)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_names_what_it_follows(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert text.startswith("# "), "the first line is the title of the page"
    assert "\nSource: " in text


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_modules_and_functions_stay_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 340  # about 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, f"{path}: {node.name}"


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
