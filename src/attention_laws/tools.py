r"""# Tools of a counterexample

What a counterexample calls beside the attention itself: random inputs, weights that are
worth looking at, dropout set to what is wanted, and the formula of attention to compare
with. They are few and short, so that a counterexample can be read.

The weights that modules are born with make attention nearly uniform, and many biases
are born zero: a wrong mask or a wrong scale then changes next to nothing. So all
learned weights are drawn anew, larger. Any value of a parameter is one that training
could reach, and a law holds for all of them.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2, for the formula.
"""

import torch
from torch import Tensor, nn


def draw(seed: int, *shape: int) -> Tensor:
    r"""Normal random numbers, the same on every device.

    >>> draw(1, 2).equal(draw(1, 2)), draw(1, 2).equal(draw(2, 2))
    (True, False)
    """
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def enliven(module: nn.Module) -> None:
    r"""Draw weights that make rows of attention differ, and biases that are not zero.

    Buffers, and parameters that are not learned, stay as they are.

    >>> linear = nn.Linear(100, 100)
    >>> enliven(linear)
    >>> round(linear.weight.std().item(), 2)  # 1.5 / 10
    0.15
    """
    with torch.no_grad():
        for n, weight in enumerate(p for p in module.parameters() if p.requires_grad):
            noise = draw(1000 + n, *weight.shape).to(weight)
            if weight.dim() > 1:
                weight.copy_(1.5 * noise / weight.shape[-1] ** 0.5)
            else:
                weight.add_(0.3 * noise)


def set_dropout(module: nn.Module, p: float) -> bool:
    r"""Give every dropout in `module` the probability `p`.

    That is each `nn.Dropout`, and each number between 0 and 1 in an attribute whose
    name tells of dropout, which is how it is handed to functions. Returns whether
    anything changed.

    >>> mha = nn.MultiheadAttention(4, 2, dropout=0.1)
    >>> set_dropout(mha, 0.5), mha.dropout
    (True, 0.5)
    """
    changed = False
    for part in module.modules():
        drops = isinstance(part, nn.modules.dropout._DropoutNd)
        for name, value in list(vars(part).items()):
            if "drop" in name.lower() or (drops and name == "p"):
                if type(value) in (int, float) and 0 <= value <= 1:
                    changed |= value != p
                    setattr(part, name, p)
    return changed


def loss(output: Tensor) -> Tensor:
    r"""A number to differentiate: all outputs, weighed at random.

    A plain sum would not do. What is normalised last has a sum that never changes.

    >>> loss(torch.zeros(2, 3))
    tensor(0.)
    """
    return (output * draw(7, *output.shape).to(output)).sum()


def to_heads(x: Tensor, layout: str, heads: int) -> Tensor:
    r"""From any layout to `[batch_size, heads, length, d_k]`.

    >>> to_heads(torch.zeros(7, 2, 15), "lbd", heads=3).shape
    torch.Size([2, 3, 7, 5])
    >>> to_heads(torch.zeros(7, 15), "ld", heads=3).shape
    torch.Size([1, 3, 7, 5])
    """
    if "h" not in layout:
        x = x.flatten(len(layout) - 1)
        x = x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)
        layout = layout.replace("d", "hd")
    if "b" not in layout:
        x, layout = x[None], "b" + layout
    return x.permute([layout.index(axis) for axis in "bhld"])


def from_heads(x: Tensor, layout: str) -> Tensor:
    r"""From `[batch_size, heads, length, d_k]` back to a layout.

    >>> from_heads(torch.zeros(2, 3, 7, 5), "lbd").shape
    torch.Size([7, 2, 15])
    """
    if "h" in layout:
        return x.permute(["bhld".index(axis) for axis in layout])
    x = x.transpose(1, 2).flatten(2)
    return x.permute(["bld".index(axis) for axis in layout]) if "b" in layout else x[0]


def by_formula(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    r"""Attention as it is defined, on tensors `[batch_size, heads, length, d_k]`.

    Query head $h$ reads from head $h / g$ of keys and values, rounded down, if $g$ of
    them share one. `keep` is bool, `[batch_size or 1, 1, q_len, k_len]`.

    >>> value = torch.tensor([[[[2.0], [4.0]]]])
    >>> keep = torch.tensor([[[[True, True], [True, False]]]])
    >>> by_formula(torch.zeros(1, 1, 2, 1), value, value, keep).flatten()
    tensor([3., 2.])
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    weights: Tensor = scores.masked_fill(~keep, -torch.inf).softmax(dim=-1)
    return weights @ value
