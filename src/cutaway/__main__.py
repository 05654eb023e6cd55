"""`cutaway`, and `python -m cutaway`: the command line, quiet where it is interrupted, also while it still loads."""

import sys


def main() -> int:
    """Run the process's command line and return its exit code."""
    try:
        from cutaway.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
