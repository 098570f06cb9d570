"""`python -m enginepool` is `enginepool`."""

from enginepool.cli.main import app

if __name__ == "__main__":
    app()
