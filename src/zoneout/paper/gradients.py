"""The former place of `zoneout.paper.experiments.gradient_flow`, for scripts that import it here."""

from .experiments.gradient_flow import gradients_of, mean_norms, watched

__all__ = ["gradients_of", "mean_norms", "watched"]
