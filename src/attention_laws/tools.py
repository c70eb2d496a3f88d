r"""# Functions that counterexamples call

A counterexample is a short program. Beside the attention it calls only the functions of
this module: seeded random inputs, randomized weights, a dropout probability, and a
reference implementation to compare with.

Weights at their usual initialization make attention nearly uniform, and many biases are
initialized to zero. A wrong mask or a wrong scale then changes the output by less than
rounding. So all trainable parameters are randomized at a larger scale before each test.
Training could reach any of these values, so a correct implementation satisfies the laws
with all of them.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2, for the formula.
"""

import torch
from torch import Tensor, nn


def seeded_randn(seed: int, *shape: int) -> Tensor:
    r"""Normally distributed random numbers, the same on every device.

    They are generated on the CPU, independently of the global random state.

    >>> seeded_randn(1, 2).equal(seeded_randn(1, 2))
    True
    >>> seeded_randn(1, 2).equal(seeded_randn(2, 2))
    False
    """
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def randomize_parameters(module: nn.Module) -> None:
    r"""Randomize weights so that rows of attention differ, and biases away from zero.

    Buffers and parameters with `requires_grad=False` stay as they are.

    >>> linear = nn.Linear(100, 100)
    >>> randomize_parameters(linear)
    >>> round(linear.weight.std().item(), 2)  # 1.5 / 10
    0.15
    """
    with torch.no_grad():
        for n, weight in enumerate(p for p in module.parameters() if p.requires_grad):
            noise = seeded_randn(1000 + n, *weight.shape).to(weight)
            if weight.dim() > 1:
                weight.copy_(1.5 * noise / weight.shape[-1] ** 0.5)
            else:
                # Added, not copied: the weight of a normalization layer stays near 1.
                weight.add_(0.3 * noise)


def set_dropout(module: nn.Module, p: float) -> bool:
    r"""Set the probability of every dropout in `module`; return whether any changed.

    That is each dropout layer, and each number between 0 and 1 in an attribute with
    "drop" in its name: `nn.MultiheadAttention`, for example, has no dropout layer and
    passes its attribute `dropout` to a function.

    >>> mha = nn.MultiheadAttention(4, 2, dropout=0.1)
    >>> set_dropout(mha, 0.5), mha.dropout
    (True, 0.5)
    """
    changed = False
    for part in module.modules():
        is_dropout_layer = isinstance(part, nn.modules.dropout._DropoutNd)
        for name, value in list(vars(part).items()):
            if "drop" in name.lower() or (is_dropout_layer and name == "p"):
                if type(value) in (int, float) and 0 <= value <= 1:
                    changed |= value != p
                    setattr(part, name, p)
    return changed


def loss(output: Tensor) -> Tensor:
    r"""A scalar to differentiate: the sum of the output times fixed random weights.

    A plain sum would not do. The outputs of a layer normalization, for example, always
    have the same sum, whose gradient is zero.

    >>> loss(torch.zeros(2, 3))
    tensor(0.)
    """
    return (output * seeded_randn(7, *output.shape).to(output)).sum()


def split_heads(x: Tensor, layout: str, heads: int) -> Tensor:
    r"""Convert from any layout to `[batch_size, heads, length, d_k]`.

    >>> split_heads(torch.zeros(7, 2, 15), "lbd", heads=3).shape
    torch.Size([2, 3, 7, 5])
    >>> split_heads(torch.zeros(7, 15), "ld", heads=3).shape
    torch.Size([1, 3, 7, 5])
    """
    if "h" not in layout:
        # A projection that is fused by heads arrives as `[..., heads, d_k]`.
        x = x.flatten(len(layout) - 1)
        x = x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)
        layout = layout.replace("d", "hd")
    if "b" not in layout:
        x, layout = x[None], "b" + layout
    return x.permute([layout.index(axis) for axis in "bhld"])


def merge_heads(x: Tensor, layout: str) -> Tensor:
    r"""Convert from `[batch_size, heads, length, d_k]` back to a layout.

    >>> merge_heads(torch.zeros(2, 3, 7, 5), "lbd").shape
    torch.Size([7, 2, 15])
    """
    if "h" in layout:
        return x.permute(["bhld".index(axis) for axis in layout])
    x = x.transpose(1, 2).flatten(2)
    return x.permute(["bld".index(axis) for axis in layout]) if "b" in layout else x[0]


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor
) -> Tensor:
    r"""The formula of attention, on tensors `[batch_size, heads, length, d_k]`.

    `mask` is bool, `[batch_size or 1, 1, q_len, k_len]`, True = may attend. With
    grouped queries, $g$ query heads share one head of keys and values: query head $h$
    attends to head $\lfloor h / g \rfloor$.

    >>> value = torch.tensor([[[[2.0], [4.0]]]])
    >>> mask = torch.tensor([[[[True, True], [True, False]]]])
    >>> reference_attention(torch.zeros(1, 1, 2, 1), value, value, mask).flatten()
    tensor([3., 2.])
    """
    group_size = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group_size, dim=1) for x in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    weights: Tensor = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    return weights @ value
