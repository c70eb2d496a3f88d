"""Each implementation of attention, as `test_contract.py` builds and calls it.

The claims are written once, in one convention: sequence first, and a bool mask
`[q_len, k_len, batch_size]`, True = this query may attend to this key. An
`Implementation` translates them into the arguments of its module. To put a module under
the contract, add an entry to `IMPLEMENTATIONS`.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headnotes import fast, mha
from headnotes.implementations import batch_first, causal, stages, valid_lens
from headnotes.variants.alibi import AlibiAttention
from headnotes.variants.grouped_query import GroupedQueryAttention
from headnotes.variants.latent import LatentAttention
from headnotes.variants.online_softmax import online_softmax_attention
from headnotes.variants.relative import (
    ShawAttention,
    T5Attention,
    TransformerXLAttention,
)
from headnotes.variants.rotary import RotaryAttention, rotary_frequencies

CONTEXT_LENGTH = 17

Projections = dict[str, tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Sizes:
    """Prime and pairwise distinct, so that no swapped pair of axes can pass unseen."""

    q_len: int = 5
    k_len: int = 7
    batch_size: int = 3
    heads: int = 2
    d_k: int = 11
    # The width of the inputs, where an implementation lets them have one of their own.
    d_in: int = 13


def randomize(module: nn.Module) -> None:
    """Weights well above the usual scale, so that the rows of attention differ."""
    with torch.no_grad():
        for parameter in module.parameters():
            scale = parameter.shape[-1] ** 0.25
            parameter.copy_(torch.randn_like(parameter) / scale)


class Implementation:
    """Sequence first, with a mask: the core, and what shares its signature."""

    takes_mask = True  # else its mask is fixed: causal, or none
    takes_integer_mask = True
    mask_per_query = True
    can_mask = True
    can_be_causal = True
    has_dropout = True
    has_context_length = False
    checks_its_arguments = True
    # A Python loop over blocks is another program for another length.
    is_blockwise = False
    # Whether it computes what the core computes; a variant has loops of its own.
    is_core = True
    # Whether the mean of equal values is that value, for scores as large as 1e5, too.
    equal_values_pass = True
    # The names of the width and of the number of heads in the constructor.
    divides_width = True
    width_and_heads = ("d_model", "heads")

    def __init__(self, kind: type[nn.Module]) -> None:
        self.kind = kind

    def sizes(self, **changed: int) -> Sizes:
        """The sizes of a test, as far as this implementation can have them."""
        return replace(Sizes(), **changed)

    def settings(self, sizes: Sizes, bias: bool, dropout: float) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {
            "heads": sizes.heads,
            "d_model": sizes.heads * sizes.d_k,
            "dropout_prob": dropout,
            "bias": bias,
        }

    def build(self, sizes: Sizes, *, bias: bool = True, dropout: float = 0.0) -> Any:
        """A module in training mode."""
        module = self.kind(**self.settings(sizes, bias, dropout))
        randomize(module)
        return module

    def inputs(self, sizes: Sizes, **like: Any) -> dict[str, Tensor]:
        """Random inputs, as `forward` takes them."""
        width = sizes.heads * sizes.d_k
        return {
            "query": torch.randn(sizes.q_len, sizes.batch_size, width, **like),
            "key": torch.randn(sizes.k_len, sizes.batch_size, width, **like),
            "value": torch.randn(sizes.k_len, sizes.batch_size, width, **like),
        }

    def some_mask(self, sizes: Sizes) -> Tensor:
        """A random mask without fully masked rows."""
        mask = torch.rand(sizes.q_len, sizes.k_len, sizes.batch_size) < 0.6
        mask[:, :1] = True
        return mask

    def restrict(self, mask: Tensor | None) -> dict[str, Any]:
        """The argument of `forward` that means `mask`."""
        return {"mask": mask}

    def output_of(self, result: Any) -> Tensor:
        """The output among what `forward` returns."""
        output: Tensor = result
        return output

    def sequence_first(self, x: Tensor) -> Tensor:
        """An input or output as `[seq_len, batch_size, width]`."""
        return x

    def weights(self, module: Any, arguments: dict[str, Any]) -> Tensor:
        """The attention weights of a call, `[q_len, k_len, batch_size, heads]`."""
        module(**arguments)
        weights: Tensor = module.attn
        return weights

    def projections(self, module: Any) -> Projections:
        """Weight and bias of the four linear maps."""
        return parameters_of(
            {
                "query": module.query.linear,
                "key": module.key.linear,
                "value": module.value.linear,
                "output": module.output,
            }
        )


def parameters_of(layers: dict[str, Any]) -> Projections:
    return {name: (layer.weight, layer.bias) for name, layer in layers.items()}


class Fast(Implementation):
    """Keeps no weights: they are returned where the call says so."""

    def weights(self, module: Any, arguments: dict[str, Any]) -> Tensor:
        weights: Tensor = module(**arguments, need_weights=True)[1]
        return weights


class BlockwiseAttention(mha.MultiHeadAttention):
    """The parameters of the core around `online_softmax_attention`."""

    def forward(
        self,
        *,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        if mask is not None:
            fully_masked = ~mask.any(dim=0).unsqueeze(-1)
            key = key.masked_fill(fully_masked, 0)
            value = value.masked_fill(fully_masked, 0)
        # No block divides the length that it cuts, and no length has over 11 of them.
        context = online_softmax_attention(
            self.query(query),
            self.key(key),
            self.value(value),
            mask,
            is_causal=is_causal,
            q_block=max(4, len(query) // 9),
            k_block=max(6, len(key) // 9),
        )
        output: Tensor = self.output(context.flatten(-2))
        return output


class OnlineSoftmax(Implementation):
    """A function without dropout, which checks its own arguments."""

    takes_integer_mask = False
    has_dropout = False
    checks_its_arguments = False
    is_blockwise = True


class Variant(Implementation):
    """A subclass of the core with other scores, or other heads."""

    is_core = False

    def __init__(self, kind: type[nn.Module], **own: Any) -> None:
        super().__init__(kind)
        self.own = own

    def settings(self, sizes: Sizes, bias: bool, dropout: float) -> dict[str, Any]:
        return super().settings(sizes, bias, dropout) | self.own


class Unscaled(Variant):
    """T5 does not divide the scores, so those of float16 overflow earlier."""

    equal_values_pass = False


class ValueTable(Variant):
    """Shaw adds a vector to each value."""

    equal_values_pass = False


class Rotary(Variant):
    """Components are rotated in pairs; an odd one is left over."""

    def settings(self, sizes: Sizes, bias: bool, dropout: float) -> dict[str, Any]:
        pairs = sizes.d_k // 2
        frequencies = rotary_frequencies(2 * pairs) if pairs else torch.zeros(0)
        own = {"frequencies": frequencies}
        return super().settings(sizes, bias, dropout) | own


class Latent(Variant):
    """A class of its own: keys and values come from one latent."""

    equal_values_pass = False

    def projections(self, module: Any) -> Projections:
        return parameters_of({"output": module.output})


class BatchFirst(Implementation):
    """Batch first, with a mask for each head; returns output and weights."""

    width_and_heads = ("d_model", "n_heads")

    def settings(self, sizes: Sizes, bias: bool, dropout: float) -> dict[str, Any]:
        return {
            "d_model": sizes.heads * sizes.d_k,
            "n_heads": sizes.heads,
            "dropout": dropout,
        }

    def inputs(self, sizes: Sizes, **like: Any) -> dict[str, Tensor]:
        width = sizes.heads * sizes.d_k
        return {
            "query": torch.randn(sizes.batch_size, sizes.q_len, width, **like),
            "key": torch.randn(sizes.batch_size, sizes.k_len, width, **like),
            "value": torch.randn(sizes.batch_size, sizes.k_len, width, **like),
        }

    def restrict(self, mask: Tensor | None) -> dict[str, Any]:
        return {"mask": mask if mask is None else mask.permute(2, 0, 1).unsqueeze(1)}

    def output_of(self, result: Any) -> Tensor:
        output: Tensor = result[0]
        return output

    def sequence_first(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)

    def weights(self, module: Any, arguments: dict[str, Any]) -> Tensor:
        weights: Tensor = module(**arguments)[1]
        return weights.permute(2, 3, 0, 1)

    def projections(self, module: Any) -> Projections:
        return parameters_of(
            {
                "query": module.Wq,
                "key": module.Wk,
                "value": module.Wv,
                "output": module.Wo,
            }
        )


class ValidLens(Implementation):
    """Batch first; a length for each batch item, or for each of its queries."""

    takes_integer_mask = False
    width_and_heads = ("num_hiddens", "num_heads")

    def __init__(self, kind: type[nn.Module], mask_per_query: bool) -> None:
        super().__init__(kind)
        self.mask_per_query = self.can_be_causal = mask_per_query

    def settings(self, sizes: Sizes, bias: bool, dropout: float) -> dict[str, Any]:
        return {
            "num_hiddens": sizes.heads * sizes.d_k,
            "num_heads": sizes.heads,
            "dropout": dropout,
            "bias": bias,
        }

    def build(self, sizes: Sizes, *, bias: bool = True, dropout: float = 0.0) -> Any:
        module = self.kind(**self.settings(sizes, bias, dropout))
        # Its layers take their width from the first input.
        x = self.inputs(replace(sizes, q_len=1, k_len=1, batch_size=1))
        module(**x, **self.restrict(None))
        randomize(module)
        return module

    def inputs(self, sizes: Sizes, **like: Any) -> dict[str, Tensor]:
        batch_size, width = sizes.batch_size, sizes.d_in
        return {
            "queries": torch.randn(batch_size, sizes.q_len, width, **like),
            "keys": torch.randn(batch_size, sizes.k_len, width, **like),
            "values": torch.randn(batch_size, sizes.k_len, width, **like),
        }

    def some_mask(self, sizes: Sizes) -> Tensor:
        shape = (sizes.q_len if self.mask_per_query else 1, 1, sizes.batch_size)
        lens = torch.randint(1, sizes.k_len + 1, shape) if sizes.k_len else 0
        mask = torch.arange(sizes.k_len).view(-1, 1) < torch.as_tensor(lens)
        return mask.expand(sizes.q_len, sizes.k_len, sizes.batch_size).clone()

    def restrict(self, mask: Tensor | None) -> dict[str, Any]:
        if mask is None:
            return {"valid_lens": None}
        lens = mask.sum(dim=1).T  # [batch_size, q_len]
        if not self.mask_per_query:
            lens = lens[:, 0] if mask.shape[0] else lens.new_zeros(mask.shape[2])
        return {"valid_lens": lens}

    def sequence_first(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)

    def weights(self, module: Any, arguments: dict[str, Any]) -> Tensor:
        module(**arguments)
        weights: Tensor = module.attention.attention_weights
        heads = weights.unflatten(0, (-1, module.num_heads))
        return heads.permute(2, 3, 0, 1)

    def projections(self, module: Any) -> Projections:
        return parameters_of(
            {
                "query": module.W_q,
                "key": module.W_k,
                "value": module.W_v,
                "output": module.W_o,
            }
        )


class Causal(Implementation):
    """Batch first, one input, causal, with a limit on its length."""

    takes_mask = False
    takes_integer_mask = False
    has_context_length = True
    width_and_heads = ("d_out", "num_heads")

    def sizes(self, **changed: int) -> Sizes:
        sizes = super().sizes(**changed)
        return replace(sizes, q_len=sizes.k_len)

    def settings(self, sizes: Sizes, bias: bool, dropout: float) -> dict[str, Any]:
        return {
            "d_in": sizes.d_in,
            "d_out": sizes.heads * sizes.d_k,
            "context_length": CONTEXT_LENGTH,
            "dropout": dropout,
            "num_heads": sizes.heads,
            "qkv_bias": bias,
        }

    def inputs(self, sizes: Sizes, **like: Any) -> dict[str, Tensor]:
        return {"x": torch.randn(sizes.batch_size, sizes.k_len, sizes.d_in, **like)}

    def some_mask(self, sizes: Sizes) -> Tensor:
        mask = torch.ones(sizes.q_len, sizes.k_len).bool()
        mask = mask.tril() if self.can_be_causal else mask
        return mask.unsqueeze(-1).expand(-1, -1, sizes.batch_size)

    def restrict(self, mask: Tensor | None) -> dict[str, Any]:
        return {}

    def sequence_first(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)

    def weights(self, module: Any, arguments: dict[str, Any]) -> Tensor:
        # Nothing returns or stores them; dropout is applied to them.
        seen: list[Tensor] = []
        parts = [m for m in module.modules() if isinstance(m, nn.Dropout)]
        hooks = [
            m.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
            for m in parts
        ]
        module(**arguments)
        for hook in hooks:
            hook.remove()
        weights = torch.stack(seen, dim=1) if seen[0].dim() == 3 else seen[0]
        return weights.permute(2, 3, 0, 1)

    def projections(self, module: Any) -> Projections:
        return parameters_of(
            {
                "query": module.W_query,
                "key": module.W_key,
                "value": module.W_value,
                "output": module.out_proj,
            }
        )


class Wrapper(Causal):
    """Heads side by side; nothing mixes them, and `d_out` is the width of one."""

    divides_width = False

    def settings(self, sizes: Sizes, bias: bool, dropout: float) -> dict[str, Any]:
        return super().settings(sizes, bias, dropout) | {"d_out": sizes.d_k}

    def heads(self, module: Any) -> list[Any]:
        """The single heads of a module."""
        return list(module.heads)

    def projections(self, module: Any) -> Projections:
        heads = self.heads(module)
        projections: Projections = {}
        for name in ("query", "key", "value"):
            parts = [getattr(head, f"W_{name}") for head in heads]
            weight, bias = parts[0].weight, parts[0].bias
            if len(parts) > 1:
                weight = torch.cat([part.weight for part in parts])
                bias = bias if bias is None else torch.cat([p.bias for p in parts])
            projections[name] = weight, bias
        identity = torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
        return projections | {"output": (identity, None)}


class SingleHead(Wrapper):
    """A causal head alone."""

    def sizes(self, **changed: int) -> Sizes:
        return super().sizes(**changed | {"heads": 1})

    def settings(self, sizes: Sizes, bias: bool, dropout: float) -> dict[str, Any]:
        settings = super().settings(sizes, bias, dropout)
        del settings["num_heads"]
        return settings

    def heads(self, module: Any) -> list[Any]:
        return [module]


class OneSequence(SingleHead):
    """One sequence `[seq_len, d_in]`; each token may attend to all."""

    can_mask = False
    can_be_causal = False
    has_dropout = False
    has_context_length = False

    def sizes(self, **changed: int) -> Sizes:
        return super().sizes(**changed | {"batch_size": 1})

    def settings(self, sizes: Sizes, bias: bool, dropout: float) -> dict[str, Any]:
        return {"d_in": sizes.d_in, "d_out": sizes.d_k, "qkv_bias": bias}

    def inputs(self, sizes: Sizes, **like: Any) -> dict[str, Tensor]:
        return {"x": torch.randn(sizes.k_len, sizes.d_in, **like)}

    def sequence_first(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1)


class BareMatrices(OneSequence):
    """Three matrices, each stored as `[d_in, d_out]`, and no bias."""

    def settings(self, sizes: Sizes, bias: bool, dropout: float) -> dict[str, Any]:
        return {"d_in": sizes.d_in, "d_out": sizes.d_k}

    def projections(self, module: Any) -> Projections:
        names = ("query", "key", "value")
        projections: Projections = {
            name: (getattr(module, f"W_{name}").T, None) for name in names
        }
        weight = module.W_query
        identity = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
        return projections | {"output": (identity, None)}


IMPLEMENTATIONS: dict[str, Implementation] = {
    "core": Implementation(mha.MultiHeadAttention),
    "fast": Fast(fast.MultiHeadAttention),
    "online_softmax": OnlineSoftmax(BlockwiseAttention),
    "rotary": Rotary(RotaryAttention),
    "alibi": Variant(AlibiAttention),
    "shaw": ValueTable(ShawAttention),
    "transformer-xl": Variant(TransformerXLAttention),
    "t5": Unscaled(T5Attention),
    "grouped_query": Variant(GroupedQueryAttention, kv_heads=1),
    "latent": Latent(LatentAttention, kv_rank=5, rotary_dim=4, norm=False),
    "batch_first": BatchFirst(batch_first.MultiHeadAttention),
    "valid_lens per item": ValidLens(valid_lens.MultiHeadAttention, False),
    "valid_lens per query": ValidLens(valid_lens.MultiHeadAttention, True),
    "causal": Causal(causal.MultiHeadAttention),
    "stage 1": BareMatrices(stages.SelfAttention_v1),
    "stage 2": OneSequence(stages.SelfAttention_v2),
    "stage 3": SingleHead(stages.CausalAttention),
    "stage 4": Wrapper(stages.MultiHeadAttentionWrapper),
}


def each(**wanted: Any) -> pytest.MarkDecorator:
    """The implementations whose attributes are as `wanted`, all without any."""
    chosen = {
        name: one
        for name, one in IMPLEMENTATIONS.items()
        if all(getattr(one, key) == value for key, value in wanted.items())
    }
    assert chosen
    return pytest.mark.parametrize("one", chosen.values(), ids=chosen)
