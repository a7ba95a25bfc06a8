"""The paper's experiments: data, models, training and the command line.

This package imports the library; the library never imports this package.
"""
