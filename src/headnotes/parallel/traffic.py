r"""# Bytes that travel between processes

This module measures what a process sends in a training step: which collectives it
calls, with how many bytes of tensors, and how many bytes leave through its sockets.

A *collective* is an operation in which all ranks take part. Its *payload* is the whole
tensor that it sums or assembles. On a ring of $n$ ranks, each sends one part of $n$ to
its neighbor, $n - 1$ times:

| collective | result | bytes that each rank sends, of a payload $B$ |
|---|---|---|
| all-gather | every rank has the parts of all ranks | $B\,(n - 1) / n$ |
| reduce-scatter | every rank has one part of the sum | $B\,(n - 1) / n$ |
| all-reduce | every rank has the sum | $2 B\,(n - 1) / n$ |

An all-reduce is a reduce-scatter and an all-gather. No algorithm sends less. Beyond a
few ranks, their number hardly matters.

NCCL, on GPUs, has all three. Gloo, on CPUs, computes a reduce-scatter as [an all-reduce
of which each rank uses one part](https://github.com/pytorch/pytorch/pull/118911), so
there it costs as much as an all-reduce.

Source: [Bandwidth Optimal All-reduce
Algorithms](https://doi.org/10.1016/j.jpdc.2008.09.002), Patarasuk and Yuan 2009;
[tcp(7)](https://man7.org/linux/man-pages/man7/tcp.7.html) for `TCP_INFO`.
"""

import os
import socket
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The operators of PyTorch by collective: first those of `torch.distributed`, which DDP
# and FSDP2 call, then those of DTensor.
COLLECTIVES = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
}

# How often a ring sends the payload, but for the factor (n - 1) / n.
PASSES = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
PASSES_OF_GLOO = PASSES | {"reduce-scatter": 2}

# Linux: the option of a socket that describes its connection, and where two numbers of
# 64 bits are in the answer: the bytes sent, and those of them that were sent again.
TCP_INFO, BYTES_SENT = 11, 200


class Collective(NamedTuple):
    """One call of a collective: its kind, and the bytes of the whole tensor."""

    kind: str
    payload: int


class CollectiveRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    r"""While active, records the collectives that this process calls, also backward.

    It sees each operator before it runs, as PyTorch's `CommDebugMode` does, which
    counts calls, but no bytes.

    >>> from torch import distributed as dist, ones
    >>> store = dist.HashStore()
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> with CollectiveRecorder() as recorder:
    ...     dist.all_reduce(ones(7, 3))
    >>> recorder.calls
    [Collective(kind='all-reduce', payload=84)]
    >>> dist.destroy_process_group()
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Collective] = []

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        namespace, _, name = str(function).removesuffix(".default").partition(".")
        if "c10d" in namespace and name in COLLECTIVES:
            # Of whole and part, the arguments of a gather, the whole is the larger.
            tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
            payload = max(x.nbytes for x in tensors)
            self.calls.append(Collective(COLLECTIVES[name], payload))
        return function(*args, **(kwargs or {}))


def bytes_to_send(
    calls: list[Collective], ranks: int, passes: dict[str, int] = PASSES
) -> float:
    """The bytes that each of `ranks` sends for these collectives, on a ring.

    >>> gradients = [Collective("all-reduce", 1000)]
    >>> [bytes_to_send(gradients, ranks) for ranks in (1, 2, 4, 8)]
    [0.0, 1000.0, 1500.0, 1750.0]
    """
    return sum(passes[kind] * payload * (ranks - 1) / ranks for kind, payload in calls)


def bytes_sent() -> int:
    """The bytes that this process has sent through its open TCP sockets, on Linux.

    The kernel counts what the process has written, without the headers of packets.
    """
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=int(entry))
        except OSError:
            continue  # not a socket
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 256)
            sent, sent_again = struct.unpack_from("QQ", info, BYTES_SENT)
            total += sent - sent_again
        except OSError:
            pass  # not TCP
        finally:
            connection.detach()  # it stays open: its owner still uses it
    return total
