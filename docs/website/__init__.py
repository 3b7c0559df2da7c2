"""The documentation site: `make docs`. Pages that are not written by hand, and the configuration of Sphinx."""
