r"""# A trial

A law is tested by making calls and comparing what comes back. A `Trial` makes them,
**as lines of Python that it runs and writes down**. If a comparison fails, the lines so
far *are* the counterexample: they import the attention, build it, call it, and end in
the `assert` that does not hold. What is shown is what was run.

Source: shrinking and replay are those of property-based testing; see [what a law
is](law.md).
"""

import copy
import inspect
import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attention_laws import tools
from attention_laws.adapter import Adapter, Mask, Sizes
from attention_laws.law import Broken, Failed

# What the lines of a trial may call.
TOOLS = {n: t for n, t in vars(tools).items() if inspect.isfunction(t)}


@dataclass(frozen=True)
class Question:
    """What is asked in one call: names of variables, and what may be read."""

    inputs: tuple[str, ...]
    mask: tuple[str, str] | None  # argument and expression
    keep: Tensor  # who may read what: queries, keys, batch items


class Trial:
    r"""One attention at one size, and the lines that were run on it."""

    def __init__(
        self,
        adapter: Adapter,
        sizes: Sizes,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        thorough: bool = False,
    ) -> None:
        self.adapter = adapter
        self.sizes = sizes
        self.seed = seed
        self.dtype = dtype
        self.device = device
        self.thorough = thorough
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self.counts: dict[str, int] = {}
        self.quietly = False  # are calls made without recording gradients?

    def begin(self, mode: str = "eval", dropout: float = 0.0) -> None:
        """Build the attention anew, in one of its `modes`; forget all lines.

        It is without dropout unless `dropout` says otherwise: dropout is random, and
        random things cannot be compared.
        """
        adapter = self.adapter
        self.lines, self.counts, self.quietly = [], {}, mode == "no_grad"
        mode = "eval" if self.quietly else mode
        self.names = {"torch": torch, "copy": copy, adapter.name: adapter.target}
        self.names |= TOOLS
        if not adapter.is_module:
            self.do(f"attention = {adapter.build(self.sizes)}")
            return
        if isinstance(adapter.target, type):
            self.do(f"torch.manual_seed({self.seed})")
        self.do(f"attention = {self.build()}")
        lazy = self.names["attention"].parameters()
        if any(nn.parameter.is_lazy(p) for p in lazy):
            self.call(self.ask())
            self.lines[-1] += "  # shapes of lazy weights"
        self.do("enliven(attention)")
        if tools.set_dropout(self.names["attention"], dropout):
            self.lines.append(f"set_dropout(attention, {dropout})")
        self.do(f"attention.{mode}()")

    def build(self) -> str:
        """The expression that makes a module, of the wanted dtype and device."""
        target, suffix = self.adapter.target, self.suffix()
        if isinstance(target, nn.Module):
            likes = {(p.dtype, p.device.type) for p in target.parameters()}
            if likes - {(self.dtype, self.device)}:
                suffix = f".to({self.device!r}, {self.dtype})"
        return self.adapter.build(self.sizes) + suffix

    def modes(self) -> list[str]:
        """The modes in which a law about outputs can be tested."""
        if self.adapter.is_module and self.adapter.trains:
            return ["eval", "train", "no_grad"]
        return ["eval", "no_grad"] if self.adapter.is_module else ["eval"]

    def gradient_modes(self) -> list[str]:
        """Those of the modes in which gradients are recorded."""
        return [mode for mode in self.modes() if mode != "no_grad"]

    def suffix(self) -> str:
        """The dtype and device of everything, where they are not the usual ones."""
        wanted = [] if self.device == "cpu" else [repr(self.device)]
        wanted += [] if self.dtype == torch.float32 else [str(self.dtype)]
        return f".to({', '.join(wanted)})" if wanted else ""

    def elsewhere(self) -> str:
        """The device of a mask, where it is not the usual one."""
        return "" if self.device == "cpu" else f".to({self.device!r})"

    def do(self, line: str) -> None:
        """Run one line, and write it down; what it prints is not shown."""
        self.lines.append(line)
        try:
            with redirect_stdout(io.StringIO()):
                exec(line, self.names)
        except Exception as error:
            raise Failed(error) from error

    def get(self, text: str) -> Any:
        """The value of an expression, which is not written down."""
        with redirect_stdout(io.StringIO()):
            return eval(text, self.names)

    def let(self, name: str, text: str, *, quietly: bool = False) -> str:
        """Give the value of `text` a fresh name that begins with `name`."""
        name = name.rstrip("0123456789")
        count = self.counts[name] = self.counts.get(name, 0) + 1
        fresh = name if count == 1 else f"{name}{count}"
        without = "with torch.no_grad(): " if quietly else ""
        self.do(f"{without}{fresh} = {text}")
        return fresh

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Lines inside are forgotten afterwards, unless they broke the law."""
        length, counts = len(self.lines), dict(self.counts)
        yield
        del self.lines[length:]
        self.counts = counts

    def draw(self, name: str, *shape: int) -> str:
        """A new variable of random numbers."""
        count = self.counts["draw"] = self.counts.get("draw", 0) + 1
        seed = 100 * self.seed + count
        text = f"draw({', '.join(map(str, (seed, *shape)))})"
        return self.let(name, text + self.suffix())

    def ways(self, keep: Tensor) -> list[Mask | None]:
        """The arguments that can say `keep`, or None where nothing need be said."""
        if bool(keep.all()):
            return [self.adapter.always]
        return [mask for mask in self.adapter.masks if mask.can_say(keep)]

    def everything(self, q_len: int | None = None, k_len: int | None = None) -> Tensor:
        """A mask that allows all, `[q_len, k_len, batch_size]`."""
        q_len = self.sizes.q_len if q_len is None else q_len
        k_len = self.sizes.k_len if k_len is None else k_len
        return torch.ones(q_len, k_len, self.sizes.batch_size, dtype=torch.bool)

    def cases(self) -> Iterator[tuple[Tensor, Mask | None]]:
        """No mask, then each way to say a causal one, then to hide a batch item's end.

        A mask that cannot be said is left out.
        """
        k_len = self.sizes.k_len
        q_len = k_len if self.adapter.alone else self.sizes.q_len
        everything = self.everything(q_len, k_len)
        yield everything, self.adapter.always
        if not self.adapter.causal and k_len > 1:
            causal = torch.ones(k_len, k_len, dtype=torch.bool).tril()
            causal = causal[..., None].repeat(1, 1, self.sizes.batch_size)
            yield from ((causal, way) for way in self.ways(causal))
        padded = everything.clone()
        padded[:, k_len // 2 + 1 :, 0] = False
        if not padded.all():
            yield from ((padded, way) for way in self.ways(padded))

    def ask(self, keep: Tensor | None = None, way: Mask | None = None) -> Question:
        """Fresh inputs, of the lengths of `keep`, and the mask said by `way`."""
        keep = self.everything() if keep is None else keep
        adapter = self.adapter
        q_len, k_len = keep.shape[:2]
        sizes = Sizes(
            self.sizes.batch_size, q_len, k_len, self.sizes.heads, self.sizes.d_k
        )
        inputs = tuple(
            self.draw(name, *adapter.shape(sizes, role))
            for role, name in enumerate(adapter.inputs)
        )
        return Question(inputs, self.spell(keep, way), self.adapter.effective(keep))

    def spell(self, keep: Tensor, way: Mask | None) -> tuple[str, str] | None:
        """The mask as argument and expression."""
        way = way or self.adapter.always
        if way is None:
            return None
        text = way.spell(keep, self.sizes.heads)
        if way.kind == "flag":
            return way.name, text
        if way.kind in ("additive", "minimum"):
            text += self.suffix()
            if way.kind == "minimum":
                text += f".clamp(min=torch.finfo({self.dtype}).min)"
        else:
            text += self.elsewhere()
        return way.name, self.let(way.name, text)

    def change(self, question: Question, text: str = "", **where: Any) -> Question:
        """Other keys and values at the given positions: drawn anew, or `text`.

        Who reads only itself gets other tokens there, which ask as well.
        """
        index = self.adapter.at(**where)
        inputs = list(question.inputs)
        for role in [0] if self.adapter.alone else [1, 2]:
            name = self.let(inputs[role], f"{inputs[role]}.clone()")
            shape = self.get(f"{name}{index}").shape
            if text:
                self.do(f"{name}{index} = {text}")
            else:
                self.counts["draw"] = seed = self.counts.get("draw", 0) + 1
                sizes = ", ".join(map(str, (100 * self.seed + seed, *shape)))
                self.do(f"{name}{index} = draw({sizes}){self.suffix()}")
            inputs[role] = name
        return Question(tuple(inputs), question.mask, question.keep)

    def arguments(self, question: Question, **more: str) -> str:
        """What stands between the brackets of a call."""
        parts = list(question.inputs)
        if self.adapter.keyword:
            names = zip(self.adapter.inputs, question.inputs, strict=True)
            parts = [f"{name}={variable}" for name, variable in names]
        given = {name: repr(value) for name, value in self.adapter.call.items()} | more
        if question.mask is not None:
            given[question.mask[0]] = question.mask[1]
        return ", ".join([*parts, *(f"{name}={text}" for name, text in given.items())])

    def call(self, question: Question, by: str = "attention", **more: str) -> str:
        """Call the attention; the name of its output."""
        text = f"{by}({self.arguments(question, **more)})"
        return self.let("y", text + self.adapter.output, quietly=self.quietly)

    def weights(self, question: Question) -> str:
        """Call the attention; the name of its weights."""
        where = self.adapter.weights
        if where.startswith("["):
            text = f"attention({self.arguments(question)}){where}"
            return self.let("weights", text)
        self.call(question)
        return self.let("weights", f"attention{where}")

    def gradient(self, output: str, name: str) -> str:
        """The gradient of `output`, weighed at random, with respect to `name`."""
        how = "retain_graph=True, materialize_grads=True"
        text = f"torch.autograd.grad(loss({output}), {name}, {how})[0]"
        return self.let("grad", text)

    def join(self, *names: str) -> str:
        """Pieces of a sequence, one after the other."""
        axis = self.adapter.layout.index("l")
        return self.let(names[0], f"torch.cat([{', '.join(names)}], dim={axis})")

    def tolerance(self, *names: str, relative: float | None = None) -> float:
        """How far rounding may move a result that is as large as these are."""
        largest = 1.0
        for name in names:
            value = self.get(name).detach()
            finite = value[value.isfinite()]
            if finite.numel():
                largest = max(largest, finite.abs().max().item())
        eps = torch.finfo(self.dtype).eps
        if relative is None:
            relative = eps * (64 if eps < 1e-5 else 4)
        return float(f"{relative * largest:.0e}")

    def same(
        self,
        one: str,
        other: str,
        said: str,
        *,
        relative: float | None = None,
        **where: slice | list[int],
    ) -> None:
        """Raise `Broken` where two outputs differ by more than rounding.

        `where` picks positions (`l`) and batch items (`b`) of both. In `said`, {place}
        becomes the query and batch item with the largest difference.
        """
        index = self.adapter.at(**where)
        difference = self.get(f"({other} - {one}){index}").detach().abs()
        if not difference.numel():
            return
        tolerance = self.tolerance(one, other, relative=relative)
        flat = difference.nan_to_num(torch.inf, torch.inf).flatten()
        amount = flat.max().item()
        if amount <= tolerance:
            return
        worst = torch.unravel_index(flat.argmax(), difference.shape)
        found = dict(zip(self.adapter.layout, (int(n) for n in worst), strict=False))
        for axis, picked in where.items():
            size = self.get(one).shape[self.adapter.layout.index(axis)]
            found[axis] = torch.arange(size)[picked].tolist()[found[axis]]
        place = f"query {found['l']} of batch item {found.get('b', 0)}"
        said = said.format(place=place, **found)
        claim = f"({other} - {one}){index}.abs().max() <= {tolerance}"
        self.fail(claim, said, amount, tolerance)

    def holds(self, claim: str, said: str) -> None:
        """Raise `Broken` where an expression is not true."""
        if not bool(self.get(claim)):
            self.fail(claim, said, float("nan"), 0.0)

    def finite(self, name: str, said: str) -> None:
        """Raise `Broken` where a tensor holds NaN or infinity."""
        self.holds(f"{name}.isfinite().all()", said)

    def fail(self, claim: str, said: str, amount: float, tolerance: float) -> None:
        """Raise `Broken`, with the lines so far and the claim that does not hold."""
        raise Broken(said, amount, tolerance, self.code(f"assert {claim}"))

    def code(self, last: str = "") -> str:
        """The lines so far as a program that runs on its own."""
        body = "\n".join([*self.lines, last] if last else self.lines)
        used = [name for name in TOOLS if f"{name}(" in body]
        top = ["import copy", ""] if "copy." in body else []
        top += ["import torch", self.adapter.imports.rstrip("\n")]
        top += [f"from attention_laws.tools import {', '.join(used)}"] * bool(used)
        return "\n".join([*top, "", body, ""])
