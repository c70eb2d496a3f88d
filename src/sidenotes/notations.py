r"""Read the shapes that a comment states, in the notations that are in use.

All of these state the shape of one value:

    [batch_size, seq_len, d]        B x T x C           q: (B, nh, T, hs)
    (B, T, C)                       b h n d             (B, T, C) x (C, D) -> (B, T, D)
    (batch, 5 tokens, d') rows      b n (h d)           Shape: (B, T, C)

A comment that states no shape gives nothing.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

Axes = tuple[str, ...]
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv)
ANY = "_"  # an axis of any size

# Comments for tools; a shape may stand before or after them.
PRAGMA = re.compile(r"\s*(type:|noqa|fmt:|ruff:|pragma:|pylint:|mypy:)")
ARROW = re.compile(r"[-=]+>|→|(?<=[\])]) += +(?=[\[(])")
# The words of a shape that has no brackets: `B x T x C`, `b h n d` or `B, T, H*W`.
ENTRY = r"(?:[\w.'′*+/]+|\([\w\s.'′*+/-]+\))"
SHORT = r"(?:[^\W\d][\d'′]?|\d+|\.\.\.|\(\w+(?:[\s*+/-]+\w+)+\)|[^\W\d]\w?_\w+)"
BRIEF = rf"(?:{SHORT}|[^\W\d]\w?|\w+\*\w+)"
BARE = re.compile(
    rf"(?<![\w.*+-])(?:{ENTRY}(?:\s+[x×]\s+{ENTRY})+"
    rf"|{SHORT}(?:\s+{SHORT})+(?=\s*$|\s*;)"
    rf"|{BRIEF}(?:\s*,\s*{BRIEF})+(?=\s*$|\s*;))"
)
SPACE = r"(?<![-+*/\s])\s+(?![-+*/\s])"  # between entries, not within an expression
# What may stand before a shape: nothing, a name, or words that announce one.
LEAD = re.compile(
    r"(.*([:=~]|\bshapes?\b.{0,30}|\b(sizes?|to|into|becomes?|now|is|are)))?[\s`]*",
    re.IGNORECASE,
)
# What follows these words is no shape, and what follows the others only if it holds
# names, and one of the words names a variable: `kernel: (3, 3)`, `values: (B, T, C)`.
EXAMPLE = re.compile(r"\b(range|clip\w*|clamp\w*|e\.\s?g|examples?)\b", re.IGNORECASE)
SETTING = re.compile(
    r"\b(values?|kernels?|strides?|padding|axes|axis|dims?|permute|indices"
    r"|xyxy|xywh|cxcywh)\b",
    re.IGNORECASE,
)
FILLER = {"a", "all", "an", "and", "are", "both", "each", "has", "have", "is", "now"}
FILLER |= {"of", "shape", "shapes", "size", "sizes", "the", "then", "these", "will"}
FILLER |= {"with"}
WORD = re.compile(r"[^\W\d][\w.]*")
# What may follow a shape: words, unless the shape is a single entry, as in `[1] by …`.
REMARK = re.compile(r"\W*$|\s*[;,.:—–#]|\s+-\s")


@dataclass(frozen=True)
class Shape:
    """A shape in a comment."""

    text: str  # "(B, T, 2C)"
    axes: Axes  # ("B", "T", "2 * C")
    start: int = 0  # its place in the comment
    about: Axes = ()  # the words before it, which may name variables
    result: bool = False  # whether it stands behind an arrow
    problem: str = ""  # the reason why it cannot be checked, if any
    guessed: bool = False  # whether it may be something else
    setting: bool = False  # whether it is one only of a variable that `about` names


def shapes_of(comment: str) -> list[Shape]:
    """The shapes that a comment states, from left to right.

    >>> [shape.axes for shape in shapes_of("(B, T) x (T, 2C) -> (B, 2C), rows")]
    [('B', '2 * C')]
    >>> [(shape.about, shape.axes) for shape in shapes_of("k, v: b n (h d)  # noqa")]
    [(('k', 'v'), ('b', 'n', 'h * d'))]
    >>> shapes_of("[1] see the paper")
    []
    """
    for part in re.finditer("[^#]+", comment):
        if PRAGMA.match(part[0]):
            continue
        text, start = re.sub(r"(torch\.)?Size\(", called_size, part[0]), part.start()
        arrows = list(ARROW.finditer(text))
        for arrow in arrows[-1:]:
            # What is before an arrow is another value, but may begin with a name.
            left = text[: arrow.start()]
            label = re.match(r"[^\[(]*:", left)
            text = (label[0] if label else "").ljust(arrow.end()) + text[arrow.end() :]
        if found := list(stated(text, start)):
            if arrows and is_example(left, found[0].axes):
                return []
            if arrows:
                found = [
                    replace(s, result=True, guessed=s.guessed or is_abc(s.axes))
                    for s in found
                ]
            return found
    return []


def called_size(match: re.Match[str]) -> str:
    """The word in place of a call of that length, so that the rest stays in place."""
    return "size".ljust(len(match[0]))


def is_example(left: str, axes: Axes) -> bool:
    """Whether an arrow leads from values to values: `[a, b] -> [a, a, b, b]`."""
    places = list(brackets(left))
    before = split_entries(left[slice(*places[-1])])[0] if places else []
    if before and all(entry.isdecimal() for entry in (*before, *axes)):
        return True
    repeated = {axes.count(entry) for entry in axes}
    same = len(before) > 1 and {*before} == {*axes}
    return same and len(repeated) == 1 and max(repeated) > 1


def is_abc(axes: Axes) -> bool:
    """Whether entries are a, b, c in any order, perhaps values: `[a, b] -> [b, a]`."""
    return len(axes) > 1 and sorted(axes) == [*"abcdefgh"[: len(axes)]]


def stated(text: str, start: int) -> Iterator[Shape]:
    """The shapes of a text, up to the first words that are a remark."""
    places = list(brackets(text))
    bare = [found.span() for found in BARE.finditer(text)]
    if all(any(a <= c and d <= b for a, b in bare) for c, d in places):
        places = bare
    end = 0
    about: Axes = ()
    for number, (first, last) in enumerate(places):
        before = text[end:first].replace("`", "")
        after = text[last:]
        if number and not re.fullmatch(r"\s*([,&]|and|\W*[;,]?.*:)?\s*", before):
            return
        if not number and not LEAD.fullmatch(before):
            return
        if re.match(r"[\s`]*([@x×*+|/]|or\b)[\s`]*[\[(]", after):
            return  # an operation, or two shapes of which one is right
        if words := words_in(before):
            about = words
        sure = "shape" in before.lower()
        setting = not sure and bool(SETTING.search(before))
        shape = read(text[first:last], sure=sure)
        if shape is None or (len(shape.axes) == 1 and not REMARK.match(after)):
            return
        if not sure and EXAMPLE.search(before):
            return
        if not sure and shape.axes and all(map(str.isdecimal, shape.axes)):
            # Integers may be of anything, unless the comment calls them a size.
            if setting or text[first] not in "[(":
                return
            shape = replace(shape, guessed=not re.search(r"\bsizes?\b", before))
        yield replace(shape, start=start + first, about=about, setting=setting)
        end = last


def brackets(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of the outermost brackets: no calls, subscripts, or formulas."""
    depth = start = 0
    for n, character in enumerate(text):
        if character in "[(":
            start = start if depth else n
            depth += 1
        elif character in "])" and depth:
            depth -= 1
            if not depth and not re.search(r"(?<!shape)[\w\])$\"]$", text[:start]):
                yield start, n + 1


def words_in(lead: str) -> Axes:
    """The words before a shape that may name the value which has it."""
    if re.search(r"\b(to|into)\b", lead):
        return ()
    words = WORD.findall(re.split(r"[.;]\s", lead)[-1])
    names = (word.removesuffix(".shape") for word in words)
    return tuple(name for name in names if name.lower() not in FILLER)


def read(text: str, *, sure: bool = False) -> Shape | None:
    """The shape in a text such as `(B, T)`; None if that is no shape.

    `sure` if a comment calls it one; a scalar and a single name in round brackets need
    that, and entries may then be several words.
    """
    pieces, opening, separator = split_entries(text)
    if opening == "(" and len(pieces) == 1 and separator != "," and not sure:
        return None
    if separator == " " and not all(re.fullmatch(SHORT, piece) for piece in pieces):
        return None
    if not sure and ("0" in pieces or (pieces and {*pieces} <= {"-1", "1"})):
        return None  # values, such as those of a range
    if separator == " " and not opening and len(pieces) == 2 and "(" not in text:
        return None  # two letters
    entries, problem = [], ""
    for piece in pieces:
        entry = entry_of(piece, words=sure)
        if entry is None:
            what = "a name, an integer, `...`, or an expression with + - * / //"
            problem = problem or f"`{piece}` is not {what}"
        entries.append(entry or piece)
    axes = tuple(entries)
    if problem:
        # In square brackets, a list is a shape if at least one entry is a name.
        names = [e for e in axes if e.isidentifier()]
        return Shape(text, (), problem=problem) if opening == "[" and names else None
    if axes.count("...") > 1:
        problem = "`...` may occur only once in a shape"
    return Shape(text, axes, problem=problem)


def split_entries(text: str) -> tuple[list[str], str, str]:
    """The entries of a shape, its opening bracket if any, and what separates them.

    >>> split_entries("(B x T x (H * W))")
    (['B', 'T', '(H * W)'], '(', 'x')
    """
    opening = text[0] if text[0] in "[(" and (0, len(text)) in brackets(text) else ""
    inner = text[1:-1] if opening else text
    for separator, pattern in ((",", ","), ("x", r"\s[x×]\s"), (" ", SPACE)):
        pieces, depth = [""], 0
        for part in re.split(rf"({pattern}|[\[\](){{}}])", inner.strip()):
            depth += (part in tuple("[({")) - (part in tuple("])}"))
            if not depth and part and re.fullmatch(pattern, part):
                pieces.append("")
            else:
                pieces[-1] += part
        pieces = [piece.strip() for piece in pieces]
        if len(pieces) > 1:
            # A comma at the end adds no entry.
            return pieces[:-1] if not pieces[-1] else pieces, opening, separator
    return [piece for piece in pieces if piece], opening, ""


def entry_of(text: str, *, words: bool = False) -> str | None:
    """An entry in the syntax of Python; None if it is none.

    >>> [entry_of(text) for text in ("2C", "d'", "cfg.dim", "5 tokens", "h / 2", "a b")]
    ['2 * C', 'dʹ', 'dim', '5', 'h // 2', None]
    """
    text = re.sub(r"['′’]", "ʹ", text.strip("` ")).replace("…", "...")
    text = re.sub(r"[×·]|(?<=\s)x(?=\s)", "*", text)
    if text in ("_", "?", "*", ":", "-1", "None"):
        return ANY
    text = re.sub(r"(\w)\s*=\s*\w+$", r"\1", text)  # T=1024: a name with its usual size
    text = re.sub(r"^(\d+)[ -][^\W\d]\w*$", r"\1", text)  # 5 tokens
    text = re.sub(r"(?<![\w.])(\d+)([^\W\d])", r"\1 * \2", text)  # 2C
    text = re.sub(r"(?<!/)/(?!/)", "//", text)
    if re.fullmatch(r"\(\w+(\s+\w+)+\)", text):
        text = " * ".join(text[1:-1].split())  # (h d), as einops has it
    try:
        node = LastName().visit(ast.parse(text, mode="eval").body)
    except SyntaxError:
        node = None
    if node is not None and (is_size(node) or is_dots(node)):
        return ast.unparse(node)
    return re.sub(r"\W+", "_", text).strip("_") if words and WORD.match(text) else None


class LastName(ast.NodeTransformer):
    """Replaces `self.config.dim` by `dim`."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return ast.Name(node.attr)


def is_dots(node: ast.expr) -> bool:
    """Whether an expression is `...`."""
    return isinstance(node, ast.Constant) and node.value is ...


def is_size(node: ast.expr) -> bool:
    """Whether an expression consists of names, integers and + - * //."""
    if isinstance(node, ast.BinOp):
        known = isinstance(node.op, OPERATORS)
        return known and is_size(node.left) and is_size(node.right)
    return isinstance(node, ast.Name) or (
        isinstance(node, ast.Constant) and type(node.value) is int
    )
