r"""# Laws of blocks

What is around an attention, such as a norm, a residual connection or the addition of
positions, belongs in one place. All shapes are right in others, too, and so is the
formula of the attention. These laws test the places that the documentation names.

Source: [On Layer Normalization in the Transformer
Architecture](https://arxiv.org/abs/2002.04745), Xiong et al. 2020, section 3, for norms
in front of the attention; [DETR](https://arxiv.org/abs/2005.12872), Carion et al. 2020,
appendix A.3, for positions of queries and keys alone.
"""

import re
from dataclasses import replace

from torch import nn

from attention_laws import documented, names, structure
from attention_laws.dropout import is_normalized
from attention_laws.law import law, skip_unless
from attention_laws.recorded import make_equal_tokens
from attention_laws.script import Script


@law
def residual_connection(script: Script) -> None:
    r"""A norm in front of the attention does not change what is added to its output.

    $$y(x + c) = y(x) + c$$

    A layer norm subtracts the mean of the features of a token, so that neither the
    attention nor a network behind it sees a constant $c$ that is added to all of them.
    The residual connection does: it passes it on. If the output of the norm is added in
    place of its input, the constant is lost. This is tested where the documentation
    says that the norm is in front.
    """
    adapter = script.adapter
    is_stated = documented.has_norm_in_front(adapter.target)
    skip_unless(is_stated and adapter.is_module, "does not say that a norm is in front")
    skip_unless(adapter.single_input and not adapter.is_pooled, "takes several inputs")
    script.restart()
    _block, *parts = script.evaluate("attention").modules()
    norms = [*filter(structure.is_norm, parts)]
    are_layer_norms = norms and all(isinstance(each, nn.LayerNorm) for each in norms)
    skip_unless(are_layer_norms, "has no layer norms, or others beside them")
    skip_unless(has_residual(script), "its caller adds the residual connection")
    args = script.make_arguments()
    before = script.call(args)
    skip_unless(
        script.evaluate(f"{before}.shape == {args.inputs[0]}.shape"),
        "its output has another shape than its input",
    )
    skip_unless(
        not is_normalized(script, script.call_source(args)),
        "its output is that of a norm",
    )
    moved = script.assign("moved", f"{args.inputs[0]} + 1")
    after = script.call(replace(args, inputs=(moved,)))
    expected = script.assign("expected", f"{before} + 1")
    message = "{place} loses a constant that is added to all features of its token"
    script.assert_close(expected, after, message)


def has_residual(script: Script) -> bool:
    """Whether the output is not 0 where all weights are, but for those of norms."""
    block, *parts = script.evaluate("attention").modules()
    norms = filter(structure.is_norm, parts)
    of_norms = {id(weight) for norm in norms for weight in norm.parameters()}
    for weight in block.parameters():
        if id(weight) not in of_norms:
            weight.data.zero_()
    output = script.call(script.make_arguments())
    has_rest = bool(script.evaluate(f"{output}.any()"))
    script.restart()
    return has_rest


@law
def position_free_values(script: Script) -> None:
    r"""Positions that are added to queries and keys only are not in the values.

    $$x_1 = \dots = x_n \;\Rightarrow\; \partial y / \partial p = 0$$

    If all tokens are equal, so are their values, and the output is the same for all
    weights, whatever the positions are. If these are added to the values, too, the
    output shows them. This is tested where the documentation says what they are added
    to.
    """
    adapter = script.adapter
    is_stated = documented.keeps_positions_from_values(adapter.target)
    skip_unless(is_stated, "does not say that positions are not in the values")
    optional = names.optional_tensors(adapter)
    found = [name for name in optional if re.search(r"(^|_)pos(_|ition|$)", name)]
    skip_unless(found and adapter.single_input, "takes no positions beside its input")
    script.restart()
    args = make_equal_tokens(script, script.make_arguments())
    shape = script.evaluate(args.inputs[0]).shape
    for name in found:
        one, other = (script.random_tensor("positions", *shape) for _ in range(2))
        before = script.call(args, **{name: one})
        after = script.call(args, **{name: other})
        message = f"{{place}} depends on `{name}`, though all values are equal"
        script.assert_close(before, after, message)
