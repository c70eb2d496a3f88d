r"""# Asking an attention about itself

An `Inquiry` collects what is known about an attention while it is being found out, and
makes small calls to find out more. Its calls have sizes that are pairwise different, so
that a wrong shape does not pass by coincidence. This page is about what can be read off
signatures: how the attention is built, and what its inputs are called.

Source: the [dictionary](names.md) of names.
"""

import inspect
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attention_laws import names
from attention_laws.adapter import Adapter, Fact, Mask, Sizes
from attention_laws.law import Failed
from attention_laws.options import CannotBeCalled, Options
from attention_laws.trial import Question, Trial


class Inquiry:
    """An adapter that grows, fact by fact."""

    def __init__(self, adapter: Adapter, options: Options) -> None:
        self.adapter = adapter
        self.options = options
        self.problem = ""  # why the first call that did not succeed did not

    def learn(self, name: str, value: object, how: str, **fields: Any) -> None:
        """Enter a fact, and the fields of the adapter that it settles."""
        fact = Fact(name, str(value), how)
        self.settle(facts=(*self.adapter.facts, fact), **fields)

    def settle(self, **fields: Any) -> None:
        """Enter what need not be reported."""
        self.adapter = replace(self.adapter, **fields)

    def ask(
        self,
        way: Mask | None = None,
        hide: tuple[slice, int] | None = None,
        k_len: int = 5,
        mode: str = "eval",
        **fields: Any,
    ) -> tuple[Trial, Question] | None:
        """One call of a changed adapter; None where it fails or answers nonsense."""
        options = self.options
        adapter = replace(self.adapter, **fields)
        # Sizes that coincide would let a wrong shape pass.
        batch = 1 if adapter.layout == "ld" else 2 + (adapter.heads == 2)
        sizes = Sizes(batch, 5, k_len, adapter.heads, adapter.d_k)
        try:
            trial = Trial(adapter, sizes, **options.of_trials())
            trial.begin(mode)
            keep = trial.everything()
            if hide is not None:
                keep[hide] = False
            question = trial.ask(keep, way)
            result = trial.get(f"attention({trial.arguments(question)})")
        except Exception as error:
            cause = error.error if isinstance(error, Failed) else error
            self.problem = self.problem or f"raises {Failed(cause)}{raised_at(cause)}"
            return None
        query = trial.get(question.inputs[0])
        output = find_output(result, query)
        if output is None:
            kind = type(result).__name__
            self.problem = self.problem or (
                f"returns {kind}, where a tensor of {list(query.shape)} was awaited"
            )
            return None
        trial.adapter = replace(adapter, output=output)
        return trial, question


def raised_at(error: Exception) -> str:
    """Where an error was raised: the last line that is neither torch's nor ours."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f for f in frames if not f.filename.startswith(ours)]
    return f" ({Path(lines[-1].filename).name}:{lines[-1].lineno})" if lines else ""


def find_output(result: Any, query: Tensor) -> str | None:
    """Where in a result lies what has the shape of the query, but for its width."""
    parts: list[tuple[str, Any]] = [("", result)]
    if isinstance(result, dict):
        parts = [(f"[{key!r}]", value) for key, value in result.items()]
    elif isinstance(result, tuple | list):
        parts = [(f"[{n}]", value) for n, value in enumerate(result)]
    for where, value in parts:
        if isinstance(value, Tensor) and value.shape[:-1] == query.shape[:-1]:
            return where
    return None


def effect(
    trial: Trial, question: Question, change: dict[str, Any], look: dict[str, Any]
) -> float:
    """How far the output moves at `look` if keys and values do at `change`."""
    before = trial.call(question)
    after = trial.call(trial.change(question, **change))
    difference = trial.get(f"({after} - {before}){trial.adapter.at(**look)}")
    return float(difference.detach().abs().nan_to_num(torch.inf).sum())


def refuse_unknown(inquiry: Inquiry) -> None:
    """Raise `CannotBeCalled` where an option names an argument that is not there."""
    adapter, options = inquiry.adapter, inquiry.options
    parameters = names.arguments(adapter.target)
    if not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    taken = names.named(parameters)
    wanted = {"mask": [*options.mask], "call": [*options.call]}
    wanted["cache"] = [*(options.cache or ())][:1]
    for option, said in wanted.items():
        for name in said:
            if name not in taken and name != "none":
                raise CannotBeCalled(
                    f"`{option}` names `{name}`, which `{adapter.name}` does not take; "
                    f"it takes {', '.join(taken)}"
                )


def find_heads(inquiry: Inquiry) -> None:
    """How many heads a module has, or a function is to be given."""
    target, options = inquiry.adapter.target, inquiry.options
    fixed = isinstance(target, nn.Module)
    heads = options.heads or names.attribute(target, "{heads}")
    kv_heads = options.kv_heads or names.attribute(target, "{kv_heads}")
    if heads is None:
        heads = 1 if fixed else 2 * kv_heads if kv_heads else 3
    groups = heads // kv_heads if kv_heads else 1
    inquiry.settle(heads=heads, groups=groups, fixed=fixed)
    if kv_heads:
        inquiry.learn("heads", f"{heads}, {kv_heads} of keys and values", "given")


def find_settings(inquiry: Inquiry) -> None:
    """What the constructor wants."""
    target, options = inquiry.adapter.target, inquiry.options
    settings = {name: repr(value) for name, value in options.settings.items()}
    known: dict[str, Any] = {"{heads}": options.heads, "{d_model}": options.d_model}
    known["{kv_heads}"] = options.kv_heads
    meanings = set()
    wanted = names.named(inspect.signature(target).parameters.values())
    for name, required in wanted.items():
        meaning = names.MEANING.get(name, "")
        meanings.add(meaning)
        if name in settings:
            known[meaning] = known.get(meaning) or options.settings[name]
        elif meaning.startswith("{") or (required and meaning):
            settings[name] = meaning
        elif required:
            raise CannotBeCalled(
                f"`{target.__name__}` wants `{name}`, and it is not known what that "
                f"is; say it with `--with {name}=...`, or check a module that is built"
            )
    given = [known.get(name) for name in ("{heads}", "{d_model}", "{kv_heads}")]
    heads, d_model, kv_heads = given
    heads_given = bool(heads)
    if not heads:
        heads = 2 * kv_heads if kv_heads else 3
        if "{heads}" not in meanings or (d_model and d_model % heads):
            heads = 1
    inquiry.settle(
        settings=settings,
        heads=heads,
        d_k=d_model // heads if d_model else 4,
        groups=heads // kv_heads if kv_heads else 1,
        fixed=bool(heads_given or d_model),
    )
    adapter = inquiry.adapter
    shown = adapter.build(Sizes(2, 5, 5, heads, adapter.d_k))
    inquiry.learn("built as", shown, "given" if options.settings else "inferred")


def find_inputs(inquiry: Inquiry) -> None:
    """One input or three, and whether they are passed by name."""
    adapter, options = inquiry.adapter, inquiry.options
    parameters = names.arguments(adapter.target)
    named = names.named(parameters)
    if not parameters and inspect.isbuiltin(adapter.target):
        named = dict.fromkeys(names.INPUTS[0], True)
    order = list(named)
    inputs: tuple[str, ...] = options.inputs or next(
        (roles for roles in names.INPUTS if set(roles) <= set(order)), tuple(order[:1])
    )
    if len(inputs) not in (1, 3):
        raise CannotBeCalled(
            f"`{adapter.name}` takes {', '.join(order) or 'nothing'}; say which are "
            f"its inputs with `--inputs x` or `--inputs query,key,value`"
        )
    keyword = order[: len(inputs)] != list(inputs) and set(inputs) <= set(order)
    keyword |= any(p.kind is p.KEYWORD_ONLY for p in parameters if p.name in inputs)
    # What the signature does not name goes where it takes any name.
    keyword |= not set(inputs) & set(order) and any(
        p.kind is p.VAR_KEYWORD for p in parameters
    )
    call = {
        name: None
        for name, required in named.items()
        if required and name not in inputs and names.LIKE_MASK.search(name)
    }
    inquiry.settle(call=call | dict(options.call))
    how = "given" if options.inputs else "inferred"
    inquiry.learn("inputs", ", ".join(inputs), how, inputs=inputs, keyword=keyword)
