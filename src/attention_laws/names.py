r"""# Dictionary of names

Implementations of attention name their parts differently, but from a small vocabulary.
This module is the dictionary: which argument of a constructor is the number of heads,
which submodule is the projection of the query, which argument of `forward` is a mask.

Source: the names used on the pages under *Other implementations*, in
[PyTorch](https://docs.pytorch.org/docs/stable/nn.html), in Hugging Face's transformers
and in the usual tutorials.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

# The value that a constructor argument gets, and the names of such arguments. A value
# in braces is a size, filled in later; the others are literals.
ARGUMENT_NAMES = {
    "{d_model}": "d_model d_in d_out embed_dim dim hidden_size num_hiddens n_embd "
    "embed_size emb_size emb_dim model_dim hidden_dim width",
    "{heads}": "heads num_heads n_heads nhead n_head num_attention_heads h",
    "{kv_heads}": "kv_heads num_kv_heads n_kv_heads num_key_value_heads",
    "{d_k}": "d_k head_dim d_head dim_head head_size",
    "32": "context_length block_size max_len max_length max_seq_len seq_len "
    "n_positions max_position_embeddings",
    "0.1": "dropout dropout_prob dropout_p attn_dropout p_dropout",
}
ARGUMENT_VALUES = {
    name: value for value, names in ARGUMENT_NAMES.items() for name in names.split()
}

INPUT_NAMES = (
    ("query", "key", "value"),
    ("queries", "keys", "values"),
    ("q", "k", "v"),
    ("Q", "K", "V"),
)
MASK_PATTERN = re.compile(r"mask|len(gth)?s?$", re.IGNORECASE)
CAUSAL_PATTERN = re.compile(r"^(is_)?causal$")

# Names of submodules and parameters, normalized: lower case, without underscores.
PROJECTION_NAMES = {
    "query": "q query queries qproj queryproj wq wquery toq qlin qlinear linearq",
    "key": "k key keys kproj keyproj wk wkey tok klin klinear lineark",
    "value": "v value values vproj valueproj wv wvalue tov vlin vlinear linearv",
    "out": "o out output outproj oproj outputproj wo wout toout olin outlin olinear "
    "linearo proj cproj fcout dense projection",
    "fused": "qkv cattn qkvproj toqkv wqkv inproj querykeyvalue",
}
PROJECTION_ROLES = {
    name: role for role, names in PROJECTION_NAMES.items() for name in names.split()
}


def parameters_of(function: Any) -> list[inspect.Parameter]:
    r"""Parameters of a function, or of the `forward` of a module or module class.

    Empty for a builtin, which has no signature.

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


def required_by_name(parameters: Iterable[inspect.Parameter]) -> dict[str, bool]:
    r"""The name of each single parameter, and whether it is required.

    >>> required_by_name(parameters_of(lambda query, mask=None, *more: None))
    {'query': True, 'mask': False}
    """
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    single = (each for each in parameters if each.kind not in variadic)
    return {each.name: each.default is inspect.Parameter.empty for each in single}


def size_attribute(target: Any, size: str) -> int | None:
    """A size that a module stores under one of the names in `ARGUMENT_NAMES`."""
    for name in ARGUMENT_NAMES[size].split():
        value = getattr(target, name, None)
        if type(value) is int:
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

    >>> parts = {"q_proj": nn.Linear(4, 4), "kv": nn.Linear(4, 8)}
    >>> find_projections(nn.ModuleDict(parts), {})
    {}
    >>> parts = {name: nn.Linear(4, 4) for name in "qkvo"}
    >>> find_projections(nn.ModuleDict(parts), {})["query"]
    'attention64.q({})'
    """
    if not given:
        while len(parts := parts_with_parameters(module)) == 1:
            ((name, part),) = parts.items()
            if isinstance(part, Tensor) or normalize_name(name) in PROJECTION_ROLES:
                break
            # A wrapper: all parameters are those of one submodule, the attention.
            module, prefix = part, f"{prefix}{name}."
        if isinstance(module, nn.MultiheadAttention):
            return torch_projections(module, prefix)
        if not all(normalize_name(name) in PROJECTION_ROLES for name in parts):
            return {}
        given = {PROJECTION_ROLES[normalize_name(name)]: name for name in parts}

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
    for role, name in names.items():
        found[role] = projection_source(module, prefix, name)
    return found if {"query", "key", "value"} <= set(found) else {}


def parts_with_parameters(module: nn.Module) -> dict[str, Any]:
    """A module's own parameters, and its submodules that have any."""
    parts: list[tuple[str, Any]] = [*module.named_parameters(recurse=False)]
    parts += [
        (n, m) for n, m in module.named_children() if any(True for _ in m.parameters())
    ]
    return dict(parts)


def normalize_name(name: str) -> str:
    r"""A name as `PROJECTION_NAMES` has it.

    >>> normalize_name("W_query")
    'wquery'
    """
    return name.replace("_", "").lower()


def projection_source(module: nn.Module, prefix: str, name: str) -> str:
    """A submodule is called; a raw parameter is the right factor of a product."""
    if name in dict(module.named_parameters()):
        return f"({{}} @ attention64.{prefix}{name})"
    return f"attention64.{prefix}{name}({{}})"


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
