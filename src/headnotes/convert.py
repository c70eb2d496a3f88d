r"""# Converting weights

This module copies the weights of one attention implementation into another, such as
from `nn.MultiheadAttention` to the core. Implementations differ in the names and the
layout of their parameters, but hardly in what they compute:

>>> ours = to(nn.MultiheadAttention(512, 8), "core")
>>> theirs = to(ours, "torch", batch_first=True)

The common form is `Weights`: `query`, `key`, `value` and `output`, each with a weight
and an optional bias. For each implementation, a `Format` defines *where* the rows of
these four are in its parameters. `extract` concatenates the rows, `load` copies them
into place. Nothing is added, multiplied or rounded, so converting there and back gives
the same bits.

Implementations differ in their biases. A missing bias becomes zeros if the target must
have one. An existing bias is kept, even if it is zero, because training may change it.
A bias that is not zero is never dropped: `to` raises an error instead.

**Masks and layouts are not converted.** A module built as `"causal"`, `"causal_head"`
or `"wrapper"` is causal, whatever it was converted from; `"v1"` and `"v2"` attend to
all positions; the others take a mask with each call. `"core"` and `"fast"` are sequence
first, and so is `"torch"` unless `batch_first` is set; the others are batch first, and
`"v1"` and `"v2"` take one sequence without a batch axis.

**Models of Hugging Face Transformers**, such as Llama, have options that the formats
lack. `from_transformers` converts their attention layers to `fast.MultiHeadAttention`
with these options, and `to_transformers` converts back. Transformers 4.57 is required,
or 5.5 and newer. [Pretrained models](../pretrained.md) shows both:

>>> from transformers import GPT2Config, GPT2Model
>>> gpt2 = GPT2Model(GPT2Config(n_embd=60, n_head=5, n_layer=1)).eval()
>>> layer = gpt2.h[0].attn
>>> ours = from_transformers(layer)
>>> x = torch.randn(3, 7, 60)  # batch first
>>> y = x.transpose(0, 1)
>>> output = ours(query=y, key=y, value=y, is_causal=True).transpose(0, 1)
>>> torch.allclose(output, layer(x)[0], atol=1e-6)
True

Source: the implementations, each named on the page of its module; for fused
projections timm's `Attention`, GPT-2 and GPT-NeoX; for Transformers its modeling files.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from headnotes import fast, mha
from headnotes.architectures import (
    ARCHITECTURES,
    SINCE,
    Latent,
    MultiHead,
    OffsetRMSNorm,
    shares_table,
)
from headnotes.checks import check_version
from headnotes.implementations import batch_first, causal, stages, valid_lens


class Projection(NamedTuple):
    """One linear map: `weight` is `[d_out, d_in]`, `bias` is `[d_out]` or missing."""

    weight: Tensor
    bias: Tensor | None = None

    def bias_or_zeros(self) -> Tensor:
        """The bias, or zeros if it is missing.

        >>> Projection(torch.eye(2)).bias_or_zeros()
        tensor([0., 0.])
        """
        if self.bias is not None:
            return self.bias
        d_out = len(self.weight)
        return self.weight.new_zeros(d_out)  # [d_out]


class Weights(NamedTuple):
    r"""All parameters of an attention layer, in the layout of `nn.Linear`.

    Head $h$ owns rows $h\,d_k$ to $(h+1)\,d_k - 1$ of `query`, `key` and `value`, and
    the same *columns* of `output`.
    """

    heads: int
    query: Projection
    key: Projection
    value: Projection
    output: Projection


FUSED_ORDERS = ("3 heads d_k", "heads 3 d_k")


class Fused(nn.Module):
    r"""Query, key and value in one linear layer: a module to load checkpoints into.

    Many models have one fused weight, `[3 * d_model, d_model]`, and split its output.
    `order` is the order of its rows, which no shape reveals: `"3 heads d_k"` has the
    queries of all heads first (torch, timm, GPT-2), `"heads 3 d_k"` all rows of head 0
    (GPT-NeoX, BLOOM). Load `qkv` and `output`, then convert; this module has no
    `forward`.

    Raises `ValueError` for another order, or where `heads` does not divide `d_model`.
    Source: timm, `Attention.qkv`; GPT-NeoX, `query_key_value`.

    >>> fused = Fused(10, heads=2, order="heads 3 d_k")
    >>> head_1 = extract(fused).query.weight[5:]
    >>> head_1.equal(fused.qkv.weight[15:20])
    True

    The layers of GPT-2 in Transformers are `Conv1D`, which stores the transpose of what
    `nn.Linear` does. Transpose both weights: `c_proj` is square, so that without `.T`
    it loads without an error, and gives wrong outputs.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(n_embd=60, n_head=5, n_layer=1)).eval()
    >>> gpt2 = model.h[0].attn
    >>> fused = Fused(60, heads=5, order="3 heads d_k")
    >>> fused.load_state_dict({
    ...     "qkv.weight": gpt2.c_attn.weight.T,
    ...     "qkv.bias": gpt2.c_attn.bias,
    ...     "output.weight": gpt2.c_proj.weight.T,
    ...     "output.bias": gpt2.c_proj.bias,
    ... })
    <All keys matched successfully>
    >>> ours = to(fused, "fast")
    >>> x = torch.randn(3, 7, 60)  # batch first
    >>> y = x.transpose(0, 1)
    >>> output = ours(query=y, key=y, value=y, is_causal=True).transpose(0, 1)
    >>> torch.allclose(output, gpt2(x)[0], atol=1e-6)
    True
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        order: str,
        qkv_bias: bool = True,
        output_bias: bool = True,
    ) -> None:
        super().__init__()
        mha.check_settings(heads, d_model, dropout_prob=0)
        if not isinstance(order, str) or order not in FUSED_ORDERS:
            known = " or ".join(map(repr, FUSED_ORDERS))
            raise ValueError(f"`order` (={order!r}) must be {known}")
        self.heads = heads
        self.order = order
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=qkv_bias)
        self.output = nn.Linear(d_model, d_model, bias=output_bias)


PARTS = ("query", "key", "value", "output")

# Attributes that hold the number of heads. In the wrapper it is a list of modules.
HEADS = ("heads", "num_heads", "n_heads")

# For each part, the blocks of rows that it consists of, as views into a module. A
# format returns those of the weights or of the biases, for the parameter name "weight"
# or "bias"; a bias that does not exist is None.
Blocks = list[list[Tensor | None]]


def blocks_by_name(*names: str) -> Callable[[Any, str], Blocks]:
    """The blocks of a module with one linear layer for each part."""

    def blocks(module: Any, parameter: str) -> Blocks:
        return [[getattr(linear_of(module, name), parameter)] for name in names]

    return blocks


def linear_of(module: nn.Module, name: str) -> nn.Linear:
    """The linear layer of this name; another module may compute anything.

    >>> core = mha.MultiHeadAttention(2, 6)
    >>> core.output = nn.Identity()
    >>> try:
    ...     linear_of(core, "output")
    ... except TypeError as error:
    ...     print(error)  # doctest: +NORMALIZE_WHITESPACE
    `output` of `module` is a torch.nn.modules.linear.Identity, not `nn.Linear`; merge
    adapters into its weights, or set them to the identity
    """
    layer = module.get_submodule(name)
    if not isinstance(layer, nn.Linear):
        seen = f"{type(layer).__module__}.{type(layer).__qualname__}"
        raise TypeError(
            f"`{name}` of `module` is a {seen}, not `nn.Linear`; merge adapters into "
            f"its weights, or set them to the identity"
        )
    return layer


STAGES_LAYERS = ("W_query", "W_key", "W_value")
VALID_LENS_LAYERS = ("W_q", "W_k", "W_v", "W_o")


def blocks_of_v1(module: Any, parameter: str) -> Blocks:
    """Matrices `[d_in, d_out]`, multiplied from the right; `.T` gives views."""
    if parameter == "bias":
        return [[None], [None], [None]]
    return [[getattr(module, name).T] for name in STAGES_LAYERS]


def blocks_of_wrapper(module: Any, parameter: str) -> Blocks:
    """One module for each head, whose rows are one block of each part."""
    return [
        [getattr(linear_of(head, name), parameter) for head in module.heads]
        for name in STAGES_LAYERS
    ]


def blocks_of_torch(module: Any, parameter: str) -> Blocks:
    """Three matrices in one, unless keys or values have another width."""
    if module.bias_k is not None or module.add_zero_attn:
        extra = "`add_bias_kv` or `add_zero_attn`, a key that the others do not have"
        raise ValueError(f"`module` was built with {extra}; it cannot be converted")
    packed = getattr(module, f"in_proj_{parameter}")
    if packed is None:
        parts = [getattr(module, f"{name}_proj_{parameter}", None) for name in "qkv"]
    else:
        parts = list(packed.chunk(3))
    output = [getattr(linear_of(module, "out_proj"), parameter)]
    return [*([part] for part in parts), output]


def blocks_of_fused(module: Any, parameter: str) -> Blocks:
    """Blocks of `d_k` rows, one for each head, in the order of the module."""
    output = [getattr(linear_of(module, "output"), parameter)]
    rows = getattr(linear_of(module, "qkv"), parameter)  # [3 * heads * d_k, ...]
    if rows is None:
        return [[], [], [], output]
    axes = module.order.split()
    heads = module.heads
    sizes = [{"3": 3, "heads": heads, "d_k": -1}[axis] for axis in axes]
    three = axes.index("3")
    split = rows.unflatten(0, sizes).movedim(three, 0)  # [3, heads, d_k, ...]
    return [*map(list, split), output]


class Format(NamedTuple):
    """Where an implementation stores its weights, and which it supports."""

    module_type: type[nn.Module]
    blocks: Callable[[Any, str], Blocks]
    # For each part, the name of the constructor's flag for its bias, or whether it
    # always has one. With three entries, there is no output projection.
    biases: tuple[str | bool, ...]
    # The parts that must have the same input width.
    same_width: tuple[str, ...] = PARTS[:3]


QKV_BIAS = ("qkv_bias", "qkv_bias", "qkv_bias")
CORE_LAYERS = ("query.linear", "key.linear", "value.linear", "output")

# The formats, by the names that `to` accepts.
FORMATS = {
    "core": Format(
        mha.MultiHeadAttention,
        blocks_by_name(*CORE_LAYERS),
        biases=("bias", "bias", True, True),
        same_width=PARTS,
    ),
    "fast": Format(
        fast.MultiHeadAttention,
        blocks_by_name(*CORE_LAYERS),
        biases=("bias", "bias", True, True),
        same_width=PARTS,
    ),
    "causal": Format(
        causal.MultiHeadAttention,
        blocks_by_name(*STAGES_LAYERS, "out_proj"),
        biases=(*QKV_BIAS, True),
    ),
    "valid_lens": Format(
        valid_lens.MultiHeadAttention,
        blocks_by_name(*VALID_LENS_LAYERS),
        biases=("bias", "bias", "bias", "bias"),
        same_width=(),
    ),
    "batch_first": Format(
        batch_first.MultiHeadAttention,
        blocks_by_name("Wq", "Wk", "Wv", "Wo"),
        biases=(True, True, True, True),
        same_width=PARTS,
    ),
    "v1": Format(stages.SelfAttention_v1, blocks_of_v1, biases=(False, False, False)),
    "v2": Format(
        stages.SelfAttention_v2, blocks_by_name(*STAGES_LAYERS), biases=QKV_BIAS
    ),
    "causal_head": Format(
        stages.CausalAttention, blocks_by_name(*STAGES_LAYERS), biases=QKV_BIAS
    ),
    "wrapper": Format(
        stages.MultiHeadAttentionWrapper, blocks_of_wrapper, biases=QKV_BIAS
    ),
    "torch": Format(
        nn.MultiheadAttention,
        blocks_of_torch,
        biases=("bias", "bias", "bias", "bias"),
        same_width=("query", "output"),
    ),
    "fused": Format(
        Fused,
        blocks_of_fused,
        biases=(*QKV_BIAS, "output_bias"),
        same_width=PARTS,
    ),
}


def existing_blocks(
    form: Format, module: nn.Module, parameter: str
) -> list[list[Tensor]]:
    """The blocks of each part, without biases that do not exist."""
    return [
        [block for block in part if block is not None]
        for part in form.blocks(module, parameter)
    ]


@torch.no_grad()
def extract(module: nn.Module) -> Weights:
    r"""The weights of `module`, copied; a missing output projection is the identity.

    Raises `TypeError` for a module that no format describes, a subclass of one, or one
    with another module in place of a linear layer, which may compute anything;
    `ValueError` for one whose weights are not initialized, or of mixed dtypes.

    >>> weights = extract(
    ...     stages.MultiHeadAttentionWrapper(5, 3, 7, 0.0, 2)
    ... )
    >>> weights.query.weight.shape, weights.query.bias
    (torch.Size([6, 5]), None)
    >>> weights.output.weight.equal(torch.eye(6))
    True
    """
    module = getattr(module, "_orig_mod", module)  # inside of `torch.compile`
    form = format_of(module)
    if any(is_lazy(parameter) for parameter in module.parameters()):
        raise ValueError("`module` is lazy; first call it, or load a checkpoint")
    check_mixed(module)
    weights = existing_blocks(form, module, "weight")
    biases = existing_blocks(form, module, "bias")
    parts = [
        Projection(torch.cat(weight), torch.cat(bias) if bias else None)
        for weight, bias in zip(weights, biases, strict=True)
    ]
    if len(parts) == 3:
        d_out = len(parts[0].weight)
        identity = parts[0].weight.new_ones(d_out).diag()  # [d_out, d_out]
        parts.append(Projection(identity))
    return Weights(heads_of(module), *parts)


def check_mixed(module: nn.Module) -> None:
    """Refuse a module whose parameters differ in dtype or device."""
    if len({(p.dtype, p.device) for p in module.parameters()}) > 1:
        raise ValueError("`module` mixes dtypes or devices; first use `module.to(...)`")


def format_of(module: nn.Module) -> Format:
    """The format whose type is exactly that of `module`."""
    for form in FORMATS.values():
        if form.module_type is type(module):
            return form
    seen = f"{type(module).__module__}.{type(module).__qualname__}"
    raise TypeError(
        f"`module` is a {seen}, which is unknown here; load its weights into one of "
        f"{', '.join(FORMATS)}"
    )


def heads_of(module: Any) -> int:
    """The number of heads; 1 for a module without such an attribute.

    >>> heads_of(stages.SelfAttention_v2(3, 2))
    1
    """
    for name in HEADS:
        if hasattr(module, name):
            heads = getattr(module, name)
            return len(heads) if isinstance(heads, nn.ModuleList) else int(heads)
    return 1


@torch.no_grad()
def to(module: nn.Module, target: str, **settings: Any) -> nn.Module:
    r"""Convert `module` to the format `target`: a new module with the same weights.

    `target` is a name in `FORMATS`, above. `settings` are arguments of its constructor
    other than sizes: dropout, `context_length`, flags for biases, `batch_first`,
    `order`. Settings that are not given are copied from `module`, and so are dtype,
    device and training mode. The modules share no memory, and the state of the random
    number generator does not change.

    Raises `ValueError` where the target cannot hold the weights, `TypeError` for a
    setting that it does not have.

    >>> ours = causal.MultiHeadAttention(6, 6, 5, 0.0, 2)
    >>> theirs = to(ours, "torch", batch_first=True)
    >>> x = torch.randn(3, 5, 6)
    >>> y, _ = theirs(x, x, x, attn_mask=ours.mask)
    >>> torch.allclose(y, ours(x), atol=1e-6)
    True
    """
    if not isinstance(target, str) or target not in FORMATS:
        known = ", ".join(FORMATS)
        raise ValueError(f"`target` (={target!r}) is unknown; there are {known}")
    form = FORMATS[target]
    weights = extract(module)
    arguments = {
        **sizes_for(target, weights),
        **settings_for(target, weights, module, settings),
    }
    check_target(target, weights, arguments)
    # Built by its constructor, so that buffers have their values. The random numbers
    # of the initialization are overwritten below, and the generator is restored.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        built = form.module_type(**arguments)
        if target == "valid_lens":  # lazy layers infer their widths from an input
            for name, part in zip(VALID_LENS_LAYERS, weights[1:], strict=True):
                built.get_submodule(name)(torch.zeros(1, part.weight.shape[1]))
    built.to(weights.query.weight).train(module.training)
    load(form, built, weights)
    return built


def load(form: Format, module: nn.Module, weights: Weights) -> None:
    """Copy the rows of `weights` into the blocks of `module`."""
    parts = [weights.query, weights.key, weights.value, weights.output]
    for parameter in ("weight", "bias"):
        # Without an output projection, there are three lists of blocks for four parts.
        targets = existing_blocks(form, module, parameter)
        for part, blocks in zip(parts, targets, strict=False):
            rows = part.weight if parameter == "weight" else part.bias_or_zeros()
            if blocks:
                pieces = rows.chunk(len(blocks))
                for block, piece in zip(blocks, pieces, strict=True):
                    block.copy_(piece)


def parameters_of(target: str) -> set[str]:
    """The names of the arguments of the target's constructor.

    >>> sorted(parameters_of("batch_first"))
    ['d_model', 'dropout', 'n_heads']
    """
    return set(inspect.signature(FORMATS[target].module_type).parameters)


def sizes_for(target: str, weights: Weights) -> dict[str, int]:
    """The sizes of a module, by the argument names of the target's constructor.

    >>> sizes_for("v2", extract(stages.SelfAttention_v1(3, 2)))
    {'d_in': 3, 'd_out': 2}
    """
    heads, *parts = weights
    q_width, k_width, v_width, d_model = (part.weight.shape[1] for part in parts)
    # In the wrapper, `d_out` is the width of one head, not of all.
    d_out = d_model // heads if target == "wrapper" else d_model
    sizes = {
        "d_in": q_width,
        "kdim": k_width,
        "vdim": v_width,
        "heads": heads,
        "num_heads": heads,
        "n_heads": heads,
        "d_out": d_out,
        "d_model": d_model,
        "num_hiddens": d_model,
        "embed_dim": d_model,
    }
    expected = parameters_of(target)
    return {name: size for name, size in sizes.items() if name in expected}


def settings_for(
    target: str, weights: Weights, module: nn.Module, given: dict[str, Any]
) -> dict[str, Any]:
    """The given settings, and those of `module` for the others.

    >>> module = causal.MultiHeadAttention(6, 6, 5, 0.1, 2)
    >>> settings_for("v2", extract(module), module, {})
    {'qkv_bias': False}
    """
    found: dict[str, Any] = {
        "dropout": 0.0,
        "batch_first": False,
        "context_length": None,
        "order": None,
    }
    for child in module.modules():
        for name in found:
            if name in vars(child):
                found[name] = vars(child)[name]
        if isinstance(child, nn.Dropout):
            found["dropout"] = child.p
    found["dropout_prob"] = found["dropout"]
    # A flag is on if any part that it applies to has a bias.
    for part, flag in zip(weights[1:], FORMATS[target].biases, strict=False):
        if isinstance(flag, str):
            found[flag] = found.get(flag, False) or part.bias is not None

    expected = parameters_of(target)
    settings = {name: value for name, value in found.items() if name in expected}
    unknown = [f"`{name}`" for name in given if name not in settings]
    if unknown:
        known = ", ".join(settings) or "none"
        raise TypeError(
            f"{target!r} has no setting {', '.join(unknown)}; there are {known}"
        )
    settings |= given
    for name, value in settings.items():
        if value is None:
            raise ValueError(f"{target!r} needs `{name}=...`, as `module` has none")
    return settings


def check_target(target: str, weights: Weights, arguments: dict[str, Any]) -> None:
    """Refuse a target that would lose some of the weights."""
    heads, *parts = weights
    form = FORMATS[target]
    widths = [getattr(weights, part).weight.shape[1] for part in form.same_width]
    if len(set(widths)) > 1:
        raise ValueError(
            f"{target!r} has one width for {', '.join(form.same_width)}, which in "
            f"`module` are {', '.join(map(str, widths))} wide; each may differ in "
            f"'valid_lens'"
        )
    if heads > 1 and arguments.keys().isdisjoint(HEADS):
        raise ValueError(f"{target!r} is one head, but `module` has {heads}")
    rows = weights.output.weight
    identity = rows.new_ones(len(rows)).diag()
    has_output = len(form.biases) == 4
    if not has_output and (rows.is_meta or not rows.equal(identity)):
        raise ValueError(
            f"{target!r} has no output projection, but `module` has one, and it is not "
            f"the identity; 'causal' could hold it"
        )
    biases = form.biases if has_output else (*form.biases, False)
    for name, flag, (_, bias) in zip(PARTS, biases, parts, strict=True):
        has_bias = arguments[flag] if isinstance(flag, str) else flag
        if not has_bias and bias is not None and not bias.is_meta and bias.any():
            loses = f"`{flag}={has_bias}`" if isinstance(flag, str) else repr(target)
            raise ValueError(
                f"{loses} would lose the {name} bias of `module`, whose largest entry "
                f"is {bias.abs().max():.3g}; to drop it, first set it to zero"
            )


# region Models of Hugging Face Transformers


def from_transformers(module: nn.Module) -> Any:
    r"""Convert an attention layer of `transformers`, or all layers of a model.

    For a layer, the result is a new module of ours with the same weights:
    `fast.MultiHeadAttention` with the options of the model, or `LatentAttention` for
    DeepSeek. For a model, it is a dict of such modules by the names of its layers. The
    models are those of `architectures.ARCHITECTURES`. Dtype, device and training mode
    are those of `module`, and no memory is shared. Attention layers of other
    architectures in the same model, such as those of a vision encoder, are not in the
    dict, and a `UserWarning` names them.

    The new module is sequence first. It is not causal by itself: pass `is_causal=True`,
    or a mask, or use `decode`. Dropout after the output projection, residuals and
    layer norms are not part of it.

    Raises `TypeError` for a module that contains no known layer, or layers that are
    quantized or pruned, `ValueError` for an option that our modules lack, `ImportError`
    for another release of `transformers` than 4.57, or 5.5 and newer.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> sizes = {"hidden_size": 60, "num_attention_heads": 6, "head_dim": 10}
    >>> sizes |= {"num_hidden_layers": 2, "intermediate_size": 7, "vocab_size": 11}
    >>> llama = LlamaModel(LlamaConfig(**sizes, num_key_value_heads=2)).eval()
    >>> layers = from_transformers(llama)
    >>> list(layers)
    ['layers.0.self_attn', 'layers.1.self_attn']
    >>> ours = layers["layers.0.self_attn"]
    >>> ours.heads, ours.kv_heads, ours.rotary.pairing
    (6, 2, 'halves')
    >>> x = torch.randn(5, 3, 60)
    >>> y, cache = ours.decode(x, ours.cache(batch_size=3, capacity=5))
    >>> same = ours(query=x, key=x, value=x, is_causal=True)
    >>> torch.allclose(y, same, atol=1e-6)
    True
    """
    if architecture_of(module) is not None:
        return convert_layer(module)
    converted = {}
    table = None
    for name, layer in module.named_modules():
        if architecture_of(layer) is not None:
            # In T5, the first layer of a stack shares its position table.
            converted[name] = convert_layer(layer, name, table)
            table = getattr(converted[name], "score_bias", None) or table
    if not converted:
        seen = f"{type(module).__module__}.{type(module).__qualname__}"
        known = ", ".join(each.model for each in ARCHITECTURES.values())
        raise TypeError(
            f"`module` is a {seen}, and contains no attention layer of {known}; load "
            f"its weights into `fast.MultiHeadAttention`"
        )
    warn_of_others(module, [*converted])
    return converted


def warn_of_others(module: nn.Module, known: list[str]) -> None:
    """Name a layer of each class of attention that is unknown, and left out.

    What is part of a known layer, or has one as a part, is not left out.
    """
    found: dict[str, str] = {}
    for name, layer in module.named_modules():
        is_related = any(
            f"{each}.".startswith(f"{name}.") or f"{name}.".startswith(f"{each}.")
            for each in known
        )
        kind = type(layer)
        is_theirs = kind.__module__.startswith("transformers.models.")
        if name and is_theirs and "Attention" in kind.__name__ and not is_related:
            found.setdefault(kind.__name__, name)
    if found:
        named = ", ".join(f"{kind} (`{name}`)" for kind, name in found.items())
        message = (
            f"`module` has attention of other architectures, not converted: {named}"
        )
        warnings.warn(message, stacklevel=3)


@torch.no_grad()
def to_transformers(ours: Any, module: nn.Module) -> dict[str, Tensor]:
    r"""The weights of `ours` as a state dict of `module`, from which it was converted.

    `ours` and `module` are a pair as in `from_transformers`, two layers or a dict and a
    model. `module` is not modified: load the result with `load_state_dict`, and
    `strict=False` for a model, as it has attention layers only. Other entries of these
    layers are those of `module`. Bits are the same there and back.

    Raises `TypeError` for an unknown layer, or one that is pruned; `ValueError` if the
    layers differ in their parameters or in what these mean, or a bias that is not zero
    has no place in `module`.

    >>> from transformers import BertConfig, BertModel
    >>> sizes = {"hidden_size": 6, "num_attention_heads": 2, "num_hidden_layers": 1}
    >>> bert = BertModel(BertConfig(**sizes, intermediate_size=7, vocab_size=11))
    >>> layers = from_transformers(bert)
    >>> with torch.no_grad():
    ...     for parameter in layers["encoder.layer.0.attention"].parameters():
    ...         _ = parameter.add_(1)
    >>> state = to_transformers(layers, bert)
    >>> before = bert.state_dict()["encoder.layer.0.attention.self.key.weight"]
    >>> after = state["encoder.layer.0.attention.self.key.weight"]
    >>> torch.equal(after, before + 1)
    True
    >>> bert.load_state_dict(state, strict=False).unexpected_keys
    []
    """
    if isinstance(ours, dict):
        return {
            f"{name}.{key}": value
            for name, layer in ours.items()
            for key, value in to_transformers(layer, module.get_submodule(name)).items()
        }
    if architecture_of(module) is None:
        seen = f"{type(module).__module__}.{type(module).__qualname__}"
        raise TypeError(f"`module` is a {seen}, not a layer of `from_transformers`")
    # Before the copy, which PyTorch refuses for a pruned layer.
    check_meaning(ours, module)
    built = copy.deepcopy(module)
    for name, parameter, view in parameter_pairs(ours, built):
        if view is not None:
            view.copy_(parameter.view_as(view))
        elif not parameter.is_meta and parameter.any():
            raise ValueError(
                f"`module` would lose `{name}` of `ours`, whose largest entry is "
                f"{parameter.abs().max():.3g}; to drop it, first set it to zero"
            )
    return built.state_dict()


def architecture_of(module: nn.Module) -> MultiHead | Latent | None:
    """The architecture whose class is exactly that of `module`, if there is one."""
    known = type(module).__module__.startswith("transformers.models.")
    return ARCHITECTURES.get(type(module).__name__) if known else None


@torch.no_grad()
def convert_layer(
    module: nn.Module, name: str = "", table: nn.Module | None = None
) -> nn.Module:
    """Convert the layer of this name; `table` is that of an earlier layer of T5."""
    architecture = architecture_of(module)
    assert architecture is not None
    check_version(f"Converting {architecture.model}", "transformers", *SINCE)
    # On meta nothing is computed, and no random number is used; each parameter gets
    # its value below.
    with torch.device("meta"):
        built = architecture.build(module)
    # After `build`, which refuses quantized layers, some of which have no parameters.
    check_mixed(module)
    [(dtype, device)] = {(p.dtype, p.device) for p in module.parameters()}
    built = built.to(dtype).to_empty(device=device).train(module.training)
    for _, parameter, view in parameter_pairs(built, module):
        if view is None:
            parameter.zero_()
        else:
            parameter.copy_(view.reshape(parameter.shape))
    if shares_table(module, name):
        if table is None:
            raise ValueError(
                "`module` has no position table, and may use that of the first layer "
                "of its stack; convert the model, not the layer"
            )
        built.score_bias = table
    return built


def parameter_pairs(
    ours: nn.Module, module: nn.Module
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Each parameter of ours, and the view of theirs; None for a bias that they lack.

    A position table of T5 that belongs to another layer is left out.
    """
    architecture = architecture_of(module)
    assert architecture is not None
    views = {k: v for k, v in architecture.parameters(module).items() if v is not None}
    parameters = dict(ours.named_parameters())
    if shares_table(module):
        parameters.pop("score_bias.weight", None)
    for name in sorted({*parameters, *views}):
        check_pair(name, parameters.get(name), views.get(name))
        yield name, parameters[name], views.get(name)


def check_meaning(ours: nn.Module, module: nn.Module) -> None:
    """Refuse parameters of the same sizes whose numbers mean something else."""
    architecture = architecture_of(module)
    assert architecture is not None
    with torch.device("meta"):
        built = architecture.build(module)
    expected = meaning_of(built)
    for name, seen in meaning_of(ours).items():
        if seen is not None and seen != expected[name]:
            raise ValueError(
                f"{name} of `ours` is {seen!r}, and of `module` {expected[name]!r}; "
                f"{WAY_BACK}"
            )


def meaning_of(layer: Any) -> dict[str, Any]:
    """What the numbers of a layer of ours depend on, but not its sizes."""
    rotary = getattr(layer, "rotary", None)
    norm = getattr(getattr(layer, "query", None), "norm", None)
    return {
        "the rotary pairing": getattr(rotary, "pairing", None),
        "the number added to the norm's weights": int(isinstance(norm, OffsetRMSNorm)),
    }


WAY_BACK = "convert back to the layer that it was converted from"


def check_pair(name: str, parameter: Tensor | None, view: Tensor | None) -> None:
    """Refuse a parameter that only one side has, or of another size."""
    if parameter is None or (view is None and not name.endswith(".bias")):
        having, other = ("`ours`", "`module`")[:: 1 if view is None else -1]
        raise ValueError(f"{having} has `{name}`, and {other} has not; {WAY_BACK}")
    if view is not None and parameter.numel() != view.numel():
        raise ValueError(
            f"`{name}` has {parameter.numel()} numbers in `ours`, but {view.numel()} "
            f"in `module`; {WAY_BACK}"
        )


# endregion
