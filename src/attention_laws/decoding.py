r"""# Laws of decoding

A language model generates one token at a time, and the keys and values of those before
come from a KV cache. Whatever the pieces in which a sequence comes, its outputs are
those of the whole: with padding, after the batch items are reordered, beyond a window,
with other sequences in between, and in the gradients of new tokens.

Source: [Transformer-XL](https://arxiv.org/abs/1901.02860), Dai et al. 2019, section
3.2, for a memory of earlier segments; [Efficiently Scaling Transformer
Inference](https://arxiv.org/abs/2211.05102), Pope et al. 2022, section 2, for prefill
and decoding.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from attention_laws import caches, documented, names, structure
from attention_laws.adapter import Adapter, MaskArgument, without_future
from attention_laws.cached_calls import (
    call_with_cache,
    empty_cache,
    flip_cache,
    owned_tensors,
    restart_with_cache,
    takes_in_steps,
)
from attention_laws.context_caches import (
    assert_equal_with_context_cache,
    assert_other_context_is_noticed,
    assert_prepared_memory_is_kept,
    reorder_context_cache,
)
from attention_laws.law import (
    LawViolation,
    NotApplicable,
    ScriptError,
    law,
    skip_unless,
)
from attention_laws.positions import FAR, ratio_tolerance
from attention_laws.prepared import is_prepared
from attention_laws.rounding import rounds_with_buffers
from attention_laws.script import (
    CallArguments,
    Script,
    find_output,
    parts_of,
)


@law
def incremental_decoding(script: Script) -> None:
    r"""A sequence in pieces gives the same outputs as in one.

    $$y(x_{1 \dots n}) = \left[\, y(x_{1 \dots m}),\; y(x_{m+1 \dots n} \mid x_{1 \dots
    m}) \,\right]$$

    During generation, past keys and values come from the KV cache, and only new tokens
    are queries. The causal mask must then be aligned to the *last* key (bottom right):
    aligned to the first (top left), new queries see fewer keys the longer the past is.
    Nor may what is cached depend on the lengths of the pieces, or on other sequences
    that are decoded in turn. A method that reorders the batch items of a cache has to
    reorder all that it holds, such as the padding. What the documentation says that
    later calls of cross-attention do not need has to be in the cache, and after a reset
    there is nothing of an earlier context. Tokens that a full cache has dropped are not
    counted, nor those that were rejected; sequences in slots begin at other times.
    Chunks of a stream, each of which sees some before it or none, are pieces, too, and
    padding that their state marks stays hidden from later ones. A memory of past tokens
    has no gradient by intention; the new tokens keep theirs.
    """
    adapter, length = script.adapter, script.sizes.k_len
    skip_unless(length > 1, "needs two tokens")
    kept = names.context_length(adapter.target)
    if adapter.cache is not None and 1 < kept < length:  # what is older is left out
        script.sizes = replace(script.sizes, q_len=kept, k_len=kept)
    if adapter.cache is not None and not adapter.causal:
        assert_last_token_is_decoded(script)
        return
    if adapter.cache is not None:
        decode_in_all_ways(script)
        return
    skip_unless(not may_mix_tokens(script), "its code has a convolution, and no state")
    if assert_chunks_continue(script):
        return
    if adapter.context_cache:
        assert_equal_with_context_cache(script)
        reorder_context_cache(script)
        if adapter.empty_cache == "dict()":  # the caller has others for each context
            assert_other_context_is_noticed(script)
        return
    if is_prepared(adapter.target):
        assert_prepared_memory_is_kept(script)
        return
    if adapter.memory:
        if adapter.memory_maker.endswith("[0])"):  # one for all batch items
            script.sizes = replace(script.sizes, batch_size=1)
        for first in range(1, length):
            assert_equal_after_memory(script, first)
        assert_gradients_after_memory(script)
        script.sizes = replace(script.sizes, batch_size=1, q_len=LONG, k_len=LONG)
        with script.attempt():  # longer than its tables
            assert_equal_after_memory(script, 5, "no_grad")
        return
    assert_new_queries_continue(script)


# Methods beside `forward` that take a chunk of a stream, and how many are seen before.
CHUNK_METHOD_PATTERN = re.compile(r"(forward|process|encode|decode|step)_?chunk")
LEFT_PATTERN = re.compile(r"((num|n)_)?left_(chunks?|context(_size)?|frames)")


def assert_chunks_continue(script: Script) -> bool:
    """Chunks of a stream have the outputs of the whole, however much is seen before.

    That is tested if they do by default. Returns whether it applies.
    """
    adapter = script.adapter
    target = adapter.target
    methods = [
        (name, parameter.name)
        for name in filter(CHUNK_METHOD_PATTERN.fullmatch, dir(target))
        for parameter in names.parameters_of_method(target, name)
        if names.CACHE_PATTERN.match(parameter.name)
    ]
    if not methods or not isinstance(target, type) or not adapter.single_input:
        return False
    limits = [*filter(LEFT_PATTERN.fullmatch, inspect.signature(target).parameters)]
    script.restart()
    size = structure.chunk_with_left_context(script.evaluate("attention"))
    if not size or not limits:
        return False
    agree = False
    # It may need something else.
    with script.using(q_len=4 * size, k_len=4 * size), script.attempt():
        whole, seen = compute_chunks(script, *methods[0], size)
        agree = bool(script.evaluate(f"torch.allclose({whole}, {seen}, atol=1e-4)"))
        for number in (0, 1, 3) if agree else ():
            given = {**adapter.init_args, limits[0]: str(number)}
            script.adapter = replace(adapter, init_args=given)
            whole, seen = compute_chunks(script, *methods[0], size)
            option = f"`{limits[0]}={number}`"
            message = f"{{place}} differs in chunks of {size}, with {option}"
            script.assert_close(whole, seen, message)
    return agree


def compute_chunks(
    script: Script, method: str, argument: str, size: int
) -> tuple[str, str]:
    """The output of the whole, and that of chunks, which get the cache of the last."""
    adapter = script.adapter
    script.restart()
    args = script.make_arguments()
    whole, cache = script.call(args), "None"
    outputs = []
    for start in range(0, script.sizes.k_len, size):
        index = adapter.index(l=slice(start, start + size))
        chunk = script.assign("x", f"{args.inputs[0]}{index}")
        call = f"attention.{method}({chunk}, {argument}={cache})"
        name = script.assign("result", call)
        result = script.evaluate(name)
        found = find_output(result, script.evaluate(chunk), adapter) or ""
        outputs.append(script.assign("y", f"{name}{found}"))
        others = [f"{name}{each}" for each in parts_of(result) if each != found]
        cache = others[0] if others else "None"
    return whole, script.concatenate(*outputs)


def assert_new_queries_continue(script: Script) -> None:
    """Without a cache, new queries attend to all keys as they do among all queries."""
    adapter, length = script.adapter, script.sizes.k_len
    for first in range(1, length):
        # An attention without a cache can be given new queries and all keys.
        skip_unless(
            not adapter.single_input and not adapter.causal, "`cache` is not given"
        )
        allowed = without_future(script.all_allowed(length, length))
        # A flag says nothing of the past, unless the documentation does.
        moves = documented.aligns_ends(adapter.target)
        masks = [
            mask
            for mask in script.masks_for(allowed)
            if mask
            and (mask.can_express(allowed[first:]) or (mask.kind == "causal" and moves))
        ]
        skip_unless(
            masks and adapter.cross_attention,
            "has no mask for new queries and past keys",
        )
        skip_unless(not adapter.mixes_queries, "its queries attend to each other")
        for mask in masks:
            script.restart()
            args = script.make_arguments(allowed, mask)
            whole = script.call(args)
            rest = adapter.index(l=slice(first, None))
            query = script.assign("query", f"{args.inputs[0]}{rest}")
            inputs = (query, *args.inputs[1:])
            is_flag = mask.kind == "causal"
            encoded = (mask.name, "True") if is_flag else None
            encoded = encoded or script.encode_mask(allowed[first:], mask)
            piece = script.call(CallArguments(inputs, encoded, allowed))
            whole = script.assign("y", f"{whole}{rest}")
            message = f"{{place}} differs after a call with the first {first} tokens"
            try:
                script.assert_close(whole, piece, message)
            except LawViolation:
                # Queries without their past may be at the first positions by intention.
                known = adapter.positions == "none"
                skip_unless(known, "the positions of new queries are not known")
                raise


def decode_in_all_ways(script: Script) -> None:
    """Decode with a KV cache as a generation, a beam search and a server do."""
    skip_unless(not is_quantized(script), "its cache is rounded to integers")
    decode_in_pieces(script)
    decode_with_padding(script)
    assert_padding_stays_hidden(script)
    reorder_cache(script)
    decode_in_turns(script)
    decode_in_slots(script)
    decode_in_freed_slot(script)
    assert_sequence_begins_anew(script)
    decode_after_reset(script)
    assert_reset_forgets_context(script)
    assert_new_cache_sees_context(script)
    decode_after_rejection(script)
    decode_after_unequal_rejection(script)
    decode_with_fork(script)
    if script.sizes.batch_size <= 2:  # two of the sizes are enough
        decode_many(script)
    decode_beyond_limit(script)
    assert_usual_calls_ignore_cache(script)
    assert_dropped_tokens_do_not_count(script)
    if script.sizes.batch_size == 1:  # one of the sizes is enough
        decode_across_blocks(script)
        decode_in_half(script)
    if script.adapter.single_input:
        with script.attempt():  # it may write its cache in place, for inference
            assert_pieces_have_gradients(script)


# Methods of a cache that give an independent one of the same tokens.
FORK_PATTERN = re.compile(r"fork|clone|copy|split_off|snapshot")


def decode_with_fork(script: Script) -> None:
    """Tokens that continue the fork of a cache have no influence on the first one.

    Buffers that both share are overwritten by the other.
    """
    length = script.sizes.k_len
    if length < 3 or script.adapter.single_from == 0:
        return
    restart_with_cache(script)
    args, other = script.make_arguments(), script.make_arguments()
    last = script.adapter.index(l=slice(length - 1, None))
    whole = script.assign("y", f"{script.call(args)}{last}")
    _first, cache = call_with_cache(script, args, 0, length - 2, empty_cache(script))
    kind = type(script.evaluate(cache))
    methods = [*filter(FORK_PATTERN.fullmatch, dir(kind))]
    if not methods or kind.__module__ != script.adapter.target.__module__:
        return
    fork = script.assign("fork", f"{cache}.{methods[0]}()")
    _next, cache = call_with_cache(script, args, length - 2, 1, cache)
    call_with_cache(script, other, length - 2, 1, fork)
    seen, _cache = call_with_cache(script, args, length - 1, 1, cache)
    message = (
        f"{{place}} differs if other tokens continue `{methods[0]}()` of its cache"
    )
    script.assert_close(whole, seen, message)


def decode_beyond_limit(script: Script) -> None:
    """The last piece has the outputs of the whole, which is longer than a limit.

    So it has where the documentation says it. Frequencies that depend on the length are
    then those of all tokens so far, also for keys in the cache.
    """
    adapter = script.adapter
    if not documented.decodes_alike(adapter.target):
        return
    for argument in names.length_limits(adapter.target):
        init_args = {**adapter.init_args, argument: "4"}
        limited = replace(adapter, init_args=init_args)
        # A limit may be one.
        with script.using(limited, q_len=8, k_len=8), script.attempt():
            restart_with_cache(script)
            args = script.make_arguments()
            last = adapter.index(l=slice(5, None))
            whole = script.assign("y", f"{script.call(args)}{last}")
            outputs, _cache = decode(script, args, [3, 2, 3])
            message = f"{{place}} behind a cache differs beyond `{argument}=4`"
            script.assert_close(whole, outputs[-1], message)


def assert_usual_calls_ignore_cache(script: Script) -> None:
    """Without the flag that turns on a stored cache, a call does not depend on it."""
    adapter = script.adapter
    are_flags = {*adapter.cache_args.values()} == {"True"}
    if adapter.cache != ("", "") or adapter.decode_method or not are_flags:
        return
    restart_with_cache(script)
    args = script.make_arguments()
    before = script.call(args)
    with script.attempt():  # it may need another shape
        call_with_cache(script, args, 0, 2, empty_cache(script))
        after = script.call(args)
        message = "{place} changes after other tokens were stored in the cache"
        script.assert_close(before, after, message)


def is_quantized(script: Script) -> bool:
    """Whether the cache has integers of 8 bits, which are no exact numbers."""
    restart_with_cache(script)
    args = script.make_arguments(script.all_allowed(2, 2))
    try:
        _output, cache = call_with_cache(script, args, 0, 1, empty_cache(script))
    except ScriptError:
        return False  # the law shows why
    owners = [*map(script.evaluate, (cache, "attention"))]
    return any(tensor.dtype == torch.int8 for tensor in owned_tensors(owners))


def may_mix_tokens(script: Script) -> bool:
    """Whether a convolution may mix tokens beside the attention."""
    return "convolution" in script.adapter.designs and not script.insist


def decode_in_pieces(script: Script) -> None:
    """Decode pieces of several lengths, and two pieces in other modes.

    A cache may be without the last tokens of a convolution by intention: then no pieces
    give the outputs of the whole. Where some do, all have to.
    """
    assert script.adapter.cache is not None
    lengths = [*piece_lengths(script.sizes.k_len)]
    if may_mix_tokens(script):
        is_kept = any(pieces_agree(script, pieces) for pieces in lengths)
        skip_unless(is_kept, "its cache is without the state of its convolution")
    for pieces in lengths:
        decode_with_cache(script, pieces)
    half = script.sizes.k_len // 2
    two = [half, script.sizes.k_len - half]
    decode_with_cache(script, two, "no_grad")
    assert_pieces_leave_whole(script)
    # A KV cache may be left out in training, but not a memory.
    if MEMORY_PATTERN.search(script.adapter.cache[0]) and "train" in script.modes():
        decode_with_cache(script, two, "train")


def assert_pieces_leave_whole(script: Script) -> None:
    """A module that has decoded tokens one by one gives the whole as a new one.

    It has not seen so many tokens at once: a table that is stored for the number of
    keys is then that of one query.
    """
    assert script.adapter.cache is not None
    length = script.sizes.k_len
    if script.adapter.cache == ("", ""):
        return  # each sequence begins with a new copy
    script.restart()
    script.exec_line("fresh = copy.deepcopy(attention)")
    args = script.make_arguments(script.all_allowed(length, length))
    expected = script.call(args, function="fresh")
    decode(script, args, [1] * length)
    message = "{place} differs in a module that has decoded the tokens one by one"
    script.assert_close(expected, script.call(args), message)


# Names of caches that pass no gradient on, but are used in training.
MEMORY_PATTERN = re.compile(r"mem|segment|recurren")


def pieces_agree(script: Script, pieces: list[int]) -> bool:
    """Whether pieces give the same outputs as the whole."""
    whole, outputs, *_ = compute_pieces(script, pieces, "eval")
    joined = script.concatenate(*outputs)
    return bool(script.evaluate(f"torch.allclose({whole}, {joined}, atol=1e-4)"))


def assert_last_token_is_decoded(script: Script) -> None:
    """The last token attends to all tokens, in an attention that is not causal, too.

    What is cached may be a context by intention: then nothing is tested. It is not if
    it holds the tokens, and is documented to be what was before.
    """
    assert script.adapter.cache is not None
    try:
        decode_with_cache(script, [script.sizes.k_len - 1, 1])
    except LawViolation:
        if documented.precedes(script.adapter.target, script.adapter.cache[0]):
            if holds_tokens(script):
                raise
        raise NotApplicable("its cache is not of the tokens so far") from None
    if names.context_length(script.adapter.target) >= script.sizes.k_len:
        # They may come from several pieces, and not from the one before only.
        decode_with_cache(script, [1] * script.sizes.k_len)
    decode_with_padding(script)
    assert_padding_stays_hidden(script)
    reorder_cache(script)
    assert_dropped_tokens_do_not_count(script)


def holds_tokens(script: Script) -> bool:
    """Whether the tensors of the cache are as long as the first piece."""
    length, shapes = script.sizes.k_len, list[list[torch.Size]]()
    restart_with_cache(script)
    args = script.make_arguments(script.all_allowed(length, length))
    for count in (length - 1, length):
        _output, cache = call_with_cache(script, args, 0, count, empty_cache(script))
        tensors = owned_tensors([script.evaluate(cache)])
        shapes.append([tensor.shape for tensor in tensors])
    grown = [
        {sizes for sizes in zip(*pair, strict=False) if sizes[0] != sizes[1]}
        for pair in zip(*shapes, strict=False)
    ]
    return bool(grown) and all(sizes == {(length - 1, length)} for sizes in grown)


def assert_equal_after_memory(script: Script, first: int, mode: str = "eval") -> None:
    """The last tokens give the same outputs if those before are given as memory."""
    length = script.sizes.k_len
    script.restart(mode)
    args = script.make_arguments(script.all_allowed(length, length))
    whole = script.call(args)
    (tokens,) = args.inputs
    past, rest = (
        script.adapter.index(l=each) for each in (slice(first), slice(first, None))
    )
    token = script.assign("token", f"{tokens}{rest}")
    last = replace(args, inputs=(token,), mask=None)
    memory = script.adapter.memory_maker.format(f"{tokens}{past}")
    piece = script.call(last, **{script.adapter.memory: memory})
    whole = script.assign("y", f"{whole}{rest}")
    message = f"{{place}} differs if the first {first} tokens are given as memory"
    script.assert_close(whole, piece, message)


def assert_gradients_after_memory(script: Script) -> None:
    """The gradients of the last tokens are the same with those before as memory.

    A memory receives none, but the tokens that are concatenated with it do.
    """
    script.restart()
    first = script.sizes.k_len // 2
    joined, past, rest, whole = call_with_gradients_of_rest(script, first)
    last = replace(joined, inputs=(rest,), mask=None)
    memory = script.adapter.memory_maker.format(past)
    piece = script.call(last, **{script.adapter.memory: memory})
    message = f"the gradient at {{place}} differs with {first} tokens as memory"
    assert_gradients_equal(script, (whole, piece), rest, message)


def call_with_gradients_of_rest(
    script: Script, first: int
) -> tuple[CallArguments, str, str, str]:
    """Call with a sequence in which only the tokens after the `first` have a gradient.

    Returned are the arguments, the tokens of both parts, and the output of the rest.
    """
    length = script.sizes.k_len
    args = script.make_arguments(script.all_allowed(length, length))
    parts = [
        script.adapter.index(l=half) for half in (slice(first), slice(first, None))
    ]
    past, rest = (script.assign("x", f"{args.inputs[0]}{each}") for each in parts)
    script.exec_line(f"{rest}.requires_grad_()")
    joined = replace(args, inputs=(script.concatenate(past, rest),))
    return joined, past, rest, script.assign("y", f"{script.call(joined)}{parts[1]}")


def assert_gradients_equal(
    script: Script, outputs: tuple[str, str], name: str, message: str
) -> None:
    """Two outputs have the same gradient with respect to a variable."""
    one, other = (script.gradient(each, name) for each in outputs)
    script.assert_close(one, other, message, relative=ratio_tolerance(script))


def piece_lengths(length: int) -> Iterator[list[int]]:
    """Two pieces, pieces of unequal lengths, and single tokens."""
    yield from ([first, length - first] for first in range(1, length))
    if length > 3:
        yield [2, 1, length - 3]
        yield [1, length - 2, 1]
    if length > 2:
        yield [1] * length


def decode_many(script: Script) -> None:
    """Decode more tokens than fit into a window, so that the oldest are dropped.

    The positions of the others are not those in the cache, and a ring buffer may begin
    at any of its places. Pieces of several tokens were right before it is full, so they
    have to be right then: each query still sees the keys of its own window, some of
    which the piece itself displaces. A ring buffer may take no longer ones. A memory
    may be shorter by intention.
    """
    adapter = script.adapter
    assert adapter.cache is not None
    width = adapter.window or 8
    length = 2 * width + 7
    is_memory = MEMORY_PATTERN.search(adapter.cache[0])
    with script.using(q_len=length, k_len=length):
        with script.attempt():  # longer than its cache
            if not is_memory or cache_grows(script, length - 1):
                for first in (width + 1, width + 2):
                    decode_with_cache(script, [first, *[1] * (length - first)])
                decode_with_cache(script, [width + 1, 2, 3, *[1] * (width + 1)])
                if cache_grows(script):
                    decode_with_cache(script, [width + 1, 2, width, 1, 3])
            return
        with script.attempt():  # it may take no longer streams
            assert_pieces_agree(script)


def assert_pieces_agree(script: Script) -> None:
    """A stream that is longer than one call may be gives the same in other pieces."""
    pieces = [1, 3, 2] * (script.sizes.k_len // 6)
    length = sum(pieces)
    restart_with_cache(script)
    args = script.make_arguments(script.all_allowed(length, length))
    outputs, others = (
        script.concatenate(*decode(script, args, lengths)[0])
        for lengths in ([1] * length, pieces)
    )
    message = "{place} differs if the tokens come in pieces of 1, 3 and 2, and not of 1"
    script.assert_close(outputs, others, message)


def assert_dropped_tokens_do_not_count(script: Script) -> None:
    """Tokens that a cache has dropped, and that have no influence, are not counted.

    With positions relative to one another, the last token has the same output without
    them. Counted from the start of the cache, as rotary positions may be, all new
    tokens would have the same position once it is full.
    """
    if script.adapter.positions not in ("none", "rotary", "relative", "alibi"):
        return
    with script.attempt():  # longer than its cache
        if number := pieces_in_cache(script):
            length = PIECE * (2 + number + 1)
            with script.using(q_len=length, k_len=length):
                assert_equal_without_first(script, 2)


def pieces_in_cache(script: Script) -> int:
    """How many pieces a cache holds before it drops the first; 0 if it drops none."""
    with script.using(q_len=MANY, k_len=MANY):
        restart_with_cache(script)
        args = script.make_arguments(script.all_allowed(MANY, MANY))
    cache = empty_cache(script)
    totals: list[int] = []
    for start in range(0, MANY, PIECE):
        _output, cache = call_with_cache(script, args, start, PIECE, cache)
        totals.append(size_of_cache(script, cache))
    is_full = totals[0] < totals[-2] == totals[-1]
    return totals.index(totals[-1]) + 1 if is_full else 0


def assert_equal_without_first(script: Script, count: int) -> None:
    """The last piece is the same without the first ones if it sees none of them."""
    length, first = script.sizes.k_len, count * PIECE
    pieces = [PIECE] * (length // PIECE)
    restart_with_cache(script)
    args = script.make_arguments(script.all_allowed(length, length))
    last = decode(script, args, pieces)[0][-1]
    changed = script.perturb(args, l=slice(first))
    other = decode(script, changed, pieces)[0][-1]
    if not script.evaluate(f"torch.allclose({last}, {other}, atol=1e-6)"):
        return  # a state keeps more than the cache
    index = script.adapter.index(l=slice(first, None))
    rest = tuple(script.assign(name, f"{name}{index}") for name in args.inputs)
    alone = decode(script, replace(args, inputs=rest), pieces[count:])[0][-1]
    message = f"{{place}} differs without the first {first} of {length} tokens"
    script.assert_close(alone, last, f"{message}, which the cache has dropped")


def decode_across_blocks(script: Script) -> None:
    """Decode a few tokens where a block of the cache is full, and many at once.

    A cache that is allocated in blocks is copied there to a larger one. Blocks of
    queries, of which a piece has several, begin behind the tokens in the cache. A
    memory may be shorter by intention.
    """
    adapter = script.adapter
    assert adapter.cache is not None
    is_short = adapter.window or MEMORY_PATTERN.search(adapter.cache[0])
    if is_short or {"window", "sink", "compression", "selection"} & {*adapter.designs}:
        return
    for full in BLOCKS:
        length = full + 3
        # Longer than its cache.
        with script.using(batch_size=1, q_len=length, k_len=length), script.attempt():
            decode_with_cache(script, [full - 2, 1, 1, 1, 2])
            decode_with_cache(script, [3, full])


# Tokens of which those behind a memory are more than a block of queries.
LONG = 140
# Tokens of which a cache of limited length may have dropped the first, and those of a
# piece of them.
MANY, PIECE = 48, 4
# Tokens that fill a block of a cache.
BLOCKS = (64, 128, 256)


def decode_in_half(script: Script) -> None:
    """In bfloat16, pieces give the outputs of the whole within a tenth.

    Positions beyond 256 have to be counted in integers. A cache that was allocated in
    float32 does not fit to the new keys, which only `only` reports.
    """
    half = torch.bfloat16
    if {"features", "linear", "decay", "selection"} & {*script.adapter.designs}:
        return  # sums over all tokens have rounding errors of their own
    length = script.sizes.k_len
    try:
        with script.using(dtype=half):
            assert_half_pieces_are_close(script, length // 2)
        with script.using(q_len=FAR, k_len=FAR):
            agree = False
            with script.attempt():  # longer than its cache
                has_positions = script.adapter.positions != "none"
                agree = has_positions and pieces_agree(script, [FAR - 3, 3])
            if agree:
                try:
                    with script.using(dtype=half):
                        assert_half_pieces_are_close(script, FAR - 3)
                except LawViolation:
                    # The law `distant_positions` reports it.
                    if script.insist or not rounds_with_buffers(script, half):
                        raise
    except ScriptError as failure:
        # The whole runs in that dtype; but nobody can overlook that a piece raises.
        if not script.is_unsupported(failure):
            raise


def assert_half_pieces_are_close(script: Script, first: int) -> None:
    """Compare the outputs after the first tokens with those of the whole."""
    length = script.sizes.k_len
    restart_with_cache(script)
    args = script.make_arguments(script.all_allowed(length, length))
    try:
        whole = script.call(args)
    except ScriptError:
        return  # longer than its tables, or the laws of half precision report it
    outputs, _ = decode(script, args, [first, length - first])
    rest = script.adapter.index(l=slice(first, None))
    whole = script.assign("y", f"{whole}{rest}")
    message = f"in {script.dtype}, {{place}} differs behind the first {first} tokens"
    script.assert_close(whole, outputs[-1], message, relative=0.1)


def size_of_cache(script: Script, cache: str) -> int:
    """How many numbers the tensors of a cache have."""
    tensors = owned_tensors(script.evaluate(cache))
    return sum(tensor.numel() for tensor in tensors)


def cache_grows(script: Script, first: int = 1) -> bool:
    """Whether the tensors of a cache are larger with one token after the `first`."""
    restart_with_cache(script)
    args = script.make_arguments(script.all_allowed(first + 1, first + 1))
    cache = empty_cache(script)
    sizes: list[int] = []
    for start, count in ((0, first), (first, 1)):
        _output, cache = call_with_cache(script, args, start, count, cache)
        sizes.append(size_of_cache(script, cache))
    return sizes[0] < sizes[1]


def decode_in_turns(script: Script) -> None:
    """Between two pieces of a sequence, another one is decoded with its own cache."""
    assert script.adapter.cache is not None
    if not script.adapter.cache[0]:
        return  # the module stores the cache of one sequence
    length = script.sizes.k_len
    script.restart()
    args, other = (
        script.make_arguments(script.all_allowed(length, length)) for _ in range(2)
    )
    whole = script.call(args)
    for first in sorted({1, length - 1}):
        with script.attempt(), script.rollback():
            start, cache = call_with_cache(script, args, 0, first, empty_cache(script))
            call_with_cache(script, other, 0, length, empty_cache(script))
            rest, _ = call_with_cache(script, args, first, length - first, cache)
            message = "{place} differs if another sequence is decoded in between"
            script.assert_close(whole, script.concatenate(start, rest), message)


def decode_in_slots(script: Script) -> None:
    """Sequences in slots of a stored cache have other lengths, and free their slots.

    The first one has two tokens when the second begins. When its slot is free, it
    begins anew, and the second one continues.
    """
    adapter, length = script.adapter, script.sizes.k_len
    slots = [n for n, t in adapter.extra_args.items() if t == names.SLOT_OF_ITEM]
    is_plain = adapter.cache == ("", "") and not adapter.cache_args
    if not is_plain or not slots or length < 4 or "b" not in adapter.layout:
        return
    with script.using(batch_size=2):
        restart_with_cache(script)
        args, other = (
            script.make_arguments(script.all_allowed(length, length)) for _ in range(2)
        )
        whole, again = script.call(args), script.call(other)
        empty_cache(script)

        def call(first: str, second: str, outputs: Sequence[str]) -> None:
            """Call it with some tokens of the first, and of the second sequence."""
            tokens = script.assign("tokens", join_items(script, [first, second]))
            given = {slots[0]: f"torch.tensor([1, 0]){script.to_device()}"}
            source = script.argument_source(replace(args, inputs=(tokens,)), **given)
            seen = script.assign_output(f"attention({source})", args)
            expected = script.assign("y", join_items(script, outputs))
            message = "{place} differs if the sequences in its slots have other lengths"
            script.assert_close(expected, seen, message)

        def part(item: int, start: int, stop: int) -> str:
            return adapter.index(b=slice(item, item + 1), l=slice(start, stop))

        (x,), (z,) = args.inputs, other.inputs
        early = script.assign("tokens", f"{x}{part(0, 0, 2)}")
        given = {slots[0]: f"torch.tensor([1]){script.to_device()}"}
        source = script.argument_source(replace(args, inputs=(early,)), **given)
        script.exec_line(f"attention({source})")
        rest, start = part(0, 2, length), part(1, 0, length - 2)
        call(f"{x}{rest}", f"{x}{start}", (f"{whole}{rest}", f"{whole}{start}"))
        for method in caches.freeing_methods(adapter.target):
            with script.attempt():  # it may want something else
                script.exec_line(f"attention.{method}")
                one, last = part(0, 0, 1), part(1, length - 2, length - 1)
                call(f"{z}{one}", f"{x}{last}", (f"{again}{one}", f"{whole}{last}"))
                break


def has_items(script: Script) -> bool:
    """Whether the one input has an axis of batch items."""
    return script.adapter.single_input and "b" in script.adapter.layout


def join_items(script: Script, parts: Sequence[str]) -> str:
    """The batch items of several tensors, as source text."""
    return f"torch.cat([{', '.join(parts)}], dim={script.adapter.layout.index('b')})"


def decode_in_freed_slot(script: Script) -> None:
    """A sequence begins in the slot of another one, which a cache object has freed."""
    adapter = script.adapter
    assert adapter.cache is not None
    if not adapter.cache[0] or adapter.cache_args or not has_items(script):
        return
    length = min(script.sizes.k_len, 5)
    with script.using(batch_size=2, q_len=length, k_len=length):
        restart_with_cache(script)
        cache = empty_cache(script)
        methods = caches.freeing_methods(type(script.evaluate(cache)))
        if length == 1 or not methods:
            return
        args, other = script.make_arguments(), script.make_arguments()
        outputs = script.call(args), script.call(other)
        first, last = ({"l": slice(n, n + 1)} for n in (0, length - 1))
        parts = adapter.index(b=slice(1), **last), adapter.index(b=slice(1, 2), **first)
        with script.attempt():  # it may want something else
            _past, cache = call_with_cache(script, args, 0, length - 1, cache)
            script.exec_line(f"{cache}.{methods[0]}")
            tokens, expected = (
                join_items(script, [f"{one}{parts[0]}", f"{two}{parts[1]}"])
                for one, two in ((args.inputs[0], other.inputs[0]), outputs)
            )
            tokens = script.assign("tokens", tokens)
            new = replace(args, inputs=(tokens,))
            seen, _cache = call_with_cache(script, new, 0, 1, cache)
            message = f"{{place}} differs if a sequence begins after `{methods[0]}`"
            script.assert_close(script.assign("y", expected), seen, message)


def assert_sequence_begins_anew(script: Script) -> None:
    """At position 0, a stored cache holds nothing of a sequence that was longer."""
    adapter, length = script.adapter, script.sizes.k_len
    if adapter.cache != ("", "") or "{start}" not in adapter.cache_args.values():
        return
    restart_with_cache(script)
    longer, args = (
        script.make_arguments(script.all_allowed(n, n)) for n in (length + 3, length)
    )
    with script.attempt():  # it may need a reset
        whole = script.call(args)
        cache = empty_cache(script)
        call_with_cache(script, longer, 0, length + 3, cache)
        outputs = []
        for start in range(length):
            output, cache = call_with_cache(script, args, start, 1, cache)
            outputs.append(output)
        message = "{place} differs after a longer sequence, though it begins at 0"
        script.assert_close(whole, script.concatenate(*outputs), message)


def decode_after_reset(script: Script) -> None:
    """After its reset, a cache holds nothing of the sequence before, which was short.

    The reset is a method of the cache, or of a module that stores one.
    """
    length = script.sizes.k_len
    restart_with_cache(script)
    cache = empty_cache(script)
    resets = caches.reset_methods(type(script.evaluate(owner_of(script, cache))))
    if not resets or not script.adapter.single_input:
        return
    short, args = (script.make_arguments(script.all_allowed(n, n)) for n in (1, length))
    with script.attempt():  # it may need something else
        whole = call_without_cache(script, args)
        _first, cache = call_with_cache(script, short, 0, 1, cache)
        script.exec_line(f"{owner_of(script, cache)}.{resets[0]}()")
        start, cache = call_with_cache(script, args, 0, length - 1, cache)
        last, _cache = call_with_cache(script, args, length - 1, 1, cache)
        message = f"{{place}} differs if a sequence begins after `{resets[0]}()`"
        script.assert_close(whole, script.concatenate(start, last), message)


def owner_of(script: Script, cache: str) -> str:
    """What stores the tokens: the cache that is passed, or the module."""
    assert script.adapter.cache is not None
    return cache if script.adapter.cache[0] else "attention"


def call_without_cache(script: Script, args: CallArguments) -> str:
    """The output of a call of a module that has not stored anything."""
    assert script.adapter.cache is not None
    if script.adapter.cache[0]:
        return script.call(args)
    script.exec_line("fresh = copy.deepcopy(unused)")
    return script.call(args, function="fresh")


def assert_reset_forgets_context(script: Script) -> None:
    """After its reset, a cache or a module that stores one takes another context.

    A method that resets the tokens alone, by its name, leaves what is of the context.
    """
    adapter, length = script.adapter, script.sizes.k_len
    if not adapter.decoder_context:
        return
    restart_with_cache(script)
    args = script.make_arguments(script.all_allowed(length, length))
    cache = empty_cache(script)
    methods = caches.reset_methods(type(script.evaluate(owner_of(script, cache))))
    resets = [name for name in methods if "self" not in name]
    if not resets:
        return
    with script.attempt():  # it may need something else
        _output, cache = call_with_cache(script, args, 0, length, cache)
        script.exec_line(f"{owner_of(script, cache)}.{resets[0]}()")
        message = f"{{place}} differs with another context after `{resets[0]}()`"
        assert_other_context_is_seen(script, args, cache, message)


def assert_new_cache_sees_context(script: Script) -> None:
    """With a new cache, another context of the same shape is attended to.

    What is kept of the context belongs into the cache, and not into the module.
    """
    adapter, length = script.adapter, script.sizes.k_len
    assert adapter.cache is not None
    if not adapter.decoder_context or adapter.cache == ("", ""):
        return
    restart_with_cache(script)
    args = script.make_arguments(script.all_allowed(length, length))
    with script.attempt():  # it may need something else
        call_with_cache(script, args, 0, length - 1, empty_cache(script))
        message = "{place} differs with a new cache and another context"
        assert_other_context_is_seen(script, args, empty_cache(script), message)


def assert_other_context_is_seen(
    script: Script, args: CallArguments, cache: str, message: str
) -> None:
    """With a cache, another context than before gives what it gives without one."""
    adapter, length = script.adapter, script.sizes.k_len
    context = random_context(script, args)
    given = {**adapter.extra_args, adapter.decoder_context: context}
    with script.using(replace(adapter, extra_args=given)):
        whole = call_without_cache(script, args)
        seen, _cache = call_with_cache(script, args, 0, length, cache)
        script.assert_close(whole, seen, message)


def decode_after_rejection(script: Script) -> None:
    """Tokens that were removed from the cache have no influence on those that follow.

    Speculative decoding removes what a smaller model has drafted and the larger one
    rejects. A method of the cache takes the number of tokens that remain, or of those
    that are removed.
    """
    length = script.sizes.k_len
    first, joined = length - 1, ""
    if not first:
        return
    restart_with_cache(script)
    args = script.make_arguments(script.all_allowed(length, length))
    _start, cache = call_with_cache(script, args, 0, first, empty_cache(script))
    kind = type(script.evaluate(cache))
    methods = [name for name in dir(kind) if names.CROP_PATTERN.fullmatch(name)]
    for number in (first, 2) if methods else ():
        restart_with_cache(script)
        args, draft = (
            script.make_arguments(script.all_allowed(n, n)) for n in (length, first + 2)
        )
        whole = script.call(args)
        start, cache = call_with_cache(script, args, 0, first, empty_cache(script))
        _draft, cache = call_with_cache(script, draft, first, 2, cache)
        try:
            script.exec_line(f"{cache}.{methods[0]}({number})")
        except ScriptError:
            continue
        last, _cache = call_with_cache(script, args, first, 1, cache)
        joined = script.concatenate(start, last)
        if script.evaluate(f"torch.allclose({whole}, {joined}, atol=1e-4)"):
            return
    if not joined:
        return  # the method takes something else
    message = f"{{place}} differs if two tokens were removed by `{methods[0]}` before"
    script.assert_close(whole, joined, message)


def decode_after_unequal_rejection(script: Script) -> None:
    """Nor have they if another number of tokens is removed for each batch item.

    Then the items have other lengths, and the new token of each its own position. That
    is tested where the method removes one token of all items, or keeps all but one.
    """
    adapter, length = script.adapter, script.sizes.k_len
    if length < 4 or adapter.cache_args or not has_items(script):
        return
    restart_with_cache(script)
    cache = empty_cache(script)
    kind = type(script.evaluate(cache)) if cache != "None" else object
    methods = [name for name in dir(kind) if names.CROP_PATTERN.fullmatch(name)]
    second, last = length - 2, length - 1
    ways = ([1, 1], [1, 0]), ([second, second], [second, last])
    for equal, unequal in ways if methods else ():
        # It may take something else.
        with script.using(batch_size=2), script.attempt():
            call = f"{methods[0]}(torch.tensor({equal}))"
            one, other = outputs_after_rejection(script, call, [second, second])
            if script.evaluate(f"torch.allclose({one}, {other}, atol=1e-4)"):
                call = f"{methods[0]}(torch.tensor({unequal}))"
                one, other = outputs_after_rejection(script, call, [second, last])
                script.assert_close(one, other, f"{{place}} differs after `{call}`")
                break


def outputs_after_rejection(
    script: Script, call: str, places: list[int]
) -> tuple[str, str]:
    """The outputs of two sequences at two places: of the wholes, and decoded again.

    All tokens but the last were decoded before, and a call of the cache removed some.
    """
    length = script.sizes.k_len
    restart_with_cache(script)
    args = script.make_arguments(script.all_allowed(length, length))
    whole, cache = script.call(args), empty_cache(script)
    _past, cache = call_with_cache(script, args, 0, length - 1, cache)
    script.exec_line(f"{cache}.{call}")
    parts = [
        script.adapter.index(b=slice(n, n + 1), l=slice(place, place + 1))
        for n, place in enumerate(places)
    ]
    expected, tokens = (
        script.assign(name, join_items(script, [name + part for part in parts]))
        for name in (whole, args.inputs[0])
    )
    again = replace(args, inputs=(tokens,))
    seen, _cache = call_with_cache(script, again, 0, 1, cache)
    return expected, seen


def assert_pieces_have_gradients(script: Script) -> None:
    """Gradients of the last tokens are the same with the first ones in a cache.

    A KV cache may be for inference only. One is for training whose tensors have a
    graph, or that is a memory: it has none, but the new tokens do.
    """
    assert script.adapter.cache is not None
    length, first = script.sizes.k_len, script.sizes.k_len // 2
    restart_with_cache(script)
    joined, _past, rest, whole = call_with_gradients_of_rest(script, first)
    _y, cache = call_with_cache(script, joined, 0, first, empty_cache(script))
    is_memory = MEMORY_PATTERN.search(script.adapter.cache[0])
    has_graph = f"any(t.requires_grad for t in tensors_in({cache}))"
    if not (is_memory or script.evaluate(has_graph)):
        return
    piece, _cache = call_with_cache(script, joined, first, length - first, cache)
    message = f"the gradient at {{place}} differs with {first} tokens in the cache"
    assert_gradients_equal(script, (whole, piece), rest, message)


def compute_pieces(
    script: Script, pieces: list[int], mode: str
) -> tuple[str, list[str], CallArguments, str]:
    """Compute piece after piece, each with the cache that was returned before.

    Returned are the output of the whole, those of the pieces, the arguments of the
    whole, and the cache that the last piece was given.
    """
    length = script.sizes.k_len
    restart_with_cache(script, mode)
    args = script.make_arguments(script.all_allowed(length, length))
    whole = script.call(args)
    outputs, last_cache = decode(script, args, pieces)
    return whole, outputs, args, last_cache


def decode(
    script: Script,
    args: CallArguments,
    pieces: list[int],
    masks: Sequence[MaskArgument | None] = (),
    only_new: bool = False,
) -> tuple[list[str], str]:
    """The output of each piece, with its mask if any, and the cache of the last one."""
    cache, outputs, start = empty_cache(script), [], 0
    for piece, mask in zip_longest(pieces, masks):
        last_cache = cache
        output, cache = call_with_cache(
            script, args, start, piece, cache, mask, only_new
        )
        outputs.append(output)
        start += piece
    return outputs, last_cache


def decode_with_cache(script: Script, pieces: list[int], mode: str = "eval") -> None:
    """Pieces give the same outputs as the whole, also if a cache is given twice."""
    assert script.adapter.cache is not None
    length = script.sizes.k_len
    if names.takes_tree(script.adapter.target):
        pieces = [pieces[0], sum(pieces[1:])]  # a draft is not what the next follows
    whole, outputs, args, last_cache = compute_pieces(script, pieces, mode)
    text = ", ".join(map(str, pieces))
    message = f"{{place}} differs if the tokens come in pieces of {text}"
    compared = slice(None) if script.adapter.causal else slice(length - 1, None)
    script.assert_close(whole, script.concatenate(*outputs), message, l=compared)
    if isinstance(script.evaluate(last_cache), Tensor | tuple):
        # Several hypotheses of a beam search may continue one cache. Objects and dicts
        # are modified by intention.
        start, piece = length - pieces[-1], pieces[-1]
        again, _ = call_with_cache(script, args, start, piece, last_cache)
        message = "{place} differs if a cache is given a second time"
        script.assert_close(outputs[-1], again, message)
    if script.adapter.cache != ("", ""):
        message = f"{{place}} differs after decoding in pieces of {text}"
        script.assert_close(whole, script.call(args), message)


def calls_with_hidden_key(
    script: Script, hidden: int
) -> Iterator[tuple[CallArguments, MaskArgument]]:
    """Arguments of which one key is hidden in one batch item.

    If it is the first, it is as after left padding. The script is restarted before
    each.
    """
    length = script.sizes.k_len
    allowed = script.all_allowed(length, length)
    allowed[:, hidden, 0] = False
    for mask in script.masks_for(allowed) if length > 2 else []:
        assert mask is not None
        given = without_future(allowed) if "q" in mask.axes else allowed
        restart_with_cache(script)
        yield replace(script.make_arguments(given, mask), allowed=given), mask


def decode_with_padding(script: Script) -> None:
    """Decode with one key of one batch item hidden.

    If that is the first, the mask is for all keys so far, or where this is refused, for
    the new ones. Where both are refused, nothing is tested.
    """
    if documented.pads_last_piece(script.adapter.target):
        return
    sizes, length, window = script.sizes, script.sizes.k_len, script.adapter.window
    for first in sorted({length // 2, length - 1}):
        for args, mask in calls_with_hidden_key(script, 0):
            decode_padded_pieces(script, args, mask, [first, length - first])
    # A mask of the new keys only may hide one of them. With one new token, a mask might
    # be broadcast to all keys.
    first = length // 2
    for args, mask in (
        calls_with_hidden_key(script, first) if length - first > 1 else ()
    ):
        if takes_in_steps(script.adapter, mask):
            pieces = [first, length - first]
            decode_padded_pieces(script, args, mask, pieces, forms=(True,))
    if script.adapter.causal and window and sizes.k_len == sizes.q_len:
        # What is dropped behind a window is dropped of the mask, too.
        with script.using(q_len=window + 4, k_len=window + 4):
            for args, mask in calls_with_hidden_key(script, 0):
                decode_padded_pieces(script, args, mask, [window + 1, 1, 1, 1])


def decode_padded_pieces(
    script: Script,
    args: CallArguments,
    mask: MaskArgument,
    pieces: list[int],
    forms: tuple[bool, ...] = (False, True),
) -> None:
    """Decode pieces, each with its part of the mask, of all keys or of the new ones."""
    length = script.sizes.k_len
    queries = script.real_queries(args)
    queries = queries if script.adapter.causal else [length - 1]
    with script.attempt():  # the tokens may be more than it accepts
        whole = script.call(args)
        message = (
            f"with padding, {{place}} differs after a call with {pieces[0]} tokens"
        )
        for only_new in forms:
            with script.attempt():
                given: list[MaskArgument | None] = [mask] * len(pieces)
                outputs, _ = decode(script, args, pieces, given, only_new)
                joined = script.concatenate(*outputs)
                if not only_new and is_broadcast(script, args, mask):
                    continue
                script.assert_close(whole, joined, message, l=queries)
                if only_new and len(forms) > 1:
                    # The new tokens hide none, and the padding so far is in the cache.
                    given[-1] = None
                    outputs, _ = decode(script, args, pieces, given, only_new)
                    without = script.concatenate(*outputs)
                    message += ", and without a mask then"
                    script.assert_close(joined, without, message, l=queries)
                break


def assert_padding_stays_hidden(script: Script) -> None:
    """Padding of a first piece, which a cache marks, has no influence on later pieces.

    The masks of these may be of their own tokens only, and hide none.
    """
    length = script.sizes.k_len
    if length < 4 or "b" not in script.adapter.layout:
        return
    padded = script.all_allowed(2, 2)
    padded[:, 1, 0] = False
    for mask in script.masks_for(padded):
        # Each piece may have to be as long as the others.
        with script.attempt():
            restart_with_cache(script)
            args = replace(script.make_arguments(), allowed=padded)
            outputs = decode_behind_padding(script, args, mask)
            if not outputs:
                return
            other = script.perturb(args, b=slice(0, 1), l=slice(1, 2))
            others = decode_behind_padding(script, other, mask)
            for one, two in zip(outputs, others, strict=True):
                message = "{place} of a later piece depends on the padding of the first"
                script.assert_close(one, two, message)


def decode_behind_padding(
    script: Script, args: CallArguments, mask: MaskArgument | None
) -> list[str]:
    """The outputs of two pieces behind two tokens, one of which is padding.

    There are none where the cache does not tell which tokens are padding.
    """
    usual = script.evaluate(call_with_cache(script, args, 0, 2, empty_cache(script))[1])
    _first, cache = call_with_cache(script, args, 0, 2, empty_cache(script), mask)
    marks, found = (
        [t for t in owned_tensors([each]) if t.dtype == torch.bool]
        for each in (usual, script.evaluate(cache))
    )
    if len(marks) == len(found) and all(map(torch.equal, marks, found)):
        return []
    outputs = []
    for start, count in ((2, 1), (3, script.sizes.k_len - 3)):
        output, cache = call_with_cache(script, args, start, count, cache)
        outputs.append(output)
    return outputs


def reorder_cache(script: Script) -> None:
    """After one step, the batch items are exchanged in the input and in the cache.

    A beam search does so, also with sequences of unequal lengths.
    """
    length, batch_size = script.sizes.k_len, script.sizes.batch_size
    if batch_size < 2 or length < 2 or "b" not in script.adapter.layout:
        return
    restart_with_cache(script)
    assert_reordered(script, script.make_arguments(script.all_allowed(length, length)))
    assert_contexts_reordered(script)
    for args, mask in calls_with_hidden_key(script, 0):
        with script.attempt():
            if not is_broadcast(script, args, mask):
                assert_reordered(script, args, mask=mask)
        with script.attempt():
            # The padding so far is then in the cache.
            if masks_suffice(script, args, mask, only_new=True):
                assert_reordered(script, args, mask=mask, only_new=True)


def is_broadcast(script: Script, args: CallArguments, mask: MaskArgument) -> bool:
    """Whether a mask of all keys is accepted, though one of the new keys is meant."""
    return not masks_suffice(script, args, mask, only_new=False) and masks_suffice(
        script, args, mask, only_new=True
    )


def masks_suffice(
    script: Script, args: CallArguments, mask: MaskArgument, only_new: bool
) -> bool:
    """Whether masks of all keys or of new keys, piece by piece, give the last output.

    An attention that wants the mask of all keys each time may accept the shorter one,
    and the other way.
    """
    pieces = [script.sizes.k_len - 1, 1]
    with script.rollback(), script.attempt():  # it may refuse them
        whole = script.call(args)
        outputs, _ = decode(script, args, pieces, [mask, mask], only_new)
        last_token = script.adapter.index(l=slice(pieces[0], None))
        expression = f"torch.allclose({whole}{last_token}, {outputs[-1]}, atol=1e-4)"
        return bool(script.evaluate(expression))
    return False


def assert_reordered(script: Script, args: CallArguments, **how: Any) -> None:
    """The last token gives the same output if all items were exchanged before."""
    length, batch_size = script.sizes.k_len, script.sizes.batch_size
    index = script.adapter.index(b=[*range(batch_size)][::-1])
    inputs = tuple(script.assign(name, f"{name}{index}") for name in args.inputs)
    allowed = args.allowed.flip(2)
    usual = script.encode_mask(script.all_allowed(length, length))
    mask = script.encode_mask(allowed, how["mask"]) if how else usual
    other = replace(args, inputs=inputs, allowed=allowed, mask=mask)
    function = "attention"
    if script.adapter.cache == ("", ""):
        script.exec_line("fresh = copy.deepcopy(unused)")
        function = "fresh"
    # Before the pieces, so that nothing is stored of it when the last one is decoded.
    whole = script.call(other, function=function)
    last_token = script.adapter.index(l=slice(length - 1, None))
    whole = script.assign("y", f"{whole}{last_token}")
    cache = empty_cache(script)
    _first, cache = call_with_cache(script, args, 0, length - 1, cache, **how)
    assert script.adapter.cache is not None
    cache = flip_cache(script, cache, script.adapter.cache[0])
    if not cache:
        return
    last, _cache = call_with_cache(script, other, length - 1, 1, cache, **how)
    message = "{place} differs if the batch items of the cache are reordered"
    script.assert_close(whole, last, message)


def assert_contexts_reordered(script: Script) -> None:
    """If the context of a decoder is reordered in its cache, so is its mask.

    Hypotheses of one source have one context, which may stay as it is by intention.
    """
    adapter = script.adapter
    for masks in [(), adapter.context_masks] if adapter.decoder_context else []:
        whole, stays, last = outputs_with_contexts(script, masks)
        if not last:
            return
        if script.evaluate(f"torch.allclose({stays}, {last}, atol=1e-4)"):
            return
        message = "{place} differs if the contexts in the cache are reordered"
        script.assert_close(whole, last, message)


def outputs_with_contexts(
    script: Script, masks: tuple[MaskArgument, ...]
) -> tuple[str, str, str]:
    """The last token's output if all items, with their contexts, are exchanged.

    Then that with the contexts as they were, and that of a reordered cache, which is
    empty if it cannot be reordered.
    """
    adapter, length = script.adapter, script.sizes.k_len
    restart_with_cache(script)
    args = script.make_arguments(script.all_allowed(length, length))
    function = "attention"
    if adapter.cache == ("", ""):
        script.exec_line("fresh = copy.deepcopy(unused)")
        function = "fresh"
    usual, flipped = contexts_of_items(script, args, masks)
    index = adapter.index(b=[*range(script.sizes.batch_size)][::-1])
    other = replace(args, inputs=(script.assign("x", f"{args.inputs[0]}{index}"),))
    last_token = adapter.index(l=slice(length - 1, None))
    outputs = []
    for each in (flipped, usual):
        with script.using(each):
            whole = script.call(other, function=function)
            outputs.append(script.assign("y", f"{whole}{last_token}"))
    with script.using(usual):
        start = empty_cache(script)
        _first, cache = call_with_cache(script, args, 0, length - 1, start)
    assert adapter.cache is not None
    cache = flip_cache(script, cache, adapter.cache[0])
    last = ""
    if cache:
        with script.using(flipped):
            last, _cache = call_with_cache(script, other, length - 1, 1, cache)
    return outputs[0], outputs[1], last


def random_context(script: Script, args: CallArguments) -> str:
    """Another context of a decoder, of the shape of its usual one."""
    name = script.adapter.decoder_context
    usual = script.sized_arguments(args, 0, [*args.inputs])[name]
    return script.random_tensor(name, *script.evaluate(usual).shape)


def contexts_of_items(
    script: Script, args: CallArguments, masks: tuple[MaskArgument, ...]
) -> tuple[Adapter, Adapter]:
    """Adapters with a context and masks that differ in each item, and with reversed."""
    adapter, items = script.adapter, script.sizes.batch_size
    context = random_context(script, args)
    number = script.evaluate(context).shape[adapter.layout.index("l")]
    lengths = number - 1 - torch.arange(items) % (number - 1)
    allowed = (torch.arange(number)[:, None] < lengths)[None]
    given = {adapter.decoder_context: (context, adapter.layout)}
    for mask in masks:
        encoded = script.encode_mask(allowed, mask)
        assert encoded is not None
        given[mask.name] = encoded[1], mask.axes
    usual, flipped = dict(adapter.extra_args), dict(adapter.extra_args)
    for name, (text, axes) in given.items():
        usual[name] = text
        flipped[name] = f"{text}.flip({axes.index('b')})" if "b" in axes else text
    return replace(adapter, extra_args=usual), replace(adapter, extra_args=flipped)
