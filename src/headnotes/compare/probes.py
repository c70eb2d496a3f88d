r"""# Probing implementations

This module finds out by experiment how attention implementations behave: what a mask
means, where dropout acts, what a fully masked row gives. Each function is one
experiment, a *probe*: it calls a module and describes the result. The results are the
table of [differences between implementations](../../compare/differences.md).

A probe takes the name of an implementation (a format of [`convert`](../convert.md)),
builds the module that it needs, and returns its finding in a few words.

Source: the questions are those on which published tutorials on attention disagree; the
[errata](../../compare/errata.md) list them.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headnotes import convert, masks, mha
from headnotes.compare.calling import call
from headnotes.implementations import batch_first, causal, valid_lens

# Pairwise distinct, so that a shape names its axes.
SEQ_LEN, BATCH, HEADS, D_K = 7, 3, 5, 11
D_MODEL = HEADS * D_K
AXES = {
    SEQ_LEN: "seq_len",
    BATCH: "batch_size",
    HEADS: "heads",
    D_MODEL: "d_model",
    BATCH * HEADS: "batch_size * heads",
}

# All options have their default values.
DEFAULT_MODULES: dict[str, Callable[[int, int], nn.Module]] = {
    "core": lambda d, heads: mha.MultiHeadAttention(heads, d),
    "causal": lambda d, heads: causal.MultiHeadAttention(d, d, SEQ_LEN, 0.1, heads),
    "valid_lens": lambda d, heads: valid_lens.MultiHeadAttention(d, heads, 0.1),
    "batch_first": lambda d, heads: batch_first.MultiHeadAttention(d, heads),
    "torch": lambda d, heads: nn.MultiheadAttention(d, heads),
}

# The usual call of each, for self-attention without a mask.
CALL: dict[str, Callable[[Any, Tensor], Any]] = {
    "core": lambda module, x: module(query=x, key=x, value=x),
    "causal": lambda module, x: module(x),
    "valid_lens": lambda module, x: module(x, x, x, None),
    "batch_first": lambda module, x: module(x, x, x),
    "torch": lambda module, x: module(x, x, x),
}


def default_module(name: str, d_model: int = D_MODEL, heads: int = HEADS) -> Any:
    """A new module, called once, so that lazy layers are initialized."""
    module = DEFAULT_MODULES[name](d_model, heads)
    CALL[name](module, torch.zeros(1, 1, d_model))
    return module


def identity_attention(name: str, *, query: float = 1.0, d_k: int = D_K) -> Any:
    """A module of one head, whose query is a multiple of its input.

    All other projections are the identity, so the output is the context itself.
    """
    core = mha.MultiHeadAttention(1, d_k, 0.0)
    with torch.no_grad():
        for linear in (core.query.linear, core.key.linear, core.value.linear):
            linear.weight.copy_(torch.eye(d_k))
            linear.bias.zero_()
        core.output.load_state_dict(core.value.linear.state_dict())
        core.query.linear.weight.mul_(query)
    length = {"context_length": SEQ_LEN} if name == "causal" else {}
    return convert.to(core.eval(), name, **length)


def causal_self_attention(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Causal self-attention, which all implementations support."""
    return call(module, x, x, masks.causal(len(x)))


def axes(x: Tensor) -> str:
    """A shape, with names of axes in place of sizes."""
    return f"[{', '.join(AXES.get(size, str(size)) for size in x.shape)}]"


def layout(name: str) -> str:
    r"""Which axis is the batch? The one along which a change has no influence.

    >>> layout("core"), layout("causal")
    ('[seq_len, batch_size, d_model]', '[batch_size, seq_len, d_model]')
    """
    module = default_module(name).eval()
    x = torch.randn(BATCH, BATCH, D_MODEL)
    changed = x.clone()
    changed[0] += 1
    before, after = (call_first(name, module, each) for each in (x, changed))
    spreads = not torch.allclose(before[1:], after[1:])
    first, second = ("seq_len", "batch_size") if spreads else ("batch_size", "seq_len")
    return f"[{first}, {second}, d_model]"


def call_first(name: str, module: nn.Module, x: Tensor) -> Tensor:
    """The output only, the first item of what a call returns."""
    result = CALL[name](module, x)
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def mask_polarity(name: str) -> str:
    r"""Which keys does query 1 attend to, if its mask is True for key 1 only?

    They are those whose values have a gradient.

    >>> mask_polarity("core"), mask_polarity("torch")
    ('True: may attend', 'True: may not attend')
    """
    module = identity_attention(name)
    x = torch.randn(3, 1, D_K)
    memory = torch.randn(3, 1, D_K, requires_grad=True)
    x_first, first = x.transpose(0, 1), memory.transpose(0, 1)
    # With either polarity, some query attends to each key, so none is cleared as
    # padding.
    marked = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 0, 1]]).bool()
    if name == "causal":
        given = "nothing"
        context = module(first)[:, 1]
    elif name == "valid_lens":
        given = "a 2"
        context = module(x_first, first, first, torch.tensor([2]))[:, 1]
    elif name == "batch_first":
        given = "True"
        context = module(x_first, first, first, marked)[0][:, 1]
    elif name == "torch":
        given = "True"
        context = module(x, memory, memory, attn_mask=marked)[0][1]
    else:
        given = "True"
        mask = marked.unsqueeze(-1)
        context = module(query=x, key=memory, value=memory, mask=mask)[1]
    (gradient,) = torch.autograd.grad(context.sum(), memory)
    seen = [j for j in range(3) if gradient[j].any()]
    return {
        ("True", (1,)): "True: may attend",
        ("True", (0, 2)): "True: may not attend",
        ("a 2", (0, 1)): "a length: the first so many",
        ("nothing", (0, 1)): "takes none: always causal",
    }.get((given, tuple(seen)), f"given {given}, query 1 attends to {seen}")


def fill_value(name: str) -> str:
    r"""How low can a score be and still have all the weight, beside a masked one?

    The first position attends only to itself, with lower and lower scores.

    >>> fill_value("core")
    'below -1e30'
    """
    deepest = "nothing"
    for exponent in range(1, 31):
        module = identity_attention(name, query=-(10.0**exponent)).double()
        x = torch.zeros(2, 1, D_K, dtype=torch.float64)
        x[0, 0, 0] = math.sqrt(math.sqrt(D_K))  # so that the score is the factor
        output, _ = causal_self_attention(module, x)
        if not torch.equal(output[0], x[0]):
            break
        deepest = f"below -1e{exponent}"
    return deepest


def scale(name: str) -> str:
    r"""What are scores multiplied by? The ratio of two weights is $e^{c\,q·k}$.

    >>> scale("batch_first")
    '1/√d_k'
    """
    factors = []
    for d_k in (2, 11, 61):
        x = torch.zeros(2, 1, d_k, dtype=torch.float64)
        x[0, 0, 0] = x[1, 0, 1] = 1  # of length 1, and at a right angle
        output, _ = causal_self_attention(identity_attention(name, d_k=d_k).double(), x)
        first, second = output[1, 0, :2].tolist()
        factors.append(math.log(second / first) * math.sqrt(d_k))
    agree = all(math.isclose(factor, 1) for factor in factors)
    if agree:
        return "1/√d_k"
    return f"{', '.join(f'{factor:.3f}' for factor in factors)} / √d_k"


def dropout(name: str) -> str:
    r"""Where does dropout act? With one-hot values, the output is the weights.

    >>> dropout("core")
    'on the weights; shown before it'
    """
    module = identity_attention(name)
    x = torch.eye(SEQ_LEN, D_K).unsqueeze(1)
    clean, _ = causal_self_attention(module, x)
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.5
        elif isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.5
    dropped, shown = causal_self_attention(module.train(), x)
    allowed = clean > 0
    ratio = {round(value, 4) for value in (dropped / clean)[allowed].tolist()}
    if ratio == {1.0}:
        return "nowhere"
    seen = ", ".join(map(str, sorted(ratio)))
    place = "on the weights" if ratio == {0, 2} else f"elsewhere (times {seen})"
    if shown is None:
        return place
    after = torch.allclose(shown[..., 0, 0], dropped[:, 0, :SEQ_LEN])
    return f"{place}; shown {'after' if after else 'before'} it"


def biases(name: str) -> str:
    r"""Which projections have a bias by default?

    >>> biases("causal"), biases("valid_lens")
    ('output only', 'none')
    """
    weights = convert.extract(default_module(name))
    having = [p for p in convert.PARTS if getattr(weights, p).bias is not None]
    return {0: "none", 4: "all four"}.get(len(having), f"{', '.join(having)} only")


def initialization(name: str) -> str:
    r"""In which interval are the weights of the query projection at initialization?

    >>> initialization("torch")
    '±√(6/(4 d_model)), biases 0'
    """
    d_model = 512
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        query = convert.extract(default_module(name, d_model, 8)).query
    bound = query.weight.abs().max().item() * math.sqrt(d_model)
    # The standard deviation of a uniform distribution is its bound over √3.
    bound_from_std = query.weight.std().item() * math.sqrt(3 * d_model)
    uniform = math.isclose(bound_from_std, bound, rel_tol=0.01)
    known = {"±1/√d_model": 1, "±√(6/(4 d_model))": math.sqrt(6 / 4)}
    fits = [name for name in known if math.isclose(bound, known[name], rel_tol=1e-3)]
    interval = fits[0] if fits and uniform else f"±{bound:.3f}/√d_model"
    zero = query.bias is not None and not query.bias.any()
    return f"{interval}, biases 0" if zero else interval


def returned(name: str) -> str:
    r"""What does a call return, and in which shape?

    >>> returned("core")
    '[seq_len, batch_size, d_model]'
    """
    result = CALL[name](default_module(name), native_input(name))
    tensors = result if isinstance(result, tuple) else (result,)
    return ", ".join(map(axes, tensors))


def native_input(name: str) -> Tensor:
    """An input in the layout of the implementation."""
    x = torch.randn(SEQ_LEN, BATCH, D_MODEL)
    return x if layout(name).startswith("[seq_len") else x.transpose(0, 1)


def fully_masked_row(name: str) -> str:
    r"""What is the context of a fully masked row?

    >>> fully_masked_row("core"), fully_masked_row("causal")
    ('zero, and all gradients are finite', 'cannot occur')
    """
    module = identity_attention(name)
    x = torch.randn(3, 2, D_K, requires_grad=True)
    mask = torch.ones(3, 3, 2, dtype=torch.bool)
    mask[0, :, 1] = False
    try:
        output, _ = call(module, x, x, mask)
    except ValueError:
        return "cannot occur"
    # The loss excludes the fully masked row, as a loss over real tokens does.
    leaves = [x, *module.parameters()]
    gradients = torch.autograd.grad(output[1:].sum(), leaves)
    finite = all(gradient.isfinite().all() for gradient in gradients)
    in_backward = "and all gradients are finite"
    if not finite:
        in_backward = "and NaN in the gradients"
    context = output[0, 1]
    mean = x[:, 1].mean(dim=0)
    if context.isnan().all():
        found = "NaN"
    elif not context.any():
        found = "zero"
    elif torch.allclose(context, mean, atol=1e-6):
        found = "the mean of all values"
    else:
        found = "something"
    return f"{found}, {in_backward}"


def half_precision(name: str) -> str:
    r"""Does float16 work with a mask, and when $q \cdot k$ passes 65,504, its largest?

    >>> half_precision("core")
    'with a mask; with large scores'
    """
    works = []
    for what, size in (("with a mask", 1.0), ("with large scores", 40.0)):
        x = size * torch.ones(3, 1, 64, dtype=torch.float16)
        try:
            output, _ = causal_self_attention(
                identity_attention(name, d_k=64).half(), x
            )
        except RuntimeError:  # a fill value that float16 cannot hold
            continue
        if torch.allclose(output, x, rtol=1e-3):
            works.append(what)
    return "; ".join(works) or "no"


def retained_tensors(name: str) -> str:
    r"""Which tensors besides parameters are on the module after a call?

    >>> retained_tensors("batch_first"), retained_tensors("causal")
    ('nothing', 'mask [seq_len, seq_len]')
    """
    module = default_module(name)
    CALL[name](module, native_input(name))
    found = []
    for part in module.modules():
        attributes = {**dict(part.named_buffers(recurse=False)), **vars(part)}
        for label, tensor in attributes.items():
            if isinstance(tensor, Tensor):
                graph = ", with its graph" if tensor.requires_grad else ""
                found.append(f"{label} {axes(tensor)}{graph}")
    saved = set(module.state_dict()) - {n for n, _ in module.named_parameters()}
    found += [f"{label} in checkpoints" for label in sorted(saved)]
    return "; ".join(found) or "nothing"


PROBES: dict[str, Callable[[str], str]] = {
    "layout": layout,
    "mask": mask_polarity,
    "a masked score lies": fill_value,
    "scores times": scale,
    "dropout": dropout,
    "biases by default": biases,
    "initial weights": initialization,
    "returned": returned,
    "fully masked row": fully_masked_row,
    "float16 works": half_precision,
    "retained on the module": retained_tensors,
}
