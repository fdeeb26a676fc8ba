"""Racy configs found from compiled code: compile anywhere, analyse LDS accesses, repeat over toolchains."""
