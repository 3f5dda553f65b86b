"""Bytes of packages, folders and audio files.

A .deb is an `ar` archive: the magic line `!<arch>`, then members, each with a 60-byte header (name in columns
0-15, size in bytes in columns 48-57, both ASCII) and content padded to an even length.  Its files are in the
member `data.tar.*`.  So the standard library reads it on any system.

Audio comes out as float32 in [-1, 1], mono (channels are averaged), with its sample rate in Hz.
Before: fetch.py puts packages on disk.  After: data.py makes utterances of them.
"""

import io
import lzma
import re
import tarfile
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]

_AR_MAGIC = b"!<arch>\n"
_AR_HEADER = 60
LOWEST_RATE = 4000  # Hz; the features' top band lies below half of a corpus's lowest rate


def read_members(sources: list[Path], wanted: str) -> dict[str, bytes]:
    """Files whose path (without a leading `/` or `./`) matches the regular expression `wanted`.

    sources: .deb files, or one root folder that packages are installed or unpacked below.
    """
    pattern = re.compile(wanted)
    members: dict[str, bytes] = {}
    for source in sources:
        found = _folder_members(source, pattern) if source.is_dir() else _deb_members(source, pattern)
        members.update(found)
    return members


def _deb_members(path: Path, pattern: re.Pattern[str]) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(fileobj=io.BytesIO(_data_archive(path))) as archive:
            for member in archive:
                name = member.name.removeprefix("./")
                if member.isfile() and pattern.fullmatch(name):
                    file = archive.extractfile(member)
                    assert file is not None
                    yield name, file.read()
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:  # damaged, or compressed with zstd
        raise ValueError(
            f"{path}: expected a package compressed with xz or gzip, got one that cannot be read ({error}); "
            f"unpack it (dpkg -x FILE FOLDER) and pass --data FOLDER"
        ) from error


def _data_archive(path: Path) -> bytes:
    """The content of a .deb's member `data.tar.*`, still compressed."""
    raw = path.read_bytes()
    if not raw.startswith(_AR_MAGIC):
        raise ValueError(f"{path}: expected a Debian package (an ar archive), got a file that starts {raw[:8]!r}")
    position = len(_AR_MAGIC)
    while position + _AR_HEADER <= len(raw):
        header = raw[position : position + _AR_HEADER]
        size = int(header[48:58])
        position += _AR_HEADER
        if header.startswith(b"data.tar"):
            if position + size > len(raw):
                raise ValueError(f"{path}: expected {size} bytes of data, got {len(raw) - position}: it is cut short")
            return raw[position : position + size]
        position += size + size % 2
    raise ValueError(f"{path}: expected a Debian package, got an ar archive without a data.tar member")


def _folder_members(root: Path, pattern: re.Pattern[str]) -> Iterator[tuple[str, bytes]]:
    # The root may be `/`: only the two folders that the corpora live in are walked.
    for top in ("usr/share/asterisk", "usr/share/games/fillets-ng", "usr/share/doc/asterisk-core-sounds-en"):
        for path in sorted((root / top).rglob("*")):
            name = path.relative_to(root).as_posix()
            if pattern.fullmatch(name) and path.is_file():
                yield name, path.read_bytes()


def read_wav(content: bytes, name: str) -> tuple[Samples, int]:
    """Samples [N] and sample rate of a PCM wav with 8, 16, 24 or 32 bits and any number of channels.

    Raises `ValueError` for what it cannot read, and for a sample rate too low for speech.
    """
    try:
        with wave.open(io.BytesIO(content)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            raw = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise ValueError(
            f"{name}: expected a PCM wav, got one that cannot be read ({error or 'cut short'}); "
            f"convert it, for example with: ffmpeg -i {name} -ac 1 -c:a pcm_s16le converted.wav"
        ) from error
    if rate < LOWEST_RATE:
        raise ValueError(f"{name}: expected a sample rate of at least {LOWEST_RATE} Hz, got {rate} Hz")
    raw = raw[: len(raw) - len(raw) % (width * channels)]
    if width == 1:  # 8-bit wavs are unsigned
        samples = (np.frombuffer(raw, np.uint8).astype(np.float32) - 128) / 128
    elif width == 3:  # no numpy type has 3 bytes: read them as the upper bytes of 4
        padded = np.zeros((len(raw) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        samples = padded.view("<i4")[:, 0].astype(np.float32) / 2**31
    elif width in (2, 4):
        samples = np.frombuffer(raw, f"<i{width}").astype(np.float32) / 2 ** (8 * width - 1)
    else:
        raise ValueError(f"{name}: expected 8, 16, 24 or 32 bits a sample, got {8 * width}")
    return samples.reshape(-1, channels).mean(1, dtype=np.float32), rate


def read_ogg(content: bytes, name: str) -> tuple[Samples, int]:
    """Samples [N] and sample rate of an Ogg Vorbis file.  Needs the package `soundfile`."""
    try:
        import soundfile
    except ImportError as error:
        raise ImportError(
            "reading Ogg Vorbis (the Fillets-NG corpora) needs soundfile: pip install soundfile"
        ) from error
    try:
        samples, rate = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise ValueError(f"{name}: expected Ogg Vorbis, got a file that cannot be read ({error})") from error
    return samples.mean(1, dtype=np.float32), rate
