r"""# Structure of a module

What a module that is checked is made of: which submodules are its projections and which
are norms, how wide its layers are, how many attentions lie inside, and which designs,
such as sinks or decay, the names in its code tell of. A law asks here whether it
applies.

Source: the names used on the pages under *Other implementations*, in
[PyTorch](https://docs.pytorch.org/docs/stable/nn.html), in Hugging Face's transformers
and in the usual tutorials.
"""

import inspect
import itertools
import math
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from types import CodeType
from typing import Any

from torch import Tensor, nn

from attention_laws.names import (
    ARGUMENT_NAMES,
    ARGUMENT_VALUES,
    ATTENTION_PATTERN,
    CAUSAL_PATTERN,
)
from attention_laws.source import source_of, source_with_bases

CONFIG_ATTRIBUTES = ("config", "cfg", "args", "params", "hparams", "spec", "opt")
# Attributes for the number of batch items that a cache has room for.
BATCH_ATTRIBUTES = ("max_batch_size", "max_batch", "max_bsz", "max_bs")
# Attributes for the number of features that are rotated.
ROTARY_WIDTHS = ("rope_n_elem", "rotary_ndims", "rotary_dim", "rope_dim", "rot_dim")
# Names in code that computes a positional encoding.
ENCODING_PATTERN = re.compile(
    r"rope|rotary|rotat|^rot(_|$)|alibi|slope|relative|^rel(_|$)|_rel$|position"
    r"|pos_?e(mb|nc)|freqs"
    r"|(^|_)pos_[kqv](_|$)"
    r"|^(cos|sin|angles?|theta|bucket|distance|pos|inv_freq)$|bias_table|lambda_d|dist"
    r"|recency|^lags?$"
    # What fades from token to token tells how far each is.
    r"|(?<!weight_)decay|forget_?(gate|bias)|forgetting|retention|retnet"
    r"|^(cpb|rpb)(_|$)|^meshgrid$|^(row|col(umn)?|height|width|[hw])_?emb|^w?pe$",
    re.IGNORECASE,
)
# Positional encodings with laws of their own; others exclude them.
POSITION_KINDS = {
    "rotary": r"rope|rotary|rotate|freqs_cis|^rot(_|$)",
    "alibi": r"alibi|slope",
    # Distances, which any of them may compute, have no encoding of their own.
    "unknown": r"relative(?!_(position|distance)s?$)|bucket|axial|xpos|2d|ndim(?!s)"
    r"|bias_table|^rel(?!(_?dist\w*|_pos)?$)",
}
# Names of parameters that hold a vector or a bias for each distance.
TABLE_PATTERN = re.compile(
    r"(^|[._])(rpb$|rel(_|ative|[a-z]*$))|(bias|distance|offset)_?(table|emb)"
    r"|(emb|bias)_table",
    re.IGNORECASE,
)
# Dropout of what scores are computed from, which keeps no mean.
INPUT_DROPOUT_PATTERN = re.compile(
    r"lora|adapter|input|in_drop|emb|feat|(^|_)(q|k|qk|query|key)s?_?drop|"
    r"(^|_)(pos(ition(al)?)?(_|enc)\w*|pe)\.",
    re.IGNORECASE,
)
# Dropout of what is behind the attention, by the name of its rate.
OUTPUT_DROPOUT_PATTERN = re.compile(
    r"(^|_)(proj|resid(ual)?|out(put)?|hidden)_(\w+_)?(drop|p)"
)
# Dropout of a whole part, whose queries share one mask by intention.
PART_DROPOUT_PATTERN = re.compile(
    r"(head|path|depth|token|locked|variational)s?_?drop|drop_?(head|path|connect)"
    r"|(^|[._])p_(head|path|layer)s?$",
    re.IGNORECASE,
)
COLUMN_DROPOUT_PATTERN = re.compile(
    r"col(umn)?s?_?drop|drop_?(col|column|key)s?($|_)|DropKey", re.IGNORECASE
)
# Probabilities, of dropout and of other masks that are drawn in training.
RANDOM_RATE_PATTERN = re.compile(r"(^|_)(p|prob\w*|drop\w*|rate)$", re.IGNORECASE)
BEGIN_PATTERN = re.compile(r"^([sc]a|self|cross)_(attn_)?")
BIAS_NETWORK_PATTERN = re.compile(r"(^|_)(meta|cpb|pos|rel|bias)\w*\.")
# Designs that change what is computed, and names in code that tell of them.
DESIGNS = {
    "norm": r"norm(?!al_?$|_?fact)|cosine|^(rsqrt|std|var|square)$",
    "group_norm": r"(group|instance)_?norm",
    "direction": r"(?<!bi)direction",  # of which heads may have one each
    # A query goes on where the one before it ended, whatever the keys are.
    "monotonic": r"monoton|wait_?k|gmm|num_mixtures|location_based",
    "residual": r"residual|shortcut|^skip",
    "gate": r"(^|_)(gate|gating)|sigmoid|swiglu|silu|rout(er|ing)",
    "softcap": r"soft_?cap|logit_cap|tanh",
    "features": r"^elu$|(?<!leaky)(?<!leaky_)relu|feature_map|performer|linear_?att"
    r"|^_?phi$|favor|(random|nb|num_random|n_random)_?features|cosformer|hedgehog",
    # Tokens fade from step to step, by a number that others may have influence on.
    "decay": r"(?<!weight_)decay|forget_?(gate|bias)|forgetting|f_?gates?$|log_?sigmoid"
    r"|retention|retnet|delta_?(net|rule)|rwkv|time_mix|(token|time|kv|key)_?shift"
    r"|mamba|mlstm|(^|_)ssm(_|$)|selective_?(ssm|scan|state)|^a_log$",
    # Keys whose weight is exactly zero.
    "zeros": r"sparsemax|entmax|tropical|max_?plus",
    "sink": r"sink|null_|^registers?$|^mem_|memory_k(?!ey)|softmax_?(plus_?)?(one|1)"
    r"|^bias_[kv]$|zero_att|^cls(_|$)|class_(token|emb)",
    "linear": r"linear_?(\w+_?)?att",
    "window": r"window|(?-i:[lL]ocal)|dilat|sparse|^(un)?fold$|outlook|radius|^near$"
    r"|look_?ahead|wait_?k"
    r"|(^|_)(left|right|back|history)_?(chunk|block|context|frame)s?(_|$)"
    r"|neighbou?r|big_?bird|longformer|^(num|n)_frames$",
    # All tokens attend to the last block, or to random ones, or to means of segments,
    # wherever these are.
    "ends": r"big_?bird|(global|rand(om)?)_block|landmark|nystr",
    # Weights by an approximate inverse, whose rows have other sums.
    "inverse": r"pinv|pseudo_?inverse|moore_penrose",
    # Which keys are attended to, or in which order, depends on other tokens.
    "selection": r"topk|^(arg)?sort$|select_|selective|salien|rout(er|ing)|cluster"
    r"|centroid|^lsh|hash|^n_buckets$|rotations$|landmark|nystr",
    "dynamic": r"ntk|dynamic|rope_?(factor|scaling)",
    "clip": r"clip_?(qkv|kv|logits)|(qkv|kv)_?clip",
    # Of keys, such as of an Informer, or between the pixels of an image.
    "sampling": r"^(randint|randperm|multinomial)$|sampling_offsets|^grid_sample$",
    "scale": r"logit_scale|log_?scale|train_?len|^tau$|pre_attn_scalar"
    r"|(?-i:T5)|attention_multiplier|floor_scale|temperature_tun"
    r"|log_?(n|len(gth)?)(_|$)|(?-i:LogLen)|mup(_|$)|(?-i:^Mu[A-Z]|LogN)",
    # Series that are standardized by statistics without a gradient.
    "stationary": r"stationar|revin|^stdev$",
    # Numbers that are rounded to few bits, in a straight line for their gradients.
    "quantized": r"quantiz|^(u?int8|round_?)$|fake_?quant",
    # Means of points on a curved surface.
    "hyperbolic": r"hyperbol|lorentz|poincar|(exp|log)_?map",
    # Each key chooses among the queries, perhaps only one, with a softmax's gradient.
    "assignment": r"(^|_)assign(ment)?s?(_|$)|(^|_)hard(_|$)|straight_?through",
    "cloud": r"point_?cloud",  # whose distances are scaled by their mean
    "axial": r"axial|criss_?cross",
    "latents": r"latents$",  # which may be queries and keys
    # The layers of PyG for graphs are named so, and convolve nothing.
    "convolution": r"(?<!gat)(?<!gatv2)(?<!transformer)(?<!attention)conv"
    r"|(?<!^)(?<!page_)(?<!block_)(?<!kv_)pool|pool(?!s?$)"
    r"|downsample|sr_ratio|^i?r?fft",  # a product of spectra is a convolution
    "positions": "",  # by `ENCODING_PATTERN`
    "tied": r"^tied?(_|$)|weight_tie|(tie|share)_?(layer|block)s?|^to_qk$"
    r"|share[ds]?_?(\w+_)?(qk|kv|key|query|value|weight)",
    "talking": r"talking|head_scale|differential|diff_?att|lambda_(q|k|init)|subln"
    r"|layer_?scale|^gamma$|^proj_[lw]$",
}
# Names of submodules and parameters, normalized: lower case, without underscores.
PROJECTION_NAMES = {
    "query": "q query queries qproj queryproj wq wquery toq qlin qlinear linearq "
    "queryconv convq linq linquery wqs wqueries toqueries projq fcq qnet qlayer "
    "querylayer queryprojection",
    "key": "k key keys kproj keyproj wk wkey tok klin klinear lineark keyconv convk "
    "link linkey wks wkeys tokeys projk fck knet klayer keylayer keyprojection",
    "value": "v value values vproj valueproj wv wvalue tov vlin vlinear linearv "
    "valueconv convv linv linvalue wvs wvalues tovalues projv fcv vnet vlayer "
    "valuelayer valueprojection",
    "out": "lino projo fco onet o out output outproj oproj outputproj wo wout toout "
    "olin outlin olinear linearo proj cproj fcout dense projection unify unifyheads "
    "merge mergeheads combine combineheads fc linear final projout finallinear "
    "outlayer outputlayer outprojection outputprojection",
    "fused": "qkv cattn qkvproj toqkv wqkv inproj querykeyvalue",
    "fused_key_value": "kv tokv kvproj wkv keyvalue kvnet",
    "query_norm": "qnorm normq qln qlayernorm querynorm lnq qnormlayer",
    "key_norm": "knorm normk kln klayernorm keynorm lnk knormlayer",
}
OUTER_ROLES = ("value", "out")  # of any width
USUAL_ORDER = ("query", "key", "value", "out")  # of layers in a list
PROJECTION_ROLES = {
    name: role for role, names in PROJECTION_NAMES.items() for name in names.split()
}


def table_sizes(module: nn.Module) -> dict[str, int]:
    r"""The learned tables of relative positions by name, with their numbers of rows.

    >>> table_sizes(nn.ModuleDict({"rel_pos": nn.Embedding(9, 4)}))
    {'rel_pos.weight': 9}
    """
    biases = {
        f"{name}.weight"
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding)
        if name.endswith("bias") or re.search(r"(^|\.)rel[a-z_]*\.", name)
    }
    return {
        name: max(parameter.shape)
        for name, parameter in module.named_parameters()
        if name in biases or TABLE_PATTERN.search(name.removesuffix(".weight"))
        if parameter.dim() and parameter.requires_grad
    }


def tables_of_windows(module: nn.Module) -> dict[str, tuple[int, ...]]:
    r"""The tables that have a row for each offset within a window, with its sides.

    >>> module = nn.Module()
    >>> module.window, module.bias = (2, 3, 4), nn.Parameter(Tensor(3 * 5 * 7, 2))
    >>> tables_of_windows(module)
    {'bias': (2, 3, 4)}
    """
    windows = {
        math.prod(2 * side - 1 for side in value): tuple(value)
        for part in module.modules()
        for name, value in vars(part).items()
        if "win" in name and isinstance(value, tuple | list) and len(value) > 1
        if all(type(side) is int and side > 1 for side in value)
    }
    linear = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
    layers = {f"{n}." for n, m in module.named_modules() if isinstance(m, linear)}
    return {
        name: windows[max(parameter.shape)]
        for name, parameter in module.named_parameters()
        if parameter.dim() == 2 and max(parameter.shape) in windows
        if f"{name.rpartition('.')[0]}." not in layers
    }


def token_counts(module: Any) -> set[int]:
    r"""The numbers of tokens of a part of their own that modules state.

    >>> module = nn.Module()
    >>> module.num_tokens = 4
    >>> token_counts(module), token_counts(None)
    ({4}, set())
    """
    parts = module.modules() if isinstance(module, nn.Module) else ()
    return {
        n
        for part in parts
        for name, n in vars(part).items()
        if type(n) is int and re.search("tokens$", name)
    }


def has_buckets(module: nn.Module) -> bool:
    """Whether several distances share a row of a table, by intention."""
    return any("bucket" in name for name in identifiers(module))


def parts_and_configs(module: nn.Module) -> list[Any]:
    """The module, its parts, and the configs that they keep."""
    parts: list[Any] = [*module.modules()]
    kept = [vars(part) for part in parts]
    return parts + [own[n] for own in kept for n in CONFIG_ATTRIBUTES if n in own]


def largest_distance(module: nn.Module) -> int | None:
    """The distance from which on all share a row: an attribute of a part or config."""
    for part in parts_and_configs(module):
        for name in dir(part):
            if re.search(r"max_?(rel\w*_)?dist|max_rel_pos$", name):
                value = getattr(part, name)
                if type(value) is int and value > 1:
                    return value
    return None


def largest_batch(module: Any) -> int | None:
    r"""How many batch items a module has room for: an attribute of a part or config.

    >>> module = nn.Module()
    >>> module.max_batch_size = 4
    >>> largest_batch(module), largest_batch(nn.Module())
    (4, None)
    """
    parts = parts_and_configs(module) if isinstance(module, nn.Module) else []
    found = (getattr(part, name, None) for part in parts for name in BATCH_ATTRIBUTES)
    return min((n for n in found if type(n) is int), default=None)


def designs_of(target: Any, without: Collection[str] = ()) -> dict[str, str]:
    """The designs that the code of `target` mentions, each with the name that tells.

    The names in `without` tell of none.
    """
    found: dict[str, str] = {}
    weights = target.named_parameters() if isinstance(target, nn.Module) else ()
    for name, weight in weights:
        # A bias of two axes, of heads and of rows or distances, or a long table.
        last = name.rpartition(".")[2]
        is_bias_of_two = weight.dim() > 1 and re.search("bias_|_bias", name)
        is_layer = last == "weight" or weight.dim() < 2
        if is_bias_of_two or (not is_layer and is_table(weight.shape)):
            found["positions"] = last
    for name in sorted(identifiers(target) - {*without}):
        for design in designs_named(name):
            found.setdefault(design, name)
    return found


def options_that_are_off(target: nn.Module) -> set[str]:
    r"""Arguments of the constructor that a module stores, and that are None.

    >>> class Attention(nn.Module):
    ...     def __init__(self, window=None):
    ...         super().__init__()
    ...         self.window = window
    >>> options_that_are_off(Attention()), options_that_are_off(Attention(window=2))
    ({'window'}, set())
    """
    arguments = inspect.signature(type(target)).parameters
    return {name for name in arguments if vars(target).get(name, ...) is None}


def is_built_causal(target: Any) -> bool:
    r"""Whether a flag that a module stores makes it causal.

    >>> class Attention(nn.Module):
    ...     def __init__(self, causal=False):
    ...         super().__init__()
    ...         self.causal = causal
    >>> is_built_causal(Attention()), is_built_causal(Attention(causal=True))
    (False, True)
    """
    flags = vars(target).items() if isinstance(target, nn.Module) else ()
    return any(CAUSAL_PATTERN.match(name) and value is True for name, value in flags)


def pools_by_first_token(target: Any) -> bool:
    r"""Whether the output of all tokens is that of the first, such as one of a class.

    >>> def pool(x): return x[:, 0]
    >>> def shorten(x, mask): return x * mask[:, 0]
    >>> pools_by_first_token(pool), pools_by_first_token(shorten)
    (True, False)
    """
    text = source_of(type(target) if isinstance(target, nn.Module) else target)
    return bool(re.search(r"\b(?!\w*(mask|len))\w+\[:, ?0\]|\[CLS\]", text))


def uses_spectra(target: Any) -> bool:
    """Whether the code transforms to frequencies, as an autocorrelation does."""
    return any(re.match(r"i?r?fft", name) for name in identifiers(target))


@cache  # most modules share most names
def designs_named(name: str) -> tuple[str, ...]:
    r"""The designs that a name in code tells of.

    >>> designs_named("window"), designs_named("query")
    (('window',), ())
    >>> designs_named("Conv2d"), designs_named("GATConv")
    (('convolution',), ())
    """
    return tuple(
        design
        for design, pattern in DESIGNS.items()
        if (design == "positions" and ENCODING_PATTERN.search(name))
        or (pattern and re.search(pattern, name, re.IGNORECASE))
    )


def is_table(shape: tuple[int, ...]) -> bool:
    r"""Whether a weight has so many rows that they must be those of positions.

    >>> is_table((512, 4)), is_table((192, 64))
    (True, False)
    """
    return max(shape) >= 64 and max(shape) >= 8 * min(shape)


def normalizes(target: Any) -> bool:
    """Whether the code of `target` normalizes vectors without a weight."""
    named = dict(target.named_modules()) if isinstance(target, nn.Module) else {}
    is_norm = re.compile("norm", re.IGNORECASE).search
    norms = {name: part for name, part in named.items() if is_norm(type(part).__name__)}
    layers = {name.rpartition(".")[2] for name in named}
    of_scores = {*itertools.chain(*(norms_of_scores(target) if named else ()))}
    # The code of a norm says nothing of what is not queries and keys.
    without = (
        {type(part) for part in norms.values()} if {*norms} <= of_scores else set()
    )
    found = identifiers(target, without)
    return (
        any(not [*part.parameters()] for part in norms.values())
        or any(map(re.compile(r"^normalize$|l2|cosine|rsqrt").search, found))
        or bool({"norm", "vector_norm"} & (found - layers))
    )


def norms_of_scores(module: nn.Module) -> Iterator[tuple[str, str]]:
    r"""The paths of the norms of queries and of keys, of each attention that has both.

    >>> parts = {"q_norm": nn.LayerNorm(2), "k_norm": nn.LayerNorm(2)}
    >>> [*norms_of_scores(nn.ModuleDict({"attention": nn.ModuleDict(parts)}))]
    [('attention.q_norm', 'attention.k_norm')]
    """
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        found: dict[str, list[str]] = {"query_norm": [], "key_norm": []}
        for name, child in part.named_children():
            role = role_of(STREAM_PATTERN.sub("", name), child)
            found.get(role, []).append(prefix + name)
        yield from zip(found["query_norm"], found["key_norm"], strict=False)


# What the names of a second stream of tokens have beside those of the first.
STREAM_PATTERN = re.compile(r"_?(added|add|context|text|txt|image|img)(?=_)|_added$")


def is_norm(part: nn.Module) -> bool:
    """Whether a module is a norm, by the name of its class."""
    return "norm" in type(part).__name__.lower()


def is_linear_or_norm(part: nn.Module) -> bool:
    r"""Whether a module has no parameters of its own but those of a layer or a norm.

    >>> [is_linear_or_norm(part) for part in (nn.Linear(2, 2), nn.Embedding(2, 2))]
    [True, False]
    """
    return is_norm(part) or isinstance(part, nn.Linear) or not part._parameters


def is_norm_without_weight(part: nn.Module) -> bool:
    """Whether a layer is a norm that has no parameters."""
    return is_norm(part) and not [*part.parameters()] and not [*part.children()]


def softcap_of(module: nn.Module) -> float | None:
    """The number at which a module limits its scores, by the name of its attribute."""
    for name, value in vars(module).items():
        if (
            re.search(DESIGNS["softcap"], name)
            and type(value) in (int, float)
            and value
        ):
            return float(value)
    return None


def is_unscaled(module: nn.Module) -> bool:
    """Whether a module states that it does not scale its scores, as T5 does not.

    A learned scale, a tensor, states nothing.
    """
    given = [getattr(module, name, None) for name in ("scaling", "scale")]
    return any(isinstance(scale, int | float) and scale == 1 for scale in given)


def folds_scale_into(module: nn.Module, width: int, d_k: int) -> str:
    """The projection of queries that is initialized with the scale of the scores.

    Its initial weights are smaller than those of the keys by the root of `d_k`, as in
    T5, whose scores are not divided by it. Empty if there is none.
    """
    layers = layers_by_role(module, width)
    if not {"query", "key"} <= {*layers} or d_k < 4:
        return ""
    linear = {n: p for n, p in module.named_modules() if isinstance(p, nn.Linear)}
    weights = [linear[layers[role]].weight for role in ("query", "key")]
    if any(nn.parameter.is_lazy(weight) for weight in weights):
        return ""
    of_query, of_key = (weight.detach().std().item() for weight in weights)
    is_folded = abs(of_query * d_k**0.5 - of_key) < 0.3 * of_key
    return layers["query"] if is_folded else ""


def convolves_single_tokens(module: nn.Module) -> bool:
    r"""Whether all convolutions have a width of 1, and nothing is pooled.

    They are linear layers of images.

    >>> [convolves_single_tokens(nn.Conv2d(4, 4, width)) for width in (1, 3)]
    [True, False]
    """
    widths = {
        width
        for part in module.modules()
        if isinstance(part, nn.modules.conv._ConvNd)
        for width in part.kernel_size
    }
    pools = re.compile(r"pool|downsample|sr_ratio", re.IGNORECASE)
    return widths == {1} and not any(map(pools.search, identifiers(module)))


def mixes_pixels(attention: Any) -> bool:
    r"""Whether pixels influence each other beside the attention.

    They do in a convolution of several, and where groups of channels are normalized. A
    function has no layers.

    >>> layers = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, (1, 3)), nn.GroupNorm(2, 4)
    >>> [mixes_pixels(layer) for layer in (*layers, len)]
    [False, True, True, False]
    """
    if not isinstance(attention, nn.Module):
        return False
    norms = nn.GroupNorm, nn.modules.instancenorm._InstanceNorm
    return any(
        isinstance(part, norms)
        or (isinstance(part, nn.modules.conv._ConvNd) and max(part.kernel_size) > 1)
        for part in attention.modules()
    )


def encodes_positions(target: Any) -> bool:
    """Whether names in the code of `target` tell of a positional encoding.

    These are the names of its submodules, parameters and buffers, and those that occur
    in its functions and in the functions of the same file that they use.
    """
    return any(map(ENCODING_PATTERN.search, identifiers(target)))


def positions_named(found: Iterable[str]) -> str:
    r"""The positional encoding that names tell of, or "unknown" if they leave it open.

    >>> positions_named({"rotate_half", "q_proj"}), positions_named({"rel_bias"})
    ('rotary', 'unknown')
    >>> positions_named({"rel_pos", "alibi_class"})
    'alibi'
    """
    kinds = {
        kind
        for name in found
        for kind, pattern in POSITION_KINDS.items()
        if re.search(pattern, name, re.IGNORECASE)
    }
    return kinds.pop() if len(kinds) == 1 else "unknown"


def is_relative(found: Iterable[str]) -> bool:
    r"""Whether names tell that positions are encoded by distances in a sequence.

    >>> is_relative({"rel_shift"}), is_relative({"relative_bias", "height"})
    (True, False)
    """
    text = " ".join(found)
    named = re.search(r"\brel(ative)?_|_rel(ative)?\b|\bRel(ative)?[A-Z_]", text)
    other = re.search(r"2d|height|_rows?\b|axial|grid|coord|abs(olute)?_", text)
    return bool(named) and not other


# Variables of functions whose names tell of no operation.
LOCAL_PATTERN = re.compile("norms?|std|var|square")


def identifiers(target: Any, without: Collection[type] = ()) -> set[str]:
    """Names of the parts of `target`, and names in its code, as far as it is Python.

    The code of submodules of the classes in `without` is left out.
    """
    found = {target.__name__} if inspect.isfunction(target) else set()
    classes: list[Any] = [target] if isinstance(target, type) else []
    if isinstance(target, nn.Module):
        classes = [type(m) for m in target.modules() if type(m) not in without]
        found |= {n for n, _ in target.named_buffers() if "masked_bias" not in n}
        found |= {n for n, _ in target.named_parameters()}
        found = {part for name in found for part in name.split(".")}
    for each in classes:
        bases = [base for base in each.__mro__ if is_of_user(base)]
        found |= {base.__name__ for base in bases}
    for code in codes_of(target, without):
        # The sum that a softmax divides by is often called a norm, and the spread of
        # initial weights `std`.
        local = {n for n in code.co_varnames if not LOCAL_PATTERN.fullmatch(n)}
        found |= {*code.co_names, *local}
    return found


# How the generators are seeded that a file may draw from besides PyTorch's.
SEEDS = {
    "random": "import random; random.seed({})",
    "numpy": "import numpy; numpy.random.seed({})",
}


def seeds_of_file(target: Any) -> list[str]:
    """The lines that seed the other generators that the file of `target` imports.

    >>> seeds_of_file(inspect.signature), seeds_of_file(nn.Linear(2, 3))
    ([], [])
    """
    module = sys.modules.get(getattr(target, "__module__", ""))
    imported = set(map(id, vars(module).values())) if module else set()
    return [
        line
        for name, line in SEEDS.items()
        if name in sys.modules and id(sys.modules[name]) in imported
    ]


def is_of_user(base: type) -> bool:
    """Whether a class is neither of PyTorch nor `object`."""
    return not base.__module__.startswith("torch.nn") and base is not object


def codes_of(target: Any, without: Collection[type] = ()) -> Iterator[CodeType]:
    """The code of `target` and of what it calls in its file, as far as it is Python.

    The classes in `without` are left out.
    """
    classes: list[Any] = [target] if isinstance(target, type) else []
    if isinstance(target, nn.Module):
        classes = [type(m) for m in target.modules() if type(m) not in without]
    functions = [] if classes else [target]
    for each in classes:
        for base in filter(is_of_user, each.__mro__):
            functions += methods_of(base)
    seen: set[Any] = set()
    while functions:
        function = inspect.unwrap(functions.pop())
        code = getattr(function, "__code__", None)
        if code is None or code in seen or len(seen) > 60:
            continue
        seen.add(code)
        scope = function.__globals__
        for part in code_objects(code):
            yield part
            for name in part.co_names:
                value = scope.get(name)
                if getattr(value, "__module__", "") != function.__module__:
                    continue
                if inspect.isfunction(value):
                    functions.append(value)
                if isinstance(value, type) and value not in without:
                    functions += methods_of(value)


# Methods that call a model for one token after the other.
GENERATION_PATTERN = re.compile(r"(generate|sample|beam_search|greedy|translate)\w*")


def methods_of(owner: type) -> list[Any]:
    r"""The functions that a class defines, also if they are static or decorated.

    Methods of the class itself, such as other constructors, are not among them, nor
    those that choose the tokens that a model continues a text with.

    >>> class Chooser:
    ...     @staticmethod
    ...     def rate(scores): ...
    ...     @cache
    ...     def choose(self, scores): ...
    ...     def generate(self, ids, steps): ...
    >>> [method.__name__ for method in methods_of(Chooser)]
    ['rate', 'choose']
    """
    members = [
        each
        for name, each in vars(owner).items()
        if type(each) is not classmethod and not GENERATION_PATTERN.fullmatch(name)
    ]
    methods = [getattr(each, "__wrapped__", each) for each in members]
    return [method for method in methods if inspect.isfunction(method)]


def large_numbers(module: nn.Module) -> list[float]:
    r"""Numbers from 100 on in the code of a module, its defaults and attributes.

    Among them is the base of a rotary encoding.

    >>> class Rotary(nn.Module):
    ...     def forward(self, x, base=10000): ...
    >>> 10000.0 in large_numbers(Rotary())
    True
    """
    found: list[Any] = [each for code in codes_of(module) for each in code.co_consts]
    for part in module.modules():
        scope = vars(sys.modules[type(part).__module__])
        found += vars(part).values()
        for each in (*vars(type(part)).values(), *scope.values()):
            members = vars(each).values() if isinstance(each, type) else [each]
            for function in members:
                found += getattr(function, "__defaults__", None) or ()
                found.append(function)  # a default of a dataclass, or a constant
    numbers = [n for n in found if type(n) in (int, float) and 100 <= n < math.inf]
    return sorted({float(n) for n in numbers})


def code_objects(code: CodeType) -> Iterator[CodeType]:
    """A code object and those nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_objects(constant)


def size_attribute(target: Any, size: str) -> int | None:
    """A size that a module, or its config, has under a name in `ARGUMENT_NAMES`."""
    for owner in (target, *(getattr(target, name, None) for name in CONFIG_ATTRIBUTES)):
        is_dict = isinstance(owner, Mapping)
        for name in ARGUMENT_NAMES[size].split():
            value = owner.get(name) if is_dict else getattr(owner, name, None)
            if type(value) is int:
                return value
    return None


def frame_count(module: Any) -> int:
    """The number of the frames of a video that a module states, or 0."""
    for name in ("num_frames", "n_frames", "frames"):
        if type(value := getattr(module, name, None)) is int:
            return value
    return 0


def stated_window(module: Any) -> int | None:
    """The number of keys in a sliding window, own included, that a module states.

    An attribute of another name does if it is documented that it counts the own key.
    """
    for owner in (module, *(getattr(module, name, None) for name in CONFIG_ATTRIBUTES)):
        if type(value := getattr(owner, "sliding_window", None)) is int:
            return value
    texts = [each.co_consts[:1] for each in codes_of(module)]
    words = " ".join(str(each) for text in texts for each in text)
    words = " ".join(f"{inspect.getdoc(type(module))} {words}".split())
    for name, value in vars(module).items():
        if type(value) is int and re.fullmatch(r"(\w+_)?window(_size|_len)?", name):
            if counts_own_key(words, name):
                return value
    return None


def counts_own_key(text: str, window: str) -> bool:
    r"""Whether a text says that a window counts the key of the query, too.

    >>> counts_own_key("A query sees `window` keys, itself included.", "window")
    True
    >>> counts_own_key("It attends to `window` keys on each side.", "window")
    False
    """
    own = r"(itself|self|(its |the )?(own|current|query)\b)"
    behind = rf"\b{window}\b[^.;]*"
    return bool(
        re.search(rf"{behind}(\bincl\w* {own}|\b{own}[^.;]{{0,12}}\bincl)", text)
        or re.search(rf"i - j < {window}\b|\bi - {window} < j\b", text)
    )


def drops_columns(target: Any) -> bool:
    """Whether a key is dropped for all queries by intention, by a name in the code."""
    return any(map(COLUMN_DROPOUT_PATTERN.search, identifiers(target)))


def chunk_with_left_context(module: Any) -> int:
    """The size of chunks of which those on the left are seen, too, as a module states.

    0 if it states none, or if it sees some on the right.
    """
    numbers = {n: v for n, v in vars(module).items() if type(v) is int}
    sizes = [
        v
        for n, v in numbers.items()
        if re.fullmatch("(chunk|segment)_(size|len(gth)?)", n)
    ]
    is_left = any("left" in name for name in numbers)
    is_right = any(re.search("right|ahead|future", name) for name in vars(module))
    return sizes[0] if len(sizes) == 1 and is_left and not is_right else 0


def rotary_width(module: Any) -> int | None:
    """The number of features that a module, its config or a part of it rotates."""
    parts = [*module.modules()] if isinstance(module, nn.Module) else []
    for owner in (module, getattr(module, "config", None), *parts):
        for name in ROTARY_WIDTHS:
            if type(value := getattr(owner, name, None)) is int:
                return value
    return None


def candidate_widths(module: nn.Module) -> list[int]:
    """Widths that the inputs of `module` may have, the most likely first."""
    found = [size_attribute(module, "{d_model}")]
    for part in module.modules():
        found.append(getattr(part, "in_features", None))
    for parameter in module.parameters():
        found += [*parameter.shape] if not nn.parameter.is_lazy(parameter) else []
    # A module with lazy weights takes any width.
    return [*dict.fromkeys(n for n in found if n), 12]


def layer_widths(module: nn.Module) -> list[int]:
    """The widths of the inputs of linear layers, each once."""
    widths = [getattr(part, "in_features", None) for part in module.modules()]
    return [*dict.fromkeys(width for width in widths if width)]


def find_projections(
    module: nn.Module, given: Mapping[str, str], prefix: str = ""
) -> dict[str, str]:
    r"""How each projection is computed, as source text with `{}` for its input.

    `given` names submodules or parameters for "query", "key", "value" and "out", or
    "fused" for the first three in one. A fused projection holds all queries, then all
    keys, then all values, or with `:h3d` appended, as in "qkv:h3d", the three of the
    first head, then the three of the second.

    The text calls a copy of the module in float64, `attention64`. The result is empty
    if a projection is missing, or if there is a submodule whose role is unknown: the
    formula could not be compared with what it computes.

    >>> parts = {"q_proj": nn.Linear(4, 4), "gate": nn.Linear(4, 8)}
    >>> find_projections(nn.ModuleDict(parts), {})
    {}
    >>> parts = {name: nn.Linear(4, 4) for name in "qkvo"}
    >>> find_projections(nn.ModuleDict(parts), {})["query"]
    'attention64.q({})'
    """
    if not given:
        while len(parts := parts_with_parameters(module)) == 1:
            ((name, part),) = parts.items()
            if isinstance(part, Tensor) or role_of(name, part) or heads_in(part):
                break
            # A wrapper: all parameters are those of one submodule, the attention.
            module, prefix = part, f"{prefix}{name}."
        if isinstance(module, nn.MultiheadAttention):
            return torch_projections(module, prefix)
        if any(map(heads_in, parts.values())):
            return projections_of_heads(parts, module, prefix)
        if [*parts] == [*"0123"]:  # a list of layers, in the usual order
            return {
                role: projection_source(module, prefix, name)
                for role, name in zip(USUAL_ORDER, parts, strict=True)
            }
        given = {role_of(name, part): name for name, part in parts.items()}
        if "" in given or len(given) < len(parts):
            return {}

    names = dict(given)
    found: dict[str, str] = {}
    fused, _, order = names.pop("fused", "").partition(":")
    if fused:
        source = projection_source(module, prefix, fused)
        for n, role in enumerate(("query", "key", "value")):
            if order == "h3d":
                part_of_head = f".unflatten(-1, (heads, 3, -1)).select(-2, {n})"
                found[role] = source + part_of_head
            else:
                found[role] = f"{source}.chunk(3, -1)[{n}]"
    fused = names.pop("fused_key_value", "")
    if fused:
        source = projection_source(module, prefix, fused)
        for n, role in enumerate(("key", "value")):
            found[role] = f"{source}.chunk(2, -1)[{n}]"
    for role, name in names.items():
        if not role.endswith("_norm"):
            found[role] = projection_source(module, prefix, name)
    # The gain of a norm alone, or a weight for each head, does not tell how it is used.
    known = [named_part(module, name) for name in given.values()]
    if any(isinstance(part, Tensor) and part.dim() != 2 for part in known):
        return {}
    for role, name in names.items():
        if role.endswith("_norm"):
            add_norm(found, module, role, projection_source(module, prefix, name), name)
    return found if {"query", "key", "value"} <= set(found) else {}


def heads_in(part: Any) -> dict[str, str]:
    r"""The names of the layers by role, if the part is a list of heads that have three.

    >>> heads = [nn.ModuleDict({n: nn.Linear(4, 2) for n in "qkv"}) for _ in range(2)]
    >>> heads_in(nn.ModuleList(heads))
    {'query': 'q', 'key': 'k', 'value': 'v'}
    """
    if not isinstance(part, nn.ModuleList):
        return {}
    layers = [parts_with_parameters(head) for head in part]
    roles = [{role_of(n, each): n for n, each in of.items()} for of in layers]
    is_same = bool(roles) and all(each == roles[0] for each in roles)
    are_linear = all(isinstance(n, nn.Linear) for of in layers for n in of.values())
    has_three = is_same and {*roles[0]} == {"query", "key", "value"}
    return roles[0] if has_three and are_linear and len(layers[0]) == 3 else {}


def projections_of_heads(
    parts: Mapping[str, Any], module: nn.Module, prefix: str
) -> dict[str, str]:
    """How each projection is computed by a list of heads, side by side.

    Empty if there is more than the heads and a last projection.
    """
    lists = [name for name, part in parts.items() if heads_in(part)]
    others = {role_of(n, part): n for n, part in parts.items() if n not in lists}
    if len(lists) + len(others) < len(parts) or len(lists) > 1 or {*others} - {"out"}:
        return {}
    heads = f"attention64.get_submodule({prefix + lists[0]!r})"
    found = {
        role: f"torch.cat([head.{name}({{}}) for head in {heads}], dim=-1)"
        for role, name in heads_in(parts[lists[0]]).items()
    }
    if "out" in others:
        found["out"] = projection_source(module, prefix, others["out"])
    return found


def layers_by_role(
    module: nn.Module, width: int, any_width: bool = False
) -> dict[str, str]:
    r"""The linear layers of an attention by role, where their sizes are the usual ones.

    A fused projection has up to three times the width, or twice if it is of keys and
    values: grouped keys have less. With `any_width`, layers of all sizes are found, and
    convolutions of single tokens. Four layers in a list have the usual order.

    >>> layers_by_role(nn.ModuleDict({"qkv": nn.Linear(4, 12)}), width=4)
    {'fused': 'qkv'}
    """
    for path, part in module.named_modules():
        sizes = [getattr(each, "out_features", 0) for each in part.children()]
        if isinstance(part, nn.ModuleList) and sizes == [width] * len(USUAL_ORDER):
            paths = (f"{path}.{n}".lstrip(".") for n in range(len(sizes)))
            return dict(zip(USUAL_ORDER, paths, strict=True))
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d) if any_width else nn.Linear
    found: dict[str, str] = {}
    for path, part in module.named_modules():
        role = role_of(path.rpartition(".")[2], part)
        size = getattr(part, "out_features", 0)
        parts = {"fused": 3, "fused_key_value": 2}.get(role, 1)
        is_usual = width < size <= parts * width if parts > 1 else size == width
        is_usual |= any_width or role in OUTER_ROLES
        if isinstance(part, kinds) and role and is_usual:
            if role in found:
                return {}  # several attentions
            found[role] = path
    return found


def count_attentions(module: nn.Module) -> int:
    """How many submodules project queries, each those of one attention."""
    return len(attention_paths(module))


def attention_paths(module: nn.Module) -> list[str]:
    """The names of the submodules that project queries.

    Of two attentions in one class, the names may begin with `sa_` and `ca_`.
    """
    return [
        path
        for path, part in module.named_modules()
        if isinstance(part, nn.MultiheadAttention)
        or role_of(BEGIN_PATTERN.sub("", path.rpartition(".")[2]), part)
        in ("query", "fused")
    ]


def patch_size(module: nn.Module) -> int:
    r"""The side of the square patches into which images are cut; 0 if it is not known.

    >>> patch_size(nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 4, stride=4)))
    4
    """
    for part in module.modules():
        stated = getattr(part, "patch_size", getattr(part, "patch", None))
        if isinstance(part, nn.Conv2d) and part.kernel_size == part.stride:
            stated = part.stride
        sides = {*stated} if isinstance(stated, tuple | list) else {stated}
        if len(sides) == 1 and type(side := sides.pop()) is int and side > 1:
            return side
    return 0


def patch_embedding(module: nn.Module) -> nn.Conv2d | None:
    r"""The convolution that cuts images of a few channels into patches, if any.

    >>> patch_embedding(nn.Sequential(nn.Conv2d(3, 8, kernel_size=4, stride=4)))
    Conv2d(3, 8, kernel_size=(4, 4), stride=(4, 4))
    """
    for part in module.modules():
        if isinstance(part, nn.Conv2d) and embeds_pixels(part):
            return part
    return None


def embeds_pixels(module: nn.Module) -> bool:
    r"""Whether a convolution cuts images of a few channels into patches.

    >>> embeds_pixels(nn.Conv2d(3, 8, kernel_size=4, stride=4))
    True
    >>> embeds_pixels(nn.Conv2d(8, 8, kernel_size=4, stride=4))
    False
    """
    return any(
        isinstance(part, nn.Conv2d | nn.Conv3d)
        and part.in_channels <= 4
        and part.kernel_size == part.stride != (1,) * len(part.stride)
        for part in module.modules()
    )


def is_recurrent(module: nn.Module) -> bool:
    """Whether a part has a state that goes from token to token."""
    kinds = nn.RNNBase, nn.RNNCellBase
    return any(isinstance(part, kinds) for part in module.modules())


def has_batch_norm(module: nn.Module) -> bool:
    """Whether there are statistics over the items of a batch."""
    kind = nn.modules.batchnorm._BatchNorm
    return any(isinstance(part, kind) for part in module.modules())


def has_dropout_of_its_own(module: nn.Module) -> bool:
    """Whether a submodule has the dropout that is the default of its own class.

    Or a network for biases of positions has one, or a class of the user that drops, but
    for one that is off: an argument that sets none may be forgotten.
    """
    dropout = nn.modules.dropout._DropoutNd
    of_user = [
        bool(part.p)
        for part in module.modules()
        if re.search("drop", type(part).__name__, re.I) and hasattr(part, "p")
        if is_of_user(type(part))
    ]
    is_off = any(isinstance(m, dropout) and not m.p for m in module.modules())
    if any(of_user) and (is_off or not all(of_user)):
        return True
    return any(
        isinstance(part, dropout) and part.p > 0 and BIAS_NETWORK_PATTERN.search(path)
        for path, part in module.named_modules()
    ) or any(
        layer.p == parameter.default > 0
        for part in [*module.modules()][1:]
        if not type(part).__module__.startswith("torch")
        for name, parameter in inspect.signature(type(part)).parameters.items()
        if ARGUMENT_VALUES.get(name) == "0.1"
        for layer in part.modules()
        if isinstance(layer, dropout)
    )


def wide_norms(module: nn.Module, d_k: int, weightless: bool = True) -> list[nn.Module]:
    r"""The normalization layers that are not for single heads.

    One without weights, whose width is unknown, counts if `weightless`. One whose gain
    has an axis of heads is for single heads; PyTorch's own norms are over all its axes.

    >>> norm = nn.LayerNorm(4)
    >>> wide_norms(norm, d_k=4), wide_norms(norm, d_k=2) == [norm]
    ([], True)
    """

    def is_wide(weight: nn.Parameter, norm: nn.Module) -> bool:
        is_torchs = type(norm).__module__.startswith("torch.")
        has_heads = weight.dim() > 1 and weight.shape[-1] == d_k and not is_torchs
        return weight.numel() != d_k and not has_heads

    norms = [*filter(is_norm, module.modules())]
    return [
        norm
        for norm in norms
        if norm is not module or not any(True for _ in norm.children())
        if any(is_wide(weight, norm) for weight in norm.parameters())
        or (weightless and not any(True for _ in norm.parameters()))
    ]


def role_of(name: str, part: Any) -> str:
    """The role of a submodule or a parameter, by its name; "" where it is unknown.

    A linear layer named "attn" is a fused projection; any other part of this name is an
    attention. One named as an output that is three times as wide as its input is fused.

    >>> role_of("projection", nn.Linear(4, 4)), role_of("projection", nn.Linear(4, 12))
    ('out', 'fused')
    """
    role = PROJECTION_ROLES.get(normalize_name(name), "")
    if isinstance(part, nn.Linear):
        is_wide = part.out_features == 3 * part.in_features
        if name == "attn" or (role == "out" and is_wide):
            return "fused"
    return role


def query_parameter(module: nn.Module) -> str:
    r"""The parameter that projects queries, alone or with keys and values; or "".

    >>> part = nn.Module()
    >>> part.in_proj_weight = nn.Parameter(Tensor(12, 4))
    >>> query_parameter(nn.ModuleDict({"attention": part}))
    'attention.in_proj_weight'
    """
    for name, parameter in module.named_parameters():
        last = name.rpartition(".")[2].removesuffix("_weight")
        if parameter.dim() == 2 and role_of(last, None) in ("query", "fused"):
            return name
    return ""


def halves_heads(target: Any) -> bool:
    """Whether half of the heads differ from the others, so that one head has no half.

    >>> halves_heads(nn.MultiheadAttention)
    False
    """
    return HALF_PATTERN.search(source_with_bases(target)) is not None


HALF_PATTERN = re.compile(r"\b(\w*heads|n_?h) ?// ?2\b")

GROUPED_ORDER = "grouped heads, features"

# How a fused projection may hold its parts, as source text for part `n`: one part after
# the other, the parts of each head side by side, or interleaved; or all query heads,
# then the fewer heads of the keys, then those of the values.
FUSED_ORDERS = {
    ".chunk(3, -1)[{n}]": {
        "heads, 3, features": ".unflatten(-1, (heads, 3, -1)).select(-2, {n})",
        "heads, features, 3": ".unflatten(-1, (heads, -1, 3)).select(-1, {n})",
        GROUPED_ORDER: ".unflatten(-1, (heads + 2 * kv_heads, -1))"
        ".split([heads, kv_heads, kv_heads], -2)[{n}]",
    },
    ".chunk(2, -1)[{n}]": {
        "heads, 2, features": ".unflatten(-1, (kv_heads, 2, -1)).select(-2, {n})",
        "heads, features, 2": ".unflatten(-1, (kv_heads, -1, 2)).select(-1, {n})",
    },
}


def other_fused_orders(
    projections: Mapping[str, str],
) -> Iterator[tuple[str, dict[str, str]]]:
    r"""The same projections, with the parts of a fused one in another order.

    >>> split = {"query": "qkv({}).chunk(3, -1)[0]", "key": "qkv({}).chunk(3, -1)[1]"}
    >>> next(other_fused_orders(split))[1]["key"]
    'qkv({}).unflatten(-1, (heads, 3, -1)).select(-2, 1)'
    """
    for usual, others in FUSED_ORDERS.items():
        for name, other in others.items():
            changed = dict(projections)
            for n in range(3):
                old, new = usual.format(n=n), other.format(n=n)
                changed = {r: text.replace(old, new) for r, text in changed.items()}
            if changed != projections:
                yield name, changed
    if "out" in projections:
        by_feature = "{}.unflatten(-1, (heads, -1)).mT.flatten(-2)"
        out = projections["out"].replace("{}", by_feature)
        yield "of the output: features, heads", {**projections, "out": out}


def transposed_factors(projections: Mapping[str, str]) -> dict[str, str]:
    r"""The same projections, with parameters that have a row for each output.

    >>> transposed_factors({"query": "({} @ attention64.w_q)", "out": "out({})"})
    {'query': '({} @ attention64.w_q.mT)', 'out': 'out({})'}
    """
    factor = r"(\{\} @ attention64\.[^ ]+)\)"
    return {role: re.sub(factor, r"\1.mT)", p) for role, p in projections.items()}


def orders_of_devices(
    projections: Mapping[str, str], heads: int
) -> Iterator[tuple[str, dict[str, str]]]:
    r"""The same projections, with a fused one laid out for several devices.

    Each device has the queries, keys and values of some heads, or their values before
    their keys, as those of CodeGen.

    >>> split = {"query": "qkv({}).chunk(3, -1)[0]", "key": "qkv({}).chunk(3, -1)[1]"}
    >>> [name for name, found in orders_of_devices(split, heads=4)]
    ['2 devices, 3, features', '2 devices, 3 (values before keys), features']
    """
    for count in (n for n in range(2, heads) if heads % n == 0):
        for order, note in (((0, 1, 2), ""), ((0, 2, 1), " (values before keys)")):
            changed = dict(projections)
            for n, place in enumerate(order):
                new = (
                    f".unflatten(-1, ({count}, 3, -1)).select(-2, {place}).flatten(-2)"
                )
                old = f".chunk(3, -1)[{n}]"
                changed = {r: text.replace(old, new) for r, text in changed.items()}
            if changed != projections:
                yield f"{count} devices, 3{note}, features", changed


def named_part(module: nn.Module, name: str) -> Any:
    """A parameter or a submodule, without a suffix such as `:h3d`."""
    name = name.partition(":")[0]
    return dict(module.named_parameters()).get(
        name, dict(module.named_modules()).get(name)
    )


def add_norm(
    found: dict[str, str], module: nn.Module, role: str, source: str, name: str
) -> None:
    """Add the norm of queries or keys: over the whole width, or within each head."""
    projection = role.removesuffix("_norm")
    sizes = [p.shape[-1] for p in named_part(module, name).parameters()]
    widths = [p.shape[0] for n, p in module.named_parameters() if p.dim() == 2]
    if sizes and sizes[0] in widths and projection in found:
        found[projection] = source.replace("{}", found[projection])
    else:
        found[role] = source


def parts_with_parameters(module: nn.Module) -> dict[str, Any]:
    """A module's own parameters, and its submodules that have any."""
    parts: list[tuple[str, Any]] = [*module.named_parameters(recurse=False)]
    parts += [
        (n, m) for n, m in module.named_children() if any(True for _ in m.parameters())
    ]
    return dict(parts)


def is_bias(name: str) -> bool:
    r"""Whether a parameter is a bias, by its name.

    >>> is_bias("q_proj.bias"), is_bias("b_K"), is_bias("block.weight")
    (True, True, False)
    """
    last, pattern = name.rpartition(".")[2], r"bias$|^b(_?[qkvo])?$|^[qkvo]_b$"
    return re.search(pattern, last, re.IGNORECASE) is not None


def normalize_name(name: str) -> str:
    r"""A name as `PROJECTION_NAMES` has it.

    >>> normalize_name("W_query")
    'wquery'
    """
    return name.replace("_", "").lower()


def paths_of_attention(model: nn.Module) -> list[str]:
    r"""The names of the submodules that are attention.

    That is the innermost with known projections, whatever its class is named, or else
    the outermost whose class is named attention, or has a method of this name, or a
    block that has projections for queries and keys beside other layers.

    >>> paths_of_attention(nn.TransformerEncoderLayer(8, 2))
    ['self_attn']
    >>> parts = {name: nn.Linear(4, 4) for name in ("wq", "wk", "wv", "wo")}
    >>> paths_of_attention(nn.ModuleDict({"mix": nn.ModuleDict(parts)}))
    ['mix']
    """
    parts = {path: part for path, part in model.named_modules() if path}
    named = [path for path, part in parts.items() if is_named_attention(type(part))]
    known = [path for path, part in parts.items() if find_projections(part, {})]
    inner = [p for p in known if not any(q.startswith(f"{p}.") for q in known)]
    outer = [p for p in named if not any(p.startswith(f"{q}.") for q in named)]
    found = inner + [p for p in outer if not any(q.startswith(p) for q in inner)]
    blocks = [path for path, part in parts.items() if projects_queries_and_keys(part)]
    return found or blocks


def projects_queries_and_keys(module: nn.Module) -> bool:
    r"""Whether a module has layers of its own that project queries and keys.

    >>> block = {name: nn.Linear(4, 4) for name in ("to_q", "to_kv", "feed_forward")}
    >>> projects_queries_and_keys(nn.ModuleDict(block))
    True
    """
    layers = (name for name, _ in module.named_children())
    roles = {PROJECTION_ROLES.get(normalize_name(name)) for name in layers}
    return "fused" in roles or (
        "query" in roles and bool({"key", "fused_key_value"} & roles)
    )


def is_named_attention(kind: type[nn.Module]) -> bool:
    """Whether a class, or else a function of it, is named attention."""
    methods = (name for name, value in vars(kind).items() if inspect.isfunction(value))
    is_of_user = "torch." not in kind.__module__
    return bool(ATTENTION_PATTERN.search(kind.__name__)) or (
        is_of_user and any(map(ATTENTION_PATTERN.search, methods))
    )


def projection_source(module: nn.Module, prefix: str, name: str) -> str:
    """A submodule is called; a raw parameter is the right factor of a product."""
    path, part = f"{prefix}{name}", named_part(module, name)
    is_parameter = isinstance(part, nn.Parameter)
    if isinstance(part, nn.ModuleList):  # a layer beside its dropout
        inner = parts_with_parameters(part)
        path += f".{next(iter(inner))}" if len(inner) == 1 else ""
    source = f"attention64.{path}"
    if not all(part.isidentifier() for part in path.split(".")):
        getter = "get_parameter" if is_parameter else "get_submodule"
        source = f"attention64.{getter}({path!r})"
    return f"({{}} @ {source})" if is_parameter else f"{source}({{}})"


def torch_projections(module: nn.MultiheadAttention, prefix: str) -> dict[str, str]:
    """`nn.MultiheadAttention` has one packed weight for query, key and value.

    Empty where their widths differ, and the weights are separate, or where an extra key
    (`bias_k`) is appended, which the formula does not have.
    """
    if module.in_proj_weight is None or module.bias_k is not None:
        return {}
    found = {"out": f"attention64.{prefix}out_proj({{}})"}
    for n, role in enumerate(("query", "key", "value")):
        names = ["weight"] + ["bias"] * (module.in_proj_bias is not None)
        packed = [f"attention64.{prefix}in_proj_{name}" for name in names]
        chunks = ", ".join(f"{each}.chunk(3)[{n}]" for each in packed)
        found[role] = f"torch.nn.functional.linear({{}}, {chunks})"
    return found
