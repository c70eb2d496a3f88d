r"""# Solution: the boxes are off (cross-attention in DETR)

This is a solution of the exercise [the boxes are
off](../../../exercises/28_bug_boxes.py), with the inputs that its check uses and the
mistakes that the check recognizes.

The given code passes query, value and key to a function that takes query, key and
value. So the scores are computed from the values, and the keys are summed:

$$\operatorname{softmax}\left(\frac{Q V^\top}{\sqrt{d_k}}\right) K$$

Where keys and values come from the same tensor, this is attention with other names: the
two projections have exchanged their roles, and training works. Where they differ, as
with positions in the keys, or where a checkpoint has given each projection its role, it
is wrong. The law *linear_in_value* fails: the output is no longer linear in the values.

Source: [DETR](https://arxiv.org/abs/2005.12872), Carion et al. 2020, section A.3, for
keys with positions; the bug is our own. Keras really takes [query, value,
key](https://keras.io/api/layers/attention_layers/multi_head_attention/), in this order.
"""

import math

from torch import Tensor, nn

from headnotes.exercises.exercise import Exercise, evaluate, numbers


class Attention(nn.Module):
    r"""Cross-attention over `[batch_size, q_len, d_model]`, fixed.

    >>> import torch
    >>> attention = Attention(d_model=21, heads=3)
    >>> query, key = torch.randn(2, 4, 21), torch.randn(2, 5, 21)
    >>> attention(query, key, key + 1).shape
    torch.Size([2, 4, 21])
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def split(self, x: Tensor) -> Tensor:
        """Split the last dimension into heads."""
        x = x.view(*x.shape[:2], self.heads, -1)  # [batch_size, length, heads, d_k]
        return x.transpose(1, 2)  # [batch_size, heads, length, d_k]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from each query to all keys."""
        q = self.split(self.q_proj(query))
        k = self.split(self.k_proj(key))
        v = self.split(self.v_proj(value))
        context = self.attend(q, k, v)
        return self.out_proj(context.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Scaled dot-product attention, with its arguments in this order."""
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        return scores.softmax(dim=-1) @ value


# region Typical mistakes


class Given(Attention):
    """This is the given code, or one that computes the same. Follow keys and values
    from the arguments of `forward` to the scores.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().attend(query, value, key)


class KeysTwice(Attention):
    """The scores are right now, but the keys are summed as well. The context is the
    weighted sum of the values.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().attend(query, key, key)


class ValuesTwice(Attention):
    """The values are summed, but the scores are computed from the values, too. They are
    products of queries and keys.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().attend(query, value, value)


class WrongProjections(Attention):
    """Keys and values are exchanged before the projections: each is multiplied by the
    weights of the other. Keep the projections as given, and exchange their results.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q = self.split(self.q_proj(query))
        k, v = self.split(self.v_proj(key)), self.split(self.k_proj(value))
        context = Attention.attend(self, q, k, v)
        return self.out_proj(context.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class InputsExchanged(Attention):
    """The arguments of `forward` are exchanged: the projection of the keys gets the
    values. Its arguments are right, but not those of `attend`.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().forward(query, value, key)


# endregion


def inputs(
    batch_size: int, q_len: int, k_len: int, d_model: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of these sizes."""
    key, value = (numbers(batch_size, k_len, d_model, seed=n) for n in (1, 2))
    return numbers(batch_size, q_len, d_model), key, value


EXERCISE = Exercise(
    series="Find the bug",
    solution=Attention,
    reference=Attention,
    inputs=[inputs(1, 1, 1, 2), inputs(1, 1, 2, 2), inputs(2, 3, 5, 4)],
    mistakes=[Given, KeysTwice, ValuesTwice, WrongProjections, InputsExchanged],
    run=evaluate,
    laws=["linear_in_value", "formula"],
    options={"layout": "batch_first"},
)
