r"""# Inferring the place of the weights

Attention weights may be an item of the result or an attribute of the module, alone or
behind an argument such as `need_weights=True`. A tensor whose axes have their lengths,
and whose numbers are not negative or sum to one, is taken for them.

Source: the conventions of
[PyTorch](https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html)
and of Hugging Face's transformers.
"""

import re
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

from attention_laws import names
from attention_laws.adapter import AXES, CallError
from attention_laws.calling import CallProbe
from attention_laws.recorders import WeightsRecorder
from attention_laws.script import LOGARITHMS, CallArguments, Script, parts_of

# The orders of axes that are tried.
WEIGHTS_AXES = ("bhqk", "qkbh", "bqk", "qkb", "nqk", "hqk", "qk")
# The same for tokens that are pooled, to one output or to several.
POOLED_AXES = ("bk", "kb", "bhk", "bhok", "bok")


def infer_weights(probe: CallProbe) -> None:
    """Where the attention weights are, in the result or in an attribute.

    Raises `CallError` if the option `weights` names a place where there are none.
    """
    adapter, options = probe.adapter, probe.options
    probe.update(queries_first=puts_queries_first(probe))
    if options.weights == "none":
        return
    parameters = names.parameters_of(adapter.target)
    flags = names.flags_of_weights(parameters, False, options.call_args)
    for more in ({}, *({name: "True"} for name in flags)):
        if not probe.adapter.weights_source:
            infer_weights_of_call(probe, more)


def puts_queries_first(probe: CallProbe) -> bool:
    """Whether each softmax has the axis of queries in front of that of heads.

    The shape tells it only where there are not as many queries as heads.
    """
    heads = probe.adapter.heads
    call = probe.try_call(k_len=5 + (heads == 5))
    if call is None:
        return False
    q_len = call[1].allowed.shape[0]
    with WeightsRecorder() as recorder:
        call[0].call(call[1])
    are_first = [[*w.shape[-3:-1]] == [q_len, heads] for w, _ in recorder.found]
    return q_len != heads and bool(are_first) and all(are_first)


def infer_weights_of_call(probe: CallProbe, more: dict[str, str]) -> None:
    """Where the weights are if these arguments are given."""
    options = probe.options
    call = probe.try_call(more=more)
    if call is None:
        return
    script, args = call
    script.exec_line(f"result = {script.call_source(args, **more)}")
    given, _, axes = options.weights.partition(":")
    candidates = [given] if given else [*weights_candidates(script)]
    sizes = script.sizes.lengths()
    for source in candidates:
        value = None
        with suppress(LookupError, AttributeError, TypeError):
            owner = {"[": "result", ".": "attention"}.get(source[0], "")
            value = script.evaluate(owner + source)
        orders = WEIGHTS_AXES + POOLED_AXES * probe.adapter.is_pooled
        for letters in [axes] if axes else orders:
            if isinstance(value, Tensor) and has_axes(value, letters, sizes):
                if not given and not are_weights(value, letters):
                    continue
                if not given and is_table(script, args, source, letters, more):
                    continue
                probe.record(
                    "weights",
                    f"{source} [{', '.join(AXES[axis] for axis in letters)}]",
                    "given" if options.weights else "inferred",
                    weights_source=source,
                    weights_axes=letters,
                    weights_args=more,
                )
                return
        if given:
            seen = (
                f"a tensor of {list(value.shape)}"
                if isinstance(value, Tensor)
                else "no tensor"
            )
            raise CallError(
                f"`weights` (={options.weights!r}) is {seen}, where the sizes are "
                f"{', '.join(f'{letter}={size}' for letter, size in sizes.items())}"
            )


def has_axes(value: Tensor, letters: str, sizes: dict[str, int]) -> bool:
    r"""Whether a tensor has these axes; the number of pooled outputs may be any.

    >>> has_axes(torch.zeros(2, 8, 5), "bok", {"b": 2, "k": 5})
    True
    """
    return value.dim() == len(letters) and all(
        sizes.get(letter, size) == size
        for letter, size in zip(letters, value.shape, strict=True)
    )


def are_weights(value: Tensor, axes: str) -> bool:
    """Whether numbers may be attention weights, rather than scores."""
    if not value.is_floating_point():
        return False
    sums = value.sum(axes.index("k"))
    is_mean = torch.allclose(sums, torch.ones_like(sums))
    return is_mean or bool((value >= 0).all() and axes not in POOLED_AXES)


def is_table(
    script: Script, args: CallArguments, source: str, axes: str, more: dict[str, str]
) -> bool:
    """Whether numbers that are no weights of the inputs are the same for all of these.

    Distances between positions, which a call keeps for the next, are no weights. Those
    in a result may be of another argument.
    """
    is_stored = source.startswith(".")
    owner = "attention" if is_stored else "result" * source.startswith("[")
    before = script.evaluate(f"{owner}{source}").detach().clone()
    sums = before.sum(axes.index("k"))
    if is_stored and torch.allclose(sums, torch.ones_like(sums)):
        return False
    with script.rollback():
        changed = script.perturb(args, l=slice(None))
        script.exec_line(f"result = {script.call_source(changed, **more)}")
        after: Tensor = script.evaluate(f"{owner}{source}")
        return torch.equal(before, after)


def weights_candidates(script: Script) -> Iterator[str]:
    """Where weights could be: in the result, and attributes of the module."""
    parts = parts_of(script.evaluate("result"))
    for index in parts:
        yield index if index.startswith("[") else f"result{index}"
    if not parts:
        logarithms = script.adapter.output_index == LOGARITHMS
        yield "result" + LOGARITHMS * logarithms  # of a pointer network
    if script.adapter.is_module:
        for path, module in script.evaluate("attention").named_modules():
            is_one = not re.search(r"\d", path)  # not one of several layers
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and is_one:
                    yield f".{path}.{name}" if path else f".{name}"
