"""`python -m ndtrain` is the same program as the `ndtrain` command."""

from ndtrain.cli import main

if __name__ == "__main__":
    main()
