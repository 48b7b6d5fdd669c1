"""How far property tests search: the same examples every time, or new ones and more of them.

`make test` must say the same thing twice of the same code, so its examples are drawn from a fixed seed. Who looks for
faults sets MILES_HPC_EXPLORE=20 (`make explore`): new random examples, twenty times as many.
"""

import os

__all__ = ["FACTOR", "examples"]

#: How many times the usual number of examples; 0: the usual ones, from a fixed seed.
FACTOR = int(os.environ.get("MILES_HPC_EXPLORE", "0"))


def examples(usual: int) -> int:
    """`max_examples` of a test that usually takes `usual` of them."""
    return usual * max(1, FACTOR)
