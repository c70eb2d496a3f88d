r"""# Stable softmax

Softmax turns a row of scores into weights that sum to 1:

$$w_i = \frac{e^{s_i}}{\sum_j e^{s_j}}$$
"""

import numpy as np


def softmax(scores: np.ndarray) -> np.ndarray:
    """The weights of each row of `scores`.

    >>> softmax(np.array([[0.0, 0.0, 1e6], [1.0, 1.0, 1.0]])).round(2).tolist()
    [[0.0, 0.0, 1.0], [0.33, 0.33, 0.33]]
    """
    rows, columns = scores.shape
    # Without this step, $e^{1000}$ is infinite. It changes nothing else: a factor
    # $e^{-m}$ cancels out.
    shifted = scores - scores.max(axis=1, keepdims=True)  # [rows, columns]

    exponentials = np.exp(shifted)  # [rows, columns]
    sums = exponentials.sum(axis=1, keepdims=True)  # [rows, 1]
    return exponentials / sums  # [rows, columns]
