"""`python -m sixfold`: the same as the command `sixfold`."""

from sixfold.cli import main

raise SystemExit(main())
