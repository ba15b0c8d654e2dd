"""Values that a configuration leaves to Tunebook (`auto`), resolved with a reason for each."""
