r"""# Laws of what may be read

Nothing goes wrong with attention as often as its mask. A mask that is inverted, dropped
in evaluation, or shifted by one still gives outputs of the right shape and a loss that
falls; a model that can read the answer even learns faster. So each of these laws
*changes* something that must not be seen, and looks whether anything moved.

Source: the cases are those of published bugs; [the museum](../../compare/museum.md)
shows them.
"""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from attention_laws.law import law, need
from attention_laws.trial import Question, Trial


def causal_questions(trial: Trial, modes: list[str]) -> Iterator[Question]:
    """Begin anew, in each mode, for each way to ask for a causal mask."""
    need(trial.sizes.k_len > 1, "needs two tokens")
    length = trial.sizes.k_len
    everything = trial.everything(length, length)
    causal = everything.permute(2, 0, 1).tril().permute(1, 2, 0)
    keep = everything if trial.adapter.causal else causal
    ways = trial.ways(keep)
    need(ways, "is not causal, and takes no mask that could make it so")
    for mode in modes:
        for way in ways:
            trial.begin(mode)
            yield trial.ask(keep, way)


@law
def causality(trial: Trial) -> None:
    r"""Future tokens cannot influence the past.

    $$y_i(x_1, \dots, x_n) = y_i(x_1, \dots, x_i)$$

    A language model that sees the word it is asked for learns to copy it, with a
    beautiful loss. Tokens are exchanged from some position on, in training (dropout set
    to 0) and in evaluation; what was read before that position must not move.
    """
    for question in causal_questions(trial, trial.modes()):
        before = trial.call(question)
        for n in range(1, trial.sizes.k_len):
            with trial.attempt():
                after = trial.call(trial.change(question, l=slice(n, None)))
                said = f"{{place}} reads from key {n} or later"
                trial.same(before, after, said, l=slice(0, n))


@law
def causal_gradient(trial: Trial) -> None:
    r"""No gradient flows from the past into the future.

    $$\partial y_i / \partial x_j = 0 \quad \text{for } j \gt i$$

    The same law, asked of the backward pass, which custom kernels write by hand: a
    token must not be trained to be useful to tokens that cannot see it.
    """
    for question in causal_questions(trial, trial.gradient_modes()):
        readable = question.inputs[:1] if trial.adapter.alone else question.inputs[1:]
        for name in readable:
            trial.do(f"{name}.requires_grad_()")
        output = trial.call(question)
        for n in range(1, trial.sizes.k_len):
            past = trial.adapter.at(l=slice(0, n))
            with trial.attempt():
                for name in readable:
                    grad = trial.gradient(f"{output}{past}", name)
                    said = (
                        f"key {{l}} receives a gradient from query {n - 1} or earlier"
                    )
                    zero = f"torch.zeros_like({grad})"
                    trial.same(zero, grad, said, l=slice(n, None))


def padding_keeps(trial: Trial) -> Iterator[tuple[Tensor, list[int]]]:
    """Masks that hide keys of the first batch item, and which keys they hide."""
    k_len = trial.sizes.k_len
    q_len = k_len if trial.adapter.alone else trial.sizes.q_len
    for hidden in (range(k_len - 1, k_len), range(1, k_len), range(1)):
        keep = trial.everything(q_len, k_len)
        keep[:, list(hidden), 0] = False
        yield keep, list(hidden)


def padded_questions(trial: Trial) -> Iterator[tuple[Question, list[int], list[int]]]:
    """Begin anew in each mode, for each way; the hidden keys, the queries that count.

    Who reads only itself has filler among its queries, whose outputs nobody uses.
    """
    need(trial.sizes.k_len > 1, "needs two keys")
    asked = False
    # The end, all but the first, and the beginning; lengths can say the first two.
    for keep, hidden in padding_keeps(trial):
        for way in trial.ways(keep):
            for mode in trial.modes():
                asked = True
                trial.begin(mode)
                real = [n for n in range(len(keep)) if n not in hidden]
                queries = real if trial.adapter.alone else list(range(len(keep)))
                yield trial.ask(keep, way), hidden, queries
    need(asked, "takes no mask that could hide keys of one batch item only")


@law
def padding(trial: Trial) -> None:
    r"""Padded keys cannot influence anything.

    $$a_{ij} = 0 \;\Rightarrow\; \partial y_i / \partial k_j = \partial y_i / \partial
    v_j = 0$$

    Sentences of one batch are filled up to one length. If the filler is read, a
    sentence means something else beside a longer neighbour than alone. Hidden keys and
    values of one batch item are exchanged, for others of the usual size and for much
    larger ones, and nothing may move.
    """
    for question, hidden, queries in padded_questions(trial):
        before = trial.call(question)
        for text in ("", "100.0"):
            with trial.attempt():
                where = slice(hidden[0], hidden[-1] + 1)
                after = trial.call(trial.change(question, text, l=where, b=slice(0, 1)))
                said = f"{{place}} reads from padded keys of batch item 0, {hidden}"
                trial.same(before, after, said, l=queries)


@law(strict=True)
def padding_not_finite(trial: Trial) -> None:
    r"""Padded keys cannot influence anything, even if they hold NaN or infinity.

    $$0 \cdot \mathrm{NaN} = \mathrm{NaN}$$

    Filler often comes out of memory that nobody wrote to, or of a layer that had
    nothing to normalise. A weight of zero does not stop what is not finite: the product
    with the values is NaN. Who means "not read" has to leave the value out.
    """
    for question, hidden, queries in padded_questions(trial):
        before = trial.call(question)
        for text in ("torch.nan", "torch.inf"):
            with trial.attempt():
                where = slice(hidden[0], hidden[-1] + 1)
                after = trial.call(trial.change(question, text, l=where, b=slice(0, 1)))
                junk = text.removeprefix("torch.")
                said = (
                    f"{junk} in padded keys {hidden} of batch item 0 reaches {{place}}"
                )
                trial.same(before, after, said, l=queries)


@law
def batch_independence(trial: Trial) -> None:
    r"""Batch items do not talk to each other.

    $$\partial y_b / \partial x_{b'} = 0 \quad \text{for } b \neq b'$$

    What stands beside a sentence is chance. Statistics over the batch, a `view` that
    takes heads for batch items, and masks that fit only since two sizes are equal all
    break this, and results then depend on the neighbours.
    """
    need(trial.sizes.batch_size > 1, "needs two batch items")
    need("b" in trial.adapter.layout, "takes one sequence at a time")
    for mode in trial.modes():
        trial.begin(mode)
        question = trial.ask()
        before = trial.call(question)
        inputs = list(question.inputs)
        for role, name in enumerate(inputs):
            index = trial.adapter.at(b=slice(0, 1))
            inputs[role] = trial.let(name, f"{name}.clone()")
            trial.do(f"{inputs[role]}{index} *= -2")
        after = trial.call(replace(question, inputs=tuple(inputs)))
        said = "{place} reads from batch item 0"
        trial.same(before, after, said, b=slice(1, None))


@law
def empty_rows(trial: Trial) -> None:
    r"""A query that may read nothing is finite, in value and in gradient.

    $$\textstyle\sum_j m_{ij} = 0 \;\Rightarrow\; y_i,\ \partial L / \partial x \text{
    finite}$$

    A softmax over nothing divides 0 by 0. The NaN spreads through the backward pass
    into every weight of the model, even where the loss leaves the empty row out. The
    first batch item here may read nothing, and only the others are learned from.
    """
    keep = trial.everything(trial.sizes.k_len if trial.adapter.alone else None)
    keep[..., 0] = False
    ways = trial.ways(keep)
    need(ways, "takes no mask that could hide all keys of one batch item")
    for mode in trial.gradient_modes():
        for way in ways:
            trial.begin(mode)
            question = trial.ask(keep, way)
            for name in question.inputs:
                trial.do(f"{name}.requires_grad_()")
            # The sum leaves the empty rows out, as a loss over real tokens does.
            output = trial.call(question)
            said = "the output of a query that may read nothing is not finite"
            trial.finite(output, said)
            rest = trial.adapter.at(b=slice(1, None))
            if trial.sizes.batch_size == 1:
                rest = ""
            trial.do(f"{output}{rest}.sum().backward()")
            for name in question.inputs:
                trial.finite(f"{name}.grad", f"the gradient of `{name}` is not finite")
            if trial.adapter.is_module:
                trial.do("grads = [p.grad for p in attention.parameters()]")
                said = "gradients of parameters are not finite"
                trial.holds("all(g is None or g.isfinite().all() for g in grads)", said)


@law
def longer_padding(trial: Trial) -> None:
    r"""A longer padding changes nothing.

    $$y_i(x_1, \dots, x_n) = y_i(x_1, \dots, x_n, \text{filler}, \dots)$$

    The same sentence meets longer neighbours in one batch than in another. Two hidden
    tokens are added at the end. Means over positions, normalisation over time and
    counts of tokens notice them, though the mask is right.
    """
    adapter, k_len = trial.adapter, trial.sizes.k_len
    q_len = k_len if adapter.alone else trial.sizes.q_len
    longer = trial.everything(q_len + 2 * adapter.alone, k_len + 2)
    longer[:, k_len:] &= adapter.causal and adapter.alone
    ways = trial.ways(longer)
    need(ways, "takes no mask that could hide the filler")
    for mode in trial.modes():
        for way in ways:
            trial.begin(mode)
            question = trial.ask(trial.everything(q_len, k_len), adapter.always)
            before = trial.call(question)
            inputs = list(question.inputs)
            for role in [0] if adapter.alone else [1, 2]:
                sizes = replace(trial.sizes, q_len=2, k_len=2)
                filler = trial.draw("filler", *adapter.shape(sizes, role))
                inputs[role] = trial.join(inputs[role], filler)
            said = trial.spell(longer, way)
            after = trial.call(Question(tuple(inputs), said, longer))
            kept = trial.let("y", f"{after}{adapter.at(l=slice(0, q_len))}")
            trial.same(before, kept, "{place} reads from the filler")
