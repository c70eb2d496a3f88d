r"""# Laws of scores

A score is the product of a query and a key, divided by the root of their width. These
laws measure its scale, also behind a rotation or a bias, make it so large that float16
is at its limit, and change tokens on which it does not depend.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), section 3.2.1.
"""

import math
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from attention_laws import documented
from attention_laws.adapter import MaskArgument
from attention_laws.algebra import (
    UNKNOWN_ORDER,
    has_unknown_order,
    project,
)
from attention_laws.execution import skip_if_for_float32
from attention_laws.law import (
    Excused,
    LawViolation,
    NotApplicable,
    ScriptError,
    law,
    skip_unless,
)
from attention_laws.recorded import record_weights, record_weights_with_gradients
from attention_laws.recorders import (
    SOFTMAX_PATTERN,
    CalledFunctions,
    ScoresOfZero,
    WeightsRecorder,
)
from attention_laws.script import CallArguments, Script

# Inputs times so much overflow in float16. Scores near its limit need less, unless
# queries and keys are normalized.
LARGEST_FACTOR = 1e4

# With weights times so much, scores are in the hundreds.
SCALE_OF_WEIGHTS = 30.0

# Scores below are those of hidden keys.
HIDDEN = -1e4


@law(assumes="norm features softcap decay window selection talking scale")
def score_scale(script: Script) -> None:
    r"""Scores are products of queries and keys, divided by the root of the width.

    $$\left\lVert \frac{\partial \ln (a_{10} / a_{11})}{\partial k_0} \right\rVert =
    \frac{\lVert q_1 \rVert}{\sqrt{d_k}}$$

    With a positional encoding the scores are not known, but how they grow is: a
    rotation keeps the length of a query, and a bias has no influence on it. A scale by
    the width of the model, or a query head that reads the keys of another group, has
    another length.
    """
    adapter = script.adapter
    skip_unless(
        adapter.positions in ("rotary", "alibi"), "`positions` is not rotary or alibi"
    )
    skip_unless(adapter.is_module and "b" in adapter.layout, "is a function")
    skip_unless(not has_unknown_order(script), UNKNOWN_ORDER)
    script.sizes = replace(script.sizes, batch_size=1, q_len=2, k_len=2)
    script.restart()
    args = script.make_arguments(script.all_allowed(2, 2))
    weights = record_weights_with_gradients(script, args)
    skip_unless(weights, "its weights are neither returned nor those of a softmax")
    with script.rollback():
        q, found = score_gradients(script, args, weights, query=1)
        factors = (found.norm(dim=-1) / q.norm(dim=-1)).tolist()
    worst = max(factors, key=lambda x: abs(x - 1))
    tolerance = 0.01
    if abs(worst - 1) > tolerance:
        message = (
            f"the scores of head {factors.index(worst)} are {worst:.3g} times those of "
            f"queries and keys, divided by the root of {script.sizes.d_k}"
        )
        script.fail("False, " + repr(message), message, abs(worst - 1), tolerance)


def score_gradients(
    script: Script, args: CallArguments, weights: str, query: int
) -> tuple[Tensor, Tensor]:
    """The vectors of a query, `[heads, d_k]`, before and after its rotation.

    The latter are the gradients of its score for key 0, times the root of the width.
    """
    heads, d_k = script.sizes.heads, script.sizes.d_k
    # With one input, a change of token 0 moves no query but its own.
    token = args.inputs[min(1, len(args.inputs) - 1)]
    q, k, _v = project(script, args)
    skip_unless(script.evaluate(f"{weights}.requires_grad"), "computes no gradients")

    def gradient(of: str) -> Tensor:
        text = f"torch.autograd.grad({of}, {token}, retain_graph=True)[0]"
        found: Tensor = script.evaluate(f"{text}.double().flatten(0, 1)[0]")
        return found

    found = []
    for head in range(heads):
        row = f"{weights}[{head}, {query}]"
        change = gradient(f"({row}[0].log() - {row}[{query}].log())")
        skip_unless(change.isfinite().all(), "its weights are zero")
        key = f"{k}[0, {head // script.adapter.group_size}, 0]"
        rows = torch.stack([gradient(f"{key}[{n}]") for n in range(d_k)], dim=1)
        size = torch.linalg.svdvals(rows)
        skip_unless(size[-1] > 1e-4 * size[0], "the norm of its keys leaves few free")
        solved = torch.linalg.lstsq(rows, change[:, None]).solution
        found.append(solved.flatten() * d_k**0.5)
    vectors: Tensor = script.evaluate(f"{q}[0, :, {query}].detach()")
    return vectors, torch.stack(found)


# Near the largest number of float16, and far beyond all scores that are not hidden.
LARGEST_SCORE, HIDING_SCORE = 60000, 1e8


@law(assumes="features channels unnormalized")
def large_scores(script: Script) -> None:
    r"""With large scores in float16, outputs are finite, and masks still hide.

    $$|q \cdot k| \approx 60{,}000 \lt 65{,}504$$

    The largest number of float16 is 65,504. A fill value of $-10^9$ overflows, one of
    $-10^3$ is above large scores, so that hidden keys win; a softmax that does not
    subtract the maximum overflows for scores above 11. Where the documentation says
    that scores are computed in float32, that products do not overflow, or that the
    model runs in half precision, they are three times as large; in the latter cases,
    before they are divided by 4. Where a norm bounds them, the parameters are scaled
    instead: in float64 for a softmax that is written by hand, and in float16 where
    products must not overflow.
    """
    assert_own_softmax_bears_large_scores(script)
    skip_if_for_float32(script)
    script.dtype = torch.float16
    is_exact = documented.has_exact_scores(script.adapter.target)
    is_safe = documented.overflows_nowhere(script.adapter.target)
    is_safe &= not (is_exact or script.adapter.fixed_size)
    if is_safe:
        script.sizes = replace(script.sizes, d_k=16)
    largest = LARGEST_SCORE * (3 if is_exact or is_safe else 1)
    try:
        if is_safe and not script.adapter.projections:
            assert_products_of_large_weights_are_finite(script, largest / 4)
        for allowed, mask in script.mask_cases():
            script.restart()
            args = script.make_arguments(allowed, mask)
            args = scale_to_large_scores(script, args, largest=largest)
            output = script.call(args)
            message = "large scores in float16 give NaN or infinity"
            try:
                script.assert_finite(output, message)
            except LawViolation:
                is_beside = overflows_beside_scores(script, args)
                skip_unless(not is_beside, "its state overflows, and not its scores")
                grow = scores_grow_with_layers(script, args)
                skip_unless(not grow, "scores of a later layer are beyond float16")
                is_beyond = largest == LARGEST_SCORE and exceed_half(script, args)
                skip_unless(not is_beyond, "its scores are larger than their products")
                is_sum = grows_with_scores(script, allowed, mask)
                skip_unless(not is_sum, "its weights are not divided by their sum")
                raise

        # Only the first key is visible. With one of the two signs its score is the
        # lowest, below any fill value that is too large.
        q_len = script.sizes.k_len if script.adapter.single_input else None
        allowed = script.all_allowed(q_len)
        allowed[:, 1:] = False
        for mask in script.masks_for(allowed):
            for sign in (1, -1):
                script.restart()
                args = script.make_arguments(allowed, mask)
                # Scores in the thousands: many hide keys with -10,000.
                args = scale_to_large_scores(script, args, sign, largest=6000)
                before = script.call(args)
                after = script.call(script.perturb(args, l=slice(1, None)))
                message = "{place} depends on hidden keys if scores are large"
                script.assert_close(before, after, message, l=slice(0, 1))
    except ScriptError as failure:
        if script.is_unsupported(failure):
            raise NotApplicable(f"float16 is not supported: {failure}") from failure
        raise


def assert_products_of_large_weights_are_finite(script: Script, largest: float) -> None:
    """Scores of this size are finite in float16, if the root of the width divides them.

    A norm may bound those of large inputs, so the parameters are scaled.
    """
    if not script.adapter.is_module:
        return
    factor = 1.0
    for _ in range(8):
        script.restart()
        args = script.make_arguments()
        script.exec_line(f"scale_parameters(attention, {factor:.4g})")
        with script.rollback():
            found = largest_score(script, args)
        if not 0 < found < math.inf or abs(found / largest - 1) < 0.05:
            break
        # Weights of a norm, and of a projection, are in queries and in keys.
        factor *= (largest / found) ** 0.25
    if factor > 1 and found:
        claim = f"scores_are_finite(lambda: {script.call_source(args)})"
        script.assert_true(claim, "products of queries and keys overflow in float16")


def assert_own_softmax_bears_large_scores(script: Script) -> None:
    """A softmax by hand is finite for large weights, and each item's is its own.

    Norms may bound the scores of large inputs, but no trained weights. Numbers have 64
    bits, of which rounding takes none that is compared.
    """
    adapter, items = script.adapter, script.sizes.batch_size
    if adapter.projections or not adapter.is_module or "b" not in adapter.layout:
        return
    script.restart()
    with CalledFunctions() as functions:
        script.call(script.make_arguments())
    called = filter(SOFTMAX_PATTERN.fullmatch, functions.found)
    if {name.strip("_") for name in called} != {"exp"}:
        return
    # It may be for float32 only.
    with script.using(dtype=torch.float64), script.attempt():
        script.restart()
        script.exec_line(f"scale_parameters(attention, {SCALE_OF_WEIGHTS})")
        args = script.make_arguments()
        before = script.call(args)
        script.assert_finite(before, "large scores give NaN or infinity")
        message = "{place} depends on other items if scores are large"
        for item in range(items if items > 1 else 0):
            others = [n for n in range(items) if n != item]
            after = script.call(script.perturb(args, b=others))
            script.assert_close(before, after, message, b=slice(item, item + 1))


def scores_grow_with_layers(script: Script, args: CallArguments) -> bool:
    """Whether scores of a later attention are too large for float16, without a norm.

    What hides a key is still much larger.
    """
    found: list[float] = []
    with script.rollback(), script.attempt():  # its mask may be of float16
        script.exec_line("exact = copy.deepcopy(attention).float()")
        inputs = tuple(script.assign(n, f"{n}.float()") for n in args.inputs)
        with WeightsRecorder() as recorder:
            script.call(replace(args, inputs=inputs), function="exact")
        sizes = [scores.detach().abs() for scores in recorder.scores]
        found = [x[x < HIDING_SCORE].max().item() for x in sizes]
    return len(found) > 1 and max(found) > torch.finfo(torch.float16).max


def overflows_beside_scores(script: Script, args: CallArguments) -> bool:
    """Whether a recurrence beside a softmax overflows, with scores of zero, too."""
    if "decay" not in script.adapter.designs:
        return False
    with script.rollback():
        with ScoresOfZero() as mode:
            output = script.call(args)
        is_finite = script.evaluate(f"{output}.isfinite().all()")
    return bool(mode.count and not is_finite)


def exceed_half(script: Script, args: CallArguments) -> bool:
    """Whether scores that are computed in float32 are no finite numbers of float16.

    They are not divided by the root of the width, but may be multiplied.
    """
    function = "attention"
    with script.rollback(), script.attempt(), WeightsRecorder() as recorder:
        inputs = tuple(script.assign(n, f"{n}.float()") for n in args.inputs)
        if script.adapter.is_module:
            function = "exact"
            script.exec_line("exact = copy.deepcopy(attention).float()")
        script.call(replace(args, inputs=inputs), function)
    limit = torch.finfo(torch.float16).max
    return any(bool((s[s > HIDDEN].abs() > limit).any()) for s in recorder.scores)


def grows_with_scores(
    script: Script, allowed: Tensor, mask: MaskArgument | None
) -> bool:
    """Whether large inputs that are doubled give more than twice the output.

    A mean of values doubles; the state of a recurrence, a sum of products, does not. A
    softmax gives a mean, with which a gate may be multiplied.
    """
    with script.using(dtype=torch.float32):
        script.restart()
        args = scale_to_large_scores(script, script.make_arguments(allowed, mask))
        double = tuple(script.assign(name, f"2 * {name}") for name in args.inputs)
        with WeightsRecorder() as recorder:
            outputs = [*map(script.call, (args, replace(args, inputs=double)))]
    one, two = (script.evaluate(f"{each}.abs().max()") for each in outputs)
    return not recorder.found and bool(two > 3 * one)


def scale_to_large_scores(
    script: Script, args: CallArguments, sign: int = 1, largest: int = LARGEST_SCORE
) -> CallArguments:
    """Scale queries and keys, by default so that scores are near the limit of float16.

    Where the projections are known, the largest product, or the largest difference of
    two products of a query, comes close to `largest`, or with a positional encoding,
    which may rotate them, the product of the largest norms; otherwise the inputs are
    multiplied by 8, or by less where scores grow faster than their square. `sign` is
    that of the queries.
    """
    adapter = script.adapter

    def scaled(factor: float) -> CallArguments:
        inputs = list(args.inputs)
        for role in [0] if adapter.single_input else [0, 1]:
            signed = f"{factor * (1 if role else sign):.3g}"
            inputs[role] = script.assign(inputs[role], f"{signed} * {inputs[role]}")
        return replace(args, inputs=tuple(inputs))

    if adapter.causal_queries:
        largest //= 4  # the scores of their own keys may be larger
    factor = 8.0
    is_function_of_qkv = not (adapter.is_module or adapter.single_input)
    if adapter.projections or is_function_of_qkv:
        # Biases do not scale with the inputs, so one step is not exact.
        for _ in range(4):
            with script.rollback():
                q, k, _v = project(script, scaled(factor))
                k = f"{k}.repeat_interleave({adapter.group_size}, dim=1)"
                # A softmax of float16 computes differences of scores, too.
                scores = script.assign("scores", f"{q} @ {k}.mT")
                spread = f"({scores}.amax(-1) - {scores}.amin(-1))"
                products = f"torch.maximum({scores}.abs().amax(-1), {spread})"
                if adapter.positions != "none":
                    products = f"{q}.norm(dim=-1).max() * {k}.norm(dim=-1)"
                found = script.evaluate(f"({products}).max().item()")
            if abs(found / largest - 1) < 0.01:
                break
            factor *= (largest / max(found, 1e-3)) ** 0.5
            is_bounded = factor > LARGEST_FACTOR
            skip_unless(not is_bounded, "its scores do not grow with its inputs")
    else:
        with script.rollback():
            one, two = (largest_score(script, scaled(each)) for each in (1, 2))
        degree = math.log2(two / one) if one and two else 2
        if largest > LARGEST_SCORE and one and degree > 1:
            factor = (largest / one) ** (1 / degree)
        else:
            factor **= 2 / max(2, degree)
    return scaled(factor)


def largest_score(script: Script, args: CallArguments) -> float:
    """The largest absolute score that a softmax is given, but for hidden keys."""
    with WeightsRecorder() as recorder:
        script.call(args)
    seen = (scores[scores > HIDDEN].abs() for scores in recorder.scores)
    return max((float(scores.max()) for scores in seen if scores.numel()), default=0)


@law(
    slow=True,
    assumes="features gate decay convolution group_norm selection cloud stationary",
)
def score_independence(script: Script) -> None:
    r"""The score of a query and a key depends on no other token.

    $$\frac{\partial}{\partial x_m} \ln \frac{a_{ij}}{a_{ij'}} = 0 \quad \text{for } m
    \neq i, j, j'$$

    The softmax divides a whole row by one number, so the ratio of two weights of a
    query depends on that query and the two keys only. A relative shift that takes
    scores from the row of another query, or a statistic over the tokens, makes it
    depend on others.
    """
    adapter = script.adapter
    skip_unless(not adapter.is_pooled, "has one output for all tokens")
    is_plain = not (adapter.image or (adapter.is_module and "h" in adapter.layout))
    skip_unless(is_plain, "has two axes of tokens")
    try:
        assert_scores_independent(script, adapter.fixed_length or 5)
    except LawViolation:
        if adapter.fixed_length or "window" not in adapter.designs:
            raise
        # The keys may have been those of a window with as many, each at its distance.
        assert_scores_independent(script, 8)


def assert_scores_independent(script: Script, length: int) -> None:
    """The ratio of two weights does not change with a token that is neither key."""
    script.sizes = replace(script.sizes, batch_size=1, q_len=length, k_len=length)
    script.restart()
    args = script.make_arguments(script.all_allowed(length, length))
    before = record_weights(script, args)
    skip_unless(before, "its weights are neither returned nor those of a softmax")
    after = record_weights(script, script.perturb(args, l=slice(1, 2)))
    rest = [0, *range(2, length)]
    message = "the ratio of two weights changes with token 1, which is neither key"
    try:
        others = f"[:, {rest}][..., {rest}]"
        assert_shares_equal(script, (before, after), others, message)
    except LawViolation:
        shifted = f"[:, {rest}][..., {[0, 1, *range(3, length)]}]"
        with suppress(LawViolation):
            assert_shares_equal(script, (before, after), shifted, message)
            raise Excused("each key is the token before it") from None
        raise


# The sum of two weights of which the ratio is not compared.
TINY = 1e-30


def assert_shares_equal(
    script: Script, weights: tuple[str, str], others: str, message: str
) -> None:
    """The weights at the index `others` have the same ratios to that of the first."""
    shares, sums = [], []
    for each in weights:
        part = script.assign("others", f"{each}{others}")
        # Of a key that is hidden the share is 0, and between two of them unknown.
        share = f"({part} / ({part} + {part}[..., :1])).nan_to_num()"
        shares.append(script.assign("share", share))
        sums.append(f"({part} + {part}[..., :1] < {TINY})")
    # Numbers that small are rounded to few digits, or to zero.
    both = f"({' | '.join(sums)})"
    shares = [script.assign("share", f"{s}.masked_fill({both}, 0.0)") for s in shares]
    tolerance = max(1e-3, 32 * torch.finfo(script.dtype).eps)
    claim = f"({shares[1]} - {shares[0]}).abs().max() <= {tolerance}"
    script.assert_true(claim, message)
