r"""# Laws of long sequences

Fast implementations compute in blocks, and have paths of their own for one query, for a
last block that is not full, and for sequences that fit into one block. The other laws
use short sequences, because their counterexamples can be read.

Source: [FlashAttention](https://arxiv.org/abs/2205.14135), Dao et al. 2022, section
3.1, for attention in blocks.
"""

import re
from dataclasses import replace

import torch

from attention_laws import documented, names, structure
from attention_laws.adapter import MaskArgument, without_future
from attention_laws.algebra import (
    EDGE_ARGUMENTS,
    PLAIN,
    assert_formula,
    gradient_of_query,
    has_positions_in_values,
)
from attention_laws.batch import own_tensors
from attention_laws.calling import order_matters
from attention_laws.execution import assert_half_is_close
from attention_laws.law import (
    Excused,
    LawViolation,
    NotApplicable,
    ScriptError,
    law,
    skip_unless,
)
from attention_laws.order import ORDERED
from attention_laws.positions import (
    FAR,
    LONGEST,
    SCALED_PATTERN,
    assert_weights_shift,
    count_functions,
    fits_in_memory,
)
from attention_laws.recorded import make_equal_tokens, record_weights
from attention_laws.recorders import WeightsRecorder
from attention_laws.script import CONTEXTS, CallArguments, Script

# Lengths at which a path for blocks, or for one token, begins or ends.
EDGES = (1, 2, 16, 17, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 512, 513, 1025)

# Lengths that are tried, until one is not beyond the tables of the attention.
LONG_LENGTHS = (260, 130, 66, 34)

# If a call with one of `LONG_LENGTHS` has more functions of PyTorch, it is a loop over
# small tiles, and would take ten seconds for the longest sequence.
MANY_FUNCTIONS = 20_000

# Designs that weigh a token given twice in another way than the token once.
NO_MEAN = (
    *("norm", "features", "sink", "window", "selection", "convolution", "talking"),
    *("channels", "decay", "direction"),
)


@law(slow=True, assumes="dynamic sampling selection quantized pointer monotonic")
def long_sequences(script: Script) -> None:
    r"""A sequence gives the same outputs if hidden keys follow.

    $$y_i(x_1, \dots, x_n) = y_i(x_1, \dots, x_n, \text{hidden}, \dots)$$

    Fast implementations work in blocks of 64 or 128 keys, and have a path of their own
    for one query, for a last block that is not full, and for sequences that fit in one
    block. Lengths around the edges of such blocks are compared with a sequence of 260
    tokens, whose rest is hidden by the causal mask or by one for padding. Without a
    mask, each token is given twice, which changes no weighted mean. Nor may it depend
    on the number of queries whether a causal mask, or what is documented of them,
    counts them from the last key. Blocks in front whose keys are all hidden have a
    largest score of minus infinity.
    """
    adapter = script.adapter
    skip_unless(adapter.fixed_length is None, "takes sequences of one length only")
    script.sizes = replace(script.sizes, batch_size=min(2, script.sizes.batch_size))
    accepted = (
        length
        for length in LONG_LENGTHS
        if fits_in_memory(script, length)
        and assert_long_is_right(script, length, [n for n in EDGES if n < length])
    )
    length = next(accepted, 0)
    skip_unless(length > 0, "takes no longer sequences")
    script.sizes = replace(script.sizes, batch_size=1)
    if count_functions(script, length) > MANY_FUNCTIONS:
        return
    if not fits_in_memory(script, LONGEST):
        return
    if assert_long_is_right(script, LONGEST, [n for n in EDGES if n > LONG_LENGTHS[0]]):
        assert_sums_are_exact(script)
    assert_last_queries_stay_last(script)
    assert_last_block_may_be_partial(script)
    assert_first_blocks_may_be_hidden(script)
    if adapter.positions == "none":
        assert_distances_are_kept(script)
    if isinstance(adapter.target, type):
        assert_limit_has_no_influence(script)


def assert_last_queries_stay_last(script: Script) -> None:
    """If two queries are counted from the last key, one and many are, too.

    Those of a causal mask may be, and others if it is documented. With one query, which
    sees all keys, padding is forgotten.
    """
    adapter = script.adapter
    is_meant = documented.has_last_queries(adapter.target)
    may_be_last = (adapter.causal or is_meant) and not adapter.mixes_queries
    if adapter.single_input or not may_be_last:
        return
    for q_len, k_len in ((2, 5), (1, 5), (70, 90), (150, 270)):
        with script.using(q_len=k_len, k_len=k_len):
            cases = [(script.all_allowed(), adapter.required_mask)]
            of_keys = script.padding_cases(slice(1, 2)) if k_len == 5 else ()
            cases += [case for case in of_keys if case[1] and "q" not in case[1].axes]
            for allowed, mask in cases:
                script.restart()
                with script.attempt():  # it may need as many queries as keys
                    args = script.make_arguments(allowed, mask)
                    last = adapter.index(l=slice(k_len - q_len, None))
                    whole = script.assign("y", f"{script.call(args)}{last}")
                    query = script.assign("query", f"{args.inputs[0]}{last}")
                    alone = replace(args, inputs=(query, *args.inputs[1:]))
                    seen = script.call(alone)
                    claim = f"torch.allclose({whole}, {seen}, atol=1e-4)"
                    if not (is_meant or script.evaluate(claim)):
                        return
                    is_meant = True
                    message = (
                        f"{{place}} of the last {q_len} differs from that among {k_len}"
                    )
                    script.assert_close(whole, seen, message)
                    script.context = CONTEXTS["no_grad"]
                    seen = script.call(alone)
                    message += f" under {script.context}"
                    script.context = ""
                    script.assert_close(whole, seen, message)


def assert_last_block_may_be_partial(script: Script) -> None:
    """If equal tokens give equal outputs in full blocks, they do in a partial one, too.

    The zeros with which a block is padded take a part of the weights by mistake.
    """
    adapter = script.adapter
    if not adapter.single_input or adapter.is_pooled or adapter.image:
        return
    is_equal = False
    for length in (*FULL_LENGTHS, 5, 11, 37):
        if length not in FULL_LENGTHS and not is_equal:
            return
        with script.using(q_len=length, k_len=length):
            script.restart()
            with script.attempt():  # there may be a limit of the length
                args = script.make_arguments(script.all_allowed(length, length))
                output = script.call(make_equal_tokens(script, args))
                first = f"{output}{adapter.index(l=slice(0, 1))}"
                scale = f"{output}.abs().max().clamp(min=1)"
                claim = f"(({output} - {first}).abs().max() / {scale}).item() <= 1e-3"
                if length in FULL_LENGTHS:
                    is_equal |= script.evaluate(claim)
                    continue
                message = f"{length} equal tokens have unequal outputs, more have not"
                script.assert_true(claim, message)


def assert_first_blocks_may_be_hidden(script: Script) -> None:
    """Padding in front that fills blocks of keys leaves the outputs finite.

    Of a block without keys, the largest score is minus infinity, and NaN if subtracted.
    """
    adapter, length = script.adapter, 150
    q_len = length if adapter.single_input else 3
    with script.using(batch_size=2, q_len=q_len, k_len=length):
        allowed = script.all_allowed()
        allowed[:, : 2 * BLOCK, 0] = False
        masks = (
            () if documented.pads_right(adapter.target) else script.masks_for(allowed)
        )
        for mask in masks:
            script.restart()
            with script.attempt():  # it may take shorter sequences only
                args = script.make_arguments(allowed, mask)
                index = adapter.index(l=script.real_queries(args))
                output = script.assign("y", f"{script.call(args)}{index}")
                message = f"with {2 * BLOCK} hidden keys in front, the output is NaN"
                script.assert_finite(output, message)


def assert_sums_are_exact(script: Script) -> None:
    """The last of many outputs in bfloat16 are those of float32, within a fifth.

    A sum over the tokens has to be in float32: bfloat16 has 8 bits, and once the sum is
    256 times as large as what is added, it stays as it is.
    """
    adapter = script.adapter
    if adapter.is_pooled or script.dtype != torch.float32:
        return
    # Positions, and what fades, have rounding errors of their own.
    if adapter.positions != "none" or "decay" in adapter.designs:
        return
    script.sizes = replace(script.sizes, q_len=16, k_len=16)
    script.restart()
    with WeightsRecorder() as recorder:
        script.call(script.make_arguments())
    if recorder.found:
        return  # the product of weights and values has float32 inside
    script.sizes = replace(script.sizes, q_len=LONGEST, k_len=LONGEST)
    assert_half_is_close(script, torch.bfloat16, last=20)


def assert_limit_has_no_influence(script: Script) -> None:
    """Built for no longer sequences, it gives the same as built for longer ones.

    A mask for the longest sequence may be cut at the wrong end, or hold a pattern of
    its end. A scale may depend on the limit by intention, and so may initial weights,
    which are made the same.
    """
    adapter = script.adapter
    attention = script.evaluate("attention")
    scaled = filter(SCALED_PATTERN.search, structure.identifiers(attention))
    if {"dynamic", "scale", "features", "decay"} & {*adapter.designs} or any(scaled):
        return
    arguments = names.length_limits(adapter.target)
    script.sizes = replace(script.sizes, q_len=LIMIT, k_len=LIMIT)
    for argument in arguments:
        script.restart()
        args = script.make_arguments(script.all_allowed(LIMIT, LIMIT))
        with script.attempt():  # it may need room for other tokens
            usual = script.call(args)
            given = {**adapter.init_args, argument: str(LIMIT)}
            script.build_other("limited", given)
            if not script.evaluate("have_same_shapes(attention, limited)"):
                continue
            weights = "dict(attention.named_parameters())"
            script.exec_line(f"limited.load_state_dict({weights}, strict=False)")
            message = f"{{place}} differs if it is built with `{argument}={LIMIT}`"
            seen = script.call(args, function="limited")
            script.assert_close(usual, seen, message)


# The keys of a block in many implementations.
BLOCK = 64
# Lengths in which blocks of most sizes are full.
FULL_LENGTHS = (240, 192)
# Tokens of a sequence that is as long as the limit that a module is built with.
LIMIT = 12


def assert_distances_are_kept(script: Script) -> None:
    """If weights depend on distances, they do so in a long sequence, too.

    Equal tokens of a short sequence show whether they do. The positions of a block of
    queries may be counted from the start of the block by mistake.
    """
    for length in (16, FAR):
        script.sizes = replace(script.sizes, q_len=length, k_len=length)
        script.restart()
        args = script.make_arguments(script.all_allowed(length, length))
        with script.attempt():
            weights = record_weights(script, make_equal_tokens(script, args))
            if not weights:
                return
            if length == FAR:
                assert_weights_shift(script, weights, range(1, 20), factor=10)
                return
            last = script.evaluate(f"{weights}[:, -1]")
            if bool((last.amax(dim=-1) < 1.001 * last.amin(dim=-1)).all()):
                return
            try:
                assert_weights_shift(script, weights, range(1, length - 1))
            except LawViolation:
                return


def assert_long_is_right(script: Script, length: int, edges: list[int]) -> bool:
    """Compare a long sequence with its parts; return whether it is accepted.

    The longest is compared with the formula only, where there is one: it takes longest.
    """
    adapter = script.adapter
    has_formula = follows_formula(script)
    only_formula = has_formula and length == LONGEST
    script.restart()
    allowed = script.all_allowed(length, length)
    causal = without_future(allowed)
    mask = adapter.required_mask
    if not (adapter.causal or adapter.mixes_queries):
        mask = next(iter(script.masks_for(causal)), mask)
    is_causal = adapter.causal or mask is not adapter.required_mask
    given = causal if is_causal and not adapter.causal else allowed
    args = script.make_arguments(given, mask)
    try:
        whole = script.call(args)
        others = {} if only_formula else call_without_gradients(script, args)
    except ScriptError:
        return False  # longer than its tables
    message = "the output of a long sequence is NaN or infinite"
    script.assert_finite(whole, message)
    if not has_formula:
        with script.rollback():
            assert_equal_tokens_give_equal(script, args)
        with script.rollback(), script.attempt():
            assert_order_is_free(script, length)
    if length < LONGEST:
        with script.rollback():
            assert_contexts_agree(script, args)
    for context, other in others.items():
        message = f"{{place}} of a long sequence differs under {context}"
        script.assert_close(whole, other, message)
    # A length that is no multiple of a block, and one that is.
    full = {length & -64} - {0} if length < LONGEST else set()
    for n in sorted({length} | full) if has_formula else ():
        with script.rollback():
            start = prefix(script, args, n)
            encoded = script.encode_mask(start.allowed, mask)
            start = replace(start, allowed=args.allowed[:n, :n], mask=encoded)
            # The weights depend on positions, but not the mean of equal values.
            is_equal = adapter.positions != "none"
            same = make_equal_tokens(script, start) if is_equal else start
            output = script.call(same)
            if not (is_equal and has_positions_in_values(script, same, output)):
                assert_formula(script, same, output, relative=rounding(script))
    for n in () if only_formula else edges:
        with script.rollback():
            if is_causal:
                compare_prefix(script, args, whole, mask, n)
            else:
                compare_hidden(script, args, n)
    return True


# An online softmax has such names, too; a short sequence shows whether it is a design.
SHOWN = {"norm", "residual", "gate", "decay"}


def follows_formula(script: Script) -> bool:
    """Whether nothing in its code tells of another design, or seven tokens do not.

    They are fewer than a block has.
    """
    adapter = script.adapter
    if adapter.causal_queries:
        return False  # they attend to each other, too
    others = set(PLAIN.split()) & set(adapter.designs)
    if not (adapter.projections or not adapter.is_module) or others - SHOWN:
        return False
    if not others:
        return True
    script.restart()
    args = script.make_arguments(script.all_allowed(7, 7))
    try:
        assert_formula(script, args, script.call(args))
    except (LawViolation, NotApplicable, ScriptError):
        return False
    return True


# Names in code that computes in blocks, which may be padded with zeros.
BLOCK_PATTERN = re.compile(r"block|chunk|bucket|window|(^l|_l|[a-z]L)ocal")


def assert_equal_tokens_give_equal(script: Script, args: CallArguments) -> None:
    """Equal tokens give equal outputs, whichever of them a query attends to.

    Blocks may be padded with zeros, to which queries must not attend. Where the
    projections are not known, it shows at the first tokens. The last outputs have to be
    equal, and all parameters be those of layers: others may be values of their own.

    Linear attention adds up two states from block to block, and divides one by the
    other. If only one of them is right, it shows at the last tokens. The first outputs
    have to be equal: else it may be a sum that is not divided.
    """
    adapter = script.adapter
    # What fades adds up, until as much fades as each token adds.
    own_values = {"sink", "convolution", "decay"} & set(adapter.designs)
    if own_values or not adapter.is_module or adapter.is_pooled:
        return
    code = structure.identifiers(adapter.target)
    if not any(map(BLOCK_PATTERN.search, code)) or any("global" in n for n in code):
        return  # global tokens may have values of their own
    parts = script.evaluate("attention").modules()
    if not all(map(structure.is_linear_or_norm, parts)):
        return
    equal = make_equal_tokens(script, args)
    call = f"lambda: {script.call_source(equal)}"
    known, token = slice(-20, None), slice(-1, None)
    if "features" in adapter.designs:
        known, token = slice(0, 4), slice(0, 1)
    elif not script.evaluate(f"calls_softmax({call})"):
        return
    with WeightsRecorder() as recorder:
        output = script.call(equal)
    if recorder.found and "features" in adapter.designs:
        return  # a softmax within blocks, and a state of those before, are two means
    one = script.assign("one", f"{output}{adapter.index(l=token)}.expand_as({output})")
    index = adapter.index(l=known)
    if not (adapter.causal and sees_complete_blocks_only(script, equal)) and (
        script.evaluate(f"torch.allclose({output}{index}, {one}{index}, atol=1e-5)")
    ):
        message = "{place} of a long sequence differs, though all tokens are equal"
        script.assert_close(one, output, message, relative=rounding(script))


def sees_complete_blocks_only(script: Script, args: CallArguments) -> bool:
    """Whether the second token does not depend on the first: both attend to none."""
    second = script.adapter.index(l=slice(1, 2))
    before = script.call(args)
    after = script.call(script.perturb(args, l=slice(0, 1)))
    return bool(script.evaluate(f"torch.equal({before}{second}, {after}{second})"))


def assert_order_is_free(script: Script, length: int) -> None:
    """The last query gives the same output if the keys before it are reversed.

    An online softmax has to rescale what it has added up so far when a later block has
    a larger score. In 16 tokens the order must not matter either, or there are
    positions. That query has to attend to all keys: it may be by intention that blocks
    do not meet.
    """
    adapter = script.adapter
    ordered = {*ORDERED.split()} - SHOWN - {"positions"}  # 16 tokens show them
    is_ordered = ordered & {*adapter.designs} or adapter.positions != "none"
    if is_ordered or adapter.window is not None or adapter.is_pooled or adapter.image:
        return
    axis, last = adapter.layout.index("l"), adapter.index(l=slice(-1, None))
    usual, moved, _ = reverse_keys(script, 16)
    if not script.evaluate(f"torch.allclose({usual}{last}, {moved}{last}, atol=1e-5)"):
        return
    usual, moved, values = reverse_keys(script, length)
    grad = gradient_of_query(script, usual, values, length - 1)
    if not script.evaluate(f"{grad}.movedim({axis}, 0).flatten(1).any(dim=1).all()"):
        return
    message = "{place} of a long sequence changes if the keys before it are reversed"
    relative, compared = rounding(script), slice(-1, None)
    script.assert_close(usual, moved, message, relative=relative, l=compared)


def reverse_keys(script: Script, length: int) -> tuple[str, str, str]:
    """Outputs before and after all keys but the last are reversed, and the values.

    Keys grow with their place, so that later blocks have larger scores.
    """
    adapter = script.adapter
    args = script.make_arguments(script.all_allowed(length, length))
    inputs, axis = list(args.inputs), adapter.layout.index("l")
    sides = ["-1" if n == axis else "1" for n in range(len(adapter.layout))]
    growth = f"torch.linspace(0.3, 3, {length}).view({', '.join(sides)})"
    for role in {*adapter.key_roles}:
        text = f"{inputs[role]} * {growth}{script.to_dtype_and_device()}"
        inputs[role] = script.assign(inputs[role], text)
    args = replace(args, inputs=tuple(inputs))
    before, last = (adapter.index(l=part) for part in (slice(-1), slice(-1, None)))
    for name in inputs:
        script.exec_line(f"{name}.requires_grad_()")
    usual = script.call(args)
    for role in adapter.key_roles:
        name = inputs[role]
        past = script.assign(name, f"{name}{before}.flip({axis})")
        inputs[role] = script.concatenate(past, script.assign(name, f"{name}{last}"))
    moved = script.call(replace(args, inputs=tuple(inputs)))
    return usual, moved, args.inputs[-1]


def call_without_gradients(
    script: Script, args: CallArguments, **more: str
) -> dict[str, str]:
    """The outputs in each context that records no gradients."""
    outputs = {}
    for context in CONTEXTS.values():
        script.context = context
        try:
            outputs[context] = script.call(args, **more)
        finally:
            script.context = ""
    return outputs


def assert_contexts_agree(script: Script, args: CallArguments) -> None:
    """A long sequence beside a random tensor gives the same without gradients.

    What else is given, such as a bias of pairs, is the same for all tokens in other
    laws. A path for inference may take one part of it for all blocks.
    """
    length = len(args.allowed)
    with script.using(q_len=length, k_len=length):
        for argument in script.adapter.extra_args:
            for given in own_tensors(script, argument):
                with script.attempt():  # its values may have a meaning
                    more = {argument: given}
                    whole = script.call(args, **more)
                    others = call_without_gradients(script, args, **more)
                    for context, other in others.items():
                        message = (
                            f"{{place}} of a long sequence differs under {context}"
                        )
                        script.assert_close(whole, other, message)


def rounding(script: Script) -> float:
    """How much longer sums may differ, relative to the largest entry."""
    return max(1e-4, 16 * torch.finfo(script.dtype).eps)


def prefix(script: Script, args: CallArguments, n: int) -> CallArguments:
    """The first `n` tokens of each input, contiguous as the tokens of a batch are."""
    index = script.adapter.index(l=slice(0, n))
    inputs = tuple(
        script.assign(name, f"{name}{index}.contiguous()") for name in args.inputs
    )
    allowed = args.allowed[:n, :n]
    if script.adapter.causal:
        allowed = script.all_allowed(n, n)
    return replace(args, inputs=inputs, allowed=allowed)


def compare_prefix(
    script: Script,
    args: CallArguments,
    whole: str,
    mask: MaskArgument | None,
    n: int,
) -> None:
    """A causal attention gives a prefix the same outputs as alone."""
    start = prefix(script, args, n)
    start = replace(start, mask=script.encode_mask(start.allowed, mask))
    alone = script.call(start)
    first = script.assign("y", f"{whole}{script.adapter.index(l=slice(0, n))}")
    message = f"{{place}} of a sequence of {n} differs if future tokens follow"
    try:
        script.assert_close(first, alone, message, relative=rounding(script))
    except LawViolation:
        if documented.counts_from_the_end(script.adapter.target):
            raise Excused("its positions are counted from the last token") from None
        raise


def counts_padding(script: Script, mask: MaskArgument | None) -> bool:
    """Whether padding changes what few tokens give, which no block divides.

    Distances that are shares of the length do so in sequences of each length.
    """
    adapter, few = script.adapter, 5
    if mask is None or not adapter.single_input or adapter.is_pooled:
        return False
    with script.rollback():
        args = script.make_arguments(script.all_allowed(few + 2, few + 2))
        return not padding_has_no_influence(script, args, mask, slice(0, few))


def counts_from_the_end(
    script: Script, args: CallArguments, mask: MaskArgument | None
) -> bool:
    """Whether padding in front of a sequence changes nothing, so that it belongs there.

    Recommenders put padding in front of a history, and count positions from its end.
    """
    adapter, n = script.adapter, 5
    if mask is None or mask.counts_keys:
        return False  # padding is at the end
    if len(adapter.inputs) > 2:
        return False
    in_front = padding_has_no_influence(script, args, mask, slice(-n, None))
    return in_front and not padding_has_no_influence(script, args, mask, slice(0, n))


def padding_has_no_influence(
    script: Script, args: CallArguments, mask: MaskArgument, tokens: slice
) -> bool:
    """Whether these tokens have the same outputs alone as with all others hidden.

    Of a context, the outputs are those of three queries.
    """
    adapter, length = script.adapter, args.allowed.shape[1]
    queries = tokens if adapter.single_input else slice(0, 3)
    q_len, k_len = len(range(length)[queries]), len(range(length)[tokens])
    of_queries, of_keys = (adapter.index(l=part) for part in (queries, tokens))
    allowed = torch.zeros_like(script.all_allowed(length, length))
    allowed[:, tokens] = True
    with script.rollback():
        first, *others = args.inputs
        query = script.assign("few", f"{first}{of_queries}.contiguous()")
        few = [script.assign("few", f"{x}{of_keys}.contiguous()") for x in others]
        all_few = script.all_allowed(q_len, k_len)
        encoded = script.encode_mask(all_few)
        alone = script.call(CallArguments((query, *few), encoded, all_few))
        inputs = args.inputs
        if not adapter.single_input:
            inputs, allowed = (query, *others), allowed[queries]
        encoded = script.encode_mask(allowed, mask)
        padded = script.call(CallArguments(inputs, encoded, allowed))
        is_part = adapter.single_input and not adapter.is_pooled
        part = f"{padded}{of_queries}" if is_part else padded
        same = f"torch.allclose({alone}, {part}, atol=1e-4)"
        return bool(script.evaluate(same))


def compare_hidden(script: Script, args: CallArguments, n: int) -> None:
    """Padding after `n` tokens, or the same tokens again, give the same outputs."""
    adapter = script.adapter
    queries = args.inputs[0]
    start = prefix(script, args, n)
    if adapter.cross_attention:
        few = adapter.index(l=slice(0, 3))
        queries = script.assign("query", f"{queries}{few}.contiguous()")
        start = replace(start, inputs=(queries, *start.inputs[1:]))
    q_len = 3 if adapter.cross_attention else n
    start = replace(start, allowed=script.all_allowed(q_len, n))
    start = replace(start, mask=script.encode_mask(start.allowed))
    longer = script.all_allowed(
        q_len if adapter.cross_attention else len(args.allowed), len(args.allowed)
    )
    longer[:, n:] = False
    masks = script.masks_for(longer)
    if "ends" in adapter.designs or "ones_like({query})" in str(adapter.extra_args):
        return  # its blocks end elsewhere if padding follows, or so does a context
    is_mean = adapter.window is None and not set(NO_MEAN) & set(adapter.designs)
    first = adapter.index(l=slice(0, q_len))
    message = f"{{place}} of a sequence of {n} differs if"
    if masks:
        alone = script.call(start)
        inputs = (queries, *args.inputs[1:])
        encoded = script.encode_mask(longer, masks[0])
        padded = script.call(CallArguments(inputs, encoded, longer))
        if not adapter.is_pooled:
            padded = script.assign("y", f"{padded}{first}")
        message += " padding follows"
        is_alike = script.evaluate(f"{alone}.shape == {padded}.shape")
        skip_unless(is_alike, "its outputs are weights, one for each key")
        try:
            script.assert_close(alone, padded, message, relative=rounding(script))
        except LawViolation:
            skip_unless(
                not counts_from_the_end(script, args, masks[0]),
                "its positions are counted from the last token",
            )
            skip_unless(
                adapter.positions != "unknown" or not counts_padding(script, masks[0]),
                "its positions are shares of the length, with its padding",
            )
            raise
    elif adapter.extra_args.keys() & (EDGE_ARGUMENTS | {"bonds"}):
        return  # a node that is given twice has an edge to its other self
    elif adapter.positions == "none" and is_mean and not adapter.mixes_queries:
        # The places of pixels may be encoded in ways that have no name.
        if adapter.image and order_matters(script, prefix(script, args, 16)):
            return
        alone = script.call(start)
        twice = list(start.inputs)
        for role in adapter.key_roles:
            twice[role] = script.concatenate(twice[role], twice[role])
        allowed = script.all_allowed(q_len * (1 + adapter.single_input), 2 * n)
        again = CallArguments(tuple(twice), script.encode_mask(allowed), allowed)
        doubled = script.assign("y", f"{script.call(again)}{first}")
        if script.evaluate(f"{alone}.shape != {doubled}.shape"):
            return  # a number for each token, such as the probability to choose it
        message += " each token is given twice"
        script.assert_close(alone, doubled, message, relative=rounding(script))
