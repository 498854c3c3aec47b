"""Front door of a checkout: `python cli.py train recipe.yaml` works without installing ndtrain."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from ndtrain.cli import app, main

__all__ = ["app"]

if __name__ == "__main__":
    main()
