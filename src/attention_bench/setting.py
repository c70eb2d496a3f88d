r"""# Benchmark settings

A *setting* is one row of a benchmark table: batch size, length, mask, dropout
probability, dtype and device. This module creates the tensors of a setting, the same
for every implementation, and counts the arithmetic and the memory traffic that the
setting needs. In a *decoding* setting the query is one token of each batch item, and
`seq_len` is the number of keys in the cache.

FLOPs are counted for the function, not for an implementation of it: multiplications and
additions of the four projections, and of the two matrix products for each pair of a
query and a key that it may attend to. A causal mask leaves about half of these pairs.
An implementation that also computes the masked half, and discards it, gets no credit
for it.

$$8\,n\,d^2 + 4\,p\,d \qquad \text{for } n \text{ tokens of width } d
  \text{ and } p \text{ pairs}$$

A backward pass counts twice as much as the forward pass. Recomputation in the backward
pass, as in FlashAttention, is not counted either.

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
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

CPU = torch.device("cpu")


def dtype_name(dtype: torch.dtype) -> str:
    r"""The name of a dtype without the module.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Setting:
    r"""One row of a benchmark table: sizes, mask, dropout, dtype and device.

    Raises `ValueError` for a mask that is not one of `MASKS`.

    >>> setting = Setting(2, 3, "causal", d_model=10, heads=5)
    >>> setting.attention_mask().int()[..., 0]
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
            raise ValueError(
                f"`mask` (={self.mask!r}) must be one of {', '.join(MASKS)}"
            )

    @property
    def factory_kwargs(self) -> dict[str, Any]:
        """The dtype and device of all tensors, as arguments of their constructors."""
        return {"dtype": self.dtype, "device": self.device}

    @property
    def query_tokens(self) -> int:
        """The number of queries: while decoding, one for each batch item."""
        return self.batch_size * (1 if self.decoding else self.seq_len)

    def lengths(self) -> Tensor:
        r"""The lengths of the sequences in a padded batch: from half of all to all.

        A batch of one has three quarters of the length, so that it is padded, too.

        >>> Setting(3, 8).lengths()
        tensor([4, 6, 8])
        """
        half = -(-self.seq_len // 2)
        full = self.seq_len
        if self.batch_size == 1:
            return torch.tensor([(half + full) // 2], device=self.device)
        lengths = torch.linspace(half, full, self.batch_size)  # [batch_size]
        return lengths.round().long().to(self.device)

    def attention_mask(self) -> Tensor | None:
        r"""The mask in the convention of Headnotes (True: may attend), or None.

        >>> Setting(2, 3, "padding").attention_mask().int()[..., 0]
        tensor([[1, 1, 0]], dtype=torch.int32)
        """
        if self.mask == "none":
            return None
        if self.mask == "causal":
            causal = masks.causal(self.seq_len, device=self.device)
            return causal  # [seq_len, seq_len, 1]
        return masks.padding(self.lengths(), self.seq_len)  # [1, seq_len, batch_size]

    def pairs(self) -> int:
        r"""The number of pairs of a query and a key that it may attend to.

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
        """The FLOPs of the function: a multiplication and an addition are two."""
        projections = 8 * self.query_tokens * self.d_model**2
        forward = projections + 4 * self.pairs() * self.d_model
        return 3 * forward if self.training else forward

    def bytes(self) -> int:
        r"""The least memory traffic, if all intermediate results stay in caches.

        A forward pass reads the input and the weights, and writes the output; while
        decoding it reads the KV cache, too. A training step reads these again together
        with the gradient of the output, and writes the gradients of input and weights.
        """
        activations = 2 * self.query_tokens * self.d_model
        parameters = 4 * self.d_model * (self.d_model + 1)
        kv_cache = 2 * self.pairs() * self.d_model if self.decoding else 0
        forward = (activations + parameters + kv_cache) * self.dtype.itemsize
        return 3 * forward if self.training else forward

    def x(self) -> Tensor:
        """The input, random: `[seq_len, batch_size, d_model]`."""
        return self.random_tensor(seed=7)

    def grad_output(self) -> Tensor:
        """The gradient of the output, random, too: `[seq_len, batch_size, d_model]`."""
        return self.random_tensor(seed=13)

    def random_tensor(self, seed: int) -> Tensor:
        r"""Random numbers, the same on every device.

        >>> Setting(2, 3, d_model=10, heads=5).random_tensor(seed=7).shape
        torch.Size([3, 2, 10])
        """
        seq_len, batch_size, d_model = self.seq_len, self.batch_size, self.d_model
        # A generator of the CPU: one of the GPU would give other numbers.
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(
            seq_len, batch_size, d_model, generator=generator
        )  # [seq_len, batch_size, d_model]
        return x.to(**self.factory_kwargs)  # [seq_len, batch_size, d_model]

    def core(self) -> mha.MultiHeadAttention:
        r"""The core module, with the weights that every implementation gets.

        The weights are larger than those of the default initialization, with which
        attention is nearly uniform: a wrong mask or scale would change the output
        little, and the check for equality could miss it.

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
        return core.to(**self.factory_kwargs)

    def as_dict(self) -> dict[str, Any]:
        r"""The setting as numbers, strings and booleans, for a JSON file.

        >>> Setting(4, 512, "causal").as_dict()["mask"]
        'causal'
        """
        fields = {"dtype": dtype_name(self.dtype), "device": self.device.type}
        return vars(self) | fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Setting":
        r"""The setting that `as_dict` described.

        >>> Setting.from_dict(Setting(2, 3).as_dict()) == Setting(2, 3)
        True
        """
        dtype, device = DTYPES[fields["dtype"]], torch.device(fields["device"])
        return cls(**fields | {"dtype": dtype, "device": device})

    def __str__(self) -> str:
        if self.decoding:
            return f"batch {self.batch_size}, {self.seq_len:,} keys in the cache"
        mask = "no mask" if self.mask == "none" else self.mask
        dropout = f", dropout {self.dropout:g}" if self.training else ""
        return f"batch {self.batch_size}, length {self.seq_len:,}, {mask}{dropout}"
