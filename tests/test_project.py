"""The metadata of the project agree with each other and with what CI runs."""

import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
from email import message_from_bytes
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import yaml

import headnotes
import sidenotes
from headnotes import architectures

ROOT = Path(__file__).parent.parent
SIDENOTES = ROOT / "src" / "sidenotes"
PYPROJECTS = {
    folder: tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    for folder in (ROOT, SIDENOTES)
}
PYPROJECT = PYPROJECTS[ROOT]
PROJECT = PYPROJECT["project"]
PROJECTS = pytest.mark.parametrize(
    "folder", PYPROJECTS, ids=lambda folder: PYPROJECTS[folder]["project"]["name"]
)
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = [
    path
    for path in sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    if path.stem != "config"
]


def load(path: str | Path) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def metadata(folder: Path) -> dict[str, Any]:
    """What `hatch_build.py` adds to the metadata of the distribution."""
    config = PYPROJECTS[folder]["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    script = folder / config.get("path", "hatch_build.py")
    hook = runpy.run_path(str(script))["Addresses"](str(folder), config)
    found: dict[str, Any] = {}
    hook.update(found)
    return found


def steps(workflow: str) -> list[dict[str, Any]]:
    jobs = load(f".github/workflows/{workflow}.yml")["jobs"].values()
    return [step for job in jobs for step in job.get("steps", [])]


def test_the_citation_names_this_version_and_no_invented_address() -> None:
    citation = load("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"]
    assert citation["title"]
    assert citation["authors"] == PROJECT["authors"]
    assert citation["version"] == headnotes.__version__
    assert citation["license"] == PROJECT["license"]
    # The owner adds them when they are known.
    assert not {"url", "repository-code"} & set(citation)


def test_both_distributions_have_one_version() -> None:
    # A release uploads both, and compares each with its tag.
    assert sidenotes.__version__ == headnotes.__version__


ADDRESSES = {
    "Documentation": "https://someone.github.io/headnotes/",
    "Repository": "https://github.com/someone/headnotes",
    "Issues": "https://github.com/someone/headnotes/issues",
    "Changelog": "https://github.com/someone/headnotes/blob/main/CHANGELOG.md",
}


@PROJECTS
@pytest.mark.parametrize("slash", ["", "/"])
def test_metadata_take_addresses_from_the_environment(
    slash: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SITE_URL", ADDRESSES["Documentation"])
    monkeypatch.setenv("REPO_URL", ADDRESSES["Repository"] + slash)
    assert metadata(folder)["urls"] == ADDRESSES


@PROJECTS
def test_metadata_invent_no_address(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SITE_URL", raising=False)
    monkeypatch.delenv("REPO_URL", raising=False)
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert metadata(folder)["urls"] == {}
    assert metadata(folder)["readme"]["text"] == readme


@pytest.mark.slow
@PROJECTS
def test_a_wheel_made_from_the_source_archive_has_all_metadata(
    folder: Path, tmp_path: Path
) -> None:
    addresses = {
        "SITE_URL": ADDRESSES["Documentation"],
        "REPO_URL": ADDRESSES["Repository"],
    }

    def build(target: str, cwd: Path) -> None:
        command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
        subprocess.run(
            [*command, "-t", target], cwd=cwd, env=os.environ | addresses, check=True
        )

    build("sdist", folder)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    build("wheel", unpacked)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as opened:
        names = opened.namelist()
        (path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        found = message_from_bytes(opened.read(path))
    assert not [name for name in names if "hatch_build" in name]
    urls = [url.split(", ") for url in found.get_all("Project-URL", [])]
    assert dict(urls) == ADDRESSES
    classifiers = PYPROJECTS[folder]["project"]["classifiers"]
    assert found.get_all("Classifier") == classifiers
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert readme.splitlines()[0] in found.get_payload()


@PROJECTS
def test_no_link_of_the_readme_is_broken_on_an_index(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPO_URL", ADDRESSES["Repository"])
    readme = (folder / "README.md").read_text(encoding="utf-8")
    link = re.compile(r"\]\(([^)]+)\)")
    published = metadata(folder)["readme"]["text"]
    targets = zip(link.findall(readme), link.findall(published), strict=True)
    for ours, theirs in targets:
        if ours.startswith("https://"):
            assert theirs == ours
        else:
            assert folder == ROOT, "links are made absolute from the root"
            assert (ROOT / ours).is_file(), ours
            kind = "raw" if ours.endswith(".png") else "blob"
            assert theirs == f"{ADDRESSES['Repository']}/{kind}/main/{ours}"


@PROJECTS
def test_ci_runs_every_python_that_the_classifiers_name(folder: Path) -> None:
    project = PYPROJECTS[folder]["project"]
    prefix = "Programming Language :: Python :: 3."
    minors = [
        int(name.removeprefix(prefix))
        for name in project["classifiers"]
        if name.startswith(prefix)
    ]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert project["requires-python"] == f">=3.{minors[0]}"
    matrix = load(".github/workflows/ci.yml")["jobs"]["versions"]["strategy"]["matrix"]
    run = {*matrix["python"], *(entry["python"] for entry in matrix["include"])}
    assert run == {f"3.{minor}" for minor in minors}


def test_ci_runs_the_lowest_supported_torch_on_the_lowest_python() -> None:
    matrix = load(".github/workflows/ci.yml")["jobs"]["versions"]["strategy"]["matrix"]
    (entry,) = (entry for entry in matrix["include"] if "torch" in entry)
    assert f"torch>={entry['torch']}" in PROJECT["dependencies"]
    assert PROJECT["requires-python"] == f">={entry['python']}"
    # The job replaces this line.
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert len(re.findall(r"^torch==", pins, re.MULTILINE)) == 1


def test_ci_runs_the_lowest_supported_transformers() -> None:
    assert {"if": "matrix.torch", "run": "make transformers-4"} in steps("ci")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"'transformers=={architectures.SINCE[0]}.*'" in makefile


@PROJECTS
def test_every_package_in_the_wheel_is_typed(folder: Path) -> None:
    pyproject = PYPROJECTS[folder]
    assert "Typing :: Typed" in pyproject["project"]["classifiers"]
    wheel = pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]
    for package in wheel.get("packages", ["."]):
        assert (folder / package / "py.typed").is_file(), package


def test_a_release_uploads_the_distributions_of_the_site() -> None:
    uploads = [
        step for step in steps("ci") if "upload-artifact" in step.get("uses", "")
    ]
    assert uploads[0]["with"] == {"name": "distributions", "path": "site/dist/"}
    assert "twine check --strict site/dist/*" in str(steps("ci"))


def test_the_public_site_is_built_for_the_address_that_its_host_names() -> None:
    found = steps("ci")
    names = [step.get("name", step.get("uses", step.get("run"))) for step in found]
    build = names.index("Build the site for its public address")
    assert names[build - 1].startswith("actions/configure-pages@")
    address = "${{ steps." + found[build - 1]["id"] + ".outputs.base_url }}"
    assert found[build]["env"] == {"SITE_URL": address}
    assert names[build + 1].startswith("actions/upload-pages-artifact@")
    assert "REPO_URL" in load(".github/workflows/ci.yml")["env"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_their_major_version(path: Path) -> None:
    for step in steps(path.stem):
        action = step.get("uses", "actions/checkout@v1")
        assert re.fullmatch(r"[\w./-]+@(v\d+|release/v\d+)", action), action


def test_nothing_is_published_before_all_checks_have_passed() -> None:
    jobs = load(".github/workflows/release.yml")["jobs"]
    assert jobs["ci"]["uses"] == "./.github/workflows/ci.yml"
    assert jobs["pypi"]["needs"] == "ci"
    assert jobs["site"]["needs"] == "pypi"


def test_publishing_to_pypi_needs_no_stored_token() -> None:
    job = load(".github/workflows/release.yml")["jobs"]["pypi"]
    assert job["environment"] == "pypi"
    assert job["permissions"] == {"id-token": "write"}
    assert job["steps"][-1] == {"uses": "pypa/gh-action-pypi-publish@release/v1"}


@pytest.mark.parametrize(
    ("tag", "names", "status"),
    [
        ("v0.2.0", ["a-0.2.0.tar.gz", "a-0.2.0-py3-none-any.whl"], 0),
        ("v0.2.0rc1", ["a-0.2.0rc1.tar.gz", "b-0.2.0rc1-py3-none-any.whl"], 0),
        ("v0.2.0", ["a-0.2.0.tar.gz", "b-0.1.0-py3-none-any.whl"], 1),
        ("v0.2", ["a-0.2.0.tar.gz"], 1),
        ("v2.0", ["a-0.2.0.tar.gz"], 1),
        ("v0.2.0", [], 1),
    ],
)
def test_a_tag_of_another_version_is_refused(
    tmp_path: Path, tag: str, names: list[str], status: int
) -> None:
    (tmp_path / "dist").mkdir()
    for name in names:
        (tmp_path / "dist" / name).touch()
    (script,) = (step["run"] for step in steps("release") if "run" in step)
    result = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=tmp_path,
        env={"GITHUB_REF_NAME": tag},
        capture_output=True,
        text=True,
    )
    assert result.returncode == status, result.stderr
    assert ("set __version__ to" in result.stdout) == bool(status)


def test_the_changelog_begins_with_what_is_next_or_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    version = re.escape(headnotes.__version__)
    assert re.fullmatch(rf"\[Unreleased\]|\[{version}\] - \d{{4}}-\d\d-\d\d", titles[0])
    for title in titles[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", title)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= kinds


def test_pre_commit_runs_with_an_environment_of_any_name() -> None:
    for repository in load(".pre-commit-config.yaml")["repos"]:
        for hook in repository["hooks"]:
            assert "/" not in hook["entry"], hook["entry"]


@pytest.mark.parametrize("character", ["a", "é", "“", "𝔸"])
def test_a_commit_subject_has_at_most_72_characters(character: str) -> None:
    hooks = load(".pre-commit-config.yaml")["repos"][0]["hooks"]
    (hook,) = (hook for hook in hooks if "commit-msg" in hook.get("stages", []))
    assert hook["language"] == "pygrep"
    # So does pygrep search a file with `--multiline`.
    assert hook["args"] == ["--multiline"]
    too_long = re.compile(hook["entry"].encode(), re.MULTILINE | re.DOTALL)
    body = f"\n\n{'b' * 80}\n"
    assert not too_long.search(f"{character * 72}{body}".encode())
    assert too_long.search(f"{character * 73}{body}".encode())


def test_dependabot_follows_the_pins_and_the_actions() -> None:
    updates = load(".github/dependabot.yml")["updates"]
    assert {entry["package-ecosystem"] for entry in updates} == {
        "pip",
        "github-actions",
    }


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_labels_each_of_its_fields(path: Path) -> None:
    form = load(path)
    assert form["name"]
    assert form["description"]
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids)
    assert all(field["attributes"]["label"] for field in form["body"])
