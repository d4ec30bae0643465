"""The command line: its commands, tables, simulation and sizing."""
