r"""# Recording a test as a script

A law calls the attention several times and compares the outputs. A `Script` makes these
calls **as lines of Python that it executes and records**. If a comparison fails, the
recorded lines *are* the counterexample: they import the attention, build it, call it,
and end with the `assert` that fails. What is printed is what was executed.

The methods of a script take and return *names of variables* and other source text;
`evaluate` gives their values.

Source: replaying and shrinking a failing example are ideas of property-based testing;
see [defining a law](law.md).
"""

import copy
import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from attention_laws import (
    documented,
    embedded,
    influence,
    rates,
    recorders,
    shared_caches,
    structure,
    tools,
)
from attention_laws.adapter import Adapter, MaskArgument, Sizes, without_future
from attention_laws.law import LawViolation, ScriptError

# Modes in which a call runs within a context; the module is in evaluation.
CONTEXTS = {
    "no_grad": "torch.no_grad()",
    "inference": "torch.inference_mode()",
}

# The index of an output whose heads and positions have changed places.
SWAPPED = ".transpose(1, 2)"
# How features are split into heads, where the output of a function has features.
MERGED = ".unflatten(-1, "

# The index of the first of several outputs of an attention that pools its tokens.
FIRST_OF_POOLED = "[:, :1]"

# The indexes that make a vector of the one number of each batch item, or token.
NUMBERS = "[:, None, None]"
NUMBER_OF_EACH = "[..., None]"

# What makes weights of an output that holds their logarithms.
LOGARITHMS = ".exp()"

# A call of the attention, and a line or a context that sets its mode.
CALL_PATTERN = re.compile(
    r"\b(attention|compiled|loaded|copied|fresh|limited)\(|\.backward\("
    r"|copied = copy"
)
MODE_PATTERN = re.compile(
    r"with torch\.(?:no_grad|inference_mode)\(\): |attention\.(?:eval|train)\(\)$"
)

# Variables that laws set by a line of their own; an input of such a name gets a number.
OF_LAWS = (
    "attention attention64 another begun checkpointed chunked compiled copied exact "
    "factors fresh hook layer limited loaded other plain state unused"
)

# Functions that the lines of a script may call; a program imports those that it uses.
TOOLS = {
    name: function
    for module in (tools, recorders, rates, influence, shared_caches, embedded)
    for name, function in vars(module).items()
    if inspect.isfunction(function) and function.__module__ == module.__name__
}


# The same lines run at many sizes and in many modes: to parse them again would take
# most of the time of a check.
@functools.lru_cache(maxsize=4096)
def compile_line(line: str, mode: str) -> CodeType:
    """The code of a line, or of an expression if `mode` is "eval"."""
    return compile(line, "<string>", mode)


@functools.lru_cache(maxsize=4096)
def calls_attention(line: str) -> bool:
    """Whether a line calls the attention."""
    return CALL_PATTERN.search(line) is not None


@functools.lru_cache(maxsize=4096)
def without_mode(line: str) -> str:
    """The line without the mode in which it calls the attention."""
    return MODE_PATTERN.sub("", line)


def parts_of(result: Any) -> dict[str, Any]:
    r"""The parts of a result by their index; none if it is a single value.

    >>> parts_of(("output", None)), parts_of({"out": 3})
    ({'[0]': 'output', '[1]': None}, {"['out']": 3})
    """
    if isinstance(result, Mapping):
        return {f"[{key!r}]": value for key, value in result.items()}
    if isinstance(result, tuple | list):
        return {f"[{n}]": value for n, value in enumerate(result)}
    if dataclasses.is_dataclass(result):
        fields = dataclasses.fields(result)
        return {f".{field.name}": getattr(result, field.name) for field in fields}
    return {}


def find_output(result: Any, query: Tensor, adapter: Adapter) -> str | None:
    """The index of the first tensor shaped like the query, except for its width.

    The index that is known comes first: at equal lengths, the updated context has the
    shape of the query.
    """
    parts = parts_of(result).items() or [("", result)]
    for index, value in sorted(parts, key=lambda p: p[0] != adapter.output_index):
        if isinstance(value, Tensor) and value.is_floating_point():
            is_image = adapter.image and value.dim() == 2 + adapter.image_axes
            if adapter.image and not (is_image or adapter.is_pooled):
                continue
            if is_image:
                index += adapter.from_image()
                value = eval(f"value{adapter.from_image()}", {"value": value})
            is_like_query = adapter.is_like_query(value.shape, query.shape)
            if adapter.layout in ("bhld", "blhd") and value.dim() == 4:
                # Heads and positions change places, or their sizes are equal.
                if not is_like_query or adapter.output_index.endswith(SWAPPED):
                    if adapter.is_like_query(value.transpose(1, 2).shape, query.shape):
                        return index + SWAPPED
            if are_heads_merged(value, query, adapter):
                heads = f"{adapter.inputs[0]}.shape[{adapter.layout.index('h')}]"
                swapped = SWAPPED * (adapter.layout == "bhld")
                return f"{index}{MERGED}({heads}, -1)){swapped}"
            if is_like_query and are_logarithms(value, query, adapter):
                return index + LOGARITHMS
            if is_like_query:
                if adapter.is_pooled and value.dim() == 1:
                    index += "[None, :, None]" if adapter.layout[0] == "l" else NUMBERS
                elif adapter.is_pooled and adapter.layout[0] == "l":
                    index += "[None]" * (value.dim() < len(adapter.layout))
                elif adapter.is_pooled and query.dim() == 4 and value.dim() == 3:
                    index += f"[{':, ' * adapter.layout.index('l')}None]"  # has heads
                elif adapter.is_pooled:
                    index += "[:, None]" if value.dim() == 2 else FIRST_OF_POOLED
                return index
            axis = adapter.layout.find("l")
            if adapter.fixed_length and value.dim() == query.dim():
                # A learned token may stand before the others, such as that of a class.
                shape = [n - (dim == axis) for dim, n in enumerate(value.shape)]
                if adapter.is_like_query(torch.Size(shape), query.shape):
                    return f"{index}[{':, ' * axis}1:]"
    if isinstance(result, Tensor) and is_number_of_each(result, query, adapter):
        return NUMBER_OF_EACH
    return None


def are_heads_merged(value: Tensor, query: Tensor, adapter: Adapter) -> bool:
    """Whether an output has features where the query has heads."""
    if adapter.layout not in ("bhld", "blhd") or adapter.is_pooled:
        return False
    sizes = dict(zip(adapter.layout, query.shape, strict=False))
    # What has pooled a single head has this shape, too.
    is_known = sizes["h"] > 1 or MERGED in adapter.output_index
    merged = (sizes["b"], sizes["l"], sizes["h"] * sizes["d"])
    return is_known and value.shape == merged


def is_number_of_each(value: Tensor, query: Tensor, adapter: Adapter) -> bool:
    """Whether an output has one number for each token, and is not their weights."""
    if adapter.is_pooled or adapter.image or adapter.layout[-1] != "d":
        return False
    if value.shape != query.shape[:-1] or not value.is_floating_point():
        return False
    axis = adapter.layout.index("l")
    sums = torch.stack([value.sum(axis), value.exp().sum(axis)])  # or of logarithms
    return not bool(((sums - 1).abs() < 1e-3).flatten(1).all(dim=1).any())


def are_logarithms(value: Tensor, query: Tensor, adapter: Adapter) -> bool:
    """Whether an output holds logarithms of weights, minus infinity for a hidden key.

    A pointer network returns them. If no key is allowed, no row sums to one any more.
    """
    if adapter.output_index:
        return adapter.output_index.endswith(LOGARITHMS)
    if adapter.is_pooled or value.dim() != 3 or value.shape[-1] in (1, query.shape[-1]):
        return False
    sums = value.exp().sum(dim=-1)
    return torch.allclose(sums, torch.ones_like(sums), atol=1e-3)


@dataclass(frozen=True)
class CallArguments:
    """The arguments of one call: names of variables, and the mask."""

    inputs: tuple[str, ...]
    mask: tuple[str, str] | None  # name of the argument, and its value as source text
    # `[q_len, k_len, batch_size]`, True = may attend: the mask, causality and window.
    allowed: Tensor


class CheckedIndices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses an index that is out of range, as a CPU does.

    On a GPU, it would end all work of the process.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        check_indices(func, args)
        return func(*args, **(kwargs or {}))


def check_indices(func: Any, args: Any) -> None:
    """Raise `IndexError` if an operator has an index that its tensor has not.

    Only `x[index]` counts negative ones from the end. Those of a tracer are not known.

    >>> table, index = torch.zeros(3, 5), torch.tensor([2, -1])
    >>> check_indices(torch.ops.aten.index.Tensor, (table, [None, index]))
    >>> check_indices(torch.ops.aten.embedding.default, (table, index))
    Traceback (most recent call last):
    IndexError: indices -1 to 2 of a size of 3
    """
    aten = torch.ops.aten
    indexed: list[tuple[int, Tensor | None]] = []
    if func is aten.embedding.default:
        indexed = [(args[0].shape[0], args[1])]
    elif func in (aten.index_select.default, aten.gather.default):
        indexed = [(args[0].shape[args[1]], args[2])]
    elif func is aten.index.Tensor:
        indexed = [*zip(args[0].shape, args[1], strict=False)]
    if any(index is not None and index.dtype == torch.bool for _, index in indexed):
        return  # a mask of several axes
    for size, index in indexed:
        if type(index) is Tensor and index.numel():
            low, high = (int(bound) for bound in index.aminmax())
            least = -size if func is aten.index.Tensor else 0
            if not least <= low <= high < size:
                raise IndexError(f"indices {low} to {high} of a size of {size}")


# What PyTorch says of operands of two dtypes.
DTYPES_DIFFER = re.compile(
    r"same (scalar type|dtype)|expected (\w+ )?scalar type|dtypes? .*(match|equal)"
    r"|type \(.*should be the same"
)


class Script:
    r"""One attention at one size, and the lines that were executed on it."""

    def __init__(
        self,
        adapter: Adapter,
        sizes: Sizes,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        thorough: bool = False,
        insist: bool = False,
    ) -> None:
        self.adapter = adapter
        self.sizes = sizes
        self.seed = seed
        self.dtype = dtype
        self.device = device
        self.thorough = thorough
        self.insist = insist  # whether `only` names the law
        self.lines: list[str] = []
        self.namespace: dict[str, Any] = {}
        self.counters: dict[str, int] = {}  # how many variables have each name
        self.succeeded: set[str] = set()  # programs, without their modes, that ran
        self.result_shapes: list[torch.Size] = []  # of the tensors of a first call
        self.context = ""  # the context in which calls run, such as "torch.no_grad()"

    # Building the attention

    def restart(self, mode: str = "eval", dropout: float | None = 0.0) -> None:
        """Discard all lines and build the attention anew, in one of its `modes`.

        Dropout is 0 unless given: two outputs with random dropout cannot be compared.
        With None, it is as it was built.
        """
        adapter = self.adapter
        self.lines, self.context = [], CONTEXTS.get(mode, "")
        self.counters = dict.fromkeys(OF_LAWS.split(), 1)
        mode = "eval" if self.context else mode
        self.namespace = {"torch": torch, "copy": copy, adapter.name: adapter.target}
        self.namespace |= {**TOOLS, **adapter.namespace}
        for line in structure.seeds_of_file(adapter.target):
            self.exec_line(line.format(self.seed))
        if not adapter.is_module:
            self.exec_line(f"attention = {adapter.build_expression(self.sizes)}")
            return
        if isinstance(adapter.target, type):
            # On the CPU the same, without a stack trace for each kind of device.
            torch.default_generator.manual_seed(self.seed)
            self.lines.append(f"torch.manual_seed({self.seed})")
        self.exec_line(f"attention = {self.build_expression()}")
        parameters = self.namespace["attention"].parameters()
        if any(nn.parameter.is_lazy(p) for p in parameters):
            # Lazy weights get their shapes in the first call, and can then be
            # randomized.
            self.call(self.make_arguments())
            self.lines[-1] += "  # initializes lazy weights"
        self.exec_line("randomize_parameters(attention)")
        attention = self.namespace["attention"]
        if dropout is not None and rates.set_dropout(attention, dropout):
            self.lines.append(f"set_dropout(attention, {dropout})")
        self.exec_line(f"attention.{mode}()")

    def build_expression(self) -> str:
        """The expression that makes a module of this script's dtype and device."""
        target, conversion = self.adapter.target, self.to_dtype_and_device()
        if isinstance(target, nn.Module):
            # A given instance may have another dtype or device than the default.
            present = {(p.dtype, p.device.type) for p in target.parameters()}
            if present - {(self.dtype, self.device)}:
                conversion = f".to({self.device!r}, {self.dtype})"
        return self.adapter.build_expression(self.sizes) + conversion

    def build_other(self, name: str, init_args: Mapping[str, str]) -> None:
        """Build another module with these arguments, to compare it in evaluation.

        It has the same random weights as the first, as far as it has as many.
        """
        with self.using(replace(self.adapter, init_args=init_args)):
            self.exec_line(f"torch.manual_seed({self.seed})")
            self.exec_line(f"{name} = {self.build_expression()}.eval()")
        self.exec_line(f"randomize_parameters({name})")
        self.exec_line(f"set_dropout({name}, 0.0)")

    def modes(self) -> list[str]:
        """The modes in which the laws that need both are tested.

        The law `eval_matches_train` compares the outputs of all modes, also those
        without gradients: what holds in evaluation holds there. Two modes are for laws
        whose inputs are not among those that it compares, and for those of masks that
        are often lost in one mode.
        """
        is_module = self.adapter.is_module
        if is_module and self.adapter.reproducible_training:
            return ["eval", "train"]
        return ["eval"]

    def to_dtype_and_device(self) -> str:
        """The conversion of a float32 tensor on the CPU; empty where none is needed."""
        wanted = [] if self.device == "cpu" else [repr(self.device)]
        wanted += [] if self.dtype == torch.float32 else [str(self.dtype)]
        return f".to({', '.join(wanted)})" if wanted else ""

    def to_device(self) -> str:
        """The conversion of a bool or integer tensor, which has no other dtype."""
        return "" if self.device == "cpu" else f".to({self.device!r})"

    # Executing lines

    def exec_line(self, line: str) -> None:
        """Record and execute one line.

        Raises `ScriptError` where the line raises.
        """
        self.lines.append(line)
        is_call = calls_attention(line)
        # The same lines may have run before, in another mode.
        program = "\n".join(map(without_mode, self.lines)) if is_call else ""
        on_gpu = self.device.startswith("cuda") and "compiled(" not in line
        checked: Any = CheckedIndices if is_call and on_gpu else nullcontext
        try:
            with checked():
                exec(compile_line(line, "exec"), self.namespace)
        except Exception as error:
            has_succeeded = program in self.succeeded
            raise ScriptError(
                error, is_call, has_succeeded, self.sizes.batch_size
            ) from error
        self.succeeded |= {program} if is_call else set()

    def evaluate(self, expression: str) -> Any:
        """The value of an expression; it is not recorded."""
        return eval(compile_line(expression, "eval"), self.namespace)

    def assign(self, name: str, expression: str) -> str:
        """Assign an expression to a new variable `name`, `name2`, … and return it."""
        name = name.rstrip("0123456789")
        count = self.counters[name] = self.counters.get(name, 0) + 1
        variable = name if count == 1 else f"{name}{count}"
        context = ""
        if self.context and calls_attention(expression):
            context = f"with {self.context}: "
        self.exec_line(f"{context}{variable} = {expression}")
        return variable

    @contextmanager
    def rollback(self) -> Iterator[None]:
        """Remove the lines of this block at its end, unless it raises.

        A law that tries many inputs thus prints only the one that fails.
        """
        length, counters = len(self.lines), dict(self.counters)
        yield
        del self.lines[length:]
        self.counters = counters

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Remove the lines of this block if a call in it is refused, and go on."""
        length, counters = len(self.lines), dict(self.counters)
        try:
            yield
        except ScriptError:
            del self.lines[length:]
            self.counters = counters

    @contextmanager
    def using(
        self,
        adapter: Adapter | None = None,
        dtype: torch.dtype | None = None,
        **sizes: int,
    ) -> Iterator[None]:
        """Another adapter or dtype, and other sizes, until the end of this block.

        Then all of them are again what they were, also if the block sets others itself,
        or raises.
        """
        usual = self.adapter, self.dtype, self.sizes
        self.sizes = replace(self.sizes, **sizes)
        self.adapter, self.dtype = adapter or self.adapter, dtype or self.dtype
        try:
            yield
        finally:
            self.adapter, self.dtype, self.sizes = usual

    # Inputs and masks

    def random_expression(self, *shape: int) -> str:
        """An expression for random numbers; each call has another seed."""
        count = self.counters["seeded_randn"] = self.counters.get("seeded_randn", 0) + 1
        sizes = ", ".join(map(str, (100 * self.seed + count, *shape)))
        return f"seeded_randn({sizes}){self.to_dtype_and_device()}"

    def skip_random(self, count: int) -> None:
        """Leave out the seeds of `count` expressions, so that the next ones differ."""
        self.counters["seeded_randn"] = self.counters.get("seeded_randn", 0) + count

    def random_tensor(self, name: str, *shape: int) -> str:
        """A new variable of random numbers."""
        return self.assign(name, self.random_expression(*shape))

    def real_queries(self, args: CallArguments) -> list[int]:
        """The queries that are no padding in any batch item.

        With one input, padded tokens are queries, too, and their outputs are discarded.
        """
        if self.adapter.is_pooled:
            return [0]
        moved = any(mask.moves_queries for mask in self.adapter.masks)
        if moved or not self.adapter.queries_are_keys:
            seeing = args.allowed.any(dim=1).all(dim=1)  # what a moved one may not
            return [n for n in range(len(args.allowed)) if seeing[n] or not moved]
        real = args.allowed.any(dim=0).all(dim=1)
        return [n for n in range(len(args.allowed)) if n >= len(real) or real[n]]

    def masks_for(self, allowed: Tensor) -> list[MaskArgument | None]:
        """The mask arguments that can express a mask; None where it hides nothing."""
        if bool(allowed.all()):
            return [self.adapter.required_mask]
        sides = self.adapter.sides(allowed.shape[1])
        return [mask for mask in self.adapter.masks if mask.can_express(allowed, sides)]

    def all_allowed(self, q_len: int | None = None, k_len: int | None = None) -> Tensor:
        """A mask that hides nothing, `[q_len, k_len, batch_size]`."""
        q_len = self.sizes.q_len if q_len is None else q_len
        k_len = self.sizes.k_len if k_len is None else k_len
        return torch.ones(q_len, k_len, self.sizes.batch_size, dtype=torch.bool)

    def mask_cases(self) -> Iterator[tuple[Tensor, MaskArgument | None]]:
        """No mask, a causal mask, and a padding mask that hides keys of one batch item.

        Each mask comes once for each mask argument that can express it.
        """
        k_len = self.sizes.k_len
        q_len = k_len if self.adapter.single_input else self.sizes.q_len
        all_allowed = self.all_allowed(q_len, k_len)
        yield all_allowed, self.adapter.required_mask
        if not self.adapter.causal and k_len > 1:
            causal = without_future(self.all_allowed(k_len, k_len))
            yield from ((causal, mask) for mask in self.masks_for(causal))
        yield from self.padding_cases(slice(k_len // 2 + 1, None))

    def padding_cases(
        self, hidden: slice
    ) -> Iterator[tuple[Tensor, MaskArgument | None]]:
        """A mask that hides these keys of one batch item, for each mask argument."""
        k_len = self.sizes.k_len
        q_len = k_len if self.adapter.single_input else self.sizes.q_len
        padded = self.all_allowed(q_len, k_len)
        padded[:, hidden, 0] = False
        for mask in [] if padded.all() else self.masks_for(padded):
            # A mask for queries and keys may replace the causal mask built in.
            allowed = padded
            if self.adapter.causal and mask is not None and "q" in mask.axes:
                allowed = without_future(padded)
            yield allowed, mask

    def make_arguments(
        self, allowed: Tensor | None = None, mask: MaskArgument | None = None
    ) -> CallArguments:
        """New random inputs, of the lengths of `allowed`, and this mask.

        Without `allowed`, nothing is hidden, and the lengths are those of the script.
        """
        allowed = self.all_allowed() if allowed is None else allowed
        q_len, k_len = allowed.shape[:2]
        sizes = replace(self.sizes, q_len=q_len, k_len=k_len)
        inputs = tuple(
            self.random_tensor(name, *self.adapter.input_shape(sizes, role))
            for role, name in enumerate(self.adapter.inputs)
        )
        encoded = self.encode_mask(allowed, mask)
        visible = self.adapter.effective_mask(allowed, mask)
        return CallArguments(inputs, encoded, visible)

    def encode_mask(
        self, allowed: Tensor, mask: MaskArgument | None = None
    ) -> tuple[str, str] | None:
        """The name of a mask argument, and its value as source text.

        Without `mask`, it is the required mask, or None if there is none.
        """
        mask = mask or self.adapter.required_mask
        if mask is None:
            return None
        text = self.mask_source(allowed, mask)
        if mask.kind == "causal":
            return mask.name, text
        return mask.name, self.assign(mask.name, text)

    def mask_source(self, allowed: Tensor, mask: MaskArgument) -> str:
        """The value of a mask argument, of this script's dtype and device."""
        sides = self.adapter.sides(allowed.shape[1])
        if self.adapter.needs_causal_mask and "q" in mask.axes:
            allowed = without_future(allowed)
        text = mask.to_source(allowed, self.sizes.heads, sides)
        if mask.kind == "causal":
            return text
        if mask.kind in ("additive", "additive_min"):
            text += self.to_dtype_and_device()
            if mask.kind == "additive_min":
                text += f".clamp(min=torch.finfo({self.dtype}).min)"
        else:
            text += self.to_device()
        return text

    def perturb(
        self, args: CallArguments, value: str = "", **picked: Any
    ) -> CallArguments:
        """Replace keys and values at the given positions, at random or by `value`.

        Self-attention with one input has no separate keys and values: its tokens are
        replaced, and with them the queries at these positions.
        """
        index = self.adapter.index(**picked)
        inputs = list(args.inputs)
        for role in self.adapter.key_roles:
            name = self.assign(inputs[role], f"{inputs[role]}.clone()")
            shape = self.evaluate(f"{name}{index}").shape
            self.exec_line(f"{name}{index} = {value or self.random_expression(*shape)}")
            inputs[role] = name
        return replace(args, inputs=tuple(inputs))

    def concatenate(self, *names: str) -> str:
        """Concatenate sequences along their positions."""
        axis = self.adapter.layout.index("l")
        return self.assign(names[0], f"torch.cat([{', '.join(names)}], dim={axis})")

    # Calls

    def sized_arguments(
        self, args: CallArguments, start: int, parts: list[str]
    ) -> dict[str, str]:
        """The arguments that depend on sizes; the first token is at `start`.

        `parts` are the inputs as they are passed.
        """
        adapter = self.adapter
        texts = {**adapter.position_args, **adapter.extra_args}
        if not texts:
            return {}
        batch_size, length = self.batch_and_length(args.inputs[0])
        width = self.sizes.d_k
        if "{d_k}" in "".join(texts.values()):
            width = structure.rotary_width(self.namespace["attention"]) or width
            if width % 2:
                message = f"a rotary encoding needs pairs of features, not {width}"
                raise ValueError(message)
        rows, columns = adapter.grid(length)
        sizes = {
            "start": start,
            "stop": start + length,
            "length": length,
            "k_len": self.batch_and_length(args.inputs[-1])[1],
            "rows": rows,
            "columns": columns,
            "batch_size": batch_size,
            "d_k": width,
            "d_model": self.evaluate(args.inputs[0]).shape[adapter.layout.index("d")],
            "heads": self.sizes.heads,
            "query": parts[0],
        }
        dtype, device = self.to_dtype_and_device(), self.to_device()
        return {
            name: text.format(**sizes, dtype=dtype, device=device)
            for name, text in texts.items()
        }

    def with_edges(
        self, args: CallArguments, argument: str, edges: str
    ) -> dict[str, str]:
        """Other edges of a graph, with the features that all edges have."""
        given = {argument: edges}
        sized = self.sized_arguments(args, 0, [*args.inputs])
        for name, text in self.adapter.extra_args.items():
            if documented.ALL_EDGES in text:
                given[name] = f"{sized[name]}[:{edges}.shape[1]]"
        return given

    def batch_and_length(self, name: str) -> tuple[int, int]:
        """The batch size and the number of positions of an input."""
        sizes = dict(zip(self.adapter.layout, self.evaluate(name).shape, strict=True))
        return sizes.get("b", 1), sizes["l"]

    def argument_source(
        self, args: CallArguments, start: int = 0, /, **more: str
    ) -> str:
        """The arguments of a call, as written between its parentheses."""
        parts = list(args.inputs)
        if self.adapter.image:
            parts = [
                f"{name}{self.adapter.to_image(self.batch_and_length(name)[1])}"
                for name in parts
            ]
        sized = self.sized_arguments(args, start, parts)
        if self.adapter.input_key:
            parts = [f"{{{self.adapter.input_key!r}: {parts[0]}}}"]
        if self.adapter.packing:
            parts[-1] = self.adapter.packing.format(parts[-1])
        if self.adapter.by_keyword:
            pairs = zip(self.adapter.inputs, parts, strict=True)
            parts = [f"{name}={text}" for name, text in pairs]
        given = {name: repr(value) for name, value in self.adapter.call_args.items()}
        given |= sized
        given |= more
        if args.mask is not None:
            name, value = args.mask
            given[name] = value
        return ", ".join([*parts, *(f"{name}={text}" for name, text in given.items())])

    def call(
        self, args: CallArguments, function: str = "attention", **more: str
    ) -> str:
        """Call the attention; return the variable of its output."""
        return self.assign_output(self.call_source(args, function, **more), args)

    def call_for_all(self, args: CallArguments) -> str:
        """Call the attention; return all outputs, if it pools its tokens to several."""
        return self.assign_output(self.call_source(args), args, FIRST_OF_POOLED)

    def call_source(
        self, args: CallArguments, function: str = "attention", /, **more: str
    ) -> str:
        """A call of the attention, as source text.

        What its methods make for a call, those of another module make for one of it. A
        module that stores a state between calls is reset before.
        """
        given = self.argument_source(args, **more)
        if function.isidentifier():
            given = given.replace("attention.", f"{function}.")
            if self.adapter.reset:
                function = f"after_reset({function}, {self.adapter.reset!r})"
        return f"{function}({given})"

    def assign_output(self, call: str, args: CallArguments, without: str = "") -> str:
        """Assign the output of a call to a new variable.

        Whether a call returns a tuple may depend on the mode or on an argument, so the
        index of the output is looked up in the result of each call. What it ends with
        may be left out.
        """
        output = self.assign("y", call)
        value, line = self.namespace[output], self.lines[-1]
        index = find_output(value, self.evaluate(args.inputs[0]), self.adapter)
        if index := (index or "").removesuffix(without):
            self.namespace[output] = eval(
                f"value{index}", self.namespace, {"value": value}
            )
            self.lines[-1] = line + index
        return output

    def all_outputs(self, args: CallArguments, result: str) -> list[str]:
        """The output of a call, and others that are no weights, as source text.

        Two streams of tokens have an output each, and a projection each. So have
        features of pairs, an argument of which a call returns the next state, and the
        scores with which a pointer network chooses.
        """
        value, query = self.namespace[result], self.evaluate(args.inputs[0])
        first = find_output(value, query, self.adapter) or ""
        shape = eval(f"value{first}", self.namespace, {"value": value}).shape
        texts = [*args.inputs, *self.sized_arguments(args, 0, [*args.inputs]).values()]
        given = [getattr(self.evaluate(text), "shape", None) for text in texts]
        others = [
            index
            for index, part in parts_of(value).items()
            if isinstance(part, Tensor) and part.requires_grad
            if part.shape in given
            or (part.dim() == len(shape) and part.shape[-1] == shape[-1])
            or bool((part < 0).any())
            or (self.adapter.is_pooled and part.dim() == 1)
        ]
        return [f"{result}{index}" for index in dict.fromkeys([first, *others])]

    def call_for_weights(self, args: CallArguments) -> str:
        """Call the attention; return the variable of its attention weights."""
        source = self.adapter.weights_source
        if not source.startswith("."):
            call = self.call_source(args, **self.adapter.weights_args)
            return self.assign("weights", call + source.removeprefix("result"))
        self.call(args)
        return self.assign("weights", f"attention{source}")

    def gradient(self, output: str, name: str) -> str:
        """The gradient of `loss(output)` with respect to a variable."""
        options = "retain_graph=True, materialize_grads=True"
        text = f"torch.autograd.grad(loss({output}), {name}, {options})[0]"
        return self.assign("grad", text)

    # Comparisons

    def tolerance(self, *names: str, relative: float | None = None) -> float:
        """How much rounding may change a result as large as the given tensors are."""
        largest = 1.0
        for name in names:
            value = self.evaluate(name).detach()
            if value.numel():
                finite = value.nan_to_num(0, 0, 0)
                largest = max(largest, finite.abs().max().item())
        if relative is None:
            # 64 roundings in bfloat16 would be half of the largest entry, a tolerance
            # that accepts any mask.
            eps = torch.finfo(self.dtype).eps
            relative = eps * (64 if eps < 1e-5 else 4)
        return float(f"{relative * largest:.0e}")

    def assert_close(
        self,
        one: str,
        other: str,
        message: str,
        *,
        relative: float | None = None,
        **picked: slice | list[int],
    ) -> None:
        """Raise `LawViolation` where two outputs differ by more than rounding.

        `picked` restricts the comparison to positions (`l`) and batch items (`b`). In
        the message, `{place}` becomes the query and the batch item with the largest
        difference.
        """
        index = self.adapter.index(**picked)
        difference = self.evaluate(f"({other} - {one}){index}").detach().abs()
        if not difference.numel():
            return
        tolerance = self.tolerance(one, other, relative=relative)
        if not difference.isfinite().all():  # the same infinities are equal
            is_same = self.evaluate(f"({other} == {one}){index}")
            difference = difference.masked_fill(is_same, 0.0)
        # NaN is a difference, and compares as none.
        flat = difference.nan_to_num(torch.inf, torch.inf).flatten()
        largest = flat.max().item()
        if largest <= tolerance:
            return

        at = torch.unravel_index(flat.argmax(), difference.shape)
        found = dict(zip(self.adapter.layout, (int(n) for n in at), strict=False))
        # From an index of the picked part to one of the whole output.
        for axis, part in picked.items():
            size = self.evaluate(one).shape[self.adapter.layout.index(axis)]
            found[axis] = torch.arange(size)[part].tolist()[found[axis]]
        place = f"query {found['l']} of batch item {found.get('b', 0)}"
        message = message.format(place=place, **found)
        claim = f"({other} - {one}){index}.abs().max() <= {tolerance}"
        self.fail(claim, message, largest, tolerance)

    def assert_true(self, claim: str, message: str) -> None:
        """Raise `LawViolation` where an expression is false."""
        if not bool(self.evaluate(claim)):
            self.fail(claim, message, float("nan"), 0.0)

    def assert_finite(self, name: str, message: str) -> None:
        """Raise `LawViolation` where a tensor holds NaN or infinity."""
        self.assert_true(f"{name}.isfinite().all()", message)

    def is_unsupported(self, failure: ScriptError) -> bool:
        """Whether a call raises because a dtype is not supported.

        That is an operation without a kernel, or, unless `only` names the law, a fill
        value such as -1e9 that does not fit into float16, or operands of two dtypes,
        such as a table of float32: nobody can overlook it.
        """
        overflows = "cannot be converted" in str(failure)
        is_loud = overflows or bool(DTYPES_DIFFER.search(str(failure)))
        has_no_kernel = re.search("not implemented for|Unsupported dtype", str(failure))
        return bool(has_no_kernel) or (is_loud and not self.insist)

    def fail(
        self, claim: str, message: str, difference: float, tolerance: float
    ) -> None:
        """Raise `LawViolation` with the program so far, and the claim that is false."""
        code = self.program(f"assert {claim}")
        raise LawViolation(message, difference, tolerance, code, self.sizes)

    def program(self, last_line: str = "") -> str:
        """The lines so far, as a program that runs on its own."""
        body = "\n".join([*self.lines, last_line] if last_line else self.lines)
        used: dict[str, list[str]] = {}
        for name, function in TOOLS.items():
            if re.search(rf"\b{name}\(", body):
                used.setdefault(function.__module__, []).append(name)
        top = ["import copy", ""] if "copy." in body else []
        top += ["import torch", self.adapter.imports.rstrip("\n")]
        top += [f"from {module} import {', '.join(n)}" for module, n in used.items()]
        return "\n".join([*top, "", body, ""])
