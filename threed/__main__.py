"""`threed` and `python -m threed`: signals are answered before the command line is imported."""

from threed.base.signals import begin


def main() -> None:
    begin()
    from threed.cli import main as cli

    cli.main()


if __name__ == "__main__":
    main()
