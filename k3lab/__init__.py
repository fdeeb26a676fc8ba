"""k3lab: an investigation workbook for Kimi-K3 serving faults."""

__version__ = "0.1.0"
