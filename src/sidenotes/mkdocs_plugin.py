"""The MkDocs plugin: `plugins: [sidenotes]` enables it.

It adds the style sheet, the script and the Markdown extension, executes the lessons in
the folder of the pages, creates a page for each module of the configured packages, and
renders only pages that have changed. All paths in its options are relative to the
folder of `mkdocs.yml`.
"""

import json
import os
import re
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from threading import active_count
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemBytecodeCache
from mkdocs.config import config_options as option
from mkdocs.config.base import Config
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import BasePlugin, CombinedEvent, event_priority
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from mkdocs.utils.templates import TemplateContext

from sidenotes.cache import prune
from sidenotes.extension import SidenotesExtension, no_links
from sidenotes.output_cache import Entries, remember_files, searchable
from sidenotes.page_cache import render_cached, site_key
from sidenotes.split import LiterateError, read

if TYPE_CHECKING:
    from sidenotes.lessons import Lesson

ASSETS = Path(__file__).parent / "assets"

# A lesson is a script in the percent format. Other scripts are copied as files.
PERCENT = re.compile(r"# %%(\s|$)")

# From this number of pages on, a second process helps to render them.
MANY = 30

# The title of a module: the first line of its docstring.
TITLE = re.compile(r'(?:#.*\n|\s)*r?"""\s*# (.+)')


class Options(Config):  # type: ignore[no-untyped-call]
    """The options of the plugin in `mkdocs.yml`."""

    packages = option.Type(dict, default={})
    """Folders of Python sources, each with the folder of its pages:
    `{src/softmax: source}`."""

    execute = option.Type(bool, default=True)
    """Execute the doctest examples of these modules, to show shapes and values."""

    setup = option.Type(str, default="")
    """Statements before each lesson and the examples of each module: a random seed, and
    slow imports, which are then done once for all lessons."""

    lesson_inputs = option.Type(dict, default={})
    """Files that lessons read, besides the modules that they import: lists of patterns
    for each pattern of lessons, `{"*": [data/*.csv]}`. If one of these files changes,
    the lesson is executed again."""

    editions = option.Type(object, default=no_links)
    """A function that maps the path of a module to the files that its page offers to
    copy, addresses by label: `!!python/name:package.editions`."""

    links = option.Type(object, default=no_links)
    """A function from the path of a module to the links at the top of its page: their
    addresses, by label."""

    sizes = option.Type(dict, default={})
    """For each module, the sizes that a reader can change on its page."""

    meta = option.Type(dict, default={})
    """Front matter for modules, lessons and other pages, by a pattern of their names:
    `{source/internal/*.md: {search: {boost: 0.5}}}`."""

    cache = option.Type(str, default=".cache/sidenotes")
    """Folder for results of execution and rendering; can be removed at any time."""


class SidenotesPlugin(BasePlugin[Options]):  # type: ignore[no-untyped-call]
    """Handles the events of a build, in their order."""

    def on_startup(self, *, command: str, dirty: bool) -> None:
        """Keep the plugin loaded between two builds of `mkdocs serve`."""

    def on_config(self, config: MkDocsConfig) -> MkDocsConfig:
        """Add the extension, styles and script; complete the navigation."""
        self.root = Path(config.config_file_path).resolve().parent
        self.cache = self.root / self.config.cache
        self.pages = {
            module: page
            for folder, pages in self.config.packages.items()
            for module, page in self.pages_of(folder, pages.strip("/"))
        }
        if "sidenotes" in config.markdown_extensions:
            raise PluginError(
                "mkdocs.yml: remove `sidenotes` from `markdown_extensions`; the plugin "
                "adds the extension, and takes its options"
            )
        self.extension = SidenotesExtension(
            root=str(self.root),
            execute=[f"{folder}/**/*.py" for folder in self.config.packages]
            if self.config.execute
            else [],
            import_roots=[str(folder) for folder in self.import_roots()],
            cache=str(self.cache / "recordings"),
            **{name: self.config[name] for name in ("editions", "links", "setup")},
            sizes=self.config.sizes,
        )
        self.sources = self.extension.of_build = self.extension.sources()
        config.markdown_extensions.append(self.extension)  # type: ignore[arg-type]
        if config.nav:
            config.nav = self.complete(config.nav)
        for asset in sorted(ASSETS.iterdir()):
            path = f"assets/{asset.name}"
            if asset.suffix == ".css":
                # Before the style sheets of the site, which can override it.
                config.extra_css.insert(0, path)
            else:
                script = option.ExtraScriptValue(path)
                script.defer = True
                config.extra_javascript.append(script)
        config.watch += [str(self.root / folder) for folder in self.config.packages]
        return config

    def pages_of(self, folder: str, pages: str) -> Iterable[tuple[Path, str]]:
        """The modules in a folder of sources, each with its page."""
        path = self.root / folder
        if not path.is_dir():
            raise PluginError(
                f"sidenotes, `packages`: there is no folder `{folder}` in {self.root}"
            )
        for module in sorted(path.rglob("*.py")):
            if module.stem != "__init__":
                inside = module.relative_to(path).with_suffix(".md").as_posix()
                yield module, f"{pages}/{inside}"

    def import_roots(self) -> list[Path]:
        """The folders from which lessons and modules import."""
        parents = [(self.root / folder).parent for folder in self.config.packages]
        return [*dict.fromkeys([*parents, self.root])]

    def complete(self, nav: Any) -> Any:
        """Replace the folder of a package in the navigation by its pages."""
        if isinstance(nav, list):
            return [self.complete(each) for each in nav]
        if isinstance(nav, dict):
            return {title: self.complete(each) for title, each in nav.items()}
        folders = {f"{pages.strip('/')}/" for pages in self.config.packages.values()}
        if nav not in folders:
            return nav
        return [page for page in self.pages.values() if page.startswith(nav)]

    def on_files(self, files: Files, *, config: MkDocsConfig) -> Files:
        """Add the pages of the modules and the lessons, the style sheet and script."""
        for module, page in self.pages.items():
            directive = f"::literate {module.relative_to(self.root).as_posix()}\n"
            content = front_matter(module) + directive
            files.append(File.generated(config, page, content=content))
        for asset in sorted(ASSETS.iterdir()):
            content = asset.read_text(encoding="utf-8")
            path = f"assets/{asset.name}"
            files.append(File.generated(config, path, content=content))

        lessons = [file for file in files if is_lesson(file)]
        self.notebooks: dict[str, str] = {}
        if not lessons:
            return files
        try:
            from sidenotes.kernels import Kernels
            from sidenotes.lessons import lesson
        except ImportError as error:
            reason = f"{error}; lessons need `pip install ipykernel jupytext nbclient`"
            raise PluginError(f"{lessons[0].src_uri}: {reason}") from None

        def executed(file: File) -> "Lesson":
            """A lesson with its outputs."""
            return lesson(
                Path(str(file.abs_src_path)),
                kernels=kernels,
                inputs=self.inputs(file),
                cache=self.cache / "lessons",
            )

        try:
            with (
                # More than processors: a kernel that starts or ends mostly waits.
                ThreadPoolExecutor(max_workers=2 * (os.cpu_count() or 1)) as threads,
                # Closed before the threads, which an interrupt thus ends at once.
                Kernels(self.config.setup, self.sources.imports) as kernels,
            ):
                # The longest task, so the first.
                recorded = threads.submit(self.sources.record_all)
                all_executed = [*threads.map(executed, lessons)]
                recorded.result()
        except LiterateError as error:
            raise PluginError(str(error)) from None
        for file, one in zip(lessons, all_executed, strict=True):
            files.remove(file)
            name = str(Path(file.src_uri).with_suffix(".md").as_posix())
            files.append(File.generated(config, name, content=one.markdown))
            self.notebooks[name] = one.notebook
        return files

    def inputs(self, file: File) -> set[Path]:
        """The files that a lesson reads, by the option `lesson_inputs`."""
        inputs = set()
        for lessons, patterns in self.config.lesson_inputs.items():
            if Path(file.src_uri).match(lessons):
                for pattern in patterns:
                    found = set(self.root.glob(pattern))
                    if not found:
                        reason = f"no file matches `{pattern}` in {self.root}"
                        raise PluginError(f"sidenotes, `lesson_inputs`: {reason}")
                    inputs |= found
        return inputs

    @event_priority(-100)  # MkDocs renders the pages after the last plugin
    def on_nav(
        self, nav: Navigation, *, config: MkDocsConfig, files: Files
    ) -> Navigation:
        """Compute what all pages depend on: the set of pages is complete now."""
        self.site_key = site_key(config, files)
        pages = [file.page for file in files.documentation_pages() if file.page]
        # Only Linux forks safely, and only a process of one thread.
        can_fork = sys.platform == "linux" and active_count() == 1
        self.helper = None
        if self.site_key and can_fork and len(pages) > MANY:
            options = (pages[::-1], config, files)
            self.helper = get_context("fork").Process(
                target=self.render_ahead, args=options, daemon=True
            )
            self.helper.start()
        return nav

    def render_ahead(
        self, pages: list[Page], config: MkDocsConfig, files: Files
    ) -> None:
        """In a second process: render pages into the cache, from the last one on.

        It ends at the first page that is cached: either all are, or MkDocs, which
        begins with the first page, has come as far. Errors and warnings are left to
        MkDocs, because such a page is not cached.
        """
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        for page in pages:
            page.read_source(config)
            page.markdown = config.plugins.on_page_markdown(
                page.markdown or "", page=page, config=config, files=files
            )
            own = vars(page)["render"]
            if isinstance(own, partial) and self.render(page, config, files):
                return

    def on_env(
        self, env: Environment, *, config: MkDocsConfig, files: Files
    ) -> Environment:
        """Compile the templates of the theme once for all builds."""
        if self.helper:
            self.helper.kill()
            self.helper.join()
        folder = self.cache / "templates"
        folder.mkdir(parents=True, exist_ok=True)
        env.bytecode_cache = FileSystemBytecodeCache(str(folder))
        remember_files(env, config, self.cache / "outputs")
        return env

    @event_priority(-100)  # after all other plugins have changed the text
    def on_page_markdown(
        self, markdown: str, *, page: Page, config: MkDocsConfig, files: Files
    ) -> str:
        """Add the configured front matter; make MkDocs render through the cache."""
        for pattern, meta in self.config.meta.items():
            if Path(page.file.src_uri).match(pattern):
                page.meta.update(meta)
        # A page that another plugin renders, such as a notebook, keeps its renderer.
        if "render" not in vars(page):
            page.render = partial(self.render, page)  # type: ignore[assignment]
        return markdown

    def render(self, page: Page, config: MkDocsConfig, files: Files) -> bool:
        """Called by MkDocs instead of `page.render`; whether the page was cached."""
        try:
            if self.site_key is None:
                Page.render(page, config, files)
                return False
            inputs = self.sources.inputs(page.markdown or "")
            parts = [self.site_key, *inputs]
            memory = self.sources.imports.memory
            folder = self.cache / "pages"
            return render_cached(page, config, files, parts, memory, folder)
        except LiterateError as error:
            raise PluginError(str(error)) from None

    @event_priority(100)
    def hide_markup(
        self,
        context: TemplateContext,
        *,
        page: Page,
        config: MkDocsConfig,
        nav: Navigation,
    ) -> None:
        """Before the search plugin reads the page: reduce code and figures to text.

        Of a page whose entries are known, the search plugin sees nothing.
        """
        self.content = page.content or ""
        self.entries = None
        # A fourth method would be that of another plugin, which could change the page.
        if len(config.plugins.events["page_context"]) == 3:
            self.entries = Entries(page, config, self.cache / "outputs")
        known = self.entries and self.entries.known is not None
        page.content = self.searched = "" if known else searchable(self.content)

    @event_priority(-100)
    def show_markup(
        self,
        context: TemplateContext,
        *,
        page: Page,
        config: MkDocsConfig,
        nav: Navigation,
    ) -> None:
        """After the search plugin: restore the page, unless a plugin has changed it."""
        if self.entries:
            self.entries.complete()
        if page.content == self.searched:
            page.content = self.content

    on_page_context = CombinedEvent(hide_markup, show_markup)

    def on_post_build(self, *, config: MkDocsConfig) -> None:
        """Complete the cache, and reduce it to its size limit."""
        self.sources.imports.memory.save()
        for folder in self.cache.glob("*"):
            prune(folder)


def front_matter(module: Path) -> str:
    """The title of a module, if it has one, for the navigation and the search."""
    found = TITLE.match(read(module))
    if not found:
        return ""
    title = json.dumps(found[1].replace("`", ""))
    return f"---\ntitle: {title}\n---\n"


def is_lesson(file: File) -> bool:
    """Whether a file among the pages is a script in the percent format.

    A script that is a page already belongs to another plugin.
    """
    path = file.abs_src_path
    excluded = file.inclusion == InclusionLevel.EXCLUDED
    if not file.src_uri.endswith(".py") or path is None or excluded:
        return False
    if file.is_documentation_page():
        return False
    return bool(PERCENT.match(Path(path).read_text(encoding="utf-8")))
