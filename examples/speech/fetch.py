"""Get the recorded speech: `python -m examples.speech.fetch [--corpus asterisk]`.

The corpora are ordinary Debian packages.  Where `apt-get` exists they are downloaded with it (nothing is
installed, no root is needed) into `$RNNT_DATA`, else `$XDG_CACHE_HOME/rnnt`, else `~/.cache/rnnt`, and their
sha256 is compared with the one recorded here.  Elsewhere the ways to get them are printed.

Training never downloads: it calls `locate`, which finds what is here or explains what is missing.
Before: nothing.  After: sources.py reads the packages.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

INSTALLED = Path("/")  # where an installed package's files lie


@dataclass(frozen=True)
class Package:
    """One Debian package that holds audio or transcripts.

    `sha256` belongs to `version`; another version is accepted with a notice, since apt has verified it already.
    `installed` is a path below the root that exists once the package is installed or unpacked.
    """

    name: str
    version: str
    sha256: str
    megabytes: float
    installed: str

    @property
    def filename(self) -> str:
        return f"{self.name}_{self.version}_all.deb"


_FILLETS = Package(
    "fillets-ng-data",
    "1.0.1-1.1",
    "25de89afd8b1adf7bcace8290248a6a22c89cd42300317e69000e162c032cf84",
    70.6,
    "usr/share/games/fillets-ng/script",
)

PACKAGES: dict[str, tuple[Package, ...]] = {
    "asterisk": (
        Package(
            "asterisk-core-sounds-en",
            "1.6.1-1",
            "973e797d28e37fa6ca3c0a9d6fa717e77cf1268ae916bf09fd3503113cdffa50",
            0.02,
            "usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz",
        ),
        Package(
            "asterisk-core-sounds-en-wav",
            "1.6.1-1",
            "2be3ea287d83299d143815fa804f11179a75b7affd4a758b98b55f5afc18a35d",
            18.3,
            "usr/share/asterisk/sounds/en_US_f_Allison/hours.wav",
        ),
    ),
    "fillets-cs": (
        _FILLETS,
        Package(
            "fillets-ng-data-cs",
            "1.0.1-1.1",
            "3ecef99b9456f1c80c9625c6f2418642b52d58e7167a46bad7a412db17991b14",
            39.0,
            "usr/share/games/fillets-ng/sound/city/cs",
        ),
    ),
    "fillets-nl": (
        _FILLETS,
        Package(
            "fillets-ng-data-nl",
            "1.0.1-1.1",
            "afb4443fda9ab507dee578b75be857d121718a1cd6017a474f30e0eb13dc9d10",
            32.6,
            "usr/share/games/fillets-ng/sound/city/nl",
        ),
    ),
}


def data_dir() -> Path:
    """The folder that downloaded packages are kept in, outside the repository."""
    if os.environ.get("RNNT_DATA"):
        return Path(os.environ["RNNT_DATA"]).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "rnnt"


def ways_to_get(corpus: str) -> str:
    """Instructions for getting a corpus by hand."""
    packages = PACKAGES[corpus]
    names = " ".join(package.name for package in packages)
    size = sum(package.megabytes for package in packages)
    files = "\n".join(f"       {package.filename}   sha256 {package.sha256}" for package in packages)
    return (
        f"The corpus '{corpus}' is in the Debian packages {names} ({size:.0f} MB).  Ways to get it:\n"
        f"  1. On Debian or Ubuntu:  python -m examples.speech.fetch --corpus {corpus}\n"
        f"  2. Installed there:      sudo apt-get install --no-install-recommends {names}\n"
        f"  3. Anywhere else: take these files from any Debian mirror (they fit every architecture, and\n"
        f"     neither dpkg nor Debian is needed to read them) and pass them, or their folder, with --data:\n{files}\n"
        f"  Or train on your own recordings: --data FOLDER with .wav files and a transcript.txt of 'name: text' lines."
    )


def sha256_of(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def verify(path: Path, package: Package) -> None:
    """Raise `ValueError` when `path` claims to be the recorded version but its content differs."""
    if path.name != package.filename:
        print(f"note: {path.name} is not version {package.version}; its content is taken unverified", file=sys.stderr)
        return
    found = sha256_of(path)
    if found != package.sha256:
        raise ValueError(
            f"{path}: expected sha256 {package.sha256}, got {found}: the file is damaged, or another "
            f"distribution's build than Debian's.  Delete it and fetch it again, or unpack it (dpkg -x FILE FOLDER) "
            f"and pass --data FOLDER"
        )


def find_deb(folder: Path, package: Package) -> Path | None:
    """The package's file in `folder`; the recorded version where several are there."""
    exact = folder / package.filename
    if exact.is_file():
        return exact
    return next(iter(sorted(folder.glob(f"{package.name}_*.deb"))), None)


def debs_in(folder: Path, corpus: str) -> list[Path]:
    """All of a corpus's packages in `folder`, verified, or an empty list when one is missing."""
    found = [(find_deb(folder, package), package) for package in PACKAGES[corpus]]
    if any(path is None for path, _ in found):
        return []
    paths = []
    for path, package in found:
        assert path is not None
        verify(path, package)
        paths.append(path)
    return paths


def unpacked_in(root: Path, corpus: str) -> bool:
    """Whether the corpus's packages are installed or unpacked below `root`."""
    return all((root / package.installed).exists() for package in PACKAGES[corpus])


def locate(corpus: str) -> list[Path]:
    """Where a corpus is on this machine: its .deb files in `data_dir()`, else the root they are installed below.

    Raises `FileNotFoundError` that says how to get the corpus.
    """
    debs = debs_in(data_dir(), corpus)
    if debs:
        return debs
    if unpacked_in(INSTALLED, corpus):
        return [INSTALLED]
    raise FileNotFoundError(f"no data for '{corpus}' in {data_dir()}.\n{ways_to_get(corpus)}")


def fetch(corpus: str) -> list[Path]:
    """Download what is missing of a corpus and return its verified .deb files."""
    folder = data_dir()
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES[corpus]:
        present = find_deb(folder, package)
        if present is not None:
            try:
                verify(present, package)
            except ValueError as damage:
                print(f"{damage}\nfetching it again")
                present.unlink()
            else:
                print(f"{present.name}: already in {folder}")
                continue
        path = _download(package, folder)
        verify(path, package)
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, sha256 as recorded, in {folder}")
    return debs_in(folder, corpus)


def _download(package: Package, folder: Path) -> Path:
    """Download one package with apt-get; it appears in `folder` only once complete."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        result = _apt_get("download", package.name, cwd=scratch)
        if result.returncode:  # a fresh system or container has no package lists yet
            print("apt-get download failed; updating the package lists once")
            update = _apt_get("update", cwd=scratch)
            result = _apt_get("download", package.name, cwd=scratch)
            if result.returncode:
                hint = "" if update.returncode == 0 else "\n(the update failed too; try 'sudo apt-get update')"
                raise RuntimeError(f"apt-get download {package.name} failed:\n{result.stderr.strip()}{hint}")
        downloaded = next(Path(scratch).glob(f"{package.name}_*.deb"))
        return Path(shutil.move(downloaded, folder / downloaded.name))


def _apt_get(*arguments: str, cwd: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["apt-get", "-q", *arguments], cwd=cwd, capture_output=True, text=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.speech.fetch", description="Get recorded speech.")
    parser.add_argument("--corpus", choices=sorted(PACKAGES), default="asterisk")
    corpus = parser.parse_args(arguments).corpus
    try:
        if shutil.which("apt-get") is None and not debs_in(data_dir(), corpus):
            print(f"apt-get is not on this machine.\n{ways_to_get(corpus)}", file=sys.stderr)
            return 1
        fetch(corpus)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}\n{ways_to_get(corpus)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
