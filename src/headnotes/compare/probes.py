r"""# Probing implementations

What does an attention do with a mask, with dropout, with a row that may see nothing?
Its documentation may say; its behaviour always does. Each function here asks one such
question by *doing* something to a module and looking at what happens. The table of [who
differs how](../../compare/differences.md) is made of the answers.

A probe is given the name of a system, as [`convert`](../convert.md) knows it, makes the
module that it needs, and answers in a few words.

Source: the questions are those on which published walk-throughs of attention disagree;
the [errata](../../compare/errata.md) list them one by one.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headnotes import convert, masks, mha
from headnotes.compare.calling import ask
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

# Each as its author would build it, with all that is optional left out.
BORN: dict[str, Callable[[int, int], nn.Module]] = {
    "core": lambda d, heads: mha.MultiHeadAttention(heads, d),
    "causal": lambda d, heads: causal.MultiHeadAttention(d, d, SEQ_LEN, 0.1, heads),
    "valid_lens": lambda d, heads: valid_lens.MultiHeadAttention(d, heads, 0.1),
    "batch_first": lambda d, heads: batch_first.MultiHeadAttention(d, heads),
    "torch": lambda d, heads: nn.MultiheadAttention(d, heads),
}

# How each is called by those who know it, for self-attention without a mask.
CALL: dict[str, Callable[[Any, Tensor], Any]] = {
    "core": lambda module, x: module(query=x, key=x, value=x),
    "causal": lambda module, x: module(x),
    "valid_lens": lambda module, x: module(x, x, x, None),
    "batch_first": lambda module, x: module(x, x, x),
    "torch": lambda module, x: module(x, x, x),
}


def born(name: str, d_model: int = D_MODEL, heads: int = HEADS) -> Any:
    """A new module; where its weights wait for a first call, they have come."""
    module = BORN[name](d_model, heads)
    CALL[name](module, torch.zeros(1, 1, d_model))
    return module


def clear(name: str, *, query: float = 1.0, d_k: int = D_K) -> Any:
    """A module that hides nothing: one head, its query a multiple of the input.

    All other projections are the identity, so what it reads can be read off.
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


def looking_back(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Causal self-attention, the one question that all of them understand."""
    return ask(module, x, x, masks.causal(len(x)))


def axes(x: Tensor) -> str:
    """A shape in names."""
    return f"[{', '.join(AXES.get(size, str(size)) for size in x.shape)}]"


def layout(name: str) -> str:
    r"""Which axis is the batch? The one along which nothing spreads.

    >>> layout("core"), layout("causal")
    ('[seq_len, batch_size, d_model]', '[batch_size, seq_len, d_model]')
    """
    module = born(name).eval()
    x = torch.randn(BATCH, BATCH, D_MODEL)
    changed = x.clone()
    changed[0] += 1
    before, after = (call_first(name, module, each) for each in (x, changed))
    spreads = not torch.allclose(before[1:], after[1:])
    first, second = ("seq_len", "batch_size") if spreads else ("batch_size", "seq_len")
    return f"[{first}, {second}, d_model]"


def call_first(name: str, module: nn.Module, x: Tensor) -> Tensor:
    """The output, without what else is returned."""
    result = CALL[name](module, x)
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def mask_sense(name: str) -> str:
    r"""Which keys does query 1 read, if key 1 is marked? The gradient tells.

    >>> mask_sense("core"), mask_sense("torch")
    ('True: may attend', 'True: may not attend')
    """
    module = clear(name)
    x = torch.randn(3, 1, D_K)
    memory = torch.randn(3, 1, D_K, requires_grad=True)
    x_first, first = x.transpose(0, 1), memory.transpose(0, 1)
    # In either sense, each key is read by some query: none may be cleared beforehand.
    marked = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 0, 1]]).bool()
    if name == "causal":
        given, read = "nothing", module(first)[:, 1]
    elif name == "valid_lens":
        given, read = "a 2", module(x_first, first, first, torch.tensor([2]))[:, 1]
    elif name == "batch_first":
        given, read = "True", module(x_first, first, first, marked)[0][:, 1]
    elif name == "torch":
        given, read = "True", module(x, memory, memory, attn_mask=marked)[0][1]
    else:
        mask = marked.unsqueeze(-1)
        given, read = "True", module(query=x, key=memory, value=memory, mask=mask)[1]
    (gradient,) = torch.autograd.grad(read.sum(), memory)
    seen = [j for j in range(3) if gradient[j].any()]
    return {
        ("True", (1,)): "True: may attend",
        ("True", (0, 2)): "True: may not attend",
        ("a 2", (0, 1)): "a length: the first so many",
        ("nothing", (0, 1)): "takes none: always causal",
    }.get((given, tuple(seen)), f"given {given}, query 1 reads {seen}")


def fill(name: str) -> str:
    r"""How low may a true score be, and still win against a masked one?

    The first position sees only itself, with ever lower scores.

    >>> fill("core")
    'below -1e30'
    """
    deepest = "nothing"
    for exponent in range(1, 31):
        module = clear(name, query=-(10.0**exponent)).double()
        x = torch.zeros(2, 1, D_K, dtype=torch.float64)
        x[0, 0, 0] = math.sqrt(math.sqrt(D_K))  # so that the score is the factor
        output, _ = looking_back(module, x)
        if not torch.equal(output[0], x[0]):
            break
        deepest = f"below -1e{exponent}"
    return deepest


def scale(name: str) -> str:
    r"""What are scores multiplied by? Two weights tell: their ratio is $e^{c\,q·k}$.

    >>> scale("batch_first")
    '1/√d_k'
    """
    factors = []
    for d_k in (2, 11, 61):
        x = torch.zeros(2, 1, d_k, dtype=torch.float64)
        x[0, 0, 0] = x[1, 0, 1] = 1  # of length 1, and at a right angle
        output, _ = looking_back(clear(name, d_k=d_k).double(), x)
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
    module = clear(name)
    x = torch.eye(SEQ_LEN, D_K).unsqueeze(1)
    clean, _ = looking_back(module, x)
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.5
        elif isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.5
    dropped, shown = looking_back(module.train(), x)
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
    r"""Which projections have a bias, if nobody asks?

    >>> biases("causal"), biases("valid_lens")
    ('output only', 'none')
    """
    read = convert.extract(born(name))
    having = [p for p in convert.PARTS if getattr(read, p).bias is not None]
    return {0: "none", 4: "all four"}.get(len(having), f"{', '.join(having)} only")


def initialisation(name: str) -> str:
    r"""From which interval are the first weights of the query drawn?

    >>> initialisation("torch")
    '±√(6/(4 d_model)), biases 0'
    """
    d_model = 512
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        read = convert.extract(born(name, d_model, 8)).query
    reach = read.weight.abs().max().item() * math.sqrt(d_model)
    spread = read.weight.std().item() * math.sqrt(3 * d_model)
    uniform = math.isclose(spread, reach, rel_tol=0.01)
    known = {"±1/√d_model": 1, "±√(6/(4 d_model))": math.sqrt(6 / 4)}
    fits = [name for name in known if math.isclose(reach, known[name], rel_tol=1e-3)]
    interval = fits[0] if fits and uniform else f"±{reach:.3f}/√d_model"
    zero = read.bias is not None and not read.bias.any()
    return f"{interval}, biases 0" if zero else interval


def returned(name: str) -> str:
    r"""What comes back from a call, and in which shape?

    >>> returned("core")
    '[seq_len, batch_size, d_model]'
    """
    result = CALL[name](born(name), native(name))
    tensors = result if isinstance(result, tuple) else (result,)
    return ", ".join(map(axes, tensors))


def native(name: str) -> Tensor:
    """An input that lies as the system likes it."""
    x = torch.randn(SEQ_LEN, BATCH, D_MODEL)
    return x if layout(name).startswith("[seq_len") else x.transpose(0, 1)


def empty_row(name: str) -> str:
    r"""What does a query read that may attend to nothing?

    >>> empty_row("core"), empty_row("causal")
    ('zero, and all gradients are finite', 'cannot occur')
    """
    module = clear(name)
    x = torch.randn(3, 2, D_K, requires_grad=True)
    keep = torch.ones(3, 3, 2, dtype=torch.bool)
    keep[0, :, 1] = False
    try:
        output, _ = ask(module, x, x, keep)
    except ValueError:
        return "cannot occur"
    # The loss leaves the empty row out, as a loss over real tokens does.
    learn = [x, *module.parameters()]
    gradients = torch.autograd.grad(output[1:].sum(), learn)
    finite = all(gradient.isfinite().all() for gradient in gradients)
    learning = "and all gradients are finite" if finite else "and NaN in the gradients"
    empty = output[0, 1]
    if empty.isnan().all():
        return f"NaN, {learning}"
    same = torch.allclose(empty, x[:, 1].mean(dim=0), atol=1e-6)
    read = "the mean of all values" if same else "something"
    return f"{read if empty.any() else 'zero'}, {learning}"


def half_precision(name: str) -> str:
    r"""Does float16 work with a mask, and when $q \cdot k$ passes 65,504, its largest?

    >>> half_precision("core")
    'with a mask; with large scores'
    """
    works = []
    for what, size in (("with a mask", 1.0), ("with large scores", 40.0)):
        x = size * torch.ones(3, 1, 64, dtype=torch.float16)
        try:
            output, _ = looking_back(clear(name, d_k=64).half(), x)
        except RuntimeError:  # a fill that float16 does not have
            continue
        if torch.allclose(output, x, rtol=1e-3):
            works.append(what)
    return "; ".join(works) or "no"


def stays(name: str) -> str:
    r"""Which tensors are on the module after a call that are no parameters?

    >>> stays("batch_first"), stays("causal")
    ('nothing', 'mask [seq_len, seq_len]')
    """
    module = born(name)
    CALL[name](module, native(name))
    found = []
    for part in module.modules():
        kept = {**dict(part.named_buffers(recurse=False)), **vars(part)}
        for label, tensor in kept.items():
            if isinstance(tensor, Tensor):
                graph = ", with its graph" if tensor.requires_grad else ""
                found.append(f"{label} {axes(tensor)}{graph}")
    saved = set(module.state_dict()) - {n for n, _ in module.named_parameters()}
    found += [f"{label} in checkpoints" for label in sorted(saved)]
    return "; ".join(found) or "nothing"


PROBES: dict[str, Callable[[str], str]] = {
    "layout": layout,
    "mask": mask_sense,
    "a masked score lies": fill,
    "scores times": scale,
    "dropout": dropout,
    "biases unless asked": biases,
    "weights begin in": initialisation,
    "returned": returned,
    "a row without keys reads": empty_row,
    "float16 works": half_precision,
    "stays on the module": stays,
}
