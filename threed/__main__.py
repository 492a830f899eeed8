"""`threed` and `python -m threed`: signals are answered before the command line is imported."""

from threed.early import answer_signals


def main() -> None:
    answer_signals()
    from threed import cli

    cli.main()


if __name__ == "__main__":
    main()
