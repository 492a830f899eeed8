"""Addresses of checkpoints outside run.dir: a folder, or PROTOCOL://PATH in a store that fsspec knows."""

from __future__ import annotations

from pathlib import Path

PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}  # of a protocol


def is_store(address: str) -> bool:
    return "://" in address


def local_path(address: str) -> Path | None:
    """The folder that an address names; None where the address is in a store."""
    protocol, _, rest = address.partition("://") if is_store(address) else ("file", "", address)
    return Path(rest) if protocol in ("file", "local") else None


def problem(address: str) -> str | None:
    """Why no file can be read from or written to an address; None if one can. The store itself is not
    asked."""
    if not is_store(address):
        return None if address.strip() else "is empty: give a folder, or an address such as s3://BUCKET/RUN"
    from fsspec.registry import get_filesystem_class

    protocol, _, rest = address.partition("://")
    try:
        get_filesystem_class(protocol)
    except ValueError:
        return f"no store is known by {protocol}://; write s3://BUCKET/RUN, gs://BUCKET/RUN or a folder"
    except ImportError as error:
        advice = "install the package that it names"
        if protocol in PACKAGES:
            advice = f"pip install {PACKAGES[protocol]}"
        return f"{protocol}:// needs a package that is not here ({error}): {advice}"
    return None if rest.strip("/") else f"names no place in the store; write {protocol}://BUCKET/RUN"
