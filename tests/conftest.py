"""What holds for every test?"""

import os

from hypothesis import settings

# Shared machines are slow at times, which proves nothing; and a build must not depend on which examples were drawn.
settings.register_profile("house", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("house")
