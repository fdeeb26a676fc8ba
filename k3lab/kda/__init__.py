"""Kimi Delta Attention three ways: float64 reference, six torch stages, six Triton kernels."""
