r"""# Architectures of Hugging Face Transformers

This module describes the attention layers of published models: which parameters hold
the projections, and which of [our options](fast/components.md) compute the same. It is
for those who add a model to [`convert.from_transformers`](convert.md#from_transformers)
or want to know how models differ. `ARCHITECTURES` has one row for each class of an
attention layer in `transformers`:

- **layers**: the names of the linear layers. Two names mean a fused projection, and
  `order` is the order of its rows.
- **pairing**: which components form a pair in [rotary positions](variants/rotary.md).
- **norm**: the [normalization of queries and keys](variants/qk_norm.md).
- **window**, **soft_cap**: the attributes that hold these numbers.

Sizes, the scale of the scores, scaled rotary frequencies and dropout are read from the
layer and its configuration. An architecture has two methods: `build` makes our module,
without values, and `parameters` returns for each of our parameters the view of theirs
that holds the same numbers. A copy in either direction is a loop over these views, so
nothing is added, multiplied or rounded.

`transformers` is not imported here, because a class is known by its name.

Transformers 4 stores the scale and the rotary settings under other names, which
`scale_of` and `rope_options` read. Before Transformers 5.15, a layer of T5 has no
scale, and does not know whether it is causal, which `shares_table` takes from its name.

Source: the modeling files of
[Transformers](https://github.com/huggingface/transformers) 4.57 and 5,
`models/*/modeling_*.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from headnotes import fast, mha
from headnotes.variants import rotary
from headnotes.variants.latent import LatentAttention
from headnotes.variants.qk_norm import NormalizedProjection
from headnotes.variants.relative import check_buckets, relative_buckets

# The first releases of `transformers` whose layers the rows describe, one for each
# major version.
SINCE = ("4.57", "5.5")

# Our parameters by name, each with the view of their parameters that holds the same
# numbers. None, if they have no such parameter.
Views = dict[str, Tensor | None]


# region Norms and biases that only these models have


class OffsetRMSNorm(nn.RMSNorm):
    r"""An RMS norm that stores its factors minus 1, as in Gemma 3.

    >>> norm = OffsetRMSNorm(3)
    >>> nn.init.zeros_(norm.weight).shape
    torch.Size([3])
    >>> x = torch.randn(5, 3)
    >>> norm(x).allclose(nn.RMSNorm(3)(x))
    True
    """

    def forward(
        self,
        x: Tensor,  # [..., d_k]
    ) -> Tensor:
        weight = 1 + self.weight.float()  # [d_k]
        y = F.rms_norm(x.float(), weight.shape, weight, self.eps)  # [..., d_k]
        return y.to(x.dtype)  # [..., d_k]


class HeadLayerNorm(nn.Module):
    r"""A layer norm of each head, with factors of its own and no bias, as in Cohere.

    >>> norm = HeadLayerNorm(heads=5, d_k=3, eps=1e-5)
    >>> norm(torch.randn(2, 5, 3)).shape, norm.weight.shape
    (torch.Size([2, 5, 3]), torch.Size([5, 3]))
    """

    def __init__(self, heads: int, d_k: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, d_k))  # [heads, d_k]
        self.eps = eps

    def forward(
        self,
        x: Tensor,  # [..., heads, d_k]
    ) -> Tensor:
        y = F.layer_norm(x.float(), x.shape[-1:], eps=self.eps)  # [..., heads, d_k]
        return (self.weight.float() * y).to(x.dtype)  # [..., heads, d_k]


class BucketBias(nn.Embedding):
    r"""T5's bias of the scores: a table `[buckets, heads]`, looked up by distance.

    It is a `bias` of [`fast.Scores`](fast/components.md#Scores). Raises `ValueError`
    for numbers of which no buckets can be made, as
    [`relative_buckets`](variants/relative.md#relative_buckets) does.

    >>> bias = BucketBias(32, 5, max_distance=128, bidirectional=False)
    >>> bias(torch.arange(4, 7), torch.arange(7)).shape
    torch.Size([3, 7, 5])
    """

    def __init__(
        self, buckets: int, heads: int, *, max_distance: int, bidirectional: bool
    ) -> None:
        check_buckets(buckets, max_distance, bidirectional)
        super().__init__(buckets, heads)
        self.max_distance = max_distance
        self.bidirectional = bidirectional

    def forward(  # type: ignore[override]
        self,
        query_positions: Tensor,  # [q_len]
        key_positions: Tensor,  # [k_len]
    ) -> Tensor:
        distances = key_positions - query_positions.unsqueeze(1)  # [q_len, k_len]
        buckets = relative_buckets(
            distances,
            buckets=self.num_embeddings,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )  # [q_len, k_len]
        bias: Tensor = super().forward(buckets)  # [q_len, k_len, ...]
        return bias


class Norm(NamedTuple):
    """The norm of queries and keys: its names, axes, and class."""

    names: tuple[str, str]
    over: str
    # From heads, d_k and eps.
    make: Callable[[int, int, float], nn.Module]


# endregion
# region Layers with keys and values for each head


@dataclass(frozen=True)
class MultiHead:
    """A layer that [`fast.MultiHeadAttention`](fast/module.md) computes."""

    model: str
    layers: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    order: str | None = None
    pairing: str | None = None
    norm: Norm | None = None
    window: str | None = None
    soft_cap: str | None = None
    dropout: str = "attention_dropout"
    heads: str = "config.num_attention_heads"
    # The submodule with the configuration and the scale; by default the layer itself.
    inner: str = ""
    # A flag of the layer that means attention to another sequence.
    cross: str | None = None

    def build(self, module: Any) -> nn.Module:
        """Our module with the options of `module`; its values are not initialized."""
        if self.cross and getattr(module, self.cross, False):
            raise ValueError(
                f"`module` is cross-attention (`{self.cross}`), which is stored in "
                f"another way; load its weights into `fast.MultiHeadAttention`"
            )
        views = self.parameters(module)
        inner = module.get_submodule(self.inner)
        check_removed(module, inner)
        weight = views["query.linear.weight"]
        assert weight is not None
        heads = attrgetter(self.heads)(module)
        d_model, d_k = weight.shape[-1], rows_of(weight) // heads
        window = attrgetter(self.window)(module) if self.window else None
        if window and not inner.is_causal:
            raise ValueError(
                "`module` attends to both sides of its window, and a window of "
                "Transformers then counts one key more; set "
                "`use_bidirectional_attention=False`"
            )
        scores = fast.Scores(
            scale=scale_of(inner, d_k),
            soft_cap=attrgetter(self.soft_cap)(module) if self.soft_cap else None,
            bias=bucket_bias(module),
            sinks=hasattr(module, "sinks"),
        )
        return fast.MultiHeadAttention(
            heads,
            d_model,
            dropout_of(attrgetter(self.dropout)(module)),
            views["query.linear.bias"] is not None,
            kv_heads=rows_of(views["key.linear.weight"]) // d_k,
            widths=fast.Widths(d_k),
            project=self.projection(module),
            rotary=rotary_of(module, self.pairing, d_k) if self.pairing else None,
            window=window,
            scores=scores,
        )

    def projection(self, module: Any) -> Callable[..., nn.Module]:
        """What builds the projections of queries and keys, with a norm if it has one.

        The norm is optional in some models.
        """
        norm = self.norm
        if norm is None or not hasattr(module, norm.names[0]):
            return mha.PrepareForMultiHeadAttention
        eps = eps_of(getattr(module, norm.names[0]))

        def project(d_model: int, heads: int, d_k: int, bias: bool) -> nn.Module:
            layer = NormalizedProjection(d_model, heads, d_k, bias, over=norm.over)
            layer.norm = norm.make(heads, d_k, eps)
            return layer

        return project

    def parameters(self, module: Any) -> Views:
        """For each of our parameters, the view of theirs that holds its numbers."""
        views: Views = {}
        names = ("query.linear", "key.linear", "value.linear", "output")
        for parameter in ("weight", "bias"):
            parts = [rows_of_layer(module, name, parameter) for name in self.layers]
            if self.order:
                parts[:1] = self.split(parts[0], module.config.num_attention_heads)
            for name, part in zip(names, parts, strict=True):
                views[f"{name}.{parameter}"] = part
        if self.norm and hasattr(module, self.norm.names[0]):
            for ours, theirs in zip(("query", "key"), self.norm.names, strict=True):
                for name, value in getattr(module, theirs).named_parameters():
                    views[f"{ours}.norm.{name}"] = value
        if hasattr(module, "sinks"):
            views["sinks"] = parameter_of(module, "sinks")
        if getattr(module, "has_relative_attention_bias", False):
            name = "relative_attention_bias.weight"
            views["score_bias.weight"] = parameter_of(module, name)
        return views

    def split(self, rows: Tensor | None, heads: int) -> list[Tensor | None]:
        """The rows of queries, keys and values in a fused projection, as views."""
        if rows is None or self.order is None:
            return [None, None, None]
        axes = self.order.split()
        sizes = [{"3": 3, "heads": heads, "d_k": -1}[axis] for axis in axes]
        split: Any = rows.unflatten(0, sizes)  # type: ignore[no-untyped-call]
        return [*split.unbind(axes.index("3"))]


def bucket_bias(module: Any) -> BucketBias | None:
    """The position table of a T5 layer, if it has one of its own."""
    if not getattr(module, "has_relative_attention_bias", False):
        return None
    table = module.relative_attention_bias
    return BucketBias(
        table.num_embeddings,
        table.embedding_dim,
        max_distance=module.relative_attention_max_distance,
        bidirectional=not module.is_decoder,
    )


def shares_table(module: Any, name: str = "") -> bool:
    """Whether a T5 layer uses the position table of the first layer of its stack.

    Cross-attention, the only kind in a decoder that is not causal, uses none. Before
    Transformers 5.15, only the name of a layer in its model says what it is.
    """
    has_table = getattr(module, "has_relative_attention_bias", True)
    is_causal = getattr(module, "is_causal", not name.endswith("EncDecAttention"))
    return not has_table and bool(is_causal or not module.is_decoder)


# endregion
# region Layers with a latent


@dataclass(frozen=True)
class Latent:
    """A layer that [`LatentAttention`](variants/latent.md) computes."""

    model: str
    pairing = "neighbors"

    def build(self, module: Any) -> nn.Module:
        """Our module with the options of `module`; its values are not initialized."""
        if not getattr(module.config, "rope_interleave", True):
            raise ValueError(
                "`module` has `rope_interleave=False`, but `LatentAttention` pairs "
                "neighbors; permute the rows with `variants.rotary.convert_pairing`"
            )
        angles = rotary_of(module, self.pairing, module.qk_rope_head_dim)
        if angles.attention_factor != 1:
            raise ValueError(
                f"`module` multiplies rotated components by "
                f"{angles.attention_factor:.4g}, which `LatentAttention` cannot; in "
                f"its rotary settings, `mscale` and `mscale_all_dim` must be equal"
            )
        ours = LatentAttention(
            module.num_heads,
            module.config.hidden_size,
            dropout_of(module.attention_dropout),
            rows_of_layer(module, "o_proj", "bias") is not None,
            kv_rank=module.kv_lora_rank,
            rotary_dim=module.qk_rope_head_dim,
            query_rank=module.q_lora_rank,
            d_k=module.qk_nope_head_dim,
            d_v=module.v_head_dim,
            frequencies=torch.tensor(angles.frequencies, **rotary.FLOAT64),
        )
        ours.scale = float(module.scaling)
        ours.latent_norm.eps = eps_of(module.kv_a_layernorm)
        if module.q_lora_rank is not None:
            ours.query_latent[1].eps = eps_of(module.q_a_layernorm)  # type: ignore[index]
        return ours

    def parameters(self, module: Any) -> Views:
        """For each of our parameters, the view of theirs that holds its numbers."""
        views: Views = {
            "latent_norm.weight": parameter_of(module, "kv_a_layernorm.weight"),
            "output.weight": rows_of_layer(module, "o_proj", "weight"),
            "output.bias": rows_of_layer(module, "o_proj", "bias"),
        }
        widths = [module.kv_lora_rank, module.qk_rope_head_dim]
        for parameter in ("weight", "bias"):
            down: Any = rows_of_layer(module, "kv_a_proj_with_mqa", parameter)
            parts = (None, None) if down is None else down.split(widths)
            views[f"latent.{parameter}"] = parts[0]
            views[f"rotary_key.linear.{parameter}"] = parts[1]
        up: Any = rows_of_layer(module, "kv_b_proj", "weight")
        widths = [module.qk_nope_head_dim, module.v_head_dim]
        key, value = up.unflatten(0, (module.num_heads, -1)).split(widths, dim=1)
        views |= {"key.linear.weight": key, "value.linear.weight": value}
        query = "q_proj"
        if module.q_lora_rank is not None:
            query = "q_b_proj"
            for parameter in ("weight", "bias"):
                down = rows_of_layer(module, "q_a_proj", parameter)
                views[f"query_latent.0.{parameter}"] = down
            norm = parameter_of(module, "q_a_layernorm.weight")
            views["query_latent.1.weight"] = norm
        views["query.linear.weight"] = rows_of_layer(module, query, "weight")
        return views


# endregion
# region Options of a layer


def rows_of(weight: Tensor | None) -> int:
    """The number of rows of a projection, whose heads may be an axis."""
    return 0 if weight is None else weight.numel() // weight.shape[-1]


def rows_of_layer(module: Any, name: str, parameter: str) -> Tensor | None:
    """The weight `[d_out, d_in]` of a linear layer, or its bias.

    `Conv1D`, of GPT-2, computes `x @ weight`: it stores the transpose.
    """
    layer = module.get_submodule(name)
    kind = type(layer).__name__
    if type(layer) is not nn.Linear and kind != "Conv1D":
        raise TypeError(
            f"`{name}` of `module` is a {type(layer).__module__}.{kind}, not "
            f"`nn.Linear`; load the model without quantization, and merge adapters "
            f"into its weights"
        )
    values = parameter_of(module, f"{name}.{parameter}")
    if values is not None and kind == "Conv1D" and parameter == "weight":
        return values.T
    return values


def parameter_of(module: Any, name: str) -> Tensor | None:
    """The parameter of this name, or None.

    Pruning and weight norm of `torch.nn.utils` put a tensor in its place, which each
    forward pass computes anew from others: it may be stale, and a copy into it is lost.
    """
    values: Tensor | None = attrgetter(name)(module)
    if values is not None and not isinstance(values, nn.Parameter):
        raise TypeError(
            f"`{name}` of `module` is not a parameter, but computed from others; first "
            f"make it one, such as by `torch.nn.utils.prune.remove`"
        )
    return values


def dropout_of(dropout: Any) -> float:
    """The probability of dropout, which some layers store in a module.

    >>> dropout_of(nn.Dropout(0.3)), dropout_of(0)
    (0.3, 0.0)
    """
    return float(getattr(dropout, "p", dropout))


def eps_of(norm: Any) -> float:
    """The epsilon of a norm, which has one of two names."""
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def check_removed(module: Any, inner: Any) -> None:
    """Refuse options that Transformers 5 has removed."""
    if getattr(module, "pruned_heads", None):
        raise ValueError(
            "`module` has pruned heads; load its weights into "
            "`fast.MultiHeadAttention` with the heads that are left"
        )
    kind = getattr(inner, "position_embedding_type", "absolute")
    if kind != "absolute":
        raise ValueError(
            f"`position_embedding_type` (={kind!r}) of `module` adds a table to the "
            f"scores, which `fast.MultiHeadAttention` lacks; see `variants.relative`"
        )


def scale_of(module: Any, d_k: int) -> float:
    """The factor of the dot products in a layer.

    In Transformers 4, GPT-2 has two flags instead of a number, and BERT has neither.
    T5 does not scale its scores, but says so only from Transformers 5.15 on.

    >>> layer = nn.Module()
    >>> layer.layer_idx, layer.scale_attn_by_inverse_layer_idx = 4, True
    >>> scale_of(layer, d_k=4)
    0.1
    """
    if hasattr(module, "scaling"):
        return float(module.scaling)
    is_t5 = hasattr(module, "has_relative_attention_bias")
    is_scaled = getattr(module, "scale_attn_weights", not is_t5)
    scale = d_k**-0.5 if is_scaled else 1.0
    by_layer = getattr(module, "scale_attn_by_inverse_layer_idx", False)
    return scale / (module.layer_idx + 1) if by_layer else scale


def rope_options(module: Any) -> dict[str, Any]:
    """The rotary settings of a layer, from its configuration.

    Some models have others in layers with a window.
    """
    config = module.config
    if not version("transformers").startswith("4."):
        options = config.rope_parameters
        return dict(options.get(getattr(module, "layer_type", None), options))
    # Transformers 4 reads attributes, and ignores `rope_parameters` of a newer file.
    if hasattr(config, "rope_local_base_freq") and module.is_sliding:
        return {"rope_theta": config.rope_local_base_freq}
    scaling = getattr(config, "rope_scaling", None) or {}
    return {
        "rope_theta": config.rope_theta,
        "rope_type": scaling.get("type", "default"),
        **scaling,
    }


def rotary_of(module: Any, pairing: str, width: int) -> fast.Rotary:
    """The rotary positions of a layer."""
    options = rope_options(module)
    kind = options.get("rope_type", "default")
    if kind not in SCALINGS:
        known = ", ".join(map(repr, SCALINGS))
        raise ValueError(
            f"`rope_type` (={kind!r}) of `module` is unknown; there are {known}; pass "
            f"frequencies of your own to `fast.Rotary`"
        )
    # GPT-NeoX and Phi rotate a part of a head. Other layers rotate all of it, whatever
    # `partial_rotary_factor` says.
    rotary_dim = getattr(module, "rotary_ndims", width)
    frequencies = rotary.rotary_frequencies(
        rotary_dim, base=float(options["rope_theta"])
    )
    longest = module.config.max_position_embeddings
    defaults = {
        "max_position_embeddings": longest,
        "original_max_position_embeddings": longest,
    }
    frequencies, factor = SCALINGS[kind](
        frequencies, defaults | {k: v for k, v in options.items() if v is not None}
    )
    return fast.Rotary(frequencies, pairing=pairing, attention_factor=factor)


def yarn(frequencies: Tensor, options: dict[str, Any]) -> tuple[Tensor, float]:
    """YaRN's frequencies and its factor of the rotated components.

    DeepSeek moves this factor, or a part of it, into the scale of the scores. Without
    a `factor`, it is that by which the context is longer than the original one.
    """
    original = options["original_max_position_embeddings"]
    factor = float(options.get("factor", options["max_position_embeddings"] / original))
    scaled = rotary.yarn_scaling(
        frequencies,
        factor,
        original,
        beta_fast=options.get("beta_fast", 32),
        beta_slow=options.get("beta_slow", 1),
        truncate=options.get("truncate", True),
    )
    if "attention_factor" in options:
        return scaled, float(options["attention_factor"])
    if options.get("mscale") and options.get("mscale_all_dim"):
        whole = rotary.yarn_attention_factor(factor, float(options["mscale"]))
        in_scale = rotary.yarn_attention_factor(
            factor, float(options["mscale_all_dim"])
        )
        return scaled, whole / in_scale
    return scaled, rotary.yarn_attention_factor(factor)


def llama3(frequencies: Tensor, options: dict[str, Any]) -> tuple[Tensor, float]:
    """The frequencies of Llama 3.1."""
    scaled = rotary.llama3_scaling(
        frequencies,
        float(options["factor"]),
        options["original_max_position_embeddings"],
        low=options["low_freq_factor"],
        high=options["high_freq_factor"],
    )
    return scaled, 1.0


# Scaled frequencies and the factor of rotated components, by `rope_type`.
Scaling = Callable[[Tensor, dict[str, Any]], tuple[Tensor, float]]
SCALINGS: dict[str, Scaling] = {
    "default": lambda frequencies, _: (frequencies, 1.0),
    "linear": lambda frequencies, options: (
        rotary.linear_scaling(frequencies, float(options["factor"])),
        1.0,
    ),
    "llama3": llama3,
    "yarn": yarn,
}


# endregion

HEAD_RMS = Norm(("q_norm", "k_norm"), "head", lambda _, d_k, eps: nn.RMSNorm(d_k, eps))

# A new model is a new row here, under the name of its class, and a tiny model in the
# tests.
ARCHITECTURES: dict[str, MultiHead | Latent] = {
    "GPT2Attention": MultiHead(
        "GPT-2",
        ("c_attn", "c_proj"),
        order="3 heads d_k",
        dropout="attn_dropout",
        cross="is_cross_attention",
    ),
    "GPTNeoXAttention": MultiHead(
        "GPT-NeoX",
        ("query_key_value", "dense"),
        order="heads 3 d_k",
        pairing="halves",
    ),
    "BertAttention": MultiHead(
        "BERT",
        ("self.query", "self.key", "self.value", "output.dense"),
        dropout="self.dropout",
        heads="self.num_attention_heads",
        inner="self",
        cross="is_cross_attention",
    ),
    "T5Attention": MultiHead(
        "T5", ("q", "k", "v", "o"), dropout="dropout", heads="n_heads"
    ),
    "LlamaAttention": MultiHead("Llama", pairing="halves"),
    "MistralAttention": MultiHead(
        "Mistral", pairing="halves", window="config.sliding_window"
    ),
    "Qwen2Attention": MultiHead("Qwen 2", pairing="halves", window="sliding_window"),
    "Qwen3Attention": MultiHead(
        "Qwen 3", pairing="halves", norm=HEAD_RMS, window="sliding_window"
    ),
    "PhiAttention": MultiHead(
        "Phi",
        ("q_proj", "k_proj", "v_proj", "dense"),
        pairing="halves",
        norm=Norm(
            ("q_layernorm", "k_layernorm"),
            "head",
            lambda _, d_k, eps: nn.LayerNorm(d_k, eps),
        ),
    ),
    "Olmo2Attention": MultiHead(
        "OLMo 2",
        pairing="halves",
        norm=Norm(
            ("q_norm", "k_norm"),
            "all",
            lambda heads, d_k, eps: nn.RMSNorm(heads * d_k, eps),
        ),
    ),
    "CohereAttention": MultiHead(
        "Cohere",
        pairing="neighbors",
        norm=Norm(("q_norm", "k_norm"), "head", HeadLayerNorm),
    ),
    "Starcoder2Attention": MultiHead(
        "StarCoder 2", pairing="halves", window="config.sliding_window"
    ),
    "Gemma2Attention": MultiHead(
        "Gemma 2",
        pairing="halves",
        window="sliding_window",
        soft_cap="attn_logit_softcapping",
    ),
    "Gemma3Attention": MultiHead(
        "Gemma 3",
        pairing="halves",
        norm=Norm(
            ("q_norm", "k_norm"), "head", lambda _, d_k, eps: OffsetRMSNorm(d_k, eps)
        ),
        window="sliding_window",
    ),
    "DeepseekV2Attention": Latent("DeepSeek-V2"),
    "DeepseekV3Attention": Latent("DeepSeek-V3"),
    "GptOssAttention": MultiHead("gpt-oss", pairing="halves", window="sliding_window"),
}
