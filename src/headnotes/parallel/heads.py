r"""# Tensor parallelism: heads split across processes

`split_heads` distributes the attention of a model over several processes: each computes
some of the heads, for the whole batch. This is *tensor parallelism*. It is for models
whose attention is too large or too slow for one device.

Heads are independent of one another until the output projection adds them up, so the
cut between two heads costs nothing. Process $r$ of $n$, or *rank* $r$, holds

| parameter | its part | placement |
|---|---|---|
| weights of `query`, `key`, `value` | the *rows* of its heads | `Shard(0)` |
| biases of `query`, `key`, `value` | the entries of its heads | `Shard(0)` |
| weight of `output` | the *columns* of its heads | `Shard(1)` |
| bias of `output` | all of it | `Replicate()` |

The output projection is a sum over heads, $W_O\, c = \sum_h W_O^{(h)} c^{(h)}$. Each
rank computes the terms of its own heads, and one *all-reduce* adds the results, so that
every rank has the complete output. That is all that travels in the forward pass.

In the backward pass, each of the three projections knows only its heads' share of the
gradient of its input. Each therefore ends in one all-reduce. With `activation` the
bytes of a tensor `[seq_len, batch_size, d_model]`, a training step of self-attention
reduces

$$\underbrace{1}_{\text{output}} + \underbrace{3}_{\text{query, key, value}}
  = 4 \text{ tensors of } \texttt{activation} \text{ bytes}$$

however many ranks there are, and however many parameters. Megatron-LM has one packed
projection in place of three, and 2 tensors. No gradient of a parameter travels.

The layers are [PyTorch's](https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html):
`ColwiseParallel` and `RowwiseParallel`, which are named for the columns and rows of
$W^\top$ in $x W^\top$. The modules stay what they are, with `DTensor` parameters; only
their numbers of heads change to those of the rank. So the weights that the core stores,
and the KV cache of `fast`, are those of the rank's heads.

**Dropout.** Everything outside of attention is computed by all ranks alike, so all must
start from the same seed. The dropout of attention weights then zeroes the same entries
in head $h$ of each rank.

Source: [Megatron-LM](https://arxiv.org/abs/1909.08053), Shoeybi et al. 2019, section 3.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from headnotes import fast, mha
from headnotes.checks import check_sizes

Attention = mha.MultiHeadAttention | fast.MultiHeadAttention


def split_heads(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    r"""Split the heads of every attention in `model` over the ranks of `mesh`.

    All ranks must hold the same parameters. The model is changed in place, and
    returned. Attention is `MultiHeadAttention` of the core or of `fast`.

    Raises `ValueError` for a model without attention, or where the number of heads is
    not divisible by that of ranks; `TypeError` for attention that has other parameters
    for its heads, such as a variant.
    Source: Shoeybi et al. 2019, section 3.

    On a mesh of one rank, all heads are local, but the parameters are distributed:

    >>> from torch import distributed as dist
    >>> store = dist.HashStore()
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> mesh = dist.init_device_mesh("cpu", (1,))
    >>> attention = split_heads(mha.MultiHeadAttention(heads=7, d_model=77), mesh)
    >>> for name, weight in attention.named_parameters():
    ...     print(f"{name:18} {weight.placements}")
    query.linear.weight (Shard(dim=0),)
    query.linear.bias  (Shard(dim=0),)
    key.linear.weight  (Shard(dim=0),)
    key.linear.bias    (Shard(dim=0),)
    value.linear.weight (Shard(dim=0),)
    value.linear.bias  (Shard(dim=0),)
    output.weight      (Shard(dim=1),)
    output.bias        (Replicate(),)
    >>> dist.destroy_process_group()
    """
    ranks = mesh.size()
    attentions = find_attentions(model)
    for name, attention in attentions.items():
        check_heads_split(attention.heads, ranks, f"{name}.heads".lstrip("."))
        if isinstance(attention, fast.MultiHeadAttention):
            kv_heads = f"{name}.kv_heads".lstrip(".")
            check_heads_split(attention.kv_heads, ranks, kv_heads)

    # The rows of a projection's weight are in the order of the heads, so equal parts of
    # the rows are equal numbers of whole heads.
    plan = {
        "query.linear": ColwiseParallel(),
        "key.linear": ColwiseParallel(),
        "value.linear": ColwiseParallel(),
        "output": RowwiseParallel(),
    }
    for attention in attentions.values():
        parallelize_module(attention, mesh, plan)
        # Between the projections, all is computed on plain tensors with fewer heads.
        projection: Any
        for projection in (attention.query, attention.key, attention.value):
            projection.heads //= ranks
        attention.heads //= ranks
        if isinstance(attention, fast.MultiHeadAttention):
            attention.kv_heads //= ranks
    return model


def find_attentions(model: nn.Module) -> dict[str, Attention]:
    """Every attention of a model, by name; refuse a model without, or with others."""
    found: dict[str, Attention] = {}
    for name, module in model.named_modules():
        if not isinstance(module, Attention):
            continue
        plain = type(module) in (mha.MultiHeadAttention, fast.MultiHeadAttention)
        # What has one entry per head would have to be split, too.
        projections = {type(part) for part in (module.query, module.key, module.value)}
        per_head = isinstance(module, fast.MultiHeadAttention) and (
            module.sinks is not None or module.score_bias is not None
        )
        if not plain or per_head or projections != {mha.PrepareForMultiHeadAttention}:
            raise TypeError(
                f"`{name or 'model'}` is a {type(module).__name__} with parameters or "
                f"biases of its own for each head; split_heads knows those of the core "
                f"and of fast, without sinks, bias or other projections"
            )
        found[name] = module
    if not found:
        raise ValueError(
            f"`model` (a {type(model).__name__}) holds no MultiHeadAttention of the "
            f"core or of fast; there are no heads to split"
        )
    return found


def check_heads_split(heads: int, ranks: int, name: str = "heads") -> None:
    """Refuse a number of heads that the ranks cannot share equally.

    >>> try:
    ...     check_heads_split(6, 4)
    ... except ValueError as error:
    ...     print(error)
    `heads` (=6) must be divisible by the number of ranks (=4); 1, 2, 3 or 6 would do
    """
    check_sizes(ranks=ranks)
    if heads % ranks:
        *most, last = [n for n in range(1, heads + 1) if heads % n == 0]
        way_out = f"{', '.join(map(str, most))} or {last}".removeprefix(" or ")
        raise ValueError(
            f"`{name}` (={heads}) must be divisible by the number of ranks (={ranks}); "
            f"{way_out} would do"
        )
