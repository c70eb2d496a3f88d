r"""# Models that embed token ids

A language model takes the numbers of tokens, and laws need vectors, of which each can
be changed a little. So its embedding is left out: a subclass takes vectors in place of
token ids, gives the model ids that are all different, and returns the vectors where
they are looked up. All laws then apply to the model as a whole: to its masks,
positions and caches, which the attentions within it do not show.

Source: the token embeddings of public language models, such as nanoGPT and SASRec.
"""

import copy
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from attention_laws import names, structure
from attention_laws.source import source_with_bases

# The smallest ids are those of padding and of the start and the end of a text.
FIRST_ID = 4
# The parameters of the largest model that is checked as it was built, or at the sizes
# that it has by default: a check makes thousands of calls.
LARGEST_MODEL = 1_000_000
# The share of ids that an embedding of token ids gets of those that the model got.
ENOUGH_IDS = 0.6
# An argument for models that find the padding among their token ids.
PADDING = "padding_mask"
# What the tokens of a vocabulary are.
TOKEN_NAMES = (
    "token|item|word|char|symbol|letter|phoneme|event|note|action|product|movie|skill"
    "|question|exercise|concept|problem|code|gene"
)
# Sizes of whole models, whose large defaults would only cost time.
SMALL_MODEL = {
    r"(\w+_)?vocab(ulary)?(_size)?|(n|num|nb)_?(embeddings|(%s)s?)"
    r"|(%s)_(num|size|count)" % ((TOKEN_NAMES,) * 2): 64,
    r"(n|num|nb)_?(\w+_)?(layers?|blocks?)|depth|layers": 2,
}


class TakesVectors:
    """A model that takes vectors in place of token ids."""

    # How many inputs are token ids, and the embeddings that look them up.
    found_tables: tuple[int, list[str]] | None = None
    # Whether `PADDING` is an argument that the model does not have itself.
    adds_padding = False


def takes_ids(target: Any) -> bool:
    """Whether a module or class takes vectors in place of token ids."""
    kind = target if isinstance(target, type) else type(target)
    return issubclass(kind, TakesVectors)


def is_large(model: nn.Module) -> bool:
    """Whether a model has too many parameters to be checked as a whole."""
    return sum(parameter.numel() for parameter in model.parameters()) > LARGEST_MODEL


def embedding_widths(model: nn.Module) -> list[int]:
    r"""The widths of the vectors that a model may look up.

    >>> embedding_widths(nn.ModuleList([nn.Embedding(9, 4), nn.Linear(4, 7)]))
    [4]
    """
    tables = (part for part in model.modules() if isinstance(part, nn.Embedding))
    return [*dict.fromkeys(table.embedding_dim for table in tables)]


def weights_of_tables(target: Any) -> list[str]:
    """The weights of the embeddings that are left out, after a first call."""
    found = target.found_tables if takes_ids(target) else None
    return [f"{name}.weight" for name in found[1]] if found else []


def of_vectors(kind: type[nn.Module]) -> type[nn.Module]:
    r"""A subclass that takes a vector for each token, where `kind` takes its id.

    Where it has no mask, it has an argument for padding, whose tokens get the id that
    an embedding has for it.

    >>> class Model(nn.Module):
    ...     def __init__(self, n):
    ...         super().__init__()
    ...         self.embedding = nn.Embedding(n, 3)
    ...     def forward(self, ids):
    ...         return 2 * self.embedding(ids)
    >>> of_vectors(Model)(10)(torch.tensor([[[1.0, 2.0, 3.0]]]))
    tensor([[[2., 4., 6.]]], grad_fn=<MulBackward0>)
    """

    class OfVectors(TakesVectors, kind):  # type: ignore[valid-type, misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return call_with_vectors(self, args, kwargs)

    parameters = [*inspect.signature(kind.forward).parameters.values()]
    has_mask = any(names.MASK_PATTERN.search(p.name) for p in parameters)
    if not has_mask and has_padding_id(kind):
        mask = inspect.Parameter(PADDING, inspect.Parameter.KEYWORD_ONLY, default=None)
        is_rest = bool(parameters) and parameters[-1].kind is mask.VAR_KEYWORD
        parameters.insert(len(parameters) - is_rest, mask)
        OfVectors.adds_padding = True
    present_as(OfVectors, kind, parameters)
    return OfVectors


def present_as(
    wrapper: Any, kind: type[nn.Module], parameters: list[inspect.Parameter]
) -> None:
    """Give a subclass the name, the documentation and the module of its model.

    Laws look for names in the code of the model, and there only.
    """
    wrapper.forward.__signature__ = inspect.Signature(parameters)
    wrapper.forward.__module__ = wrapper.__module__ = kind.__module__
    wrapper.__name__ = wrapper.__qualname__ = kind.__name__
    wrapper.__doc__ = inspect.getdoc(kind)  # which may be that of a base
    wrapper.forward.__doc__ = inspect.getdoc(kind.forward)


def compared_id(source: str, inputs: Iterable[str]) -> str:
    r"""The id of padding with which code compares token ids, as it is written there.

    >>> compared_id("mask = ids.ne(self.pad_id)", ["ids"])
    'self.pad_id'
    >>> compared_id("mask = ids[:, 1:] != 0", ["ids"]), compared_id("x == 0", ["ids"])
    ('0', '')
    """
    ids = "|".join(map(re.escape, inputs))
    compared = re.search(
        rf"\b({ids})(\[[^]]*\])?( (==|!=|>) |\.(eq|ne|gt)\()(0\b|self\.\w*pad\w*)",
        source,
    )
    return compared[6] if compared else ""


@lru_cache(maxsize=64)  # each lookup of an embedding asks for it
def compared_id_of(kind: Any) -> str:
    """The id with which a model of this class compares a required argument."""
    required = names.required_by_name(names.parameters_of(kind))
    inputs = [name for name, is_required in required.items() if is_required]
    return compared_id(source_with_bases(kind), inputs or ["ids"])


def id_of_padding(model: nn.Module, table: Any) -> int | None:
    """The id of padding: that of its embedding, or that with which ids are compared."""
    kind: Any = type(model)
    found = table.padding_idx
    if found is None and (compared := compared_id_of(kind)):
        found = getattr(model, compared.removeprefix("self."), 0)
    return found if type(found) is int else None


def has_padding_id(kind: Any) -> bool:
    """Whether the code of a model, or of a part of it, has an id for padding."""
    if compared_id_of(kind):
        return True
    constants = (each for code in structure.codes_of(kind) for each in code.co_consts)
    names_of_keywords = (each for each in constants if isinstance(each, tuple))
    is_in_parts = any("padding_idx" in each for each in names_of_keywords)
    return is_in_parts or "padding_idx" in source_with_bases(kind)


def with_vectors(model: nn.Module) -> nn.Module:
    """A copy of a model that takes a vector for each token, where it takes its id."""
    copied = copy.deepcopy(model)
    copied.__class__ = of_vectors(type(model))
    return copied


def call_with_vectors(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `model` with ids, and give it vectors where it looks them up.

    A method of its own, such as one that generates, calls it with ids.
    """
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if tensors and not tensors[0].is_floating_point():
        return own_forward(model)(*args, **kwargs)
    padding = kwargs.pop(PADDING, None) if model.adds_padding else None
    inputs = [each for each in args if is_of_vectors(each)]
    required = names.required_by_name(names.parameters_of(model))
    inputs += [
        value
        for name, value in kwargs.items()
        if required.get(name) and is_of_vectors(value)
    ]
    count, names_of_tables = find_tables(model, inputs, args, kwargs)
    tables: list[Any] = [model.get_submodule(name) for name in names_of_tables]
    inputs = inputs[:count]
    ids = distinct_ids(inputs, min(table.num_embeddings for table in tables))
    if padding is not None:
        padding_id = id_of_padding(model, tables[0])
        if padding_id is None:
            raise ValueError("its embedding has no id for padding")
        ids[0] = ids[0].masked_fill(padding, padding_id)
    return call_with_ids(model, tables, inputs, ids, args, kwargs)


def own_forward(model: nn.Module) -> Callable[..., Any]:
    """The `forward` of the model itself, which takes ids, or that of a compiled one."""
    forward = super(type(model), model).forward  # type: ignore[misc]
    found: Callable[..., Any] = vars(model).get(COMPILED_FORWARD, forward)
    return found


# The attribute of a model whose own `forward` is compiled.
COMPILED_FORWARD = "compiled_forward"


def compile_own_forward(model: nn.Module, backend: str) -> nn.Module:
    """The model with a compiled `forward` of its own.

    To trace the code around it, which gives it ids, too, would take twice as long.
    """
    compiled = copy.copy(model)
    forward = torch.compile(own_forward(model), backend=backend)
    vars(compiled)[COMPILED_FORWARD] = forward
    return compiled


def add_hook(
    model: nn.Module, part: nn.Module, hook: Callable[..., Tensor]
) -> RemovableHandle:
    """Give a part of the model a forward hook, which is never compiled."""
    if COMPILED_FORWARD in vars(model):
        hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return part.register_forward_hook(hook)


def is_of_vectors(value: Any) -> bool:
    """Whether an argument is a sequence of vectors."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1


def distinct_ids(inputs: list[Tensor], rows: int) -> list[Tensor]:
    """An id for each vector, all different where the table has enough rows.

    They count down from the largest, as positions count up from zero.

    >>> distinct_ids([torch.zeros(2, 3, 5)], rows=20)
    [tensor([[18, 17, 16],
            [15, 14, 13]])]
    """
    sizes = [x.shape[:-1] for x in inputs]
    tokens = sum(size.numel() for size in sizes)
    numbers = torch.arange(tokens, device=inputs[0].device)  # [tokens]
    numbers = rows - 2 - numbers % max(1, rows - 1 - FIRST_ID)
    ends = list(itertools.accumulate(size.numel() for size in sizes))
    parts = numbers.tensor_split(ends[:-1])
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]


def call_with_ids(
    model: nn.Module,
    tables: list[nn.Module],
    inputs: list[Tensor],
    ids: list[Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call `model` with ids in place of vectors, which its tables then return."""

    def look_up(table: Any, given: tuple[Tensor], output: Tensor) -> Tensor:
        padding_id = id_of_padding(model, table)
        rows = vectors_of(given[0], inputs, ids, output, padding_id)
        return rows + 0 * output  # so that the table has a gradient

    ids_of = {id(vectors): each for vectors, each in zip(inputs, ids, strict=True)}
    handles = [add_hook(model, table, look_up) for table in tables]
    try:
        result = own_forward(model)(
            *(ids_of.get(id(value), value) for value in args),
            **{name: ids_of.get(id(value), value) for name, value in kwargs.items()},
        )
        return tree_map_only(Tensor, without_infinite_columns, result)
    finally:
        for handle in handles:
            handle.remove()


def without_infinite_columns(
    logits: Tensor,  # [..., ids]
) -> Tensor:
    r"""Logits with zeros for ids that are never predicted, such as that of padding.

    >>> inf = torch.inf
    >>> without_infinite_columns(torch.tensor([[-inf, 2.0, 5.0], [-inf, -inf, 3.0]]))
    tensor([[0., 2., 5.],
            [0., -inf, 3.]])
    """
    if not (logits.is_floating_point() and logits.dim() > 1 and logits.numel()):
        return logits
    hidden = (logits == -torch.inf).flatten(0, -2).all(dim=0)  # [ids]
    return logits.masked_fill(hidden, 0.0) if bool(hidden.any()) else logits


def vectors_of(
    given: Tensor,
    inputs: list[Tensor],
    ids: list[Tensor],
    rows: Tensor,
    padding_id: int | None,
) -> Tensor:
    """The vectors of ids, which may be a part of those that the model got.

    A token that the model adds, such as one in front, has one of the `rows` of the
    table. So have several tokens of padding.
    """
    for vectors, each in zip(inputs, ids, strict=True):
        if torch.equal(given, each):
            return checked_width(vectors.to(rows), rows)
    known = torch.cat([each.flatten() for each in ids])
    found = given[..., None] == known
    is_padding = given == (-1 if padding_id is None else padding_id)
    found &= ~is_padding[..., None]
    is_known = found.any(dim=-1)
    others = given.masked_fill(is_known | is_padding, FIRST_ID)
    # What a model computes of ids is no token of its own, which is that of all items.
    is_computed = len(given) > 1 and bool((others != others[:1]).any())
    if is_computed or bool((found.sum(-1) > 1).any()):
        raise ValueError("its tokens cannot be told apart by their ids")
    if not bool(is_known.any()):
        return rows  # of another argument
    vectors = torch.cat([x.flatten(0, -2) for x in inputs])[found.int().argmax(-1)]
    vectors = checked_width(vectors.to(rows), rows)
    return torch.where(is_known[..., None], vectors, rows)


def checked_width(vectors: Tensor, rows: Tensor) -> Tensor:
    """The vectors, if they have the shape of the rows that a table gives for them."""
    if vectors.shape != rows.shape:  # and not one number for all features
        raise ValueError("its vectors have another width than its embedding")
    return vectors


def find_tables(
    model: nn.Module,
    inputs: list[Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[int, list[str]]:
    """How many of the inputs are token ids, and which embeddings look them up.

    Others may be of positions. A copy of the model is called to find them, and the
    answer is kept for all modules of its class.
    """
    kind: Any = type(model)
    if kind.found_tables is None:
        for count in range(1, len(inputs) + 1):
            with suppress(Exception):
                kind.found_tables = (
                    count,
                    seen_tables(model, inputs[:count], args, kwargs),
                )
                break
        else:
            raise ValueError("no embedding of token ids was found")
    found: tuple[int, list[str]] = kind.found_tables
    return found


def seen_tables(
    model: nn.Module,
    inputs: list[Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[str]:
    """The embeddings that look up ids, or a part of them, if `model` gets them."""
    copied = copy.deepcopy(model)
    sizes = [x.shape[:-1] for x in inputs]
    # Numbers that are neither positions nor types, in a table of any size.
    ids = [
        (2 + torch.arange(n.numel()) % 3 % 2).view(n).to(inputs[0].device)
        for n in sizes
    ]
    numbers = {n for each in ids for n in each.flatten().tolist()}
    seen = []

    def note(name: str, _table: nn.Module, given: tuple[Tensor], _: Tensor) -> None:
        # Tokens that the model adds are few; positions count from zero.
        found = [n in numbers for n in given[0].flatten().tolist()]
        if sum(found) > ENOUGH_IDS * len(found):
            seen.append(name)

    for name, part in copied.named_modules():
        if isinstance(part, nn.Embedding):
            part.register_forward_hook(partial(note, name))
    call_with_ids(copied, [], inputs, ids, args, kwargs)
    if not seen:
        raise ValueError("no embedding gets the ids")
    return [*dict.fromkeys(seen)]


# Sizes and inputs of whole models


def small_sizes(
    parameters: Iterable[inspect.Parameter], sizes: Mapping[str, int] = SMALL_MODEL
) -> dict[str, str]:
    r"""Small numbers of tokens in a vocabulary, and of layers, of those that are large.

    `sizes` has a pattern of names for each.

    >>> def build(item_num, n_layer=12, vocab_size=50257, depth=1): ...
    >>> small_sizes(inspect.signature(build).parameters.values())
    {'item_num': '64', 'n_layer': '2', 'vocab_size': '64'}
    """
    return {
        each.name: str(size)
        for each in parameters
        for pattern, size in sizes.items()
        if re.fullmatch(pattern, each.name)
        if each.default is each.empty
        or (type(each.default) is int and each.default >= size)
    }


def small_config(text: str, classes: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    r"""The source text of a config with small sizes, and the class that it names.

    >>> def Config(n_head, n_layer=12): ...
    >>> small_config("Config(n_head=3, n_layer=4)", {"Config": Config})[0]
    'Config(n_head=3, n_layer=2)'
    """
    kind = classes.get(text.partition("(")[0])
    if kind is None or kind is SimpleNamespace:
        return text, classes
    for name, size in small_sizes(inspect.signature(kind).parameters.values()).items():
        text = re.sub(rf"\b{name}=[^,()]*(, )?", "", text)
        inside = text.rstrip(")").rstrip(", ")
        text = f"{inside}{', ' * (not inside.endswith('('))}{name}={size})"
    return text, classes


def decoder_inputs(required: Mapping[str, bool]) -> tuple[str, ...]:
    r"""The tokens of a decoder, whose outputs are theirs, and those of its encoder.

    >>> decoder_inputs({"input_ids": True, "decoder_input_ids": True, "mask": False})
    ('decoder_input_ids', 'input_ids')
    >>> decoder_inputs({"input_ids": True, "mask": False})
    ()
    """
    needed = [name for name, is_required in required.items() if is_required]
    is_pair = len(needed) == 2 and re.match("dec(oder)?_|tgt|trg|target", needed[1])
    return (needed[1], needed[0]) if is_pair else ()
