"""Callbacks and a launcher that let any PyTorch Lightning training run survive what kills training runs."""

from __future__ import annotations

__version__ = "0.1.0.dev0"
