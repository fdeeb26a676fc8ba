"""Draft models: a block drafter for the tiny Kimi-K3, and acceptance counts, from it or from an engine's logs."""
