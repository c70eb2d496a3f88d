"""The command line, and the copies that it makes."""

import ast
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import headnotes
from headnotes.cli import (
    PRAGMA,
    Documented,
    copied_name,
    edition,
    main,
    modules,
    without_notes,
)

# -I leaves out the current folder and the environment; the import of our own packages
# is refused, so that no copy can lean on them. Each runs in a process of its own, which
# begins where torch and its compiler, seconds of work, have been imported.
ALONE = """
import doctest, importlib, os, sys
import torch, torch._dynamo
torch.set_num_threads(1)
sys.modules["headnotes"] = sys.modules["sidenotes"] = None
for path in sys.argv[1:]:
    folder, _, file = path.rpartition("/")
    around, _, package = folder.rpartition("/")
    name = file.removesuffix(".py")
    if os.fork() == 0:
        os.chdir(folder)
        # As a module of a package, and from a folder that is on the path itself.
        sys.path.insert(0, around)
        importlib.import_module(f"{package}.{name}")
        sys.path[0] = folder
        if doctest.testmod(importlib.import_module(name)).failed == 0:
            print(path, "runs alone", flush=True)
        sys.stdout.flush()
        os._exit(0)  # an orderly end takes torch most of a second
    os.wait()
"""


@pytest.mark.slow
def test_a_copied_module_runs_alone(tmp_path: Path) -> None:
    copies = []
    for name, source in modules().items():
        folder = tmp_path / name.replace("/", "-") / "alone"
        assert main(["copy", name, str(folder)]) == 0
        copies.append(folder / copied_name(source))
    command = [sys.executable, "-I", "-c", ALONE, *map(str, copies)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    expected = [f"{copy} runs alone" for copy in copies]
    lines = (result.stdout + result.stderr).splitlines()
    # All else is a traceback or a failed example, each of which names its file.
    why = "\n".join(line for line in lines if line not in expected)
    assert not why, why
    assert lines == expected


@pytest.mark.parametrize("name", sorted(modules()))
def test_a_copy_says_where_it_comes_from(name: str) -> None:
    for plain in (False, True):
        lines = edition(modules()[name], plain=plain).splitlines()
        assert lines[:3] == [
            f"# {copied_name(modules()[name])}, from Headnotes {headnotes.__version__}",
            "# SPDX-FileCopyrightText: 2026 the Headnotes authors",
            "# SPDX-License-Identifier: MIT",
        ]


def shortened(tree: ast.Module) -> str:
    """The tree, with each docstring reduced to its first line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                assert isinstance(node.body[0], ast.Expr)
                node.body[0].value = ast.Constant(text.splitlines()[0].strip("# "))
    return ast.dump(tree)


@pytest.mark.parametrize("path", [*modules().values(), Path(headnotes.cli.__file__)])
def test_plain_drops_the_notes_and_no_line_of_code(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    plain = without_notes(source)
    assert shortened(ast.parse(plain)) == shortened(ast.parse(source))
    comments = [
        token
        for token in tokenize.generate_tokens(iter(plain.splitlines(True)).__next__)
        if token.type == tokenize.COMMENT
    ]
    # Alone on a line there are only comments for tools, such as an editor's regions.
    alone = [t.string for t in comments if not t.line[: t.start[1]].strip()]
    assert [text for text in alone if not PRAGMA.match(text)] == []
    # What stands at the end of a line of code is a claim about it, and stays.
    assert ("# [" in plain) == ("  # [" in source)


def test_plain_keeps_tabs() -> None:
    source = 'def f():\n\t"""One.\n\n\tMore.\n\t"""\n\t# note\n\treturn 1\n'
    assert without_notes(source) == 'def f():\n\t"""One."""\n\treturn 1\n'


def test_plain_keeps_comments_that_are_no_notes() -> None:
    source = (
        "#!/usr/bin/env python\n"
        "# SPDX-License-Identifier: MIT\n"
        "# fmt: off\n"
        "call(\n"
        "    # about an argument\n"
        "    1,  # [one]\n"
        ")\n"
        "text = '''\n"
        "# no comment at all\n"
        "'''\n"
    )
    assert without_notes(source) == source
    assert without_notes(f"# a note\n{source}# another\n") == source


@pytest.mark.parametrize(
    "docstring",
    [
        '"""One.\n\n    More.\n    """',
        "'''One.\n\n    More.\n    '''",
        '"""\n    One.\n    """',
        'r"""One \\alpha.\n    More."""',
        '"""say "hi"\n    more"""',
        '"""One \\\n    more"""',
        '("One."\n     "two")',
        '"One." \\\n    "two"',
        '"""One.\n    """; y = 1',
        '"""One.\f\u2028\n    """',
        "'One.'",
    ],
)
@pytest.mark.parametrize("header", ["def f():", "async def f():", "class F:"])
def test_plain_is_the_same_program_whatever_the_docstring(
    header: str, docstring: str
) -> None:
    source = (
        f"x = 'a\fb\u2028'\n# note\n{header}\n    {docstring}\n    # note\n    z = 2\n"
    )

    def program(text: str) -> str:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, Documented) and ast.get_docstring(node) is not None:
                del node.body[0]
        return ast.dump(tree)

    plain = without_notes(source)
    assert program(plain) == program(source)
    assert "# note" not in plain
    assert plain.count("\n") < source.count("\n")


def test_a_destination_that_is_no_folder_and_no_module_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link.py").symlink_to(tmp_path / "nowhere.py")
    for name in ("notes.txt", "file", "link.py"):
        assert main(["copy", "mha", str(tmp_path / name)]) == 1
        assert str(tmp_path / name) in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link.py"]


@pytest.mark.slow
def test_list_names_each_module_and_what_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(modules())
    assert "implementations/causal       Causal attention, batch first" in lines
    assert "mha                          Multi-head attention, sequence first" in lines


def test_an_existing_file_is_only_overwritten_by_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "mha.py"
    target.write_text("mine")
    command = ["copy", "mha", str(tmp_path)]
    assert main(command) == 1
    assert capsys.readouterr().err == (
        f"headnotes copy: `{target}` exists; `--force` overwrites it\n"
    )
    assert target.read_text() == "mine"
    assert main([*command, "--force"]) == 0
    assert target.read_text() == edition(modules()["mha"])


def test_a_destination_is_a_folder_or_a_file(tmp_path: Path) -> None:
    main(["copy", "positions", str(tmp_path / "new" / "folder")])
    main(["copy", "positions", str(tmp_path / "other.py")])
    for path in (tmp_path / "new" / "folder" / "positions.py", tmp_path / "other.py"):
        assert path.read_text() == edition(modules()["positions"])


MASKS = "`masks/build` or `masks/conventions` or `masks/describe` or `masks/flex`"


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("masks", f"did you mean {MASKS}?"),
        ("mha.py", "did you mean `mha`?"),
        ("MHA", "did you mean `mha`?"),
        ("mhaa", "did you mean `mha`?"),
        ("headnotes/convert.py", "did you mean `convert`?"),
        ("online-softmax", "did you mean `variants/online_softmax`?"),
        ("compare/probes", f"there are {', '.join(modules())}"),
    ],
)
def test_an_unknown_module_is_refused_with_the_similar_ones(
    name: str, way_out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["copy", name, str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"headnotes copy: `{name}` is no module that can be copied; {way_out}\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_check_explains_itself_and_only_it_loads_torch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["check", "--help"])
    shown = capsys.readouterr().out
    assert "FILE.py:NAME" in shown
    assert "--thorough" in shown
    program = (
        "import sys; from headnotes.cli import main; main(['list']); "
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "False"


def test_a_copy_brings_what_it_needs_beside_it(tmp_path: Path) -> None:
    assert main(["copy", "fast", str(tmp_path)]) == 0
    needed = ["checks.py", "attention.py", "blockwise.py", "components.py"]
    needed += ["formula.py", "mha.py", "rotary.py"]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*needed, "fast.py"])
    line = (tmp_path / "fast.py").read_text(encoding="utf-8").splitlines()[3]
    assert line == f"# Needs in the same folder: {', '.join(needed)}"


def test_a_companion_that_was_changed_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mha.py").write_text("mine = True\n", encoding="utf-8")
    assert main(["copy", "fast", str(tmp_path)]) == 1
    seen = f"`{tmp_path / 'mha.py'}` exists; `--force` overwrites it"
    assert seen in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["mha.py"]


def test_a_companion_that_was_copied_before_is_welcome(tmp_path: Path) -> None:
    assert main(["copy", "mha", str(tmp_path)]) == 0
    assert main(["copy", "fast", str(tmp_path)]) == 0
