"""What people look at: curves, figures, tables and HTML pages.

It imports `experiments`, `training` and `data`.
"""
