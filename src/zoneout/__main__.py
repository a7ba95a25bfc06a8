"""The command `zoneout`: also `python -m zoneout` and, for several processes, `torchrun … -m zoneout`."""

from __future__ import annotations

import sys

TOOL = {"tyro", "rich", "safetensors", "matplotlib"}  # what the extra "tool" brings


def main() -> int:
    """Run the command line; its exit code."""
    try:
        from .paper import cli
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in TOOL:
            raise
        print(
            f"zoneout: the command line needs the package {error.name}, which is not installed; "
            "pip install '.[tool]' in a clone brings all that it needs. (The layers alone do not need it.)",
            file=sys.stderr,
        )
        return 1
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
