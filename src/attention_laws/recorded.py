r"""# Weights of a call

Many laws are of the weights, which few implementations return. They are those that a
softmax gives in a call, or that PyTorch's kernel computes, if their shape is that of
weights. For equal tokens they depend on positions alone. Those that a call returns have
to be among them.

Source: [the recorder](recorders.md).
"""

import itertools
from dataclasses import replace

from attention_laws import names
from attention_laws.script import CallArguments, Script


def record_weights(script: Script, args: CallArguments) -> str:
    """A variable of the weights of the first batch item, `[heads, q_len, k_len]`.

    Empty where they are not found.
    """
    q_len, k_len, _ = args.allowed.shape
    call = f"lambda: {script.call_source(args)}"
    more = ", queries_first=True" if script.adapter.queries_first else ""
    sizes = f"{script.sizes.heads}, {q_len}, {k_len}"
    return assign_if_found(script, f"recorded_weights({call}, {sizes}{more})")


def assign_if_found(script: Script, text: str) -> str:
    """A variable of weights that source text may give; empty where it gives none."""
    weights = script.assign("weights", text)
    return weights if script.evaluate(f"{weights} is not None") else ""


def record_weights_with_gradients(script: Script, args: CallArguments) -> str:
    """The weights of `record_weights`, of which the inputs have gradients."""
    for name in args.inputs:
        script.exec_line(f"{name}.requires_grad_()")
    return record_weights(script, args)


def make_equal_tokens(script: Script, args: CallArguments) -> CallArguments:
    """The same arguments, with all tokens of each input equal to its first one."""
    first = script.adapter.index(l=slice(0, 1))
    inputs = tuple(
        script.assign(name, f"{name}{first}.expand_as({name}).clone()")
        for name in args.inputs
    )
    return replace(args, inputs=inputs)


def record_equal_tokens(script: Script, args: CallArguments) -> str:
    """The weights of equal tokens; of several attentions, those of the first."""
    args = make_equal_tokens(script, args)
    weights = record_weights(script, args)
    if weights or not script.adapter.is_module:
        return weights
    sizes = ", ".join(map(str, args.allowed.shape[:2]))
    call = f"lambda: {script.call_source(args)}"
    return assign_if_found(script, f"first_weights({call}, attention, {sizes})")


def assert_weights_are_applied(script: Script) -> None:
    """No weights are returned that a second softmax gives, and that nothing uses."""
    adapter = script.adapter
    parameters = names.parameters_of(adapter.target)
    flags = names.flags_of_weights(parameters, False, adapter.call_args)
    given = ({}, *({name: "True"} for name in flags))
    for (allowed, mask), more in itertools.product(script.mask_cases(), given):
        script.restart()
        args = script.make_arguments(allowed, mask)
        with script.attempt():
            call = f"lambda: {script.call_source(args, **more)}"
            message = "weights are returned that are not those that are applied"
            script.assert_true(f"not returns_other_weights({call})", message)
