"""Captured activations: the file format, the capture doctor, and recording calls of a running process."""

from k3lab.capture.check import check
from k3lab.capture.format import Capture, load_hidden_states
from k3lab.capture.record import record, record_from_env

__all__ = ["Capture", "check", "load_hidden_states", "record", "record_from_env"]
