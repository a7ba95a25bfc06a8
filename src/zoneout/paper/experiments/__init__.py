"""Many runs: the paper's recipes and their records, sweeps, gradient flow.

It imports `training` and `data`.
"""
