"""`threed` and `python -m threed`: signals are answered before the command line is imported."""

from threed.early import begin


def main() -> None:
    begin()
    from threed import cli

    cli.main()


if __name__ == "__main__":
    main()
