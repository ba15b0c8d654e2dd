"""The `tunebook` command line: `app` reads it, and each command imports what it needs when it runs."""
