"""`python -m mesascope`."""

from mesascope.cli import main

if __name__ == "__main__":
    main()
