"""`python -m sixfold`: the same as the command `sixfold`."""

from .cli import main

raise SystemExit(main())
