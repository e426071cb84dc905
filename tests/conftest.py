"""Fixtures shared by the tests: tiny real data and configurations."""
