r"""# What the documentation says

Docstrings and comments state the shapes of arguments, which of them are integers, where
padding is, what True means in a mask, and how a cache begins. They tell of designs that
the code has no name for, too, such as a look-ahead, a norm in front of the attention,
or tokens that are given frame by frame. An attention is called as its documentation
says, and what it promises is tested.

Source: the docstrings of public code, in the styles of NumPy, Google and Sphinx.
"""

import inspect
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from torch import nn

from attention_laws.names import (
    IDS_PATTERN,
    INTEGERS_PATTERN,
    LENGTHS_PATTERN,
    MASK_PATTERN,
    POSITION_PATTERN,
    parameters_by_name,
)
from attention_laws.source import source_of, source_with_bases

# The shapes of arguments in a docstring or a comment: "query, key: tensors [b, n, d]".
SHAPE_PATTERN = re.compile(
    r"((?:\w+\*{0,2}, )*\w+)\*{0,2}(?: \([^()]*\))? ?: ?(?:[^:;()\[\]\n]* )?"
    r"[\[(]((?:[\w*. /+]+, ?)*[\w*. /+]+),?[\])]"
)
NO_FLOATS = (MASK_PATTERN, POSITION_PATTERN, INTEGERS_PATTERN)
# The same in columns of a table: "query  (B, N, D)".
COLUMNS_PATTERN = re.compile(
    r"(?m)^\s*((?:\w+, *)*\w+) +[\[(]((?:[\w*. /]+, ?)+[\w*. /]+),?[\])]"
)
# The same in the style of NumPy, on the line behind the name and the type.
NUMPY_PATTERN = re.compile(
    r"(?m)^[ \t]*((?:\w+, *)*\w+) ?: ?[\w.\[\], |]+\n[ \t]+[^:;()\[\]\n]*"
    r"[\[(]((?:[\w*. /]+, ?)+[\w*. /]+),?[\])]"
)
# That of the first argument, which has no name there.
INPUT_PATTERN = re.compile(
    r"\b(?:[Ss]hape|(?:[Ii]nput|[Tt]ake)s?(?: and (?:output|return)s?)?)"
    r"(?: is| are| has shape| have shape| of shape|:)? ?`*"
    r"[\[(]([\w*. /]+(?:, ?[\w*. /]+)+)[\])]"
)
# The same without brackets: "query: B x N x D", or in columns of a table.
PRODUCT_PATTERN = re.compile(
    r"(\w+)(?:: *(?:(?:(?! x )[^:\n])*(?: {2,}|, ))?| {2,})"
    r"((?:[\w*]+ x )+[\w*]+)(?=$|[\s,.;)])"
)
# The same in a sentence, if batch items come first: "Of x (B, N, D) and y (B, M, D)".
SENTENCE_PATTERN = re.compile(
    r"\b(\w+)\** [\[(]((?:[Bb]|bsz?|[Bb]atch\w*|(?:n|num)_\w+)(?:, ?[\w*. /]+)+)[\])]"
)
# The same as Hugging Face writes it: "x (torch.Tensor of shape (B, N, D), optional)".
TENSOR_PATTERN = re.compile(
    r"\b(\w+) ?(?:: ?)?\(?[\w.\[\], |]* of shape "
    r"[\[(]((?:[\w*. /+]+, ?)+[\w*. /+]+),?[\])]"
)
# The same in letters: "q: b h d, k/v: b n h d (the cache), lengths: b".
LETTERS_PATTERN = re.compile(
    r"(?:^|[#,;]) *(\w+(?:(?:/|, ?)\w+)*): "
    r"((?:[a-zA-Z]\w? )+[a-zA-Z]\w?|[bB])(?=$|[,.;]| \()",
    re.MULTILINE,
)
BATCH_PATTERN = re.compile("(b(s|sz|atch(_?size)?)?|((n|num)_?)?envs?)$", re.IGNORECASE)
TIME_AXIS_PATTERN = re.compile(r"t|time(steps?)?|seq(uence)?_?len(gth)?", re.IGNORECASE)
HEADS_PATTERN = re.compile("^h(_?[qkv]+)?$|heads$|n_?head$", re.IGNORECASE)
CHANNELS_PATTERN = re.compile(
    "(in_?)?(c|ch|d|e|dim|channels?|features|d_model)$", re.IGNORECASE
)
# Left, top, right and bottom side, where a side is behind the one across.
BOXES_PATTERN = re.compile(r"box(es)?$|^(bb?|box)(x|xs|oxes)$")
TYPE_PATTERN = re.compile(r"torch|[Tt]ensor|\b(int|float|bool|str|None|optional)")


def shapes(target: Any) -> dict[str, tuple[str, ...]]:
    r"""The shapes of arguments that docstrings and comments state.

    >>> def attend(q, keys):
    ...     "q: a tensor [b, d]; keys: (b, m, 2 * d)."
    >>> shapes(attend)
    {'q': ('b', 'd'), 'keys': ('b', 'm', '2 * d')}
    >>> attend.__doc__ = "q: B x D, keys  B x M x 2*D"
    >>> shapes(attend)
    {'q': ('B', 'D'), 'keys': ('B', 'M', '2*D')}
    >>> attend.__doc__ = "q: a state   B x D"
    >>> shapes(attend)
    {'q': ('B', 'D')}
    >>> attend.__doc__ = "keys: all that there are (B x M x 2*D)"
    >>> shapes(attend)
    {'keys': ('B', 'M', '2*D')}
    >>> attend.__doc__ = "q : Tensor\n    (B, D)\nkeys : Tensor\n    Shape (B, M, D)."
    >>> shapes(attend)
    {'q': ('B', 'D'), 'keys': ('B', 'M', 'D')}
    >>> attend.__doc__ = "q (Tensor of shape (B, D)) keys (Tensor of shape (B, M, D))"
    >>> shapes(attend)
    {'q': ('B', 'D'), 'keys': ('B', 'M', 'D')}
    >>> attend.__doc__ = "Input and output are (B, M, D)."
    >>> shapes(attend)
    {'q': ('B', 'M', 'D')}
    >>> attend.__doc__ = "Attention of q (B, D) to keys (B, M, D)."
    >>> shapes(attend)
    {'q': ('B', 'D'), 'keys': ('B', 'M', 'D')}
    """
    return {
        n: axes
        for n, axes in all_shapes(target).items()
        if not any(p.search(n) for p in NO_FLOATS)
    }


def all_shapes(target: Any) -> dict[str, tuple[str, ...]]:
    """The documented shapes of arguments, of masks and of positions, too."""
    texts = tuple(re.sub(":math:|`", "", each) for each in documentation(target))
    first_lines = in_one_line(docstrings(target))
    return dict(shapes_in(texts, first_lines, (*parameters_by_name(target),)))


@lru_cache(maxsize=64)
def shapes_in(
    texts: tuple[str, ...], first_lines: str, arguments: tuple[str, ...]
) -> dict[str, tuple[str, ...]]:
    """The shapes of arguments that texts state, or that of the first by itself."""
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        letters = [(n, p.replace(" ", ",")) for n, p in LETTERS_PATTERN.findall(text)]
        products = [
            (n, p.replace(" x ", ",")) for n, p in PRODUCT_PATTERN.findall(text)
        ]
        others = [*SHAPE_PATTERN.findall(text), *COLUMNS_PATTERN.findall(text)]
        others += NUMPY_PATTERN.findall(text) + SENTENCE_PATTERN.findall(text)
        others += TENSOR_PATTERN.findall(text)
        for written, shape in [*products, *letters, *others]:
            axes = tuple(axis.strip() for axis in re.split(",| x ", shape))
            if not any(map(TYPE_PATTERN.search, axes)):
                named = re.findall(r"\w+", written)
                found |= {n: axes for n in named if n in arguments and n not in found}
    for shape in INPUT_PATTERN.findall(first_lines):
        axes = tuple(axis.strip() for axis in shape.split(","))
        for name in [*arguments][:1]:
            found.setdefault(name, axes)
    return found


def is_mask_of(target: Any, mask: str, context: str) -> bool:
    r"""Whether a mask is documented to have one entry for each token of the context.

    >>> def attend(x, text, text_mask, kinds_mask):
    ...     "x: [B, N, D]; text: [B, T, D]; text_mask: [B, T]; kinds_mask: [B, N]"
    >>> [is_mask_of(attend, name, "text") for name in ("text_mask", "kinds_mask")]
    [True, False]
    """
    found = all_shapes(target)
    axes = found.get(mask, ())
    return len(axes) == 2 and axes == found.get(context, ())[:2]


def is_map_of(target: Any, name: str, image: str) -> bool:
    r"""Whether an argument is documented to have a number for each pixel of an image.

    >>> def attend(x, body, kept): "x: [B, C, D, H, W]; body: [B, D, H, W]; kept: [B]"
    >>> [is_map_of(attend, name, "x") for name in ("body", "kept")]
    [True, False]
    """
    found = all_shapes(target)
    axes, of_image = found.get(name, ()), found.get(image, ())
    is_part = len(axes) == len(of_image) - 1 >= 3 and {*axes} <= {*of_image}
    return is_part and axes[:1] == of_image[:1]


def docstrings(target: Any) -> list[str]:
    """The docstrings of a class, its constructor and its `forward`."""
    functions = [target, getattr(target, "forward", None)]
    if isinstance(target, type):
        functions.append(vars(target).get("__init__"))
    return [inspect.getdoc(each) or "" for each in functions if each is not None]


def documentation(target: Any) -> list[str]:
    """The docstrings of a class and its `forward`, and the comments in the latter."""
    source = source_of(getattr(target, "forward", target))
    return docstrings(target) + re.findall("#.*", source)


def in_one_line(texts: Iterable[str]) -> str:
    """The words of the texts, so that a pattern finds what a line break divides.

    Nor does an abbreviation end a sentence.
    """
    words = " ".join(" ".join(texts).split())
    return re.sub(r"\b(i|e)\.(e|g)\.", r"\1\2", words)


def integers(target: Any) -> set[str]:
    r"""The arguments that the line in which their shape is stated calls integers.

    >>> def attend(x, kinds, gaps):
    ...     "kinds: LongTensor (B, L)\n gaps  (B, L)  integer seconds; x: (B, L, D)"
    >>> sorted(integers(attend))
    ['gaps', 'kinds']
    >>> def recommend(x, words, user): "x: (B, L, D), words: (B, L) ids\n user: (B,) id"
    >>> integers(recommend)
    {'user'}
    """
    found = shapes(target)
    texts = documentation(target) if found else []
    lines = [line for text in texts for line in text.splitlines()]
    types = {n: OF_ITEMS if len(axes) == 1 else INTEGERS for n, axes in found.items()}
    return {
        name
        for name, pattern in types.items()
        if any(re.search(rf"\b{name}\b.*({pattern})", line) for line in lines)
    }


INTEGERS = r"\b(Long(Tensor)?|torch\.long|long|int(32|64|eger)?s?|indices)\b"
# The id of an item, such as a store, is an integer; vectors replace those of tokens.
OF_ITEMS = rf"{INTEGERS}|\bids?\b"


def says(target: Any, pattern: str) -> bool:
    """Whether the documentation has a pattern, in small letters or in capitals."""
    text = in_one_line(documentation(target))
    return re.search(pattern, text, re.IGNORECASE) is not None


def first_id(target: Any) -> set[int]:
    r"""The id with which a text is documented to begin.

    >>> def translate(ids): "Token 0 is padding, 1 begins a sentence, 2 ends it."
    >>> first_id(translate), first_id(len)
    ({1}, set())
    """
    begins = (
        r"(?i)\b(\d+)\W+(?:begins|starts|(?:is|=) (?:the )?(?:bos|sos|start|begin))"
    )
    return {*map(int, re.findall(begins, in_one_line(documentation(target))))}


def marks_padding(target: Any, name: str, first: str) -> bool:
    r"""Whether an argument has an id for each token, and 0 is documented as padding.

    >>> def attend(x, item_ids): "x: (B, L, D); item_ids: (B, L), id 0 is padding"
    >>> marks_padding(attend, "item_ids", "x"), marks_padding(attend, "x", "x")
    (True, False)
    """
    is_id = IDS_PATTERN.search(name) and is_mask_of(target, name, first)
    return bool(is_id) and says_of(target, name, r"\b0 (is|=|for|means|marks) pad")


def pads_left(target: Any) -> bool:
    r"""Whether the documentation says that padding may be in front of the tokens.

    Positions that the caller may give are the caller's to shift.

    >>> def attend(x, mask=None): "`mask`: 0 for padding, which may be on the left."
    >>> def attend_from(x, mask=None, position_ids=None): "Prompts are left-padded."
    >>> pads_left(attend), pads_left(attend_from)
    (True, False)
    """
    if any(map(POSITION_PATTERN.search, parameters_by_name(target))):
        return False
    return says(target, r"\bleft\W+pad|\bpad[^.]*\bleft\b")


def pads_right(target: Any) -> bool:
    r"""Whether the documentation says that padding is behind the tokens only.

    >>> def attend(x, mask): "`mask`: 0 for padding on the right."
    >>> def attend_to(x, mask): "`mask`: 0 for padding, on the left or the right."
    >>> pads_right(attend), pads_right(attend_to)
    (True, False)
    """
    is_right = says(target, r"\b(right|post)\W+pad|\bpad[^.]*\bright\b")
    return is_right and not says(target, r"\bleft\b")


def is_length_of_part(target: Any, name: str) -> bool:
    r"""Whether an argument is documented to tell how long a part of the tokens is.

    >>> def rank(ids, qlen): "qlen (B,): the first qlen ids are the query."
    >>> def attend(x, lengths): "The first `lengths` tokens are real, and not padding."
    >>> is_length_of_part(rank, "qlen"), is_length_of_part(attend, "lengths")
    (True, False)
    """
    parts = r"(the|an?) (query|question|prefix|prompt|context|source|premise)"
    return says(target, rf"\bthe first \W?{name}\W? \w+ (are|belong to) {parts}\b")


def leaves_out_own(target: Any) -> bool:
    r"""Whether the documentation says that a token does not attend to itself.

    >>> def attend(x): "Strictly causal: token t sees tokens 0 .. t-1, not itself."
    >>> def attend_to_others(x): "An agent never attends to itself."
    >>> def attend_to_past(x): "A token attends to itself and to those before it."
    >>> attentions = attend, attend_to_others, attend_to_past
    >>> [leaves_out_own(each) for each in attentions]
    [True, True, False]
    """
    stated = (
        r"\b(not|except|but|excluding|never (attends|looks)) (to |for |at )?itself\b"
        r"|\bstrictly causal\b"
        r"|\b(keys|tokens|those) (strictly )?before it\b(?! and)"
    )
    flag = r"(attend|include|see)_(current|self|own|diagonal)"
    is_off = (
        p.default is False and re.fullmatch(flag, name)
        for name, p in parameters_by_name(target).items()
    )
    return any(is_off) or (
        says(target, stated) and not says(target, r"\bto itself and\b")
    )


def counts_loops_once(target: Any) -> bool:
    r"""Whether the documentation says that an edge of a node to itself counts once.

    >>> def attend(x, edge_index): "Adds self-loops; those that exist are replaced."
    >>> def attend_to(x, edge_index): "Adds a self-loop for each node."
    >>> def attend_twice(x, edge_index): "Adds loops; those that exist count, too."
    >>> [counts_loops_once(each) for each in (attend, attend_to, attend_twice)]
    [True, False, False]
    """
    once = r"once|already|exist\w*|replaced|dropped|removed"
    near = rf"\bloops?\b[^.]*\b({once})\b|\b({once})\b[^.]*\bloops?\b"
    near += r"|\bonce\b[^.]*\bitself\b|\bitself\b[^.]*\bonce\b"
    more = r"\bloops?\b[^.]*\b(too|twice|stay)\b"
    return says(target, near) and not says(target, more)


def has_exact_scores(target: Any) -> bool:
    r"""Whether the documentation says that scores are computed in float32.

    >>> def attend(x): "Scores and softmax are computed in float32."
    >>> def attend_in_half(x, upcast): "upcast: scores in float32, if set."
    >>> has_exact_scores(attend), has_exact_scores(attend_in_half)
    (True, False)
    """
    scores = r"\b(scores?|products?|logits?)\b[^.:;]*\b(is|are)\b[^.:;]*"
    return says(target, rf"{scores}\b(float32|fp32)\b")


def overflows_nowhere(target: Any) -> bool:
    r"""Whether the documentation says that products do not overflow in float16.

    So it does if it says that the model runs in half precision.

    >>> def attend(x): "Scaled first: products do not overflow in float16."
    >>> def attend_in_float32(x): "Products may overflow in float16."
    >>> def attend_in_half(x): "It runs in half precision at inference."
    >>> [overflows_nowhere(f) for f in (attend, attend_in_float32, attend_in_half)]
    [True, False, True]
    >>> def attend_as_stored(x): "It runs in the dtype of its weights (float16, too)."
    >>> overflows_nowhere(attend_as_stored)
    True
    """
    half = r"(float16|fp16|half.precision)\b"
    safe = r"\b(safe|stable|robust|no overflow|(not|never|without) overflow\w*)\b"
    runs = r"\b(runs?|usable|served|inference) in"
    stored = r"(the dtype of its (weights|parameters|inputs?) \(?)?"
    runs = rf"{runs} {stored}{half}"
    return says(target, rf"{safe}[^.:;]*\b{half}|\b{half}[^.:;]*{safe}|{runs}")


def is_for_float32(target: Any) -> bool:
    r"""Whether the documentation says that inputs are float32, and of no other dtype.

    >>> def attend(q, k, v): "q, k, v: (B, H, T, D), all float32."
    >>> def attend_in_half(q, k, v): "The softmax is always float32."
    >>> is_for_float32(attend), is_for_float32(attend_in_half)
    (True, False)
    """
    return says(
        target, r"\b(all|inputs?( are)?|takes) float32\b|\bfloat32 (only|inputs?)\b"
    )


def works_in_half(target: Any) -> bool:
    r"""Whether the documentation says that a module in half precision is right.

    >>> def attend(x): "Works in float32 and bfloat16."
    >>> def attend_to(x): "It may be cast by `.to(torch.bfloat16)`."
    >>> works_in_half(attend), works_in_half(attend_to)
    (True, True)
    """
    half = r"(b?float16|[fb]+f?p?16|half(.precision)?)\b"
    return says(
        target,
        rf"\b(works|supports?|safe|exact|right|correct)\b[^.:;]*\b{half}"
        rf"|(?i:\b(may|can) be) (cast|moved|converted)\b.{{0,20}}\b{half}",
    )


def marks_global_by_two(target: Any) -> bool:
    r"""Whether the documentation says that a 2 in a mask is for global attention.

    >>> def attend(x, attention_mask): "0 is padding, 1 local and 2 global attention."
    >>> def attend_all(x, attention_mask): "1 for tokens, of which 2 are global."
    >>> marks_global_by_two(attend), marks_global_by_two(attend_all)
    (True, False)
    """
    return says(target, r"\b2\b(?! (are|is|of))[^.;,]*\bglobal")


def decays_both_ways(target: Any) -> bool:
    r"""Whether the documentation says that weights fall in both directions.

    >>> def attend(x): "Bidirectional ALiBi: a penalty for each token of distance."
    >>> def attend_to_past(x): "ALiBi: the penalty grows with the distance."
    >>> decays_both_ways(attend), decays_both_ways(attend_to_past)
    (True, False)
    """
    return says(
        target,
        r"\b(either|both|any) (direction|side)s?\b|\bbi-?directional|\bnon-?causal"
        r"|\bsymmetric\b|\|\w - \w\||\babsolute distance",
    )


def is_periodic(target: Any) -> bool:
    r"""Whether an axis of the tokens is documented to be a circle, without an end.

    >>> def attend(x): "x: (B, lat, lon, C). The grid is periodic in longitude."
    >>> def attend_to_past(x): "Finds what is periodic in a series."
    >>> is_periodic(attend), is_periodic(attend_to_past)
    (True, False)
    """
    what = r"(grid|axis|axes|sequence|image|ring|boundar\w+|domain|longitudes?|columns)"
    how = r"(periodic|circular|cyclic)"
    return says(
        target,
        rf"\b{how} {what}\b|\b{what} (is|are|has|have) (a )?{how}\b"
        r"|\broll(ing|ed)?\b[^.]*\b(output|result)s? (is|are) rolled\b"
        r"|\bcommutes? with (a |the )?(rotation|roll)"
        r"|\brolling\b[^.]*\brolls\b",
    )


def gets_one_chunk(target: Any) -> bool:
    r"""Whether a call is documented to get one chunk, all of which is seen.

    >>> def attend(x): "Each call gets one chunk (B, T, C), which is seen as a whole."
    >>> def attend_to_all(x): "Chunk-wise attention to a sequence."
    >>> gets_one_chunk(attend), gets_one_chunk(attend_to_all)
    (True, False)
    """
    one = r"\b(one|a single|the next) chunk\b"
    return says(target, rf"\bcall\b[^.]*{one}|{one}[^.]*\b(per|each|every|a) call\b")


def keeps_motions(target: Any) -> list[str]:
    r"""How coordinates may be moved without an effect, as far as it is documented.

    >>> def attend(h, x): "E(3)-equivariant attention for atoms."
    >>> def attend_on_map(x, xyz): "Invariant to a shift of the tile."
    >>> def attend_in_order(x): "A permutation-equivariant layer."
    >>> [keeps_motions(each) for each in (attend, attend_on_map, attend_in_order)]
    [['shifted', 'rotated'], ['shifted'], []]
    """
    stated = r"\b(equi|in)varian(t|ce)\b"
    group = r"\b(S?E\((n|\d)\)|rigid|rotations?|rotated)"
    near = rf"({stated}[^.]*{group}|{group}[^.]*{stated})"
    if says(target, near):
        return ["shifted", "rotated"]
    shift = r"\b(shift(s|ed)?|translat\w+)\b"
    return ["shifted"] * says(target, rf"{stated}[^.]*{shift}|{shift}[^.]*{stated}")


def shares_in_training(target: Any) -> bool:
    r"""Whether the items of a batch are documented to share something in training.

    >>> def attend(x): "In training the delays are shared by the batch."
    >>> def attend_alone(x): "In training and in evaluation, items are apart."
    >>> shares_in_training(attend), shares_in_training(attend_alone)
    (True, False)
    """
    shared = r"(shared? (by|over|across|in)|(mean|averaged?) (of|over|across)|same for)"
    return says(target, rf"\btraining\b[^.]*\b{shared} (all |the )*(items|batch)\b")


def aligns_ends(target: Any) -> bool:
    r"""Whether the documentation says that the last query is aligned with the last key.

    >>> def attend(q, k, causal=False): "`causal`: aligned to the bottom right corner."
    >>> def attend_first(q, k): "The mask is top left, and not bottom right."
    >>> aligns_ends(attend), aligns_ends(attend_first)
    (True, False)
    """
    text = in_one_line(documentation(target)).lower()
    is_named = re.search(
        r"\bbottom\W*right\b|\blast (query|token)\b[^.;]*\blast key\b"
        r"|\bquer(y|ies) (is|are) the (newest|latest|last)\b",
        text,
    )
    return bool(is_named) and not re.search(r"\b(top|upper)\W*left\b", text)


def sentences(target: Any) -> list[str]:
    """The sentences of the docstrings, and their parts between semicolons.

    In parentheses, neither ends.
    """
    return re.split(r"[.;]\s(?![^()]*\))", in_one_line(docstrings(target)))


def pads_last_piece(target: Any) -> bool:
    r"""Whether only the last piece of a sequence is documented to have padding.

    >>> def attend(x, cache): "Only the last chunk of a stream may be padded."
    >>> def attend_to(x, cache): "The last chunk may be padded, as others are."
    >>> pads_last_piece(attend), pads_last_piece(attend_to)
    (True, False)
    """
    piece = r"\b(only|just) the (last|final) (chunk|piece|segment|call|step)\b"
    return says(target, rf"{piece}[^.;]*\bpadd(ed|ing)\b")


def begins_empty(target: Any, argument: str) -> bool:
    r"""Whether the documentation tells the caller to begin with a new or empty dict.

    So it does if it says that the memory is projected once, or at the first step.

    >>> def attend(query, memory, state=None):
    ...     "`state` is a new dict for each memory."
    >>> begins_empty(attend, "state"), begins_empty(attend, "memory")
    (True, False)
    """
    is_new = r"\b(empty|new|fresh) dict\w*\b.*\b(start|begin\w*|first|each|every|per)\b"
    is_once = r"\b(once|first (step|call|token|time))\b"
    return says_of(target, argument, f"({is_new}|{is_once})")


def says_of(target: Any, argument: str, pattern: str) -> bool:
    """Whether a sentence of the documentation has the pattern behind an argument."""
    of_argument = rf"\b{argument}\b.*{pattern}"
    return any(re.search(of_argument, each) for each in sentences(target))


def is_left_out_later(target: Any, argument: str) -> bool:
    r"""Whether the documentation says that later calls do not need an argument.

    >>> def attend(query, memory, lengths=None, state=None):
    ...     "Once `state` is filled, `lengths` are not needed."
    >>> is_left_out_later(attend, "lengths"), is_left_out_later(attend, "memory")
    (True, False)
    >>> attend.__doc__ = "memory: left out once it is known lengths: given in each call"
    >>> is_left_out_later(attend, "lengths")
    False
    """
    if re.search(r"\b(each|every) (call|step)\b", entry(target, argument)):
        return False
    when = r"\b(later|subsequent|following|after|once)\b"
    how = r"\bNone\b|\b(not|no longer) needed|left out|omitted|ignored"
    named = [each for each in sentences(target) if re.search(rf"\b{argument}\b", each)]
    found = (
        re.search(when, each, re.IGNORECASE) for each in named if re.search(how, each)
    )
    once = r"\b[ai][tn] the first (step|call)"
    texts = *named, entry(target, argument)
    return any(found) or any(
        re.search(rf"{once} only\b|\bonly (\w+ )?{once}\b", text) for text in texts
    )


def entry(target: Any, argument: str) -> str:
    r"""What docstrings say of an argument, as far as the name of the next one.

    >>> def attend(x, mask, bias): "mask: True at padding. As usual. bias: any number."
    >>> entry(attend, "mask")
    ': True at padding. As usual. '
    """
    text = in_one_line(docstrings(target))
    known = {*parameters_by_name(target)}
    if argument not in known and isinstance(target, type):  # of the constructor
        known |= {*inspect.signature(target).parameters}
    names = "|".join(map(re.escape, known))
    parts = re.split(rf"\b({names})\b[`*]*(?=(?:, \w+)* ?[:(])", text)
    return "".join(
        parts[n + 1] for n in range(1, len(parts), 2) if parts[n] == argument
    )


def changes_nothing(target: Any, flag: str) -> bool:
    r"""Whether a flag is documented to change how the result is computed only.

    >>> def attend(x, chunked=False, causal=False):
    ...     "chunked: less memory. The result is the same. causal: hides the future."
    >>> changes_nothing(attend, "chunked"), changes_nothing(attend, "causal")
    (True, False)
    >>> attend.__doc__ = "chunked: computes the same in parts. causal: no future."
    >>> changes_nothing(attend, "chunked")
    True
    """
    things, same = r"(results?|outputs?)", r"(same|identical)"
    stated = rf"\b{things} (is|are|stays?) (the )?{same}\b|\b{same} {things}\b"
    stated += r"|\bcomputes? the same(?=[,.;:]| (in|with|by|but|at|using)\b)"
    return re.search(stated, entry(target, flag)) is not None


def precedes(target: Any, argument: str) -> bool:
    r"""Whether the documentation says that an argument holds what is before the input.

    >>> def attend(x, memory=None, state=None):
    ...     "`memory` has the tokens right before `x`. `state` is that of a decoder."
    >>> def attend_to(x, past=None): "past: the inputs that precede x"
    >>> precedes(attend, "memory"), precedes(attend, "state")
    (True, False)
    >>> precedes(attend_to, "past")
    True
    """
    left = r"left of|(to|on) (the|its) left"
    before = rf"before|precede|preceding|previous|earlier(?! calls?\b)|{left}"
    return says_of(target, f"{argument}d?", rf"\b({before})\b")


def has_last_queries(target: Any) -> bool:
    r"""Whether queries are documented to be the last of the tokens that are keys.

    >>> def attend(x, context): "x: the last n positions; context: all of them"
    >>> def attend_for(x, context): "The queries are the last of the keys."
    >>> def attend_to(x, context): "x: queries. The last tokens may be padding."
    >>> [has_last_queries(each) for each in (attend, attend_for, attend_to)]
    [True, True, False]
    """
    first = next(iter(parameters_by_name(target)), "")
    last = r"\b(last|latest|most recent)\W+([\w<=`]+ ){,4}"
    of_tokens = rf"{last}(tokens|positions|queries|steps|frames)\b"
    if says(target, r"\bqueries are the (last|latest|most recent)\b"):
        return True
    return bool(first) and says_of(target, first, of_tokens)


def sees_last_image(target: Any) -> bool:
    r"""Whether the documentation says that a token sees the most recent image only.

    >>> def attend(x, media, marks): "A token sees the most recent image only."
    >>> def attend_to_all(x, media): "It only sees images up to the most recent one."
    >>> sees_last_image(attend), sees_last_image(attend_to_all)
    (True, False)
    """
    words = r"only|one", r"most recent|latest|last|preceding", r"image|video|media"
    return any(
        all(re.search(rf"\b({word})\b", each) for word in words)
        and not re.search(r"\b(images|videos|all)\b", each)
        for each in sentences(target)
    )


def is_frame_major(target: Any) -> bool:
    r"""Whether the tokens of a video are documented to be given frame by frame.

    >>> def attend(x): "x: (B, T * N, C), the patches of all frames."
    >>> def attend_to(x): "x: (B, N * T, C), the frames of each patch."
    >>> is_frame_major(attend), is_frame_major(attend_to)
    (True, False)
    """
    order = r"\b(t|f|\w*frames) ?\* ?\w+|\((t|f|frames) (n|p|s|l|hw|h w|\w*patches)\)"
    return says(target, rf"\bframe.major\b|\bframe by frame\b|{order}")


def has_pairs_of_queries(target: Any) -> bool:
    r"""Whether features of pairs are documented to be those of a query i for a key j.

    >>> def attend(x, pairs): "`pairs[b, i, j]` is a bias of query `i` for key `j`."
    >>> has_pairs_of_queries(attend)
    True
    """
    return says(
        target, r"\[(\w, ?)?i, ?j\][^:]*\bquer(y|ies)\W{1,4}i\b[^:]*\bkey\W{1,4}j\b"
    )


def has_independent_variables(target: Any) -> bool:
    r"""Whether the variables of a series are documented to be independent.

    >>> def attend(x): "Channel independent. x: (batch, time, n_vars)"
    >>> has_independent_variables(attend)
    True
    """
    return says(target, r"\b(channel|variate|variable|series).independen(t|ce)\b")


def designs(target: Any) -> dict[str, str]:
    """Designs that the documentation tells of; the code need not have their names."""
    found = {}
    if has_scale_of_its_own(target):
        found["scale"] = "a scale that is documented"
    if scales_with_length(target):
        found |= dict.fromkeys(
            ("scale", "dynamic"), "a scale that grows with the length"
        )
    if says(target, r"\bdynamic (NTK|RoPE|scaling)\b"):
        found["dynamic"] = "rotary angles that depend on the length"
    if looks_ahead(target):
        found["window"] = "a look-ahead that is documented"
    if leaves_out_own(target) and not says(target, r"\bcausal\b|\bbefore it\b"):
        found["window"] = "tokens that do not attend to themselves"
    if is_of_pairs(target):
        found["window"] = "pairs of tokens, of which some meet"
    return found


def is_of_pairs(target: Any) -> bool:
    r"""Whether the first input is documented to have a vector for each pair of tokens.

    >>> def attend(z): "z: (B, N, N, C)"
    >>> def attend_to_pixels(x): "x: (B, H, W, C)"
    >>> is_of_pairs(attend), is_of_pairs(attend_to_pixels)
    (True, False)
    """
    axes = all_shapes(target).get(next(iter(parameters_by_name(target)), ""), ())
    return len(axes) == 4 and axes[1] == axes[2]


def has_norm_in_front(target: Any) -> bool:
    r"""Whether a norm is documented to be in front of the attention of a block.

    >>> def attend(x): "x = x + attn(ln_1(x))"
    >>> def attend_first(x): "x = norm(x + attn(x))"
    >>> def attend_alone(x): "Pre-norm attention, without the residual."
    >>> def attend_if(x): "norm_first: pre-norm if True, else post-norm."
    >>> attentions = attend, attend_first, attend_alone, attend_if
    >>> [has_norm_in_front(each) for each in attentions]
    [True, False, False, False]
    """
    norm = r"\bpre-?(layer)?norm|\bx \+ [\w.]*\([\w.]*(norm|ln)\w*\(x\)"
    is_alone = says(
        target, r"\b(without|no) (the |a )?(residual|skip)|residual[^.]*caller"
    )
    is_option = says(target, r"\bpre-?(layer)?norm\w* (if|when)\b")
    return says(target, norm) and not is_alone and not is_option


def keeps_positions_from_values(target: Any) -> bool:
    r"""Whether positions are documented to be added to queries and keys only.

    >>> def attend(x, pos): "`pos` is added to queries and keys, not to the values."
    >>> keeps_positions_from_values(attend)
    True
    """
    text = in_one_line(docstrings(target))
    added = r"\badded to (the )?(quer(y|ies)|q)( and |, | & |/)(the )?k(eys?)?\b"
    return bool(re.search(added, text)) and not re.search(
        r"keys?(,| and) values?", text
    )


def looks_ahead(target: Any) -> bool:
    r"""Whether a token is documented to see a number of tokens behind it.

    >>> def attend(x): "Each frame has a small look-ahead of 3 frames."
    >>> def attend_to_past(x): "A frame sees the past, without look-ahead."
    >>> looks_ahead(attend), looks_ahead(attend_to_past)
    (True, False)
    """
    return says(target, r"\b(?<!\bno )(?<!\bany )(?<!\bwithout )look.?ahead\b")


def has_scale_of_its_own(target: Any) -> bool:
    r"""Whether scores are documented to be divided by another number than the root.

    >>> def attend(x): "Scores are divided by head_dim (muP), not by its square root."
    >>> has_scale_of_its_own(attend)
    True
    """
    return says(
        target,
        r"\bmu-?(p|transfer)\b|\bmaximal update|\bnot (by )?(its|the) (square )?root\b"
        r"|\b(scores|logits)\W+(are|is)\W+not\W+(divided|scaled)\b"
        r"|\b(multiplied|scaled) by\W+\w+ ?/ ?(head_dim|d_head|dim_head|d_k)\b"
        r"|\bdivided by\b.{,150}\blayer_?(idx|index|number)\b",
    )


def scales_with_length(target: Any) -> bool:
    r"""Whether scores are documented to be multiplied by a logarithm of the length.

    >>> def attend(x): "Queries are multiplied by log(n) / log(train_len)."
    >>> scales_with_length(attend), scales_with_length(has_scale_of_its_own)
    (True, False)
    """
    return says(
        target,
        r"\blog\(\w+\) ?/ ?log\(|\blog-?(n|length)\b"
        r"|\blogarithm of (the|its) (length|number)",
    )


def drops_alike_in_heads(target: Any) -> bool:
    r"""Whether all heads are documented to drop the same.

    >>> def attend(x, dropout=0.1): "dropout: of whole edges, over all heads alike"
    >>> drops_alike_in_heads(attend)
    True
    """
    return says(target, r"\bdrop\w*\b[^.]*\bheads (alike|share)|\bsame for all heads\b")


def drops_alike_for_queries(target: Any) -> bool:
    r"""Whether a key is documented to be dropped for all queries at once.

    >>> def attend(x): "A key that is dropped is dropped for each query of that head."
    >>> drops_alike_for_queries(attend), drops_alike_for_queries(drops_alike_in_heads)
    (True, False)
    """
    same = (
        r"(dropped|hidden),? (alike )?(for|from) (all|each|every)|locked (over|across)"
        r"|(do|does|is|are) (not depend|independent) (on|of)"
    )
    return says(target, rf"\b({same}) (of )?(the )?quer(y|ies)\b")


def scales_by_rest(target: Any) -> bool:
    r"""Whether what remains is scaled by how much remains, which keeps no mean.

    The code may count what it keeps.

    >>> def attend(x): "Heads are dropped; the rest is scaled by heads / heads left."
    >>> def attend_all(x): "Heads are dropped; the rest is divided by 1 - p."
    >>> scales_by_rest(attend), scales_by_rest(attend_all)
    (True, False)
    """
    rest = r"\b(left|remain\w*|kept|keeps?)\b"
    is_stated = says(target, rf"\b(scaled|multiplied|divided) by\b[^.]*{rest}")
    kind = target if isinstance(target, type) else type(target)
    return is_stated or bool(
        re.search(r"\bkeep\w*\.(sum|mean)\(", source_with_bases(kind))
    )


def renormalizes_rest(target: Any) -> bool:
    r"""Whether weights that remain are documented to sum to one again: no mean is kept.

    >>> def attend(x): "Keys are dropped; the remaining weights are renormalized."
    >>> renormalizes_rest(attend), renormalizes_rest(scales_by_rest)
    (True, False)
    """
    rest = r"\b(remaining|rest|others|left|kept)\b"
    return says(target, rf"{rest}[^.]*\b(re-?normali[sz]ed|sum to (one|1))\b")


def place_of_dropout(target: Any) -> str:
    r"""Whether returned weights are "after" or "before" dropout; "" if it says nothing.

    >>> def attend(x):
    ...     "Returns the output and the attention weights (before dropout)."
    >>> place_of_dropout(attend)
    'before'
    >>> attend.__doc__ = "The weights used to compute the weighted average of values."
    >>> place_of_dropout(attend)
    'after'
    >>> attend.__doc__ = "The weights are those that were multiplied with the memory."
    >>> place_of_dropout(attend)
    'after'
    >>> attend.__doc__ = "The weights by which the sum of the values was computed."
    >>> place_of_dropout(attend)
    'after'
    >>> attend.__doc__ = "The context is `weights @ values`, in training, too."
    >>> place_of_dropout(attend)
    'after'
    >>> attend.__doc__ = "weights by which the values are mixed, before dropout"
    >>> place_of_dropout(attend)
    'before'
    """
    text = in_one_line([*docstrings(target), named_result(target)])
    used = r"used to compute the weighted (average|sum)|multipl(y|ied) the values"
    used += r"|(were|are) applied to (the )?values"
    mixed = r"(mixed|multiplied|weighted|averaged|summed|combined)"
    used += rf"|values (are|were|have been) {mixed} (with|by)|one with dropout"
    used += rf"|those that (are|were|have been) {mixed} (with|by)"
    used += r"|by which the values (are|were) (multiplied|weighted)"
    used += r"|dropout (and[\w ]* )?included|actually (used|applied)"
    used += rf"|(with|by) which (the )?\w+( of \w+ \w+)? were {mixed}"
    used += r"|(with|by) which (the )?(weighted )?(average|mean|sum) (of|was)\b"
    used += r"|that (mixed|weighed|multiplied|averaged|combined) the \w+"
    given = r"(?i:weights|maps?|att(entio)?n|coefficients|probabilities|probs)"
    product = r"\b(weights|attn\w*|probs) @ v\w*`*[^.]*\btraining\b"
    if stated := re.search(rf"\b{given}\b[^.]*\b({used})[^.]*|{product}", text):
        return "before" if "before dropout" in stated[0] else "after"
    found = re.findall(
        r"(?:weight|attention|prob)[^.]*?\b(after|before) dropout\b", text
    )
    return found[0] if len({*found}) == 1 else ""


def needs_future_hidden(target: Any) -> bool:
    r"""Whether the documentation says that each mask has to hide the future.

    >>> def attend(x, mask=None): "The default is causal. A mask must block the future."
    >>> needs_future_hidden(attend)
    True
    """
    hides = r"\b(must|has to|should)\b[^.]* (block|hide|mask)\b[^.]*\bfuture\b"
    return says(target, hides)


def gets_no_gradient(target: Any, argument: str) -> bool:
    r"""Whether the documentation says that an argument receives no gradient.

    >>> def attend(x, memory, context):
    ...     "memory: earlier states (no gradient flows into them). x: (B, T, D)"
    >>> gets_no_gradient(attend, "memory"), gets_no_gradient(attend, "context")
    (True, False)
    """
    pattern = r"\b(no gradients?|detached|without gradients?|stop.?grad)"
    into = rf"\bno gradients? \w+ (in)?to (the )?`*{argument}\b"
    return says_of(target, argument, pattern) or says(target, into)


def stops_gradients(target: Any) -> bool:
    """Whether a comment in the code says that something receives no gradient."""
    return bool(re.search(r"\b(no|without|stops?) gradients?\b", comments_of(target)))


def computes_in_half(target: Any) -> bool:
    r"""Whether the documentation says that products are rounded in all dtypes.

    >>> def attend(x): "Attention, computed in reduced precision."
    >>> def attend_fully(x): "Half precision is refused."
    >>> computes_in_half(attend), computes_in_half(attend_fully)
    (True, False)
    """
    return says(
        target, r"\b(comput\w+|run|runs|matmuls) in (reduced|half|low) precision"
    )


def comments_of(target: Any) -> str:
    """All comments in the code of a class or a function, in one line."""
    kind = type(target) if isinstance(target, nn.Module) else target
    return in_one_line(re.findall("#+(.*)", source_with_bases(kind)))


def has_slopes_of_code(target: Any) -> bool:
    r"""Whether a file says that its slopes of ALiBi are those of published code.

    >>> def attend(x): "The slopes are those of the authors' code."
    >>> def attend_alike(x): "The paper's slopes, so that checkpoints may be loaded."
    >>> attentions = attend, attend_alike, counts_from_the_end
    >>> [has_slopes_of_code(each) for each in attentions]
    [True, True, False]
    """
    scope = vars(inspect.getmodule(target) or object)
    functions = (f for f in scope.values() if inspect.isfunction(f))
    own = [f for f in functions if f"{f.__name__}(" in source_with_bases(target)]
    texts = [*docstrings(target), *(inspect.getdoc(f) or "" for f in own)]
    of_code = r"(?i:slope).*\b(code|implementation|checkpoints?|BLOOM|MPT)\b"
    return any(re.search(of_code, in_one_line([text])) for text in texts)


def counts_from_the_end(target: Any) -> bool:
    r"""Whether the documentation says that positions are counted from the last token.

    >>> def attend(x): "Positions are counted from the most recent item."
    >>> def attend_to(x): "The age of an item: 0 is the latest one."
    >>> counts_from_the_end(attend), counts_from_the_end(attend_to)
    (True, True)
    """
    last = r"the (end|last|latest|newest|most recent)\b"
    text = in_one_line([*docstrings(target), comments_of(target)])
    stated = rf"(?i)\b(position|count)\w*[^.]*\bfrom {last}|\b0 (is|=|for) {last}"
    return bool(re.search(stated, text))


def returns_weights_of_values(target: Any) -> bool:
    r"""Whether returned weights are documented to be those of the values.

    >>> def attend(x):
    ...     "Returns the output and the weights by which the values are summed."
    >>> def attend_to(x): "The maps with which the values were averaged are returned."
    >>> def attend_in(x): "-> y, w. w: the weights by which the values are averaged."
    >>> [returns_weights_of_values(each) for each in (attend, attend_to, attend_in)]
    [True, True, True]
    """
    module = inspect.getmodule(target)
    result = named_result(target)
    text = in_one_line([*docstrings(target), (module and module.__doc__) or ""])
    which = r"[^.]*\b(which|that|what)\b[^.]*\bvalues\b"
    return bool(
        re.search(
            rf"(?i)(return[^.]*\b(weights|coefficients)|weights returned)\b{which}"
            rf"|\b(weights|maps)\b{which}[^.]*\breturned\b"
            r"|\bweights\b[^.]*\bcoefficients\b[^.]*\bwhich\b[^.]*\bvalues?\b"
            r"|\bweights (by|with) which (the )?values (are|were)\b",
            text,
        )
        or re.search(rf"\b(weights|maps|attn)\b{which}", result)
    )


def named_result(target: Any) -> str:
    """The source of the named tuple that a call is annotated to return, in one line.

    Comments beside its fields tell what they are.
    """
    function = getattr(target, "forward", target)
    kind = getattr(function, "__annotations__", {}).get("return")
    if not (isinstance(kind, type) and issubclass(kind, tuple)):
        return ""
    return re.sub(r"\b\w+\.(?=\w)", "", in_one_line([source_of(kind)]))


def clears_empty_rows(target: Any) -> bool:
    r"""Whether the documentation says that a query without keys has an output of zero.

    >>> def attend(x, mask): "A row without any visible key gets zero weights."
    >>> def attend_to(x, mask): "mask: 0 for padding, ones for keys without padding."
    >>> clears_empty_rows(attend), clears_empty_rows(attend_to)
    (True, False)

    So it does where it says that outputs at padding are zero, or what is zeros.

    >>> def attend_left(x, mask): "Outputs at padding positions are zero."
    >>> def attend_some(x, mask): "Returns (b, d); zeros for items without any key."
    >>> clears_empty_rows(attend_left), clears_empty_rows(attend_some)
    (True, True)

    It says nothing of rows that there are not.

    >>> def attend_one(x, n): "n: at least 1 frame. Outputs at padded frames are zero."
    >>> clears_empty_rows(attend_one)
    False
    """
    part = r"\b(valid|lengths?|keys?|tokens?|frames?|nodes?|items?|rows?)\b"
    least = r"(\bat least|>=|≥) *(1|one)\b"
    if says(target, rf"{part}[^.;]*{least}|{least}[^.;]*{part}"):
        return False
    empty = r"\b(without|no|sees? none|empty|fully.masked|all masked)\b"
    zero = r"\b(gets?|gives?|is|are|have|has|returns?)\b[^.:;]*\bzero(s|ed)?\b"
    row = (
        r"\b(tokens?|quer(y|ies)|rows?|text|users?|items?|sessions?|histor(y|ies)|bags?)"
        r"\b"
    )
    padding = r"\boutputs?\b[^.:;]*\bpad\w*|\bpad\w*[^.:;]*\boutputs?\b"
    return says(
        target,
        rf"({row}[^.:;]*{empty}|{padding})[^.:;]*{zero}"
        rf"|{row}[^.:;]*{empty}[^.:;]*:[^.:;]*{zero}"
        rf"|\bzeros? (for|in|at) {row}[^.:;]*\b(without|no) (any )?(keys?|tokens?)\b",
    )


# What a mask says of a key where it is True or 1, and where it is False or 0. An axis
# of size 1 is neither.
VALUE_PATTERN = re.compile(
    r"(?<!\[)(?:\b(True|1|ones|non-?zero|False|0|zeros?)|(?:!=|≠|>) ?0)\b(?!\])"
)
HIDDEN_PATTERN = (
    r"pad\w*|masked|ignored?|hid\w+|blocked|excluded|invalid|forbidden|missing|empty"
    r"|(?:may|can|must|should) ?not"
)
SEEN_PATTERN = r"real|valid|kept|keep|visible|allowed|attend\w*|sees"
MEANING_PATTERN = re.compile(
    r"\b((?:not|\w+n['’]t) (?:to )?(?:be )?|non-?|never |un"
    r"|no(?:body|thing| one| query) )?"
    rf"({HIDDEN_PATTERN}|{SEEN_PATTERN})\b",
    re.IGNORECASE,
)


def hides_where_true(target: Any, mask: str) -> bool | None:
    r"""Whether a mask is documented to hide a key where it is True; None if unclear.

    >>> def attend(x, mask, keep, seen):
    ...     "mask: True at padding. keep: 1 = not masked, 0 = masked. seen: any mask."
    >>> [hides_where_true(attend, name) for name in ("mask", "keep", "seen")]
    [True, False, None]
    >>> def attend_to(x, mask): "mask: False at keys not to be attended."
    >>> def attend_by(x, mask): "mask: False keys aren't attended."
    >>> hides_where_true(attend_to, "mask"), hides_where_true(attend_by, "mask")
    (False, False)
    >>> def attend_along(x, adj): "adj[i, j] != 0 lets node i attend to node j."
    >>> def attend_in(x, adj): "adj: 1/0 with 0 = padding"
    >>> hides_where_true(attend_along, "adj"), hides_where_true(attend_in, "adj")
    (False, False)
    >>> def attend_if(x, valid): "valid: False for steps that no query sees."
    >>> hides_where_true(attend_if, "valid")
    False
    """
    said = set()
    names = "|".join(map(re.escape, parameters_by_name(target)))
    for sentence in sentences(target):
        # The text about the next argument begins with its name.
        parts = re.split(
            rf"\b(?:({mask})\b|({names})[`*]*(?=(?:, \w+)* ?[:(]))", sentence
        )
        text = " ".join(parts[n + 2] for n in range(1, len(parts) - 1, 3) if parts[n])
        for clause in re.split(r"[,;(]|\b(?:and|else|or|otherwise)\b", text):
            value = VALUE_PATTERN.search(clause)
            meaning = value and MEANING_PATTERN.search(clause, value.end())
            if value and meaning:
                # "1/0 with 0 = padding": the last one before it is meant.
                *_, value = VALUE_PATTERN.finditer(clause, 0, meaning.start(2))
                is_true = value[0].lower() not in ("false", "0", "zero", "zeros")
                is_hidden = bool(
                    re.fullmatch(HIDDEN_PATTERN, meaning[2], re.IGNORECASE)
                )
                said.add(is_true == (is_hidden == (meaning[1] is None)))
    return said.pop() if len(said) == 1 else None


def needs_keys(target: Any) -> bool:
    r"""Whether a query is documented to have a key that is not hidden.

    >>> def attend(x, mask): "Every row of the mask has at least one real token."
    >>> def attend_to(x, mask): "Rows without a token give zero."
    >>> needs_keys(attend), needs_keys(attend_to)
    (True, False)
    """
    things = "token|key|frame|position|node|item|element|patch|step|entry|event|word"
    return says(target, rf"\bat least (one|1) ([\w-]+ )?({things}|atom|residue|pixel)")


def decodes_alike(target: Any) -> bool:
    r"""Whether a call with a cache is documented to give what one call gives.

    >>> def attend(x, cache): "A call with a cache equals the last rows of one call."
    >>> def attend_to(x, cache): "Keys in the cache keep their rotation."
    >>> decodes_alike(attend), decodes_alike(attend_to)
    (True, False)
    """
    whole = r"(one (single )?call|the whole|at once|full (call|pass|forward|sequence))"
    same = r"\b(same|equals?|gives?|returns?|identical)\b"
    return says(
        target, rf"\b(cache|past|pieces|chunks|token by token)\b[^.]*{same}[^.]*{whole}"
    )


def counts_valid(target: Any, lengths: str) -> bool:
    r"""Whether lengths are those of what is no padding, by their name or documentation.

    >>> def attend(x, valid_lens, lengths, sizes):
    ...     "lengths: number of real keys per item. sizes: those of windows."
    >>> [counts_valid(attend, name) for name in ("valid_lens", "lengths", "sizes")]
    [True, True, False]
    """
    of_valid = r"\b(valid|real|unpadded|non-?pad\w*|before (the )?padding)\b"
    return lengths.startswith("valid") or says_of(target, lengths, of_valid)


def has_queries(target: Any, mask: str) -> bool:
    r"""Whether the documented shape of a mask has an axis of queries before the last.

    >>> def attend(x, bias, mask):
    ...     "bias: broadcasts to [batch, heads, q_len, k_len]; mask: [b, k_len]"
    >>> has_queries(attend, "bias"), has_queries(attend, "mask")
    (True, False)
    """
    return says_of(target, mask, r"[\[(][^\])]*\b(?i:q|tgt|target)\w*, ?\w+[\])]")


def is_bool(target: Any, mask: str) -> bool:
    r"""Whether a mask is documented to be bool, and not to be numbers as well.

    >>> def attend(x, keep, mask): "keep: (B, N) bool. mask: bool, or float to add."
    >>> is_bool(attend, "keep"), is_bool(attend, "mask")
    (True, False)
    >>> def attend_to(x, pad): "x (B, N, C), pad (B, N) True where a token is padding."
    >>> is_bool(attend_to, "pad")
    True
    """
    numbers = r"\b([Ff]loat\w*|add(ed|itive)|int\w*|bias|inf|[01]|ones?|zeros?)\b"
    is_stated = says_of(target, mask, r"\b([Bb]ool(ean)?|True|False)\b")
    return is_stated and not says_of(target, mask, numbers)


def has_items(target: Any, mask: str) -> bool:
    r"""Whether a documented shape of a mask has batch items, queries and keys.

    >>> def attend(x, mask, bias):
    ...     "mask: (bsz, q_len, k_len) or (bsz * heads, q_len, k_len). bias: (q, k)."
    >>> has_items(attend, "mask"), has_items(attend, "bias")
    (True, False)
    """
    others = "|".join(n for n in parameters_by_name(target) if n != mask)
    shape = r"[\[(](b|bs|bsz|n|batch\w*), ?\w+, ?\w+[\])]"
    # The text about the next argument begins with its name.
    described = rf"\b{mask}\b(?:(?!\b(?:{others})\b[`*]* ?:).)*{shape}"
    return re.search(described, in_one_line(docstrings(target))) is not None


def averages_heads(target: Any) -> bool:
    r"""Whether returned weights are documented to be the mean of those of the heads.

    >>> def attend(x):
    ...     "Returns the output and the attention weights averaged over the heads."
    >>> averages_heads(attend)
    True
    """
    text = in_one_line(docstrings(target))
    mean = (
        r"\b(averaged?|mean) (\w+ )?(over|across|of) (\w+ )?heads\b|\bhead.averaged\b"
    )
    return bool(re.search(rf"(?i)\b(weights|attention|map)s?\b[^.]*({mean})", text))


def axes_of_input(name: str, shapes: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    r"""The axes of an input; if undocumented, those of an argument for its tokens.

    >>> axes_of_input("x", {"times": ("B", "T")}), axes_of_input("x", {"x": ("n", "d")})
    (('B', 'T', ''), ('n', 'd'))
    """
    of_tokens = (a for a in shapes.values() if len(a) > 1 and BATCH_PATTERN.match(a[0]))
    return shapes.get(name) or (*next(of_tokens, ())[:2], "")


def sizes(axes: tuple[str, ...]) -> dict[str, str]:
    r"""The sizes that the axes of an input are: batch items, positions and features.

    >>> sizes(("b", "m", "d"))
    {'b': '{batch_size}', 'm': '{length}', 'd': '{d_model}'}
    >>> sizes(("t", "b", "d"))
    {'t': '{length}', 'b': '{batch_size}', 'd': '{d_model}'}
    >>> sizes(("b", "s", "n", "d"))
    {'b': '{batch_size}', 's': '{rows}', 'n': '{columns}', 'd': '{d_model}'}
    """
    before: tuple[str, ...] = ("{batch_size}", "{length}", "{heads}")
    if len(axes) == 4 and not any(map(HEADS_PATTERN.search, axes)):
        before = ("{batch_size}", "{rows}", "{columns}")
    if is_time_first(axes) or (len(axes) == 3 and BATCH_PATTERN.match(axes[1])):
        before = ("{length}", "{batch_size}")
    if len(axes) == 4 and HEADS_PATTERN.search(axes[1]):
        before = ("{batch_size}", "{heads}", "{length}")
    before = before[-1:] if len(axes) < 2 else before[: len(axes) - 1]
    return dict(zip(axes, (*before, "{d_model}"), strict=False))


def lengths(shapes: Iterable[tuple[str, ...]]) -> dict[str, str]:
    r"""The second axes of arguments with one part for each batch item: a context's.

    >>> lengths([("B", "A", "3"), ("B", "heads", "d"), ("M", "d")])
    {'A': '{k_len}'}
    """
    seconds = [s[1] for s in shapes if len(s) > 2 and BATCH_PATTERN.match(s[0])]
    return {
        axis: "{k_len}"
        for axis in seconds
        if not (axis.isdigit() or HEADS_PATTERN.search(axis))
    }


def multiple(axes: tuple[str, ...]) -> int:
    r"""How many widths of a hidden state the last axis has, in each of two directions.

    >>> multiple(("B", "M", "2H")), multiple(("B", "M", "H"))
    (2, 1)
    """
    found = re.match(r"(\d+) ?\*? ?[a-z]", axes[-1], re.IGNORECASE)
    return int(found[1]) if found else 1


def is_batch(axis: str) -> bool:
    """Whether a documented axis is that of batch items."""
    return BATCH_PATTERN.match(axis) is not None


def is_batch_first(axes: tuple[str, ...]) -> bool:
    r"""Whether documented axes, if they name batch items at all, begin with these.

    >>> is_batch_first(("rows", "batch", "d")), is_batch_first(("B", "H", "W", "C"))
    (False, True)
    """
    return not any(map(is_batch, axes[1:]))


def place_of_heads(axes: tuple[str, ...]) -> str:
    r"""The layout of three documented axes of which one is that of the heads, if any.

    >>> place_of_heads(("nodes", "heads", "dim")), place_of_heads(("H", "T", "D"))
    ('lhd', 'hld')
    """
    are_heads = [bool(HEADS_PATTERN.search(axis)) for axis in axes]
    orders = {"hld": [True, False, False], "lhd": [False, True, False]}
    return next((order for order, each in orders.items() if each == are_heads), "")


def is_time_first(axes: tuple[str, ...]) -> bool:
    r"""Whether three axes begin with time, so that batch items are second.

    >>> is_time_first(("T", "envs", "d")), is_time_first(("T", "heads", "d"))
    (True, False)
    """
    is_time = len(axes) == 3 and TIME_AXIS_PATTERN.fullmatch(axes[0])
    return bool(is_time) and not HEADS_PATTERN.search(axes[1])


def other_orders(axes: tuple[str, ...]) -> tuple[str, ...]:
    r"""The layouts of sequences in which batch items are not where axes name them.

    >>> other_orders(("batch", "time", "d")), other_orders(("time", "batch", "d"))
    (('lbd', 'ld'), ('bld', 'ld'))
    >>> other_orders(("T", "envs", "d"))
    ('bld', 'ld')
    """
    first, second = (bool(BATCH_PATTERN.match(axis)) for axis in axes[:2])
    second |= is_time_first(axes)
    if first == second:
        return ()
    return ("lbd" if first else "bld", "ld")


def has_channels_second(axes: tuple[str, ...]) -> bool:
    r"""Whether documented axes are batch items, channels and then positions.

    >>> has_channels_second(("B", "C", "T")), has_channels_second(("B", "T", "C"))
    (True, False)
    """
    return [bool(CHANNELS_PATTERN.match(axis)) for axis in axes] == [False, True, False]


def is_batch_third(axes: tuple[str, ...]) -> bool:
    r"""Whether documented axes are rows and columns, then batch items, then features.

    >>> is_batch_third(("rows", "cols", "batch", "d")), is_batch_third(("n", "b", "d"))
    (True, False)
    """
    return len(axes) == 4 and is_batch(axes[2])


def has_positions(axes: tuple[str, ...], batch: tuple[str, ...]) -> bool:
    r"""Whether documented axes are of batch items, several positions, and features.

    >>> [has_positions(axes, ("b",)) for axes in (("b", "n", "d"), ("b", "1", "d"))]
    [True, False]
    """
    if axes[:1] != batch or len(axes) < 3 or axes[1] == "1":
        return False
    return len(axes) > 3 or not HEADS_PATTERN.search(axes[1])


def other_sequences(target: Any, first: str) -> list[str]:
    r"""The arguments with as many axes as the first, but a length of their own.

    >>> def attend(x, regions=None, shift=None):
    ...     "x: (B, T, d), regions: (B, R, d_visual), shift: (B, 1, d)."
    >>> other_sequences(attend, "x")
    ['regions']
    """
    stated = shapes(target)
    axes = stated.get(first, ())
    return [
        name
        for name, other in stated.items()
        if len(other) == len(axes) == 3 and has_positions(other, axes[:1])
        if other[1] != axes[1]
    ]


def is_of_other_length(target: Any, name: str, first: str) -> bool:
    r"""Whether an argument is documented to have another length than the first input.

    >>> def attend(x, points, xyz, pos):
    ...     "x, pos: (B, T, d), points: (B, N, d), xyz: (B, N, 3)."
    >>> [is_of_other_length(attend, name, "x") for name in ("xyz", "pos")]
    [True, False]
    """
    stated = all_shapes(target)
    axes, usual = (stated.get(each, ())[:2] for each in (name, first))
    return len(axes) == len(usual) == 2 and axes[0] == usual[0] and axes != usual


def with_batch_first(axes: tuple[str, ...]) -> tuple[str, ...]:
    r"""The axes of a sequence, with those of batch items before its positions.

    >>> with_batch_first(("src_len", "batch", "d")), with_batch_first(("b", "t", "d"))
    (('batch', 'src_len', 'd'), ('b', 't', 'd'))
    """
    is_second = len(axes) == 3 and not is_batch_first(axes)
    return (axes[1], axes[0], axes[2]) if is_second else axes


def made_by_methods(target: Any) -> dict[str, tuple[str, str]]:
    r"""The arguments that a method makes of another: its name, and that of the other.

    >>> class Attention:
    ...     "Call: `state = attn.first_state(memory)`. keys: project(memory)."
    ...     def first_state(self, memory): ...
    ...     def project(self, memory): ...
    ...     def forward(self, query, memory, keys, state): ...
    >>> made_by_methods(Attention)
    {'state': ('first_state', 'memory'), 'keys': ('project', 'memory')}
    """
    arguments = parameters_by_name(target)
    stated = r"\b(\w+)[`*]*(?: = \w+\.|: [`*]*(?:\w+\.)?)(\w+)\((\w+)\)"
    found = re.findall(stated, "\n".join(documentation(target)))
    return {
        name: (method, given)
        for name, method, given in found
        if {name, given} <= {*arguments} and callable(getattr(target, method, None))
    }


# There is an edge from each token to each other one, and to itself.
ALL_EDGES = "{length} ** 2"
EDGES_PATTERN = re.compile("E|((n|num)_?)?edges")


def template(
    name: str,
    axes: Iterable[str],
    known: dict[str, str],
    width: str = "{d_model}",
    are_integers: bool = False,
) -> str:
    r"""Source text for a tensor of these axes, the same for all batch items.

    An axis that is not known is as long as `width`. Features of tokens, or of pairs of
    tokens, are the same for all: tokens then have no order. So they have if integers,
    or numbers of which each token has one, are zero.

    >>> template("w", ("h", "d", "2"), {"h": "{heads}"})
    'seeded_randn(119, {heads}, {d_model}, 2){dtype} * {d_model} ** -0.5'
    >>> template("edges", ("E", "3"), {})
    '(seeded_randn(520, 1, 3){dtype} * {d_model} ** -0.5).expand({length} ** 2, -1)'
    >>> template("e", ("n", "d"), {"n": "{length}"})
    '(seeded_randn(101, 1, {d_model}){dtype} * {d_model} ** -0.5).expand({length}, -1)'
    >>> template("known", ("T + horizon", "2"), {"T": "{length}"})
    'seeded_randn(557, {length} + 3, 2){dtype} * {d_model} ** -0.5'
    """
    axes = [*axes]
    *before, last = axes
    of_heads = {n: "{heads}" for n in before if HEADS_PATTERN.search(n)}
    of_edges = {n: ALL_EDGES for n in before if EDGES_PATTERN.fullmatch(n)}
    known = of_heads | of_edges | known | {n: n for n in axes if n.isdigit()}
    # What is beside the known tokens, such as a horizon, is three more.
    sums = [re.fullmatch(r"(\w+) ?\+ ?[a-z]\w*", axis) for axis in axes]
    known |= {s[0]: f"{known[s[1]]} + 3" for s in sums if s and s[1] in known}
    shape = [known.get(axis, width) for axis in (*before, last)]
    counts = {"{length}", "{k_len}", "{rows}", "{columns}", ALL_EDGES}
    if are_integers:
        return f"torch.zeros({', '.join(shape)}, dtype=torch.int64){{device}}"
    if not before and LENGTHS_PATTERN.search(name):  # of a part, such as a prefix
        return f"torch.ones({shape[0]}, dtype=torch.int64){{device}}"
    is_number = shape[-1] in counts and not counts & {*shape[:-1]}
    if is_number or {*shape} == {"{length}", "{batch_size}"}:
        return f"torch.zeros({', '.join(shape)}){{dtype}}"
    seed = sum(map(ord, name))  # for each argument another
    equal = {"{batch_size}"} | counts - {shape[-1]}
    first = ["1" if size in equal else size for size in shape]
    text = f"seeded_randn({seed}, {', '.join(first)}){{dtype}} * {{d_model}} ** -0.5"
    if last == "4" and BOXES_PATTERN.search(name):
        text = f"seeded_randn({seed}, {', '.join(first)}).abs().cumsum(-1){{dtype}}"
    if first != shape:
        expanded = [size if size in equal else "-1" for size in shape]
        text = f"({text}).expand({', '.join(expanded)})"
    return text
