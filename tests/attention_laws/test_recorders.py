"""Recording what a call computes."""

import pytest
import torch

from attention_laws.recorders import WeightsRecorder, returns_other_weights


def test_recorded_weights_of_a_softmax_without_an_axis_have_the_axis_of_pytorch() -> (
    None
):
    recorder = WeightsRecorder()
    for scores in (torch.ones(2, 3, 5), torch.ones(3, 5)):
        with recorder, pytest.warns(UserWarning, match="Implicit dimension"):
            torch.nn.functional.softmax(scores)
    for weights, dim in recorder.found:
        torch.testing.assert_close(weights.sum(dim), torch.ones_like(weights.sum(dim)))


@pytest.mark.parametrize("is_mean", [False, True])
def test_returned_weights_are_compared_in_lists_and_as_means_over_heads(
    is_mean: bool,
) -> None:
    q, v = torch.randn(2, 2, 3, 5, 4)

    def attend(factor: float) -> dict[str, object]:
        shown = (factor * q @ q.mT).softmax(-1)
        y = (q @ q.mT).softmax(-1) @ v
        return {"y": y, "maps": [shown.mean(1) if is_mean else shown]}

    assert not returns_other_weights(lambda: attend(1.0))
    assert returns_other_weights(lambda: attend(2.0))
