"""The built site, as files: complete, self-contained, and light."""

import ast
import gzip
import json
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from os.path import normpath
from pathlib import Path
from urllib.parse import unquote, urlsplit
from zipfile import ZipFile

import pytest
from fontTools.ttLib import TTFont

from headnotes.cli import companions, copied_name, copy, edition, modules
from website import ADDRESS, INDEX, ROOT, code_lines, text_of

OWN = [
    "assets/sidenotes.css",
    "assets/sidenotes.js",
    "assets/site.css",
    "assets/site.js",
    "assets/source.css",
]


# Elements without an end, and those whose end may be left out.
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta"}
VOID |= {"source", "track", "wbr"}
LOADS = {"link", "script", "img", "iframe", "source", "use"}
# Highlighted words are most elements of the site, and all alike.
WORD = re.compile(r'<span class="\w+">([^<]*)</span>')
IMPLIED = {"p", "li", "dt", "dd", "td", "th", "tr", "tbody", "thead", "option"}


class Reader(HTMLParser):
    """Collects ids, links, what a page loads by itself, and faults of its markup."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.open: list[str] = []
        self.faults: list[str] = []
        self.headings = 0
        self.feed(WORD.sub(r"\1", text))
        self.close()
        self.faults += [f"<{tag}> is not closed" for tag in self.open]
        if self.headings != 1:
            self.faults.append(f"{self.headings} <h1>")

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open[-1] != tag and self.open[-1] in IMPLIED:
            self.open.pop()
        if self.open and self.open[-1] == tag:
            self.open.pop()
        elif tag not in VOID:
            line, _ = self.getpos()
            self.faults.append(f"line {line}: </{tag}> closes <{self.open[-1:]}>")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        if tag not in VOID:
            self.open.append(tag)
        self.headings += tag == "h1"
        if tag == "img" and not any(name == "alt" for name, _ in attrs):
            self.faults.append(f"an image without alt: {given.get('src')}")
        if "id" in given:
            self.ids.append(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in LOADS and given.get("rel") != "canonical":
            self.loads += [given[name] for name in ("href", "src") if name in given]


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[Path, Reader]:
    return {
        path: Reader(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")
    }


def test_every_link_leads_somewhere(site: Path, pages: dict[Path, Reader]) -> None:
    anchors = {path: set(reader.ids) for path, reader in pages.items()}
    files = {path for path in site.rglob("*") if path.is_file()}
    broken = []
    for path, reader in pages.items():
        for link in {*reader.links, *reader.loads}:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto"):
                continue
            inside = unquote(parts.path)
            if path.name == "404.html":
                # Served from any folder: its links are absolute.
                target = site / inside.removeprefix(urlsplit(ADDRESS).path)
            else:
                target = Path(normpath(path.parent / inside)) if inside else path
            if target not in files:
                target /= "index.html"
            wanted = unquote(parts.fragment) if target.suffix == ".html" else ""
            if target not in files or (wanted and wanted not in anchors[target]):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken


def test_no_page_loads_anything_from_another_host(pages: dict[Path, Reader]) -> None:
    foreign = [
        f"{path}: {load}"
        for path, reader in pages.items()
        for load in reader.loads
        if urlsplit(load).netloc
    ]
    assert foreign == []


def test_ids_are_unique_on_each_page(pages: dict[Path, Reader]) -> None:
    doubled = [
        f"{path}: {name}"
        for path, reader in pages.items()
        for name, count in Counter(reader.ids).items()
        if count > 1
    ]
    assert doubled == []


def test_the_markup_of_every_page_is_sound(pages: dict[Path, Reader]) -> None:
    faults = [f"{path}: {fault}" for path, r in pages.items() for fault in r.faults]
    assert faults == []


def test_every_formula_is_mathml(site: Path, pages: dict[Path, Reader]) -> None:
    core = (site / "source/mha.html").read_text(encoding="utf-8")
    source = modules()["mha"].read_text(encoding="utf-8")
    formulas = len(re.findall(r"\$\$.+?\$\$|\$[^$\n]+\$", source, re.DOTALL))
    assert core.count("<math") == formulas > 10
    for path in pages:
        assert 'arithmatex">\\' not in path.read_text(encoding="utf-8")


def test_the_font_of_formulas_is_light_and_has_every_character(
    site: Path, pages: dict[Path, Reader]
) -> None:
    file = site / "assets/math.woff2"
    print(f"math.woff2: {file.stat().st_size:,} bytes")
    assert file.stat().st_size <= 40 * 1024
    font = TTFont(file)
    assert "MATH" in font
    assert "SIL Open Font License" in font["name"].getDebugName(13)
    known = set(map(chr, font.getBestCmap())) | set(" \n\N{NO-BREAK SPACE}")
    for path in pages:
        html = path.read_text(encoding="utf-8")
        formulas = re.findall(r"<math.*?</math>", html, re.DOTALL)
        used = set(text_of("".join(formulas))) | {"√"}
        assert used <= known, f"{path}: {used - known}"
        assert ("assets/math.woff2" in html) == bool(formulas)


def test_a_shared_link_has_a_title_a_description_and_a_picture(site: Path) -> None:
    descriptions = Counter[str]()
    for path in site.rglob("*.html"):
        if path.name == "404.html" or path.parent.name == "tests":
            continue
        head = path.read_text(encoding="utf-8").partition("</head>")[0]
        found = dict(re.findall(r'<meta property="og:(\w+)" content="([^"]*)"', head))
        assert found["title"]
        assert f'<meta name="description" content="{found["description"]}"' in head
        assert 20 < len(found["description"]) < 260, f"{path}: {found}"
        descriptions[found["description"]] += 1
        picture = site / found["image"].removeprefix(ADDRESS)
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert descriptions.most_common(1)[0][1] == 1, descriptions.most_common(3)


def test_the_downloads_are_what_the_command_line_copies(site: Path) -> None:
    wrong = []
    for name, path in modules().items():
        download = site / "source" / path.relative_to(ROOT / "src" / "headnotes")
        if download.read_text(encoding="utf-8") != edition(path):
            wrong.append(name)
    assert wrong == []


def test_an_archive_holds_what_the_command_line_copies(
    site: Path, tmp_path: Path
) -> None:
    for name, path in modules().items():
        folder = site / "source" / path.relative_to(ROOT / "src" / "headnotes").parent
        archive = folder / copied_name(path).replace(".py", ".zip")
        assert archive.exists() == bool(companions(path)), name
        if archive.exists():
            copied = copy(name, tmp_path / name, plain=False, force=False)
            with ZipFile(archive) as files:
                texts = {each: files.read(each).decode() for each in files.namelist()}
            assert texts == {each.name: each.read_text() for each in copied}, name
    fast = ZipFile(site / "source/fast/fast.zip").namelist()
    assert fast == [
        "fast.py",
        "checks.py",
        "attention.py",
        "blockwise.py",
        "components.py",
        "formula.py",
        "mha.py",
        "rotary.py",
    ]


def test_every_line_of_each_source_has_one_place_on_its_page(site: Path) -> None:
    numbered = 0
    for path in site.glob("source/**/*.html"):
        html = path.read_text(encoding="utf-8")
        source = re.search(r'/edit/main/(\S+\.py)" title="Edit', html)
        if source is None:  # a page of tests, or an overview
            continue
        lines = (ROOT / source[1]).read_text(encoding="utf-8").split("\n")[:-1]
        anchors = [int(n) for n in re.findall(r' id="L(\d+)"', html)]
        assert sorted(anchors) == list(range(1, len(lines) + 1)), path
        for number, text in code_lines(html).items():
            assert text == lines[number - 1], path
        numbered += 1
    assert numbered > 50


def test_every_module_page_shows_its_tests(
    site: Path, pages: dict[Path, Reader]
) -> None:
    shown = [path for path in pages if path.parent.name == "tests"]
    assert len(shown) > 30
    for path in shown:
        html = path.read_text(encoding="utf-8")
        folder = path.parent.parent.relative_to(site / "source")
        tests = ROOT / "tests" / folder / f"{path.stem}.py"
        text = tests.read_text(encoding="utf-8")
        html = path.read_text(encoding="utf-8")
        assert text in text_of(html)
        name = path.stem.removeprefix("test_")
        if (path.parent.parent / f"{name}.html").exists():
            assert f'href="../{name}.html"' in html
        defined = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
        names = [n.name for n in defined if n.name.startswith("test_")]
        assert names
        assert set(names) <= set(pages[path].ids)


@pytest.mark.parametrize(
    "pages",
    [
        "*.html",
        "source/**/*.html",
        "learn/*.html",
        "compare/*.html",
        "exercises/*.html",
    ],
)
def test_pages_are_light(site: Path, pages: str) -> None:
    found = [path for path in site.glob(pages) if path.parent.name != "tests"]
    assert found
    for path in found:
        html = path.read_text(encoding="utf-8")
        if "source" not in pages:  # pictures come on top
            html = re.sub(r"<svg.*?</svg>", "", html, flags=re.DOTALL)
        own = [(site / name).read_bytes() for name in OWN]
        weight = sum(len(gzip.compress(part)) for part in [html.encode(), *own])
        name = path.relative_to(site).as_posix()
        print(f"{name}: {weight:,} bytes compressed")
        assert weight <= 60 * 1024, f"{name}: {weight:,} bytes"


def test_search_knows_every_function(site: Path) -> None:
    index = (site / INDEX).read_text(encoding="utf-8")
    for anchor in ("MultiHeadAttention.get_scores", "masked_softmax"):
        assert f'"source/mha.html#{anchor}"' in index
    assert '"source/masks/build.html#padding"' in index


# Which printed blocks of the staged walk-through each lesson brings out.
SHOWN_BLOCKS = {
    "01_attention_by_hand": [
        "scores_2",
        "scores_2_sum",
        "weights_2_sumnorm",
        "weights_2",
        "context_2",
        "scores_all",
        "weights_all",
        "context_all",
    ],
    "02_queries_keys_and_values": ["v1_out", "v2_weights"],
    "03_causal_self_attention": [
        "masked_simple",
        "masked_simple_norm",
        "masked_scores",
        "weights_masked",
        "context_masked",
    ],
    "04_multi_head_attention": [
        "wrapper_out",
        "mha_out",
        "a_aT",
        "a_first_head",
        "a_second_head",
    ],
}


def flat(numbers: object) -> list[float]:
    if isinstance(numbers, list):
        return [number for row in numbers for number in flat(row)]
    return [float(str(numbers))]


@pytest.mark.parametrize(
    ("lesson", "block"),
    [(lesson, block) for lesson, blocks in SHOWN_BLOCKS.items() for block in blocks],
)
def test_lessons_print_the_numbers_of_the_book(
    site: Path, lesson: str, block: str
) -> None:
    html = (site / f"learn/{lesson}.html").read_text(encoding="utf-8")
    printed = re.findall(r'<div class="[^"]*lesson-output[^"]*">.*?</div>', html, re.S)
    texts = [text_of(text) for text in printed]
    file = ROOT / "tests/data/expected.json"
    numbers = json.loads(file.read_text(encoding="utf-8"))["blocks"][f"001.{block}"]
    wanted = flat(numbers["printed"])
    if numbers["shape"][0] == 2 and len(numbers["shape"]) == 3:
        # A batch that holds one sentence twice; the lesson says so, and prints one.
        assert wanted[: len(wanted) // 2] * 2 == wanted
        wanted = wanted[: len(wanted) // 2]
    found = []
    for text in texts:
        shown = [float(n) for n in re.findall(r"-?(?:\d+\.\d*|inf)", text)]
        starts = range(len(shown) - len(wanted) + 1)
        found += [n for n in starts if shown[n : n + len(wanted)] == wanted]
    assert found, f"{lesson} does not print 001.{block}"


TINY = """
site_name: Tiny
theme: {name: mkdocs}
plugins: [sidenotes]
"""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "sources/a.py:1: there is no such file"),
        ("", "sources/a.py:1: the file is empty"),
        ("x = 1\ndef f(:\n", "sources/a.py:2: does not parse"),
        ("x = 1\n\N{NO-BREAK SPACE}\n", "sources/a.py:2: does not parse"),
        ('"""A $\\frac12$."""\n', "sources/a.py:1: the docstring has a backslash"),
    ],
    ids=["missing", "empty", "unparsable", "hard space", "not raw"],
)
def test_a_malformed_source_stops_the_build_with_its_place(
    tmp_path: Path, source: str | None, message: str
) -> None:
    (tmp_path / "mkdocs.yml").write_text(TINY)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("::literate sources/a.py\n")
    (tmp_path / "sources").mkdir()
    if source is not None:
        (tmp_path / "sources/a.py").write_text(source, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert message in result.stderr
