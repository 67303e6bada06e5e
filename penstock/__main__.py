"""`python -m penstock`: the command."""

from .cli.main import main

main()
