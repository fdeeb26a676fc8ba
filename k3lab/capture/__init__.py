"""Captured activations: the file format, the capture doctor, and recording calls of a running process."""

from k3lab.capture.format import Capture, load_hidden_states

__all__ = ["Capture", "load_hidden_states"]
