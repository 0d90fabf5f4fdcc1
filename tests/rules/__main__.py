"""`python -m tests.rules` lists what breaks a rule, and exits with 1 if anything does."""

import sys

from tests.rules.rules import violations
from tests.rules.sources import sources


def main() -> int:
    found = [*violations(sources())]
    sys.stdout.writelines(f"{each}\n" for each in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
