"""Shape comments: what is one, what it means, and that none can be wrong unnoticed."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations, zip_longest
from pathlib import Path
from textwrap import dedent, indent

import pytest

from alterations import alterations
from sidenotes.grammar import assigned
from sidenotes.shapes import Finding, check, claims, verify
from sidenotes.trace import Trace, trace

ROOT = Path(__file__).parent.parent.parent
SRC = ROOT / "src"
# The mistakes beside a solution are wrong on purpose; see tests/exercises.
OTHERS = {"sidenotes", "solutions"}
SOURCES = [p for p in sorted(SRC.rglob("*.py")) if not OTHERS & {*p.parts}]

# Modules whose lines need not say their shapes, and why.
EXEMPT = {
    "attention_bench/decoders.py": "tensors lie as each implementation takes them",
    "attention_bench/decoding.py": "tensors lie as each decoder takes them",
    "attention_bench/equal.py": "tensors lie as each implementation takes them",
    "attention_bench/implementations.py": "tensors lie as each one takes them",
    "attention_bench/run.py": "tensors lie as each implementation takes them",
    "attention_laws/adapter.py": "tensors lie as the checked module takes them",
    "attention_laws/influence.py": "tensors lie as the checked module takes them",
    "attention_laws/new_tokens.py": "tensors lie as the checked attention takes them",
    "attention_laws/patches.py": "masks of pixels have any number of axes",
    "attention_laws/prepared.py": "tensors lie as the checked module takes them",
    "attention_laws/recorders.py": "tensors lie as the checked attention computes them",
    "attention_laws/tools.py": "tensors come and go in any layout",
    "headnotes/cli.py": "it handles text; pytest rewrites the asserts it imports",
    "headnotes/compare/probes.py": "each line runs in every layout",
    "headnotes/exercises/checking.py": "tensors have the shapes of each exercise",
    "headnotes/exercises/exercise.py": "the caller chooses the shape of the numbers",
    "headnotes/parallel/comparison.py": "its tensors are those of a test, in any shape",
    "headnotes/parallel/traffic.py": "it counts bytes of any tensors",
}


def relative(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


def has_claims(path: Path) -> bool:
    """Whether there is a comment such as `# [n]` beside code."""
    comment = r"^ *(?!>>>|\s).*\S  # \["
    return bool(re.search(comment, path.read_text(encoding="utf-8"), re.MULTILINE))


TRACED = [path for path in SOURCES if relative(path) not in EXEMPT or has_claims(path)]


def in_function(body: str, *, header: str = "def f(x):") -> str:
    return f"{header}\n{indent(dedent(body).strip(), '    ')}\n"


def found_in(source: str) -> list[tuple[int, str, tuple[str, ...]]]:
    return [(c.line, c.text, c.targets) for c in claims(source) if not c.problem]


@pytest.mark.parametrize(
    ("line", "text", "targets"),
    [
        ("y = x  # [q_len, k_len]", "[q_len, k_len]", ("y",)),
        ("y = x # [3]", "[3]", ("y",)),
        ("y: int = x  # []", "[]", ("y",)),
        ("y += x  # [..., heads*d_k]", "[..., heads*d_k]", ("y",)),
        ("y = x  # (n, d)", "(n, d)", ("y",)),
        ("y = x  # [m] -> [n]", "[n]", ("y",)),
        ("z = x; y = x  # z: (n, d)", "(n, d)", ("z",)),
        ("self.y = x  # [n // 2, ...]", "[n // 2, ...]", ("self.y",)),
        ("y[0] = x  # [a, ..., b]", "[a, ..., b]", ("y",)),
        ("y, (z, *w) = x  # [n]", "[n]", ("y", "z", "w")),
        ("y = z = x  # [n]", "[n]", ("y", "z")),
        ("return x  # [n]", "[n]", ("return",)),
        ("return x, y  # [n]", "[n]", ("return[0]", "return[1]")),
        ("yield x  # [n]", "[n]", ("yield",)),
        ("z = 1; y = x  # [n]", "[n]", ("y",)),
        ("for y in x:  # [n]\n    pass", "[n]", ("y",)),
        ("with x as y:  # [n]\n    pass", "[n]", ("y",)),
        ("if x: y = x  # [n]", "[n]", ("y",)),
        ("y = x  # [n]; a view", "[n]", ("y",)),
        ("y = x  # [n]  # noqa: E501", "[n]", ("y",)),
        ("y = x  # type: ignore  # [n]", "[n]", ("y",)),
    ],
)
def test_a_bracket_at_the_end_of_a_line_is_a_claim(
    line: str, text: str, targets: tuple[str, ...]
) -> None:
    assert found_in(in_function(line)) == [(2, text, targets)]


def test_several_brackets_describe_one_value_each() -> None:
    source = in_function("y, z = x  # [n], [n, 2 * d]")
    assert found_in(source) == [(2, "[n]", ("y",)), (2, "[n, 2 * d]", ("z",))]


@pytest.mark.parametrize(
    "statement",
    [
        "y = g(\n    x,\n)  # [n]",
        "y = g(  # [n]\n    x,\n)",
        '"""No [n]."""\ny = """# [m]"""  # [n]',
    ],
)
def test_a_statement_may_have_several_lines(statement: str) -> None:
    assert [text for _, text, _ in found_in(in_function(statement))] == ["[n]"]


def test_a_comment_beside_a_parameter_describes_it() -> None:
    header = "def f(\n    x,  # [n, d]\n    *,\n    y=None,  # [n]\n):"
    source = in_function("return x", header=header)
    assert found_in(source) == [(2, "[n, d]", ("x",)), (4, "[n]", ("y",))]
    assert {claim.statement for claim in claims(source)} == {0}


@pytest.mark.parametrize(
    "line",
    [
        "y = x  # (the mean, and the deviation)",
        "y = x  # [1] see the paper",
        "y = x  # as in [Vaswani et al., 2017]",
        "y = x  # type: list[int]",
        "y = x.sigmoid()  # (0, 1)",
        "y = cat([x, x], 1)  # [x, x]",
        "y = x  # xyxy: (x1, y1, x2, y2)",
        "y = x  # axes: (n, d)",
        "y = '# [n]'",
        "y = x",
    ],
)
def test_other_comments_are_prose(line: str) -> None:
    assert claims(in_function(f"{line}\nreturn x")) == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("y = x  # [a b, c]", "`a b` is not a name, an integer, `...`, or an"),
        ("y = x  # [n or 1, d]", "`n or 1` is not a name, an integer, `...`, or an"),
        ("y = x  # [..., ...]", "`...` may occur only once in a shape"),
        ("y, z = x  # [n], [n], [n]", "3 shapes, but 2 values"),
        (
            "y = g(\n    1,  # [n]\n    x)",
            "put it on the first or last line of the statement",
        ),
        ("g(x)  # [n]", "the line neither assigns nor returns a value"),
        ("y: int  # [n]", "the line neither assigns nor returns a value"),
        ("if x:\n    y = x\nelse:  # [n]\n    y = x", "no statement ends here"),
    ],
)
def test_malformed_claims_are_unverified(source: str, problem: str) -> None:
    (claim,) = claims(in_function(source))
    assert claim.problem.startswith(problem)
    (finding,) = verify([claim], Trace(Path("a.py")))
    assert finding.verdict == "unverified"
    assert problem in finding.message


def test_what_is_not_traced_is_refused() -> None:
    (claim,) = claims("y = 1  # [n]")
    assert claim.problem == "only code inside functions is traced"
    (claim,) = claims("def f(x, y):  # [n]\n    pass\n")
    assert (
        claim.problem
        == "put it beside a parameter on its own line, or beside the `return`"
    )


def run(folder: Path, body: str, *examples: str, header: str = "def f(x):") -> Trace:
    """A trace of a function, called as the examples say, and its source beside it."""
    prompts = "\n".join(f">>> _ = {example}" for example in examples)
    source = f'"""Examples.\n\n{prompts}\n"""\nfrom torch import zeros\n\n\n'
    path = folder / "made.py"
    path.write_text(source + in_function(body, header=header), encoding="utf-8")
    return trace(path)


def findings(folder: Path, *args: str, **more: str) -> list[Finding]:
    traced = run(folder, *args, **more)
    return check(traced.path.read_text(encoding="utf-8"), traced)


def verdicts(folder: Path, *args: str, **more: str) -> list[str]:
    return [finding.verdict for finding in findings(folder, *args, **more)]


TWICE = """
    y = x + 1  # [n, d]
    return y.T  # [d, n]
"""


def test_two_claims_that_agree_are_ok(tmp_path: Path) -> None:
    assert verdicts(tmp_path, TWICE, "f(zeros(2, 3))") == ["verified", "verified"]


def test_a_claim_that_an_earlier_one_contradicts_is_wrong(tmp_path: Path) -> None:
    first, second = findings(tmp_path, TWICE.replace("d, n", "n, d"), "f(zeros(2, 3))")
    assert first.verdict == "unverified"  # nothing else confirms it
    assert "no other comment or variable defines `d` or `n`" in first.message
    assert second.verdict == "wrong"
    assert second.message.split("\n") == [
        "line 10: [n, d] is wrong: `n` is 2, but the axis has size 3",
        "    return y.T  # [n, d]",
        "  seen:  return [3, 2]",
        "  where: n = 2 (line 9), d = 3 (line 9)",
        "  in:    f, example 1",
    ]


@pytest.mark.parametrize("claim", ["[n]", "[n, d, 1]", "[n, d, ..., 1]"])
def test_the_number_of_axes_is_claimed_too(tmp_path: Path, claim: str) -> None:
    body = f"n = len(x)\ny = x + 1  # {claim}\nreturn y"
    (finding,) = findings(tmp_path, body, "f(zeros(2, 3))")
    assert "is wrong: the value has 2 axes" in finding.message
    # Of a word that nothing else uses, it is not known that it is the name of a size.
    body = body.replace("n = len(x)", "")
    assert verdicts(tmp_path, body, "f(zeros(2, 3))") == ["unverified"]


def test_dots_stand_for_any_number_of_axes(tmp_path: Path) -> None:
    body = "y = x + 1  # [n, ..., d]\nreturn y.mT  # [..., d, m]"
    header = "def f(x, n, d, m):"
    calls = ("f(zeros(2, 3), 2, 3, 2)", "f(zeros(2, 7, 5, 3), 2, 3, 5)")
    assert verdicts(tmp_path, body, *calls, header=header) == ["verified", "verified"]


def test_names_are_solved_for_in_expressions(tmp_path: Path) -> None:
    # Not for two unknown names at once, for one that is squared or stands under `//`.
    body = """
        y = x.new_zeros(28, 12, 4)  # [2 * (n + d), m * (m + 1), n // 2]
        z = y[:5, :3]  # [d, m, ...]
        w = y[:3, :11, 0]  # [m, 20 - n]
        return w  # [m, n + 2]
    """
    assert {f.message for f in findings(tmp_path, body, "f(zeros(1))")} == {""}


def test_variables_of_the_code_define_names(tmp_path: Path) -> None:
    body = "n, d = x.shape\nreturn x.T  # [n, d]"
    (finding,) = findings(tmp_path, body, "f(zeros(2, 3))")
    assert "`n` is 2, but the axis has size 3" in finding.message
    assert "n = 2 (in the code), d = 3 (in the code)" in finding.message
    assert verdicts(tmp_path, body.replace("[n, d]", "[d, n]"), "f(zeros(2, 3))") == [
        "verified"
    ]


def test_a_name_that_occurs_once_is_unverified(tmp_path: Path) -> None:
    body = "n = len(x)\nreturn x + 1  # [n, width]"
    (finding,) = findings(tmp_path, body, "f(zeros(2, 3))")
    assert finding.verdict == "unverified"
    assert (
        "is unverified: no other comment or variable defines `width`" in finding.message
    )


def test_equal_sizes_are_unverified_until_an_example_distinguishes_them(
    tmp_path: Path,
) -> None:
    body = "n, d = x.shape\nreturn x + 1  # [n, d]"
    (finding,) = findings(tmp_path, body, "f(zeros(3, 3))")
    assert finding.verdict == "unverified"
    assert "no example distinguishes `n` from `d` (both 3)" in finding.message
    assert verdicts(tmp_path, body, "f(zeros(3, 3))", "f(zeros(2, 3))") == ["verified"]


def test_two_names_for_one_size_are_unverified(tmp_path: Path) -> None:
    body = "y = x + 1  # [n, d]\nz = y + 1  # [n, width]\nreturn x  # [n, width, d]"
    body = body.replace("[n, width, d]", "[n, d]").replace("z = y", "width = 3; z = y")
    assert verdicts(tmp_path, body, "f(zeros(2, 3))") == [
        "unverified",
        "unverified",
        "unverified",
    ]


@pytest.mark.parametrize(
    ("claim", "sizes", "message"),
    [
        ("[...]", "n=2", "it fits every tensor"),
        ("[..., d]", "d=3", "no example distinguishes `...` from `d`"),
        ("[n * d, 1]", "n=2, d=3", ""),
        (
            "[k * d, n]",
            "k=1, d=3, n=2",
            "no example distinguishes `k * d` from `d` (both 3)",
        ),
        (
            "[k * d, n]",
            "k=3, d=1, n=2",
            "no example distinguishes `k * d` from `k` (both 3)",
        ),
        (
            "[2 * k, n]",
            "k=2, n=3",
            "no example distinguishes `2 * k` from `2 + k` (both 4)",
        ),
        (
            "[3 * k, d]",
            "k=2, d=3",
            "no example distinguishes `3 * k` from `d * k` (both 6)",
        ),
        ("[d * k, 3]", "k=2, d=3", "no example distinguishes `3` from `d` (both 3)"),
    ],
)
def test_a_claim_is_unverified_where_another_would_fit(
    tmp_path: Path, claim: str, sizes: str, message: str
) -> None:
    numbers = dict(re.findall(r"(\w)=(\d)", sizes))
    shape = re.sub(r"\b[a-z]\b", lambda m: numbers[m[0]], claim).replace("..., ", "")
    made = f"f(zeros({shape.replace('[...]', '[2, 3]')}))"
    (finding,) = findings(
        tmp_path, f"return x + 1  # {claim}", made, header=f"def f(x, {sizes}):"
    )
    assert finding.verdict == ("unverified" if message else "verified")
    assert message in finding.message


def test_one_call_with_all_names_is_enough(tmp_path: Path) -> None:
    body = "if k: d = x.shape[1]\nreturn x + 1  # [n, d]"
    made = ("f(zeros(2, 3), 2, 0)", "f(zeros(2, 3), 2, 1)")
    header = "def f(x, n, k):"
    assert verdicts(tmp_path, body, made[0], header=header) == ["unverified"]
    assert verdicts(tmp_path, body, *made, header=header) == ["verified"]


def test_a_line_that_no_example_runs_is_unverified(tmp_path: Path) -> None:
    body = "if x.dim() == 1:\n    return x  # [n]\nreturn x + 1  # [n, ...]"
    header = "def f(x, n=2):"
    first, second = findings(tmp_path, body, "f(zeros(2, 3))", header=header)
    assert (first.verdict, second.verdict) == ("unverified", "verified")
    assert first.message.startswith("line 10: [n] is unverified: no example executes")


def test_a_parameter_without_tensor_is_unverified(tmp_path: Path) -> None:
    header = "def f(\n    x,  # [n, d]\n    mask=None,  # [n]\n):"
    body = "return x + 1  # [n, d]"
    assert verdicts(tmp_path, body, "f(zeros(2, 3))", header=header) == [
        "verified",
        "unverified",
        "verified",
    ]
    call = "f(zeros(2, 3), zeros(3))"
    first, mask, _ = findings(tmp_path, body, call, header=header)
    assert (first.verdict, mask.verdict) == ("verified", "wrong")


def test_messages_name_what_is_missing(tmp_path: Path) -> None:
    header = "def f(\n    x,\n    mask=None,  # [n]\n):"
    (finding,) = findings(tmp_path, "return x", "f(zeros(2))", header=header)
    expected = "line 10: [n] is unverified: no example passes a tensor here"
    assert finding.message.startswith(expected)


def test_a_line_without_tensor_is_unverified(tmp_path: Path) -> None:
    (finding,) = findings(tmp_path, "y = len(x)  # [n]\nreturn y", "f(zeros(2))")
    assert finding.message.startswith(
        "line 9: [n] is unverified: `y` has no shape in any call"
    )


def test_what_a_lambda_returns_is_not_what_its_line_returns(tmp_path: Path) -> None:
    body = "n, d = x.shape\nreturn (lambda: x[0])() + x  # [n, d]"
    assert verdicts(tmp_path, body, "f(zeros(2, 3))") == ["verified"]


def test_every_call_and_every_turn_of_a_loop_must_agree(tmp_path: Path) -> None:
    body = "n = 2\nfor y in x:  # [n]\n    pass\nreturn y  # [n]"
    assert verdicts(tmp_path, body, "f((zeros(2), zeros(2)))") == [
        "verified",
        "verified",
    ]
    # In the first iteration it is right: perhaps it speaks of that one only.
    assert verdicts(tmp_path, body, "f((zeros(2), zeros(3)))") == [
        "unverified",
        "wrong",
    ]
    assert verdicts(tmp_path, body, "f((zeros(3), zeros(2)))")[0] == "wrong"
    assert verdicts(tmp_path, body, "f([zeros(2)])", "f([zeros(3)])")[0] == "wrong"


def test_a_name_may_mean_another_size_in_another_call(tmp_path: Path) -> None:
    assert (
        verdicts(tmp_path, TWICE, "f(zeros(2, 3))", "f(zeros(3, 5))")
        == ["verified"] * 2
    )


def test_each_tensor_of_a_tuple_is_checked(tmp_path: Path) -> None:
    body = "n, d = x.shape\ny, z = x, x.T  # [n, d], [d, n]\nreturn y, z  # [n, d]"
    assert verdicts(tmp_path, body, "f(zeros(2, 3))") == [
        "verified",
        "verified",
        "wrong",
    ]
    body = "n, d = x.shape\ny = (x, x.T)  # [n, d]\nreturn y"
    (finding,) = findings(tmp_path, body, "f(zeros(2, 3))")
    assert "`n` is 2, but the axis has size 3" in finding.message
    assert "seen:  y[0] [2, 3], y[1] [3, 2]" in finding.message


def test_brackets_may_describe_the_items_of_one_tuple(tmp_path: Path) -> None:
    # As where a function is called that returns two tensors.
    body = "y = x + 1  # [n, d]\npair = (x, x.T)  # [n, d], [d, n]\nreturn pair"
    assert verdicts(tmp_path, body, "f(zeros(2, 3))") == ["verified"] * 3
    body = body.replace("return pair", "return pair  # [n, d], [n, d]")
    assert verdicts(tmp_path, body, "f(zeros(2, 3))") == [*["verified"] * 4, "wrong"]
    body = "n, d = x.shape\nreturn x + 1  # [n, d], [d, n]"
    first, second = findings(tmp_path, body, "f(zeros(2, 3))")
    assert "[n, d] is unverified: `return[0]` has no shape in any" in first.message
    assert "[d, n] is unverified: `return[1]` has no shape in any" in second.message


def test_an_expression_without_a_whole_solution_is_wrong(tmp_path: Path) -> None:
    (finding,) = findings(tmp_path, "return x + 1  # [2 * n]", "f(zeros(3))")
    assert "is wrong: the axis has size 3, but `2 * n` is never 3" in finding.message


def test_an_expression_that_has_no_value_is_unverified(tmp_path: Path) -> None:
    header = "def f(x, n=0):"
    body = "return x + 1  # [3 // n]"
    (finding,) = findings(tmp_path, body, "f(zeros(3))", header=header)
    assert "is unverified: `3 // n` has no value" in finding.message


MODULE = """
class Project:
    def __init__(self, d_in, d_out, n):
        self.weight = zeros(d_in, d_out)  # [d_in, d_out]
        self.table = zeros(11, n)  # [slots, n]

    def forward(self, x):
        b, d_in = x.shape
        y = x @ self.weight  # [b, d_out]
        return self.table + len(y) * 0  # [slots, n]


def f(x, *sizes):
    return Project(*sizes).forward(x)
"""


def in_module(folder: Path, source: str, *examples: str) -> list[str]:
    """The verdicts on a source that stands on its own."""
    path = folder / "made.py"
    path.write_text(f"from torch import zeros\n{source}", encoding="utf-8")
    run = trace(path, calls=examples)
    return [f.verdict for f in check(path.read_text(encoding="utf-8"), run)]


def test_names_bind_across_a_class(tmp_path: Path) -> None:
    call = "f(zeros(3, 5), 5, 7, 2)"
    assert in_module(tmp_path, MODULE, call) == [
        "verified",
        *["unverified"],
        *["verified"] * 2,
    ]
    # That the same size is called otherwise elsewhere is no contradiction.
    other = MODULE.replace("[slots, n]", "[n, slots]", 1)
    assert "wrong" not in in_module(tmp_path, other, call)[2:]


def test_a_parameter_that_no_comment_names_is_an_alternative(tmp_path: Path) -> None:
    # `d_in` would be right, too, although no comment of `forward` speaks of it.
    wrong = MODULE.replace("[b, d_out]", "[b, d_in]")
    assert in_module(tmp_path, wrong, "f(zeros(3, 5), 5, 5, 2)")[2] == "unverified"
    assert in_module(tmp_path, wrong, "f(zeros(3, 5), 5, 7, 2)")[2] == "wrong"


HEAD = """
class Layer:
    def __init__(self, config):
        self.width = config[0]
        self.inner: int = config[1]

    def f(self, x, k, heads=2):
"""
# Each claim is right only where two sizes are equal, as in the first call. The code
# names the size that is meant, but no comment does.
CONFUSED = {
    "the lengths of two tensors": (
        "b, n, d = x.shape\nm = k.size(1)\nreturn x @ k.mT  # [b, n, n]",
        ("`n` from `m` (both 5)", "zeros(2, 5, 7), zeros(2, 5, 7)"),
        ("[b, n, m]", "zeros(2, 5, 7), zeros(2, 3, 7)"),
    ),
    "a length from earlier lines": (
        "(b, n, d), m = x.shape, len(k[0])\nw = x @ k.mT\nw = w.exp()\nw += 1\n"
        "return w  # [b, n, n]",
        ("`n` from `m` (both 5)", "zeros(2, 5, 7), zeros(2, 5, 7)"),
        ("[b, n, m]", "zeros(2, 5, 7), zeros(2, 3, 7)"),
    ),
    "the length of another tensor": (
        "b, n, *_, d = x.size()\n_, m = k.shape[:-1]\nreturn k * 2  # [b, n, d]",
        ("`n` from `m` (both 5)", "zeros(2, 5, 7), zeros(2, 5, 7)"),
        ("[b, m, d]", "zeros(2, 5, 7), zeros(2, 3, 7)"),
    ),
    "two axes of a tensor": (
        "n, d = k.size(dim=1), k.size(2)\nreturn k.sum(2)  # [2, d]",
        ("`d` from `n` (both 5)", "0, zeros(2, 5, 5), 3"),
        ("[2, n]", "0, zeros(2, 5, 7), 3"),
    ),
    "a number and a parameter": (
        "n = len(k[0])\nreturn k[0].repeat(heads, 1)  # [3 * n, 7]",
        ("`3` from `heads` (both 3)", "0, zeros(2, 5, 7), 3"),
        ("[heads * n, 7]", "0, zeros(2, 5, 7), 2"),
    ),
    "a number and an attribute": (
        "n = len(k[0])\ny = k[0].repeat(self.width, 1)\nreturn y  # [3 * n, 7]",
        ("`3` from `width` (both 3)", "0, zeros(2, 5, 7)"),
        ("[width * n, 7]", "0, zeros(2, 5, 7)"),
    ),
    "two attributes": (
        "n = len(k[0])\nreturn k[0, 0].new_ones(self.inner, n)  # [width, n]",
        ("`width` from `inner` (both 3)", "0, zeros(2, 5, 7)"),
        ("[inner, n]", "0, zeros(2, 5, 7)"),
    ),
}


@pytest.mark.parametrize(("body", "same", "other"), CONFUSED.values(), ids=CONFUSED)
def test_a_claim_that_equal_sizes_make_right_is_unverified(
    tmp_path: Path, body: str, same: tuple[str, str], other: tuple[str, str]
) -> None:
    path = tmp_path / "made.py"

    def found(body: str, sizes: str, arguments: str) -> list[Finding]:
        source = f"from torch import zeros\n{HEAD}{indent(body, '        ')}\n"
        path.write_text(source, encoding="utf-8")
        calls = (f"Layer({sizes}).f({arguments})",)
        return check(source, trace(path, calls=calls))

    (reason, arguments), (right, others) = same, other
    (finding,) = found(body, "(3, 3)", arguments)
    assert finding.verdict == "unverified"
    assert f"no example distinguishes {reason}" in finding.message
    # Other sizes tell a wrong claim from a right one.
    (finding,) = found(body, "(2, 11)", others)
    assert finding.verdict == "wrong"
    corrected = re.sub(r"\[[^]]*\]$", right, body)
    (finding,) = found(corrected, "(2, 11)", others)
    assert finding.verdict == "verified"


@pytest.mark.parametrize(
    "body",
    [
        "b, n, d = x.shape\nc = len(k)\nassert c == b\nreturn x @ k.mT  # [b, n, 3]",
        "b, n, d = x.shape\nif len(k) != b: raise ValueError\nm = k.shape[1]\n"
        "return x @ k.mT  # [b, n, m]",
        "b, n, d = x.shape\nc = k.shape[0]\nif c != b: raise ValueError\n"
        "return x @ k.mT  # [b, n, 3]",
        # The value of the one has nothing to do with the other.
        "b, n, d = x.shape\nc = k.shape[0]\nreturn x + 1  # [b, n, d]",
        "b, n, d = x.shape\nc = len(k)\ny, z = x + 1, k + 1  # y: [b, n, d]\nreturn z",
        # Two names for one axis, and one name for two.
        "b, n, d = x.shape\nc = x.size(0)\nreturn x + 1  # [b, n, d]",
        "b, n, d = x.shape\nb, m, d = k.shape\nreturn x @ k.mT  # [b, n, m]",
        "b, n, d = x.shape\nc = k.shape[-1]\nc = 7\nreturn x + k[:, :1]  # [b, n, d]",
    ],
)
def test_sizes_that_are_always_equal_are_not_confused(
    tmp_path: Path, body: str
) -> None:
    call = "f(zeros(2, 5, 7), zeros(2, 3, 7))"
    found = findings(tmp_path, body, call, header="def f(x, k):")
    assert [f.message for f in found if f.verdict != "verified"] == []


CONFIGURED = """
class Config:
    def __init__(self, width):
        self.width = width


def f(x, config, sizes):
    return x[:, : config.width]  # (b, width)
"""


def test_a_configuration_defines_names(tmp_path: Path) -> None:
    call = "f(zeros(3, 7), Config(5), {'b': 3})"
    assert in_module(tmp_path, CONFIGURED, call) == ["verified"]


def test_a_name_that_grows_in_a_loop_is_right(tmp_path: Path) -> None:
    body = """
        b = len(x)
        y = x.T  # [n, b]
        x = y.T  # [b, n]
        for _ in range(3):
            x = torch.cat([x, x[:, :1]], dim=1)  # [b, n + 1]
        return x
    """
    source = f"import torch\n{in_function(body)}"
    assert in_module(tmp_path, source, "f(zeros(2, 5))") == ["verified"] * 3
    wrong = source.replace("[b, n + 1]", "[b, n]")
    assert in_module(tmp_path, wrong, "f(zeros(2, 5))")[2] == "wrong"
    # It is right in the first iteration only, where the code has given the name.
    source = source.replace("b = len(x)", "b, n = x.shape")
    assert in_module(tmp_path, source, "f(zeros(2, 5))")[2] == "unverified"
    wrong = source.replace("[b, n + 1]", "[n + 1, b]")
    assert in_module(tmp_path, wrong, "f(zeros(2, 5))")[2] == "wrong"


def test_a_wrong_claim_leaves_the_others_judged(tmp_path: Path) -> None:
    body = """
        n, d = x.shape
        y = x + 1  # [n, d]
        z = x.T  # [n, d]
        return x.sum(0)  # [d]
    """
    found = verdicts(tmp_path, body, "f(zeros(2, 3))")
    assert found == ["verified", "wrong", "verified"]


def test_the_size_that_most_claims_give_a_name_counts(tmp_path: Path) -> None:
    body = """
        y = x.T  # [n, d]
        z = x + 1  # [n, d]
        w = x + 2  # [n, d]
        return x + 3  # [n, d]
    """
    found = verdicts(tmp_path, body, "f(zeros(2, 3))")
    assert found == ["wrong", *["verified"] * 3]


def test_numbers_of_another_configuration_are_unverified(tmp_path: Path) -> None:
    body = "b = len(x)\ny = x + 1  # (b, 3, 224)\nreturn x.mT  # (b, 1, 3)"
    first, second = findings(tmp_path, body, "f(zeros(2, 3, 7))")
    assert "is unverified: `224` is 224, but the axis has size 7" in first.message
    assert "is wrong: `1` is 1, but the axis has size 7" in second.message


def test_what_may_be_no_shape_is_not_wrong(tmp_path: Path) -> None:
    body = "n, d = x.shape\nw = x * 2  # version: [3, 2]\nk = x + w  # (x, w, x)"
    body += "\nk = k + 1  # [x, x]\nvalues = x  # values: (d, n)\nx = w  # size: (3, 2)"
    assert verdicts(tmp_path, f"{body}\nreturn k", "f(zeros(2, 3))") == [
        *["unverified"] * 3,
        *["wrong"] * 2,
    ]


def test_an_example_of_values_is_not_wrong(tmp_path: Path) -> None:
    body = "a = 2\nb = 3\ny = x.roll(1, 1)  # [a, b, c] -> [c, a, b]\nreturn y  # {}"
    found = verdicts(tmp_path, body.format("[b, a]"), "f(zeros(2, 3))")
    assert found == ["unverified", "wrong"]


def test_a_name_has_the_value_that_it_has_when_the_line_runs(tmp_path: Path) -> None:
    body = "n, d = x.shape\ny = x + 1  # [n, d]\nn = 7\nreturn y[:1]  # [1, d]"
    assert verdicts(tmp_path, body, "f(zeros(2, 3))") == ["verified", "verified"]


BOUND_LATER = """
    y = x + 1  # (b, c)

    # (b, c)
    z = y + 1

    b, c = x.T.shape
    return z
"""


def test_a_name_that_the_code_defines_later_may_mean_another_size(
    tmp_path: Path,
) -> None:
    header = "def f(\n    x,  # (b, c)\n):"
    found = findings(tmp_path, BOUND_LATER, "f(zeros(2, 3))", header=header)
    assert [finding.verdict for finding in found] == ["unverified"] * 3
    assert "`b` is 3, but the axis has size 2" in found[1].message
    same = BOUND_LATER.replace("x.T.shape", "x.shape")
    found = findings(tmp_path, same, "f(zeros(2, 3))", header=header)
    assert [finding.verdict for finding in found] == ["verified"] * 3


def test_a_comment_above_several_operations_may_describe_the_first(
    tmp_path: Path,
) -> None:
    body = """
        b, n, d = x.shape
        # Heads side by side: b x d x n
        x = x.mT.contiguous().view(b, d * n)

        # b x n
        return x.view(b, -1, n).mT.flatten(1)
    """
    found = verdicts(tmp_path, body, "f(zeros(2, 3, 5))")
    assert found == ["unverified", "unverified"]
    # Behind an arrow, or with the name of the value, it describes the result.
    for lead in ("b -> ", "Shape of x: "):
        wrong = body.replace("Heads side by side: ", lead)
        assert verdicts(tmp_path, wrong, "f(zeros(2, 3, 5))")[0] == "wrong"


ABOVE = """
    n, d = x.shape
    # Transposed: [d, n]
    y = x.T
    z = y.T

    # z has shape [n, d]
    w = z.sum()

    # [n, d] -> [d, n]
    if w >= 0:
        z = z.T
    return z
"""


def test_a_comment_above_code_describes_its_value(tmp_path: Path) -> None:
    assert verdicts(tmp_path, ABOVE, "f(zeros(2, 3))") == ["verified"] * 2
    wrong = ABOVE.replace("z has shape [n, d]", "z has shape [d, n]")
    assert verdicts(tmp_path, wrong, "f(zeros(2, 3))") == ["verified", "unverified"]
    wrong = ABOVE.replace("# Transposed: [d, n]", "# [n, d]")
    assert verdicts(tmp_path, wrong, "f(zeros(2, 3))")[0] == "wrong"


def test_a_comment_above_a_function_describes_its_parameters(tmp_path: Path) -> None:
    source = "# shape of x: (n, d)\n" + in_function("y = x + 1  # (n, d)\nreturn y")
    header = source.replace("# shape", "class A:\n    # shape").replace(
        "\ndef", "\n    def"
    )
    header = header.replace("\n    y", "\n        y").replace("\n    r", "\n        r")
    header = header.replace("def f(x)", "def f(self, x)")
    assert in_module(tmp_path, header, "A().f(zeros(2, 3))") == ["verified"] * 2


JAXTYPED = """
class Float:
    __class_getitem__ = classmethod(lambda *_: None)


def f(
    x: Float[int, "*batch n 2*d"], n: int
) -> tuple[Float[int, "..."], Float[int, "d n"]]:
    y: Float[int, "#b n d"] = x[..., 1::2]
    return y, y[0].T
"""


def test_jaxtyping_annotations_are_claims(tmp_path: Path) -> None:
    found = in_module(tmp_path, JAXTYPED, "f(zeros(2, 3, 10), 3)")
    # `...` alone fits every tensor.
    assert found == ["verified", "unverified", "verified", "verified"]
    wrong = JAXTYPED.replace('"d n"', '"n d"')
    found = in_module(tmp_path, wrong, "f(zeros(2, 3, 10), 3)")
    assert found == ["verified", "unverified", "wrong", "verified"]


def altered(axes: tuple[str, ...], scope: set[str]) -> Iterator[tuple[str, ...]]:
    """Swap two entries, rename one, change a number or an expression."""
    for i, j in combinations(range(len(axes)), 2):
        if axes[i] != axes[j]:
            swapped = list(axes)
            swapped[i], swapped[j] = axes[j], axes[i]
            yield tuple(swapped)
    for i, entry in enumerate(axes):
        others = set()
        if entry.isidentifier():
            others = scope | {"fresh"}
        elif entry.isdecimal():
            others = scope | {"fresh", str(int(entry) + 1)}
        elif entry != "...":
            words = re.findall(r"\w+", entry)
            others = {f"{entry} + 1", f"2 * ({entry})", *words}
            others |= {entry.replace("*", op) for op in "+-"} | {"fresh"}
            for word in words:
                whole = rf"\b{word}\b"
                others |= {re.sub(whole, w, entry) for w in scope | {"fresh"}}
        for other in sorted(others - {entry}):
            yield (*axes[:i], other, *axes[i + 1 :])


def hands_on(node: ast.AST | None) -> bool:
    """Whether an expression only names what is there already."""
    match node:
        case ast.IfExp():
            return hands_on(node.body) and hands_on(node.orelse)
        case ast.Tuple():
            return all(map(hands_on, node.elts))
        case ast.Call(func=ast.Name("getattr")) | ast.Starred():
            return True
        case ast.Attribute(attr="T" | "mT"):
            return False
    return node is None or isinstance(node, ast.Name | ast.Attribute | ast.Constant)


def makes(node: ast.stmt | None, functions: set[str]) -> bool:
    """Whether a statement gives a value that no other line has given."""
    match node:
        case ast.Return(value=ast.Call(func=ast.Name(name))) if name in functions:
            return False  # its own `return` has given it
        case ast.Assign() | ast.AnnAssign() | ast.Return():
            return not hands_on(node.value)
    return False


def unsaid(source: str, traced: Trace) -> dict[int, str]:
    """The lines that make a tensor of a new shape, and do not say which.

    New is a shape that no tensor has which the line names. A line may leave it to the
    `return` that follows, and a name that holds tensors of several shapes has none.
    """
    said = {claim.statement for claim in claims(source)}
    lines = source.split("\n")
    tree = ast.parse(source)
    nodes = {n.lineno: n for n in ast.walk(tree) if isinstance(n, ast.stmt)}
    functions = {n.name for n in nodes.values() if isinstance(n, ast.FunctionDef)}
    found = {}
    for call in traced.calls:
        known = {value.name: value.shape for value in call.arguments}
        for step, after in zip(call.steps, [*call.steps[1:], None], strict=True):
            new = {
                v.name: v.shape for v in step.values if v.dtype not in ("", "object")
            }
            node, then = (nodes.get(s.line) if s else None for s in (step, after))
            if new and node and makes(node, functions) and node.lineno not in said:
                left = then if isinstance(then, ast.Return) else None
                left = None if makes(left, functions) else left
                later = loaded(left) if left and left.lineno in said else set()
                read = loaded(node)
                near = {s for n, s in known.items() if names(n) & read}
                for target in set(assigned(node)) - {"_"} - later:
                    shapes = {s for n, s in new.items() if target in names(n)}
                    if len(shapes) == 1 and shapes - near - {()}:
                        found[node.lineno] = f"line {node.lineno}: " + (
                            lines[node.lineno - 1].strip()
                        )
            known |= new
    return found


def names(recorded: str) -> set[str]:
    """What a recorded value goes by: an item of a tuple goes by its name, too."""
    return {recorded, recorded.split("[")[0]}


def loaded(node: ast.AST) -> set[str]:
    """The names and attributes that a statement reads."""
    kinds = ast.Name | ast.Attribute
    found = [n for n in ast.walk(node) if isinstance(n, kinds)]
    return {ast.unparse(n) for n in found if isinstance(n.ctx, ast.Load)}


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("y = x.T\nreturn y", [9]),
        ("y = x.T  # [d, n]\nreturn y", []),
        ("y = x.T\nreturn y  # [d, n]", []),
        ("y = x.T\nz = y.T\nreturn y  # [d, n]", [9, 10]),
        ("return x.T", [9]),
        ("y = x + x.exp()\nreturn y", []),
        ("y = [x.T]\ny = y[0]\nreturn y", [10]),
        ("y = x.mean()\nreturn y", []),
        ("y, z = x.T, x\nreturn z", [9]),
        ("y = x.split([1, 1])\nreturn y[0] + 1", [9]),
        ("y = x.split([1, 1])\nz, _ = y\nreturn y", [9]),
        ("y = x.split([1, 2], 1)\nreturn x", []),
        ("_, y = x.T, x\nreturn x", []),
        ("x = x.T\nx = x.T\nreturn x", [9, 10]),
        ("y = None\nfor _ in range(2):\n    y = x.T\nreturn y", [11]),
        ("y = x.T  # [d, n]\ny = x.T\nreturn x", [10]),
        ("y = x.T\nreturn y.T  # [n, d]", [9]),
        ("f.y, g = x.T, f\ny = g.y if x.dim() else x\nreturn y", [9]),
        ("f.y = x.T\ny = getattr(f, 'y')\nreturn y", [9]),
        ("x += 1\nx[0] = x.sum() + 1\nreturn x", []),
        ("def g():\n    return x.T\nreturn g()", [10]),
        ("y = {0: x.T}\nreturn *y.values(), 1", []),
    ],
)
def test_a_new_shape_needs_a_comment(
    tmp_path: Path, body: str, lines: list[int]
) -> None:
    made = run(tmp_path, body, "f(zeros(2, 3))")
    assert list(unsaid(made.path.read_text(encoding="utf-8"), made)) == lines


# One test: the trace, which both claims are about, is made once.
@pytest.mark.slow
@pytest.mark.parametrize("path", TRACED, ids=relative)
def test_every_new_shape_has_a_comment_and_every_altered_comment_is_found(
    path: Path,
) -> None:
    source, run = path.read_text(encoding="utf-8"), trace(path, limit=0)
    if relative(path) not in EXEMPT:
        assert list(unsaid(source, run).values()) == []
    found = claims(source)
    assert [f.message for f in verify(found, run) if f.verdict != "verified"] == []
    for other, noticed in alterations(found, run, altered):
        assert noticed, f"{other.line}: {other.text} goes unnoticed"


# The test above alters every comment of every module, without reading it from a file.
@pytest.mark.slow
def test_a_comment_that_is_altered_in_its_file_is_found() -> None:
    path = SRC / "headnotes" / "mha.py"
    source, run = path.read_text(encoding="utf-8"), trace(path, limit=0)
    functions = defaultdict(list)
    for claim in claims(source):
        functions[claim.symbol].append(claim)
    # A claim is judged with those of its own function only, so one claim of each
    # function is altered at a time.
    for chosen in zip_longest(*functions.values()):
        lines = source.split("\n")
        for claim in filter(None, chosen):
            code, _, _ = lines[claim.line - 1].partition(claim.code)
            axes = next(altered(claim.axes, set()))
            other = claim.code.replace(claim.text, f"[{', '.join(axes)}]")
            assert other != claim.code
            lines[claim.line - 1] = f"{code}{other}"
        findings = check("\n".join(lines), run)
        noticed = {f.claim.symbol for f in findings if f.verdict != "verified"}
        assert noticed == {claim.symbol for claim in chosen if claim}
