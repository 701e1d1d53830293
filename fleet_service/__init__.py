"""The fleet head: a control plane for fleets of language-model nodes."""

__version__ = "0.1.0"
