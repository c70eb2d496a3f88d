r"""# Laws of execution

The same attention is trained and evaluated, in float32 and in half precision, eagerly
and compiled, saved and loaded. None of this may change what it computes, beyond stated
tolerances.

Source: the behavior is that of [PyTorch's
modules](https://docs.pytorch.org/docs/stable/notes/modules.html).
"""

from dataclasses import replace

import torch

from attention_laws.law import NotApplicable, ScriptError, law, skip_unless
from attention_laws.script import Script


@law
def eval_matches_train(script: Script) -> None:
    r"""Evaluation computes the same as training with dropout 0.

    $$y_{\text{eval}} = y_{\text{train}}\big|_{p = 0}$$

    If a mask, a scale or a fast path is active in one of the two modes only, the model
    that is evaluated was never trained. Evaluation runs with dropout 0.5 configured,
    with and without recording gradients; training runs with dropout 0.
    """
    skip_unless(script.adapter.is_module, "is a function, and has no modes")
    skip_unless(
        script.adapter.reproducible_training, "training is random even with dropout 0"
    )
    for allowed, mask in script.mask_cases():
        script.restart("eval", dropout=0.5)
        args = script.make_arguments(allowed, mask)
        evaluated = script.call(args)
        script.no_grad = True
        without_grad = script.call(args)
        script.no_grad = False
        script.exec_line("set_dropout(attention, 0.0)")
        script.exec_line("attention.train()")
        trained = script.call(args)
        message = "the output at {place} differs in evaluation"
        script.assert_close(trained, evaluated, message)
        message += " under torch.no_grad()"
        script.assert_close(trained, without_grad, message)


@law
def deterministic(script: Script) -> None:
    r"""Two evaluations give the same output.

    $$y_{\text{eval}} = y_{\text{eval}}$$

    `eval` switches dropout layers off, but not a dropout probability that the module
    passes to a function: it has to pass 0 itself.
    """
    for allowed, mask in script.mask_cases():
        script.restart("eval", dropout=0.5)
        args = script.make_arguments(allowed, mask)
        one, other = script.call(args), script.call(args)
        message = "two calls in evaluation differ at {place}"
        script.assert_close(one, other, message, relative=0.0)


@law
def no_side_effects(script: Script) -> None:
    r"""A call modifies no input, mask, parameter or buffer.

    $$x_{\text{after}} = x_{\text{before}}$$

    The caller may pass the same tensors to the next layer. A mask that is modified in
    place is right in the first layer only. (In training, buffers may change, as those
    of a batch normalization do.)
    """
    for mode in script.gradient_modes():
        for allowed, mask in script.mask_cases():
            script.restart(mode)
            args = script.make_arguments(allowed, mask)
            tensors = list(args.inputs)
            if args.mask is not None and args.mask[1] in script.namespace:
                tensors.append(args.mask[1])
            for name in tensors:
                script.exec_line(f"{name}_before = {name}.clone(), {name}._version")
            if script.adapter.is_module:
                named = ["*attention.named_parameters()"]
                if mode == "eval":
                    named.append("*attention.named_buffers()")
                script.exec_line(f"state = [{', '.join(named)}]")
                script.exec_line("state_before = {n: t.clone() for n, t in state}")
            script.call(args)

            for name in tensors:
                claim = f"torch.equal({name}, {name}_before[0])"
                script.assert_true(claim, f"`{name}` is modified in place")
                # A version that grew means a write, even if it was of equal values.
                claim = f"{name}._version == {name}_before[1]"
                message = f"`{name}` is written to, though with the same values"
                script.assert_true(claim, message)
            if script.adapter.is_module:
                for name in script.evaluate("list(state_before)"):
                    claim = (
                        f"torch.equal(dict(state)[{name!r}], state_before[{name!r}])"
                    )
                    script.assert_true(claim, f"`{name}` is modified by a call")


@law
def dtype_and_device(script: Script) -> None:
    r"""The output has the dtype and the device of the input.

    $$\operatorname{dtype}(y) = \operatorname{dtype}(x)$$

    This finds tables computed in float32, masks created on the CPU, and fill values
    that half precision cannot represent.
    """
    usual = script.dtype
    try:
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            script.dtype = dtype
            for allowed, mask in script.mask_cases():
                try:
                    script.restart()
                    args = script.make_arguments(allowed, mask)
                    output = script.call(args)
                except ScriptError as failure:
                    if "not implemented for" in str(failure):
                        continue
                    raise
                name = args.inputs[0]
                message = f"the output is not {dtype}, as its input is"
                script.assert_true(f"{output}.dtype == {name}.dtype", message)
                message = "the output is on another device than its input"
                script.assert_true(f"{output}.device == {name}.device", message)
    finally:
        script.dtype = usual


@law(slow=True)
def compiled(script: Script) -> None:
    r"""The compiled attention computes the same as the eager one.

    $$y_{\text{compiled}} = y_{\text{eager}}$$

    `torch.compile` traces a call once and replays it. A decision that depends on
    values, or state outside of parameters and buffers, may be lost.
    """
    backend = "inductor" if script.thorough else "aot_eager"
    *_, (allowed, mask) = script.mask_cases()
    script.restart()
    args = script.make_arguments(allowed, mask)
    eager = script.call(args)
    # After too many recompilations torch runs a function eagerly, which would compare
    # the eager output with itself.
    torch.compiler.reset()
    script.exec_line(f"compiled = torch.compile(attention, backend={backend!r})")
    try:
        output = script.call(args, function="compiled")
    except ScriptError as failure:
        if "No working C++ compiler" in str(failure):
            raise NotApplicable("there is no C++ compiler here") from failure
        raise
    message = "the compiled output differs at {place}"
    script.assert_close(eager, output, message)


@law(slow=True)
def vmapped(script: Script) -> None:
    r"""Under `vmap`, each example gives the same output as alone.

    $$\operatorname{vmap}(y)(x_1, x_2) = \big(y(x_1),\, y(x_2)\big)$$

    `torch.func.vmap` computes ensembles and per-example gradients. It cannot trace
    control flow that depends on values; the law does not apply to such code.
    """
    *_, (allowed, mask) = script.mask_cases()
    script.restart()
    first = script.make_arguments(allowed, mask)
    second = script.make_arguments(allowed)
    second = replace(second, mask=first.mask, allowed=allowed)
    one, other = script.call(first), script.call(second)
    names = ", ".join(first.inputs)
    pairs = zip(first.inputs, second.inputs, strict=True)
    stacked = ", ".join(f"torch.stack([{a}, {b}])" for a, b in pairs)
    output_index = script.adapter.output_index
    call = f"attention({script.argument_source(first)}){output_index}"
    try:
        both = script.assign(
            "both", f"torch.func.vmap(lambda {names}: {call})({stacked})"
        )
    except ScriptError as failure:
        raise NotApplicable(f"vmap cannot trace it: {failure}") from failure
    for n, output in enumerate((one, other)):
        message = "under vmap, the output at {place} differs"
        script.assert_close(output, f"{both}[{n}]", message)


@law
def autocast(script: Script) -> None:
    r"""Under autocast, the output is the same within a tenth.

    $$|y_{\text{bfloat16}} - y| \le 0.1 \max |y|$$

    Autocast runs matrix products in bfloat16, with 8 bits of precision, and leaves the
    rest in float32. A tenth of the largest entry is far above the rounding error, and
    far below the effect of a mask of the wrong size or dtype.
    """
    for allowed, mask in script.mask_cases():
        script.restart()
        args = script.make_arguments(allowed, mask)
        usual = script.call(args)
        output_index = script.adapter.output_index
        call = f"attention({script.argument_source(args)}){output_index}"
        device = script.device.partition(":")[0]
        context = f"with torch.autocast({device!r}, torch.bfloat16): "
        script.exec_line(f"{context}cast = {call}")
        message = "under autocast, the output at {place} differs"
        script.assert_close(usual, "cast", message, relative=0.1)


@law(slow=True)
def state_dict(script: Script) -> None:
    r"""A copy, and a module loaded from the state dict, compute the same.

    $$y_{\text{loaded}} = y_{\text{saved}}$$

    A tensor that is neither a parameter nor a buffer is in no checkpoint. The state
    dict is saved to bytes, and loaded into a module that was initialized with another
    seed, or whose parameters were overwritten.
    """
    adapter = script.adapter
    skip_unless(adapter.is_module, "is a function, and has no state")
    script.restart()
    args = script.make_arguments()
    output = script.call(args)
    copied = script.call(args, function="copy.deepcopy(attention)")
    message = "the output of a deep copy differs at {place}"
    script.assert_close(output, copied, message)
    script.exec_line("import io")
    script.exec_line("torch.save(attention.state_dict(), file := io.BytesIO())")
    script.exec_line(f"torch.manual_seed({script.seed + 1})")
    script.exec_line(f"loaded = {script.build_expression()}.eval()")
    script.exec_line("set_dropout(loaded, 0.0)")
    if not isinstance(adapter.target, type):
        # Built as a copy of the given instance, it has its parameters already.
        script.exec_line("for weight in loaded.parameters(): weight.data.fill_(0.5)")
    script.exec_line("file.seek(0)")
    script.exec_line("loaded.load_state_dict(torch.load(file))")
    after = script.call(args, function="loaded")
    message = "after loading its state dict, the output differs at {place}"
    script.assert_close(output, after, message)
