"""Autograd for a run: the custom operator, and a lighter node for plain eager mode."""
