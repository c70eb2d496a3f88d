r"""# Laws of the formula

$$\operatorname{Attention}(Q, K, V) =
  \operatorname{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V$$

What follows from it holds for whoever claims to compute it: rows of weights sum to one,
the output is linear in the values, everything that may be read is read. Where the
projections can be found, the formula itself is asked, in float64.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2.
"""

from dataclasses import replace

import torch

from attention_laws.adapter import Mask
from attention_laws.law import Failed, NotApplicable, law, need
from attention_laws.trial import Question, Trial


@law
def rows_sum_to_one(trial: Trial) -> None:
    r"""Each row of weights sums to one.

    $$\textstyle\sum_j a_{ij} = 1, \quad a_{ij} \ge 0$$

    A query distributes its attention. Weights that are shown after dropout, or
    normalised along another axis, are something else. Where none are shown, all values
    are made equal: every mean of them is then the same.
    """
    adapter = trial.adapter
    shown = bool(adapter.weights)
    need(shown or not adapter.alone, "shows no weights, and takes no values")
    modes = [("eval", 0.0), ("train", 0.5 if shown else 0.0)]
    for mode, dropout in modes if adapter.is_module else modes[:1]:
        for keep, way in trial.cases():
            trial.begin(mode, dropout)
            question = trial.ask(keep, way)
            if not shown:
                constant_values(trial, question)
                continue
            weights = trial.weights(question)
            sums = trial.let(
                "sums", f"{weights}.sum({adapter.weights_axes.index('k')})"
            )
            said = f"a row of weights does not sum to 1 in {mode}"
            tolerance = trial.tolerance(sums)
            trial.holds(f"({sums} - 1).abs().max() <= {tolerance}", said)
            trial.holds(f"{weights}.min() >= 0", "a weight is negative")


def constant_values(trial: Trial, question: Question) -> None:
    """If all values are one, so is every mean of them."""
    adapter = trial.adapter
    query, key, value = question.inputs
    first = adapter.at(l=slice(0, 1))
    value = trial.let("value", f"{value}{first}.expand_as({value}).clone()")
    output = trial.call(replace(question, inputs=(query, key, value)))
    said = "{place} reads something else, though all values are equal"
    if adapter.is_module:
        trial.same(f"{output}{first}.expand_as({output})", output, said)
        return
    need(adapter.groups == 1 or "h" in adapter.layout, "shares values between heads")
    if adapter.groups > 1:
        axis = adapter.layout.index("h")
        value += f".repeat_interleave({adapter.groups}, dim={axis})"
    trial.same(f"{value}{first}.expand_as({output})", output, said)


@law
def reach(trial: Trial) -> None:
    r"""What a query may read, it does read.

    $$m_{ij} = 1 \;\Rightarrow\; \partial y_i / \partial v_j \neq 0$$

    The other half of every law about masks: one that hides too much also leaks nothing.
    A softmax gives every key some weight, so each one that is allowed must receive some
    gradient.
    """
    adapter = trial.adapter
    for keep, way in trial.cases():
        trial.begin()
        question = trial.ask(keep, way)
        read = question.inputs[0 if adapter.alone else 2]
        trial.do(f"{read}.requires_grad_()")
        output = trial.call(question)
        for query in range(len(keep)):
            with trial.attempt():
                index = adapter.at(l=slice(query, query + 1))
                grad = trial.gradient(f"{output}{index}", read)
                for key, item in question.keep[query].nonzero().tolist():
                    place = adapter.at(l=key, b=item)
                    said = f"query {query} of batch item {item} does not read key {key}"
                    hint = ", which it may (declare a `window`, if it has one)"
                    trial.holds(f"{grad}{place}.any()", said + hint)


def project(trial: Trial, question: Question) -> tuple[str, ...]:
    """Queries, keys and values in float64, `[batch_size, heads, length, d_k]`.

    Raises `NotApplicable` where they are not found.
    """
    adapter = trial.adapter
    if adapter.is_module:
        need(adapter.projections, "its projections were not found; name `projections`")
        trial.do("exact = copy.deepcopy(attention).double()")
        trial.do(f"heads = {trial.sizes.heads}")
    else:
        need(not adapter.alone, "is a function without queries, keys and values")
    inputs = question.inputs * (3 if adapter.alone else 1)
    found = []
    for part, name in zip(("query", "key", "value"), inputs, strict=True):
        heads = trial.sizes.heads // (1 if part == "query" else adapter.groups)
        text = f"{name}.double()"
        if adapter.is_module:
            text = adapter.projections[part].replace("{}", text)
        elif "h" not in adapter.layout:
            heads = 1
        text = f"to_heads({text}, {adapter.layout!r}, {heads})"
        found.append(trial.let(part[0], text))
    return tuple(found)


@law
def formula(trial: Trial) -> None:
    r"""The output follows the formula, computed in float64.

    $$y = \operatorname{softmax}\left(\frac{q k^\top}{\sqrt{d_k}}\right) v\, W_O$$

    A wrong scale, heads cut from the wrong axis, a fused matrix read in another order:
    each still learns something, and none computes attention with these weights. The
    attention's own projections are applied, and the rest is done as it stands in the
    formula.
    """
    adapter = trial.adapter
    need(adapter.positions == "none", f"has positions: {adapter.positions}")
    for mode in trial.modes():
        for keep, way in trial.cases():
            trial.begin(mode)
            question = trial.ask(keep, way)
            output = trial.call(question)
            q, k, v = project(trial, question)
            allowed = Mask("keep", "keep", "b1qk").spell(question.keep)
            allowed = trial.let("keep", allowed + trial.elsewhere())
            right = trial.let("right", f"by_formula({q}, {k}, {v}, {allowed})")
            right = trial.let("right", f"from_heads({right}, {adapter.layout!r})")
            if "out" in adapter.projections:
                right = trial.let(
                    "right", adapter.projections["out"].replace("{}", right)
                )
            said = "{place} is not what the formula gives"
            trial.same(right, output, said)


@law
def linear_in_value(trial: Trial) -> None:
    r"""The output is linear in the values, but for a constant.

    $$y(v) + y(v') = y(v + v') + y(0)$$

    Values are read, and nothing else: they decide on no weight.
    """
    need(not trial.adapter.alone, "takes no values of their own")
    for keep, way in trial.cases():
        trial.begin()
        question = trial.ask(keep, way)
        query, key, value = question.inputs
        other = trial.let("value", f"draw(5, *{value}.shape).to({value})")
        both = trial.let("value", f"{value} + {other}")
        zero = trial.let("value", f"torch.zeros_like({value})")
        y = [
            trial.call(replace(question, inputs=(query, key, each)))
            for each in (value, other, both, zero)
        ]
        said = "the output at {place} is not linear in the values"
        trial.same(f"({y[0]} + {y[1]})", f"({y[2]} + {y[3]})", said)


@law(once=True)
def gradients(trial: Trial) -> None:
    r"""Gradients are the slopes of the output, in float64.

    $$u^\top \nabla L(x) \approx \frac{L(x + \varepsilon u) - L(x - \varepsilon u)}{2
    \varepsilon}$$

    Backward passes written by hand, detached pieces and in-place tricks give a forward
    that is right and a gradient that is not. The slope is taken in random directions,
    with steps that are coarse enough for a softmax that is always in float32.
    """
    usual, trial.dtype = trial.dtype, torch.float64
    try:
        for keep, way in trial.cases():
            trial.begin()
            question = trial.ask(keep, way)
            for name in question.inputs:
                trial.do(f"{name}.requires_grad_()")
            try:
                output = trial.call(question)
            except Failed as failure:
                reason = f"does not run in float64: {failure}"
                raise NotApplicable(reason) from failure
            for name in question.inputs:
                for _ in range(3):
                    with trial.attempt():
                        slope(trial, question, output, name)
    finally:
        trial.dtype = usual


def slope(trial: Trial, question: Question, output: str, name: str) -> None:
    """Compare the gradient with a step forwards and a step back."""
    grad = trial.gradient(output, name)
    u = trial.draw("u", *trial.get(name).shape)
    trial.do(f"{u} /= {u}.norm()")
    losses = []
    for step in ("+ 0.01", "- 0.01"):
        moved = trial.let(name, f"{name} {step} * {u}")
        inputs = tuple(moved if each == name else each for each in question.inputs)
        losses.append(f"loss({trial.call(replace(question, inputs=inputs))})")
    seen = trial.let("slope", f"({losses[0]} - {losses[1]}) / 0.02")
    said = f"the gradient of `{name}` is not the slope of the output"
    rounding = f"0.05 * {grad}.square().mean().sqrt() + 0.001"
    trial.holds(f"(({grad} * {u}).sum() - {seen}).abs() <= {rounding}", said)


@law
def large_scores(trial: Trial) -> None:
    r"""Large scores in half precision are finite, and masks still hide.

    $$|q \cdot k| \approx 60{,}000 \lt 65{,}504$$

    float16 ends at 65,504. A fill of $-10^9$ does not exist there, one of $-10^4$ lies
    above true scores, so that hidden keys win; a softmax that does not subtract its
    maximum overflows beyond 11.
    """
    usual, trial.dtype = trial.dtype, torch.float16
    try:
        for mask, way in trial.cases():
            trial.begin()
            output = trial.call(enlarge(trial, trial.ask(mask, way)))
            trial.finite(output, "large scores in float16 give NaN or infinity")
        # Only the first key is left, and in one of the two its score is the least.
        keep = trial.everything(trial.sizes.k_len if trial.adapter.alone else None)
        keep[:, 1:] = False
        for way in trial.ways(keep):
            for sign in (1, -1):
                trial.begin()
                question = enlarge(trial, trial.ask(keep, way), sign)
                before = trial.call(question)
                after = trial.call(trial.change(question, l=slice(1, None)))
                said = "{place} reads hidden keys if scores are large"
                trial.same(before, after, said, l=slice(0, 1))
    except Failed as failure:
        if "not implemented for" in str(failure):
            raise NotApplicable("float16 is not supported here") from failure
        raise
    finally:
        trial.dtype = usual


def enlarge(trial: Trial, question: Question, sign: int = 1) -> Question:
    """The same question with inputs so large that scores are.

    Where queries and keys can be found, the largest product comes close to 60,000.
    Else all is taken 30 times. `sign` is that of the queries.
    """
    adapter = trial.adapter

    def larger(factor: float) -> Question:
        inputs = list(question.inputs)
        for role in [0] if adapter.alone else [0, 1]:
            times = f"{factor * (1 if role else sign):.3g}"
            inputs[role] = trial.let(inputs[role], f"{times} * {inputs[role]}")
        return replace(question, inputs=tuple(inputs))

    factor = 30.0
    if adapter.projections or not (adapter.is_module or adapter.alone):
        # Biases do not grow with the inputs, so one step is not enough.
        for _ in range(4):
            with trial.attempt():
                q, k, _ = project(trial, larger(factor))
                k = f"{k}.repeat_interleave({adapter.groups}, dim=1)"
                largest = trial.get(f"({q} @ {k}.mT).abs().max().item()")
                factor *= (60000 / max(largest, 1e-3)) ** 0.5
    return larger(factor)


@law
def every_parameter_learns(trial: Trial) -> None:
    r"""Every parameter receives gradient.

    $$\partial L / \partial w \neq 0$$

    A weight that was left out of the forward, or is used under `detach`, stays as it
    was drawn. (The bias of a key shifts a whole row of scores, which softmax cancels:
    its gradient is zero but for rounding, so of biases it is only asked that they are
    connected.)
    """
    adapter = trial.adapter
    need(adapter.is_module, "is a function, and has no parameters")
    need(trial.sizes.k_len > 1, "needs two keys")
    trial.begin("train" if adapter.trains else "eval")
    trial.do("weights = dict(attention.named_parameters())")
    learned = trial.get("[n for n, w in weights.items() if w.requires_grad]")
    need(learned, "has no parameters to learn")
    output = trial.call(trial.ask())
    trial.do(f"loss({output}).backward()")
    for name in learned:
        if name not in adapter.unused:
            grad = f"weights[{name!r}].grad"
            trial.holds(f"{grad} is not None", f"`{name}` receives no gradient")
            if trial.get(f"weights[{name!r}].dim()") > 1:
                trial.holds(f"{grad}.any()", f"the gradient of `{name}` is zero")
