"""`python -m penstock`: the command `penstock` of this interpreter."""

from __future__ import annotations

from ._cli import main

if __name__ == "__main__":
    main()
