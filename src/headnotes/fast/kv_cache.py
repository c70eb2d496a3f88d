r"""# Keys and values, kept

A language model writes one token at a time, and each token reads all that came before.
Its keys and values do not change any more: they are computed once and kept. A step then
costs one token's projections, and one reading of what is kept,

$$2 \cdot \texttt{batch\_size} \cdot \texttt{heads} \cdot \texttt{k\_len} \cdot d_k$$

numbers, which is what bounds its speed. So they lie head by head, as they are read,
although the tensors around them lie sequence first; and they are written in place,
since a cache that grows by `torch.cat` copies the whole past for each token.

Source: [Fast Transformer Decoding](https://arxiv.org/abs/1911.02150), Shazeer 2019,
section 2.4, for what a step costs.
"""

# Nothing but PyTorch and the standard library: this file runs wherever it is put.
import torch
from torch import Tensor


class KeyValueCache:
    r"""The keys and values of `length` positions, with room for `capacity`.

    With `grow=True` the room is doubled when it does not suffice; otherwise a cache
    that is full says so. Raises `ValueError` for sizes below 1.
    Source: Shazeer 2019, section 2.4.

    >>> cache = KeyValueCache(2, 3, 5, capacity=7, grow=True)
    >>> x = torch.randn(17, 2, 3, 5)
    >>> cache.append(x[:4], x[:4])
    >>> len(cache), cache.capacity
    (4, 7)
    >>> cache.append(x[4:], x[4:])
    >>> len(cache), cache.capacity
    (17, 28)
    >>> kept = x.permute(1, 2, 0, 3)
    >>> torch.equal(cache.keys, kept)
    True
    >>> torch.equal(cache.values, kept)
    True
    """

    def __init__(
        self,
        batch_size: int,
        heads: int,
        d_k: int,
        capacity: int,
        *,
        grow: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        sizes = {"batch_size": batch_size, "heads": heads, "d_k": d_k}
        for name, size in (sizes | {"capacity": capacity}).items():
            if type(size) is not int or size < 1:
                raise ValueError(f"`{name}` (={size!r}) must be an int from 1 up")
        # Keys and values are read one after the other, so they lie in two halves.
        self.kept = torch.empty(
            2, batch_size, heads, capacity, d_k, dtype=dtype, device=device
        )  # [2, batch_size, heads, capacity, d_k]
        self.length = 0
        self.grow = grow

    def __len__(self) -> int:
        return self.length

    @property
    def capacity(self) -> int:
        """The number of positions that there is room for."""
        return self.kept.shape[3]

    @property
    def keys(self) -> Tensor:
        """A view of the keys so far, `[batch_size, heads, length, d_k]`."""
        keys: Tensor = self.kept[0]  # [batch_size, heads, ..., d_k]
        return keys[:, :, : self.length]  # [batch_size, heads, length, d_k]

    @property
    def values(self) -> Tensor:
        """A view of the values so far, `[batch_size, heads, length, d_k]`."""
        values: Tensor = self.kept[1]  # [batch_size, heads, ..., d_k]
        return values[:, :, : self.length]  # [batch_size, heads, length, d_k]

    def append(
        self,
        key: Tensor,  # [seq_len, batch_size, heads, d_k]
        value: Tensor,  # [seq_len, batch_size, heads, d_k]
    ) -> None:
        r"""Keep the keys and values of the next positions. They carry no gradient.

        Raises `TypeError` for another dtype, `ValueError` for a shape or device that
        does not fit, or where there is no room; the cache is then as it was before.

        >>> cache = KeyValueCache(2, 3, 5, capacity=1)
        >>> token = torch.randn(1, 2, 3, 5)
        >>> cache.append(token, token)
        >>> cache.append(token, token)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: the cache is full: it holds 1 of 1 ...
        """
        self.check("key", key)
        self.check("value", value)
        if len(key) != len(value):
            raise ValueError(
                f"`value` has length {len(value)}, `key` {len(key)}; make them equal"
            )
        end = self.length + len(key)
        if end > self.capacity and not self.grow:
            raise ValueError(
                f"the cache is full: it holds {self.length} of {self.capacity} "
                f"positions, and {len(key)} more came; give it more `capacity`, or "
                f"`grow=True`"
            )
        if end > self.capacity:
            self.make_room(end)
        with torch.no_grad():
            keys, values = self.kept[:, :, :, self.length : end]  # [..., seq_len, d_k]
            keys.copy_(key.permute(1, 2, 0, 3))
            values.copy_(value.permute(1, 2, 0, 3))
        self.length = end

    def make_room(self, needed: int) -> None:
        """Double the capacity until it suffices: a copy so seldom costs little."""
        capacity = self.capacity
        while capacity < needed:
            capacity *= 2
        *sizes, _, d_k = self.kept.shape
        kept = self.kept.new_empty(*sizes, capacity, d_k)  # [..., capacity, d_k]
        kept[:, :, :, : self.length] = self.kept[:, :, :, : self.length]
        self.kept = kept

    def reorder(self, index: Tensor) -> None:
        r"""Let batch item `i` go on from what item `index[i]` has read.

        Beam search needs this: of all ways to go on, the best may all continue one
        sequence. `index` holds integers, `[batch_size]`, as many as there will be
        items. Raises `TypeError` for another dtype, `ValueError` for another shape, or
        an item that does not exist.

        >>> cache = KeyValueCache(batch_size=3, heads=1, d_k=1, capacity=2)
        >>> x = torch.tensor([5.0, 7.0, 11.0]).view(1, 3, 1, 1)
        >>> cache.append(x, x)
        >>> cache.reorder(torch.tensor([2, 2, 0]))
        >>> cache.keys.flatten()
        tensor([11., 11.,  5.])
        """
        batch_size = self.kept.shape[1]
        if not isinstance(index, Tensor) or index.dtype not in (
            torch.int32,
            torch.int64,
        ):
            seen = index.dtype if isinstance(index, Tensor) else type(index).__name__
            raise TypeError(f"`index` is {seen}, not an int64 tensor of batch items")
        if index.layout != torch.strided or index.is_nested or index.is_meta:
            raise TypeError("`index` is sparse, nested or on meta; pass a dense one")
        if index.dim() != 1 or not len(index):
            raise ValueError(
                f"`index` has shape {list(index.shape)}, not [batch_size]; name one "
                f"item for each that goes on"
            )
        low, high = (bound.item() for bound in index.aminmax())
        if low < 0 or high >= batch_size:
            raise ValueError(
                f"`index` names items {low} to {high}, but there are 0 to "
                f"{batch_size - 1}"
            )
        self.kept = self.kept.index_select(1, index.to(self.kept.device))  # [2, ...]

    def check(self, name: str, x: Tensor) -> None:
        """Refuse what does not fit beside what is kept."""
        if not isinstance(x, Tensor) or x.dtype != self.kept.dtype:
            seen = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(
                f"`{name}` is {seen}, the cache {self.kept.dtype}; make the cache with "
                f"the `dtype` that it is to keep"
            )
        _, batch_size, heads, _, d_k = self.kept.shape
        if x.layout != torch.strided or x.is_nested:
            raise TypeError(f"`{name}` is sparse or nested; pass a dense one")
        if x.dim() != 4 or x.shape[1:] != (batch_size, heads, d_k):
            raise ValueError(
                f"`{name}` has shape {list(x.shape)}, not [seq_len, batch_size "
                f"(={batch_size}), heads (={heads}), d_k (={d_k})]"
            )
        if x.device != self.kept.device:
            raise ValueError(
                f"`{name}` is on {x.device}, the cache on {self.kept.device}; make the "
                f"cache with that `device`"
            )
