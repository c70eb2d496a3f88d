r"""# Training on several processes: DDP, FSDP2, or heads

`Parallel` runs a training on several processes with one of PyTorch's own engines. It is
for training loops that are to run unchanged on one process and on many.

| engine | a rank holds | a rank computes | what travels in a step |
|---|---|---|---|
| `ddp` | all parameters | its part of the batch | gradients: all-reduce |
| `fsdp` | a part of each parameter | its part of the batch | parameters: all-gather |
| | | | gradients: reduce-scatter |
| `heads` | the parameters of its heads | the whole batch | activations: all-reduce |

DDP and FSDP2 are *data parallelism*: each rank computes some items of the batch. *DDP*,
`DistributedDataParallel`, averages the gradients of all ranks, and every rank makes the
same optimizer step. *FSDP2*, `fully_shard`, also splits parameters, gradients
and optimizer state, so that each rank stores one part of $n$. It gathers the parameters
of a layer before it computes the layer, and frees them after. With `heads`, [the
attention itself](heads.md) is split.

The losses and gradients are those of one process that has the whole batch. For the
engines that split the batch, this needs care where items differ in length. Both average
the gradients of the ranks. But the mean of the ranks' means is not the mean over all
tokens if one rank has more tokens than another: `mean` corrects it.

A program starts with `torchrun`, which sets the number of ranks and the address where
they meet:

```console
$ torchrun --nproc-per-node 2 train.py
```

Source: [PyTorch Distributed](https://arxiv.org/abs/2006.15704), Li et al. 2020, for
DDP; [PyTorch FSDP](https://arxiv.org/abs/2304.11277), Zhao et al. 2023.
"""

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from headnotes.parallel.heads import split_heads

ENGINES = ("ddp", "fsdp", "heads")

# A rank that waits longer for the others stops: one of them hangs, or has lost its
# network. (A rank that ends is noticed at once.)
TIMEOUT = timedelta(minutes=2)


class Parallel:
    r"""A training on all ranks of the current process group, with one engine.

    Raises `ValueError` for an unknown engine.

    >>> store = dist.HashStore()
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> parallel = Parallel("ddp")
    >>> model = parallel.distribute(nn.Linear(7, 3))
    >>> batch = torch.randn(5, 4, 7)  # [seq_len, batch_size, 7]
    >>> errors = model(parallel.own_items(batch)).square()
    >>> loss = parallel.mean(errors.sum(), errors.numel())
    >>> loss.backward()
    >>> dist.destroy_process_group()
    """

    def __init__(self, engine: str) -> None:
        if engine not in ENGINES:
            raise ValueError(f"`engine` (={engine!r}) must be {', '.join(ENGINES)}")
        self.engine = engine
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        self.mesh = init_device_mesh(self.device.type, (self.ranks,))

    @property
    def splits_batch(self) -> bool:
        """Whether each rank computes a part of the batch."""
        return self.engine != "heads"

    def distribute(self, model: nn.Module) -> nn.Module:
        """Distribute a model that has the same parameters on all ranks, in place.

        The result is to be called in place of the model, whose parameters it has.
        FSDP2 gathers one layer at a time: the items of each `nn.ModuleList`. What is in
        none, such as embeddings, is gathered for the whole step.
        """
        model.to(self.device)
        if self.engine == "heads":
            return split_heads(model, self.mesh)
        if self.engine == "ddp":
            group = self.mesh.get_group()
            replica = DistributedDataParallel(model, process_group=group)
            # Otherwise rank 0 sends its buffers in each step. Ours, such as the table
            # of positions, are constants. (As an argument, it has a new name in 2.13.)
            replica.broadcast_buffers = False
            # Attributes are freed in the order in which they were set, and the group
            # must outlive the reducer. The last one of the two ends gloo's threads, and
            # the reducer would wait for them while they wait for Python's lock:
            # https://github.com/pytorch/pytorch/issues/56297
            replica.process_group = vars(replica).pop("process_group")
            return replica
        for module in model.modules():
            if isinstance(module, nn.ModuleList):
                for layer in module:
                    fully_shard(layer, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh)
        return model

    def own_items(self, x: Tensor) -> Tensor:
        """The batch items that this rank computes, on its device: each `ranks`-th one.

        The batch is the last axis of tokens `[seq_len, batch_size]` and of lengths
        `[batch_size]`, and the second of vectors `[seq_len, batch_size, d_model]`.
        """
        x = x.to(self.device)
        if not self.splits_batch:
            return x
        axis = min(1, x.dim() - 1)
        return x[(slice(None),) * axis + (slice(self.rank, None, self.ranks),)]

    def mean(self, total: Tensor, count: Tensor | int) -> Tensor:
        r"""The loss to differentiate on this rank, from the sum over its own items.

        The engines average gradients over $n$ ranks. So the sum of a rank is divided by
        the number of all tokens, and multiplied by $n$. The average of these,
        $\frac{1}{n} \sum_r n\, \frac{\text{total}_r}{\text{count}}$, is the mean over
        all tokens.
        """
        if not self.splits_batch:
            return total / count
        counts = torch.as_tensor(count, device=total.device).clone()
        dist.all_reduce(counts)
        return self.ranks * total / counts

    def value(self, loss: Tensor) -> Tensor:
        """The mean over the tokens of all ranks, from what `mean` returned."""
        loss = loss.detach().clone()
        if self.splits_batch:
            dist.all_reduce(loss)
            loss /= self.ranks
        return loss


def gathered(state: Any) -> Any:
    """Any nest of containers, with whole tensors for distributed ones.

    All ranks must call it, since each contributes its parts.
    """
    return tree_map_only(DTensor, lambda x: x.full_tensor(), state)


def split_like(x: Tensor, parameter: Tensor) -> Tensor:
    """Split a whole tensor as a parameter of the same shape is split, on its device.

    What has another shape, such as a count of steps, stays as it is.
    """
    if x.shape != parameter.shape:
        return x
    x = x.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(x, parameter.device_mesh, parameter.placements)
    return x
