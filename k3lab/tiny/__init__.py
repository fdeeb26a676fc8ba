"""A tiny Kimi-K3: the model, its training data, and a continuous-batching loop that serves it."""
