"""The subcommands of `lmtier`: a module for each group, with the table of its commands at the end."""
