"""Entry point of the command `zoneout`.

It also runs as `python -m zoneout` and, for several processes, as `torchrun … -m zoneout`.
"""

from __future__ import annotations

import sys

from .extras import install_command

TOOL = {"tyro", "rich", "safetensors", "matplotlib"}  # the packages of the extra "tool"


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        from .paper.cli import main as cli
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in TOOL:
            raise
        print(
            f"zoneout: the command line needs the package {error.name}, which is not installed; "
            f"try {install_command('tool')}. The layers do not need it.",
            file=sys.stderr,
        )
        return 1
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
