"""The MkDocs plugin: nothing more to configure, no stale page, and clear refusals."""

import json
import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import Template
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort, PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

from sidenotes import cache, output_cache, page_cache
from sidenotes.cache import load
from sidenotes.split import LiterateError

ROOT = Path(__file__).parent.parent.parent

MODULE = '''"""# Title

Prose with $x$, and a [lesson](../lesson.md).
"""

from .b import ONE


def f():
    """
    >>> f()
    1
    """
    # Why
    return ONE
'''
LESSON = "# %% [markdown]\n# # Lesson\n# %%\nfrom p.a import f\nprint(f() + 1)\n"
OPTIONS: dict[str, Any] = {
    "site_name": "Tiny",
    "theme": {"name": "material", "font": False},
    "plugins": ["search", {"sidenotes": {"packages": {"src/p": "source"}}}],
    "nav": ["index.md", "lesson.md", {"Source": "source/"}],
}

Build = Callable[..., list[str]]


def more_links(path: Path) -> dict[str, str]:
    """An option of the site, which `mkdocs.yml` can name."""
    return {"More": "https://example.org"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """A function that builds a small site and names the pages that were rendered."""
    files = {"src/p/__init__.py": "", "src/p/b.py": '"""# B"""\nONE = 1\n'}
    files |= {"src/p/a.py": MODULE, "docs/lesson.py": LESSON}
    files |= {"docs/index.md": "# Home\n\n[A](source/a.md#f)\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    rendered: list[str] = []
    render = Page.render

    def counted(page: Page, *args: Any) -> None:
        rendered.append(page.file.src_uri)
        render(page, *args)

    monkeypatch.setattr(Page, "render", counted)
    # The files of the theme: to list them takes half the time of a build.
    monkeypatch.setattr(Files, "add_files_from_theme", lambda *_: None)
    # Nothing may depend on the working directory.
    monkeypatch.chdir(tmp_path.parent)

    def make(**changes: Any) -> list[str]:
        config = tmp_path / "mkdocs.yml"
        config.write_text(yaml.dump(OPTIONS | changes))
        rendered.clear()
        build(load_config(config_file=str(config), strict=True))
        return sorted(rendered)

    return make


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


ALL = ["index.md", "lesson.md", "source/a.md", "source/b.md"]


@pytest.mark.slow
def test_the_plugin_is_all_that_a_site_needs(site: Build, tmp_path: Path) -> None:
    assert site() == ALL
    out = tmp_path / "site"
    page = (out / "source/a/index.html").read_text()
    assert 'href="../../assets/sidenotes.css"' in page
    assert 'src="../../assets/sidenotes.js" defer' in page
    assert (out / "assets/sidenotes.css").is_file()
    assert (out / "assets/sidenotes.js").is_file()
    assert '<h2 id="f">' in page
    assert "<math" in page
    assert '<a href="../b/"' in page  # the navigation names each module
    lesson = (out / "lesson/index.html").read_text()
    assert re.search(r"lesson-output.*?>2\n", lesson, re.DOTALL)
    assert not (out / "lesson.py").exists()


@pytest.mark.slow
def test_only_what_has_changed_is_rendered(site: Build, tmp_path: Path) -> None:
    site()
    pages = {path: path.read_bytes() for path in tmp_path.glob("site/**/index.html")}
    assert site() == []
    assert all(path.read_bytes() == content for path, content in pages.items())

    module = tmp_path / "src/p/a.py"
    edit(module, "# Why", "# The reason")
    assert site() == ["source/a.md"]
    assert "The reason" in (tmp_path / "site/source/a/index.html").read_text()
    edit(module, "# The reason", "# Why")
    assert site() == []
    assert "The reason" not in (tmp_path / "site/source/a/index.html").read_text()

    edit(tmp_path / "docs/index.md", "Home", "Start")
    assert site() == ["index.md"]


@pytest.mark.slow
def test_no_change_leaves_a_stale_page(
    site: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site()
    # A module that another one and the lesson import.
    edit(tmp_path / "src/p/b.py", "ONE = 1", "ONE = 6")
    assert site() == ["lesson.md", "source/a.md", "source/b.md"]
    assert ">7\n" in (tmp_path / "site/lesson/index.html").read_text()
    edit(tmp_path / "docs/lesson.py", "f() + 1", "f() + 2")
    assert site() == ["lesson.md"]
    # A page that others may link to.
    (tmp_path / "docs/new.md").write_text("# New\n")
    assert site(nav=[*OPTIONS["nav"], "new.md"]) == [*ALL[:2], "new.md", *ALL[2:]]
    # Options, of the plugin and of other extensions, and the renderer itself.
    assert site(markdown_extensions=["admonition"], nav=None) == [
        *ALL[:2],
        "new.md",
        *ALL[2:],
    ]
    plugin = {"packages": {"src/p": "source"}, "links": more_links}
    assert len(site(plugins=["search", {"sidenotes": plugin}], nav=None)) == 5
    assert site(plugins=["search", {"sidenotes": plugin}], nav=None) == []
    monkeypatch.setattr(page_cache, "PACKAGE", [b"changed"])
    assert len(site(plugins=["search", {"sidenotes": plugin}], nav=None)) == 5


@pytest.mark.slow
def test_no_change_leaves_a_stale_page_of_an_api_reference(
    site: Build, tmp_path: Path
) -> None:
    (tmp_path / "docs/lesson.py").rename(tmp_path / "docs/lesson.md")
    (tmp_path / "docs/api.md").write_text("# API\n\n::: p.a.f\n\n::: p.b\n")
    edit(tmp_path / "docs/index.md", "[A]", "[f][p.a.f] and [A]")
    options = {"show_source": False, "docstring_style": None}
    ours = {"packages": {"src/p": "source"}, "execute": False}

    def make() -> list[str]:
        reference = {"handlers": {"python": {"paths": ["src"], "options": options}}}
        return site(
            plugins=[{"sidenotes": ours}, {"mkdocstrings": reference}], nav=None
        )

    kept = ["objects.inv", "assets/_mkdocstrings.css", "api/index.html", "index.html"]
    assert "api.md" in make()
    before = [(tmp_path / "site" / name).read_bytes() for name in kept]
    assert b'href="api/#p.a.f"' in before[3]
    assert make() == []
    assert [(tmp_path / "site" / name).read_bytes() for name in kept] == before
    # A comment is not in the reference, and only on the page of its own module.
    edit(tmp_path / "src/p/b.py", "ONE = 1", "# The first\nONE = 1")
    assert make() == ["source/b.md"]
    edit(tmp_path / "src/p/a.py", ">>> f()", "Documented.\n\n    >>> f()")
    assert make() == ["api.md", "source/a.md"]
    assert "Documented" in (tmp_path / "site/api/index.html").read_text()
    # A module that the documented one imports: an alias may lead there.
    edit(tmp_path / "src/p/b.py", '"""# B"""', '"""# The second"""')
    assert make() == ["api.md", "source/b.md"]
    # The docstring of a module is not in the documentation of a function.
    edit(tmp_path / "docs/api.md", "::: p.b\n", "")
    assert make() == ["api.md"]
    edit(tmp_path / "src/p/b.py", '"""# The second"""', '"""# The third"""')
    assert make() == ["source/b.md"]
    options["show_source"] = True
    assert "api.md" in make()
    # The reference shows the source with its comments: it depends on more.
    assert make() == ["api.md"]


@pytest.mark.slow
def test_pages_are_not_cached_where_an_extension_reads_other_files(
    site: Build,
) -> None:
    for _ in range(2):
        assert site(markdown_extensions=["pymdownx.snippets"]) == ALL


@pytest.mark.slow
def test_a_broken_link_is_reported_by_each_build(site: Build, tmp_path: Path) -> None:
    edit(tmp_path / "docs/index.md", "source/a.md#f", "source/c.md")
    for _ in range(2):
        # Also after a build that shows errors only.
        logging.getLogger("mkdocs").setLevel(logging.ERROR)
        site()
        logging.getLogger("mkdocs").setLevel(logging.INFO)
        with pytest.raises(Abort, match="1 warning"):
            site()
    edit(tmp_path / "docs/index.md", "source/c.md", "source/a.md#g")
    for _ in range(2):
        with pytest.raises(Abort, match="1 warning"):
            site(validation={"links": {"anchors": "warn"}})


# A build in a process of one thread, which prints the pages that it renders itself.
BUILD = """
import logging
import sys
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page
from sidenotes import mkdocs_plugin
mkdocs_plugin.MANY = 1
Files.add_files_from_theme = lambda *_: None
render = Page.render
def shown(page, *args):
    print(page.file.src_uri)
    render(page, *args)
Page.render = shown
logging.basicConfig()
build(load_config(config_file=sys.argv[1], strict=True))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the build does not fork")
def test_a_second_process_helps_to_render_many_pages(
    site: Build, tmp_path: Path
) -> None:
    code = "def g(x):\n    # Why\n    return [x + 1, x * 2]\n\n\n" * 97
    for n in range(11):
        (tmp_path / f"src/p/m{n:02}.py").write_text(f'"""# Module {n}"""\n{code}')

    def pages() -> dict[str, str]:
        found = tmp_path.glob("site/**/index.html")
        return {str(path): path.read_text() for path in found}

    def built() -> subprocess.CompletedProcess[str]:
        for folder in ("site", ".cache/sidenotes/pages"):
            shutil.rmtree(tmp_path / folder)
        command = [sys.executable, "-c", BUILD, f"{tmp_path}/mkdocs.yml"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    rendered, expected = site(), pages()
    by_both = built()
    assert pages() == expected
    assert 0 < len(by_both.stdout.split()) < len(rendered)

    edit(tmp_path / "src/p/m10.py", "# Why", "# [Why](nowhere.md)")
    broken = built()
    assert broken.returncode
    assert "contains a link 'nowhere.md'" in broken.stderr


@pytest.mark.slow
def test_the_search_index_holds_each_word_of_the_code(
    site: Build, tmp_path: Path
) -> None:
    site()
    index = json.loads((tmp_path / "site/search/search_index.json").read_text())
    (entry,) = [e for e in index["docs"] if e["location"] == "lesson/"]
    assert "from p.a import f\nprint(f() + 1)" in entry["text"]
    assert 'class="n"' in (tmp_path / "site/lesson/index.html").read_text()


def sidenotes(**options: Any) -> list[Any]:
    return ["search", {"sidenotes": options}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"plugins": ["search"], "markdown_extensions": ["sidenotes"], "nav": None},
            r"write `plugins: \[search, sidenotes\]` in mkdocs.yml, and remove",
        ),
        (
            {"markdown_extensions": ["sidenotes"]},
            "remove `sidenotes` from `markdown_extensions`; the plugin adds",
        ),
        (
            {"markdown_extensions": ["pymdownx.arithmatex"]},
            r"write `- pymdownx.arithmatex: \{generic: true\}` in `markdown_ext",
        ),
        (
            {"plugins": sidenotes(packages={"lib/p": "source"})},
            "`packages`: there is no folder `lib/p` in ",
        ),
        (
            {"plugins": sidenotes(lesson_inputs={"*": ["data/*.csv"]}), "nav": None},
            r"`lesson_inputs`: no file matches `data/\*.csv` in ",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_line_to_write(
    site: Build,
    tmp_path: Path,
    changes: dict[str, Any],
    message: str,
    logged: StringIO,
) -> None:
    if changes.get("plugins") == ["search"]:
        (tmp_path / "docs/index.md").write_text("::literate src/p/a.py\n")
    with pytest.raises((Abort, PluginError, LiterateError)) as caught:
        site(**changes)
    assert re.search(message, f"{caught.value}{logged.getvalue()}")


@pytest.mark.slow
def test_a_failing_lesson_stops_the_build_with_its_place(
    site: Build, tmp_path: Path, logged: StringIO
) -> None:
    (tmp_path / "docs/lesson.py").write_text("# %%\n1 / 0\n")
    with pytest.raises(Abort):
        site()
    assert re.search(
        r"lesson\.py: a cell failed[^$]*ZeroDivisionError", logged.getvalue()
    )


@pytest.mark.slow
def test_the_search_knows_a_module_by_its_title_and_notes(
    site: Build, tmp_path: Path
) -> None:
    meta = {"source/*.md": {"tags": ["internal"], "search": {"boost": 0.5}}}
    options = {"packages": {"src/p": "source"}, "meta": meta}
    site(plugins=["search", {"sidenotes": options}])
    index = json.loads((tmp_path / "site/search/search_index.json").read_text())
    entries = {entry["location"]: entry for entry in index["docs"]}
    page, definition = entries["source/a/"], entries["source/a/#f"]
    assert page["title"] == "Title"
    assert page["text"].startswith("<p>Prose with x")
    assert "Why" in definition["text"]
    assert "return ONE" not in definition["text"]
    assert (page["tags"], page["boost"]) == (["internal"], 0.5)
    assert "boost" not in entries["lesson/"]
    html = (tmp_path / "site/source/b/index.html").read_text()
    assert re.search(r'href="\.\./a/"[^>]*>\s*<span class="md-ellipsis">\s*Title', html)


def files_in(folder: Path) -> dict[Path, bytes]:
    found = [path for path in folder.rglob("*.*") if path.suffix in (".html", ".json")]
    return {path: path.read_bytes() for path in found}


# Hooks: one changes pages, two change what templates show.
CHANGE = """
def on_env(env, config, files):
    files.src_uris["index.md"].page.content += "changed"
def on_page_context(context, page, **_):
    page.content += "and again"
"""
PASS = """
from pathlib import Path
def on_page_context(context, **_):
    context["word"] = (Path(__file__).parent / "word").read_text()
"""
FILTER = """
from pathlib import Path
def on_env(env, **_):
    word = (Path(__file__).parent / "word").read_text()
    env.filters["say"] = lambda text: text + word
"""
FOOTER = '{% extends "base.html" %}{% block footer %}{# pages #}TEXT{% endblock %}'
THEME = {**OPTIONS["theme"], "custom_dir": "own"}

# Changes of a site, one after the other: files, and options.
CHANGES: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"own/main.html": FOOTER}, {}),
    ({"docs/index.md": "# Start\n"}, {}),
    ({"docs/index.md": "---\ntags: [x]\n---\n# Start\n"}, {}),
    ({"docs/index.md": "---\nicon: material/home\n---\n# Start\n"}, {}),
    ({"docs/index.md": "---\nsearch: {exclude: true}\n---\n# Start\n"}, {}),
    ({}, {"nav": ["lesson.md", "index.md", "source/a.md", "source/b.md"]}),
    ({}, {"copyright": "C", "repo_url": "https://example.org/r"}),
    ({}, {"theme": {**OPTIONS["theme"], "features": ["navigation.tabs"]}}),
    ({}, {"theme": THEME}),
    ({"own/main.html": FOOTER.replace("TEXT", "one")}, {"theme": THEME}),
    ({"change.py": CHANGE}, {"hooks": ["change.py"]}),
    (
        {"own/main.html": FOOTER.replace("TEXT", "{{ word }}")},
        {"theme": THEME, "hooks": ["pass.py"]},
    ),
    ({"word": "second"}, {"theme": THEME, "hooks": ["pass.py"]}),
    (
        {"own/main.html": FOOTER.replace("TEXT", "{{ config.site_name | say }}")},
        {"theme": THEME, "hooks": ["filter.py"]},
    ),
    ({"word": "third"}, {"theme": THEME, "hooks": ["filter.py"]}),
]


@pytest.mark.slow
def test_a_cached_page_is_what_the_theme_would_make_now(
    site: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def store(path: Path, text: str) -> None:
        """All is made anew; where the cache has a text, it must be the same."""
        assert load(path) in (None, text), options
        cache.store(path, text)

    monkeypatch.setattr(output_cache, "load", lambda path: None)
    monkeypatch.setattr(output_cache, "store", store)
    (tmp_path / "docs/lesson.py").rename(tmp_path / "docs/lesson.md")
    (tmp_path / "own").mkdir()
    hooks = {"pass.py": PASS, "filter.py": FILTER, "word": "first"}
    for files, options in [(hooks, {}), *CHANGES]:
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        site(**{"nav": None} | options)
    assert "Tinythird" in (tmp_path / "site/index.html").read_text()


@pytest.mark.slow
def test_the_theme_makes_only_pages_that_have_changed(
    site: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs/lesson.py").rename(tmp_path / "docs/lesson.md")
    made: list[str] = []
    render = Template.render

    def counted(template: Template, context: dict[str, Any]) -> str:
        if context.get("page"):
            made.append(context["page"].file.src_uri)
        return render(template, context)

    monkeypatch.setattr(Template, "render", counted)
    site()
    files = files_in(tmp_path / "site")
    assert sorted(made) == ALL
    for old, new, pages in (
        ("[A]", "[The module]", ["index.md"]),
        ("[The module]", "[A]", []),
        ("# Home", "# Start", ALL),  # the navigation of all pages names it
        ("# Start", "# Home", []),
    ):
        made.clear()
        edit(tmp_path / "docs/index.md", old, new)
        site()
        assert sorted(made) == pages
    assert files_in(tmp_path / "site") == files
    (tmp_path / "change.py").write_text(CHANGE)
    for _ in range(2):
        site(hooks=["change.py"])
        before, files = files, files_in(tmp_path / "site")
    assert before == files


def test_the_files_of_this_site_are_cached() -> None:
    # A word in a template of the site can turn the cache off.
    config = load_config(config_file=str(ROOT / "mkdocs.yml"))
    env = config.theme.get_env()
    assert output_cache.site_inputs(env, config, Navigation([], [])) is not None
