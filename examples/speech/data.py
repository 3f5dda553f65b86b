"""Corpora as utterances: samples with their text, split into training and held-out.

    asterisk     English telephone prompts, one voice, 8 kHz, 22.8 minutes        (Debian packages, see fetch.py)
    fillets-cs   Czech game dialogues, two main voices, 22 and 44 kHz, 96 minutes  (needs soundfile)
    fillets-nl   Dutch game dialogues, two voices, 22 kHz, 90 minutes              (needs soundfile)
    folder       your own: a folder of .wav files and one transcript.txt (or .tsv), UTF-8, one line a recording:
                     name: text          or          name<TAB>text
                 where name is the .wav file's path below the folder, with or without `.wav`.  Blank lines and lines
                 that start with `#` are skipped.  Write numbers and signs as words, as they are spoken.

Text becomes lower-case letters, apostrophes and single spaces.  Split: an utterance is held out when the crc32 of
its text (Fillets: of its level) is divisible by ten, and no text that is held out is trained on.
Before: sources.py.  After: batches.py.
"""

import gzip
import re
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.speech import fetch
from examples.speech.sources import Samples, read_members, read_ogg, read_wav

CORPORA = ("asterisk", "fillets-cs", "fillets-nl", "folder")
MIN_SECONDS = 0.06  # one encoder frame: four log-mel frames of 25 ms, 10 ms apart, are 55 ms long
MAX_CHARACTERS_PER_SECOND = 40.0  # nobody speaks faster: the text belongs to another recording

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_PUNCTUATION = '.,;:!?…-–—"„“”«»‚‘`´'  # noqa: RUF001  (quotation marks and dashes, as transcripts have them)
_LETTERS = {
    "asterisk": "abcdefghijklmnopqrstuvwxyz'",
    "fillets-cs": "aábcčdďeéěfghiíjklmnňoópqrřsštťuúůvwxyýzž",
    "fillets-nl": "abcdefghijklmnopqrstuvwxyz'",
}


@dataclass(frozen=True)
class Utterance:
    """One recording: samples [N] float32 in [-1, 1], rate in Hz, normalised text; a group is held out as a whole."""

    name: str
    text: str
    samples: Samples
    rate: int
    group: str

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate


@dataclass(frozen=True)
class Corpus:
    """What one training run sees; `left_out` gives a reason for every recording that is not used."""

    name: str
    train: list[Utterance]
    heldout: list[Utterance]
    left_out: list[str]

    def summary(self) -> str:
        parts = [
            f"{title} {len(part)} utterances, {sum(u.seconds for u in part) / 60:.1f} min, "
            f"{sum(len(u.text) for u in part)} characters"
            for title, part in (("train", self.train), ("held out", self.heldout))
        ]
        return f"{self.name}: {'; '.join(parts)}; left out {len(self.left_out)}"


def load(corpus: str | None, data: Sequence[Path] = (), max_seconds: float = 15.0, skip_bad: bool = False) -> Corpus:
    """Read and split a corpus.

    corpus: one of `CORPORA`; None takes 'folder' where `data` is a folder of wavs, else 'asterisk'.
    data: .deb files, a folder that holds them or that they are unpacked below, or your own folder; empty looks where
        fetch.py downloads to.
    max_seconds: longer recordings are left out of training (a lattice grows with the square of the duration); held-out
        ones are kept, since decoding takes any length.
    skip_bad: in your own folder, leave out what cannot be used; otherwise it is an error.  The packaged corpora hold
        known bad lines (tones, figures), which are always left out.
    Raises `FileNotFoundError` or `ValueError` that say what is missing or wrong and what to do.
    """
    corpus, sources = find_sources(corpus, data)
    problems: list[str] = []
    reader = {"asterisk": _asterisk, "folder": _folder}.get(corpus)
    utterances = list(
        reader(sources, problems) if reader else _fillets(corpus.removeprefix("fillets-"), sources, problems)
    )
    problems += [problem for u in utterances if (problem := _implausible(u))]
    if problems and corpus == "folder" and not skip_bad:
        shown = "\n  ".join(problems[:10])
        raise ValueError(f"{len(problems)} recordings cannot be used (--skip-bad leaves them out):\n  {shown}")
    train, heldout = split([u for u in utterances if not _implausible(u)])
    problems += [f"{u.name}: {u.seconds:.1f} s, too long to train on" for u in train if u.seconds > max_seconds]
    train = [u for u in train if u.seconds <= max_seconds]
    if not train:
        raise ValueError(f"--max-seconds {max_seconds:g}: expected some recordings that short to train on, got none")
    return Corpus(corpus, train, heldout, problems)


def split(utterances: Sequence[Utterance]) -> tuple[list[Utterance], list[Utterance]]:
    """(train, held-out): a tenth of the groups is held out, and their texts occur in no training utterance."""
    if not utterances:
        raise ValueError("expected at least two usable recordings with different texts, got none")
    held = {u.group for u in utterances if zlib.crc32(u.group.encode()) % 10 == 0}
    if not held:  # few recordings: hold out the group that comes first by the same hash
        held = {min((u.group for u in utterances), key=lambda group: zlib.crc32(group.encode()))}
    heldout = [u for u in utterances if u.group in held]
    texts = {u.text for u in heldout}
    train = [u for u in utterances if u.group not in held and u.text not in texts]
    if not train:
        raise ValueError(f"expected recordings of at least two different texts, got {len(utterances)} of one")
    return train, heldout


def normalise(text: str, letters: str | None = None) -> str:
    """Lower-case letters, apostrophes and single spaces; punctuation separates words.

    letters: the characters allowed beside spaces; None allows every letter and the apostrophe.
    Raises `ValueError` for a character that stands for something spoken but is no letter: figures, signs, brackets.
    """
    cleaned = []
    for character in unicodedata.normalize("NFC", text).lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"):
        if character in letters if letters is not None else (_is_letter(character) or character == "'"):
            cleaned.append(character)
        elif character in _PUNCTUATION or character == "'" or character.isspace():
            cleaned.append(" ")
        else:
            raise ValueError(f"character {character!r} is outside the alphabet: write what is spoken in letters")
    result = " ".join("".join(cleaned).split())
    if not result:
        raise ValueError("the text is empty")
    return result


def _is_letter(character: str) -> bool:
    """Letters and the marks that some scripts write beside them."""
    return unicodedata.category(character)[0] in "LM"


def find_sources(corpus: str | None, data: Sequence[Path]) -> tuple[str, list[Path]]:
    """The corpus's name and what to read it from: .deb files, a root that packages are unpacked below, or a folder."""
    if not data:
        if corpus == "folder":
            raise ValueError("--data: expected the folder of .wav files that the run is on, got nothing")
        return corpus or "asterisk", fetch.locate(corpus or "asterisk")
    for path in data:
        if not path.exists():
            raise FileNotFoundError(f"--data {path}: no such file or folder")
    if len(data) > 1 or data[0].is_file():
        return _package_files(corpus or "asterisk", data)
    folder = data[0]
    packages = [] if corpus == "folder" else sorted(folder.glob("*.deb"))
    if packages:
        corpus = corpus or "asterisk"
        found = fetch.debs_in(folder, corpus)
        if not found:
            missing = [p.name for p in fetch.PACKAGES[corpus] if fetch.find_deb(folder, p) is None]
            raise FileNotFoundError(f"--data {folder}: no {' and no '.join(missing)} .deb\n{fetch.ways_to_get(corpus)}")
        return corpus, found
    if corpus != "folder" and fetch.unpacked_in(folder, corpus or "asterisk"):
        return corpus or "asterisk", [folder]
    if corpus in (None, "folder"):
        return "folder", [folder]
    raise FileNotFoundError(f"--data {folder}: holds no packages of '{corpus}'\n{fetch.ways_to_get(corpus)}")


def _package_files(corpus: str, data: Sequence[Path]) -> tuple[str, list[Path]]:
    if corpus == "folder":
        raise ValueError(f"--corpus folder: expected one folder in --data, got {', '.join(map(str, data))}")
    for path in data:
        if path.is_dir():
            raise ValueError(f"--data: expected .deb files or one folder, got several paths with the folder {path}")
        known = [package for package in fetch.PACKAGES[corpus] if package.filename == path.name]
        if known:
            fetch.verify(path, known[0])
    return corpus, list(data)


def _asterisk(sources: list[Path], problems: list[str]) -> Iterator[Utterance]:
    root = r"usr/share/asterisk/sounds/en_US_f_Allison/"
    members = read_members(sources, root + r".*\.wav|usr/share/doc/asterisk-core-sounds-en/core-sounds-en\.txt\.gz")
    audio = {name.removeprefix(root)[:-4]: content for name, content in members.items() if name.endswith(".wav")}
    texts = [content for name, content in members.items() if name.endswith(".txt.gz")]
    if not audio or not texts:
        raise FileNotFoundError(
            f"{', '.join(map(str, sources))}: no {'.wav files' if texts else 'transcripts'} of 'asterisk' inside: "
            f"both packages are needed\n{fetch.ways_to_get('asterisk')}"
        )
    lines = (line.split(":", 1) for line in gzip.decompress(texts[0]).decode().splitlines() if line[:1] != ";")
    for name, spoken in ((line[0], line[1]) for line in lines if len(line) == 2):
        if name not in audio:
            continue
        try:
            if re.search(r"\d\d|iax", spoken, re.IGNORECASE):
                raise ValueError("a number or abbreviation that can be read in several ways")
            text = normalise(re.sub(r"\d", lambda m: f" {_DIGITS[int(m[0])]} ", spoken), _LETTERS["asterisk"])
        except ValueError as error:
            problems.append(f"{name}: {error}")
            continue
        samples, rate = read_wav(audio[name], f"{name}.wav")
        yield Utterance(name, text, samples, rate, group=text)


def _fillets(language: str, sources: list[Path], problems: list[str]) -> Iterator[Utterance]:
    corpus = f"fillets-{language}"
    root = "usr/share/games/fillets-ng/"
    members = read_members(sources, rf"{root}(script/.*dialogs_{language}\.lua|sound/.*/{language}/.*\.ogg)")
    scripts = {name: content for name, content in members.items() if name.endswith(".lua")}
    if not scripts or len(scripts) == len(members):
        raise FileNotFoundError(
            f"{', '.join(map(str, sources))}: no {'.ogg files' if scripts else 'scripts'} of '{corpus}' inside: "
            f"both packages are needed\n{fetch.ways_to_get(corpus)}"
        )
    string = r'"((?:[^"\\]|\\.)*)"'
    line = re.compile(rf"dialogId\({string},\s*{string},\s*{string}\)\s*dialogStr\({string}\)")
    for script, content in scripts.items():
        level = script.split("/")[-2]
        for name, _, _, spoken in line.findall(content.decode()):
            sound = f"{root}sound/{level}/{language}/{name}.ogg"
            if not members.get(sound):  # not spoken, or an empty file
                continue
            try:
                text = normalise(_plain_letters(spoken) if language == "nl" else spoken, _LETTERS[corpus])
                samples, rate = read_ogg(members[sound], sound)
            except ValueError as error:
                problems.append(f"{level}/{name}: {error}")
                continue
            yield Utterance(f"{level}/{name}", text, _without_tail(samples, rate), rate, group=level)


def _plain_letters(text: str) -> str:
    """Letters without their accents."""
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))


def _without_tail(samples: Samples, rate: int) -> Samples:
    """Samples up to 0.1 s after the last 20 ms that reach 1 % of the loudest ones: what follows is reverberation."""
    length = rate // 50
    blocks = samples[: len(samples) - len(samples) % length].reshape(-1, length)
    level = (blocks**2).mean(1) ** 0.5
    loud = (level > 0.01 * level.max(initial=0)).nonzero()[0]
    return samples[: (loud[-1] + 6) * length] if len(loud) else samples


def _folder(sources: list[Path], problems: list[str]) -> Iterator[Utterance]:
    folder = sources[0]
    wavs = {p.relative_to(folder).as_posix()[:-4]: p for p in sorted(folder.rglob("*")) if p.suffix.lower() == ".wav"}
    if not wavs:
        raise FileNotFoundError(f"--data {folder}: expected .wav files or Debian packages in this folder, got neither")
    transcript = _transcript_file(folder)
    lines: dict[str, tuple[int, str]] = {}
    for name, line in _transcript_lines(transcript, problems):
        if name in lines:
            problems.append(f"{transcript.name} line {line[0]}: {name} is in line {lines[name][0]} already")
        else:
            lines[name] = line
    problems += [f"{name}: in {transcript.name}, but there is no {name}.wav" for name in lines if name not in wavs]
    for name, path in wavs.items():
        if name not in lines:
            problems.append(f"{path.name}: a recording without a line in {transcript.name}")
            continue
        number, spoken = lines[name]
        try:
            text = normalise(spoken)
            samples, rate = read_wav(path.read_bytes(), str(path))
        except ValueError as error:
            problems.append(f"{transcript.name} line {number}, {name}: {error}")
            continue
        yield Utterance(name, text, samples, rate, group=text)


def _transcript_file(folder: Path) -> Path:
    named = [folder / f"transcript.{ending}" for ending in ("txt", "tsv")]
    found = [path for path in named if path.is_file()] or sorted([*folder.glob("*.txt"), *folder.glob("*.tsv")])
    if len(found) == 1:
        return found[0]
    got = ", ".join(path.name for path in found) or "none"
    raise FileNotFoundError(
        f"--data {folder}: expected one transcript.txt with a line 'name: text' for every .wav file, got {got}"
    )


def _transcript_lines(path: Path, problems: list[str]) -> Iterator[tuple[str, tuple[int, str]]]:
    """(name, (line number, text)) of every line."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: expected UTF-8 text, got a byte {error.object[error.start]:#x} at {error.start}"
        ) from error
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        name, separator, text = line.partition("\t") if "\t" in line else line.partition(":")
        if not separator:
            problems.append(f"{path.name} line {number}: expected 'name: text' or 'name<TAB>text', got {line[:60]!r}")
            continue
        yield re.sub(r"\.wav$", "", name.strip(), flags=re.IGNORECASE), (number, text)


def _implausible(utterance: Utterance) -> str | None:
    """Why a recording cannot belong to its text, or None."""
    seconds, characters = utterance.seconds, len(utterance.text)
    if seconds < MIN_SECONDS:
        return (
            f"{utterance.name}: {seconds * 1000:.0f} ms of audio, shorter than one frame ({MIN_SECONDS * 1000:.0f} ms)"
        )
    if characters > MAX_CHARACTERS_PER_SECOND * seconds:
        limit = int(MAX_CHARACTERS_PER_SECOND * seconds)
        return (
            f"{utterance.name}: {characters} characters for {seconds:.2f} s of audio, more than {limit} are implausible"
        )
    return None
