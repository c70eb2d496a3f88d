r"""# Dictionary of names

Implementations of attention name their arguments differently, but from a small
vocabulary. This module is the dictionary: which argument of a constructor is the number
of heads, which argument of `forward` is a mask, which value an unknown one may take.

Source: the names used on the pages under *Other implementations*, in
[PyTorch](https://docs.pytorch.org/docs/stable/nn.html), in Hugging Face's transformers
and in the usual tutorials.
"""

import inspect
import math
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from attention_laws.source import source_of, source_with_bases

# Of the narrow heads with which a module is built, a quarter would be one feature.
ROTATED_SHARE = "0.5"
# The value that a constructor argument gets, and the names of such arguments. A value
# in braces is a size, filled in later; the others are literals.
ARGUMENT_NAMES = {
    "{d_model}": "d_model d_in d_out embed_dim dim hidden_size num_hiddens n_embd "
    "embed_size emb_size emb_dim model_dim hidden_dim hid width channels n_channels "
    "num_channels "
    "in_channels n_state input_dim dim_in dim_out output_dim query_dim in_dim out_dim "
    "embedding_dim num_features embed_dims d_embed hidden_channels q_dim feat_dim "
    "input_size units n_units nx embedding_size inner_dim hidden d dim_model emb embed "
    "din dout dim_Q dim_K dim_V hid_dim n_dims model_size in_features features "
    "d_hidden n_feat n_feats idim odim adim attention_dim att_dim item_dim "
    "hidden_units num_units token_dim d_token node_dim",
    "{heads}": "heads num_heads n_heads nhead n_head num_attention_heads h "
    "n_attention_heads num_attn_heads num_query_heads n_query_heads nheads nb_heads "
    "num_q_heads head_num num_head nh encoder_attention_heads decoder_attention_heads "
    "head_count n_q num_q nq q_heads query_heads",
    "{kv_heads}": "kv_heads num_kv_heads n_kv_heads num_key_value_heads kv_num_heads "
    "n_kv_head n_kv num_kv nkv num_query_groups n_query_groups query_groups n_groups "
    "num_groups kv_groups "
    "n_kv_groups",
    "{d_k}": "d_k head_dim d_head dim_head dim_heads head_size d_v d_kv d_q dim_k "
    "dim_v query_pre_attn_scalar head_dimension dim_per_head hidden_size_per_head "
    "head_width",
    "320": "context_length block_size max_len max_length max_seq_len seq_len n_pages "
    "n_positions max_position_embeddings max_seq_length n_ctx ctx_len max_positions "
    "seq_length max_length_seq sequence_length max_sequence_length tgt_len mem_len "
    "max_position original_max_position_embeddings max_pos max_context max_tokens "
    "num_modalities n_modalities num_fields n_fields "
    "max_ctx max_context_length original_context_length original_max_len orig_max_len "
    "train_len trained_len train_length trained_length max_train_len pretrain_len",
    "8": "max_relative_position max_relative_positions max_rel_pos max_rel_dist",
    "0.1": "dropout dropout_prob dropout_p attn_dropout p_dropout attn_drop proj_drop "
    "p resid_dropout dropout_rate drop_rate drop attention_dropout attn_pdrop "
    "resid_pdrop attention_probs_dropout_prob p_drop attn_dropout_prob drop_out",
    "0": "layer_idx layer_id layer_number layer_index block_idx",
    "False": "bias qkv_bias use_bias attention_bias add_bias flash use_flash "
    "qk_norm is_causal causal use_flash_attention is_cross_attention is_decoder "
    "has_relative_attention_bias use_cache need_weights",
    "(2, 2)": "window_size",
    "3": "spatial_dim spacial_dim spatial_size grid_size feat_size fmap_size",
    "10000.0": "rope_theta theta base rope_base",
    "32.0": "softcap attn_logit_softcapping logit_cap",
    ROTATED_SHARE: "rotary_pct rotary_percentage rotary_fraction rope_pct "
    "rope_fraction partial_rotary_factor partial_rotary_fraction",
}
ARGUMENT_VALUES = {
    name: value for value, names in ARGUMENT_NAMES.items() for name in names.split()
}

# Sizes whose names are made of the usual words.
SIZE_PATTERNS = {
    r"kv_?heads?$": "{kv_heads}",
    r"(dim|size|width|channels|features|hidden)_?(per|of|for)?_?(a_)?head$": "{d_k}",
    r"^(num_)?head_?(dim|size|width|channels|features|hidden)": "{d_k}",
    r"^(q|k|v|qk|qk_nope|qk_rope|rope|nope)_head_dim$": "{d_k}",
    # Beside the token itself.
    r"^(left_context|look_?back)(_frames|_steps|_len)?$": "{window} - 1",
    r"^horizon(_len)?$": "{window}",
    r"^radius$": "2",
    r"^(n|num|nb|no|number|a|attn|attention|multi)(_?\w+)?_?heads?$": "{heads}",
}

INPUT_NAMES = (
    ("query", "key", "value"),
    ("queries", "keys", "values"),
    ("q", "k", "v"),
    ("Q", "K", "V"),
)
# Names of two inputs: what is attended to is the context.
CONTEXT_PATTERN = re.compile(
    r"context|memory|mem$|enc(?!e|y)|kv|key_?value|cond|^xa$|source|^src|^y$|other|^x2$|ctx"
    r"|cross|latent|image|text|caption|prompt|media|target|flatten|history|audio|visual|^(k(eys?)?|v(alues?)?)$",
    re.IGNORECASE,
)
# Classes that are attention.
ATTENTION_PATTERN = re.compile(r"att(entio)?n|mha", re.IGNORECASE)
# Flags of a constructor for self-attention or for attention to a context.
KIND_PATTERN = re.compile(
    r"(is_)?(self|cross|enc(oder)?_?dec(oder)?)(_?att(n|ention))?|static_kv"
)
CONFIG_PATTERN = re.compile(r"conf|cfg|args|param|opt", re.IGNORECASE)
CACHE_PATTERN = re.compile(
    r"(layer_)?past|(layer_|kv_?)?cache$|mems$|past_key|(\w+_)?(?<!hidden_)state$|prev_kv|"
    r"history$|(kv_?)?store$"
)
MEMORY_PATTERN = re.compile(
    r"mem(s|ory)?|history|(past|prev|previous)_(hidden_?)?(states?|inputs?|frames)"
    r"|left(_(context|frames|inputs?))?"
)
CACHE_USE_PATTERN = re.compile(
    r"(use|return|output|with)_(\w+_)?(cache|kv|past|present)s?|return_past_\w+"
)
QUERY_LENGTHS_PATTERN = re.compile("(q|query|queries|tgt|target|dec)_?(seq_?)?len")
KEY_LENGTHS_PATTERN = re.compile("(k|kv|key|keys|src|source|mem|enc)_?(seq_?)?len")
# Methods of a cache that remove its last tokens.
CROP_PATTERN = re.compile(r"(roll_?back|crop|truncate|trim|rewind)(_to|_cache|_state)?")
# The argument of a method of a cache: batch items in their new order.
ORDER_PATTERN = re.compile(
    r"(?!layer)(\w+_)?(order|ind(ex|ices)|idxs?|rows|items|beams|parents|perm|keep)"
)
# Methods that choose one of several ways to compute the same.
PATH_SETTER_PATTERN = re.compile(
    r"(set|enable|use|toggle)_\w*(slic|chunk|flash|fused|efficient|sdpa)\w*"
)
# Optional arguments that are a vector for each batch item.
VECTOR_PATTERN = re.compile(r"(t|time(step)?)_?(emb(ed(ding)?)?s?|cond)|emb|t_?vec")
# Optional arguments that are added to all scores.
BIAS_PATTERN = re.compile(r"rel(ative)?_(\w+_)?(pos(itions?)?|bias)|pos(ition)?_bias")
BIAS = "torch.zeros({batch_size}, {heads}, {length}, {length})"
# How many tokens behind its own one sees, as an argument of a constructor.
AHEAD_PATTERN = re.compile(
    r"(right|future)_(context|window|frames|size)(_(size|frames))?|look_?ahead(_frames)?"
)
# Flags for attention weights in the result, and numbers for the parts of a sequence.
WEIGHTS_FLAG_PATTERN = re.compile(
    r"(need|return|output|with|get|ret)_?(\w+_)?(attn|attentions?|weights|scores|probs|maps)"
)
WINDOW_PATTERN = re.compile(r"(sliding_|local_|attn_|attention_)?window(_size|_len)?")
RATE_PATTERN = re.compile(r"p(_[a-z]+)?|[a-z]+_p|rate|prob")  # of dropout
# Its arguments of a constructor, by which it is switched off.
DROP_PATTERN = re.compile(r"drop|^p_(?!keep)[a-z_]+$|^p$")
KEEP_PATTERN = re.compile(r"_?keep(_?p(rob)?)?")  # the opposite of dropout
# Flags of a function that drops in training only, and for one mask of all heads.
TRAINING_FLAGS = {"training": True, "is_training": True, "train": True}
TRAINING_FLAGS |= {"deterministic": False, "inference": False}
SHARED_PATTERN = re.compile(r"(broadcast|shared?)_\w*drop")
# Of a sequence that holds several, such as the nodes of graphs, which each token is of.
PART_PATTERN = re.compile(
    r"(node_)?batch(_?(idx|ind(ex|ices)|ids?|vec(tor)?))?|graph_?(ids?|idx|ind(ex|ices))"
)
# Where each of them begins, and where the last one ends.
BEGINS_PATTERN = re.compile(
    r"((node|graph|batch)_?)?(ptr|offsets|bounds)|cu_?seq_?lens?"
)
SEGMENT_PATTERN = re.compile(r"(seg(ment)?|doc(ument)?|seq(uence)?|sample|group)_?ids?")
POSITION_PATTERN = re.compile(
    r"position(?!\w*_bias$)|^pos(_ids)?$|freqs|rope|rotary|^(cos|sin|cos_?sin)$"
    r"|(input|segment|start)_pos"
    r"|coord|xyz|^(points|centers|pe)$"
)
POSITION_IDS_PATTERN = re.compile(r"pos(ition)?_?(s|ids?)?|(input|segment)_pos")
# Optional arguments of a constructor that are the sides of an image.
SIDE_PATTERN = re.compile(r"(\w+_)?resolution|spa[ct]ial_(dim|size)|f(eat|map)_size")
# Other names of sides, which may not change.
FIXED_SIDE_PATTERN = re.compile(
    r"(\w+_)?(reso(lution)?|(img|image|feat(ure)?|map|fmap|grid|window)_?(size|shape)"
    r"|(in|out)(put)?_shape)"
)
# When something was seen, as [batch, length] of numbers.
TIME_PATTERN = re.compile(r"time(stamp|_stamp)?s?$|(^|_)(dates?|days|ages?|hours)$")
# What scores are multiplied with, or divided by.
SCALE_PATTERN = re.compile(r"(^|_)scal(e|ing)$|temperature|^tau$")
# How many images are the frames of one video.
FRAMES_PATTERN = re.compile(r"(\w+_)?frames?|(clip|video)_len(gth)?")
# Rows and columns of patches, as an optional argument.
PATCH_GRID_PATTERN = re.compile(
    r"(patch_|token_)?grid(_(size|shape|hw))?|hw|(feat|map)_shape"
)
# Which tokens of a text stand for images, as [batch, length] of bools.
MARKS_PATTERN = re.compile(r"(media|image|img|visual)_(locations?|markers?|marks)")
COORDINATES_PATTERN = re.compile("coord|xyz|point|center")
# Of deformable attention: where each query reads, and the sides of the maps.
REFERENCE_PATTERN = re.compile(r"ref(erence)?(_(points?|pts|xy|boxes))?")
MAP_SHAPES_PATTERN = re.compile(
    r"(\w+_)?spatial_shapes|((value|feat(ure)?|level|map)_)?shapes"
)
# The widths of a context, as arguments of a constructor.
CONTEXT_WIDTH_PATTERN = re.compile(
    r"(d_)?(context|ctx|kv|key|value|encoder|cross_attention|memory|source|src|mem|enc)"
    r"(_?(in_)?(dim|size|hidden|width|features|channels))?|[kv]dim"
)
# Flags with which a class has fewer layers.
OMISSION_PATTERN = re.compile(r"(^|_)(only|no|without|skip|omit)(_|$)")
# Required arguments of a constructor that count something, and other widths.
COUNT_PATTERN = re.compile(r"(\w+_)?(n|num|nb)_[a-z_]+s$|[a-z]+_(num|count)$")
WIDTH_PATTERN = re.compile(
    r"(^|_)(dim|size|width|features|channels|hiddens|planes)(_\w)?$|^dim_[a-z]+$"
    r"|^(inp|oup|inplanes|ch)$|^(?-i:d[A-Z])$",
    re.IGNORECASE,
)
OPTIONAL_WIDTH_PATTERN = re.compile(
    r"dim$|(^|_)(width|channels?|features?|feats?|hiddens?|units|embed|emb|model"
    r"|(?<!kernel_)size)$",
    re.IGNORECASE,
)
# Those of a context, also where their defaults differ from the width.
OUTER_WIDTH_PATTERN = re.compile(
    r"(?!(context|ctx|memory)_size$)"  # of these, it is as often a number of tokens
    r"(context|ctx|cross\w*|encoder|enc|memory|source|src|text|txt)_"
)
# Those within a feed-forward network, whose large defaults would only cost time.
FEED_FORWARD_PATTERN = re.compile(
    r"intermediate_(dim|size)|d_?(ff|inner|ffn?)|ffn?_(\w+_)?(dim|size|width|hidden\w*)"
    r"|(mlp|inner|feed_?forward)_(hidden_)?(dim|size|width)|dim_(ff|feedforward|mlp)"
    r"|feedforward_dim|fc_dim"
)
# Values for required arguments of a constructor, by their names, or by their types.
GUESSED_VALUES = {
    r"ratio|alpha|slope|temp|scale|factor|^init": "1.0",
    r"(^|_)eps(ilon)?$": "1e-5",
    r"resolution|^(img|image|input|feat\w*|map)_(size|shape)$": "(3, 3)",
    r"kernel": "3",
    r"stride|dilation|depth|layers$|^n(um)?_layer$|groups$": "1",
    r"norm_layer": "torch.nn.LayerNorm",
    r"act_layer": "torch.nn.GELU",
    r"(^|_)act(ivation)?(_fn|_func(tion)?)?$": "torch.nn.functional.gelu",
    r"norm(alized)?_shape|^ffn?_num": "{d_model}",
    r"^(d_?ff|ff(n|_size|_dim)?|c(_\w+|\d)?|d(_[a-z]+|\d))$": "{d_model}",
}
GUESSED_TYPES: dict[Any, str] = {int: "2", float: "1.0", bool: "False"}
# As a file has them that imports `annotations` from the future.
GUESSED_TYPES |= {kind.__name__: text for kind, text in GUESSED_TYPES.items()}
GUESSED_TYPES[inspect.Parameter.empty] = "2"
# Weights and biases that a function takes, with their shapes.
FUSED, SINGLE = "(qkv|attn|in(_proj)?)", "(q(uery)?|k(ey)?|v(alue)?|o(ut|utput)?|proj)"
WEIGHT_SHAPES = {
    rf"(w|weight)_?{FUSED}|{FUSED}_?(w|weight)": [
        "{d_model}, 3 * {d_model}",
        "3 * {d_model}, {d_model}",
    ],
    rf"(w|weight)_?{SINGLE}|{SINGLE}(_proj)?_?(w|weight)": ["{d_model}, {d_model}"],
    rf"(b|bias)_?{FUSED}|{FUSED}_?(b|bias)": ["3 * {d_model}"],
    rf"(b|bias)_?{SINGLE}|{SINGLE}(_proj)?_?(b|bias)": ["{d_model}"],
}
WEIGHT_PATTERN = re.compile("|".join([*WEIGHT_SHAPES, "params", "weights"]), re.I)
# Required arguments of `forward` that are neither inputs nor masks, and what is tried.
PER_ITEM = "torch.ones({batch_size}, {d_model})"
ONE_BAG = "(0 * torch.arange({length})){device}"
PARENTS_PATTERN = re.compile(r"(\w+_)?parents?(_(ids?|idx|ind(ex|ices)))?")
# Of a pool of pages, each item has a part.
PAGES_OF_ITEM = [
    f"torch.arange({pages})[:{{batch_size}} * ({pages} // {{batch_size}})]"
    ".unflatten(0, ({batch_size}, -1)).flip(0){device}"
    for pages in (320, 128, 64)
]
EXTRA_ARGUMENTS = {
    # The first token stands for the only image.
    r"(media|image|img|visual)_(locations?|markers?|marks)": (
        "(torch.arange({length}) == 0).expand({batch_size}, -1){device}",
    ),
    # Of deformable attention, with one level: each query samples around the center.
    # The reach of a band or of a convolution, as a number.
    r"radius|reach|half_window|look_?back|left_context": ["2"],
    r"kernel_size": ["3"],
    REFERENCE_PATTERN.pattern: [
        "torch.full(({batch_size}, {length}, 1, 2), 0.5){dtype}",
        "torch.full(({batch_size}, {length}, 2), 0.5){dtype}",
    ],
    MAP_SHAPES_PATTERN.pattern: [
        "[(1, {k_len})]",
        "torch.tensor([[1, {k_len}]]){device}",
    ],
    r"(\w+_)?level_start_ind(ex|ices)": ["torch.tensor([0]){device}"],
    # The latter of both is for the pixels behind a class token.
    r"h|height|(n_?|num_?)?rows|(grid|patch)_h": ["{rows}", "1"],
    r"w|width|(n_?|num_?)?(cols|columns)|(grid|patch)_w": [
        "{columns}",
        "{length} - 1",
    ],
    r"((\w+_)?(size|shape|resolution)|hw|thw|grid)s?(_hw)?": [
        "({rows}, {columns})",
        "(1, {rows}, {columns})",
        "(1, {length} - 1)",  # behind a class token
        "(1, 1, {length} - 1)",
    ],
    r"(atom|node|residue|token)_?types?(_ids)?|types|atomic_num(ber)?s?": [
        "(0 * torch.arange({length})).expand({batch_size}, -1){device}",
    ],
    r"bonds?|(bond|edge|relation)_(types?|kinds?)": [
        "torch.full(({batch_size}, {length}, {length}), 1){device}",
    ],
    r"t|f|(num_?|n_?)?frames|time": ["1", PER_ITEM],
    r"(?-i:B)|bsz?|batch_?size": ["{batch_size}"],
    r"res(idual)?|short_?cut|skip|identity|input_tensor": ["torch.zeros_like({query})"],
    # Of a tree of drafts: each token is the child of the one before.
    PARENTS_PATTERN.pattern: [
        "(torch.arange({length}) - 1).expand({batch_size}, -1){device}",
        "(torch.arange({length}) - 1){device}",
    ],
    # To which bag or graph each token belongs: all to one.
    r"batch|((slide|bag|batch|graph|set|segment|group|sample)_?"
    r"(ids?|idx|ind(ex|ices)|vec(tor)?))": [ONE_BAG],
    r"cu_?seq_?len\w*(?<!_kv)(?<!_k)": ["torch.tensor([0, {length}])"],
    r"cu_?seq_?len\w*": ["torch.tensor([0, {k_len}])"],
    r"max_?(seq_?)?len\w*(?<!_kv)(?<!_k)": ["{length}"],
    r"max_?(seq_?)?len\w*": ["{k_len}"],
    r"(\w+_)?sinks?": ["torch.zeros({heads})"],
    r"(\w+_)?window(_len(gth)?)?": ["4"],
    # Encodings of all relative positions, as in Transformer-XL.
    r"r": [
        "torch.zeros(2 * {length}, {batch_size}, {d_model})",
        "torch.zeros_like({query})",
    ],
    r"(rel_|relative_)?pos(ition(al)?)?_?(emb(ed(ding)?s?)?|enc(oding)?s?)|(p|r)e": [
        "distance_encoding({length}, {d_model}){dtype}",
        "torch.zeros_like({query})",
        PER_ITEM,
    ],
    r"(page|block)_(tables?|ids|ind(ex|ices)|map(ping)?)|pages": PAGES_OF_ITEM,
    r"senders?": ["torch.cartesian_prod(*[torch.arange({length})] * 2).T[0]"],
    r"receivers?": ["torch.cartesian_prod(*[torch.arange({length})] * 2).T[1]"],
    r"edge_index": ["torch.cartesian_prod(*[torch.arange({length})] * 2).T"],
    r"(\w+_)?(prev|attention|attn)_(\w+_)?weights(_\w+)?|alignments?": [
        "torch.zeros({batch_size}, {length})",
        "torch.zeros({batch_size}, 1, {length})",
        "torch.zeros({batch_size}, 2, {length})",
    ],
    r"(\w+_)?(alibi|bias|pair\w*)": [
        f"torch.zeros({sizes})"
        for sizes in (
            "{batch_size}, {heads}, {length}, {length}",
            "{batch_size} * {heads}, 1, {length}",
            "{heads}, {length}, {length}",
            "{length}, {length}",
            "{batch_size}, {length}, {length}, {d_model}",
        )
    ],
    r"(proj(ected)?|processed|precomputed)_\w+": ["{query}"],
    CACHE_PATTERN.pattern: ["{{}}", ""],
}
# The places that a server has for its sequences, and which each item has.
SLOT_PATTERN = re.compile(
    r"((cache|kv)_?)?slots?(_(ids?|idx|ind(ex|ices)|mapping))?|slot_of_\w+"
    r"|(beam|cache|conversation|req(uest)?|row|seq(uence)?|session|stream|user)s?"
    r"_(ids?|idx|ind(ex|ices))"
)
SLOT_OF_ITEM = "torch.arange({batch_size}).flip(0){device}"
UNKNOWN_ARGUMENT = [
    PER_ITEM,
    "torch.zeros_like({query})",
    "torch.zeros({batch_size}, {length}, {length})",
    "torch.zeros({batch_size}, {length}, {length}, {d_model})",
    "torch.ones(1, {batch_size}, {d_model})",
]
# Kinds of pairs, of all tokens or of those behind a virtual first one.
UNKNOWN_PAIRS = [
    f"torch.zeros({shape}, dtype=torch.long)"
    for shape in (
        "{batch_size}, {length}, {length}",
        "{batch_size}, {length} - 1, {length} - 1",
        "{length}, {length}",
    )
]
IDS_PATTERN = re.compile(r"(^|_)(ids?|idx|index|indices)$")
INTEGERS_PATTERN = re.compile(rf"{IDS_PATTERN.pattern}|(^|_)(tables?|tokens?)$")
MASK_PATTERN = re.compile(
    r"(?<!head_)(?<!edge_)mask|^(key_|kv_|is_)?pad(ding|ded|s)?$|^(is_)?valid$|^adj"
    r"|(?<![hxyz]s)_pad(ding)?$"  # those of ESPnet are padded states
    r"|^(hide|hidden_keys|keep|allow(ed)?|visible|block(ed)?|ignored?|(\w+_)?exists?)$"
    r"|^(is_)?(ok|real)$|^is_(atom|node|object|seen|token|word)s?$|^cardinalit(y|ies)$"
    r"|^((un)?(visited|available|observed)|(in)?feasible|invalid|missing|present)$"
    r"|^(n|num)_(valid|real|(?!(chunk|graph|group|head|iter|layer|level|step)s)[a-z]+s)$"
    r"|^(attn|attention|attn_mask|score)_bias$|^bias$"
    r"|(?<!cu_seq)(?<!max_)(?<!prefix_)len(gth)?s?$|^n(um)?_frames$",
    re.IGNORECASE,
)
# A mask that is a number of keys.
LENGTHS_PATTERN = re.compile("len|cardinalit|^(n|num)_")
# Marks of the tokens that attend to all others, and are attended to by all.
GLOBAL_PATTERN = re.compile("global_(att|mask|token)|is_global")
# What has one meaning: the keys that are padding.
KEY_PADDING_PATTERN = re.compile(r"(^|_)key_padding_mask$", re.IGNORECASE)
# Optional arguments that hide some keys from some queries, but are no masks.
OTHER_PATTERN = re.compile(
    r"mask|(^|_)ids?$|seg|doc|group|prior|cache|past|mem|state|out"
)
CAUSAL_PATTERN = re.compile(r"^(is_)?causal$")


# The most pixels of an image with which calls are tried.
LONGEST_IMAGE = 400


def parameters_of(function: Any) -> list[inspect.Parameter]:
    r"""Parameters of a function, or of the `forward` of a module or module class.

    Empty for a builtin, which has no signature.

    >>> from torch import nn
    >>> [parameter.name for parameter in parameters_of(nn.Linear)]
    ['input']
    """
    called = function.forward if hasattr(function, "forward") else function
    try:
        found = list(inspect.signature(called).parameters.values())
    except ValueError:
        return []
    # Taken from the class, `forward` has `self` as its first parameter.
    return found[1:] if isinstance(function, type) else found


def setters_of_paths(target: Any) -> list[str]:
    r"""Calls of the methods that choose how a module computes, and not what.

    >>> class Attention:
    ...     def set_slice(self, slice_size): ...
    ...     def enable_flash(self): ...
    >>> setters_of_paths(Attention)
    ['enable_flash()', 'set_slice(1)', 'set_slice(2)', 'set_slice(3)']
    """
    calls = []
    for name in filter(PATH_SETTER_PATTERN.fullmatch, dir(target)):
        parameters = parameters_of_method(target, name)
        required = [p for p in parameters if p.default is p.empty]
        is_size = "slic" in name or "chunk" in name
        # Of five batch items with three or four heads, one of the sizes leaves a rest.
        sizes = ["1", "2", "3"] if is_size else ["True"]
        takes_one = len(required) == 1 or (is_size and len(parameters) == 1)
        given = sizes if takes_one else [""]
        calls += [f"{name}({text})" for text in given if len(required) < 2]
    return calls


def parameters_of_method(target: Any, name: str) -> list[inspect.Parameter]:
    """Parameters of a method of a module or module class, without `self`."""
    method = inspect.getattr_static(target, name)
    if isinstance(method, staticmethod | classmethod) or not callable(method):
        return []
    return list(inspect.signature(method).parameters.values())[1:]


def with_options(
    function: Any, first: Iterable[inspect.Parameter]
) -> inspect.Signature:
    r"""A signature of these parameters, and of those of a function with a default.

    >>> def attend(query, pages, scale=None): ...
    >>> with_options(attend, [parameters_by_name(attend)["query"]])
    <Signature (query, scale=None)>
    """
    optional = [p for p in parameters_of(function) if p.default is not p.empty]
    return inspect.Signature([*first, *optional])


def parameters_by_name(function: Any) -> dict[str, inspect.Parameter]:
    """The same parameters by their names."""
    return {parameter.name: parameter for parameter in parameters_of(function)}


def may_be_context(parameter: inspect.Parameter) -> bool:
    r"""Whether an argument may be attended to: a tensor of no other known meaning.

    >>> forward = lambda x, txt, mask, n: None
    >>> [p.name for p in parameters_of(forward) if may_be_context(p)]
    ['x', 'txt', 'n']

    The name of a size is one of a tensor if the annotation says so.
    """
    name = parameter.name
    is_tensor = "Tensor" in str(parameter.annotation)
    return not (
        any(re.fullmatch(p, name, re.IGNORECASE) for p in EXTRA_ARGUMENTS)
        or CACHE_PATTERN.match(name)
        or WEIGHT_PATTERN.fullmatch(name)
        or MASK_PATTERN.search(name)
        or POSITION_PATTERN.search(name)
        or (value_of(name) and not is_tensor)
        or parameter.annotation in (int, float, bool, str, dict)
    )


def required_by_name(parameters: Iterable[inspect.Parameter]) -> dict[str, bool]:
    r"""The name of each single parameter, and whether it is required.

    >>> required_by_name(parameters_of(lambda query, mask=None, *more: None))
    {'query': True, 'mask': False}
    """
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    single = (each for each in parameters if each.kind not in variadic)
    return {each.name: each.default is inspect.Parameter.empty for each in single}


def argument_values(required: Mapping[str, bool]) -> dict[str, str]:
    r"""The value of each constructor argument; "" where it is unknown.

    The first argument of an attention is its width, if no other is: a class that takes
    `nx` and `n_head` is built like one that takes `d_model` and `n_head`.

    >>> argument_values({"nx": True, "n_head": True})
    {'nx': '{d_model}', 'n_head': '{heads}'}
    """
    values = {name: value_of(name) for name in required}
    for name in filter(CONTEXT_WIDTH_PATTERN.fullmatch, required):
        if required[name]:
            values[name] = "{d_model}"
    for name in required:
        if required[name] and not values[name]:
            values[name] = guessed_value(name)
    # A number of features is a width, too.
    for name in filter(WIDTH_PATTERN.search, required):
        if required[name] and not values[name]:
            values[name] = "{d_model}"
    for name in filter(COUNT_PATTERN.match, required):
        if required[name] and not values[name]:
            values[name] = "2"
    if {"height", "width"} <= {*required}:
        values |= dict.fromkeys(("height", "width"), "3")  # of an image
    first = next(iter(required), "")
    is_config = CONFIG_PATTERN.search(first)
    if required.get(first) and not values[first] and not is_config:
        if "{heads}" in values.values() and "{d_model}" not in values.values():
            values[first] = "{d_model}"
    return values


def small_side(parameter: inspect.Parameter, value: str) -> str:
    r"""A small value for an optional side of an image, or for levels; "" if it is none.

    `value` is the one that `argument_values` has for it.

    >>> def build(resolution=14, height=14, feat_size=(14, 14)): ...
    >>> [small_side(p, "") for p in inspect.signature(build).parameters.values()]
    ['3', '', '(3, 3)']
    """
    if re.fullmatch(r"((n|num)_)?(feature_)?levels", parameter.name):
        return "1"  # of feature maps, of which deformable attention takes several
    if value == ROTATED_SHARE and type(parameter.default) is float:
        return value
    is_side = SIDE_PATTERN.fullmatch(parameter.name) or (
        parameter.name in ("height", "width") and value == "3"
    )
    if not is_side:
        return ""
    default = parameter.default
    is_pair = type(default) is tuple and [*map(type, default)] == [int, int]
    return "(3, 3)" if is_pair else "3" if type(default) is int else ""


def stated_sides(target: Any) -> list[tuple[int, ...]]:
    r"""Rows and columns of images by the sides that a class or a module states.

    Those of a video are one row.

    >>> class Attention:
    ...     def __init__(self, dim, reso=6, img_size=(2, 5), window_size=(2, 3, 4)): ...
    >>> stated_sides(Attention)
    [(6, 6), (2, 5), (1, 24)]
    """
    shapes = stated_shapes(target)
    pairs = [n if len(n) == 2 else (1, math.prod(n)) for n in shapes]
    return [n for n in dict.fromkeys(pairs) if 1 < math.prod(n) <= LONGEST_IMAGE]


def stated_volumes(target: Any) -> list[tuple[int, ...]]:
    r"""Frames, rows and columns of videos by the sides that a class or a module states.

    >>> class Attention:
    ...     def __init__(self, dim, img_size=(2, 5), window_size=(2, 3, 4)): ...
    >>> stated_volumes(Attention)
    [(2, 3, 4)]
    """
    shapes = dict.fromkeys(n for n in stated_shapes(target) if len(n) == 3)
    return [n for n in shapes if 1 < math.prod(n) <= LONGEST_IMAGE]


def stated_shapes(target: Any) -> list[tuple[int, ...]]:
    """The two or three sides that arguments or attributes of a usual name state."""
    if isinstance(target, type):
        parameters = inspect.signature(target).parameters
        found = {name: parameter.default for name, parameter in parameters.items()}
    else:
        parts = target.modules() if hasattr(target, "modules") else ()
        found = {n: value for part in parts for n, value in vars(part).items()}
    sides = [n for name, n in found.items() if FIXED_SIDE_PATTERN.fullmatch(name)]
    return [
        shape
        for shape in ((n, n) if type(n) is int else n for n in sides)
        if type(shape) is tuple and [*map(type, shape)] in ([int] * 2, [int] * 3)
    ]


def needed_default(parameter: inspect.Parameter, value: str) -> str:
    r"""A value for an argument that is None by default, but needed; "" if unknown.

    `value` is the one that `argument_values` has for it.

    >>> def build(layer_idx=None, norm_layer=None, softcap=None): ...
    >>> parameters = inspect.signature(build).parameters.values()
    >>> [needed_default(each, value_of(each.name)) for each in parameters]
    ['0', 'torch.nn.LayerNorm', '']
    """
    guess = value or guessed_value(parameter.name)
    is_plain = guess in ("0", "3", "(3, 3)") or guess.startswith("torch.nn.")
    return guess if parameter.default is None and is_plain else ""


PAIR_PATTERN = re.compile(r"(typing\.)?tuple\[int, int\]", re.IGNORECASE)


def pair_of(target: Any, name: str, value: str) -> str:
    r"""The value of a size, twice if the code takes it for one of rows and columns.

    >>> def build(size, side_size):
    ...     rows, columns = size
    ...     n, m = side_size, side_size
    >>> [pair_of(build, name, "{d}") for name in ("size", "side_size")]
    ['(3, 3)', '{d}']
    """
    if not re.search("size|shape|resolution|grid", name):
        return value  # a local variable of this name, such as a list of heads
    source = source_with_bases(target)
    kinds = inspect.get_annotations(getattr(target, "__init__", target))
    is_named_pair = PAIR_PATTERN.fullmatch(str(kinds.get(name)))
    unpacked = rf"\w, *(self\.)?\w+ = (self\.)?{name} *(#|$)"
    is_pair = is_named_pair or re.search(
        rf"\b{name}\[[01]\]|{unpacked}", source, re.MULTILINE
    )
    if value.startswith("("):
        return value if is_pair else value.strip("()").split(",")[0]
    return "(3, 3)" if is_pair else value


def tied_widths(
    parameters: Mapping[str, inspect.Parameter],
    values: Mapping[str, str],
    options: Any,
    tie: bool = False,
) -> dict[str, str]:
    r"""Optional arguments of a constructor that are the width under another name.

    Their number, by default or as it is given, is that of the width, or the width of a
    context. If the width has no known name, it is the first such argument. With `tie`,
    all widths are the same. The width within a feed-forward network is made small.

    >>> from types import SimpleNamespace
    >>> def build(dim=64, heads=4, text_dim=48, out_size=64, kernel_size=64): ...
    >>> parameters = inspect.signature(build).parameters
    >>> values = argument_values(required_by_name(parameters.values()))
    >>> tied_widths(parameters, values, SimpleNamespace(d_model=None, init_args={}))
    {'text_dim': '{d_model}', 'out_size': '{d_model}'}
    """
    given = options.init_args
    numbers = {
        name: given.get(name, parameter.default)
        for name, parameter in parameters.items()
        if type(given.get(name, parameter.default)) is int
    }
    widths = [
        numbers[n] for n, v in values.items() if v == "{d_model}" and n in numbers
    ]
    candidates = [
        name
        for n, (name, number) in enumerate(numbers.items())
        if not values[name] and number >= 8 and "vocab" not in name
        if OPTIONAL_WIDTH_PATTERN.search(name)
        or CONTEXT_WIDTH_PATTERN.fullmatch(name)
        or FEED_FORWARD_PATTERN.fullmatch(name)
        or (n == 0 and "{d_model}" not in values.values() and name in [*parameters][:1])
    ]
    if "{d_model}" not in values.values() and "{heads}" in values.values():
        others = (n for n in candidates if not FEED_FORWARD_PATTERN.fullmatch(n))
        widths += [numbers[name] for name in others][:1]
    width = options.d_model or next(iter(widths), None)
    return {
        name: "{d_model}"
        for name in candidates
        if numbers[name] == width
        or (
            name not in given
            and (
                tie
                or OUTER_WIDTH_PATTERN.match(name)
                or FEED_FORWARD_PATTERN.fullmatch(name)
            )
        )
    }


def first_choice(source: str, name: str) -> str:
    r"""The first string that the code compares an argument with; "" if none.

    >>> first_choice('if method not in ["dot", "general"]: ...', "method")
    "'dot'"
    """
    compared = rf"\b{name} (?:==|(?:not )?in) [\[({{]*[\"'](\w+)[\"']"
    found = re.search(compared, source)
    return repr(found[1]) if found else ""


def guessed_value(name: str) -> str:
    r"""A value for a required constructor argument that is no size; "" if unknown.

    >>> guessed_value("mlp_ratio"), guessed_value("kernel_size"), guessed_value("steps")
    ('1.0', '3', '')
    """
    found = (v for p, v in GUESSED_VALUES.items() if re.search(p, name, re.IGNORECASE))
    return next(found, "")


def value_of(name: str) -> str:
    r"""The value of a constructor argument or of a field of a config; "" if unknown.

    >>> value_of("nb_head"), value_of("size_per_head"), value_of("n_query_groups")
    ('{heads}', '{d_k}', '{kv_heads}')
    """
    if name not in ARGUMENT_VALUES and WINDOW_PATTERN.fullmatch(name):
        return "{window}"
    found = ARGUMENT_VALUES.get(name) or ARGUMENT_VALUES.get(name.lower(), "")
    others = (value for p, value in SIZE_PATTERNS.items() if re.search(p, name.lower()))
    return found or next(others, "")


# A query, keys or values of something.
ROLE_PATTERN = re.compile("_(q(uer(y|ies))?|k(eys?)?|v(alues?)?)$")


def find_inputs(required: Mapping[str, bool]) -> tuple[str, ...]:
    r"""The names of one input, of input and context, or of query, key and value.

    >>> find_inputs({"x": True, "mask": False})
    ('x',)
    >>> find_inputs({"hidden_states": True, "encoder_hidden_states": True})
    ('hidden_states', 'encoder_hidden_states')
    >>> find_inputs({"xyz": True, "features": True})
    ('features',)
    >>> find_inputs({"key": True, "value": True, "query": True})
    ('query', 'key', 'value')
    >>> find_inputs({"q": True, "k_all": True, "v_all": True, "k": False, "v": False})
    ('q', 'k_all', 'v_all')
    >>> find_inputs({"grid_q": True, "station_k": True, "station_v": True})
    ('grid_q', 'station_k', 'station_v')
    >>> find_inputs({"q": True, "mk": True, "mv": True})
    ('q', 'mk', 'mv')
    """
    order = list(required)
    needed = [
        name
        for name, is_required in required.items()
        if is_required
        and not WEIGHT_PATTERN.fullmatch(name)
        and not MASK_PATTERN.search(name)
        and not POSITION_PATTERN.search(name)
        # A history that is required is that of a user, and no cache.
        and (name.endswith("history") or not CACHE_PATTERN.match(name))
        and not REFERENCE_PATTERN.fullmatch(name)
    ]
    # Behind an input, such names are those of sizes, or of integers.
    needed = [
        n
        for n in needed
        if n == needed[0] or (n not in ARGUMENT_VALUES and not IDS_PATTERN.search(n))
    ]
    roles = [n.lower().strip("x_in")[:1] for n in needed[:3]]
    ends = [n.rpartition("_")[2][:1] for n in needed[:3] if ROLE_PATTERN.search(n)]
    short = [n[-1].lower() for n in needed[:3] if len(n) < 3]
    are_qkv = [*"qkv"] in (roles, ends, short)
    for triple in INPUT_NAMES:
        if set(triple) <= set(order) and (required[triple[0]] or order[0] in triple):
            # Key and value may default to the query, or be those of new tokens, beside
            # the ones that are required.
            return tuple(needed[:3]) if are_qkv else triple
    if are_qkv:
        return tuple(needed[:3])
    if len(needed) >= 2 and CONTEXT_PATTERN.search(needed[1]):
        return tuple(needed[:2])
    return tuple(needed[:1] or order[:1])


def kind_flags(target: Any) -> list[str]:
    r"""The flags, off by default, that choose self-attention or that to a context.

    >>> class Attention:
    ...     def __init__(self, dim, encoder_decoder_attention=False, bias=False): ...
    >>> kind_flags(Attention), kind_flags(len)
    (['encoder_decoder_attention'], [])
    """
    arguments = inspect.signature(target).parameters if isinstance(target, type) else {}
    return [
        name
        for name, argument in arguments.items()
        if argument.default is False and KIND_PATTERN.fullmatch(name)
    ]


def length_limits(target: type) -> list[str]:
    r"""The arguments of a constructor that limit the length of a sequence.

    A size of blocks is none, though some models name their limit so.

    >>> class Attention:
    ...     def __init__(self, dim, max_len=512, block_size=64): ...
    >>> length_limits(Attention)
    ['max_len']
    """
    limits = [name for name, value in ARGUMENT_VALUES.items() if value == "320"]
    arguments = inspect.signature(target).parameters
    return [n for n in arguments if n in limits and n != "block_size"]


# The length of the sequences in training, beyond which scores or angles are scaled.
TRAINED_PATTERN = re.compile(
    r"((pre)?train\w*|original|base|native)_(seq\w*_)?(max_)?(len(gth)?|context|ctx|tokens)"
    r"(_length|_size|_len)?|n_(train|ctx_train)|original_max_position\w*"
)


def trained_lengths(target: Any) -> list[str]:
    r"""The arguments of a constructor that are the length of sequences in training.

    >>> class Attention:
    ...     def __init__(self, dim, train_length=512, max_len=512): ...
    >>> trained_lengths(Attention)
    ['train_length']
    """
    arguments = inspect.signature(target).parameters if isinstance(target, type) else ()
    return [*filter(TRAINED_PATTERN.fullmatch, arguments)]


def weights_flags(adapter: Any) -> list[dict[str, str]]:
    r"""Arguments that ask for the attention weights, or where they are usual, for none.

    >>> from types import SimpleNamespace
    >>> def attend(x, need_weights=True): ...
    >>> weights_flags(SimpleNamespace(target=attend, weights_args={}, call_args={}))
    [{'need_weights': 'False'}]
    """
    if adapter.weights_args:
        return [dict(adapter.weights_args)]
    parameters = parameters_of(adapter.target)
    flags = flags_of_weights(parameters, True, adapter.call_args)
    return [{name: "False"} for name in flags]


def flags_of_weights(
    parameters: Iterable[inspect.Parameter], default: bool, given: Mapping[str, Any]
) -> list[str]:
    """The flags of this default that ask for the weights, without those `given`."""
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is default
        and WEIGHTS_FLAG_PATTERN.search(parameter.name)
        and parameter.name not in given
    ]


def optional_tensors(adapter: Any) -> list[str]:
    """The optional arguments that are no mask and no cache, and may be tensors."""
    known = {*adapter.inputs, *adapter.position_args, *adapter.call_args}
    known |= {mask.name for mask in adapter.masks}
    return [
        parameter.name
        for parameter in parameters_of(adapter.target)
        if parameter.default is None and parameter.name not in known
        if not CACHE_PATTERN.match(parameter.name)
        if not is_annotated_number(parameter)
        # The output of an encoder may be given, and `out` is where to write.
        and (
            not re.search(r"mask|cache|past|^out", parameter.name)
            or GLOBAL_PATTERN.search(parameter.name)
        )
    ]


def is_annotated_number(parameter: inspect.Parameter) -> bool:
    r"""Whether a parameter is annotated as a number, and not as a tensor.

    >>> def attend(x, scale: float | None = None, bias: "Tensor | None" = None): ...
    >>> [is_annotated_number(p) for p in parameters_of(attend)]
    [False, True, False]
    """
    kinds = {*re.findall(r"\w+", str(parameter.annotation))}
    return bool(kinds & {"int", "float"}) and "Tensor" not in kinds


def takes_tree(target: Any) -> bool:
    r"""Whether an argument tells of which token of a tree of drafts each is a child.

    >>> def attend(x, parents=None): ...
    >>> takes_tree(attend), takes_tree(print)
    (True, False)
    """
    return any(map(PARENTS_PATTERN.fullmatch, parameters_by_name(target)))


def is_list(target: Any, name: str) -> bool:
    r"""Whether the code takes an argument for a list, and goes through it.

    >>> def attend(x, maps, image): return [m.flatten(2) for m in maps], image.mean()
    >>> is_list(attend, "maps"), is_list(attend, "image")
    (True, False)
    """
    source = source_of(getattr(target, "forward", target))
    through = rf"\bfor \w+(, \w+)* in (zip\(([\w.]+, )?|enumerate\()?{name}\b(?!\.)"
    return re.search(through, source) is not None


def is_given_to_layer(target: Any, name: str) -> bool:
    r"""Whether the code calls a layer with an argument: a tensor, whatever its name is.

    >>> def forward(self, text, frames, t): return self.norm(frames), t + 1
    >>> [is_given_to_layer(forward, name) for name in ("frames", "t")]
    [True, False]
    """
    source = source_of(getattr(target, "forward", target))
    return re.search(rf"\bself\.\w+\({name}\)", source) is not None


def packings(target: Any, name: str) -> list[str]:
    r"""How queries, keys and values may be packed into one argument, as source text.

    >>> def attend(q, kv): ...
    >>> packings(attend, "kv")[0]
    'torch.stack([{0}] * 2, 2)'
    """
    parameter = parameters_by_name(target).get(name)
    annotation = str(parameter.annotation) if parameter else ""
    is_sequence = re.match(r"(typing\.)?(list|tuple|sequence)\[", annotation, re.I)
    if is_sequence and "Tensor" in annotation:
        return ["[{0}] * 3", "({0}, {0})"]
    found = re.search("(qkv)|kv", name, re.IGNORECASE)
    count = 3 if found and found[1] else 2
    return [f"torch.stack([{{0}}] * {count}, {n})" for n in (2, 0, 1) if found]


def input_key(target: Any, name: str) -> str:
    r"""The first key that the code reads from an input that is a dict; "" if none."""
    source = source_of(getattr(target, "forward", target))
    keys = re.findall(rf"\b{re.escape(name)}\[[\"'](\w+)[\"']\]", source)
    return keys[0] if keys else ""


def names_in_kwargs(target: Any) -> list[str]:
    r"""The names that the code reads from the other keyword arguments of a call."""
    others = [p.name for p in parameters_of(target) if p.kind is p.VAR_KEYWORD]
    source = source_of(getattr(target, "forward", target)) if others else ""
    read = rf"\b{''.join(others)}(?:\.get\(|\.pop\(|\[)[\"'](\w+)[\"']"
    return re.findall(read, source) if others else []


# Axes as the code names them: "rows, columns, batch, d = x.shape". Three may be those
# of an image whose pixels are a sequence by now.
UNPACKED_AXES = r"^\s*\(?((?:\w+, *){{3,}}\w+)\)? *= *{}\.(?:shape|size\(\))"


def unpacked_axes(target: Any, name: str) -> tuple[str, ...]:
    r"""The names that the code gives to four axes or more; empty if it gives none.

    >>> pattern = UNPACKED_AXES.format("x")
    >>> re.match(pattern, "    rows, columns, batch_size, _ = x.size()")[1]
    'rows, columns, batch_size, _'
    """
    source = source_of(getattr(target, "forward", target))
    found = re.search(UNPACKED_AXES.format(re.escape(name)), source, re.MULTILINE)
    return tuple(re.findall(r"\w+", found[1])) if found else ()


def unpacked_parts(target: Any, name: str) -> list[str]:
    """The names of the parts into which the code unpacks an input; empty if none."""
    source = source_of(getattr(target, "forward", target))
    unpacked = rf"^\s*\(?((?:\w+, *)+\w+)\)? *= *{re.escape(name)} *(?:#|$)"
    found = re.search(unpacked, source, re.MULTILINE)
    return [f"`{part}`" for part in re.findall(r"\w+", found[1])] if found else []


def constructor_sizes(target: Any, given: Mapping[str, str]) -> dict[str, str]:
    r"""The sizes of a class by the names of the arguments that set them.

    >>> class Attention:
    ...     def __init__(self, c_a, c_z=32, name="a"): ...
    >>> constructor_sizes(Attention, {"c_a": "{d_model}"})
    {'c_a': '{d_model}', 'c_z': '32'}

    Those of a dict of the class or its file are sizes, too, if nothing else has their
    names.
    """
    if not isinstance(target, type):
        return {}
    file = sys.modules.get(target.__module__)  # none of a class that `exec` made
    sizes = {
        name: str(value)
        for owner in (file, target)
        for each in (vars(owner).values() if owner else ())
        if isinstance(each, dict) and {*map(type, each)} == {str}
        for name, value in each.items()
        if name.isidentifier() and type(value) is int
    }
    parameters = inspect.signature(target).parameters.items()
    sizes |= {name: str(parameter.default) for name, parameter in parameters}
    sizes |= given
    is_size = re.compile(r"\d+|{(d_model|d_k|heads)}").fullmatch
    return {name: text for name, text in sizes.items() if is_size(text)}


def dict_template(target: Any, name: str) -> str:
    """Source text for a dict of weights, by the keys that the code reads from it."""
    source = source_with_bases(target)
    keys = re.findall(rf"\b{re.escape(name)}\[[\"'](\w+)[\"']\]", source)
    pairs = [(key, extra_templates(key, None)[0]) for key in dict.fromkeys(keys)]
    text = ", ".join(f"{key!r}: {value}" for key, value in pairs if value)
    return f"{{{{{text}}}}}" if text else ""


def context_length(target: Any) -> int:
    r"""How many tokens of the past a constructor says that are kept; 0 if it does not.

    >>> class Attention:
    ...     def __init__(self, dim, left_context=16): ...
    >>> context_length(Attention)
    16
    """
    pattern = r"left_?(context|frames)|history(_len\w*)?|(mem|cache|past)_?(len|frames)"
    parameters = (
        inspect.signature(target).parameters if isinstance(target, type) else {}
    )
    for name, parameter in parameters.items():
        if re.fullmatch(pattern, name) and type(parameter.default) is int:
            return int(parameter.default)
    return 0


def dropout_of_function(function: Any) -> str:
    r"""The argument of a function that is a dropout probability; "" if there is none.

    >>> dropout_of_function(lambda query, dropout_p=0.0: None)
    'dropout_p'
    """
    for parameter in parameters_of(function):
        is_number = isinstance(parameter.default, float)
        if is_number and ARGUMENT_VALUES.get(parameter.name) == "0.1":
            return parameter.name
    return ""


def dropout_flags(function: Any) -> dict[str, bool]:
    r"""The flags of a function with which it drops, and each weight independently.

    >>> dropout_flags(lambda query, deterministic=True, broadcast_dropout=True: None)
    {'deterministic': False, 'broadcast_dropout': False}
    """
    arguments = required_by_name(parameters_of(function))
    training = {n: flag for n, flag in TRAINING_FLAGS.items() if n in arguments}
    return training | dict.fromkeys(filter(SHARED_PATTERN.match, arguments), False)


def dropout_arguments(target: Any) -> dict[str, str]:
    r"""The arguments of a constructor that switch dropout off, and their values.

    >>> from torch import nn
    >>> dropout_arguments(nn.MultiheadAttention)
    {'dropout': '0.0'}
    """
    if not isinstance(target, type):
        return {}
    arguments = inspect.signature(target).parameters
    found = {
        name: "0.0"
        for name, argument in arguments.items()
        if ARGUMENT_VALUES.get(name) == "0.1"
        or (type(argument.default) is float and DROP_PATTERN.search(name))
    }
    keep_probabilities = {
        name: "1.0"
        for name, argument in arguments.items()
        # A whole number counts what is kept, such as the best keys.
        if KEEP_PATTERN.fullmatch(name) and type(argument.default) is not int
    }
    return found | keep_probabilities


def position_templates(name: str) -> list[str]:
    """Source texts for an argument that depends on the length; "" for None."""
    if "start_pos" in name:
        return ["{start}"]
    if re.search(r"embed|freqs|rope|rotary|^(cos|sin|cos_?sin)$", name):
        angles = "rotary_table({start}, {stop}, {d_k})"
        # Angles in half precision would be wrong, so the conversion comes last.
        cos, sin = f"{angles}.cos(){{dtype}}", f"{angles}.sin(){{dtype}}"
        complex_numbers = "rotary_complex({start}, {stop}, {d_k}){device}"
        if re.search("(?<!cos)(?<!cos_)(cos|sin)$", name):
            one = cos if name.endswith("cos") else sin
            return [one, f"{one}[None]", f"{one}[..., :{{d_k}} // 2]", ""]
        if "cis" in name:
            pairs = "torch.view_as_real(rotary_complex({start}, {stop}, {d_k})){dtype}"
            return [complex_numbers, pairs, f"{angles}{{dtype}}"]
        # Whole tables, or one of halves, before or behind an axis of heads.
        wholes, *others = [
            f"({cos}{index}, {sin}{index})"
            for index in (
                *("[None]", "", "[None, :, None, :{d_k} // 2]"),
                "[None, :, :{d_k} // 2]",
            )
        ]
        return [wholes, complex_numbers, f"{angles}{{dtype}}", *others]
    if name == "pe":
        return ["rotary_matrices({start}, {stop}, {d_k})[None, None]{dtype}"]
    ids = "torch.arange({start}, {stop}){device}"
    # Small numbers, which are exact in half precision, and near to one another.
    small = ids.replace("){device}", "){device} % 8 / 4")
    axes = f"({small})[None, :, None].expand({{batch_size}}, -1, "
    coordinates = [f"{axes}3){{dtype}}", f"{axes}2){{dtype}}"]
    if COORDINATES_PATTERN.search(name):
        first = f"({small})[:, None, None].expand(-1, {{batch_size}}, 3){{dtype}}"
        return [*coordinates, f"{axes}3).mT{{dtype}}", first]
    return [f"{ids}[None].expand({{batch_size}}, -1)", ids, *coordinates]


def extra_templates(name: str, annotation: Any) -> list[str]:
    r"""Source texts for a required argument that is no input; "" for None.

    A bias is zero, and a vector the same for all batch items: laws that exchange tokens
    or batch items need not know which is whose.

    >>> extra_templates("W", int), extra_templates("layer_past", None)
    (['{columns}', '{length} - 1'], ['{{}}', ''])
    >>> extra_templates("in_proj_bias", None)
    ['seeded_randn(1263, 3 * {d_model}){dtype} * {d_model} ** -0.5']
    """
    of_weights = weight_templates(name)
    if of_weights and "proj" in name:
        return of_weights  # else a bias may be one of scores
    for pattern, texts in EXTRA_ARGUMENTS.items():
        if re.fullmatch(pattern, name, re.IGNORECASE):
            floats = ("torch.zeros", "torch.ones")
            return [text + "{dtype}" * text.startswith(floats) for text in texts]
    if of_weights:
        return of_weights
    if value_of(name) in ("{heads}", "{d_model}"):
        return [value_of(name)]
    if MASK_PATTERN.search(name) or CAUSAL_PATTERN.match(name):
        return [""]
    kinds = {int: "1", float: "1.0", bool: "False"}
    if annotation in kinds:
        return [kinds[annotation]]
    if INTEGERS_PATTERN.search(name) and not SLOT_PATTERN.fullmatch(name):
        return ["", "torch.ones({batch_size}, {length}, dtype=torch.int64){device}"]
    slots = [SLOT_OF_ITEM] if SLOT_PATTERN.fullmatch(name) else []
    unknown = (f"{text}{{dtype}}" for text in UNKNOWN_ARGUMENT)
    return [*slots, "", *unknown, *UNKNOWN_PAIRS]


def weight_templates(name: str) -> list[str]:
    """Source texts for a weight that a function takes; empty where it is none."""
    for pattern, shapes in WEIGHT_SHAPES.items():
        if re.fullmatch(pattern, name, re.IGNORECASE):
            seed = sum(map(ord, name))  # for each weight another
            scale = "{dtype} * {d_model} ** -0.5"
            return [f"seeded_randn({seed}, {shape}){scale}" for shape in shapes]
    return []


def memory_arguments(target: Any) -> list[str]:
    """The optional arguments that may take the tokens before the input."""
    return [
        name
        for name, is_required in required_by_name(parameters_of(target)).items()
        if not is_required and MEMORY_PATTERN.fullmatch(name)
    ]


def part_named(target: Any, name: str) -> type | None:
    """A class of the file that is named as an argument of the constructor of another.

    An instance without arguments may be given, as of `FullAttention` for `attention`.
    """
    module, word = sys.modules.get(target.__module__), name.replace("_", "").lower()
    for each in vars(module).values() if module else ():
        is_part = isinstance(each, type) and hasattr(each, "forward")
        if not is_part or each is target or each.__module__ != target.__module__:
            continue
        if each.__name__.lower().endswith(word):
            parameters = inspect.signature(each).parameters.values()
            if not any(required_by_name(parameters).values()):
                part: type = each
                return part
    return None


def import_source(value: type) -> str:
    """The lines that import a class."""
    return import_of(value.__module__, value.__name__)


def import_of(module: str, name: str) -> str:
    r"""The lines that import a name, also from a file whose name is no identifier.

    >>> print(import_of("03_attention", "Config"))
    import importlib
    <BLANKLINE>
    Config = importlib.import_module('03_attention').Config
    <BLANKLINE>
    """
    if all(part.isidentifier() for part in module.split(".")):
        return f"from {module} import {name}\n"
    imported = f"importlib.import_module({module!r})"
    return f"import importlib\n\n{name} = {imported}.{name}\n"
