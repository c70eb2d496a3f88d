r"""# Laws of sinks

A sink is a score without a key: it takes weight from the keys of a row, so that a head
can attend to nothing. It is part of the softmax, and of what a softmax subtracts.

Source: [Efficient Streaming Language Models with Attention
Sinks](https://arxiv.org/abs/2309.17453), Xiao et al. 2023, section 3.3, for a learned
sink; [gpt-oss](https://github.com/openai/gpt-oss), for one score of each head.
"""

import math
import re
from dataclasses import replace

import torch

from attention_laws import names, structure
from attention_laws.algebra import call_with_values, find_values
from attention_laws.law import law, skip_unless
from attention_laws.recorded import make_equal_tokens
from attention_laws.script import CallArguments, Script

# A parameter that is the score of a key without a token, by its name.
SINK_PATTERN = re.compile(r"(^|\.|_)(sinks?(_(logits?|bias|weights?|scores?))?|s_aux)$")


@law
def sinks(script: Script) -> None:
    r"""A sink with a large score takes all weight from the keys.

    $$a_{ij} = \frac{e^{s_{ij}}}{e^{b} + \sum_k e^{s_{ik}}} \to 0 \quad \text{for } b
    \to \infty$$

    A sink is one more score in the softmax of each row, for which there is no key. One
    that is added to the score of each key, or is left out, takes no weight. All sinks
    are set to a high score: what the last projection gets must not depend on the tokens
    any more. And a score that is larger by 1 takes $e$ times as much for each part that
    the keys keep, whether it is below their scores or above them.
    """
    if not script.adapter.is_module:
        assert_sinks_of_call_take_weight(script)
        return
    script.restart()
    heads, attention = script.sizes.heads, script.evaluate("attention")
    found = [
        name
        for name, weight in attention.named_parameters()
        if SINK_PATTERN.search(name) and weight.numel() == heads
    ]
    skip_unless(found, "has no scores of sinks, one for each head")
    width = heads * script.sizes.d_k
    layers = structure.layers_by_role(attention, width, any_width=True)
    # Layers inside of projections of one's own may look like outputs, too.
    outer = {
        structure.role_of(*child): child[0] for child in attention.named_children()
    }
    layer = layers.get("out", outer.get("out"))
    skip_unless(layer, "its output projection is not found")
    last = f"attention.get_submodule({layer!r})"
    low, one, other = (
        context_with_sinks(script, script.make_arguments(), found, last, score)
        for score in ("-1e4", "1e4", "1e4")
    )
    claim = f"({one} - {other}).abs().max() <= 0.01 * {low}.abs().max()"
    message = f"`{found[0]}` takes no weight from the keys if it is large"
    script.assert_true(claim, message)
    script.restart()
    args = make_equal_tokens(script, script.make_arguments())
    low, near = (
        context_with_sinks(script, args, found, last, score) for score in ("-1e4", "12")
    )
    message = (
        f"`{found[0]}` takes no weight from the keys if it is near to their scores"
    )
    script.assert_true(f"not torch.allclose({low}, {near}, rtol=0.01)", message)
    assert_sinks_are_scores(script, found, last)


def assert_sinks_of_call_take_weight(script: Script) -> None:
    """Large scores of sinks, which a function gets for each head, leave nothing."""
    known = names.optional_tensors(script.adapter)
    found = [name for name in known if SINK_PATTERN.search(name)]
    skip_unless(found, "is a function without scores of sinks")
    script.restart()
    args, outputs = script.make_arguments(), []
    usual = script.call(args)
    with script.attempt():  # it may take sinks of another shape
        for score in ("-1e4", "1e4"):
            sinks = f"torch.full(({script.sizes.heads},), {score})"
            sinks = script.assign("sinks", sinks + script.to_dtype_and_device())
            outputs.append(script.call(args, **{found[0]: sinks}))
    is_taken = len(outputs) == 2
    skip_unless(is_taken, "does not take one score of a sink for each head")
    message = f"{{place}} changes if `{found[0]}` is small"
    script.assert_close(usual, outputs[0], message)
    claim = f"{outputs[1]}.abs().max() <= 0.01 * {usual}.abs().max()"
    message = f"`{found[0]}` takes no weight from the keys if it is large"
    script.assert_true(claim, message)


def context_with_sinks(
    script: Script, args: CallArguments, found: list[str], last: str, score: str
) -> str:
    """What the layer `last` gets if the sinks `found` all have this score."""
    for name in found:
        script.exec_line(f"attention.get_parameter({name!r}).data.fill_({score})")
    call = f"lambda: {script.call_source(args)}"
    return script.assign("context", f"captured_input({call}, {last})")


def assert_sinks_are_scores(script: Script, found: list[str], last: str) -> None:
    """The odds of the keys against a sink shrink by a factor of e for each 1 more.

    A softmax subtracts the largest score of a row, which may be that of the sink, from
    the keys and from the sink. All tokens are equal, so that what the layer `last` gets
    shrinks as a whole. A sink that is no score, but a function of one, has another
    factor below the scores, too.
    """
    script.restart()
    args = make_equal_tokens(script, script.make_arguments())
    # The least is not zero if a sink has a value.
    whole, least, *others = (
        context_with_sinks(script, args, found, last, score)
        for score in ("-1e4", "1e4", "-6", "-5", "6", "7")
    )
    largest = script.evaluate(f"({whole} - {least}).abs().argmax().item()")
    odds = [
        script.assign(
            "odds", f"(({part} - {least}) / ({whole} - {part})).flatten()[{largest}]"
        )
        for part in others
    ]
    below, above = (f"{one} / {two}" for one, two in (odds[:2], odds[2:]))
    is_score = f"abs({below} - {math.e:.3f}) < 0.1 and {odds[2]} > 1e-7"
    if script.evaluate(is_score):
        message = f"`{found[0]}` loses its meaning above the scores of the keys"
        script.assert_true(f"abs({above} - {math.e:.3f}) < 0.1", message)


@law(slow=True, assumes="talking convolution")
def sinks_compete(script: Script) -> None:
    r"""What a sink leaves to a single key depends on the score of this key.

    $$a_{11} = \frac{e^{s_{11}}}{e^b + e^{s_{11}}}$$

    A softmax subtracts the largest score from all scores, and thus also from that of a
    sink, or from the 0 whose exponential is the 1 in the denominator. Where this is
    forgotten, one key always has the same weight, and no head can attend to nothing.
    All values are ones, so that the context vectors are the sums of the weights.
    """
    adapter, usual = script.adapter, script.sizes
    sink = adapter.designs.get("sink", "")
    skip_unless(sink, "has no sink that takes weight from the keys")
    is_plain = adapter.is_module and "b" in adapter.layout and not adapter.is_pooled
    skip_unless(is_plain and adapter.fixed_length is None, "has no single keys")
    layers, features = find_values(script)
    script.restart()
    owned = dict(script.evaluate("attention").named_parameters())
    is_token = sink.startswith("cls") and not any(sink[:3] in name for name in owned)
    skip_unless(not is_token, f"`{sink}` is that of one of the tokens")
    skip_unless("out" in layers, "its output projection is not found")
    if features:
        features = values_beside_sink(script, layers)
        skip_unless(features, "has no values that are known")
    for length in (5, 1):
        script.sizes = replace(usual, batch_size=8, q_len=length, k_len=length)
        script.restart()
        script.exec_line(f"layer = attention.get_submodule({layers['value']!r})")
        ones, zeros = (
            call_with_values(script, features, n, layers["out"])[1] for n in (1, 0)
        )
        part = script.assign("part", f"{ones} - {zeros}")
        claim = f"{part}.std(dim=0).max() > 1e-4"
        if length > 1:
            skip_unless(script.evaluate(claim), "no weight is lost to a sink")
    is_seen = script.evaluate(f"bool({part}.any())")
    skip_unless(is_seen, "a single key is hidden, as that of a block that is not full")
    message = f"the weight of a single key does not depend on its score (`{sink}`)"
    script.assert_true(claim, message)
    # Not even if it is above that of the sink. Then, some are equal, but none is 1.
    steps = f"{part}.sort(dim=0).values.diff(dim=0).abs()"
    middle = f"({part}.sort(dim=0).values[1:] - 0.5).abs() < 0.49"
    script.assert_true(f"not (({steps} == 0) & ({middle})).any()", message)


def values_beside_sink(script: Script, layers: dict[str, str]) -> list[int]:
    """The features of a fused projection that are values; none if they are not found.

    With a sink, queries and keys have influence on the output of one token, too. With
    values of zero, what the last layer gets is zero.
    """
    sizes, layer = script.sizes, f"attention.get_submodule({layers['value']!r})"
    width = sizes.heads // script.adapter.group_size * sizes.d_k
    with script.using(q_len=1, k_len=1):
        script.restart()
        script.exec_line(f"layer = {layer}")
        total = script.evaluate("layer.weight.shape[0]")
        places = torch.arange(total)
        thirds = places[-width:], places[:width], places[total // 3 :][:width]
        of_heads = places.view(width // sizes.d_k, -1)[:, -sizes.d_k :]
        for part in (*thirds, of_heads) if total in (2 * width, 3 * width) else ():
            features = part.flatten().tolist()
            context = call_with_values(script, features, 0, layers["out"])[1]
            if script.evaluate(f"not {context}.any()"):
                return features
    return []
