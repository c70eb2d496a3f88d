# %% [markdown]
# # First look
# Hello $x^2$.
# %%
import torch
torch.arange(3)
