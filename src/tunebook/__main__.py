"""`python -m tunebook` is the same as the `tunebook` command."""

from tunebook.cli.app import main

if __name__ == "__main__":
    main()
