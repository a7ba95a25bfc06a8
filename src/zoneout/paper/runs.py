"""The former place of `zoneout.paper.training.runs`, kept for older scripts."""

from .training.runs import Loaded, Run, load, read_config, read_metrics, read_summary

__all__ = ["Loaded", "Run", "load", "read_config", "read_metrics", "read_summary"]
