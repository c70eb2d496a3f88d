r"""# Laws of gradients

$$u^\top \nabla L(x) = \lim_{\varepsilon \to 0} \frac{L(x + \varepsilon u) - L(x -
  \varepsilon u)}{2 \varepsilon}$$

A right output does not show that the backward pass is right: a tensor may be detached,
changed in place after it was saved, or left out. So gradients are compared with
differences of the output, and every trainable parameter must receive one.

Source: [Numerical Optimization](https://doi.org/10.1007/978-0-387-40065-5), Nocedal and
Wright 2006, section 8.1.
"""

import ast
import re
import textwrap
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from attention_laws import documented, names, structure
from attention_laws.adapter import Adapter, MaskArgument
from attention_laws.algebra import edge_argument
from attention_laws.execution import skip_if_lowest
from attention_laws.law import (
    LawViolation,
    NotApplicable,
    ScriptError,
    law,
    skip_unless,
)
from attention_laws.recorders import WeightsRecorder
from attention_laws.script import CallArguments, Script
from attention_laws.source import source_of, source_with_bases
from attention_laws.tools import captured_input, is_called

# Tokens, more than a block of 128 has, and rows of an image, with which all parts of an
# attention act.
ENOUGH_TOKENS, ENOUGH_ROWS = 130, 12


@law(slow=True, assumes="stationary quantized assignment")
def gradients(script: Script) -> None:
    r"""Gradients equal finite differences of the output, in float64.

    $$u^\top \nabla L(x) \approx \frac{L(x + \varepsilon u) - L(x - \varepsilon u)}{2
    \varepsilon}$$

    Hand-written backward passes, detached tensors and in-place operations can give a
    right output and a wrong gradient. The difference is taken in random directions,
    with a step that is large enough for implementations whose softmax is always in
    float32; if it differs, with smaller ones, which hardly meet the kinks of a ReLU.
    In training, the backward pass must have the dropout masks of the forward pass, even
    if it computes them again. A backward pass in blocks has to add up their parts,
    which a long sequence shows, and to align a causal mask as the forward pass does,
    which fewer queries than keys show. A single query has a gradient, too. A bias that
    is given with each call may be learned, and coordinates may be predicted.
    """
    code = structure.identifiers(script.adapter.target)
    is_detached = not {"detach", "no_grad"}.isdisjoint(code)
    if "features" in script.adapter.designs and not script.insist:
        skip_unless(not is_detached, "its code detaches the scale of its features")
    with script.using(dtype=torch.float64):
        for allowed, mask in script.mask_cases():
            script.restart()
            args = script.make_arguments(allowed, mask)
            try:
                assert_gradients_are_slopes(script, args)
            except LawViolation:
                is_odd = needs_float32(script, allowed, mask)
                skip_unless(not is_odd, "has a gradient in float32, and NaN in float64")
                target, insist = script.adapter.target, script.insist
                if documented.stops_gradients(target):
                    skip_unless(insist, "its code says where gradients stop")
                if documented.computes_in_half(target):
                    skip_unless(insist, "its products are rounded in all dtypes")
                raise
        # Scores of dropped keys that vanish beside a large number have gradients.
        drops_keys = structure.drops_columns(script.adapter.target)
        is_repeatable = script.adapter.reproducible_training and not drops_keys
        if script.adapter.is_module and is_repeatable:
            script.restart("train", dropout=0.5)
            args = script.make_arguments()
            if can_repeat_dropout(script, args):
                assert_gradients_are_slopes(script, args, seed="torch.manual_seed(0)")
        assert_biases_have_gradients(script)
        assert_gradients_of_few_queries_are_slopes(script)
        assert_single_query_matters(script)
        if script.adapter.fixed_length is None:
            assert_long_gradients_are_slopes(script)


def needs_float32(script: Script, allowed: Tensor, mask: MaskArgument | None) -> bool:
    """Whether gradients are NaN in float64 and finite in float32.

    A softmax in float32 makes the lowest number of float64 minus infinity.
    """
    are_finite = []
    for dtype in (torch.float32, torch.float64):
        with script.using(dtype=dtype):
            script.restart()
            args = script.make_arguments(allowed, mask)
            for name in args.inputs:
                script.exec_line(f"{name}.requires_grad_()")
            output = script.call(args)
            found = [script.gradient(output, name) for name in args.inputs]
            claims = [script.evaluate(f"{grad}.isfinite().all()") for grad in found]
            are_finite.append(all(claims))
    return are_finite == [True, False]


def assert_biases_have_gradients(script: Script) -> None:
    """Other tensors of numbers, such as a bias, receive a gradient if they matter.

    It is finite, also that of coordinates, in which a token has no distance to itself.
    They matter if a small change of them changes the output, and a smaller one less:
    that of a number which is compared with a threshold, or rounded, does not.
    """
    script.restart()
    length = script.sizes.k_len
    args = script.make_arguments(script.all_allowed(length, length))
    sized = script.sized_arguments(args, 0, [*args.inputs])
    positions = script.adapter.position_args
    # Positions that are numbers beyond those of a sequence are coordinates.
    points = {name for name, text in positions.items() if "%" in text}
    texts = {n: text for n, text in sized.items() if n not in {*positions} - points}
    for mask in script.adapter.masks:
        if mask.kind.startswith("additive") and "bias" in mask.name:
            encoded = script.encode_mask(args.allowed | True, mask)
            texts |= [encoded] if encoded else []
    for name in args.inputs if texts else ():
        script.exec_line(f"{name}.requires_grad_()")
    for argument, text in texts.items():
        value = script.evaluate(text)
        if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
            continue
        bias = script.random_tensor(argument, *value.shape)
        script.exec_line(f"{bias}.requires_grad_()")
        change = f"seeded_randn(9, *{bias}.shape).to({bias})"
        near = [
            script.assign(argument, f"{bias} + {size} * {change}")
            for size in (1e-6, 1e-4)
        ]
        with script.attempt():  # its values may have a meaning
            alone = replace(args, mask=None)
            one, *others = (script.call(alone, **{argument: x}) for x in (bias, *near))
            small, large = (
                script.evaluate(f"float(({y} - {one}).abs().max())") for y in others
            )
            if 0 < small < large / 10:
                grad = script.gradient(one, bias)
                message = f"`{argument}` changes the output, and receives no gradient"
                script.assert_true(f"{grad}.any()", message)
                script.assert_finite(
                    grad, f"the gradient of `{argument}` is not finite"
                )


def assert_gradients_of_few_queries_are_slopes(script: Script) -> None:
    """The same for fewer causal queries than keys, however the mask is aligned."""
    adapter, k_len = script.adapter, script.sizes.k_len
    if adapter.single_input or k_len < 2:
        return
    flags = [(mask.name, "True") for mask in adapter.masks if mask.kind == "causal"]
    for flag in [None, *flags] if adapter.causal else flags:
        script.restart()
        args = script.make_arguments(script.all_allowed(k_len // 2, k_len))
        args = replace(args, mask=flag or args.mask)
        for name in args.inputs:
            script.exec_line(f"{name}.requires_grad_()")
        with script.attempt():  # it may refuse unequal lengths
            output = script.call(args)
            for name in args.inputs:
                assert_gradient_is_slope(script, args, output, name)


def assert_single_query_matters(script: Script) -> None:
    """A single query receives a gradient, if several do."""
    adapter, k_len = script.adapter, script.sizes.k_len
    if adapter.single_input or adapter.is_pooled or adapter.causal or k_len < 2:
        return  # a causal one may see the first key only
    if adapter.one_length or edge_argument(adapter):
        return  # whose edges are those of as many nodes as there are queries
    counts, found = (2, 1), []
    with script.attempt():  # it may need as many queries as keys
        for count in counts:
            script.restart()
            args = script.make_arguments(script.all_allowed(count, k_len))
            script.exec_line(f"{args.inputs[0]}.requires_grad_()")
            gradient = script.gradient(script.call(args), args.inputs[0])
            found.append(bool(script.evaluate(f"{gradient}.any()")))
        if found == [True, False]:
            message = "a single query has no influence on its output"
            script.assert_true(f"{gradient}.any()", message)


def assert_long_gradients_are_slopes(script: Script) -> None:
    """The same for a long sequence, if its backward pass is written by hand."""
    length = ENOUGH_TOKENS
    script.sizes = replace(script.sizes, batch_size=1, q_len=length, k_len=length)
    script.restart()
    args = script.make_arguments(script.all_allowed(length, length))
    for name in args.inputs:
        script.exec_line(f"{name}.requires_grad_()")
    with script.attempt():  # longer than its tables
        output = script.call(args)
        if script.evaluate(f"has_own_backward({output})"):
            for name in args.inputs:
                assert_gradient_is_slope(script, args, output, name)


def can_repeat_dropout(script: Script, args: CallArguments) -> bool:
    """Whether dropout is random, and the seed of PyTorch determines it."""
    with script.rollback():
        outputs = []
        for seed in (0, 0, 1):
            script.exec_line(f"torch.manual_seed({seed})")
            outputs.append(script.call(args))
        one, again, other = (script.evaluate(each) for each in outputs)
    return torch.equal(one, again) and not torch.equal(one, other)


def assert_gradients_are_slopes(
    script: Script, args: CallArguments, seed: str = ""
) -> None:
    """Compare the gradient of each input with differences; each call gets the seed.

    So are those of parameters, if a backward pass is written by hand.
    """
    for name in args.inputs:
        script.exec_line(f"{name}.requires_grad_()")
    try:
        output = call_with_seed(script, args, seed)
    except ScriptError as failure:
        raise NotApplicable(f"does not run in float64: {failure}") from failure
    skip_if_lowest(script, output)
    target = script.adapter.target
    for argument, name in zip(script.adapter.inputs, args.inputs, strict=False):
        # A memory of past tokens may have none by intention.
        for direction in range(
            0 if documented.gets_no_gradient(target, argument) else 3
        ):
            with script.rollback():
                script.skip_random(direction)
                assert_gradient_is_slope(script, args, output, name, seed)
    if script.adapter.is_module and not seed:
        call = f"lambda: {script.call_source(args)}"
        index = script.adapter.output_index
        found = script.assign("wrong", f"wrong_gradients({call}, attention, {index!r})")
        wrong = script.evaluate(found)
        message = f"the gradient of {wrong} is not the slope of the output"
        script.assert_true(f"not {found}", message)


def call_with_seed(script: Script, args: CallArguments, seed: str) -> str:
    """The output of a call after a line that sets a seed, if there is one."""
    if seed:
        script.exec_line(seed)
    return script.call(args)


def assert_gradient_is_slope(
    script: Script, args: CallArguments, output: str, name: str, seed: str = ""
) -> None:
    """Compare the gradient in a random direction with a central difference.

    A kink, such as that of a ReLU, or a curve may lie within a step. A wrong gradient
    differs from the slope over each step, however small.
    """
    grad = script.gradient(output, name)
    u = script.random_tensor("u", *script.evaluate(name).shape)
    script.exec_line(f"{u} /= {u}.norm()")
    # Dropout makes the output steeper and more curved; wrong masks change it by much.
    step, share = (0.001, 0.3) if seed else (0.01, 0.05)
    for smaller in (step, step / 100):
        with script.rollback(), suppress(LawViolation):
            assert_slope(script, args, (name, grad, u), seed, smaller, share)
            return
    assert_slope(script, args, (name, grad, u), seed, step / 10000, share)


def assert_slope(
    script: Script,
    args: CallArguments,
    names_of: tuple[str, str, str],
    seed: str,
    step: float,
    share: float,
) -> None:
    """Compare the gradient of an input in a direction with a difference of two steps.

    `names_of` are the variables of the input, of its gradient and of the direction.
    """
    name, grad, u = names_of
    losses = []
    for sign in "+-":
        moved = script.assign(name, f"{name} {sign} {step} * {u}")
        inputs = tuple(moved if each == name else each for each in args.inputs)
        moved_args = replace(args, inputs=inputs)
        losses.append(f"loss({call_with_seed(script, moved_args, seed)})")
    slope = script.assign("slope", f"({losses[0]} - {losses[1]}) / {2 * step}")
    message = f"the gradient of `{name}` is not the slope of the output"
    tolerance = f"{share} * {grad}.square().mean().sqrt() + 0.001"
    script.assert_true(
        f"(({grad} * {u}).sum() - {slope}).abs() <= {tolerance}", message
    )


@law(assumes="inference axial convolution")
def parameter_gradients(script: Script) -> None:
    r"""Every trainable parameter receives a gradient.

    $$\partial L / \partial w \neq 0$$

    A weight that the forward pass leaves out, or uses under `detach`, stays at its
    initialization. (Of biases, only a gradient that is not `None` is required: the bias
    of the keys adds one number to a whole row of scores, which the softmax cancels, so
    its gradient is zero up to rounding.) Nor is a norm without weights left out, or a
    head, nor does a learned scale begin beyond its limit. Where a mask hides keys, the
    gradients have to be finite, too.
    """
    adapter, sizes = script.adapter, script.sizes
    skip_unless(adapter.is_module, "is a function, and has no parameters")
    skip_unless(sizes.k_len > 1, "needs two keys")
    is_single = adapter.mixes_queries and sizes.q_len == 1
    skip_unless(not is_single, "needs two queries, which attend to each other")
    parameters = names.parameters_by_name(adapter.target).items()
    given = {n: str(p.default) for n, p in parameters} | {**adapter.extra_args}
    counts = filter(names.FRAMES_PATTERN.fullmatch, given)
    one = [name for name in counts if given[name] == "1"]
    skip_unless(not one, f"has one frame (`{', '.join(one)}`), which attends to itself")
    named = structure.identifiers(adapter.target) & {"softmax"}
    is_reached = not named or "unnormalized" not in adapter.designs
    skip_unless(is_reached, "does not reach its softmax in a first call")
    marks = [m for m in adapter.masks if m.kind.startswith(("attend", "additive"))]
    with script.using():  # whatever sizes it takes until all gradients arrive
        give_room(script)
        try:
            assert_gradients_arrive(script)
        except LawViolation:
            trains = adapter.reproducible_training
            if not (
                any(do_gradients_arrive_with_marks(script, mask) for mask in marks)
                or do_gradients_arrive(script, factor=0.3)
                or (not trains and do_gradients_arrive(script, in_training=True))
                or do_gradients_arrive_in_wide(script)
                or do_gradients_arrive_in_long(script)
                or do_gradients_arrive_in_parts(script)
            ):
                raise
    assert_no_head_is_zero(script)
    assert_scales_begin_within_limits(script)
    assert_gradients_are_finite_with_masks(script)


# Learned factors of scores, or their logarithms.
LEARNED_SCALE_PATTERN = re.compile(r"(.*[._])?(logit_)?(scale|temperature|tau|temp)")
LIMIT_NAMES = {"clamp", "clamp_max", "clip", "minimum"}


def assert_scales_begin_within_limits(script: Script) -> None:
    """A learned scale that is limited has a gradient where it begins.

    Limited to the logarithm of its largest value after the exponential function, and
    not before it, it stays at that number.
    """
    script.restart()
    attention = script.evaluate("attention")
    learned = [
        name
        for name, weight in attention.named_parameters()
        if weight.requires_grad and weight.numel() in (1, script.sizes.heads)
        if LEARNED_SCALE_PATTERN.fullmatch(name)
    ]
    if not learned or not LIMIT_NAMES & structure.identifiers(attention):
        return
    script.exec_line(f"begun = dict({script.build_expression()}.named_parameters())")
    script.exec_line("weights = dict(attention.named_parameters())")
    for name in learned:
        script.exec_line(f"weights[{name!r}].data.copy_(begun[{name!r}])")
    output = script.call(script.make_arguments())
    script.exec_line(f"loss({output}).backward()")
    for name in learned:
        message = f"`{name}` begins beyond its limit, and receives no gradient"
        script.assert_true(f"weights[{name!r}].grad.any()", message)


def assert_no_head_is_zero(script: Script) -> None:
    """What the last projection gets of a head is not zero for all tokens."""
    heads, width = script.sizes.heads, script.sizes.heads * script.sizes.d_k
    script.restart()
    layers = structure.layers_by_role(script.evaluate("attention"), width)
    if "out" not in layers or heads == 1 or "selection" in script.adapter.designs:
        return
    layer = f"attention.get_submodule({layers['out']!r})"
    arguments = f"lambda: {script.call_source(script.make_arguments())}, {layer}"
    if not script.evaluate(f"is_called({arguments})"):
        return
    context = script.assign("context", f"captured_input({arguments})")
    if script.evaluate(context).shape[-1] != width:
        return
    of_heads = f"{context}.unflatten(-1, ({heads}, -1)).flatten(0, -3).abs()"
    largest = script.assign("largest", f"{of_heads}.amax([0, 2])")
    for head in range(heads):
        message = f"head {head} gives zeros to the last projection"
        script.assert_true(f"{largest}[{head}] > 0", message)


def assert_gradients_are_finite_with_masks(script: Script) -> None:
    """Where a mask hides some keys, no parameter receives a gradient that is NaN.

    A score of minus infinity that is then divided by a learned temperature, or goes
    through another function with parameters, leaves no trace in the output; in the
    backward pass, 0 times infinity is NaN. What hides keys in an additive mask is the
    caller's number.
    """
    for allowed, mask in script.mask_cases():
        if mask is None or mask.kind.startswith("additive"):
            continue
        script.restart()
        args = script.make_arguments(allowed, mask)
        real = script.adapter.index(l=script.real_queries(args))
        output = script.assign("y", f"{script.call(args)}{real}")
        script.exec_line("named = dict(attention.named_parameters())")
        script.exec_line("named = {n: w for n, w in named.items() if w.requires_grad}")
        if not script.evaluate(f"{output}.isfinite().all() and {output}.requires_grad"):
            continue
        options = "[*named.values()], allow_unused=True"
        script.exec_line(f"grads = torch.autograd.grad(loss({output}), {options})")
        for n, name in enumerate(script.evaluate("[*named]")):
            message = f"the gradient of `{name}` is NaN or infinite beside a mask"
            claim = f"grads[{n}] is None or grads[{n}].isfinite().all()"
            script.assert_true(claim, message)


def do_gradients_arrive_with_marks(script: Script, mask: MaskArgument) -> bool:
    """Whether all parameters receive a gradient if a mask has a 2 for all keys but one.

    Such a mark, or a 1 that is added, is that of a token with global attention, which
    may have projections of its own.
    """
    return mask.axes.endswith("k") and do_gradients_arrive(script, marks=mask)


def do_gradients_arrive(
    script: Script,
    factor: float = 1.0,
    marks: MaskArgument | None = None,
    in_training: bool = False,
) -> bool:
    """Whether all parameters receive a gradient if their weights are multiplied.

    In a stack of attentions, scores may be so large that a softmax has no gradient:
    smaller weights show whether a parameter has influence. One that is random in
    training may use some of them only there, such as the scale of a noise.
    """
    try:
        assert_gradients_arrive(script, marks, factor, in_training)
    except (LawViolation, ScriptError):
        return False
    return True


def do_gradients_arrive_in_wide(script: Script) -> bool:
    """Whether all parameters receive a gradient if the heads are wide.

    A part may be narrower than a head: behind a norm, two features are 1 and -1. Longer
    sums round to larger numbers: in float64, these are none.
    """
    if script.adapter.fixed_size:
        return False
    with script.using(dtype=torch.float64, d_k=4 * script.sizes.d_k):
        return do_gradients_arrive(script)


def do_gradients_arrive_in_long(script: Script) -> bool:
    """Whether all parameters receive a gradient from a long sequence.

    A part may act beyond some length only, such as that for summaries of full blocks,
    or between windows; or for several heads only, such as their shares.
    """
    adapter, lengths = script.adapter, [ENOUGH_TOKENS]
    if adapter.fixed_length is not None:
        if not adapter.image:
            return False
        lengths = [4 * adapter.fixed_length]
        height = 2 * adapter.grid(adapter.fixed_length)[0]
        script.adapter = replace(adapter, fixed_length=None, image_height=height)
    elif adapter.image:
        lengths = [ENOUGH_ROWS**2]
        # Attention over time has one key in a video of one frame, and often a table of
        # few frames.
        image = adapter.image.replace("video", "frames")
        lengths += [ENOUGH_ROWS] if image.startswith("frames") else []
        script.adapter = replace(adapter, image=image, image_height=ENOUGH_ROWS)
    for n in lengths:
        script.sizes = replace(
            script.sizes, batch_size=1, heads=adapter.heads, q_len=n, k_len=n
        )
        if do_gradients_arrive(script):
            return True
    return False


def do_gradients_arrive_in_parts(script: Script) -> bool:
    """Whether all parameters receive a gradient from a context of two parts, not one.

    Of a single image, or passage, the share is 1, whatever its score is.
    """
    adapter = script.adapter
    if adapter.packing != "{0}[:, None]":
        return False
    parts = replace(adapter, packing="{0}.unflatten(1, (2, -1))")
    with script.using(parts, k_len=ENOUGH_TOKENS):
        return do_gradients_arrive(script)


# The end of what is the same for all tokens.
OF_TOKENS = ("{length}, -1)", "{k_len}, -1)")


def assert_gradients_arrive(
    script: Script,
    marks: MaskArgument | None = None,
    factor: float = 1.0,
    in_training: bool = False,
) -> None:
    """Each trainable parameter, times a factor, receives a gradient that is not zero.

    With `marks`, this mask has a 1 for the first key and a 2 for the others, or a 0 and
    a 1 if it is added to the scores.
    """
    adapter = script.adapter
    # What is the same for all pairs of tokens would cancel in the softmax.
    extra_args = {
        name: f"({text}).cumsum(-2).sin()" if text.endswith(OF_TOKENS) else text
        for name, text in adapter.extra_args.items()
    }
    script.adapter = adapter = replace(adapter, extra_args=extra_args)
    trains = in_training or adapter.reproducible_training
    script.restart("train" if trains else "eval")
    if factor != 1:
        change = f"weight.data.mul_({factor})"
        script.exec_line(f"for weight in attention.parameters(): {change}")
    script.exec_line("weights = dict(attention.named_parameters())")
    trainable = script.evaluate("[n for n, w in weights.items() if w.requires_grad]")
    skip_unless(trainable, "has no trainable parameters")
    args = script.make_arguments()
    if marks:
        name, value = script.encode_mask(script.all_allowed(), marks) or ("", "")
        first = f"(torch.arange({args.allowed.shape[1]}){script.to_device()} > 0)"
        value += ".long()" if marks.kind.startswith("attend") else ""
        args = replace(args, mask=(name, f"{value} + {first}"))
    result = script.assign("result", f"{script.call_source(args)}")
    losses = [f"loss({output})" for output in script.all_outputs(args, result)]
    total = script.assign("total", " + ".join(losses))
    script.assert_true(f"{total}.requires_grad", "no parameter receives a gradient")
    script.exec_line(f"{total}.backward()")
    for name, part in script.evaluate("attention").named_modules():
        if structure.is_norm_without_weight(part):
            call = f"lambda: {script.call_source(args)}"
            claim = f"is_called({call}, attention.get_submodule({name!r}))"
            script.assert_true(claim, f"the norm `{name}` is never applied")
    optional = names.optional_tensors(adapter) or optional_keys(adapter)
    # A constant argument, such as a bias of zero, has no gradient to pass on.
    has_constant = "torch." in str(adapter.extra_args) or attends_to_one(script, args)
    for name in trainable:
        is_projection = f".{name.split('.')[0]}" in str(adapter.projections)
        grad = f"weights[{name!r}].grad"
        if optional and not is_projection and script.evaluate(f"{grad} is None"):
            continue  # it may be for an argument that is not given
        if optional and gets_zeros(script, args, name):
            continue  # which is zero where it is not given
        if script.evaluate(f"{grad} is None"):
            if only_chooses(script, args, name) or is_of_other_axes(script, name):
                continue
            if is_used_in_other_part(script.evaluate("attention"), name):
                continue
        if name not in adapter.unused_parameters:
            script.assert_true(f"{grad} is not None", f"`{name}` receives no gradient")
            if not structure.is_bias(name) and not has_constant:
                # A sink, a gain, a table: zero up to rounding means that it cancels.
                message = f"the gradient of `{name}` is zero up to rounding"
                script.assert_true(f"{grad}.abs().max() > 1e-6", message)


def optional_keys(adapter: Adapter) -> list[str]:
    """The keys of a dict of inputs that `forward` reads only if they are there."""
    if not adapter.input_key:
        return []
    first = next(iter(names.parameters_by_name(adapter.target)))
    return re.findall(rf"\b{first}\.get\([\"'](\w+)", source_with_bases(adapter.target))


def is_used_in_other_part(module: nn.Module, name: str) -> bool:
    r"""Whether another part of the same class has a gradient for a parameter.

    Layers of an encoder may have what only those of a decoder use. Other parameters of
    the part have one: it is not left out.

    >>> class Layer(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.own, self.cross = nn.Linear(1, 1), nn.Linear(1, 1)
    >>> layers = nn.ModuleList([Layer(), Layer()])
    >>> layers[1].own(layers[0].cross(layers[0].own(torch.ones(1)))).backward()
    >>> is_used_in_other_part(layers, "1.cross.weight")
    True
    """
    parts = dict(module.named_modules())
    weights = dict(module.named_parameters())
    path = name.split(".")
    for count in range(1, len(path) - 1):
        prefix, rest = ".".join(path[:count]), ".".join(path[count:])
        if not structure.is_of_user(type(parts[prefix])):
            continue
        beside = [w for n, w in weights.items() if n.startswith(f"{prefix}.")]
        alike = [n for n, p in parts.items() if type(p) is type(parts[prefix])]
        others = [weights[f"{n}.{rest}"] for n in alike if f"{n}.{rest}" in weights]
        if any(w.grad is not None for w in beside):
            if any(w.grad is not None for w in others):
                return True
    return False


def is_of_other_axes(script: Script, name: str) -> bool:
    """Whether `forward` uses a weight for inputs with another number of axes.

    Such is an embedding of frames, which only a video has.
    """
    text = textwrap.dedent(source_of(script.evaluate("attention.forward")))
    branches: list[ast.AST] = []
    with suppress(SyntaxError):  # of lines that are not indented
        branches = [*ast.walk(ast.parse(text))]
    return any(
        getattr(part, "attr", "") == name.partition(".")[0]
        for branch in branches
        if isinstance(branch, ast.If)
        and re.search(r"\.(ndim\b|dim\(\))", ast.unparse(branch.test))
        for part in ast.walk(branch)
    )


def only_chooses(script: Script, args: CallArguments, name: str) -> bool:
    """Whether a weight has an influence on which tokens are chosen, and no other.

    Then no small change of it changes the output, and a large one does.
    """
    with script.rollback():
        before = script.call(args)
        weight = f"weights[{name!r}].data"
        script.exec_line(f"{weight}.add_(1e-6 * torch.randn_like({weight}))")
        near = script.call(args)
        script.exec_line(f"{weight}.copy_(torch.randn_like({weight}))")
        far = script.call(args)
        changes = [f"torch.equal({before}, {after})" for after in (near, far)]
        return [*map(script.evaluate, changes)] == [True, False]


def attends_to_one(script: Script, args: CallArguments) -> bool:
    """Whether an attention has one key, what another one has pooled all tokens to.

    Its weight is one, whatever the query and the key are.
    """
    with script.rollback(), WeightsRecorder() as recorder:
        script.call(args)
    counts = recorder.key_counts
    return min(counts, default=0) == 1 and len(counts) > 1


def gets_zeros(script: Script, args: CallArguments, name: str) -> bool:
    """Whether the layer that a weight belongs to gets zeros only."""
    attention = script.evaluate("attention")
    layer = attention.get_submodule(name.rpartition(".")[0])
    call = eval(f"lambda: {script.call_source(args)}", script.namespace)
    return is_called(call, layer) and not captured_input(call, layer).any()


def give_room(script: Script) -> None:
    """Enlarge sizes at which a gradient may vanish in a correct implementation.

    A norm, or a softmax over the features, of a head of one feature is constant, and so
    is the bias of rows in an image of one row.
    """
    adapter, sizes = script.adapter, script.sizes
    if not adapter.fixed_size:
        sizes = replace(sizes, d_k=max(8, sizes.d_k))
    script.sizes = sizes
    if adapter.image and adapter.fixed_length is None:
        script.adapter = replace(adapter, image_height=2)
        script.sizes = replace(sizes, q_len=6, k_len=6)
        script.restart()
        try:
            script.call(script.make_arguments())
        except ScriptError:  # the image must be a square, or is none
            script.adapter, script.sizes = adapter, sizes
