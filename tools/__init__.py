"""Tools of the project's developers; they are not installed."""
