"""`python -m mdi.cli <command>`."""

from mdi.cli import program

if __name__ == "__main__":
    program()
