r"""# What is asked of all

One cell of a table of timings is one *setting*: so many sentences of such a length, a
mask, and a chance of dropout. Here it is put into tensors, the same for all, and its
work is counted. While `decoding`, one token of each sentence asks, and `seq_len` is how
many keys it may read.

Counted is what the function *needs*, whoever computes it: multiplications and additions
of the four projections, and of the two products of each query with each key that it may
read. With a causal mask that is half of the square. Who computes the other half as
well, and throws it away, gets no credit for it.

$$8\,n\,d^2 + 4\,p\,d \qquad \text{for } n \text{ tokens of width } d
  \text{ and } p \text{ pairs}$$

A backward pass takes twice as many again, and what is computed anew in it counts for
nothing either.

Source: the sizes are those of the base model of [Attention Is All You
Need](https://arxiv.org/abs/1706.03762), Vaswani et al. 2017, table 3; counting forward
and backward passes as $1 : 2$ follows [Scaling Laws for Neural Language
Models](https://arxiv.org/abs/2001.08361), Kaplan et al. 2020, section 2.1.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headnotes import masks, mha

MASKS = ("none", "causal", "padding")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
}


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setting:
    r"""One cell: its sizes, its mask, its dropout; where and in which dtype.

    Raises `ValueError` for a mask that is none of `MASKS`.

    >>> setting = Setting(2, 3, "causal", d_model=10, heads=5)
    >>> setting.keep().int()[..., 0]
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """

    batch_size: int
    seq_len: int
    mask: str = "none"
    dropout: float = 0.0
    training: bool = False
    decoding: bool = False
    d_model: int = 512
    heads: int = 8
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU

    def __post_init__(self) -> None:
        if self.mask not in MASKS:
            raise ValueError(f"`mask` (={self.mask!r}) is none of {', '.join(MASKS)}")

    @property
    def like(self) -> dict[str, Any]:
        """The dtype and device of all its tensors."""
        return {"dtype": self.dtype, "device": self.device}

    @property
    def tokens(self) -> int:
        """How many tokens ask; while decoding, one of each batch item."""
        return self.batch_size * (1 if self.decoding else self.seq_len)

    def lengths(self) -> Tensor:
        r"""How long each sentence is, where they are padded: from half of all to all.

        A sentence alone in its batch has three quarters of the length, so that there is
        something to be masked.

        >>> Setting(3, 8).lengths()
        tensor([4, 6, 8])
        """
        half, full = -(-self.seq_len // 2), self.seq_len
        if self.batch_size == 1:
            return torch.tensor([(half + full) // 2], device=self.device)
        lengths = torch.linspace(half, full, self.batch_size)  # [batch_size]
        return lengths.round().long().to(self.device)

    def keep(self) -> Tensor | None:
        r"""The mask as this house writes it, or none.

        >>> Setting(2, 3, "padding").keep().int()[..., 0]
        tensor([[1, 1, 0]], dtype=torch.int32)
        """
        if self.mask == "none":
            return None
        if self.mask == "causal":
            causal = masks.causal(self.seq_len, device=self.device)
            return causal  # [seq_len, seq_len, 1]
        return masks.padding(self.lengths(), self.seq_len)  # [1, seq_len, batch_size]

    def pairs(self) -> int:
        r"""How often a query may read a key, all batch items together.

        >>> Setting(2, 3, "causal").pairs()
        12
        """
        if self.decoding:
            return self.batch_size * self.seq_len
        if self.mask == "causal":
            return self.batch_size * self.seq_len * (self.seq_len + 1) // 2
        keys = self.batch_size * self.seq_len
        if self.mask == "padding":
            keys = int(self.lengths().sum())
        return self.seq_len * keys

    def flops(self) -> int:
        """What the function needs, a multiplication and an addition counting as two."""
        forward = 8 * self.tokens * self.d_model**2 + 4 * self.pairs() * self.d_model
        return 3 * forward if self.training else forward

    def bytes(self) -> int:
        r"""What has to be read and written at the least, if all else stays in caches.

        Going forward: the input, the weights, the output; while decoding, the cache. A
        training step reads these again, with the gradient that arrives, and writes the
        gradients of input and weights.
        """
        entries = 2 * self.tokens * self.d_model + 4 * self.d_model * (self.d_model + 1)
        if self.decoding:
            entries += 2 * self.pairs() * self.d_model
        forward = entries * self.dtype.itemsize
        return 3 * forward if self.training else forward

    def x(self) -> Tensor:
        """Random tokens: `[seq_len, batch_size, d_model]`."""
        return self.draw(seed=7)

    def above(self) -> Tensor:
        """The gradient that arrives from above, as random as they are."""
        return self.draw(seed=13)

    def draw(self, seed: int) -> Tensor:
        r"""Random numbers, the same on every device.

        >>> Setting(2, 3, d_model=10, heads=5).draw(seed=7).shape
        torch.Size([3, 2, 10])
        """
        seq_len, batch_size, d_model = self.seq_len, self.batch_size, self.d_model
        seeded = torch.Generator().manual_seed(seed)
        x = torch.randn(
            seq_len, batch_size, d_model, generator=seeded
        )  # [seq_len, batch_size, d_model]
        return x.to(**self.like)  # [seq_len, batch_size, d_model]

    def core(self) -> mha.MultiHeadAttention:
        r"""The readable core, with the weights that all are given.

        They are larger than those that modules are born with: with the usual ones
        attention is nearly uniform, and a wrong mask or scale changes little.

        >>> core = Setting(2, 3, d_model=10, heads=5).core()
        >>> core.output.weight.shape
        torch.Size([10, 10])
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            core = mha.MultiHeadAttention(self.heads, self.d_model, self.dropout)
            with torch.no_grad():
                for parameter in core.parameters():
                    parameter.normal_(std=self.d_model**-0.5)
        return core.to(**self.like)

    def as_json(self) -> dict[str, Any]:
        r"""The setting as plain data.

        >>> Setting(4, 512, "causal").as_json()["mask"]
        'causal'
        """
        plain: dict[str, Any] = {**vars(self)}
        plain["dtype"] = str(self.dtype).removeprefix("torch.")
        plain["device"] = self.device.type
        return plain

    def __str__(self) -> str:
        if self.decoding:
            return f"batch {self.batch_size}, {self.seq_len:,} keys in the cache"
        mask = "no mask" if self.mask == "none" else self.mask
        dropout = f", dropout {self.dropout:g}" if self.training else ""
        return f"batch {self.batch_size}, length {self.seq_len:,}, {mask}{dropout}"
