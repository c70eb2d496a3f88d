r"""# Solution: slow learner (attention maps)

This is a solution of the exercise [slow
learner](../../../exercises/27_bug_maps.py), with the inputs that its check uses and the
mistakes that the check recognizes.

The given code detaches the weights for the stored copy, and then computes the context
with the detached ones. The output is right. But no gradient passes through the weights,
so queries and keys stay at their initialization, and only values and output are
trained. Such a model learns: a fixed random mixture of tokens is of some use. The law
*parameter_gradients* fails, and with it *gradients*.

Source: the code is in the style of [labml](https://nn.labml.ai/transformers/mha.html);
the bug is our own.
"""

import math

import torch
from torch import Tensor, nn

from headnotes.exercises.exercise import Exercise, evaluate, numbers


class Attention(nn.Module):
    r"""Self-attention over `[seq_len, batch_size, d_model]`, fixed.

    >>> attention = Attention(d_model=21, heads=3)
    >>> attention(torch.randn(5, 2, 21)).sum().backward()
    >>> attention.query.weight.grad is None, attention.attn.requires_grad
    (False, False)
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.output = nn.Linear(d_model, d_model)
        self.attn: Tensor | None = None

    def split(self, x: Tensor) -> Tensor:
        """Split the last dimension into heads."""
        return x.view(*x.shape[:2], self.heads, -1)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each token of `x` to all tokens."""
        query, key = self.split(self.query(x)), self.split(self.key(x))
        return self.attend(query, key, self.split(self.value(x)))

    def attend(
        self,
        query: Tensor,  # [seq_len, batch_size, heads, d_k]
        key: Tensor,  # [seq_len, batch_size, heads, d_k]
        value: Tensor,  # [seq_len, batch_size, heads, d_k]
    ) -> Tensor:
        """The output; the weights are stored without their graph, and used with it."""
        scores = torch.einsum("ibhd,jbhd->ijbh", query, key)
        attn = (scores / math.sqrt(query.shape[-1])).softmax(dim=1)
        self.attn = attn.detach()
        context = torch.einsum("ijbh,jbhd->ibhd", attn, value)
        return self.output(context.flatten(-2))  # type: ignore[no-any-return]


# region Typical mistakes


class Given(Attention):
    """This is the given code, or one that computes the same: queries and keys receive
    no gradient. Look for the line behind which the graph is lost.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().attend(query.detach(), key.detach(), value)


class OnlyQueries(Attention):
    """The queries receive a gradient now, but the keys still receive none. Detach
    nothing that the output is computed from.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().attend(query, key.detach(), value)


class OnlyWeights(Attention):
    """Queries and keys receive a gradient now, but the values receive none. Detach
    nothing that the output is computed from.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().attend(query, key, value.detach())


class ContextDetached(Attention):
    """The context is detached: only the last projection receives a gradient. Detach the
    stored copy of the weights, and nothing else.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().attend(query.detach(), key.detach(), value.detach())


# endregion

EXERCISE = Exercise(
    series="Find the bug",
    solution=Attention,
    reference=Attention,
    inputs=[(numbers(1, 1, 2),), (numbers(2, 1, 2),), (numbers(5, 3, 4),)],
    mistakes=[Given, OnlyQueries, OnlyWeights, ContextDetached],
    run=evaluate,
    laws=["parameter_gradients", "gradients"],
    options={"layout": "sequence_first"},
)
