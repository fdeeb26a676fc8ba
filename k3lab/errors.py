"""The package's own errors: what, where, why, what to do."""


class K3labError(Exception):
    """Base of every error that k3lab raises on purpose."""


class BadInput(K3labError):
    """An input (file, tensor, argument) cannot be used; the message names it and says why."""


class Unsupported(K3labError):
    """The input is sound, but this build, device or interpreter cannot do what was asked."""
