"""Tools for the project's machines that no user of the package runs."""
