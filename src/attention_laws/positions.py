r"""# Laws of order and positions

Attention without a positional encoding operates on a set: only the mask distinguishes
one position from another. A sliding window, a bias that grows with the distance (ALiBi)
and a rotation (RoPE) are given as options, and each has a law of its own.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), section 3.5;
[ALiBi](https://arxiv.org/abs/2108.12409), section 3;
[RoFormer](https://arxiv.org/abs/2104.09864), section 3.
"""

from dataclasses import replace

import torch

from attention_laws.law import NotApplicable, law, skip_unless
from attention_laws.script import CallArguments, Script


def reorder(script: Script, name: str, order: list[int]) -> str:
    """The same tokens in another order."""
    return script.assign(name, f"{name}{script.adapter.index(l=order)}")


@law
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
    skip_unless(length > 2, "needs three tokens")
    for mode in script.modes():
        script.restart(mode)
        if not (adapter.single_input or adapter.causal):
            args = script.make_arguments()
            order, compared = [*range(1, length), 0], slice(None)
        else:
            # The tokens are queries, too: the last one stays, and is compared. A causal
            # query attends to all keys only if it is the last.
            args = script.make_arguments(script.all_allowed(length, length))
            order, compared = [*range(1, length - 1), 0, length - 1], slice(-1, None)
        before = script.call(args)
        inputs = list(args.inputs)
        for role in [0] if adapter.single_input else [1, 2]:
            inputs[role] = reorder(script, inputs[role], order)
        after = script.call(replace(args, inputs=tuple(inputs)))
        message = f"{{place}} changes if the keys are reordered to {order}"
        script.assert_close(before, after, message, l=compared)


@law
def query_permutation(script: Script) -> None:
    r"""Each query has its own output, at its own position.

    $$y_i(q_{\pi(1)}, \dots, q_{\pi(n)}) = y(q_{\pi(i)})$$

    Attention is equivariant under a permutation of the queries, which do not influence
    each other. A softmax over the wrong axis normalizes across them, and a `view` that
    mixes positions and heads exchanges their outputs.
    """
    adapter = script.adapter
    skip_unless(
        adapter.positions == "none", f"has a positional encoding: {adapter.positions}"
    )
    skip_unless(not adapter.causal, "is always causal, so the order matters")
    skip_unless(adapter.window is None, "has a sliding window, so the order matters")
    length = script.sizes.k_len if adapter.single_input else script.sizes.q_len
    skip_unless(length > 1, "needs two queries")
    for mode in script.modes():
        script.restart(mode)
        args = script.make_arguments(script.all_allowed(length))
        together = script.call(args)
        order = [*range(1, length), 0]
        with script.rollback():
            query = reorder(script, args.inputs[0], order)
            after = script.call(replace(args, inputs=(query, *args.inputs[1:])))
            before = reorder(script, together, order)
            message = f"{{place}} changes if the queries are reordered to {order}"
            script.assert_close(before, after, message)
        if adapter.cross_attention:
            query = reorder(script, args.inputs[0], [0])
            allowed = args.allowed[:1]
            mask = script.encode_mask(allowed)
            inputs = (query, *args.inputs[1:])
            alone = script.call(CallArguments(inputs, mask, allowed))
            first = reorder(script, together, [0])
            script.assert_close(first, alone, "{place} changes beside other queries")


@law
def incremental_decoding(script: Script) -> None:
    r"""A sequence in two pieces gives the same outputs as in one.

    $$y(x_{1 \dots n}) = \left[\, y(x_{1 \dots m}),\; y(x_{m+1 \dots n} \mid x_{1 \dots
    m}) \,\right]$$

    During generation, past keys and values come from the KV cache, and only new tokens
    are queries. The causal mask must then be aligned to the *last* key (bottom right):
    aligned to the first (top left), new queries see fewer keys the longer the past is.
    """
    adapter, length = script.adapter, script.sizes.k_len
    skip_unless(length > 1, "needs two tokens")
    for first in range(1, length):
        if adapter.cache is not None:
            decode_with_cache(script, first)
            continue
        # An attention without a cache can be given new queries and all keys.
        skip_unless(
            not adapter.single_input and not adapter.causal, "`cache` is not given"
        )
        allowed = script.all_allowed(length, length)
        allowed = allowed.permute(2, 0, 1).tril().permute(1, 2, 0)
        masks = [
            mask
            for mask in script.masks_for(allowed)
            if mask and mask.can_express(allowed[first:])
        ]
        skip_unless(
            masks and adapter.cross_attention,
            "has no mask for new queries and past keys",
        )
        for mask in masks:
            script.restart()
            args = script.make_arguments(allowed, mask)
            whole = script.call(args)
            rest = adapter.index(l=slice(first, None))
            query = script.assign("query", f"{args.inputs[0]}{rest}")
            inputs = (query, *args.inputs[1:])
            encoded = script.encode_mask(allowed[first:], mask)
            piece = script.call(CallArguments(inputs, encoded, allowed))
            whole = script.assign("y", f"{whole}{rest}")
            message = f"{{place}} differs after a call with the first {first} tokens"
            script.assert_close(whole, piece, message)


def decode_with_cache(script: Script, first: int) -> None:
    """Compute the first tokens, then the rest with the cache that was returned."""
    adapter, length = script.adapter, script.sizes.k_len
    assert adapter.cache is not None
    argument, cache_index = adapter.cache
    script.restart()
    args = script.make_arguments(script.all_allowed(length, length))
    whole = script.call(args)
    pieces, cache = [], "None"
    for piece in (slice(0, first), slice(first, None)):
        index = adapter.index(l=piece)
        inputs = tuple(script.assign(name, f"{name}{index}") for name in args.inputs)
        source = script.argument_source(
            CallArguments(inputs, None, args.allowed), **{argument: cache}
        )
        result = script.assign("result", f"attention({source})")
        pieces.append(script.assign("y", f"{result}{adapter.output_index}"))
        cache = script.assign("cache", f"{result}{cache_index}")
    message = f"{{place}} differs after a call with the first {first} tokens"
    script.assert_close(whole, script.concatenate(*pieces), message)


@law
def sliding_window(script: Script) -> None:
    r"""With a window of $w$, a query attends to keys at distances less than $w$.

    $$a_{ij} = 0 \iff |i - j| \ge w$$

    A window off by one passes every test of shapes. Both edges are tested: the key just
    outside must have no influence, and the key just inside must have one.
    """
    adapter = script.adapter
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


# Laws of positional encodings


def restart_with_one_head(script: Script, length: int) -> None:
    """Restart with one head, if no weights are returned and the sizes are free.

    With several heads, the output would mix their weights.
    """
    sizes = replace(script.sizes, q_len=length, k_len=length)
    if not script.adapter.weights_source and not script.adapter.fixed_size:
        sizes = replace(sizes, heads=script.adapter.group_size)
    script.sizes = sizes
    script.restart()


def make_equal_tokens(script: Script, length: int) -> CallArguments:
    """Arguments whose tokens are all equal, so that scores depend on positions only."""
    allowed = script.all_allowed(length, length)
    args = script.make_arguments(allowed)
    first = script.adapter.index(l=slice(0, 1))
    inputs = tuple(
        script.assign(name, f"{name}{first}.expand_as({name}).clone()")
        for name in args.inputs
    )
    return replace(args, inputs=inputs)


def weights_of_equal_tokens(script: Script, length: int) -> str:
    """The weights of the first batch item and head, `[q_len, k_len]`.

    Returned by the attention, or derived from its outputs in one of two ways. Raises
    `NotApplicable` where neither is possible.
    """
    adapter = script.adapter
    args = make_equal_tokens(script, length)
    if adapter.weights_source:
        weights = script.call_for_weights(args)
        index = [":" if letter in "qk" else "0" for letter in adapter.weights_axes]
        return script.assign("weights", f"{weights}[{', '.join(index)}]")
    if not adapter.single_input and "h" in adapter.layout:
        return weights_from_unit_values(script, args, length)
    skip_unless(
        script.sizes.heads == 1, "returns no weights, and cannot be built with one head"
    )
    return weights_from_gradients(script, args, length)


def weights_from_gradients(script: Script, args: CallArguments, length: int) -> str:
    """Weights of one head, up to a common factor, from the gradients of its values.

    All tokens are equal, so the gradient of output i with respect to token j is the
    weight of j times a matrix that is the same for all i and j: only its norm is
    needed. With several heads there would be one matrix for each.
    """
    adapter = script.adapter
    values = args.inputs[0 if adapter.single_input else 2]
    script.exec_line(f"{values}.requires_grad_()")
    output = script.call(args)
    script.exec_line("rows = []")
    for query in range(length):
        one = adapter.index(l=slice(query, query + 1), b=slice(0, 1))
        grad = script.gradient(f"{output}{one}", values)
        grad += adapter.index(b=slice(0, 1))
        by_key = f"{grad}.movedim({adapter.layout.index('l')}, 0)"
        script.exec_line(f"rows.append({by_key}.flatten(1).norm(dim=1))")
    return script.assign("weights", "torch.stack(rows)")


def weights_from_unit_values(script: Script, args: CallArguments, length: int) -> str:
    """Weights of a function: the output, if one key has the value 1, and others 0."""
    adapter = script.adapter
    query, key, value = args.inputs
    script.exec_line("columns = []")
    first_item_and_head = ["0"] * 4
    first_item_and_head[adapter.layout.index("l")] = ":"
    column = ", ".join(first_item_and_head)
    for n in range(length):
        unit = script.assign("value", f"torch.zeros_like({value})")
        script.exec_line(f"{unit}{adapter.index(l=slice(n, n + 1))} = 1")
        output = script.call(replace(args, inputs=(query, key, unit)))
        script.exec_line(f"columns.append({output}[{column}])")
    return script.assign("weights", "torch.stack(columns, dim=1)")


def ratio_tolerance(script: Script) -> float:
    """The tolerance of a ratio of weights, each of which is rounded."""
    return max(1e-3, 32 * torch.finfo(script.dtype).eps)


@law
def linear_bias(script: Script) -> None:
    r"""With ALiBi, weights fall with the distance by a constant factor.

    $$a_{ij} \propto e^{-m\,|i - j|}, \quad m \gt 0$$

    All tokens are made equal, so that scores differ by the linear bias only. If its
    sign is wrong, the farthest token has the largest weight, and the loss still falls.
    """
    adapter = script.adapter
    skip_unless(adapter.positions == "alibi", "`positions` is not alibi")
    length = max(3, script.sizes.k_len)
    restart_with_one_head(script, length)
    weights = weights_of_equal_tokens(script, length)
    last = f"{weights}[-1]"
    message = f"the last of {length} equal tokens weighs the first one more than itself"
    script.assert_true(f"{last}[-1] > {last}[0]", message)
    ratio = script.assign("ratio", f"{last}[1:] / {last}[:-1]")
    message = "the weights of equal tokens do not fall by a constant factor"
    claim = f"({ratio} / {ratio}[0] - 1).abs().max() <= {ratio_tolerance(script)}"
    script.assert_true(claim, message)


@law
def relative_positions(script: Script) -> None:
    r"""With a relative positional encoding, only the distance of two tokens matters.

    $$\frac{a_{ij}}{a_{ij'}} = \frac{a_{i+1,\,j+1}}{a_{i+1,\,j'+1}}$$

    Rotary queries and keys are rotated against each other by an angle that depends on
    their distance. If the angles are laid out for pairs of neighbors and the rotation
    pairs the two halves, or the other way round, it is no rotation, and absolute
    positions matter.
    """
    adapter = script.adapter
    skip_unless(
        adapter.positions in ("rotary", "alibi"), "`positions` is not rotary or alibi"
    )
    if assert_shift_invariant(script):
        return
    # No mask can hide tokens in front of the others: compare weights instead.
    length = max(4, script.sizes.k_len)
    restart_with_one_head(script, length)
    weights = weights_of_equal_tokens(script, length)
    # The ratios of neighboring keys must be the same one position later.
    ratio = script.assign("ratio", f"{weights}[:, 1:] / {weights}[:, :-1]")
    for query in range(2, length - 1):
        here = f"{ratio}[{query}, :{query}]"
        shifted = f"{ratio}[{query + 1}, 1:{query + 1}]"
        claim = f"({here} / {shifted} - 1).abs().max() <= {ratio_tolerance(script)}"
        message = f"queries {query} and {query + 1} weigh equal distances differently"
        script.assert_true(claim, message)


def assert_shift_invariant(script: Script) -> bool:
    """Put two hidden tokens in front; return whether a mask could hide them."""
    adapter, length = script.adapter, script.sizes.k_len
    longer = script.all_allowed(length + 2, length + 2)
    longer[:, :2] = False
    masks = script.masks_for(longer)
    for mask in masks:
        script.restart()
        allowed = script.all_allowed(length, length)
        args = script.make_arguments(allowed)
        before = script.call(args)
        sizes = replace(script.sizes, q_len=2, k_len=2)
        inputs = []
        for role, name in enumerate(args.inputs):
            hidden = script.random_tensor("hidden", *adapter.input_shape(sizes, role))
            inputs.append(script.concatenate(hidden, name))
        encoded = script.encode_mask(longer, mask)
        after = script.call(CallArguments(tuple(inputs), encoded, longer))
        after = script.assign("y", f"{after}{adapter.index(l=slice(2, None))}")
        message = "{place} changes behind two hidden tokens"
        script.assert_close(before, after, message, relative=ratio_tolerance(script))
    return bool(masks)
