"""What does `python -m penstock` start?"""

from .cli.main import main

main()
