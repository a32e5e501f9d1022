"""`python -m mdi.cli <command>`."""

from mdi.__main__ import program

if __name__ == "__main__":
    program()
