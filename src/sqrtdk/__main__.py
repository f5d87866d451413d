"""`python -m sqrtdk` is the command `sqrtdk`."""

from sqrtdk.commands.cli import main

if __name__ == "__main__":
    main()
