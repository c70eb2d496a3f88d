"""`headnotes check`: its options, its output, and its exit status."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from attention_laws import LAWS, CallError, checker
from attention_laws.adapter import Options
from attention_laws.checker import check
from attention_laws.cli import (
    SETTINGS,
    ProgressBar,
    load_attention,
    module_name,
    parse_keywords,
    parse_pair,
    read_settings,
    with_color,
)
from attention_laws.structure import paths_of_attention
from headnotes.cli import main
from sidenotes.examples import name_of

MODEL = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class Good(nn.Module):
    def __init__(self, d_model, heads, dropout=0.1):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    causal = True

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(*qkv, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Bad(Good):
    causal = False


good = Good(12, 3)
number = 3
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "a_model_to_check.py"
    path.write_text(MODEL, encoding="utf-8")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return str(path)


@pytest.mark.slow
def test_the_command_checks_a_file(model: str) -> None:
    command = [sys.executable, "-m", "headnotes.cli", "check", f"{model}:Bad"]
    command += ["--causal", "--only", "causality,formula"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    assert result.stderr == ""
    assert result.stdout.startswith("Bad\n  built as: Bad(d_model=12, heads=3) (inf")
    assert "\ncausality               FAIL  query 0 of batch" in result.stdout
    assert result.stdout.endswith("0 passed, 2 failed, 0 skipped\n")


# A process that a shell has started in the background ignores the signal at first.
INTERRUPT = """import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.slow
def test_an_interrupt_during_the_import_of_torch_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(INTERRUPT, encoding="utf-8")
    command = [sys.executable, "-m", "headnotes.cli", "check", "a.py:A"]
    folders = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": folders},
    )
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == "headnotes check: interrupted\n"


def test_an_interrupt_of_a_check_is_one_line(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(model).write_text(INTERRUPT, encoding="utf-8")
    assert main(["check", f"{model}:Good"]) == 130
    assert capsys.readouterr().err == "headnotes check: interrupted\n"


def test_a_defect_of_the_checker_is_no_failure_of_the_attention(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> None:
        raise KeyError("heads")

    monkeypatch.setattr(checker, "infer_adapter", breaks)
    assert main(["check", f"{model}:Good"]) == 2
    line = (
        r"headnotes check: `Good` was not checked: a defect of the checker, which says "
        r"nothing about the attention; please report it: KeyError: 'heads' "
        r"\(test_cli.py:\d+\)\n"
    )
    assert re.fullmatch(line, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--misspelt"], "unrecognized arguments: --misspelt"),
        (
            ["--head=3", "--layot=bld"],
            "unrecognized arguments: --layot=bld; did you mean `--layout`?",
        ),
        (["--heads", "three"], "argument --heads: invalid int value: three"),
        (
            ["--positions", "rotery"],
            "argument --positions: invalid choice: rotery (choose from none, alibi, "
            "rotary, relative, learned)",
        ),
    ],
)
def test_a_misspelt_argument_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["check", *arguments])
    assert exit.value.code == 2
    # Later versions of Python quote fewer of the choices.
    error = capsys.readouterr().err.replace("'", "")
    assert error == f"headnotes check: {message}\n"


@pytest.mark.slow
def test_the_counterexample_runs_on_its_own(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = ["check", f"{model}:Bad", "--causal", "--only", "causality", "--json"]
    assert main(asked) == 1
    code = json.loads(capsys.readouterr().out)["laws"][0]["counterexample"]["code"]
    program = tmp_path / "elsewhere.py"
    program.write_text(code, encoding="utf-8")
    command = [sys.executable, str(program)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("AssertionError")


@pytest.mark.slow
def test_the_exit_status_is_0_1_or_2(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ["--only", "causality"]
    assert main(["check", f"{model}:Good", *only]) == 0
    assert main(["check", f"{model}:good", *only]) == 0
    assert main(["check", f"{model}:Bad", "--causal", *only]) == 1
    assert main(["check", f"{model}:number", *only]) == 2
    assert main(["check", "torch.nn:MultiheadAttention", *only]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nowhere.py"],
            "`nowhere.py` must be FILE.py:NAME or package.module:NAME, where NAME is "
            "a module class, a module, or a function",
        ),
        (
            ["nowhere.py:Bad"],
            f"there is no file `nowhere.py`; give a path from {Path.cwd()}",
        ),
        (
            ["MODEL:Missing"],
            "`MODEL:Missing` cannot be imported (ImportError: cannot import name "
            "'Missing' from 'a_model_to_check' (MODEL))",
        ),
        (
            ["MODEL:number"],
            "`MODEL:number` is of type int, and cannot be called; name a module class, "
            "a module, or a function",
        ),
        (
            [":Bad"],
            "`:Bad` must be FILE.py:NAME or package.module:NAME, where NAME is a "
            "module class, a module, or a function",
        ),
        (
            ["MODEL:Good", "--init-args", "d_model=x"],
            '`--init-args "d_model=x"` is malformed; write "name=value, name=value", '
            "where values are numbers, strings, lists, True, False or None",
        ),
        (
            ["MODEL:Good", "--mask", "attend"],
            "`--mask attend` has no name; write NAME=attend",
        ),
        (
            ["MODEL:Good", "--dtype", "float"],
            "`--dtype float` must be one of float32, float64, bfloat16, float16",
        ),
        (
            ["MODEL:Good", "--device", "meta"],
            "`device` (='meta') cannot compute here: Tensor.item() cannot be called on "
            "meta tensors",
        ),
        (
            ["MODEL:Good", "--skip", "causalty"],
            "`skip` names 'causalty', which is not a law; did you mean `causality`?",
        ),
        (
            ["MODEL:Good", "--only", "causalty"],
            "`only` names 'causalty', which is not a law; did you mean `causality`?",
        ),
        (
            ["MODEL:Good", "--only", "xyz"],
            f"`only` names 'xyz', which is not a law; the laws are {', '.join(LAWS)}",
        ),
        (
            ["MODEL:Good", "--mask", "m=keep:bk"],
            "`mask` (={'m': 'keep:bk'}) must be such as {'attn_mask': 'ignore:qk'}; a "
            "kind is one of attend, ignore, attend_int, ignore_int, additive, "
            "additive_min, lengths, relative_lengths, causal, and axes are among b, h, "
            "q, k, n, 1",
        ),
        (
            ["MODEL:Good", "--layout", "sideways"],
            "`layout` (='sideways') must be one of batch_first, sequence_first, "
            "heads_first, heads_last, unbatched, image, image_channels_last, "
            "image_rows_first, video, video_channels_last, video_frames_first, "
            "frames, frames_channels_last, frames_frames_first, "
            "or made of the letters b, l, h, d",
        ),
    ],
)
def test_errors_name_the_option_and_the_way_out(
    model: str,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [argument.replace("MODEL", model) for argument in arguments]
    assert main(["check", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == f"headnotes check: {message.replace('MODEL', model)}\n"


def test_json_holds_the_whole_report(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    only = "causality,dtype_and_device,sliding_window"
    asked = ["check", f"{model}:Bad", "--causal", "--only", only, "--json"]
    assert main(asked) == 1
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"name", "ok", "facts", "laws"}
    assert (report["name"], report["ok"]) == ("Bad", False)
    assert {
        "name": "causal without a mask",
        "value": "yes",
        "source": "given",
    } in report["facts"]
    by_name = {entry["law"]: entry for entry in report["laws"]}
    assert list(by_name) == only.split(",")
    failed, passed, other = by_name.values()
    keys = {"law", "statement", "status", "detail", "seconds", "counterexample"}
    for entry in report["laws"]:
        assert set(entry) == keys
    assert [failed["status"], passed["status"], other["status"]] == [
        "fail",
        "pass",
        "not applicable",
    ]
    example = failed["counterexample"]
    assert set(example) == {"sizes", "message", "difference", "tolerance", "code"}
    assert example["sizes"] == {
        "batch_size": 1,
        "q_len": 2,
        "k_len": 2,
        "heads": 1,
        "d_k": 1,
    }
    assert example["difference"] > example["tolerance"] > 0
    assert passed["counterexample"] is None


def test_junit_and_annotations_hold_the_failures(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "report.xml"
    flags = ["--only", "causality,sliding_window", "--junit", str(path), "--github"]
    assert main(["check", f"{model}:Bad", "--causal", *flags, "--quiet"]) == 1
    (suite,) = ElementTree.parse(path).getroot()
    assert suite.attrib["tests"] == "2"
    failed, skipped = suite
    assert "assert" in (failed[0].text or "")
    assert skipped[0].tag == "skipped"
    annotation = capsys.readouterr().out.splitlines()[-1]
    place = f"file={model},title=headnotes check"
    assert annotation.startswith(f"::error {place}::Bad: causality: query 0")
    assert main(["check", f"{model}:Good", "--only", "causality", "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_annotations_leave_the_json_on_stdout_alone(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(model).parent)
    flags = ["--causal", "--only", "causality", "--json", "--github"]
    assert main(["check", f"{Path(model).stem}:Bad", *flags]) == 1
    output = capsys.readouterr()
    assert not json.loads(output.out)["ok"]
    assert output.err.startswith(f"::error file={Path(model).name},title=")


def test_an_error_of_one_target_does_not_hide_the_report_of_another(
    model: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    name = Path(model).name
    table = f"[tool.headnotes.check.'{name}:KIND']\nonly = ['causality']\n"
    tables = [table.replace("KIND", kind) for kind in ("Good", "Godo")]
    (tmp_path / "pyproject.toml").write_text("".join(tables), encoding="utf-8")
    assert main(["check", "--github", "--junit", "report.xml"]) == 2
    output = capsys.readouterr()
    annotation = output.out.splitlines()[-1]
    assert output.out.startswith("Good\n")
    assert annotation.startswith(f"::error file={name},title=headnotes check::`{name}:")
    message = annotation.rpartition("::")[2]
    assert output.err == f"headnotes check: {message}\n"
    _, suite = ElementTree.parse(tmp_path / "report.xml").getroot()
    (error,) = suite[0]
    assert (suite.attrib["errors"], error.tag) == ("1", "error")
    assert error.attrib["message"] == message
    assert main(["check", "--json"]) == 2
    good, missing = json.loads(capsys.readouterr().out)
    assert (good["ok"], missing["error"]) == (True, message)


def test_a_report_that_cannot_be_written_is_refused_before_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing" / "report.xml"
    assert main(["check", "nowhere.py:Bad", "--junit", str(path)]) == 2
    error = f"`--junit {path}` cannot be written: No such file or directory"
    assert capsys.readouterr().err == f"headnotes check: {error}\n"


def test_a_check_in_which_each_law_is_skipped_does_not_count_as_a_pass(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"{model}:Good", "--only", "sinks"]) == 2
    output = capsys.readouterr()
    assert output.out.endswith("0 passed, 0 failed, 1 skipped\n")
    assert output.err == (
        f"headnotes check: no law was tested on `{model}:Good`: each is skipped, such "
        f"as `sinks` (has no scores of sinks, one for each head)\n"
    )


def test_pyproject_lists_targets_and_flags_take_precedence(
    model: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check"]) == 2  # there is no target
    table = '[tool.headnotes.check."{}:{}"]\ncausal = true\nonly = ["{}"]\n'
    path = tmp_path / "pyproject.toml"
    name = Path(model).name
    path.write_text(
        table.format(name, "Good", "causality")
        + table.format(name, "Bad", "causality"),
        encoding="utf-8",
    )
    capsys.readouterr()
    assert main(["check", "--json"]) == 1
    reports = json.loads(capsys.readouterr().out)
    assert [(r["name"], r["ok"]) for r in reports] == [("Good", True), ("Bad", False)]
    flags = ["--no-causal", "--only", "formula", "--quiet"]
    assert main(["check", f"{name}:Bad", *flags]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[tool.headnotes.check]\ncausal = true",
            "`PATH` has `causal` in [tool.headnotes.check]; WRITE",
        ),
        ("[tool.headnotes]\ncheck = 'a.py:A'", "`check` (='a.py:A') of `PATH` "),
        ("[tool.headnotes]\ncheck = ['a.py:A']", "`check` (=['a.py:A']) of `PATH` "),
        ("[tool]\nheadnotes = 3", "`headnotes` (=3) of `PATH` must be a table; WRITE"),
        ("tool = 3", "`tool` (=3) of `PATH` must be a table; WRITE"),
        (
            "[tool.headnotes.check.'a.py:A']\nonyl = 'causality'",
            "`PATH` has `onyl`, which is no option; did you mean `only`?",
        ),
        (
            "[tool.headnotes.check.'a.py:A']\nthorough = 'no'",
            "`thorough` (='no') of `PATH` must be true or false",
        ),
        (
            "[tool.headnotes.check.'a.py:A']\ninside = 'no'",
            "`inside` (='no') of `PATH` must be true or false",
        ),
    ],
)
def test_a_wrong_value_in_pyproject_is_refused(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(text, encoding="utf-8")
    where = 'write options under [tool.headnotes.check."FILE.py:NAME"]'
    expected = message.replace("PATH", str(path)).replace("WRITE", where)
    with pytest.raises(CallError, match=f"^{re.escape(expected)}"):
        read_settings(path)


def test_each_attention_inside_a_model_is_checked(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    built = """

class Layer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.attn = kind(12, 3)


SelfAttention = type("SelfAttention", (Good,), {})
BadAttention = type("BadAttention", (Bad,), {})


def build():
    kinds = [SelfAttention, SelfAttention, BadAttention]
    return nn.Sequential(*(Layer(kind) for kind in kinds))
"""
    with open(model, "a", encoding="utf-8") as file:
        file.write(built)
    target = f"{model}:build"
    flags = ["--inside", "--causal", "--only", "causality"]
    assert main(["check", target, *flags, "--json"]) == 1
    reports = json.loads(capsys.readouterr().out)
    names = [(r["name"], r["ok"]) for r in reports]
    assert names == [("build_0_attn", True), ("build_2_attn", False)]
    code = reports[1]["laws"][0]["counterexample"]["code"]
    with pytest.raises(AssertionError):
        exec(code, {})
    assert main(["check", f"{model}:Good", "--inside", *flags[2:]]) == 2
    assert "give `--init-args`" in capsys.readouterr().err


MODELS = """

class GoodAttention(Good):
    pass


class OfIds(nn.Module):
    def __init__(self, vocabulary: int = 7, dim: int = 12):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.attn = GoodAttention(dim, 3)

    def forward(self, tokens):
        return self.attn(self.embed(tokens))

    def embed(self, tokens):
        return self.embedding(tokens)


class OfPixels(OfIds):
    def __init__(self, dim: int = 12):
        super().__init__(dim=dim)
        self.patches = nn.Conv2d(3, dim, 2, stride=2)

    def embed(self, image):
        batch_size, _channels, height, width = image.shape
        assert height == width == 6
        return self.patches(image).flatten(2).mT


class OfTriples(OfIds):
    def forward(self, points, triangles, colors):
        return self.attn(points[triangles.long()] + colors.item())


class AttentionOfTriples(OfTriples):
    pass


class WithoutAttention(OfIds):
    def __init__(self, dim: int = 12):
        super().__init__(dim=dim)
        self.attn = nn.Identity()

    def forward(self, tokens):
        return self.embed(tokens).mean(dim=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("OfIds", "takes token ids, and no vectors"),
        ("OfPixels", "takes images, and no vectors"),
        ("OfTriples", "could not be called itself"),
    ],
)
def test_attentions_in_a_model_that_takes_no_vectors_are_checked_without_a_flag(
    name: str, why: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(model, "a", encoding="utf-8") as file:
        file.write(MODELS)
    flags = ["--causal", "--only", "causality"]
    assert main(["check", f"{model}:{name}", *flags]) == 0
    shown = f"{name}_attn\n  within: `{name}`, which {why} (inferred)\n"
    assert shown in capsys.readouterr().out
    assert main(["check", f"{model}:{name}", *flags, "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)
    whole = [name] if name != "OfTriples" else []
    assert [report["name"] for report in reports] == [*whole, f"{name}_attn"]
    assert main(["check", f"{model}:WithoutAttention", *flags]) == 2
    assert "no law was tested" in capsys.readouterr().err


BLOCKS = """

class Unscaled(Good):
    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(*qkv, scale=1.0)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    kind = Good

    def __init__(self, d_model, heads):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(d_model), self.kind(d_model, heads)

    def forward(self, x):
        return self.norm(x + self.attn(x).tanh())


class WrongBlock(Block):
    kind = Unscaled
"""


@pytest.mark.slow
def test_the_attention_within_a_block_is_checked_where_its_formula_is_hidden(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(model, "a", encoding="utf-8") as file:
        file.write(BLOCKS)
    assert main(["check", f"{model}:Block", "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)
    assert [report["name"] for report in reports] == ["Block", "Block_attn"]
    assert main(["check", f"{model}:WrongBlock", "--json"]) == 1
    whole, part = json.loads(capsys.readouterr().out)
    assert whole["ok"]
    failed = [law["law"] for law in part["laws"] if law["status"] == "fail"]
    assert failed[0] == "formula"
    assert main(["check", f"{model}:Block", "--causal", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "Block"


@pytest.mark.slow
def test_what_is_named_attention_is_not_replaced_by_attentions_within_it(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(model, "a", encoding="utf-8") as file:
        file.write(MODELS)
    for target in ("AttentionOfTriples", "OfTriples --layout lbd"):
        assert main(["check", *f"{model}:{target}".split()]) == 2
        assert "could not be called with random inputs" in capsys.readouterr().err


@pytest.mark.slow
def test_an_attention_that_cannot_be_called_does_not_hide_the_others(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    built = """

class OddAttention(nn.Linear):
    def forward(self, points, triangles, colors):
        return points[triangles.long()] + super().forward(colors)


GoodAttention = type("GoodAttention", (Good,), {})
BadAttention = type("BadAttention", (Bad,), {})


def build(kind):
    return nn.ModuleDict({"odd": OddAttention(8, 8), "rest": kind(12, 3)})


def build_good():
    return build(GoodAttention)


def build_bad():
    return build(BadAttention)
"""
    with open(model, "a", encoding="utf-8") as file:
        file.write(built)
    flags = ["--inside", "--causal", "--only", "causality"]
    for name, status in (("build_good", 2), ("build_bad", 1)):
        assert main(["check", f"{model}:{name}", *flags]) == status
        output = capsys.readouterr()
        assert output.out.startswith(f"{name}_rest\n")
        (error,) = output.err.splitlines()
        assert error.startswith(f"headnotes check: `{name}_odd` could not be called")


def test_attention_is_found_by_its_projections_or_by_its_name() -> None:
    class OuterAttention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.MultiheadAttention(8, 2)
            self.norm = torch.nn.LayerNorm(8)

    class PooledAttention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seeds = torch.nn.Linear(8, 8)

    parts = {"a": OuterAttention(), "b": PooledAttention(), "c": torch.nn.Linear(8, 8)}
    assert paths_of_attention(torch.nn.ModuleDict(parts)) == ["a.inner", "b"]


def test_verdicts_are_colored_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "causality               FAIL  query 0\nformula                 pass"
    assert with_color(text) == text
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "\033[1;31mFAIL\033[0m  query 0" in with_color(text)
    monkeypatch.setenv("NO_COLOR", "1")
    assert with_color(text) == text


def test_every_option_of_check_has_a_flag(model: str) -> None:
    seen: dict[str, Any] = {}

    def record(attention: Any, **options: Any) -> Any:
        seen.update(options)
        raise CallError("enough")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attention_laws.cli.check", record)
        arguments = [
            *("--init-args", "heads=2, bias=False", "--call-args", "fast=None"),
            *("--layout", "bld", "--inputs", "q, k,v"),
            *("--mask", "m=ignore:bk", "--mask", "c=causal"),
            *("--heads", "2", "--kv-heads", "1", "--d-model", "8", "--window", "3"),
            *("--no-causal", "--positions", "alibi", "--weights", "[1]:bhqk"),
            *("--projections", "query=q,out=o", "--cache", "past=[1]"),
            *("--unused-parameters", "w"),
            *("--device", "cpu", "--dtype", "float64", "--seed", "7", "--thorough"),
            *("--skip", "state_dict,sliding_window"),
        ]
        assert main(["check", f"{model}:Good", *arguments]) == 2
    known = set(vars(Options())) | {"only", "skip", "thorough"}
    assert known | {"inside"} == SETTINGS
    known |= {"name", "imports", "progress"}
    assert set(seen) == known
    for name in ("name", "imports", "progress", "only"):
        del seen[name]
    assert seen == {
        "init_args": {"heads": 2, "bias": False},
        "layout": "bld",
        "inputs": ("q", "k", "v"),
        "mask": {"m": "ignore:bk", "c": "causal"},
        "call_args": {"fast": None},
        "heads": 2,
        "kv_heads": 1,
        "d_model": 8,
        "window": 3,
        "causal": False,
        "positions": "alibi",
        "weights": "[1]:bhqk",
        "projections": {"query": "q", "out": "o"},
        "cache": ("past", "[1]"),
        "unused_parameters": ("w",),
        "device": "cpu",
        "dtype": torch.float64,
        "seed": 7,
        "skip": ("state_dict", "sliding_window"),
        "thorough": True,
    }


def test_a_progress_bar_is_shown_after_one_second(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = ProgressBar()
    progress(1, 4, "padding")
    progress.clear()
    assert capsys.readouterr().err == ""  # no terminal
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress(1, 4, "padding")
    assert capsys.readouterr().err == ""  # no second has passed
    progress.start -= 2
    progress(1, 4, "padding")
    shown = capsys.readouterr().err
    assert shown.startswith("\r█████···············  1/4 padding") or re.match(
        r"\r█{5}·{15} 1/4 padding", shown
    )
    progress.clear()
    assert re.fullmatch(r"\r +\r", capsys.readouterr().err)


@pytest.mark.slow
def test_progress_is_reported_for_each_law() -> None:
    from specimens.base import Correct

    steps: list[tuple[int, int, str]] = []
    check(Correct, only=["causality", "padding"], progress=lambda *s: steps.append(s))
    assert steps == [(0, 2, "causality"), (1, 2, "padding")]


LOOSE = {"part/needed.py": MODEL, "part/model.py": "from .needed import Bad, Good\n"}
DEEP = {
    "part/needed.py": MODEL,
    "part/inner/model.py": "from ..needed import Bad, Good\n",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "module"),
    [
        (LOOSE, "part.model"),
        ({**LOOSE, "part/__init__.py": ""}, "part.model"),
        (DEEP, "part.inner.model"),
        ({**DEEP, "part/__init__.py": ""}, "part.inner.model"),
        ({**DEEP, "part/inner/__init__.py": ""}, "part.inner.model"),
        ({"part/model.py": MODEL}, "model"),
    ],
)
def test_a_file_is_imported_as_a_module_of_its_package(
    tmp_path: Path,
    files: dict[str, str],
    module: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, source in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    (path,) = tmp_path.rglob("model.py")
    folder = path.parents[module.count(".")]
    # sidenotes has the same rule, and neither package may import the other.
    assert module_name(path) == name_of(path) == (module, folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    try:
        _, imports, attention = load_attention(f"{path}:Bad")
        assert sys.modules[module].Bad is attention
    finally:
        for name in sys.modules.keys() - known:
            del sys.modules[name]
    found = f"import sys\n\nsys.path.insert(0, {str(folder)!r})\n"
    assert imports == f"{found}from {module} import Bad\n"
    # The import of a counterexample works in a new process.
    if files is DEEP:
        subprocess.run([sys.executable, "-c", imports], check=True)


def test_a_file_whose_name_is_no_identifier_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "03-multi-head.py"
    path.write_text(MODEL, encoding="utf-8")
    _, imports, attention = load_attention(f"{path}:Bad")
    assert imports.endswith("Bad = importlib.import_module('03-multi-head').Bad\n")
    names: dict[str, Any] = {}
    exec(imports, names)
    assert names["Bad"] is attention


def test_a_module_in_the_working_directory_is_found(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(model).parent)
    name, imports, attention = load_attention("a_model_to_check:Bad")
    assert (name, attention.__name__) == ("Bad", "Bad")
    assert f"sys.path.insert(0, {str(Path(model).parent)!r})\n" in imports


@pytest.mark.parametrize(
    ("file", "source", "message"),
    [
        ("json.py", MODEL, "`import json` finds .* instead; rename the file, or its "),
        ("a.b.py", MODEL, "`a.b.py` cannot be imported: `a.b` has a dot in its name"),
        ("leaves.py", "exit(0)", r"cannot be imported \(SystemExit: 0\)"),
        ("broken.py", "def", r"cannot be imported \(SyntaxError: "),
        ("raises.py", "raise ValueError('a\\nb')", r"\(ValueError: a\)\n$"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused(
    tmp_path: Path,
    file: str,
    source: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / file).write_text(source + "\nJSONDecoder = 1\n", encoding="utf-8")
    assert main(["check", f"{tmp_path / file}:JSONDecoder"]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_prints_of_the_attention_stay_out_of_the_report(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    talking = MODEL.replace("        qkv =", "        print(x.shape)\n        qkv =")
    Path(model).write_text(f"print('imported')\n{talking}", encoding="utf-8")
    assert main(["check", f"{model}:Good", "--only", "causality", "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["ok"]
    assert output.err == "imported\n"


def test_pairs_keywords_and_targets_are_parsed() -> None:
    assert parse_pair("mask", " m=a=b") == ("m", "a=b")
    assert parse_keywords("call_args", "a=[1, 2], b='x'") == {"a": [1, 2], "b": "x"}
    assert parse_keywords("call_args", "") == {}
    name, imports, attention = load_attention("torch.nn:MultiheadAttention")
    assert name == "MultiheadAttention"
    assert imports == "from torch.nn import MultiheadAttention\n"
    assert attention is torch.nn.MultiheadAttention
