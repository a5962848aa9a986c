"""Makes `python -m minirl` run the app."""

from minirl.main import run

if __name__ == "__main__":
    run()
