"""An honest attention, and one that breaks each law; none of them is ours to use."""

import math
from typing import Any

import torch
from torch import Tensor, nn


class Honest(nn.Module):
    """Batch first; the mask is `[batch_size, q_len, k_len]`, True = may be read."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Any:
        q, k, v = self.query(query), self.key(key), self.value(value)
        q, k, v = (self.split(x) for x in (q, k, v))
        weights = self.weigh(self.score(q, k), mask)
        return self.join(self.read(self.dropout(weights), v))

    def split(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q / math.sqrt(q.shape[-1]) @ k.mT

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            # The least number there is: an empty row is uniform, and finite.
            least = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(~mask[:, None], least)
        return scores.softmax(dim=-1)

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights @ v

    def join(self, context: Tensor) -> Tensor:
        joined: Tensor = self.out(context.transpose(1, 2).flatten(2))
        return joined


class Alone(Honest):
    """Reads itself, and looks backwards only."""

    corner = 0

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        return super().forward(x, x, x, ones.tril(self.corner)[None])


# Laws of what may be read.


class SeesOneTooMany(Alone):
    corner = 1


class SeesAllInEval(Alone):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, mask if self.training else None)


class SeesAllWithoutGradients(Alone):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, mask if torch.is_grad_enabled() else None)


class LeaksBackwards(Alone):
    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        future = v.sum(dim=2, keepdim=True)
        return weights @ v + (future - future.detach())


class MultipliesByTheMask(Honest):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return (scores if mask is None else scores * mask[:, None]).softmax(dim=-1)


class CountsKeys(Honest):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * math.log(1 + k.shape[2])


class KnowsItsNeighbours(Honest):
    def join(self, context: Tensor) -> Tensor:
        output = super().join(context)
        return output - output.mean(dim=0) if self.training else output


class DividesNothing(Honest):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -torch.inf)
        return scores.softmax(dim=-1)


class ZeroesTooLate(DividesNothing):
    """Finite forwards; backwards, 0 times the NaN that was filled over is NaN."""

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return super().read(weights, v).nan_to_num()


class AddsWhatIsNotThere(Honest):
    """Adds 0, but where there are no keys: there it divides by their number."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Any:
        output = super().forward(query, key, value, mask)
        if mask is None:
            return output
        count = mask.sum(dim=-1, keepdim=True).to(query)
        return output + self.more(count / count - 1, query)

    def more(self, zero: Tensor, query: Tensor) -> Tensor:
        return zero


class CarriesQueries(AddsWhatIsNotThere):
    """Only the gradient of the queries is NaN."""

    def more(self, zero: Tensor, query: Tensor) -> Tensor:
        return (zero * query).masked_fill(zero.isnan(), 0)


class LearnsFromWhatIsNotThere(AddsWhatIsNotThere):
    """Only the gradient of a parameter is NaN."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.gate = nn.Parameter(torch.ones(1))

    def more(self, zero: Tensor, query: Tensor) -> Tensor:
        return (zero * self.gate).masked_fill(zero.isnan(), 0)


# Laws of the formula.


class ShowsDropout(Honest):
    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        self.attn = weights.detach()
        return weights @ v


class Overweight(Honest):
    """Its weights are shown to nobody, and sum to more for later queries."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        more = torch.arange(scores.shape[2], device=scores.device)[:, None]
        return super().weigh(scores, mask) * (1 + more).to(scores)


class Repels(Honest):
    """Rows of what it shows sum to 1, and not all of it is positive."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = super().weigh(scores, mask)
        self.attn = (2 * weights - weights.flip(-1)).detach()
        return weights


def nine_tenths(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A function of heads, whose weights sum to less."""
    weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(dim=-1)
    return 0.9 * weights @ value


class OverlooksTheFirst(Honest):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        first = torch.arange(scores.shape[-1], device=scores.device) == 0
        return super().weigh(scores.masked_fill(first, -1e4), mask)


class ScalesByTheWidth(Honest):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / math.sqrt(q.shape[-1] * self.heads)


class BendsValues(Honest):
    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights @ v.tanh()


class DetachesQueries(Honest):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q.detach(), k)


class FillsTooLittle(Honest):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -1e4)
        return scores.softmax(dim=-1)


class ForgetsToSubtract(Honest):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = scores.exp()
        if mask is not None:
            weights = weights * mask[:, None]
        return weights / weights.sum(dim=-1, keepdim=True)


class ForgetsToSubtractAlone(Alone, ForgetsToSubtract):
    pass


class HasAnIdleLayer(Honest):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.gate = nn.Linear(d_model, d_model)


class GatesByZero(HasAnIdleLayer):
    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights @ v + 0 * (self.gate.weight.sum() + self.gate.bias.sum())


# Laws of order and distance.


class NumbersKeys(Honest):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(k.shape[2], device=k.device).to(k)
        return super().score(q, k) + place


class NormalisesQueries(Honest):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores.softmax(dim=2), mask)


class ViewsAsHeads(Honest):
    def split(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], self.heads, x.shape[1], -1)


class Around(Honest):
    """Reads itself, in both directions."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, x, x)


class ViewsAsHeadsAround(Around, ViewsAsHeads):
    pass


class Cached(Honest):
    """Reads itself and what is kept of the past."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Any:  # type: ignore[override]
        seen = x if past is None else torch.cat([past, x], dim=1)
        ones = torch.ones(1, x.shape[1], seen.shape[1], dtype=torch.bool)
        return super().forward(x, seen, seen, ones.tril(self.corner(ones))), seen

    def corner(self, ones: Tensor) -> int:
        return ones.shape[2] - ones.shape[1]


class CachedTopLeft(Cached):
    def corner(self, ones: Tensor) -> int:
        return 0


class TopLeftCorner(Honest):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and not mask.all():
            # Takes every mask for a causal one, and draws it anew.
            mask = torch.ones_like(mask).tril()
        return super().weigh(scores, mask)


class Window(Alone):
    """Reads itself and `reach` tokens before it."""

    reach = 2

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        return super().weigh(scores, mask.triu(-self.reach))


class WideWindow(Window):
    reach = 3


class NarrowWindow(Window):
    reach = 1


class Linear(Alone):
    """A bias that falls with the distance, by 0.5 for each token."""

    slope = 0.5

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(k.shape[2], device=k.device).to(k)
        bias = self.slope * (place - place[:, None])
        return super().score(q, k) + bias


class Rising(Linear):
    slope = -0.5


class Quadratic(Linear):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(k.shape[2], device=k.device).to(k)
        return Alone.score(self, q, k) - (place - place[:, None]) ** 2 / 8


class Rotary(Alone):
    """Neighbouring components turn together, by an angle that grows with the place."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(self.turn(q), self.turn(k))

    def turn(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[2], device=x.device)[:, None].to(x)
        pair = torch.arange(x.shape[3] // 2, device=x.device).to(x)
        angle = self.angles(place * 0.3**pair)
        other = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        return x * angle.cos() + other * angle.sin()

    def angles(self, angle: Tensor) -> Tensor:
        return angle.repeat_interleave(2, dim=-1)


class Unpaired(Rotary):
    def angles(self, angle: Tensor) -> Tensor:
        return torch.cat([angle, angle], dim=-1)


class UnpairedAmongThree(Unpaired):
    """Takes a mask, so that its places can be shifted."""

    forward = Honest.forward  # type: ignore[assignment]


# Laws of how it is run.


class HalvesInTraining(Honest):
    def join(self, context: Tensor) -> Tensor:
        return super().join(context) / (2 if self.training else 1)


class HalvesWithGradients(Honest):
    def join(self, context: Tensor) -> Tensor:
        half = torch.is_grad_enabled() and not self.training
        return super().join(context) / (2 if half else 1)


class NeverStopsDropping(Honest):
    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return nn.functional.dropout(weights, self.dropout.p, training=True) @ v


class WritesIntoTheMask(Honest):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            mask[:, :, 0] = True
        return super().weigh(scores, mask)


class WritesUnseen(Honest):
    """Through `data`, no version is counted."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            mask.data[:, :, -1] = True
        return super().weigh(scores, mask)


class CountsCalls(Honest):
    calls: Tensor

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.register_buffer("calls", torch.zeros(()))

    def join(self, context: Tensor) -> Tensor:
        self.calls += 1
        return super().join(context)


class AnswersInFloat32(Honest):
    def join(self, context: Tensor) -> Tensor:
        return super().join(context).float()


class FillsBeyondHalf(Honest):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -1e9)
        return scores.softmax(dim=-1)


class OtherwiseCompiled(Honest):
    def join(self, context: Tensor) -> Tensor:
        return super().join(context) * (2 if torch.compiler.is_compiling() else 1)


class Doubled(torch.autograd.Function):
    """The identity, with a rule for `vmap` that is wrong."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return 2 * x, in_dims[0]


class OtherwiseMapped(Honest):
    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights @ Doubled.apply(v)  # type: ignore[no-any-return, no-untyped-call]


class LosesTheMaskInAutocast(Honest):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        cast = torch.is_autocast_enabled(scores.device.type)
        return super().weigh(scores, None if cast else mask)


class ForgetsATensor(Honest):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.scale = 1 + torch.rand(1)

    def join(self, context: Tensor) -> Tensor:
        return super().join(context) * self.scale.to(context)


class LosesWhatIsCopied(Honest):
    gain = 2.0

    def join(self, context: Tensor) -> Tensor:
        return super().join(context) * self.gain

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"gain": 1.0}


class AnswersOnTheCpu(Honest):
    """Sound where all is."""

    def join(self, context: Tensor) -> Tensor:
        return super().join(context).cpu()


MASK = {"mask": {"mask": "attend:bqk"}}
CAUSAL = {"causal": True}
CACHE = {"cache": ("past", "[1]")}

# For each law those that break it, with what must be said about them.
BROKEN: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "causality": [
        (SeesOneTooMany, CAUSAL),
        (SeesAllInEval, CAUSAL),
        (SeesAllWithoutGradients, CAUSAL),
        (MultipliesByTheMask, MASK),
    ],
    "causal_gradient": [(LeaksBackwards, CAUSAL)],
    "padding": [(MultipliesByTheMask, MASK)],
    "nonfinite_padding": [(Honest, MASK)],
    "batch_independence": [(KnowsItsNeighbours, {})],
    "fully_masked_rows": [
        (DividesNothing, {}),
        (ZeroesTooLate, {}),
        (AddsWhatIsNotThere, MASK),
        (LearnsFromWhatIsNotThere, MASK),
        (CarriesQueries, MASK),
    ],
    "longer_padding": [(CountsKeys, {})],
    "rows_sum_to_one": [
        (ShowsDropout, {}),
        (Repels, {}),
        (Overweight, {}),
        (nine_tenths, {}),
    ],
    "allowed_keys_attended": [(OverlooksTheFirst, {})],
    "formula": [(ScalesByTheWidth, {}), (CountsKeys, {})],
    "linear_in_value": [(BendsValues, {})],
    "gradients": [(DetachesQueries, {})],
    "large_scores": [
        (FillsTooLittle, {}),
        (ForgetsToSubtract, {}),
        (ForgetsToSubtractAlone, {}),
    ],
    "parameter_gradients": [(HasAnIdleLayer, {}), (GatesByZero, {})],
    "key_permutation": [(NumbersKeys, {})],
    "query_permutation": [
        (NormalisesQueries, {}),
        (ViewsAsHeads, {}),
        (ViewsAsHeadsAround, {}),
    ],
    "incremental_decoding": [(TopLeftCorner, MASK), (CachedTopLeft, CACHE)],
    "sliding_window": [
        (WideWindow, {"window": 3}),
        (NarrowWindow, {"window": 3}),
    ],
    "linear_bias": [
        (Rising, {"positions": "alibi"}),
        (Quadratic, {"positions": "alibi"}),
    ],
    "relative_positions": [
        (Unpaired, {"positions": "rotary"}),
        (UnpairedAmongThree, {"positions": "rotary"}),
    ],
    "eval_matches_train": [
        (HalvesInTraining, {}),
        (HalvesWithGradients, {}),
        (SeesAllInEval, CAUSAL),
        (SeesAllWithoutGradients, CAUSAL),
    ],
    "deterministic": [(NeverStopsDropping, {})],
    "no_side_effects": [
        (WritesIntoTheMask, MASK),
        (WritesUnseen, MASK),
        (CountsCalls, {}),
    ],
    "dtype_and_device": [(AnswersInFloat32, {}), (FillsBeyondHalf, {})],
    "compiled": [(OtherwiseCompiled, {})],
    "vmapped": [(OtherwiseMapped, {})],
    "autocast": [(LosesTheMaskInAutocast, {})],
    "state_dict": [(ForgetsATensor, {}), (LosesWhatIsCopied, {})],
}

# Those that break nothing.
SOUND: list[tuple[type[nn.Module], dict[str, Any]]] = [
    (Honest, {}),
    (Alone, {}),
    (Around, {}),
    (Cached, CACHE),
    (Window, {"window": 3}),
    (Linear, {"positions": "alibi"}),
    (Rotary, {"positions": "rotary"}),
]


def assert_caught(law: str, device: str) -> None:
    """Each specimen breaks `law`, and its counterexample shows it on its own."""
    from attention_laws import check

    for specimen, options in BROKEN[law]:
        report = check(specimen, only=law, device=device, **options)
        assert [r.law.name for r in report.failed] == [law], f"{specimen}\n{report}"
        example = report.failed[0].counterexample
        assert example is not None
        failure = failure_of(example.code)
        # It fails at its last line: in the claim, or in the call that raised.
        assert isinstance(failure, AssertionError) != ("raises" in example.message)
        traceback = failure.__traceback__
        assert traceback is not None
        assert traceback.tb_next is not None
        assert traceback.tb_next.tb_lineno == len(example.code.splitlines())


def failure_of(code: str) -> Exception:
    """What a program raises."""
    try:
        exec(compile(code, "<counterexample>", "exec"), {})
    except Exception as error:
        return error
    raise AssertionError(f"it does not fail:\n{code}")
