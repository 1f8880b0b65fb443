"""Whole jobs through the command line."""
