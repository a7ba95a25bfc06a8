"""Kernels without recurrence: norms, dropout, weight noise, row copies."""
