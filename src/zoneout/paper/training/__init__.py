"""One run: config, model, optimizer, the training loop, its folder, evaluation.

It imports `data`.
"""
