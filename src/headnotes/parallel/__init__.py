"""Training on several processes, with the heads, the batch or the weights split."""
