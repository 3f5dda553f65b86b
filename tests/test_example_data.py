"""The example's corpora: packages, audio files, transcripts, the held-out split, and messages for bad data."""

import gzip
import hashlib
import io
import os
import stat
import struct
import sys
import tarfile
import wave
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from examples.speech import data, fetch, sources

RATE = 8000


def wav_bytes(samples, rate=RATE, width=2, channels=1):
    """A PCM wav of integer samples; channels interleaved."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(width)
        writer.setframerate(rate)
        offset = 128 if width == 1 else 0
        writer.writeframes(b"".join((int(s) + offset).to_bytes(width, "little", signed=width > 1) for s in samples))
    return file.getvalue()


def tone_bytes(seconds, hz=440.0, rate=RATE):
    time = np.arange(round(seconds * rate)) / rate
    return wav_bytes(np.round(8000 * np.sin(2 * np.pi * hz * time)), rate)


def deb_bytes(files, compression="xz"):
    """A Debian package that holds `files`, after a member of odd length."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode=f"w:{compression}") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    raw = b"!<arch>\n"
    for name, content in (("debian-binary", b"2.0"), (f"data.tar.{compression}", archive.getvalue())):
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
        assert len(header) == 60
        raw += header + content + b"\n" * (len(content) % 2)
    return raw


ASTERISK_LINES = """; a comment
agent-pass: Please enter your password.
digits/2: two
press: Press 1, or 2...
beep: [a tone]
spy: (a note) IAX
many: 250 of them
not-recorded: nothing
"""


def write_asterisk(folder, lines=ASTERISK_LINES, version="9.9-1"):
    """The two packages, of a version whose sha256 is not on record."""
    names = [line.split(":")[0] for line in lines.splitlines() if line[0] != ";"]
    recorded = [name for name in names if name != "not-recorded"]
    root = "usr/share/asterisk/sounds/en_US_f_Allison"
    text = {"usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz": gzip.compress(lines.encode())}
    audio = {f"{root}/{name}.wav": tone_bytes(1.0 + 0.1 * i) for i, name in enumerate(recorded)}
    paths = [folder / f"asterisk-core-sounds-en{part}_{version}_all.deb" for part in ("", "-wav")]
    for path, files in zip(paths, (text, audio), strict=True):
        path.write_bytes(deb_bytes(files))
    return paths


def write_folder(folder, lines, transcript="transcript.txt"):
    """A folder of one-second wavs and a transcript: lines of (name, separator and text)."""
    for number, name in enumerate(lines):
        path = folder / f"{name}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tone_bytes(1.0, hz=300.0 + 10 * number))
    (folder / transcript).write_text("".join(f"{name}{rest}\n" for name, rest in lines.items()), encoding="utf-8")
    return folder


def texts(corpus):
    return {u.name: u.text for u in corpus.train + corpus.heldout}


# Packages


@pytest.mark.parametrize("compression", ["xz", "gz"])
def test_deb_members(tmp_path, compression):
    path = tmp_path / "a.deb"
    path.write_bytes(deb_bytes({"usr/a.txt": b"one", "usr/b.bin": b"two"}, compression))
    assert sources.read_members([path], r"usr/.*\.txt") == {"usr/a.txt": b"one"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"RIFF....WAVE", "expected a Debian package .*RIFF"),
        (b"!<arch>\n", "without a data.tar member"),
        (deb_bytes({"a": b"x" * 5000})[:-20], "cut short"),
        (deb_bytes({"a": b"x"}).replace(b"\xfd7zXZ", b"\x28\xb5\x2f\xfdz"), "dpkg -x"),
    ],
    ids=["not-ar", "no-data", "truncated", "other-compression"],
)
def test_bad_deb(tmp_path, content, message):
    path = tmp_path / "bad.deb"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        sources.read_members([path], ".*")


def test_asterisk_packages(tmp_path, capsys):
    corpus = data.load(None, write_asterisk(tmp_path))
    assert texts(corpus) == {
        "agent-pass": "please enter your password",
        "digits/2": "two",
        "press": "press one or two",
    }
    assert sorted(problem.split(":")[0] for problem in corpus.left_out) == ["beep", "many", "spy"]
    assert {u.name: u.seconds for u in corpus.train + corpus.heldout} == {
        "agent-pass": 1.0,
        "digits/2": 1.1,
        "press": 1.2,
    }
    assert "unverified" not in capsys.readouterr().err


def test_folder_of_packages_and_unpacked_packages_are_the_same(tmp_path, capsys):
    packages = tmp_path / "packages"
    packages.mkdir()
    paths = write_asterisk(packages)
    expected = texts(data.load(None, paths))
    assert texts(data.load(None, [packages])) == expected
    assert "unverified" in capsys.readouterr().err
    unpacked = tmp_path / "unpacked"
    for name, content in sources.read_members(paths, ".*").items():
        path = unpacked / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (unpacked / fetch.PACKAGES["asterisk"][1].installed).write_bytes(tone_bytes(0.5))  # a file with no line
    assert texts(data.load(None, [unpacked])) == expected


def test_one_package_alone(tmp_path):
    text, audio = write_asterisk(tmp_path)
    with pytest.raises(FileNotFoundError, match="no transcripts of 'asterisk'"):
        data.load(None, [audio])
    with pytest.raises(FileNotFoundError, match=r"no \.wav files of 'asterisk'"):
        data.load(None, [text])
    audio.unlink()
    with pytest.raises(FileNotFoundError, match=r"no asterisk-core-sounds-en-wav \.deb"):
        data.load(None, [tmp_path])


def test_sha256_of_the_recorded_version(tmp_path, monkeypatch):
    paths = write_asterisk(tmp_path, version="1.6.1-1")
    with pytest.raises(ValueError, match=r"asterisk-core-sounds-en_1\.6\.1-1_all\.deb: expected sha256 973e797d28"):
        data.load(None, paths)
    with pytest.raises(ValueError, match="expected sha256 973e797d28"):
        data.load(None, [tmp_path])
    known = tuple(
        replace(package, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
        for package, path in zip(fetch.PACKAGES["asterisk"], paths, strict=True)
    )
    monkeypatch.setitem(fetch.PACKAGES, "asterisk", known)
    assert len(texts(data.load(None, paths))) == 3


def test_fillets_packages(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    stereo = np.random.default_rng(0).normal(0, 0.1, (22050, 2))
    soundfile.write(file, stereo, 22050, format="OGG", subtype="VORBIS")
    script = """
dialogId("one", "font_small", "Hello!")
dialogStr("Ahoj, světe!")
dialogId("two", "font_big", "\\"Quoted\\"")
dialogStr("Dobrý den.")
dialogId("three", "font_big", "Figures")
dialogStr("100 %")
dialogId("silent", "font_big", "Not spoken")
dialogStr("Nic")
"""
    root = "usr/share/games/fillets-ng"
    lua = {f"{root}/script/{level}/dialogs_cs.lua": script.encode() for level in ("cave", "city")}
    ogg = {
        f"{root}/sound/{level}/cs/{n}.ogg": file.getvalue()
        for level in ("cave", "city")
        for n in ("one", "two", "three")
    }
    paths = [tmp_path / "fillets-ng-data_0_all.deb", tmp_path / "fillets-ng-data-cs_0_all.deb"]
    for path, files in zip(paths, (lua, ogg), strict=True):
        path.write_bytes(deb_bytes(files))
    members = data._fillets("cs", paths, problems := [])
    found = {u.name: (u.text, u.group, u.rate) for u in members}
    assert found == {
        "cave/one": ("ahoj světe", "cave", 22050),
        "cave/two": ("dobrý den", "cave", 22050),
        "city/one": ("ahoj světe", "city", 22050),
        "city/two": ("dobrý den", "city", 22050),
    }
    assert len(problems) == 2
    with pytest.raises(
        ValueError, match="different texts"
    ):  # every level holds the same texts: none is left to train on
        data.load("fillets-cs", paths)


def test_fillets_without_soundfile(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ImportError, match="pip install soundfile"):
        sources.read_ogg(b"", "a.ogg")


# Fetching


def test_fetch_without_apt(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RNNT_DATA", str(tmp_path))
    monkeypatch.setattr(fetch.shutil, "which", lambda name: None)
    assert fetch.main([]) == 1
    message = capsys.readouterr().err
    assert "asterisk-core-sounds-en-wav_1.6.1-1_all.deb" in message
    assert "--data" in message


@pytest.mark.skipif(sys.platform == "win32", reason="stands in for apt-get with a shell script")
def test_fetch_updates_once_verifies_and_skips(tmp_path, monkeypatch, capsys):
    mirror, cache, programs = tmp_path / "mirror", tmp_path / "cache", tmp_path / "bin"
    for folder in (mirror, programs):
        folder.mkdir()
    paths = write_asterisk(mirror, version="1.6.1-1")
    known = tuple(
        replace(package, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
        for package, path in zip(fetch.PACKAGES["asterisk"], paths, strict=True)
    )
    monkeypatch.setitem(fetch.PACKAGES, "asterisk", known)
    script = programs / "apt-get"
    script.write_text(
        f'#!/bin/sh\necho "$2" >> {tmp_path}/calls\n'
        f'if [ "$2" = update ]; then touch {tmp_path}/updated; exit 0; fi\n'
        f"[ -e {tmp_path}/updated ] && cp {mirror}/$3_* .\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("RNNT_DATA", str(cache))
    assert fetch.main([]) == 0
    assert (tmp_path / "calls").read_text().split() == ["download", "update", "download", "download"]
    assert sorted(path.name for path in cache.iterdir()) == sorted(path.name for path in paths)
    assert len(texts(data.load(None))) == 3

    (cache / paths[1].name).write_bytes(b"damaged")
    capsys.readouterr()
    assert fetch.main([]) == 0
    assert "already in" in capsys.readouterr().out
    assert (cache / paths[1].name).read_bytes() == paths[1].read_bytes()


def test_training_without_data_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("RNNT_DATA", str(tmp_path / "nothing"))
    monkeypatch.setattr(fetch, "INSTALLED", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"python -m examples\.speech\.fetch --corpus asterisk"):
        data.load(None)


# Audio files


@pytest.mark.parametrize(
    ("width", "integers", "expected"),
    [
        (1, [0, 64, -128], [0.0, 0.5, -1.0]),
        (2, [0, 16384, -32768], [0.0, 0.5, -1.0]),
        (3, [0, 4194304, -8388608], [0.0, 0.5, -1.0]),
        (4, [0, 1073741824, -2147483648], [0.0, 0.5, -1.0]),
    ],
)
def test_wav_sample_widths(width, integers, expected):
    samples, rate = sources.read_wav(wav_bytes(integers, 11025, width), "a.wav")
    assert rate == 11025
    assert samples.dtype == np.float32
    assert samples.tolist() == expected


def test_stereo_is_averaged():
    samples, _ = sources.read_wav(wav_bytes([16384, 0, -16384, -16384], channels=2), "a.wav")
    assert samples.tolist() == [0.25, -0.5]


def test_float_wav_is_refused():
    content = bytearray(wav_bytes([0, 0]))
    content[20:22] = struct.pack("<H", 3)  # IEEE float
    with pytest.raises(ValueError, match=r"voice\.wav: expected a PCM wav, .* ffmpeg"):
        sources.read_wav(bytes(content), "voice.wav")
    with pytest.raises(ValueError, match="expected a PCM wav"):
        sources.read_wav(b"", "empty.wav")


# Your own folder


def test_folder_reads_both_separators_and_subfolders(tmp_path):
    write_folder(
        tmp_path, {"a": ": Hello, World!", "sub/b": "\tIt\N{RIGHT SINGLE QUOTATION MARK}s: fine", "c.d": ": ÉTÉ"}
    )
    (tmp_path / "transcript.txt").write_text(
        "\ufeff# comment\n\n" + (tmp_path / "transcript.txt").read_text(encoding="utf-8").replace("a:", "a.wav:"),
        encoding="utf-8",
    )
    corpus = data.load(None, [tmp_path])
    assert corpus.name == "folder"
    assert texts(corpus) == {"a": "hello world", "sub/b": "it's fine", "c.d": "été"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "a.wav").unlink(), r"a: in transcript\.txt, but there is no a\.wav"),
        (lambda f: (f / "x.wav").write_bytes(tone_bytes(1)), r"x\.wav: a recording without a line in transcript\.txt"),
        (lambda f: (f / "a.wav").write_bytes(tone_bytes(0.05)), r"a: 50 ms of audio, shorter than one frame"),
        (lambda f: (f / "a.wav").write_bytes(tone_bytes(0.2)), r"a: 11 characters for 0\.20 s of audio, more than 8"),
        (lambda f: (f / "a.wav").write_bytes(b"OggS"), r"a: .*expected a PCM wav"),
        (lambda f: _append(f, "d: call 112"), "character '1' is outside the alphabet"),
        (lambda f: _append(f, "d: ..."), "the text is empty"),
        (lambda f: _append(f, "a: hello again"), r"transcript\.txt line 4: a is in line 1 already"),
        (lambda f: (f / "a.wav").write_bytes(tone_bytes(1.0, rate=1000)), r"a: .*at least 4000 Hz, got 1000 Hz"),
        (lambda f: _append(f, "no separator"), r"transcript\.txt line 4: expected 'name: text'"),
    ],
    ids=[
        "no-wav",
        "no-line",
        "short-audio",
        "long-text",
        "not-wav",
        "figure",
        "empty-text",
        "twice",
        "low-rate",
        "no-separator",
    ],
)
def test_unusable_recordings_of_a_folder(tmp_path, change, message):
    write_folder(tmp_path, {"a": ": hello there", "b": ": good morning", "c": ": good evening"})
    (tmp_path / "d.wav").write_bytes(tone_bytes(1.0))
    change(tmp_path)
    if "d:" not in (tmp_path / "transcript.txt").read_text():
        (tmp_path / "d.wav").unlink()
    with pytest.raises(ValueError, match=message) as error:
        data.load(None, [tmp_path])
    assert "--skip-bad" in str(error.value)
    corpus = data.load(None, [tmp_path], skip_bad=True)
    assert len(corpus.left_out) == 1
    assert {"b", "c"} <= set(texts(corpus))


def _append(folder, line):
    path = folder / "transcript.txt"
    path.write_text(path.read_text() + line + "\n")


def test_bad_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        data.load(None, [tmp_path / "missing"])
    with pytest.raises(FileNotFoundError, match=r"expected \.wav files or Debian packages in this folder, got neither"):
        data.load(None, [tmp_path])
    (tmp_path / "a.wav").write_bytes(tone_bytes(1.0))
    with pytest.raises(FileNotFoundError, match=r"expected one transcript\.txt .*, got none"):
        data.load(None, [tmp_path])
    (tmp_path / "one.txt").write_text("a: yes\n")
    (tmp_path / "two.tsv").write_text("a\tyes\n")
    with pytest.raises(FileNotFoundError, match=r"got one\.txt, two\.tsv"):
        data.load(None, [tmp_path])
    (tmp_path / "transcript.txt").write_bytes(b"a: caf\xe9\n")
    with pytest.raises(ValueError, match="expected UTF-8 text, got a byte 0xe9 at 6"):
        data.load(None, [tmp_path])
    (tmp_path / "transcript.txt").write_text("a: yes\n")
    with pytest.raises(ValueError, match="at least two different texts"):
        data.load(None, [tmp_path])
    with pytest.raises(FileNotFoundError, match="holds no packages of 'fillets-cs'"):
        data.load("fillets-cs", [tmp_path])
    with pytest.raises(ValueError, match="one folder"):
        data.load("folder", [tmp_path / "a.wav"])


# Text and split


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Please  enter, then press...", "please enter then press"),
        ("Don\N{RIGHT SINGLE QUOTATION MARK}t \N{EN DASH} stop!", "don't stop"),
        ("E\u0301te\u0301", "été"),  # combining accents are composed
        ("\u0928\u092e\u0938\u094d\u0924\u0947", "\u0928\u092e\u0938\u094d\u0924\u0947"),  # and others are kept
    ],
)
def test_normalise(text, expected):
    assert data.normalise(text) == expected


@pytest.mark.parametrize("text", ["5", "50 %", "a@b", "[tone]", "", "?!"])
def test_normalise_refuses(text):
    with pytest.raises(ValueError, match=r"alphabet|empty"):
        data.normalise(text)


def test_letters_of_one_language():
    with pytest.raises(ValueError, match="'é' is outside the alphabet"):
        data.normalise("café", "abcdef")


def test_split_by_text():
    # The published check value: crc32("123456789") = 0xcbf43926 = 3421780262.
    # crc32("a") = 0xe8b7be43 = 3904355907 and crc32("abc") = 0x352441c2 = 891568578; none ends in 0.
    silence = np.zeros(RATE, np.float32)
    words = [f"text {i}" for i in range(300)] * 2
    utterances = [data.Utterance(str(i), text, silence, RATE, text) for i, text in enumerate(words)]
    train, heldout = data.split(utterances)
    assert {u.text for u in train}.isdisjoint(u.text for u in heldout)
    assert len(train) + len(heldout) == 600
    assert 30 <= len(heldout) <= 90
    again, _ = data.split(utterances[::-1])
    assert {u.name for u in again} == {u.name for u in train}
    few = [data.Utterance(text, text, silence, RATE, text) for text in ("123456789", "a", "abc")]
    train, heldout = data.split(few)
    assert [u.text for u in heldout] == ["abc"]  # the smallest hash of the three
    assert [u.text for u in train] == ["123456789", "a"]


def test_split_by_group_keeps_texts_apart():
    silence = np.zeros(RATE, np.float32)
    utterances = [data.Utterance("1", "yes", silence, RATE, "abc"), data.Utterance("2", "no", silence, RATE, "abc")]
    utterances += [data.Utterance("3", "yes", silence, RATE, "a"), data.Utterance("4", "maybe", silence, RATE, "a")]
    train, heldout = data.split(utterances)
    assert [u.name for u in heldout] == ["1", "2"]
    assert [u.name for u in train] == ["4"]  # "yes" is held out, so the other "yes" is not trained on


def test_long_recordings_are_tested_on_but_not_trained_on(tmp_path):
    write_folder(tmp_path, {name: f": {name}" for name in ("a", "abc", "b")})
    for name in ("abc", "b"):
        (tmp_path / f"{name}.wav").write_bytes(tone_bytes(3.0))
    corpus = data.load(None, [tmp_path], max_seconds=2.0)
    assert [u.name for u in corpus.train] == ["a"]
    assert [u.name for u in corpus.heldout] == ["abc"]  # smallest crc32 of the three
    assert corpus.left_out == ["b: 3.0 s, too long to train on"]
    with pytest.raises(ValueError, match=r"--max-seconds 0\.5"):
        data.load(None, [tmp_path], max_seconds=0.5)


def test_reverberation_is_cut():
    quiet = np.full(RATE, 0.005, np.float32)
    quiet[: RATE // 2] = 1.0
    assert len(data._without_tail(quiet, RATE)) == RATE // 2 + RATE // 10
    assert len(data._without_tail(np.zeros(RATE, np.float32), RATE)) == RATE


def test_data_is_kept_outside_the_repository(monkeypatch):
    monkeypatch.delenv("RNNT_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere/cache")
    assert fetch.data_dir() == Path("/somewhere/cache/rnnt")
    monkeypatch.setenv("RNNT_DATA", "/elsewhere")
    assert fetch.data_dir() == Path("/elsewhere")
