"""``python -m w4pack``: the same command as the console script."""

from w4pack.cli import main

if __name__ == "__main__":
    main()
