r"""# Laws of order

Attention without a positional encoding operates on a set: only the mask distinguishes
one position from another. A sliding window is an option, and has a law of its own. What
a positional encoding adds is tested by the [laws of positions](positions.md).

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), section 3.5;
[Set Transformer](https://arxiv.org/abs/1810.00825), section 3.1, for permutations.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from attention_laws import documented, names, structure
from attention_laws.algebra import (
    assert_in_float64,
    edge_argument,
)
from attention_laws.law import (
    LawViolation,
    NotApplicable,
    ScriptError,
    law,
    skip_unless,
)
from attention_laws.recorded import make_equal_tokens, record_weights
from attention_laws.recorders import CalledFunctions, WeightsRecorder
from attention_laws.scores import assert_shares_equal
from attention_laws.script import CallArguments, Script
from attention_laws.source import source_of

# The first token, which is one of a class.
CLASS_PATTERN = re.compile(r"cls(_|$)|class_token")

# Tokens of which the last ones are farther away than the first ones see.
AHEAD_TOKENS = 12


def reorder(script: Script, name: str, order: list[int]) -> str:
    """The same tokens in another order."""
    return script.assign(name, f"{name}{script.adapter.index(l=order)}")


def attends_twice(script: Script) -> bool:
    """Whether there are several attentions, one behind the other perhaps."""
    is_module = script.adapter.is_module
    return is_module and structure.count_attentions(script.evaluate("attention")) > 1


def rotated_order(script: Script, length: int) -> list[int]:
    """An order in which all tokens have another place, but for that of a class.

    The sides of an image that it is in front of tell of it, or its name.
    """
    is_sized = "{length} - 1" in str(script.adapter.extra_args)
    named = CLASS_PATTERN.match(script.adapter.designs.get("sink", ""))
    first = int(is_sized or named is not None)
    return [
        *range(first),
        *range(first + 1, length),
        *range(first, min(1 + first, length)),
    ]


@contextmanager
def unless_of_pairs(script: Script) -> Iterator[None]:
    """Excuse a violation if an image is a matrix of pairs, or if some pixels meet.

    A pair attends along its row or its column, so that the tokens are in no order. In a
    square, these are the same tokens.
    """
    try:
        yield
    except LawViolation:
        rows, columns = script.adapter.grid(script.sizes.k_len)
        is_matrix = bool(script.adapter.image) and min(rows, columns) > 1
        skip_unless(
            not (is_matrix and are_pairs_in_no_order(script, rows, columns)),
            "rows and columns are in no order, and pixels are",
        )
        if script.adapter.image:
            script.restart()
            args = script.make_arguments()
            others = script.sizes.k_len - 1
            skip_unless(
                all_reach_last(script, args, script.call(args), others),
                "a pixel attends to some of the others, which their order tells",
            )
        raise


def all_reach_last(
    script: Script, args: CallArguments, before: str, count: int
) -> bool:
    """Whether the last output, of those `before`, depends on each of `count` tokens."""
    last = script.adapter.index(l=slice(-1, None))
    changed = (
        script.call(script.perturb(args, l=slice(n, n + 1))) for n in range(count)
    )
    return not any(
        script.evaluate(f"torch.equal({before}{last}, {after}{last})")
        for after in changed
    )


def are_pairs_in_no_order(script: Script, rows: int, columns: int) -> bool:
    """Whether another order of rows and of columns has the outputs in that order."""
    pixels = [
        columns * i + j for i in (*range(1, rows), 0) for j in (*range(1, columns), 0)
    ]
    script.restart()
    args = script.make_arguments()
    before = reorder(script, script.call(args), pixels)
    x = reorder(script, args.inputs[0], pixels)
    try:
        after = script.call(replace(args, inputs=(x, *args.inputs[1:])))
        script.assert_close(before, after, "")
    except (LawViolation, ScriptError):
        return False
    return True


# Designs whose tokens are in an order, though no positions are encoded.
ORDERED = "positions decay compression convolution window selection direction monotonic"


@law(assumes=ORDERED)
def key_permutation(script: Script) -> None:
    r"""Without positional encoding, the order of the keys does not matter.

    $$\textstyle\sum_j a_{ij} v_j = \sum_j a_{i\pi(j)} v_{\pi(j)}$$

    Attention is invariant under a permutation of keys and values. A reshape before the
    transpose mixes tokens with heads, and the order begins to matter.
    """
    adapter, length = script.adapter, script.sizes.k_len
    skip_unless(
        adapter.positions == "none", f"has a positional encoding: {adapter.positions}"
    )
    skip_unless(adapter.window is None, "has a sliding window, so the order matters")
    skip_unless(length > 2 and not adapter.is_pooled, "needs three tokens")
    script.restart()
    # The keys of a second causal attention depend on those before them.
    is_stack = adapter.causal and attends_twice(script)
    skip_unless(not is_stack, "its causal layers order the keys of one another")
    if not (adapter.single_input or adapter.causal):
        args = script.make_arguments()
        order, compared = rotated_order(script, length), slice(None)
    else:
        # The tokens are queries, too: the last one stays, and is compared. A causal
        # query attends to all keys only if it is the last.
        args = script.make_arguments(script.all_allowed(length, length))
        order = [*rotated_order(script, length - 1), length - 1]
        compared = slice(-1, None)
    before = script.call(args)
    inputs = list(args.inputs)
    for role in adapter.key_roles:
        inputs[role] = reorder(script, inputs[role], order)
    after = script.call(replace(args, inputs=tuple(inputs)))
    message = f"{{place}} changes if the keys are reordered to {order}"
    if "pointer" in adapter.designs:
        before = script.assign("y_ordered", f"{before}[..., {order}]")
    with unless_of_pairs(script):
        script.assert_close(before, after, message, l=compared)


@law(assumes=ORDERED)
def query_permutation(script: Script) -> None:
    r"""Each query has its own output, at its own position.

    $$y_i(q_{\pi(1)}, \dots, q_{\pi(n)}) = y(q_{\pi(i)})$$

    Attention is equivariant under a permutation of the queries. A `view` that mixes
    positions and heads exchanges their outputs.
    """
    adapter = script.adapter
    skip_unless(
        adapter.positions == "none", f"has a positional encoding: {adapter.positions}"
    )
    skip_unless(not adapter.causal, "is always causal, so the order matters")
    skip_unless(not adapter.is_pooled, "has one output for all tokens")
    skip_unless(adapter.window is None, "has a sliding window, so the order matters")
    skip_unless(not adapter.mixes_queries, "its queries attend to each other")
    length = script.sizes.k_len if adapter.single_input else script.sizes.q_len
    skip_unless(length > 1, "needs two queries")
    script.restart()
    args = script.make_arguments(script.all_allowed(length))
    together = script.call(args)
    order = rotated_order(script, length)
    query = reorder(script, args.inputs[0], order)
    after = script.call(replace(args, inputs=(query, *args.inputs[1:])))
    before = reorder(script, together, order)
    message = f"{{place}} changes if the queries are reordered to {order}"
    with unless_of_pairs(script):
        script.assert_close(before, after, message)


# Functions, beside layers of convolutions, through which neighbors have influence.
NEIGHBOR_PATTERN = re.compile(
    r"^((?-i:conv\dd)|pad|roll|diff|cumsum|flip)$|pool|fold|interpolate|upsample"
    r"|downsample|fft|shift|sr_ratio|grid_sample",
    re.IGNORECASE,
)


# A division by a sum of weights, behind their softmax.
SECOND_SUM_PATTERN = re.compile(r"/=? *\(?\w*(att|weight|w\b)\w*\.sum\(")
# Numbers of queries and of copies of a key, which are no other size.
QUERIES, KEYS = 11, 13


@law(assumes="gate compression convolution unnormalized linear inverse talking")
def repeated_tokens(script: Script) -> None:
    r"""Copies of a token give what it gives alone.

    $$y(x, x, \dots, x) = y(x)$$

    The mean of equal values is one of them, however many there are. If the weights of
    each pair are shares of its channels, or heads, they add up with each copy. This
    applies if a softmax has an axis of queries and one of keys, and none is over the
    keys. Slots share each token, so that copies add up, unless weights are divided by a
    sum once more: along the slots, that changes nothing.
    """
    adapter, usual = script.adapter, script.sizes
    is_free = not (adapter.fixed_length or adapter.required_mask)
    skip_unless(is_free, "takes one length only, or needs a mask")
    source = source_of(getattr(adapter.target, "forward", adapter.target))
    are_slots = adapter.is_pooled and bool(SECOND_SUM_PATTERN.search(source))
    skip_unless(are_slots or not adapter.is_pooled, "has one output for all tokens")
    others = {"assignment", "decay"} & {*adapter.designs}
    skip_unless(are_slots or script.insist or not others, "adds up what it chooses")
    queries = QUERIES if adapter.cross_attention else KEYS
    script.sizes = replace(usual, q_len=queries, k_len=KEYS)
    script.restart()
    args = make_equal_tokens(script, script.make_arguments())
    try:
        with WeightsRecorder() as recorder:
            together = script.call(args, **at_one_point(script, args))
    except ScriptError as refusal:
        raise NotApplicable(f"does not take {KEYS} tokens: {refusal}") from refusal
    counts = (KEYS,) if adapter.is_pooled else (queries, KEYS)
    are_shares = are_normalized_elsewhere(recorder, counts)
    skip_unless(are_shares, "has no weights that are shares of anything but keys")
    first = adapter.index(l=slice(0, 1))
    inputs = [*args.inputs]
    roles = adapter.key_roles if adapter.cross_attention else range(len(inputs))
    for role in roles:
        inputs[role] = script.assign(inputs[role], f"{inputs[role]}{first}")
    one = replace(args, inputs=tuple(inputs))
    alone = script.call(one, **at_one_point(script, one))
    message = "{place} differs if a token has copies: their weights add up"
    script.assert_close(f"{alone}{first}", f"{together}{first}", message)


def at_one_point(script: Script, args: CallArguments) -> dict[str, str]:
    """The coordinates of tokens, if it takes some, made equal."""
    sized = script.sized_arguments(args, 0, [*args.inputs])
    return {name: f"0 * {text}" for name, text in sized.items() if "float()" in text}


def are_normalized_elsewhere(
    recorder: WeightsRecorder, lengths: tuple[int, ...]
) -> bool:
    """Whether weights have axes of these lengths, and none are shares of keys."""
    wanted = Counter(lengths)
    found = [(weights.shape, dim) for weights, dim in recorder.found]
    is_of_pairs = any(not wanted - Counter(shape) for shape, _ in found)
    return is_of_pairs and not any(shape[dim] == lengths[-1] for shape, dim in found)


@law(assumes="positions decay compression window selection gate")
def beside_convolution(script: Script) -> None:
    r"""Beside a convolution whose kernels are zero, tokens are in no order.

    $$W = 0 \;\Rightarrow\; y_i(x_{\pi(1)}, \dots, x_{\pi(n)}) = y_{\pi(i)}(x)$$

    A convolution gives neighbors an influence of their own, so that attention beside it
    depends on the order of its tokens. Without it, this is attention as any other, and
    a reshape that mixes channels with pixels shows.
    """
    adapter, length = script.adapter, script.sizes.k_len
    skip_unless("convolution" in adapter.designs, "has no convolution")
    skip_unless(adapter.positions == "none", "has a positional encoding")
    is_plain = adapter.single_input and not (adapter.causal or adapter.is_pooled)
    skip_unless(is_plain and adapter.is_module, "is no self-attention without order")
    skip_unless(length > 2 and not adapter.fixed_length, "needs three tokens")
    found = structure.identifiers(script.adapter.target)
    others = sorted(filter(NEIGHBOR_PATTERN.search, found))
    skip_unless(not others, f"its code has `{', '.join(others)}`")
    script.restart()
    script.exec_line("silence_convolutions(attention)")
    args = script.make_arguments(script.all_allowed(length))
    with CalledFunctions() as functions:
        together = script.call(args)
    skip_unless("arange" not in functions.found, "its call counts positions")
    order = [*range(1, length), 0]
    after = script.call(replace(args, inputs=(reorder(script, args.inputs[0], order),)))
    before = reorder(script, together, order)
    message = f"{{place}} changes if the tokens are reordered to {order}"
    script.assert_close(before, after, message)


@law(assumes="convolution latents sampling selection monotonic assignment")
def query_independence(script: Script) -> None:
    r"""Each query has the same output, whichever other queries are given.

    $$y(q_1, \dots, q_n)_i = y(q_m, \dots, q_n)_i$$

    Other queries are replaced, and then left out, as during generation. A softmax over
    the wrong axis normalizes across them; a path of its own for one query, or for as
    many queries as keys, may compute something else. With a positional encoding, the
    positions of the queries may be counted from the first key or from the last, but in
    each call alike.
    """
    adapter, q_len = script.adapter, script.sizes.q_len
    skip_unless(not adapter.single_input, "takes no queries of their own")
    skip_unless(not adapter.one_length, "takes as many queries as keys, in blocks")
    skip_unless(not adapter.mixes_queries, "its queries attend to each other")
    skip_unless(not edge_argument(adapter), "its queries are the nodes of a graph")
    sees_own = not documented.leaves_out_own(adapter.target)
    skip_unless(sees_own, "a query does not see the key of its place")
    skip_unless(q_len > 1, "needs two queries")
    script.restart()
    args = script.make_arguments()
    before = script.call(args)
    for query in (0, q_len - 1):
        with script.rollback():
            others = script.random_tensor(
                "query", *script.evaluate(args.inputs[0]).shape
            )
            index = adapter.index(l=slice(query, query + 1))
            script.exec_line(f"{others}{index} = {args.inputs[0]}{index}")
            after = script.call(replace(args, inputs=(others, *args.inputs[1:])))
            message = "{place} depends on other queries"
            script.assert_close(before, after, message, l=[query])
    for count in sorted({1, q_len - 1}) if adapter.fixed_length is None else ():
        parts = range(count), range(q_len - count, q_len)
        if adapter.cross_attention:
            assert_part_is_equal(script, *parts)
        elif adapter.positions == "none" and not adapter.causal:
            with script.attempt():  # it may need as many queries as keys
                assert_part_is_equal(script, *parts)
    has_no_positions = adapter.positions == "none" and adapter.cross_attention
    if has_no_positions and q_len > script.sizes.k_len:
        # Queries may be computed in blocks, whose number must not be that of the keys'.
        script.sizes = replace(script.sizes, q_len=MANY)
        with script.attempt():  # more than its tables have positions
            assert_part_is_equal(script, range(MANY - 2, MANY), range(2))


@law(
    slow=True,
    assumes="features gate decay convolution group_norm selection cloud tied "
    "assignment",
)
def key_independence(script: Script) -> None:
    r"""The key of a token has influence on the scores of this key only.

    $$\frac{\partial}{\partial k_m} \ln \frac{a_{ij}}{a_{ij'}} = 0 \quad \text{for } m
    \neq j, j'$$

    This holds for the query of the same token, too, which the output cannot show. Where
    queries and keys are exchanged, or where a term of the keys, such as their products
    with relative positions, is not transposed before it is added, keys have influence
    on the row of their own query. The key of token 3 is reversed behind its projection.
    """
    adapter, token = script.adapter, 3
    skip_unless(adapter.is_module, "is a function, and has no projections")
    skip_unless(not adapter.is_pooled, "has one output for all tokens")
    length = adapter.fixed_length or 6  # which is no window of both sides
    skip_unless(length > token and not adapter.image, "needs a row of four tokens")
    script.sizes = replace(script.sizes, batch_size=1, q_len=length, k_len=length)
    assert_in_float64(script, partial(assert_key_is_independent, script, token))


def assert_key_is_independent(script: Script, token: int) -> None:
    """The key of a token changes no ratio of two other weights."""
    length = script.sizes.k_len
    script.restart()
    width = script.sizes.heads * script.sizes.d_k
    layers = structure.layers_by_role(script.evaluate("attention"), width, True)
    skip_unless({"query", "key"} <= {*layers}, "has no projection for keys alone")
    args = script.make_arguments(script.all_allowed(length, length))
    before = record_weights(script, args)
    skip_unless(before, "its weights are neither returned nor those of a softmax")
    layer = f"attention.get_submodule({layers['key']!r})"
    script.exec_line(f"reverse_token({layer}, {token}, {length})")
    after = record_weights(script, args)
    # Each query has the first key in its past.
    rest = [n for n in range(length) if n != token]
    message = f"the ratio of two other weights changes with the key of token {token}"
    assert_shares_equal(script, (before, after), f"[..., {rest}]", message)


def assert_part_is_equal(script: Script, part: range, other: range) -> None:
    """A part of new queries has the same outputs without the others."""
    script.restart()
    args = script.make_arguments()
    assert_equal_in_part(script, args, script.call(args), part, other)


def assert_equal_in_part(
    script: Script, args: CallArguments, together: str, part: range, other: range
) -> None:
    """Some of the queries give the same outputs as among all.

    With positions, which may be counted from the first key or from the last, it is
    enough if the other part does. Its code may tell of positions that are not known.
    """
    adapter = script.adapter
    try:
        assert_equal_without_others(script, args, together, part)
    except LawViolation:
        if adapter.positions == "none" and "positions" not in adapter.designs:
            raise
        assert_equal_without_others(script, args, together, other)


def assert_equal_without_others(
    script: Script, args: CallArguments, together: str, queries: range
) -> None:
    """Some of the queries give the same outputs as they give among all."""
    with script.rollback():
        query = reorder(script, args.inputs[0], [*queries])
        allowed = args.allowed[[*queries]]
        inputs = (query, *args.inputs[1:])
        mask = script.encode_mask(allowed)
        alone = script.call(CallArguments(inputs, mask, allowed))
        among_all = reorder(script, together, [*queries])
        message = f"{{place}} changes if only {len(queries)} of the queries are given"
        script.assert_close(among_all, alone, message)


@law(slow=True)
def pairs_of_queries(script: Script) -> None:
    r"""Features of a pair have influence on the query of the pair only.

    $$\partial y_m / \partial e_{ij} = 0 \quad \text{for } m \neq i$$

    They add a bias to its score, or gate its weight. If their two axes are exchanged
    when the heads are moved to the front, all shapes are right, and the feature of
    query $i$ and key $j$ meets query $j$. This is tested where the documentation says
    which axis is that of the queries: conventions for the edges of a graph differ.
    """
    adapter = script.adapter
    pairs = [
        name
        for name, text in adapter.extra_args.items()
        if text.endswith("{length}, {length}, -1)")
    ]
    skip_unless(pairs, "takes no features of pairs")
    is_stated = documented.has_pairs_of_queries(adapter.target)
    skip_unless(is_stated, "does not say which features of pairs are of a query")
    for name in pairs:
        script.restart()
        args = script.make_arguments()
        before = script.call(args)
        given = script.sized_arguments(args, 0, [*args.inputs])[name]
        changed = script.assign("pairs", f"{given}.clone()")
        script.exec_line(f"{changed}[:, 0] += 1 + {changed}[:, 0].cumsum(1)")
        after = script.call(args, **{name: changed})
        message = f"{{place}} depends on the `{name}` of another query"
        script.assert_close(before, after, message, l=slice(1, None))


# Queries that fill more than two blocks of 64.
MANY = 130


@law
def sliding_window(script: Script) -> None:
    r"""With a window of $w$, a query attends to keys at distances less than $w$.

    $$a_{ij} = 0 \iff |i - j| \ge w$$

    A window off by one passes every test of shapes. Both edges are tested: the key just
    outside must have no influence, and the key just inside must have one. If a number
    of future tokens is an argument, such as `right_context`, the last one is seen. If
    only chunks on the left are counted, as by `num_left_chunks`, those on the right
    have no influence.
    """
    adapter = script.adapter
    assert_sees_ahead(script)
    assert_later_chunks_are_unseen(script)
    width = adapter.window
    if width is None:
        raise NotApplicable("`window` is not given")
    length = max(script.sizes.k_len, width + 1)
    script.sizes = replace(script.sizes, q_len=length, k_len=length)
    allowed = script.all_allowed(length, length)
    for mode in script.modes():
        script.restart(mode)
        args = script.make_arguments(allowed)
        before = script.call(args)
        for key in range(length):
            with script.rollback():
                after = script.call(script.perturb(args, l=slice(key, key + 1)))
                outside = [i for i in range(length) if abs(i - key) >= width]
                message = (
                    f"{{place}} depends on key {key}, outside its window of {width}"
                )
                script.assert_close(before, after, message, l=outside)

        # The farthest past key that is still inside, for each query that has one.
        for query in range(width - 1, length):
            edge = query - width + 1
            with script.rollback():
                after = script.call(script.perturb(args, l=slice(edge, edge + 1)))
                index = adapter.index(l=slice(query, query + 1))
                message = (
                    f"query {query} does not attend to key {edge}, inside its window "
                    f"of {width}"
                )
                script.assert_true(
                    f"not torch.equal({after}{index}, {before}{index})", message
                )


def assert_later_chunks_are_unseen(script: Script) -> None:
    """Where chunks on the left are counted, and none on the right, those are hidden."""
    adapter = script.adapter
    if not adapter.is_module:
        return
    script.restart()
    size = structure.chunk_with_left_context(script.evaluate("attention"))
    names_of = names.parameters_by_name(adapter.target)
    looks_ahead = any(map(names.AHEAD_PATTERN.fullmatch, names_of))
    is_sequence = adapter.single_input and not adapter.image
    if not size or looks_ahead or not is_sequence or adapter.fixed_length is not None:
        return
    if documented.gets_one_chunk(adapter.target):
        return  # whatever its length is
    length = 3 * size
    with script.using(batch_size=1, q_len=length, k_len=length), script.attempt():
        script.restart()
        args = script.make_arguments(script.all_allowed(length, length))
        before = script.call(args)
        after = script.call(script.perturb(args, l=slice(size, None)))
        message = f"{{place}}, in the first chunk of {size}, depends on later ones"
        script.assert_close(before, after, message, l=slice(0, size))


def assert_sees_ahead(script: Script) -> None:
    """Built to see two tokens behind its own, a token sees two.

    Nothing is tested in chunks, the last token of which sees fewer, or where several
    attentions, or a convolution, add up what they see.
    """
    adapter, length, ahead = script.adapter, AHEAD_TOKENS, 2
    sizes = names.constructor_sizes(adapter.target, {})
    found = [*filter(names.AHEAD_PATTERN.fullmatch, sizes)]
    if not found or not adapter.single_input or adapter.image:
        return
    script.restart()
    if attends_twice(script) or "convolution" in adapter.designs:
        return
    for argument in found:
        init_args = {**adapter.init_args, argument: str(ahead)}
        further = replace(adapter, init_args=init_args)
        # The argument may be of another kind.
        with script.using(further, q_len=length, k_len=length), script.attempt():
            script.restart()
            args = script.make_arguments(script.all_allowed(length, length))
            before = script.call(args)
            farthest = {}
            for key in range(4, length):
                after = script.call(script.perturb(args, l=slice(key, key + 1)))
                changed = f"({after} != {before})"
                others = tuple(
                    n for n, axis in enumerate(adapter.layout) if axis != "l"
                )
                seen = script.evaluate(f"{changed}.sum({others}).nonzero()[0].item()")
                farthest[key] = key - seen
            distances = {*farthest.values()}
            message = (
                f"with `{argument}={ahead}`, a token sees {min(distances)} tokens ahead"
            )
            if len(distances) == 1:
                script.assert_true(f"{min(distances)} == {ahead}", message)
