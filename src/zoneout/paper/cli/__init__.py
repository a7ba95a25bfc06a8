"""The command line: one dataclass for each command, and its parser.

It may import every other folder; none imports it.
"""
