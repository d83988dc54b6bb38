"""`python -m compress` is the `compress` command."""

from compress.cli import main

main()
