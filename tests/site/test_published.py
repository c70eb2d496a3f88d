"""The site as it is published: at an address of its own, below the root of its host."""

import hashlib
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nbformat
import pytest
from playwright.sync_api import Browser, BrowserContext

from forks import Forks
from headnotes.exercises.exercise import load
from headnotes.exercises.exercise import notebooks as exercises
from website import ADDRESS, REPOSITORY, ROOT, Quiet, serve, text_of


class Host(Quiet):
    """A proxy that answers for `ADDRESS` only, as GitHub Pages would."""

    def translate_path(self, path: str) -> str:
        if not path.startswith(ADDRESS):
            return "/no/such/file"
        return super().translate_path("/" + path.removeprefix(ADDRESS))

    def send_error(
        self, code: int, message: str | None = None, explain: str | None = None
    ) -> None:
        body = Path(self.directory, "404.html").read_bytes()
        self.send_response(code, message)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="session")
def proxy(site: Path) -> Iterator[str]:
    """What a client has to ask for `ADDRESS`."""
    with serve(Host, site) as address:
        yield address


@pytest.fixture
def visitor(browser: Browser, proxy: str) -> Iterator[BrowserContext]:
    """A browser for which `ADDRESS` is the only address there is."""
    context = browser.new_context(proxy={"server": proxy})
    yield context
    context.close()


def test_a_missing_page_is_shown_whole(visitor: BrowserContext) -> None:
    page = visitor.new_page()
    wrong: list[str] = []
    missing = f"{ADDRESS}no/such/page.html"
    page.on("requestfailed", lambda request: wrong.append(request.url))
    page.on("response", lambda r: wrong.append(r.url) if r.status >= 400 else None)
    page.goto(missing)
    page.wait_for_load_state("networkidle")
    assert wrong == [missing]
    assert page.get_by_role("heading", level=1).inner_text() == "Page not found"
    page.get_by_role("link", name="home page").click()
    page.wait_for_url(f"{ADDRESS}index.html")
    assert wrong == [missing]


def test_the_sitemap_and_the_canonical_links_name_every_page(site: Path) -> None:
    sitemap = ElementTree.parse(site / "sitemap.xml")
    listed = {element.text for element in sitemap.iter() if "loc" in element.tag}
    canonical = set()
    for path in site.rglob("*.html"):
        if path.name != "404.html":
            html = path.read_text(encoding="utf-8")
            address = ADDRESS + path.relative_to(site).as_posix()
            assert f'<link rel="canonical" href="{address}">' in html
            canonical.add(address)
    assert listed == canonical
    assert len(listed) > 100


def test_every_page_that_has_one_source_links_it(site: Path) -> None:
    edited = {}
    for path in site.rglob("*.html"):
        html = path.read_text(encoding="utf-8")
        if link := re.search(r'<a href="([^"]+)"[^>]* rel="edit"', html):
            file = link[1].removeprefix(f"{REPOSITORY}/edit/main/")
            assert (ROOT / file).is_file(), link[1]
            edited[path.relative_to(site).as_posix()] = file
    assert edited["source/mha.html"] == "src/headnotes/mha.py"
    assert (
        edited["learn/01_attention_by_hand.html"]
        == "docs/learn/01_attention_by_hand.py"
    )
    assert edited["install.html"] == "docs/install.md"
    html = (site / "install.html").read_text(encoding="utf-8")
    assert f'href="{REPOSITORY}/issues"' in html
    assert f"git clone {REPOSITORY}" in text_of(html)


def test_without_addresses_none_is_invented() -> None:
    blanks = runpy.run_path(str(ROOT / "hooks.py"))["blanks"]("", "")
    assert blanks["repository"] == ""
    assert re.fullmatch(r"headnotes-[\d.]+-py3-none-any\.whl", blanks["headnotes"])
    assert not any("://" in text for text in blanks.values())


def test_the_files_have_the_hashes_that_the_page_shows(site: Path) -> None:
    text = text_of((site / "install.html").read_text(encoding="utf-8"))
    files = sorted((site / "dist").iterdir())
    assert len(files) == 4
    for file in files:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        assert re.search(rf"{re.escape(file.name)}\s+[\d,]+\s+{digest}", text)


def test_the_same_sources_give_the_same_bytes(site: Path, tmp_path: Path) -> None:
    def ignored(folder: str, names: list[str]) -> set[str]:
        heavy = {".venv", ".cache", ".git", "site"} if Path(folder) == ROOT else set()
        return heavy | {"__pycache__"}

    # Another folder, with other times of its files.
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=ignored, copy_function=shutil.copy)
    for source in (copy, copy / "src" / "sidenotes"):
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path / "dist")],
            cwd=source,
            env={**os.environ, "SITE_URL": ADDRESS, "REPO_URL": REPOSITORY},
            capture_output=True,
            check=True,
        )
    for file in (site / "dist").iterdir():
        assert (tmp_path / "dist" / file.name).read_bytes() == file.read_bytes()


# A causal attention, batch first, with an example and true shape comments.
MY_MODEL = '''
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class MyAttention(nn.Module):
    """Causal self-attention.

    >>> MyAttention(d_model=10, heads=5)(torch.randn(3, 7, 10)).shape
    torch.Size([3, 7, 10])
    """

    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        batch_size, seq_len, d_model = x.shape
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        context = scaled_dot_product_attention(q, k, v, is_causal=True)
        context = context.transpose(1, 2).flatten(2)  # [batch_size, seq_len, d_model]
        return self.out(context)  # [batch_size, seq_len, d_model]


def build_model():
    return nn.Sequential(MyAttention(d_model=20, heads=5), nn.LayerNorm(20))
'''

# Commands that the test does not run, each with the reason.
NOT_RUN = {
    r"python3 -m venv .*|source .*": "the environment is made by the test",
    r"git clone .*": "the address of the repository is not ours",
    r"make .*": "installs everything anew; `make test` runs this test",
    r"\.venv/bin/.*": "the steps of `make`, which the next test compares",
    r"pip install torch --index-url .*": "downloads PyTorch",
    r"pip install .*x-transformers.*": "downloads a package that no test needs",
    r".* --device cuda.*": "needs a GPU; tests/attention_bench has the option",
    r".* --compile": "compiles for a minute; tests/attention_bench has the option",
    r"headnotes exercise check .*": "fails until the code to complete is written",
    r"torchrun .*": "starts several processes; tests/parallel does so",
    r"headnotes bench --results .*": "takes ten minutes; writes what --quick prints",
}
# Added to a command that would measure or train for minutes.
SMALLER = {
    "headnotes bench": " tiny --only core,nn --sizes 1x8 --seconds 0",
    "headnotes train": " --steps 2",
}
# A file of the reader to train with.
MY_PAIRS = "".join(
    f"{n}.5.{y}\t{y}-05-{n:02}\n" for n in range(9, 29) for y in (1998, 1999)
)


def commands_of_page(html: str) -> list[str]:
    blocks = re.findall(
        r'<div class="language-console[^"]*">.*?<code>(.*?)</code>', html, re.DOTALL
    )
    return [c for block in blocks for c in commands_in(text_of(block))]


def commands_in(text: str) -> list[str]:
    return re.findall(r"^\$ (.+)$", text, re.MULTILINE)


def reason_not_to_run(command: str) -> str | None:
    reasons = (why for what, why in NOT_RUN.items() if re.fullmatch(what, command))
    return next(reasons, None)


def assert_notebooks_run(
    notebooks: Path, run: Callable[[str, Path], Any], folder: Path
) -> None:
    """Run downloaded notebooks in one kernel of the environment.

    A kernel starts slowly. The build has run all cells of the lessons, but the first;
    exercises are run as they are, and one of each series with its solution.
    """
    cells, expected = [], []
    series = set()
    for path in sorted(notebooks.glob("learn/*.ipynb")):
        cells.append(code_cells(path)[0])
    for name in exercises():
        (path,) = notebooks.glob(f"exercises/??_{name}.ipynb")
        needs, given, check = code_cells(path)
        cells += [needs, given, check]
        expected.append(f"{name}: FAIL")
        exercise = load(name)
        if exercise.series in series:
            continue
        series.add(exercise.series)
        target = exercise.solution.__name__
        solved = f"from headnotes.exercises.solutions.{name} import {target}"
        if exercise.laws:
            solved += f"\nlaw = {exercise.laws[0]!r}"
        cells += [solved, check]
        expected.append(f"{name}: pass")
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)])
    nbformat.write(notebook, folder / "all.ipynb")
    execute = "python -m nbconvert --to notebook --execute all.ipynb --output executed"
    result = run(execute, folder)
    assert result.returncode == 0, result.stderr[-2000:]
    executed = nbformat.read(folder / "executed.ipynb", as_version=4)
    printed = ["".join(out.text for out in cell.outputs) for cell in executed.cells]
    assert [text.splitlines()[0] for text in printed if text] == expected


def code_cells(path: Path) -> list[str]:
    """The code of a notebook, cell by cell."""
    cells = nbformat.read(path, as_version=4).cells
    return [cell.source for cell in cells if cell.cell_type == "code"]


@pytest.fixture
def environment(tmp_path: Path, proxy: str) -> dict[str, str]:
    """A virtual environment with everything but our own packages, and no network."""
    others = tmp_path / "others"
    others.mkdir()
    for entry in Path(pytest.__file__).parent.parent.iterdir():
        ours = re.match(r"_?(editable_impl_)?(headnotes|sidenotes)", entry.name)
        if not ours:
            (others / entry.name).symlink_to(entry)
    venv = tmp_path / "venv"
    command = [sys.executable, "-m", "venv", "--without-pip", str(venv)]
    subprocess.run(command, check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(str(others))
    for name in ("pip", "pytest", "mkdocs"):
        script = venv / "bin" / name
        script.write_text(
            f"#!{venv}/bin/python\n"
            f"import runpy; runpy.run_module({name!r}, run_name='__main__')\n"
        )
        script.chmod(0o755)
    return {
        "PATH": f"{venv}/bin:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "http_proxy": proxy,
        "https_proxy": proxy,
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # as the option does; pip reads the value so
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def forks(environment: dict[str, str]) -> Iterator[Forks]:
    """Programs of the environment, which need not import PyTorch."""
    python = shutil.which("python", path=environment["PATH"])
    assert python
    # An optimizer imports the second when it is made.
    with Forks(python, environment, ["torch", "torch._dynamo"]) as forks:
        yield forks


def test_every_command_of_every_page_works(
    site: Path, environment: dict[str, str], forks: Forks, tmp_path: Path
) -> None:
    def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
        name, *arguments = shlex.split(command)
        program = shutil.which(name, path=environment["PATH"])
        if program and name in {"headnotes", "pytest"}:
            return forks.run(program, arguments, folder)
        return subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    assert "No module named headnotes" in run("python -m headnotes", tmp_path).stderr
    pages = {
        path.relative_to(site).as_posix(): commands_of_page(
            path.read_text(encoding="utf-8")
        )
        for path in sorted(site.rglob("*.html"))
    }
    # It installs what the other pages take for granted.
    pages = {"install.html": pages.pop("install.html"), **pages}
    # The README is at home in the sources, which the page has just unpacked.
    pages["README.md"] = commands_in((ROOT / "README.md").read_text(encoding="utf-8"))
    archive = next((site / "dist").glob("headnotes-*.tar.gz"))
    sources = tmp_path / "install.html" / archive.name.removesuffix(".tar.gz")
    assert f"pip install {ADDRESS}dist/" in str(pages)
    done: set[str] = set()
    failed, skipped = [], set()
    for page, commands in pages.items():
        folder = sources if page == "README.md" else tmp_path / page.replace("/", "-")
        # Downloads, and a file of the reader.
        shutil.copytree(site / "dist", folder, dirs_exist_ok=True)
        (folder / "my_model.py").write_text(MY_MODEL)
        (folder / "pairs.tsv").write_text(MY_PAIRS)
        for command in commands:
            if reason_not_to_run(command):
                skipped.add(command)
            elif command.startswith("cd "):
                folder = folder / command.removeprefix("cd ")
                assert folder.is_dir(), f"{page}: {command}"
            elif command not in done:
                done.add(command)
                options = (more for c, more in SMALLER.items() if command.startswith(c))
                result = run(command + next(options, ""), folder)
                if result.returncode:
                    output = f"{result.stdout}{result.stderr}"[-600:]
                    failed.append(f"{page}: {command}\n{output}")
        if page == "install.html":
            where = run(
                "python -c 'import headnotes as h; print(h.__file__)'", tmp_path
            )
            assert where.stdout.startswith(str(tmp_path / "venv")), where
    assert_notebooks_run(site / "notebooks", run, tmp_path)
    print("ran:", *sorted(done), "not run:", *sorted(skipped), sep="\n")
    assert not failed, "\n\n".join(failed)
    assert len(done) >= 10
    wheel = next((site / "dist").glob("headnotes-*.whl")).name
    wrong = run(f"pip install {ADDRESS}dist/{wheel}#sha256={'0' * 64}", tmp_path)
    assert "DO NOT MATCH THE HASHES" in wrong.stderr
    unused = [w for w in NOT_RUN if not any(re.fullmatch(w, c) for c in skipped)]
    assert unused == []


def test_the_steps_without_make_are_those_of_the_makefile() -> None:
    makefile = (
        (ROOT / "Makefile").read_text(encoding="utf-8").replace("$(BIN)", ".venv/bin")
    )
    steps = commands_in((ROOT / "docs/install.md").read_text(encoding="utf-8"))
    pip, serve, tests = (c for c in steps if c.startswith(".venv/bin/"))
    packages = re.findall(r"--editable ('[^']+'|\S+)", makefile)
    assert re.findall(r"-e (\S+)", pip.replace('"', "'")) == packages
    assert "--constraint constraints.txt" in makefile
    assert "-c constraints.txt" in pip
    assert serve in makefile
    assert tests.partition(" ")[0] in makefile


def test_no_page_installs_a_name_that_is_not_ours(site: Path) -> None:
    texts = {
        path: text_of(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")
    }
    for name in ("README.md", "CONTRIBUTING.md", "src/sidenotes/README.md"):
        texts[ROOT / name] = (ROOT / name).read_text(encoding="utf-8")
    bare = re.compile(
        r"pip install [^`\n]*?(?<![-/\w@.])(headnotes|sidenotes)(?![-\w/.])"
    )
    assert [
        f"{path}: {m[0]}" for path, t in texts.items() if (m := bare.search(t))
    ] == []
    blank = re.compile(
        r"\{\{ (headnotes|sidenotes|archive|folder|files|repository) \}\}"
    )
    built = [path for path in texts if path.suffix == ".html"]
    assert [path for path in built if blank.search(texts[path])] == []
