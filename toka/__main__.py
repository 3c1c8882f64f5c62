"""`python -m toka`."""

from toka.launcher import main

if __name__ == "__main__":
    main()
