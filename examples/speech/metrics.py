"""Error rates of recognised text.

    rate = (substitutions + deletions + insertions) / units in the reference, summed over all utterances

Units are characters (CER, spaces included) or words (WER).  A rate may exceed 1: insertions are not bounded by
the reference.  Before: decode.py.  After: trainer.py prints them.
"""

from collections.abc import Sequence


def edit_distance(reference: Sequence[str], hypothesis: Sequence[str]) -> int:
    """Least number of substitutions, deletions and insertions that turn `reference` into `hypothesis`."""
    previous = list(range(len(hypothesis) + 1))
    for row, unit in enumerate(reference, start=1):
        current = [row]
        for column, guess in enumerate(hypothesis, start=1):
            substituted = previous[column - 1] + (unit != guess)
            current.append(min(substituted, previous[column] + 1, current[-1] + 1))
        previous = current
    return previous[-1]


def character_error_rate(references: Sequence[str], hypotheses: Sequence[str]) -> float:
    """CER of pairs of texts, weighted by the references' lengths."""
    return _rate([list(text) for text in references], [list(text) for text in hypotheses])


def word_error_rate(references: Sequence[str], hypotheses: Sequence[str]) -> float:
    """WER of pairs of texts, weighted by the references' lengths.  Words are separated by white space."""
    return _rate([text.split() for text in references], [text.split() for text in hypotheses])


def _rate(references: Sequence[Sequence[str]], hypotheses: Sequence[Sequence[str]]) -> float:
    if len(references) != len(hypotheses):
        raise ValueError(f"hypotheses: expected {len(references)}, one for each reference, got {len(hypotheses)}")
    units = sum(len(reference) for reference in references)
    if units == 0:
        raise ValueError("references: expected at least one unit of text, got none")
    return sum(map(edit_distance, references, hypotheses)) / units
