"""The configuration of a run: its schema, how it is composed, what `auto` becomes, and the rules it must keep."""
