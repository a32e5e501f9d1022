"""Small changes that break the code, and the tests that must notice each of them: `make mutants`."""
