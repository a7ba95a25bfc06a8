"""The former place of `zoneout.paper.experiments.gradient_flow`, kept for older scripts."""

from .experiments.gradient_flow import gradients_of, mean_norms, watched

__all__ = ["gradients_of", "mean_norms", "watched"]
