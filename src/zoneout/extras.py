"""How to install what an optional feature needs."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra, for the wheel and for a clone.

    >>> install_command("tool")
    "pip install 'zoneout[tool]' (in a clone: '.[tool]')"
    """
    return f"pip install 'zoneout[{extra}]' (in a clone: '.[{extra}]')"
