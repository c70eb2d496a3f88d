r"""# What names mean

People write attention in their own words, but from a small vocabulary. This is the
dictionary: which argument of a constructor is the number of heads, which submodule is
the projection of the query, which argument of `forward` is a mask.

Source: the names in use on the pages under *As others write it*, in
[PyTorch](https://docs.pytorch.org/docs/stable/nn.html), in Hugging Face's transformers
and in the usual walk-throughs.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

# What the arguments of constructors mean. A number is taken as it is.
SETTINGS = {
    "{d_model}": "d_model d_in d_out embed_dim dim hidden_size num_hiddens n_embd "
    "embed_size emb_size emb_dim model_dim hidden_dim width",
    "{heads}": "heads num_heads n_heads nhead n_head num_attention_heads h",
    "{kv_heads}": "kv_heads num_kv_heads n_kv_heads num_key_value_heads",
    "{d_k}": "d_k head_dim d_head dim_head head_size",
    "32": "context_length block_size max_len max_length max_seq_len seq_len "
    "n_positions max_position_embeddings",
    "0.1": "dropout dropout_prob dropout_p attn_dropout p_dropout",
}
MEANING = {name: text for text, names in SETTINGS.items() for name in names.split()}

INPUTS = (
    ("query", "key", "value"),
    ("queries", "keys", "values"),
    ("q", "k", "v"),
    ("Q", "K", "V"),
)
LIKE_MASK = re.compile(r"mask|len(gth)?s?$", re.IGNORECASE)
FLAG = re.compile(r"^(is_)?causal$")

# Submodules and parameters, without underscores and in lower case.
PROJECTIONS = {
    "query": "q query queries qproj queryproj wq wquery toq qlin qlinear linearq",
    "key": "k key keys kproj keyproj wk wkey tok klin klinear lineark",
    "value": "v value values vproj valueproj wv wvalue tov vlin vlinear linearv",
    "out": "o out output outproj oproj outputproj wo wout toout olin outlin olinear "
    "linearo proj cproj fcout dense projection",
    "fused": "qkv cattn qkvproj toqkv wqkv inproj querykeyvalue",
}
PART = {name: part for part, names in PROJECTIONS.items() for name in names.split()}


def arguments(function: Any) -> list[inspect.Parameter]:
    r"""What a function takes, or the `forward` of a module or of a class of modules.

    Empty for what is built in and has no signature.

    >>> [argument.name for argument in arguments(nn.Linear)]
    ['input']
    """
    called = function.forward if hasattr(function, "forward") else function
    try:
        found = list(inspect.signature(called).parameters.values())
    except ValueError:
        return []
    return found[1:] if isinstance(function, type) else found


def named(arguments: Iterable[inspect.Parameter]) -> dict[str, bool]:
    r"""The names of arguments, and whether each must be given.

    >>> named(arguments(lambda query, mask=None, *more: None))
    {'query': True, 'mask': False}
    """
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    single = (each for each in arguments if each.kind not in several)
    return {each.name: each.default is inspect.Parameter.empty for each in single}


def attribute(target: Any, meaning: str) -> int | None:
    """The size that a module keeps under one of the names for `meaning`."""
    for name in SETTINGS[meaning].split():
        value = getattr(target, name, None)
        if type(value) is int:
            return value
    return None


def widths(module: nn.Module) -> list[int]:
    """Widths that the inputs of `module` may have, the likeliest first."""
    found = [attribute(module, "{d_model}")]
    for part in module.modules():
        found.append(getattr(part, "in_features", None))
    for parameter in module.parameters():
        found += [*parameter.shape] if not nn.parameter.is_lazy(parameter) else []
    return [*dict.fromkeys(n for n in found if n), 12]


def projections(
    module: nn.Module, given: Mapping[str, str], prefix: str = ""
) -> dict[str, str]:
    r"""How each projection is computed, as text in which `{}` is its input.

    `given` names submodules or parameters for "query", "key", "value" and "out", or
    "fused" for the first three in one, as "qkv" or, if each head has its three parts
    side by side, "qkv:h3d". Empty where a part is missing, or one is not understood.

    >>> parts = {"q_proj": nn.Linear(4, 4), "kv": nn.Linear(4, 8)}
    >>> projections(nn.ModuleDict(parts), {})
    {}
    >>> parts = {name: nn.Linear(4, 4) for name in "qkvo"}
    >>> projections(nn.ModuleDict(parts), {})["query"]
    'exact.q({})'
    """
    if not given:
        while len(owned := learning(module)) == 1:
            ((name, child),) = owned.items()
            if isinstance(child, Tensor) or plain(name) in PART:
                break
            # The attention itself is the only part of this module that learns.
            module, prefix = child, f"{prefix}{name}."
        if isinstance(module, nn.MultiheadAttention):
            return of_torch(module, prefix)
        if not all(plain(name) in PART for name in owned):
            return {}
        given = {PART[plain(name)]: name for name in owned}
    parts = dict(given)
    found: dict[str, str] = {}
    fused, _, order = parts.pop("fused", "").partition(":")
    if fused:
        for n, part in enumerate(("query", "key", "value")):
            found[part] = f"{template(module, prefix, fused)}.chunk(3, -1)[{n}]"
            if order == "h3d":
                cut = f".unflatten(-1, (heads, 3, -1)).select(-2, {n})"
                found[part] = template(module, prefix, fused) + cut
    found |= {part: template(module, prefix, name) for part, name in parts.items()}
    return found if {"query", "key", "value"} <= set(found) else {}


def learning(module: nn.Module) -> dict[str, Any]:
    """The parts of a module, modules and parameters, in which something is learned."""
    parts: list[tuple[str, Any]] = [*module.named_parameters(recurse=False)]
    parts += [
        (n, m) for n, m in module.named_children() if any(True for _ in m.parameters())
    ]
    return dict(parts)


def plain(name: str) -> str:
    r"""A name as it stands in the dictionary.

    >>> plain("W_query")
    'wquery'
    """
    return name.replace("_", "").lower()


def template(module: nn.Module, prefix: str, name: str) -> str:
    """A submodule is called, a raw parameter stands on the right of a product."""
    if name in dict(module.named_parameters()):
        return f"({{}} @ exact.{prefix}{name})"
    return f"exact.{prefix}{name}({{}})"


def of_torch(module: nn.MultiheadAttention, prefix: str) -> dict[str, str]:
    """torch keeps the weights of three projections in one, if their widths agree."""
    if module.in_proj_weight is None or module.bias_k is not None:
        return {}
    found = {"out": f"exact.{prefix}out_proj({{}})"}
    for n, part in enumerate(("query", "key", "value")):
        names = ["weight"] + ["bias"] * (module.in_proj_bias is not None)
        pieces = ", ".join(f"exact.{prefix}in_proj_{x}.chunk(3)[{n}]" for x in names)
        found[part] = f"torch.nn.functional.linear({{}}, {pieces})"
    return found
