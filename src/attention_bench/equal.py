r"""# Equal before fast

Contestants are built, put the same question, and sent home if they answer another one.
The judge is the formula, head by head, in float32, with the weights and tokens that all
are given, rounded as theirs are. Compared is the output; where a training step is
timed, the gradient of the input too; and where weights are shown, their mean over the
heads.

Dropout is off for that, or no two would agree. Where it will be on, it is turned on
once to see that it acts: who forgets it is fast for no good reason. How far it moves
the output must be about as far as it moves the judge's.

What is timed afterwards is `step`: a forward pass in inference mode, or a forward and a
backward pass, with gradients for the input and for all weights. There is no optimizer,
which would cost all of them the same.

Source: the rule that only equal things are compared is that of the
[equivalence matrix](../../compare/equivalence.md).
"""

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from attention_bench.contestants import CONTESTANTS, Contestant, Entry, compiled
from attention_bench.peers import PEERS
from attention_bench.setting import Setting
from attention_bench.timing import TOLERANCES, Answer, gate, reason

COMPILED = "+compile"

# What takes so many seconds needs no second call to be warm.
WARM = 0.1

# Dropout moves everybody's output by about as much; how much exactly is chance.
SIMILAR = 2.0


def everyone() -> dict[str, Contestant]:
    r"""All contestants by name, those included that are compiled first.

    >>> everyone()["nn-fastpath+compile"].training
    False
    """
    plain = CONTESTANTS | PEERS
    others = {
        f"{name}{COMPILED}": Contestant(
            compiled(one.build),
            one.told,
            training=one.training,
            dropout=one.dropout,
        )
        for name, one in plain.items()
        if name != "flex"  # which is compiled as it is
    }
    return plain | others


def answer(entry: Entry, setting: Setting) -> Answer:
    r"""What an entry says, dropout off: its output, and what else can be compared.

    >>> setting = Setting(2, 3, d_model=10, heads=5, training=True)
    >>> entry = CONTESTANTS["nn-weights"].build(setting.core(), setting)
    >>> list(answer(entry, setting))
    ['output', 'weights', 'input gradient']
    """
    entry.module.eval()
    x = entry.turned(setting.x())
    if not setting.training:
        with torch.inference_mode():
            return entry.read(entry.call(x))
    x.requires_grad_()
    result = entry.call(x)
    found = entry.read(result)
    output = result[0] if isinstance(result, tuple) else result
    (gradient,) = torch.autograd.grad(output, x, entry.turned(setting.above()))
    return found | {"input gradient": entry.turned(gradient)}


def judge(setting: Setting, dropout: float = 0.0) -> Answer:
    r"""What all must say: the formula, head by head, in float32 or better.

    It is nobody's code that is timed here, and needs memory for one head at a time
    where no gradient is wanted.

    >>> setting = Setting(2, 3, "causal", d_model=10, heads=5)
    >>> core = setting.core()
    >>> x = setting.x()
    >>> output = core(query=x, key=x, value=x, mask=setting.keep())
    >>> torch.allclose(judge(setting)["output"], output, atol=1e-6)
    True
    """
    better = torch.promote_types(setting.dtype, torch.float32)
    core = setting.core().to(better)
    x = setting.x().to(better)  # [seq_len, batch_size, d_model]
    x.requires_grad_(setting.training)
    keep = setting.keep()
    hidden = None if keep is None else ~keep.permute(2, 0, 1)  # [..., seq_len]
    contexts, weights = [], torch.zeros((), device=setting.device)
    with torch.set_grad_enabled(setting.training and not dropout):
        projected = [core.query(x) * core.scale, core.key(x), core.value(x)]
        for query, key, value in zip(*(p.unbind(2) for p in projected), strict=True):
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
            scores = query @ key.mT  # [batch_size, seq_len, seq_len]
            if hidden is not None:
                scores = scores.masked_fill(hidden, -math.inf)
            attn = scores.softmax(dim=-1)  # [batch_size, seq_len, seq_len]
            weights = attn.detach() / setting.heads + weights
            attn = F.dropout(attn, dropout)  # [batch_size, seq_len, seq_len]
            contexts.append((attn @ value).transpose(0, 1))
        output = core.output(torch.cat(contexts, dim=-1))  # [seq_len, ..., d_model]
    found = {"output": output.detach(), "weights": weights.permute(1, 2, 0)}
    if output.requires_grad:
        above = setting.above().to(better)
        (found["input gradient"],) = torch.autograd.grad(output, x, above)
    return found


def moved(
    before: Tensor,  # [seq_len, batch_size, d_model]
    after: Tensor,  # [seq_len, batch_size, d_model]
) -> float:
    r"""How far dropout has moved an output, relative to its size.

    >>> before = torch.full((2, 1, 3), 4.0)
    >>> moved(before, before + 1)
    0.25
    """
    share: Tensor = (after - before).norm() / before.norm()
    return share.item()


def dropped(entry: Entry, setting: Setting) -> Tensor:
    r"""The output of an entry while it is training: `[seq_len, batch_size, d_model]`.

    >>> setting = Setting(2, 3, d_model=10, heads=5)
    >>> entry = CONTESTANTS["nn"].build(setting.core(), setting)
    >>> dropped(entry, setting).shape
    torch.Size([3, 2, 10])
    """
    entry.module.train()
    with torch.no_grad():
        said = entry.read(entry.call(entry.turned(setting.x())))
    entry.module.eval()
    return said["output"].float()


def admit(
    names: Iterable[str], setting: Setting, known: dict[str, Contestant]
) -> tuple[dict[str, Entry], dict[str, float], dict[str, str]]:
    r"""Build all that take part; return those equal, how far apart, and who is not.

    >>> setting = Setting(2, 3, d_model=10, heads=5)
    >>> entries, apart, left_out = admit(
    ...     ["core", "nn"], setting, CONTESTANTS)
    >>> list(entries), apart["nn"] < 1e-6, left_out
    (['core', 'nn'], True, {})
    """
    entries: dict[str, Entry] = {}
    apart: dict[str, float] = {}
    left_out: dict[str, str] = {}
    right, ours = judge(setting), setting.core()
    expected = 0.0
    if setting.dropout:
        noisy = judge(setting, setting.dropout)["output"]
        expected = moved(right["output"], noisy)
    for name in (n for n in names if known[n].takes_part(setting)):
        try:
            entry = known[name].build(ours, setting)
            # One by one: all answers at once would fill the memory of a small machine.
            start = time.perf_counter()
            said = {name: as_float(answer(entry, setting))}
            entry.seconds = time.perf_counter() - start
            distance, unequal = gate(said, right, TOLERANCES[setting.dtype])
            apart |= distance
            left_out |= unequal
            if setting.dropout and name not in unequal:
                share = moved(said[name]["output"], dropped(entry, setting)) / expected
                if not 1 / SIMILAR < share < SIMILAR:
                    left_out[name] = (
                        f"another function: output moved by dropout {share:.2g} times "
                        f"as far as it should be"
                    )
        except Exception as error:
            left_out[name] = reason(error)
        if name not in left_out:
            entries[name] = entry
    return entries, apart, left_out


def as_float(said: Answer) -> Answer:
    """The answer in float32 or better, to be compared."""
    return {
        part: tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        for part, tensor in said.items()
    }


def step(entry: Entry, setting: Setting) -> Callable[[], None]:
    r"""What is timed: a forward pass, or a forward and a backward pass.

    >>> setting = Setting(2, 3, d_model=10, heads=5, training=True)
    >>> entry = CONTESTANTS["sdpa"].build(setting.core(), setting)
    >>> step(entry, setting)()
    >>> {p.grad for p in entry.module.parameters()}
    {None}
    """
    entry.module.train(setting.training)
    x = entry.turned(setting.x())
    if not setting.training:

        def forward() -> None:
            with torch.inference_mode():
                entry.call(x)

        return forward

    x.requires_grad_()
    above = entry.turned(setting.above())
    parameters = list(entry.module.parameters())

    def forward_and_backward() -> None:
        result = entry.call(x)
        output: Any = result[0] if isinstance(result, tuple) else result
        output.backward(above)
        # Dropped, as an optimizer would after its step: the next ones are new.
        x.grad = None
        for parameter in parameters:
            parameter.grad = None

    return forward_and_backward
