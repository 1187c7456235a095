"""`python -m diskdp` is the command line."""

from diskdp.cli import main

if __name__ == "__main__":
    main()
