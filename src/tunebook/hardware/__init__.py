"""What GPU generations can do (`generations`, `peaks`) and what this machine has (`detect`). Nothing imports torch."""
